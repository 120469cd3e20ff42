"""Every layer that Flax Linen ships, with inputs: one table for several tests."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import integers, normal


class Layer(NamedTuple):
  """One layer and how it is called.

  Fields:
    make: returns the module.
    inputs: its positional arguments.
    products: whether it has any (a norm has none).
    kwargs: its keyword arguments.
  """

  make: Callable[[], nn.Module]
  inputs: tuple[Any, ...]
  products: bool = True
  kwargs: Mapping[str, Any] = types.MappingProxyType({})


class TiedEmbed(nn.Module):
  """Both uses of one table."""

  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(13, 8)
    return embed.attend(jnp.tanh(embed(ids)))


class Pooled(nn.Module):
  """The pooling functions, and a convolution between them."""

  @nn.compact
  def __call__(self, x):
    x = nn.avg_pool(nn.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1), "SAME")
    return nn.pool(nn.Conv(4, (3, 3))(x), 0.0, jax.lax.add, (2, 2), (1, 1), "SAME")


class DecodeAll(nn.Module):
  """Attention that sees one position after another, through its cache."""

  @nn.compact
  def __call__(self, x):
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    if self.is_initializing():
      return attention(x)
    return jnp.concatenate([attention(x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


def _cell(cell: nn.RNNCellBase, *shape: int, **fields: Any) -> Layer:
  return Layer(lambda: nn.RNN(cell.copy(), **fields), (normal(*shape),))


def _carried(cell: nn.RNNCellBase, carries: int) -> Layer:
  """A cell called by itself, on a carry that is not zero."""
  carry = tuple(normal(3, 8, seed=i + 1) for i in range(carries))
  return Layer(lambda: cell.copy(), (carry if carries > 1 else carry[0], normal(3, 5)))


_CELLS = {
  "simple": (nn.SimpleCell(8), 1),
  "lstm": (nn.LSTMCell(8), 2),
  "optimized_lstm": (nn.OptimizedLSTMCell(8), 2),
  "gru": (nn.GRUCell(8), 1),
  "mgu": (nn.MGUCell(8), 1),
}
_MASK = np.tril(np.ones((1, 1, 6, 6), bool))

LAYERS: dict[str, Layer] = {
  "dense": Layer(lambda: nn.Dense(8), (normal(3, 5),)),
  "dense_general": Layer(lambda: nn.DenseGeneral((2, 4), axis=(-2, -1)), (normal(3, 4, 5),)),
  "dense_general_batched": Layer(
    lambda: nn.DenseGeneral(4, axis=-1, batch_dims=(0,)), (normal(3, 4, 5),)
  ),
  "einsum": Layer(lambda: nn.Einsum((4, 5, 8), "bij,ijk->bk"), (normal(3, 4, 5),)),
  "conv": Layer(lambda: nn.Conv(8, (3, 3)), (normal(2, 6, 6, 4),)),
  "conv_strided_causal": Layer(
    lambda: nn.Conv(8, (3,), strides=2, padding="CAUSAL", kernel_dilation=2), (normal(2, 9, 4),)
  ),
  "conv_grouped": Layer(lambda: nn.Conv(8, (3, 3), feature_group_count=4), (normal(2, 6, 6, 4),)),
  "conv_transpose": Layer(lambda: nn.ConvTranspose(8, (3, 3), (2, 2)), (normal(2, 3, 3, 3),)),
  "conv_local": Layer(lambda: nn.ConvLocal(4, (3, 3)), (normal(2, 5, 5, 3),)),
  "embed": Layer(lambda: nn.Embed(13, 8), (integers(3, 6, below=13),), products=False),
  "embed_attend": Layer(TiedEmbed, (integers(3, 6, below=13),)),
  "layer_norm": Layer(lambda: nn.LayerNorm(), (normal(3, 8),), products=False),
  "rms_norm": Layer(lambda: nn.RMSNorm(), (normal(3, 8),), products=False),
  "group_norm": Layer(lambda: nn.GroupNorm(2), (normal(2, 4, 4, 8),), products=False),
  "instance_norm": Layer(lambda: nn.InstanceNorm(), (normal(2, 4, 4, 8),), products=False),
  "batch_norm": Layer(lambda: nn.BatchNorm(False), (normal(9, 8),), products=False),
  "batch_norm_running": Layer(lambda: nn.BatchNorm(True), (normal(9, 8),), products=False),
  "weight_norm": Layer(lambda: nn.WeightNorm(nn.Dense(8)), (normal(3, 5),)),
  "attention": Layer(lambda: nn.MultiHeadDotProductAttention(2), (normal(2, 6, 8),)),
  "attention_masked": Layer(
    lambda: nn.MultiHeadDotProductAttention(2, normalize_qk=True),
    (normal(2, 6, 8),),
    kwargs={"mask": _MASK},
  ),
  "attention_cross": Layer(
    lambda: nn.MultiHeadAttention(2, qkv_features=12, out_features=6),
    (normal(2, 6, 8), normal(2, 5, 8, seed=1)),
  ),
  "attention_dropout": Layer(
    lambda: nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=False),
    (normal(2, 6, 8),),
  ),
  "attention_decode": Layer(DecodeAll, (normal(2, 4, 8),)),
  **{f"{name}_cell": _carried(cell, carries) for name, (cell, carries) in _CELLS.items()},
  **{f"{name}_rnn": _cell(cell, 3, 6, 5) for name, (cell, _) in _CELLS.items()},
  "conv_lstm_cell": Layer(
    lambda: nn.ConvLSTMCell(8, (3,)),
    ((normal(3, 4, 8, seed=1), normal(3, 4, 8, seed=2)), normal(3, 4, 8)),
  ),
  "conv_lstm_rnn": _cell(nn.ConvLSTMCell(4, (3, 3)), 2, 3, 5, 5, 2),
  "rnn_reversed": _cell(nn.GRUCell(8), 6, 3, 5, reverse=True, keep_order=True, time_major=True),
  "bidirectional": Layer(
    lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))), (normal(3, 6, 5),)
  ),
  "dropout": Layer(lambda: nn.Dropout(0.3, deterministic=False), (normal(3, 8),), products=False),
  "pooling": Layer(Pooled, (normal(2, 8, 8, 3),)),
  "prelu": Layer(lambda: nn.PReLU(), (normal(3, 8),), products=False),
  "sequential": Layer(lambda: nn.Sequential([nn.Dense(8), nn.gelu, nn.Dense(4)]), (normal(3, 5),)),
}

EXEMPT: dict[str, Layer] = {
  "spectral_norm": Layer(
    lambda: nn.SpectralNorm(nn.Dense(8)), (normal(3, 5),), kwargs={"update_stats": True}
  ),
}
"""Not all products of these are in half: a power iteration stays in float32."""
