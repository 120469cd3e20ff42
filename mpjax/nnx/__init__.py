"""Policies for Flax NNX models, which stay unmodified.

>>> import mpjax
>>> from flax import nnx
>>> model = mpjax.with_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
"""

from mpjax.nnx._atomic_step import atomic_step
from mpjax.nnx._with_policy import convert, with_policy

__all__ = ["atomic_step", "convert", "with_policy"]
