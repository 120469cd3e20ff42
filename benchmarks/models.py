"""The models that are measured, with their dtypes threaded by hand or not at all.

Each takes one field, `dtype`. Left at None the model is plain float32, and it is this model that
`with_policy` gets. With a half dtype it is the mixed-precision model that a careful user writes:
every layer computes in it, norms take their statistics and attention its softmax in float32, the
weights of attention are cast back before they meet the values, an embedding is gathered before it
is cast (cast first, a frequent token would add up its gradient in half), and the logits are handed
on in float32. Both therefore round at the same places, which `test_benchmarks.py` asserts bit for
bit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Mlp(nn.Module):
  """Dense layers with a norm each. Input [batch, features]."""

  width: int
  layers: int
  classes: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    for _ in range(self.layers):
      x = nn.Dense(self.width, dtype=self.dtype)(x)
      x = nn.relu(nn.LayerNorm(dtype=self.dtype)(x))
    return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)


class Block(nn.Module):
  """A residual block: two convolutions, or three with a bottleneck."""

  features: int
  stride: int
  bottleneck: bool
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    def conv(features, size, stride=1):
      return nn.Conv(features, (size, size), stride, use_bias=False, dtype=self.dtype)

    def norm(**kwargs):
      return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, **kwargs)

    wide = 4 * self.features if self.bottleneck else self.features
    y = x
    if self.bottleneck:
      y = nn.relu(norm()(conv(self.features, 1)(y)))
    y = nn.relu(norm()(conv(self.features, 3, self.stride)(y)))
    last = conv(wide, 1) if self.bottleneck else conv(wide, 3)
    y = norm(scale_init=nn.initializers.zeros)(last(y))
    if x.shape != y.shape:
      x = norm()(conv(wide, 1, self.stride)(x))
    return nn.relu(x + y)


class ResNet(nn.Module):
  """A residual network, in training. Input [batch, height, width, 3]."""

  stages: tuple[int, ...]
  width: int
  classes: int
  bottleneck: bool
  large_images: bool
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    size, stride = (7, 2) if self.large_images else (3, 1)
    x = nn.Conv(self.width, (size, size), stride, use_bias=False, dtype=self.dtype)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
    if self.large_images:
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    for stage, blocks in enumerate(self.stages):
      for block in range(blocks):
        step = 2 if stage > 0 and block == 0 else 1
        x = Block(self.width * 2**stage, step, self.bottleneck, self.dtype)(x)
    x = jnp.mean(x, axis=(1, 2))
    return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)


def _einsum():
  return jnp.einsum


def _cast_back_einsum():
  return lambda subscripts, weights, v: jnp.einsum(subscripts, weights.astype(v.dtype), v)


def fused_attention(query, key, value, *, implementation, cast_to=None):
  """Causal attention as one operation of JAX, for Flax's `attention_fn`.

  Args:
    query: `[batch, length, heads, features]`, as `key` and `value`.
    implementation: "cudnn", which takes no float32, or "xla".
    cast_to: the dtype of its operands. A policy casts them by itself; autocast, which traces a
      function as it is, does not get past an operation that refuses float32. (Flax passes what an
      `attention_fn` has of its own arguments, `dtype` among them.)
  """
  operands = [x if cast_to is None else x.astype(cast_to) for x in (query, key, value)]
  return jax.nn.dot_product_attention(*operands, is_causal=True, implementation=implementation)


class Experts(nn.Module):
  """What takes the place of a layer's MLP: each token goes to two of several, by their gates."""

  experts: int
  dtype: Any = None
  float32_softmax: bool = True

  @nn.compact
  def __call__(self, x):
    tokens, chosen_each = x.reshape(-1, x.shape[-1]), 2
    logits = nn.Dense(self.experts, use_bias=False, dtype=self.dtype)(tokens)
    gates = jax.nn.softmax(logits.astype(jnp.float32) if self.float32_softmax else logits)
    gates, chosen = jax.lax.top_k(gates, chosen_each)
    gates = (gates / gates.sum(-1, keepdims=True)).astype(self.dtype or jnp.float32)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=self.experts).astype(jnp.int32)
    init = nn.initializers.lecun_normal(batch_axis=0)
    width, wide = tokens.shape[-1], 2 * tokens.shape[-1]
    up = self.param("up", init, (self.experts, width, wide))
    down = self.param("down", init, (self.experts, wide, width))
    rows, up, down = (
      a if self.dtype is None else a.astype(self.dtype)
      for a in (tokens[order // chosen_each], up, down)
    )
    y = jax.lax.ragged_dot(nn.gelu(jax.lax.ragged_dot(rows, up, sizes)), down, sizes)
    y = y[jnp.argsort(order)].reshape(-1, chosen_each, width)
    return jnp.einsum("nkd,nk->nd", y, gates).reshape(x.shape)


class OwnLayerNorm(nn.Module):
  """A layer norm as it is written out in the code of many models, statistics in float32."""

  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
    bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale + bias).astype(self.dtype or jnp.float32)


class Layer(nn.Module):
  """A layer of a transformer.

  Fields:
    experts: how many there are in the place of its MLP; 0 for none.
    float32_softmax: whether softmax is float32 if there is a `dtype`.
    norm: the class of its two norms.
    norm_first: whether they are before attention and the MLP; else after the sums.
  """

  heads: int
  dtype: Any = None
  attention: Callable[..., Any] | None = None
  experts: int = 0
  float32_softmax: bool = True
  norm: type[nn.Module] = nn.LayerNorm
  norm_first: bool = True

  @nn.compact
  def __call__(self, x, mask):
    by_hand = {}
    if self.attention is not None:
      by_hand = {"attention_fn": self.attention}
    elif self.dtype is not None and self.float32_softmax:
      by_hand = {
        "force_fp32_for_softmax": True,
        "qk_attn_weights_einsum_cls": _einsum,
        "attn_weights_value_einsum_cls": _cast_back_einsum,
      }
    norms = [self.norm(dtype=self.dtype) for _ in range(2)]
    y = norms[0](x) if self.norm_first else x
    y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, **by_hand)(y, mask=mask)
    x = x + y if self.norm_first else norms[0](x + y)
    y = norms[1](x) if self.norm_first else x
    if self.experts:
      y = Experts(self.experts, self.dtype, self.float32_softmax)(y)
    else:
      y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
      y = nn.Dense(x.shape[-1], dtype=self.dtype)(y)
    return x + y if self.norm_first else norms[1](x + y)


