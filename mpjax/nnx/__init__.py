"""Policies for Flax NNX models, which stay unmodified.

>>> import mpjax
>>> from flax import nnx
>>> model = mpjax.nnx.with_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
"""

from mpjax._adapter import Adapter, cast_inputs, cast_outputs, set_dtype
from mpjax.nnx._adapters import default_adapters
from mpjax.nnx._convert import convert
from mpjax.nnx._value_and_grad import value_and_grad
from mpjax.nnx._with_policy import with_policy

__all__ = [
  "Adapter",
  "cast_inputs",
  "cast_outputs",
  "convert",
  "default_adapters",
  "set_dtype",
  "value_and_grad",
  "with_policy",
]
