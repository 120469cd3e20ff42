"""Every layer that Flax ships, in Linen and in NNX, with inputs: one table for several tests."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models import parts
from tests.models.values import integers, normal


class Layer(NamedTuple):
  """One layer and how it is called.

  Fields:
    linen: returns the module; None if only NNX has it.
    nnx: returns the module, given `nnx.Rngs`; None if only Linen has it.
    inputs: its positional arguments.
    products: whether it has any (a norm has none).
    kwargs: its keyword arguments.
  """

  linen: Callable[[], nn.Module] | None
  nnx: Callable[[nnx.Rngs], nnx.Module] | None
  inputs: tuple[Any, ...]
  products: bool = True
  kwargs: Mapping[str, Any] = types.MappingProxyType({})


def tied(m: Any, ids: Any) -> Any:
  """Both uses of one table."""
  return m.embed.attend(jnp.tanh(m.embed(ids)))


def pooled(m: Any, x: Any) -> Any:
  """The pooling functions, and a convolution between them."""
  library: Any = nn if isinstance(m, nn.Module) else nnx
  x = library.avg_pool(library.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1), "SAME")
  return library.pool(m.conv(x), 0.0, jax.lax.add, (2, 2), (1, 1), "SAME")


class DecodeAll(nn.Module):
  """Attention that sees one position after another, through its cache."""

  @nn.compact
  def __call__(self, x):
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    if self.is_initializing():
      return attention(x)
    return jnp.concatenate([attention(x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


class NnxDecodeAll(nnx.Module):
  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 16, decode=True, rngs=rngs)
    self.attention.init_cache((2, 8, 16))

  def __call__(self, x):
    return jnp.concatenate([self.attention(x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


class Weighted(nnx.Module):
  """A layer whose weight another one computes."""

  def __init__(self, wrapper, rngs, **fields):
    self.layer = wrapper(nnx.Linear(9, 8, rngs=rngs), rngs=rngs, **fields)

  def __call__(self, x):
    return self.layer(x)


def normalised(m: Any, x: Any) -> Any:
  """A layer with a spectral norm behind another one: of activations, not of an input."""
  options = {"update_stats": True} if isinstance(m, nn.Module) else {}
  return m.last(m.first(x), **options)


def _of_both(part: parts.Part, *inputs: Any) -> Layer:
  return Layer(lambda: part.linen(None), lambda rngs: part.nnx(None, rngs), inputs)


def _made(layer: Any, *args: Any, **fields: Any) -> Callable[[nnx.Rngs], Any]:
  return lambda rngs: layer(*args, **fields, rngs=rngs)


def _attention(*sizes: int, **fields: Any) -> Callable[[nnx.Rngs], Any]:
  return _made(nnx.MultiHeadAttention, 2, *(sizes or (16,)), decode=False, **fields)


def _rnn(cell: nn.RNNCellBase, nnx_cell: Any, *shape: int, **fields: Any) -> Layer:
  """A loop over time; `nnx_cell` is the class in NNX, if it has one."""

  def of_nnx(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.RNN(nnx_cell(9, 8, rngs=rngs), **fields)

  return Layer(
    lambda: nn.RNN(cell.copy(), **fields), of_nnx if nnx_cell else None, (normal(*shape),)
  )


def _cell(cell: nn.RNNCellBase, nnx_cell: Any, carries: int, *between: int) -> Layer:
  """A cell called by itself, on a carry that is not zero."""
  carry = tuple(normal(3, *between, 8, seed=i + 1) for i in range(carries))
  inputs = (carry if carries > 1 else carry[0], normal(3, *between, 9))
  return Layer(lambda: cell.copy(), _made(nnx_cell, 9, 8) if nnx_cell else None, inputs)


_CELLS = {
  "simple": (nn.SimpleCell(8), nnx.SimpleCell, 1),
  "lstm": (nn.LSTMCell(8), nnx.LSTMCell, 2),
  "optimized_lstm": (nn.OptimizedLSTMCell(8), nnx.OptimizedLSTMCell, 2),
  "gru": (nn.GRUCell(8), nnx.GRUCell, 1),
  "mgu": (nn.MGUCell(8), None, 1),
}
_TABLE = parts.Part(lambda _: nn.Embed(13, 8), lambda _, rngs: nnx.Embed(13, 8, rngs=rngs))
_SPECTRAL = parts.module(
  normalised,
  first=parts.dense(9, 8, bias=True),
  last=parts.Part(
    lambda _: nn.SpectralNorm(nn.Dense(8)),
    lambda _, rngs: nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs),
  ),
)
_MASK = np.tril(np.ones((1, 1, 8, 8), bool))
_ROWS, _STACK, _TOKENS = normal(3, 9), normal(3, 4, 9), normal(2, 8, 16)
_IMAGE, _NORMED, _IDS = normal(2, 6, 6, 4), normal(3, 8), integers(3, 6, below=13)

LAYERS: dict[str, Layer] = {
  "dense": Layer(lambda: nn.Dense(8), _made(nnx.Linear, 9, 8), (_ROWS,)),
  "dense_general": Layer(
    lambda: nn.DenseGeneral((2, 4), axis=(-2, -1)),
    _made(nnx.LinearGeneral, (4, 9), (2, 4), axis=(-2, -1)),
    (_STACK,),
  ),
  "einsum": Layer(
    lambda: nn.Einsum((4, 9, 8), "bij,ijk->bk"),
    _made(nnx.Einsum, "bij,ijk->bk", (4, 9, 8), (8,)),
    (_STACK,),
  ),
  "conv": Layer(lambda: nn.Conv(8, (3, 3)), _made(nnx.Conv, 4, 8, (3, 3)), (_IMAGE,)),
  "conv_transpose": Layer(
    lambda: nn.ConvTranspose(8, (3, 3), (2, 2)),
    _made(nnx.ConvTranspose, 3, 8, (3, 3), (2, 2)),
    (normal(2, 3, 3, 3),),
  ),
  "conv_local": Layer(lambda: nn.ConvLocal(4, (3, 3)), None, (normal(2, 5, 5, 3),)),
  "embed": Layer(lambda: nn.Embed(13, 8), _made(nnx.Embed, 13, 8), (_IDS,), False),
  "embed_attend": _of_both(parts.module(tied, embed=_TABLE), _IDS),
  "layer_norm": Layer(lambda: nn.LayerNorm(), _made(nnx.LayerNorm, 8), (_NORMED,), False),
  "rms_norm": Layer(lambda: nn.RMSNorm(), _made(nnx.RMSNorm, 8), (_NORMED,), False),
  "group_norm": Layer(lambda: nn.GroupNorm(2), _made(nnx.GroupNorm, 4, 2), (_IMAGE,), False),
  "instance_norm": Layer(lambda: nn.InstanceNorm(), _made(nnx.InstanceNorm, 4), (_IMAGE,), False),
  "batch_norm": Layer(lambda: nn.BatchNorm(False), _made(nnx.BatchNorm, 8), (normal(9, 8),), False),
  "batch_norm_running": Layer(
    lambda: nn.BatchNorm(True),
    _made(nnx.BatchNorm, 8, use_running_average=True),
    (normal(9, 8),),
    False,
  ),
  "weight_norm": Layer(
    lambda: nn.WeightNorm(nn.Dense(8)), _made(Weighted, nnx.WeightNorm, use_scale=False), (_ROWS,)
  ),
  "lora": Layer(
    None,
    lambda rngs: nnx.LoRA(9, 2, 8, base_module=nnx.Linear(9, 8, rngs=rngs), rngs=rngs),
    (normal(9, 9),),
  ),
  "lora_linear": Layer(None, _made(nnx.LoRALinear, 9, 8, lora_rank=2), (normal(9, 9),)),
  "attention": Layer(lambda: nn.MultiHeadDotProductAttention(2), _attention(), (_TOKENS,)),
  "attention_masked": Layer(
    lambda: nn.MultiHeadDotProductAttention(2, normalize_qk=True),
    _attention(normalize_qk=True),
    (_TOKENS,),
    kwargs={"mask": _MASK},
  ),
  "attention_cross": Layer(
    lambda: nn.MultiHeadAttention(2, qkv_features=16, out_features=8),
    _attention(16, 16, 8),
    (_TOKENS, normal(2, 9, 16, seed=1)),
  ),
  "attention_grouped": Layer(
    None, _made(nnx.MultiHeadAttention, 4, 16, 32, num_kv_heads=2, decode=False), (_TOKENS,)
  ),
  "attention_dropout": Layer(
    lambda: nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=False),
    _attention(dropout_rate=0.2, deterministic=False),
    (_TOKENS,),
  ),
  "attention_decode": Layer(DecodeAll, NnxDecodeAll, (normal(2, 8, 16),)),
  **{f"{name}_cell": _cell(*made) for name, made in _CELLS.items()},
  "conv_lstm_cell": _cell(nn.ConvLSTMCell(8, (3,)), None, 2, 4),
  **{f"{name}_rnn": _rnn(*made[:2], 3, 6, 9) for name, made in _CELLS.items()},
  "conv_lstm_rnn": _rnn(nn.ConvLSTMCell(4, (3, 3)), None, 2, 3, 5, 5, 2),
  "bidirectional": Layer(
    lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.GRUCell(8))),
    lambda rngs: nnx.Bidirectional(
      nnx.RNN(nnx.GRUCell(9, 8, rngs=rngs)), nnx.RNN(nnx.GRUCell(9, 8, rngs=rngs))
    ),
    (normal(3, 6, 9),),
    kwargs={"seq_lengths": np.array([6, 4, 5], np.int32)},
  ),
  "dropout": Layer(
    lambda: nn.Dropout(0.3, deterministic=False), _made(nnx.Dropout, 0.3), (_NORMED,), False
  ),
  "pooling": _of_both(parts.module(pooled, conv=parts.conv(3, 4, 3)), normal(2, 8, 8, 3)),
  "prelu": Layer(lambda: nn.PReLU(), lambda rngs: nnx.PReLU(), (_NORMED,), False),
  # Not all of its products are in half: a power iteration stays in float32.
  "spectral_norm": Layer(
    lambda: _SPECTRAL.linen(None), lambda rngs: _SPECTRAL.nnx(None, rngs), (_ROWS,)
  ),
}