class Gpt(nn.Module):
  """A causal language model. Input: tokens [batch, length].

  Fields:
    attention: a causal `attention_fn` for its layers; None takes Flax's, with a mask.
    norm, norm_first: see `Layer`; the last norm is an `nn.LayerNorm`.
    embedded: whether positions are an `nn.Embed`, and not a parameter.
  """

  layers: int
  width: int
  heads: int
  vocabulary: int
  dtype: Any = None
  attention: Callable[..., Any] | None = None
  norm: type[nn.Module] = nn.LayerNorm
  norm_first: bool = True
  embedded: bool = False

  @nn.compact
  def __call__(self, tokens):
    length = tokens.shape[1]
    dtype = self.dtype or jnp.float32
    x = nn.Embed(self.vocabulary, self.width)(tokens).astype(dtype)
    if self.embedded:
      places = nn.Embed(length, self.width)(jnp.arange(length)[None])
    else:
      places = self.param("places", nn.initializers.normal(0.02), (1, length, self.width))
    x += places.astype(dtype)
    mask = nn.make_causal_mask(tokens, dtype=bool)
    x = nn.LayerNorm(dtype=self.dtype)(self.through_layers(x, mask))
    return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x).astype(jnp.float32)

  def through_layers(self, x, mask):
    """Returns what comes out of the layers."""
    norms = {"norm": self.norm, "norm_first": self.norm_first}
    for _ in range(self.layers):
      x = Layer(self.heads, self.dtype, self.attention, **norms)(x, mask)
    return x


class Mixture(nn.Module):
  """A classifier whose only large layer has experts. Input [batch, features]."""

  experts: int
  classes: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm(dtype=self.dtype)(Experts(self.experts, self.dtype)(x))
    return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)


