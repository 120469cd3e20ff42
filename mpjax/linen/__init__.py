"""Policies for Flax Linen models, which stay unmodified."""

from mpjax.linen._adapters import (
  Adapter,
  cast_inputs,
  cast_outputs,
  default_adapters,
  set_dtype,
)
from mpjax.linen._with_policy import policy_scope, with_policy

__all__ = [
  "Adapter",
  "cast_inputs",
  "cast_outputs",
  "default_adapters",
  "policy_scope",
  "set_dtype",
  "with_policy",
]
