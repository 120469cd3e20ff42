"""Headroom: how many times the values of a program may grow before they overflow float16."""

import functools
import math
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import div_p, integer_pow_p, log_p, pow_p, rsqrt_p

from mpjax._core.types import Array, is_inexact
from mpjax._debug.ranges_report import LARGEST
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.runner import Look
from mpjax._jaxpr.steps import Step

_POLES = frozenset((div_p, integer_pow_p, log_p, pow_p, rsqrt_p))
"""Primitives that return inf for finite operands in every dtype, such as a division by 0."""


def in_float16(largest: float) -> float:
  """Returns how many times values may grow, given the largest; inf if all are 0."""
  # `LARGEST` is the largest finite number of float16.
  return LARGEST / largest if largest else math.inf


def watch_float16_values(largest: dict[str, float]) -> Look:
  """Returns an observer of a program under a policy, which fills `largest` by module.

  It looks at all float16 results. One that is not finite though its operands are has overflowed:
  its magnitude is inf. Bfloat16 has the range of float32, and operands in float8 are scaled.
  """
  return Look(pick=_float16_magnitudes, see=_noted_in(largest))


def _noted_in(largest: dict[str, float]) -> Callable[[Step, Sequence[Array]], None]:
  """Returns a function that notes the largest of some magnitudes of a step, by module."""

  def see(step: Step, magnitudes: Sequence[Array]) -> None:
    path = step.location.path
    # A module runs several times, for example in a loop. Keep the largest of all runs.
    largest[path] = max(largest.get(path, 0.0), *(float(jnp.max(x)) for x in magnitudes))

  return see


def _float16_magnitudes(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
  # A token has no dtype.
  return [_magnitude(step, ins, x) for x in outs if getattr(x, "dtype", None) == jnp.float16]


def _magnitude(step: Step, ins: Sequence[Array], x: Array) -> Array:
  """Returns the largest magnitude of a float16 result; inf if it overflowed."""
  largest, is_finite = _largest_finite(x)
  # An operand that is not finite would be the fault of an earlier step.
  overflows = ~is_finite & _all_finite(ins)
  # A division by 0 is inf in float32 too, so float16 is not at fault.
  if step.eqn.primitive in _POLES:
    in_float32 = bind(step.eqn, [jnp.asarray(v).astype(jnp.float32) for v in ins])
    overflows &= _all_finite(in_float32)
  # Otherwise an inf, such as one in a mask, says nothing about headroom.
  return jnp.where(overflows, math.inf, largest)


def _all_finite(values: Sequence[Array]) -> Array:
  checks = [_largest_finite(x)[1] for x in values if is_inexact(x)]
  return functools.reduce(jnp.logical_and, checks, jnp.asarray(True))


@jax.jit
def _largest_finite(x: Array) -> tuple[Array, Array]:
  """Returns the largest finite magnitude, 0 if there is none, and whether all are finite."""
  # The magnitude of a complex number is real. Float32 holds every float16.
  magnitudes = jnp.abs(x).astype(jnp.float32)
  finite = jnp.isfinite(magnitudes)
  # An empty array has no maximum without `initial`.
  return jnp.max(jnp.where(finite, magnitudes, 0.0), initial=0.0), jnp.all(finite)


def watch_float32_values(largest: dict[str, float], counted: Collection[int]) -> Look:
  """Returns an observer of a program in float32, which fills `largest` by module.

  It looks at the values that a policy computes in low precision: the results of the steps that are
  `counted`, and the operands and results of their matmuls.
  """

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    if step.number not in counted:
      return []
    # A policy casts the operands of a matmul, which other steps may have computed in float32.
    rounded = ins[:2] if facts_of(step.eqn).flops is not None else []
    return [_largest_finite(x)[0] for x in (*rounded, *outs) if is_inexact(x)]

  return Look(pick=pick, see=_noted_in(largest))