class LoopedGpt(Gpt):
  """The same with one layer, which `nn.scan` repeats; the backward pass reads what it saved."""

  def through_layers(self, x, mask):
    """Returns what comes out of the layers."""
    repeated = nn.scan(
      lambda layer, x, _: (layer(x, mask), None),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=self.layers,
    )
    norms = {"norm": self.norm, "norm_first": self.norm_first}
    return repeated(Layer(self.heads, self.dtype, self.attention, **norms), x, None)[0]


class ScannedGpt(Gpt):
  """The same with one layer, which `nn.scan` repeats and the backward pass computes once more.

  Fields:
    experts, float32_softmax: see `Layer`.
    causal: whether there is a mask.
    rows: on which devices the rows of activations are, if on several.
  """

  experts: int = 0
  float32_softmax: bool = True
  causal: bool = True
  rows: jax.sharding.Sharding | None = None

  def through_layers(self, x, mask):
    """Returns what comes out of the layers."""

    def stay(x):
      return x if self.rows is None else jax.lax.with_sharding_constraint(x, self.rows)

    def recomputed(layer, x, _):
      return layer(stay(x), mask if self.causal else None), None

    repeated = nn.scan(
      nn.remat(recomputed, prevent_cse=False),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=self.layers,
    )
    norms = {"norm": self.norm, "norm_first": self.norm_first}
    more = {"experts": self.experts, "float32_softmax": self.float32_softmax}
    layer = Layer(self.heads, self.dtype, self.attention, **more, **norms)
    return stay(repeated(layer, x, None)[0])


class Lstm(nn.Module):
  """A recurrent network that classifies sequences. Input [batch, length, features]."""

  width: int
  classes: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
    return nn.Dense(self.classes, dtype=self.dtype)(x[:, -1]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A model at one size.

  Fields:
    make: `dtype -> module`.
    inputs: shape and dtype of the input.
    classes: how many labels there are.
    outputs: shape of the labels.
  """

  make: Callable[..., nn.Module]
  inputs: jax.ShapeDtypeStruct
  classes: int
  outputs: tuple[int, ...]

  def data(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns a random input and random labels."""
    one, two = jax.random.split(jax.random.key(seed))
    labels = jax.random.randint(two, self.outputs, 0, self.classes)
    if jnp.issubdtype(self.inputs.dtype, jnp.integer):
      return jax.random.randint(one, self.inputs.shape, 0, self.classes), labels
    return jax.random.normal(one, self.inputs.shape, self.inputs.dtype), labels


def _mlp(batch: int, features: int, **fields: int) -> Case:
  return Case(
    make=lambda dtype=None: Mlp(**fields, dtype=dtype),
    inputs=jax.ShapeDtypeStruct((batch, features), jnp.float32),
    classes=fields["classes"],
    outputs=(batch,),
  )


def _mixture(batch: int, features: int, **fields: int) -> Case:
  return Case(
    make=lambda dtype=None: Mixture(**fields, dtype=dtype),
    inputs=jax.ShapeDtypeStruct((batch, features), jnp.float32),
    classes=fields["classes"],
    outputs=(batch,),
  )


def _resnet(batch: int, size: int, **fields: Any) -> Case:
  return Case(
    make=lambda dtype=None: ResNet(**fields, dtype=dtype),
    inputs=jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32),
    classes=fields["classes"],
    outputs=(batch,),
  )


def _gpt(batch: int, length: int, kind: type[Gpt] = Gpt, **fields: Any) -> Case:
  return Case(
    make=lambda dtype=None: kind(**fields, dtype=dtype),
    inputs=jax.ShapeDtypeStruct((batch, length), jnp.int32),
    classes=fields["vocabulary"],
    outputs=(batch, length),
  )


def _lstm(batch: int, length: int, features: int, **fields: int) -> Case:
  return Case(
    make=lambda dtype=None: Lstm(**fields, dtype=dtype),
    inputs=jax.ShapeDtypeStruct((batch, length, features), jnp.float32),
    classes=fields["classes"],
    outputs=(batch,),
  )


_SMALL_RESNET = {"bottleneck": False, "large_images": False, "classes": 10}
_RESNET_50 = {"bottleneck": True, "large_images": True, "classes": 1000}
_OWN_NORMS_AFTER = {"norm": OwnLayerNorm, "norm_first": False}
_GPT_OF_8 = {"layers": 8, "width": 1024, "heads": 16, "vocabulary": 32000}
_GPT_OF_4 = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 1024}

