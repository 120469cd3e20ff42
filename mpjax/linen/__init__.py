"""Policies for Flax Linen models, which stay unmodified.

>>> import flax.linen as nn, mpjax
>>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
"""

from mpjax._adapter import Adapter, cast_inputs, cast_outputs, set_dtype
from mpjax.linen._adapters import default_adapters
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
