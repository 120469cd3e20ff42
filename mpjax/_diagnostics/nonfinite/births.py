"""Where a result is not finite though the operands are."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.uses import is_elementwise, is_inexact, narrows
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Step


def wide(x: Array) -> Array:
  """Returns an array in a type that every operation takes: what is below 16 bits in float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 2 else x


def not_finite(x: Array) -> Array:
  """Returns where elements are inf or NaN."""
  return jnp.logical_not(jnp.isfinite(wide(x)))


def is_nan(x: Array) -> Array:
  """Returns where elements are NaN."""
  return jnp.isnan(wide(x))


def can_break(step: Step) -> bool:
  """Whether a step may make an inf or a NaN of finite numbers, or a NaN of an inf."""
  eqn, facts = step.eqn, facts_of(step.eqn)
  if step.bodies or not any(map(is_inexact, eqn.outvars)):
    return False
  if eqn.primitive is p.gather_p:
    return "FILL" in str(eqn.params["mode"])
  if eqn.primitive is p.convert_element_type_p:
    return narrows(eqn)
  return not (facts.exact or facts.moves or facts.bounded)


def births(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array | None]:
  """Returns for each result where it broke; None for one that cannot."""
  # An element broke if it is not finite and what it was computed from is, or if it is NaN and that
  # is not: -inf - -inf, and 0 * inf. Of what is not computed element by element, all operands
  # count.
  if not can_break(step):
    return [None] * len(outs)
  pairs = zip(ins, step.eqn.invars, strict=True)
  operands = [jnp.asarray(x) for x, v in pairs if is_inexact(v)]
  bad, nan = ([_reaching(step, found(x)) for x in operands] for found in (not_finite, is_nan))
  made = []
  for out, var in zip(outs, step.eqn.outvars, strict=True):
    if not is_inexact(var):
      made.append(None)
      continue
    broke, broke_to_nan = not_finite(out), is_nan(out)
    for each in bad:
      broke = broke & ~each
    for each in nan:
      broke_to_nan = broke_to_nan & ~each
    made.append(broke | broke_to_nan)
  return made


def _reaching(step: Step, flags: Array) -> Array:
  """Returns for each element of the result, or for all at once, whether a flag reaches it."""
  if is_elementwise(step):
    return flags
  axes, shape = step.eqn.params.get("axes"), shape_of(step.eqn.outvars[0])
  if isinstance(axes, tuple) and all(isinstance(axis, int) and axis < flags.ndim for axis in axes):
    kept = tuple(n for axis, n in enumerate(flags.shape) if axis not in axes)
    if kept == shape:
      return jnp.any(flags, axis=axes)
  return jnp.any(flags)
