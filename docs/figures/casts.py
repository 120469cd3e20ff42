"""Where casts are in a transformer block under mixed_bfloat16: read from its jaxpr."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import mpjax
from mpjax._diagnostics.arguments import trace
from mpjax._diagnostics.audit.graph import Graph

class Block(nn.Module):
  """A block of a transformer, norms first, in plain Flax."""

  heads: int = 4

  @nn.compact
  def __call__(self, x):
    size = (self.heads, x.shape[-1] // self.heads)
    y = nn.LayerNorm(name="norm_1")(x)
    q, k, v = (nn.DenseGeneral(size, name=name)(y) for name in ("q", "k", "v"))
    with jax.named_scope("scores"):
      scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size[1] ** 0.5
    with jax.named_scope("softmax"):
      weights = nn.softmax(scores)
    with jax.named_scope("mix"):
      mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    y = nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)
    with jax.named_scope("add_1"):
      x = x + y
    y = nn.LayerNorm(name="norm_2")(x)
    y = nn.Dense(4 * x.shape[-1], name="up")(y)
    with jax.named_scope("gelu"):
      y = nn.gelu(y)
    y = nn.Dense(x.shape[-1], name="down")(y)
    with jax.named_scope("add_2"):
      return x + y

if __name__=="__main__":
  x = jax.ShapeDtypeStruct((2, 16, 64), "float32")
  v = jax.eval_shape(Block().init, jax.random.key(0), x)
  m = mpjax.linen.with_policy(Block(), "mixed_bfloat16")
  program, names = trace(m.apply, (v, x), {}, "figures")
  g = Graph(program, [n.name for n in names])
  for op in g.operations:
    print(op.where.path, op.name, [(str(o.dtype), o.kind, o.label or (o.made_by.where.path+":"+o.made_by.name if o.made_by else "")) for o in op.operands], [str(r.dtype) for r in op.results])
