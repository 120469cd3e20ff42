"""What is known about single module classes: the one place that names Flax's layers."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mpjax._adapter import (
  Adapter,
  Call,
  Cast,
  cast_inputs,
  keep_carry_inputs,
  keep_carry_outputs,
  set_dtype,
)


def _rnn_inputs(module: nn.Module, method: str, call: Call, cast: Cast) -> Call:
  args, kwargs = call
  carry = {k: x for k, x in kwargs.items() if k == "initial_carry"}
  return tuple(cast(x) for x in args), {**{k: cast(x) for k, x in kwargs.items()}, **carry}


def _rnn_outputs(module: nn.Module, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  returns_carry = call[1].get("return_carry")
  if module.return_carry if returns_carry is None else returns_carry:
    return outputs[0], cast(outputs[1])
  return cast(outputs)


def _embed_fields(module: nn.Module, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  # With a half dtype Flax casts the whole table before the gather, and the gradient of a frequent
  # token adds up in half (24 % off on Zipf-distributed tokens). Gather what is stored; the rows
  # are cast as outputs.
  return {"dtype": None} if method == "__call__" else set_dtype(module, method, dtype)


def _einsum() -> Callable[..., Any]:
  return jnp.einsum


def _half_weights_einsum() -> Callable[..., Any]:
  def einsum(subscripts: str, weights: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, weights.astype(value.dtype), value)

  return einsum


def _attention_fields(module: nn.Module, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  fields = set_dtype(module, method, dtype)
  accepts = inspect.signature(module.attention_fn).parameters
  if "force_fp32_for_softmax" not in accepts:
    return fields
  fields["force_fp32_for_softmax"] = True
  # The flag leaves the weights in float32, and their product with the values would follow; an
  # einsum of our own casts them back. Flax takes both einsums or none, and none with a precision.
  einsums = ("qk_attn_weights_einsum", "attn_weights_value_einsum")
  taken = [module.precision] + [getattr(module, f"{name}_cls") for name in einsums]
  if all(name in accepts for name in einsums) and all(value is None for value in taken):
    fields["qk_attn_weights_einsum_cls"] = _einsum
    fields["attn_weights_value_einsum_cls"] = _half_weights_einsum
  return fields


def _dropout_fields(module: nn.Module, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  # A NumPy scalar (a rate out of np.linspace) is strongly typed, and would promote what it divides.
  return {"rate": float(module.rate)} if isinstance(module.rate, np.floating) else {}


def _keep_inputs(module: nn.Module, method: str, call: Call, cast: Cast) -> Call:
  return call


def _keep_outputs(module: nn.Module, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  return outputs


def _call_inputs(module: nn.Module, method: str, call: Call, cast: Cast) -> Call:
  return cast_inputs(module, method, call, cast) if method == "__call__" else call


def _call_outputs(module: nn.Module, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  return cast(outputs) if method == "__call__" else outputs


def _keep_fields(module: nn.Module, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  return {}


_DEFAULT = Adapter()

# Flax's norms reduce in float32, scale and shift there, and round once to `dtype`.
_NORM = Adapter(params="stored", inputs=_keep_inputs)
# They compute a weight, in methods of their own; the layer they hold casts it where it uses it.
_REPARAMETRIZED = Adapter(
  params="stored", inputs=_call_inputs, fields=_keep_fields, outputs=_call_outputs
)
# It hands parameters to its cell, which joins several and casts them once.
_HANDS_ON_PARAMETERS = Adapter(params="stored", inputs=_keep_inputs, outputs=_keep_outputs)
_RNN = Adapter(inputs=_rnn_inputs, outputs=_rnn_outputs, rounds=True)

_ADAPTERS: Mapping[type[nn.Module], Adapter] = types.MappingProxyType(
  {
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.InstanceNorm: _NORM,
    nn.BatchNorm: _NORM,
    nn.SpectralNorm: _REPARAMETRIZED,
    nn.WeightNorm: _REPARAMETRIZED,
    nn.Embed: Adapter(params="stored", fields=_embed_fields, rounds=True),
    nn.recurrent.DenseParams: _HANDS_ON_PARAMETERS,
    nn.RNNCellBase: Adapter(inputs=keep_carry_inputs, outputs=keep_carry_outputs, rounds=True),
    nn.RNN: _RNN,
    nn.Bidirectional: _RNN,
    nn.Dropout: Adapter(fields=_dropout_fields),
    nn.MultiHeadDotProductAttention: Adapter(fields=_attention_fields),
  }
)


# These layers cast by their field `promote_dtype`, multiply by the field named here, then add their
# bias, and do nothing else with either result.
_PRODUCTS: Mapping[Any, tuple[type[nn.Module], str]] = types.MappingProxyType(
  {
    inspect.unwrap(nn.Dense.__call__): (nn.Dense, "dot_general"),
    inspect.unwrap(nn.DenseGeneral.__call__): (nn.DenseGeneral, "dot_general"),
    inspect.unwrap(nn.Conv.__call__): (nn.Conv, "conv_general_dilated"),
  }
)


def product_field(module: nn.Module, method: Callable[..., Any]) -> str | None:
  """Returns the field that holds the product of one of Flax's layers; None of anything else.

  Args:
    module: the bound module. A field of it that has to do with the product and was set by a user
      makes the answer None.
    method: what is called, as an interceptor is handed it. It has to be the layer's own method: a
      subclass may do what it likes around it, but what it does in its place is not known.
  """
  cls, field = _PRODUCTS.get(getattr(method, "func", None), (nn.Module, None))
  if field is None or not getattr(module, "shared_weights", True):
    return None
  hooks = ("promote_dtype", field, f"{field}_cls")
  return field if all(getattr(module, h) is getattr(cls, h) for h in hooks) else None


def default_adapters() -> Mapping[type[nn.Module], Adapter]:
  """Returns what mpjax knows about Flax's own layers: an immutable mapping from class to adapter.

  A module is handled by the adapter of the first class in its MRO that has one. Flax's norms read
  their parameters as stored and reduce in float32; `Embed` gathers before it casts; recurrent
  cells keep the dtype of their carry; attention takes its softmax in float32; `SpectralNorm` and
  `WeightNorm` compute the weight as it is stored.

  Returns:
    The mapping; `with_policy(..., adapters={...})` adds to it for one model.

  >>> import flax.linen as nn, mpjax
  >>> mpjax.linen.default_adapters()[nn.LayerNorm].params
  'stored'
  """
  return _ADAPTERS


@functools.lru_cache(maxsize=4096)
def find_adapter(added: tuple[tuple[type[Any], Adapter], ...], cls: type[Any]) -> Adapter:
  """Returns the adapter for modules of class `cls`; what the user added comes first."""
  own = dict(added)
  for base in cls.__mro__:
    found = own.get(base) or _ADAPTERS.get(base)
    if found is not None:
      return found
  return _DEFAULT