SIZES: Mapping[str, Mapping[str, Case]] = {
  "tiny": {
    "mlp": _mlp(4, 8, width=16, layers=1, classes=3),
    "resnet": _resnet(2, 8, stages=(1, 1), width=8, **_SMALL_RESNET),
    "gpt": _gpt(2, 8, layers=1, width=16, heads=2, vocabulary=11),
    "wide": _gpt(2, 8, layers=1, width=32, heads=2, vocabulary=11),
    "lstm": _lstm(2, 3, 8, width=16, classes=3),
    "after": _gpt(2, 8, layers=1, width=16, heads=2, vocabulary=11, **_OWN_NORMS_AFTER),
    "experts": _mixture(4, 8, experts=2, classes=3),
  },
  "cpu": {
    "mlp": _mlp(256, 784, width=1024, layers=3, classes=10),
    "resnet": _resnet(16, 32, stages=(2, 2, 2), width=16, **_SMALL_RESNET),
    "gpt": _gpt(4, 128, layers=4, width=128, heads=4, vocabulary=1024),
    "wide": _gpt(2, 64, layers=1, width=512, heads=4, vocabulary=1024),
    "lstm": _lstm(32, 32, 128, width=256, classes=10),
    "after": _gpt(4, 128, layers=4, width=128, heads=4, vocabulary=1024, **_OWN_NORMS_AFTER),
    "experts": _mixture(256, 256, experts=4, classes=10),
  },
  "quick": {
    "pre-norm": _gpt(8, 512, **_GPT_OF_4, embedded=True),
    "post-norm": _gpt(8, 512, **_GPT_OF_4, embedded=True, norm_first=False),
    "own post-norm": _gpt(8, 512, **_GPT_OF_4, embedded=True, **_OWN_NORMS_AFTER),
    "positions": _gpt(8, 512, **_GPT_OF_4),
    "scan": _gpt(8, 512, LoopedGpt, **_GPT_OF_4, embedded=True),
    "scan and remat": _gpt(8, 512, ScannedGpt, **_GPT_OF_4, embedded=True),
    "convolutions": _resnet(64, 32, stages=(2, 2, 2), width=64, **_SMALL_RESNET),
  },
  "gpu": {
    "mlp": _mlp(8192, 4096, width=8192, layers=6, classes=1024),
    "resnet": _resnet(256, 224, stages=(3, 4, 6, 3), width=64, **_RESNET_50),
    "gpt": _gpt(8, 1024, layers=24, width=1024, heads=16, vocabulary=50304),
    "wide": _gpt(8, 1024, layers=2, width=4096, heads=32, vocabulary=50304),
    "lstm": _lstm(256, 64, 2048, width=2048, classes=1024),
    "after": _gpt(8, 1024, layers=8, width=1024, heads=16, vocabulary=8192, **_OWN_NORMS_AFTER),
    "experts": _mixture(8192, 4096, experts=8, classes=1024),
  },
  "tpu": {
    "gpt": _gpt(8, 1024, ScannedGpt, **_GPT_OF_8),
    "mlp": _mlp(8192, 4096, width=8192, layers=4, classes=1024),
    "encoder": _gpt(8, 1024, ScannedGpt, **_GPT_OF_8, causal=False),
    "embedded": _gpt(8, 1024, ScannedGpt, **_GPT_OF_8, embedded=True),
    "moe": _gpt(8, 1024, ScannedGpt, **_GPT_OF_8, experts=8),
    "resnet": _resnet(64, 224, stages=(3, 4, 6, 3), width=64, **_RESNET_50),
  },
}
"""The same code at several sizes: for the tests, for two cores, for a GPU's compiler to take
seconds, and for a GPU, where `resnet` is ResNet-50 (25.6 million parameters), `gpt` has 24 layers
(406 million), and `wide` is a slice of a model with 7 billion. Of the quick ones only `positions`
has positions that are a parameter. What fits on a TPU v5e has layers that are scanned; `moe` has
experts."""
