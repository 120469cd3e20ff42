"""What is known about single module classes: the one place that names the layers of NNX."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax._adapter import (
  Adapter,
  Call,
  Cast,
  cast_inputs,
  keep_carry_inputs,
  keep_carry_outputs,
  set_dtype,
)
from mpjax.nnx._attention import attention


def _norm_fields(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  # These layers reduce in float32 and round once to `dtype`. But first they would round their
  # scale, bias and running statistics to it, by a function of theirs that is a public field.
  return {**set_dtype(module, method, dtype), "promote_dtype": _as_they_are}


def _as_they_are(args: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
  return tuple(None if x is None else jnp.asarray(x) for x in args)


def _embed_fields(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  # With a half dtype the whole table is cast before the gather, and the gradient of a frequent
  # token adds up in half. Gather what is stored; the rows are cast as outputs.
  fields = set_dtype(module, method, dtype)
  return {**fields, "promote_dtype": _TableAsStored(module.promote_dtype)} if fields else {}


@dataclasses.dataclass(frozen=True)
class _TableAsStored:
  """Leaves a table alone; to multiply with, it is cast as before.

  It is part of a view's class: compared by value, and pickled with it.
  """

  promote_dtype: Callable[..., Any]

  def __call__(self, args: tuple[Any, ...], /, **options: Any) -> Any:
    return _as_they_are(args) if len(args) == 1 else self.promote_dtype(args, **options)


def _attention_fields(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  fields = set_dtype(module, method, dtype)
  own = module.attention_fn is nnx.dot_product_attention
  if fields and own and dtype.itemsize < np.dtype(np.float32).itemsize:
    fields["attention_fn"] = attention
  return fields


def _dropout_fields(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  # A NumPy scalar (a rate out of np.linspace) is strongly typed, and would promote what it divides.
  return {"rate": float(module.rate)} if isinstance(module.rate, np.floating) else {}


def _no_fields(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  return {}


def _keep_inputs(module: Any, method: str, call: Call, cast: Cast) -> Call:
  return call


def _rnn_inputs(module: Any, method: str, call: Call, cast: Cast) -> Call:
  args, kwargs = cast_inputs(module, method, call, cast)
  return args, {**kwargs, **{k: x for k, x in call[1].items() if k == "initial_carry"}}


def _rnn_outputs(module: Any, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  returns_carry = call[1].get("return_carry")
  if module.return_carry if returns_carry is None else returns_carry:
    return outputs[0], cast(outputs[1])
  return cast(outputs)


_DEFAULT = Adapter()

_NORM = Adapter(params="stored", inputs=_keep_inputs, fields=_norm_fields)
# They write a weight into the layer they hold, in its own dtype; that layer casts it at use.
_REPARAMETRIZED = Adapter(params="stored", fields=_no_fields)
_RNN = Adapter(params="stored", inputs=_rnn_inputs, outputs=_rnn_outputs, rounds=True)

_ADAPTERS: Mapping[type[nnx.Module], Adapter] = types.MappingProxyType(
  {
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.BatchNorm: _NORM,
    nnx.SpectralNorm: _REPARAMETRIZED,
    nnx.WeightNorm: _REPARAMETRIZED,
    nnx.Embed: Adapter(params="stored", fields=_embed_fields, rounds=True),
    nnx.RNNCellBase: Adapter(inputs=keep_carry_inputs, outputs=keep_carry_outputs, rounds=True),
    nnx.RNN: _RNN,
    nnx.Bidirectional: _RNN,
    nnx.MultiHeadAttention: Adapter(fields=_attention_fields),
    nnx.Dropout: Adapter(fields=_dropout_fields),
  }
)


def default_adapters() -> Mapping[type[nnx.Module], Adapter]:
  """Returns what mpjax knows about the layers of NNX: an immutable mapping from class to adapter.

  A module is handled by the adapter of the first class in its MRO that has one. Norms use their
  parameters and statistics as they are stored and reduce in float32; `Embed` gathers before it
  casts; recurrent cells keep the dtype of their carry; attention takes its softmax in float32;
  `SpectralNorm` and `WeightNorm` compute the weight as it is stored.

  Returns:
    The mapping; `with_policy(..., adapters={...})` adds to it for one model.

  >>> import mpjax
  >>> from flax import nnx
  >>> mpjax.nnx.default_adapters()[nnx.LayerNorm].params
  'stored'
  """
  return _ADAPTERS


def find_adapter(added: Mapping[type[Any], Adapter], cls: type[Any]) -> Adapter:
  """Returns the adapter for modules of class `cls`; what the user added comes first."""
  for base in cls.__mro__:
    found = added.get(base) or _ADAPTERS.get(base)
    if found is not None:
      return found
  return _DEFAULT
