"""Models written twice in one text: without any dtype (`half=None`), and with it threaded by hand.

`half` is the dtype that the careful author of a mixed-precision model writes into every layer and
onto every input and raw parameter; under a policy it is None. `careful=True` is that author's
version of layers whose own `dtype` rounds in places where mpjax does not. Each is a function that
returns the model in Linen and in NNX.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.models import parts
from tests.models.parts import Part, module

NORMAL = nn.initializers.normal(0.3)


def cast(x: Any, dtype: Any) -> Any:
  return x if dtype is None else x.astype(dtype)


def as_stored(args: Any, *, dtype: Any = None, inexact: bool = True) -> Any:
  """What a careful author gives a norm as `promote_dtype`: nothing is rounded but its result."""
  return tuple(None if x is None else jnp.asarray(x) for x in args)


def norm(kind: str, features: int, *sizes: int, half: Any, careful: bool, **options: Any) -> Part:
  """Returns a norm; only that of NNX rounds its parameters, which a careful author avoids."""
  of_nnx = {"promote_dtype": as_stored} if careful else None
  return parts.norm(kind, features, *sizes, dtype=half, of_nnx=of_nnx, **options)


def dense(inputs: int, features: int, half: Any) -> Part:
  return parts.dense(inputs, features, half, bias=True)


def mlp(half: Any = None, careful: bool = False, rate: float = 0.1) -> Part:
  def call(m, x):
    x = cast(x, half)
    x = m.drop(m.norm_1(jax.nn.gelu(m.first(x))))
    x = m.drop(m.norm_2(jax.nn.gelu(m.second(x))))
    return m.head(x)

  norms = {name: norm("LayerNorm", 16, half=half, careful=careful) for name in ("norm_1", "norm_2")}
  return module(
    call,
    first=dense(12, 16, half),
    second=dense(16, 16, half),
    **norms,
    drop=parts.dropout(rate),
    head=dense(16, 4, half),
  )


def hard_coded(half: Any = None, careful: bool = False) -> Part:
  """Every layer insists on float32, as the defaults of many published models do."""
  dtype = half or jnp.float32

  def call(m, x):
    x = m.norm(jax.nn.relu(m.conv(cast(x, half))))
    return m.head(jax.nn.relu(m.hidden(x.mean((1, 2)))))

  return module(
    call,
    conv=parts.conv(3, 8, 3, dtype=dtype),
    norm=norm("GroupNorm", 8, 2, half=dtype, careful=careful),
    hidden=dense(8, 8, dtype),
    head=dense(8, 4, dtype),
  )


def resnet(half: Any = None, careful: bool = False, activation: Any = jax.nn.relu) -> Part:
  def convolved(inputs, features, stride=1, size=3):
    return module(
      lambda m, x: m.norm(m.conv(x)),
      conv=parts.conv(inputs, features, size, stride, use_bias=False, dtype=half),
      norm=norm("BatchNorm", features, half=half, careful=careful, use_running_average=False),
    )

  def residual(m, x):
    y = m.second(activation(m.first(x)))
    return activation(y + (m.short(x) if hasattr(m, "short") else x))

  def call(m, x):
    x = m.larger(m.block(activation(m.stem(cast(x, half)))))
    return m.head(x.mean((1, 2)))

  return module(
    call,
    stem=convolved(3, 4),
    block=module(residual, first=convolved(4, 4), second=convolved(4, 4)),
    larger=module(
      residual, first=convolved(4, 8, 2), second=convolved(8, 8), short=convolved(4, 8, 2, size=1)
    ),
    head=dense(8, 4, half),
  )


class CarefulAttention(nn.Module):
  """Attention as written by hand: every product in half, the softmax in float32."""

  num_heads: int
  dtype: Any

  @nn.compact
  def __call__(self, x, mask):
    def project(name):
      shape = (self.num_heads, x.shape[-1] // self.num_heads)
      return nn.DenseGeneral(shape, dtype=self.dtype, name=name)(x)

    query, key, value = project("query"), project("key"), project("value")
    query = query / jnp.sqrt(query.shape[-1]).astype(self.dtype)
    logits = jnp.einsum("...qhd,...khd->...hqk", query, key)
    logits = jnp.where(mask, logits, jnp.finfo(self.dtype).min)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(self.dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
    return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


def attention_in_half(query, key, value, *, dtype, is_causal, **options):
  """Attention as written by hand where `jax.nn` fails: products in half, softmax in float32."""
  assert is_causal
  query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
  logits = jnp.einsum("bthd,bshd->bhts", query, key).astype(jnp.float32)
  seen = jnp.broadcast_to(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits.shape)
  weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(jnp.float32).min)).astype(dtype)
  return jnp.einsum("bhts,bshd->bthd", weights, value)


def transformer(half: Any = None, careful: bool = False) -> Part:
  own = {"attention_fn": attention_in_half} if careful and half == jnp.float16 else {}
  of_linen = CarefulAttention if careful else nn.MultiHeadDotProductAttention
  attention = Part(
    lambda around: of_linen(2, dtype=half),
    lambda around, rngs: nnx.MultiHeadAttention(2, 16, dtype=half, decode=False, rngs=rngs, **own),
  )

  def call(m, x):
    x, mask = cast(x, half), nn.make_causal_mask(jnp.ones(x.shape[:-1]), dtype=jnp.bool_)
    causal = {"is_causal": True} if isinstance(m, nnx.Module) else {"mask": mask}
    x = x + m.attention(m.norm_1(x), **causal)
    return x + m.down(jax.nn.gelu(m.up(m.norm_2(x))))

  return module(
    call,
    norm_1=norm("LayerNorm", 16, half=half, careful=careful),
    norm_2=norm("LayerNorm", 16, half=half, careful=careful),
    attention=attention,
    up=dense(16, 32, half),
    down=dense(32, 16, half),
  )


def careful_cell(cell: Any) -> Any:
  """Returns a cell that keeps a float32 carry and hands its output on in half."""

  class Careful(cell):
    def __call__(self, carry, inputs):
      new, out = super().__call__(carry, inputs)
      return new, cast(out, self.dtype)

  return Careful


def recurrent(gru: bool = False, half: Any = None, careful: bool = False) -> Part:
  cells = (nn.GRUCell, nnx.GRUCell) if gru else (nn.OptimizedLSTMCell, nnx.OptimizedLSTMCell)
  of_linen, of_nnx = map(careful_cell, cells) if careful else cells
  rnn = Part(
    lambda around: nn.RNN(of_linen(8, dtype=half)),
    lambda around, rngs: nnx.RNN(of_nnx(9, 8, dtype=half, rngs=rngs)),
  )
  return module(lambda m, x: m.head(m.rnn(cast(x, half))), rnn=rnn, head=dense(8, 4, half))


class CarefulEmbed(nn.Module):
  """A table that is gathered first and cast afterwards."""

  num_embeddings: int
  features: int
  dtype: Any

  def setup(self):
    initial = nn.initializers.normal(1.0)
    self.embedding = self.param("embedding", initial, (self.num_embeddings, self.features))

  def __call__(self, ids):
    return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)

  def attend(self, x):
    return jnp.dot(x, self.embedding.astype(self.dtype).T)


class NnxCarefulEmbed(nnx.Embed):
  def __call__(self, ids):
    return cast(jnp.take(self.embedding[...], ids, axis=0), self.dtype)


def gated(half: Any, careful: bool) -> Part:
  """Mixes each position with those before it by one learned kernel, then an MLP.

  In NNX both are added to what they begin with, in Linen the second alone.
  """

  def mixed(m, x):
    kernel = jnp.tril(cast(m.mix[...], half))
    return jnp.einsum("ts,bsd->btd", kernel, m.norm_1(x))

  def mlp(m, x):
    return m.down(jax.nn.silu(m.up(x)))

  def twice(m, x):
    x = x + mixed(m, x)
    return x + mlp(m, m.norm_2(x))

  norms = [norm("RMSNorm", 8, half=half, careful=careful) for _ in range(2)]
  layers = {"norm_1": norms[0], "up": dense(8, 16, half), "down": dense(16, 8, half)}
  kernel = {"mix": (NORMAL, (8, 8))}
  of_linen = module(lambda m, x: x + mlp(m, mixed(m, x)), kernel, **layers)
  return Part(of_linen.linen, module(twice, kernel, norm_2=norms[1], **layers).nnx)


def language_model(half: Any = None, careful: bool = False, remat: bool = True) -> Part:
  """A stack in a loop, under remat, with one table at both ends."""
  of_linen, of_nnx = (CarefulEmbed, NnxCarefulEmbed) if careful else (nn.Embed, nnx.Embed)
  return module(
    lambda m, ids: m.embed.attend(m.norm(m.stack(m.embed(ids)))),
    embed=Part(
      lambda around: of_linen(11, 8, dtype=half),
      lambda around, rngs: of_nnx(11, 8, dtype=half, rngs=rngs),
    ),
    stack=parts.stack(gated(half, careful), 3, remat),
    norm=norm("RMSNorm", 8, half=half, careful=careful),
  )


def mixer(half: Any = None, careful: bool = False) -> Part:
  """MLP-Mixer from raw parameters, a token mixer and a channel mixer."""
  shapes = {"patch": (12, 8), "tokens_in": (8, 8), "tokens_out": (8, 8)}
  shapes |= {"channels_in": (8, 8), "channels_out": (8, 8)}

  def call(m, x):
    def use(name):
      return cast(getattr(m, name)[...], half)

    x = cast(x, half) @ use("patch")
    mixed = jax.nn.gelu(jnp.swapaxes(x, 1, 2) @ use("tokens_in")) @ use("tokens_out")
    x = x + jnp.swapaxes(mixed, 1, 2)
    x = x + jax.nn.gelu(m.norm(x) @ use("channels_in")) @ use("channels_out")
    return m.head(x.mean(1))

  return module(
    call,
    {name: (NORMAL, shape) for name, shape in shapes.items()},
    norm=norm("LayerNorm", 8, half=half, careful=careful),
    head=dense(8, 3, half),
  )


MODELS: Mapping[str, Callable[..., Part]] = {
  "mlp": mlp,
  "hard_coded": hard_coded,
  "resnet": resnet,
  "mixer": mixer,
  "transformer": transformer,
  "lstm": recurrent,
  "gru": functools.partial(recurrent, gru=True),
  "language_model": language_model,
}


def linen(name: str, **options: Any) -> nn.Module:
  return MODELS[name](**options).linen(None)


def of_nnx(name: str, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
  return MODELS[name](**options).nnx(None, rngs)
