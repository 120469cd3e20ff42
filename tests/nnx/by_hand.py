"""Models written twice in one text: without any dtype (`half=None`), and with it threaded by hand.

`half` is the dtype that the careful author of a mixed-precision model writes into every layer and
onto every input and raw parameter. Its name is not `dtype`, so that a policy cannot set it: under a
policy `half` is None. `careful=True` is that author's version of layers whose own `dtype` rounds in
places where mpjax does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

NORMAL = nnx.initializers.normal(0.3)


def cast(x: Any, dtype: Any) -> Any:
  return x if dtype is None else x.astype(dtype)


def as_stored(args: Any, *, dtype: Any = None, inexact: bool = True) -> Any:
  """What a careful author gives a norm as `promote_dtype`: nothing is rounded but its result."""
  return tuple(None if x is None else jnp.asarray(x) for x in args)


def careful_norm(careful: bool) -> dict[str, Any]:
  return {"promote_dtype": as_stored} if careful else {}


class Mlp(nnx.Module):
  def __init__(self, rngs, half=None, careful=False):
    self.half = half
    self.layers = nnx.List([nnx.Linear(n, 16, dtype=half, rngs=rngs) for n in (12, 16)])
    norm = careful_norm(careful)
    self.norms = nnx.List([nnx.LayerNorm(16, dtype=half, rngs=rngs, **norm) for _ in range(2)])
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(16, 4, dtype=half, rngs=rngs)

  def __call__(self, x):
    x = cast(x, self.half)
    for layer, norm in zip(self.layers, self.norms, strict=True):
      x = self.drop(norm(nnx.gelu(layer(x))))
    return self.head(x)


class HardCoded(nnx.Module):
  """Every layer insists on float32, as the defaults of many published models do."""

  def __init__(self, rngs, half=None, careful=False):
    self.half, dtype = half, half or jnp.float32
    self.conv = nnx.Conv(3, 8, (3, 3), dtype=dtype, rngs=rngs)
    self.norm = nnx.GroupNorm(8, 2, dtype=dtype, rngs=rngs, **careful_norm(careful))
    self.hidden = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(8, 4, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    x = self.norm(nnx.relu(self.conv(cast(x, self.half))))
    return self.head(nnx.relu(self.hidden(x.mean((1, 2)))))


class Residual(nnx.Module):
  def __init__(self, into, out, stride, rngs, half, careful):
    def conv(into, size=3, stride=1):
      return nnx.Conv(into, out, (size, size), stride, use_bias=False, dtype=half, rngs=rngs)

    def norm():
      return nnx.BatchNorm(out, dtype=half, rngs=rngs, **careful_norm(careful))

    self.first, self.second = conv(into, stride=stride), conv(out)
    self.norms = nnx.List([norm(), norm()])
    self.short = None if into == out else nnx.Sequential(conv(into, 1, stride), norm())

  def __call__(self, x):
    y = nnx.relu(self.norms[0](self.first(x)))
    y = self.norms[1](self.second(y))
    return nnx.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nnx.Module):
  def __init__(self, rngs, half=None, careful=False):
    self.half = half
    self.stem = nnx.Conv(3, 4, (3, 3), use_bias=False, dtype=half, rngs=rngs)
    self.norm = nnx.BatchNorm(4, dtype=half, rngs=rngs, **careful_norm(careful))
    self.blocks = nnx.List(
      [Residual(4, 4, 1, rngs, half, careful), Residual(4, 8, 2, rngs, half, careful)]
    )
    self.head = nnx.Linear(8, 4, dtype=half, rngs=rngs)

  def __call__(self, x):
    x = nnx.relu(self.norm(self.stem(cast(x, self.half))))
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((1, 2)))


def attention_in_half(query, key, value, *, dtype, is_causal, **options):
  """Attention as written by hand where `jax.nn` fails: products in half, softmax in float32."""
  assert is_causal
  query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
  logits = jnp.einsum("bthd,bshd->bhts", query, key).astype(jnp.float32)
  seen = jnp.broadcast_to(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits.shape)
  weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(jnp.float32).min)).astype(dtype)
  return jnp.einsum("bhts,bshd->bthd", weights, value)


class TransformerBlock(nnx.Module):
  def __init__(self, rngs, half=None, careful=False):
    self.half = half
    own = {"attention_fn": attention_in_half} if careful and half == jnp.float16 else {}
    norm = careful_norm(careful)
    self.norms = nnx.List([nnx.LayerNorm(8, dtype=half, rngs=rngs, **norm) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(2, 8, dtype=half, decode=False, rngs=rngs, **own)
    self.up = nnx.Linear(8, 16, dtype=half, rngs=rngs)
    self.down = nnx.Linear(16, 8, dtype=half, rngs=rngs)

  def __call__(self, x):
    x = cast(x, self.half)
    x = x + self.attention(self.norms[0](x), is_causal=True)
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class CarefulLstm(nnx.OptimizedLSTMCell):
  """A cell that hands its output on in half; Flax's own hands on the float32 of the carry."""

  def __call__(self, carry, inputs):
    carry, out = super().__call__(carry, inputs)
    return carry, cast(out, self.dtype)


