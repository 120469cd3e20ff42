"""Every layer that Flax NNX ships, with inputs: one table for several tests."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models.values import integers, normal


class Layer(NamedTuple):
  """One layer and how it is called.

  Fields:
    make: returns the module, given `nnx.Rngs`.
    inputs: its positional arguments.
    products: whether it has any (a norm has none).
    kwargs: its keyword arguments.
  """

  make: Callable[[nnx.Rngs], nnx.Module]
  inputs: tuple[Any, ...]
  products: bool = True
  kwargs: Mapping[str, Any] = types.MappingProxyType({})


class TiedEmbed(nnx.Module):
  """Both uses of one table."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(13, 8, rngs=rngs)

  def __call__(self, ids):
    return self.embed.attend(jnp.tanh(self.embed(ids)))


class Pooled(nnx.Module):
  """The pooling functions, and a convolution between them."""

  def __init__(self, rngs):
    self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)

  def __call__(self, x):
    x = nnx.avg_pool(nnx.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1), "SAME")
    return nnx.pool(self.conv(x), 0.0, jax.lax.add, (2, 2), (1, 1), "SAME")


class DecodeAll(nnx.Module):
  """Attention that sees one position after another, through its cache."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs)
    self.attention.init_cache((2, 4, 8))

  def __call__(self, x):
    return jnp.concatenate([self.attention(x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


class Weighted(nnx.Module):
  """A layer whose weight another one computes."""

  def __init__(self, wrapper, rngs, **fields):
    self.layer = wrapper(nnx.Linear(5, 8, rngs=rngs), rngs=rngs, **fields)

  def __call__(self, x):
    return self.layer(x)


def _rnn(cell: Any, **fields: Any) -> Layer:
  return Layer(lambda rngs: nnx.RNN(cell(5, 8, rngs=rngs), **fields), (normal(3, 6, 5),))


def _carried(cell: Any, carries: int) -> Layer:
  """A cell called by itself, on a carry that is not zero."""
  carry = tuple(normal(3, 8, seed=i + 1) for i in range(carries))
  inputs = (carry if carries > 1 else carry[0], normal(3, 5))
  return Layer(lambda rngs: cell(5, 8, rngs=rngs), inputs)


def attention(rngs: nnx.Rngs, *sizes: Any, **fields: Any) -> nnx.Module:
  return nnx.MultiHeadAttention(2, *(sizes or (8,)), decode=False, rngs=rngs, **fields)


CELLS = {
  "simple": (nnx.SimpleCell, 1),
  "lstm": (nnx.LSTMCell, 2),
  "optimized_lstm": (nnx.OptimizedLSTMCell, 2),
  "gru": (nnx.GRUCell, 1),
}
_MASK = np.tril(np.ones((1, 1, 6, 6), bool))
_IMAGE = normal(2, 6, 6, 4)

LAYERS: dict[str, Layer] = {
  "linear": Layer(lambda rngs: nnx.Linear(5, 8, rngs=rngs), (normal(3, 5),)),
  "linear_general": Layer(
    lambda rngs: nnx.LinearGeneral((4, 5), (2, 4), axis=(-2, -1), rngs=rngs), (normal(3, 4, 5),)
  ),
  "linear_general_batched": Layer(
    lambda rngs: nnx.LinearGeneral(5, 4, batch_axis={0: 3}, rngs=rngs), (normal(3, 4, 5),)
  ),
  "einsum": Layer(
    lambda rngs: nnx.Einsum("bij,ijk->bk", (4, 5, 8), (8,), rngs=rngs), (normal(3, 4, 5),)
  ),
  "conv": Layer(lambda rngs: nnx.Conv(4, 8, (3, 3), rngs=rngs), (_IMAGE,)),
  "conv_strided_causal": Layer(
    lambda rngs: nnx.Conv(4, 8, (3,), 2, padding="CAUSAL", kernel_dilation=2, rngs=rngs),
    (normal(2, 9, 4),),
  ),
  "conv_grouped": Layer(
    lambda rngs: nnx.Conv(4, 8, (3, 3), feature_group_count=4, rngs=rngs), (_IMAGE,)
  ),
  "conv_transpose": Layer(
    lambda rngs: nnx.ConvTranspose(3, 8, (3, 3), (2, 2), rngs=rngs), (normal(2, 3, 3, 3),)
  ),
  "embed": Layer(lambda rngs: nnx.Embed(13, 8, rngs=rngs), (integers(3, 6, below=13),), False),
  "embed_attend": Layer(TiedEmbed, (integers(3, 6, below=13),)),
  "layer_norm": Layer(lambda rngs: nnx.LayerNorm(8, rngs=rngs), (normal(3, 8),), False),
  "rms_norm": Layer(lambda rngs: nnx.RMSNorm(8, rngs=rngs), (normal(3, 8),), False),
  "group_norm": Layer(lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs), (_IMAGE,), False),
  "instance_norm": Layer(lambda rngs: nnx.InstanceNorm(4, rngs=rngs), (_IMAGE,), False),
  "batch_norm": Layer(lambda rngs: nnx.BatchNorm(8, rngs=rngs), (normal(9, 8),), False),
  "batch_norm_running": Layer(
    lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs), (normal(9, 8),), False
  ),
  "weight_norm": Layer(
    lambda rngs: Weighted(nnx.WeightNorm, rngs, use_scale=False), (normal(3, 5),)
  ),
  "attention": Layer(attention, (normal(2, 6, 8),)),
  "attention_masked": Layer(
    lambda rngs: attention(rngs, normalize_qk=True), (normal(2, 6, 8),), kwargs={"mask": _MASK}
  ),
  "attention_cross": Layer(
    lambda rngs: attention(rngs, 8, 12, 6), (normal(2, 6, 8), normal(2, 5, 8, seed=1))
  ),
  "attention_grouped": Layer(
    lambda rngs: nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=rngs),
    (normal(2, 6, 8),),
  ),
  "attention_dropout": Layer(
    lambda rngs: attention(rngs, dropout_rate=0.2, deterministic=False), (normal(2, 6, 8),)
  ),
  "attention_decode": Layer(DecodeAll, (normal(2, 4, 8),)),
  "lora": Layer(
    lambda rngs: nnx.LoRA(5, 2, 8, base_module=nnx.Linear(5, 8, rngs=rngs), rngs=rngs),
    (normal(3, 5),),
  ),
  "lora_linear": Layer(lambda rngs: nnx.LoRALinear(5, 8, lora_rank=2, rngs=rngs), (normal(3, 5),)),
  **{f"{name}_cell": _carried(cell, carries) for name, (cell, carries) in CELLS.items()},
  **{f"{name}_rnn": _rnn(cell) for name, (cell, _) in CELLS.items()},
  "rnn_reversed": _rnn(nnx.GRUCell, reverse=True, keep_order=True, time_major=True),
  "bidirectional": Layer(
    lambda rngs: nnx.Bidirectional(
      nnx.RNN(nnx.GRUCell(5, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(5, 4, rngs=rngs))
    ),
    (normal(3, 6, 5),),
  ),
  "dropout": Layer(lambda rngs: nnx.Dropout(0.3, rngs=rngs), (normal(3, 8),), False),
  "pooling": Layer(Pooled, (normal(2, 8, 8, 3),)),
  "prelu": Layer(lambda rngs: nnx.PReLU(), (normal(3, 8),), False),
  "sequential": Layer(
    lambda rngs: nnx.Sequential(nnx.Linear(5, 8, rngs=rngs), nnx.gelu, nnx.Linear(8, 4, rngs=rngs)),
    (normal(3, 5),),
  ),
}

EXEMPT: dict[str, Layer] = {
  "spectral_norm": Layer(lambda rngs: Weighted(nnx.SpectralNorm, rngs), (normal(3, 5),)),
}
"""Not all products of these are in half: a power iteration stays in float32."""