class CarefulGru(nnx.GRUCell):
  """A cell that keeps a float32 carry and hands its output on in half."""

  def __call__(self, carry, inputs):
    carry, out = super().__call__(carry, inputs)
    return carry, cast(out, self.dtype)


class Recurrent(nnx.Module):
  def __init__(self, rngs, gru=False, half=None, careful=False):
    self.half = half
    plain, own = (nnx.GRUCell, CarefulGru) if gru else (nnx.OptimizedLSTMCell, CarefulLstm)
    self.rnn = nnx.RNN((own if careful else plain)(5, 8, dtype=half, rngs=rngs))
    self.head = nnx.Linear(8, 4, dtype=half, rngs=rngs)

  def __call__(self, x):
    return self.head(self.rnn(cast(x, self.half)))


class CarefulEmbed(nnx.Embed):
  """A table that is gathered first and cast afterwards."""

  def __call__(self, ids):
    return cast(jnp.take(self.embedding[...], ids, axis=0), self.dtype)


class GatedBlock(nnx.Module):
  """Mixes each position with those before it by one learned kernel, then an MLP."""

  def __init__(self, rngs, half, careful):
    self.half = half
    norm = careful_norm(careful)
    self.norms = nnx.List([nnx.RMSNorm(8, dtype=half, rngs=rngs, **norm) for _ in range(2)])
    self.mix = nnx.Param(NORMAL(rngs.params(), (6, 6)))
    self.up = nnx.Linear(8, 16, dtype=half, rngs=rngs)
    self.down = nnx.Linear(16, 8, dtype=half, rngs=rngs)

  def __call__(self, x):
    kernel = jnp.tril(cast(self.mix[...], self.half))
    x = x + jnp.einsum("ts,bsd->btd", kernel, self.norms[0](x))
    return x + self.down(nnx.silu(self.up(self.norms[1](x))))


class LanguageModel(nnx.Module):
  """A stack under `nnx.scan` over `nnx.remat`, with one table at both ends."""

  def __init__(self, rngs, half=None, careful=False, remat=True):
    self.half, self.remat = half, remat
    self.embed = (CarefulEmbed if careful else nnx.Embed)(11, 8, dtype=half, rngs=rngs)
    make = nnx.vmap(lambda rngs: GatedBlock(rngs, half, careful))
    self.stack = make(rngs.split(3))
    self.norm = nnx.RMSNorm(8, dtype=half, rngs=rngs, **careful_norm(careful))

  def __call__(self, ids):
    def step(x, block):
      return block(x)

    step = nnx.remat(step, prevent_cse=False) if self.remat else step
    scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    x = scan(self.embed(ids), self.stack)
    return self.embed.attend(self.norm(x))


class Mixer(nnx.Module):
  """MLP-Mixer from raw parameters, a token mixer and a channel mixer."""

  def __init__(self, rngs, half=None, careful=False):
    self.half = half
    shapes = {"patch": (12, 8), "tokens_in": (4, 4), "tokens_out": (4, 4)}
    shapes |= {"channels_in": (8, 8), "channels_out": (8, 8)}
    for name, shape in shapes.items():
      setattr(self, name, nnx.Param(NORMAL(rngs.params(), shape)))
    self.norm = nnx.LayerNorm(8, dtype=half, rngs=rngs, **careful_norm(careful))
    self.head = nnx.Linear(8, 3, dtype=half, rngs=rngs)

  def __call__(self, x):
    def use(name):
      return cast(getattr(self, name)[...], self.half)

    x = cast(x, self.half) @ use("patch")
    mixed = nnx.gelu(jnp.swapaxes(x, 1, 2) @ use("tokens_in")) @ use("tokens_out")
    x = x + jnp.swapaxes(mixed, 1, 2)
    x = x + nnx.gelu(self.norm(x) @ use("channels_in")) @ use("channels_out")
    return self.head(x.mean(1))
