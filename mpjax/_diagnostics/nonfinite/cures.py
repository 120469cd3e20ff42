"""Why a value is not finite, and the line of code that changes it."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.core import primitives as p

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.nonfinite.report import Range, power


class Fault(NamedTuple):
  """What was seen of a step that broke."""

  primitive: Primitive
  path: str  # its module or scope
  selector: str  # what selects that in a rule, as one writes it
  operands: tuple[Range, ...]
  result: Range
  wide: Range | None  # that of the result computed in float32; None if that is not known
  finite_at: float | None  # the largest loss scale at which it is finite, if one is
  from_state: bool  # whether the loss scale is in the state of an optimizer


def cause_and_cure(fault: Fault) -> tuple[str, str]:
  """Returns why a value is not finite, and what to change."""
  result = fault.result
  low = is_low_precision(jnp.dtype(result.dtype))
  bad = [x for x in fault.operands if x.inf or x.nan]
  if fault.finite_at is not None:
    lower = f"{fault.finite_at:g}"
    text = f"It overflows {result.dtype} at this loss scale."
    if fault.from_state:
      return text, (
        f"opt_state = mpjax.set_loss_scale(opt_state, {lower})  # {power(fault.finite_at)}; "
        "DynamicLossScale gets there by itself"
      )
    return text, f"loss_scale = {lower}  # {power(fault.finite_at)}, or mpjax.DynamicLossScale()"
  if bad:
    return _of_inf(fault, bad)
  wide = fault.wide
  if low and wide is not None and wide.inf + wide.nan < result.inf + result.nan:
    limit = float(jnp.finfo(jnp.dtype(result.dtype)).max)
    text = (
      f"It overflows {result.dtype}: in float32 the largest of these values is {wide.most:.3g}, "
      f"and {result.dtype} ends at {limit:.5g}."
    )
    if not fault.path:
      return text, 'the policy "mixed_bfloat16", or a jax.named_scope here and a Rule with its path'
    if _is_root(fault.path):
      # A rule on the root of a model would put all of it into float32, and in Linen it has no name.
      line = (
        "mpjax.full_precision(fn)(x)  # for the code of this line, or the policy mixed_bfloat16"
      )
      return text, line
    return text, f'Rule("float32", path={fault.selector})  # or the policy mixed_bfloat16'
  return _of_domain(fault)


def _of_inf(fault: Fault, bad: list[Range]) -> tuple[str, str]:
  """NaN that came of an inf which is itself no fault."""
  dtype = fault.result.dtype
  signs = {x.value for x in bad if x.value is not None and math.isinf(x.value)}
  zero = any(x.value == 0 for x in fault.operands)
  if zero:
    text = (
      "It is 0 * inf. The inf itself did no harm before: it was discarded, or is a constant that "
      f"{dtype} cannot hold. Multiplied by 0, as a mask or a gradient is, it becomes NaN."
    )
    return text, (
      "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
      f"jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min) instead of a multiplication"
    )
  if len(bad) >= 2 or signs:
    text = (
      "It is inf - inf: a row in which everything is masked by -inf has no largest element that "
      "is finite."
    )
    return text, f"x = jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min)  # instead of -jnp.inf"
  return "A NaN came of operands that hold an inf.", "jnp.where(jnp.isfinite(x), x, 0)  # before it"


def _of_domain(fault: Fault) -> tuple[str, str]:
  """What no wider dtype would help: operands that the operation does not take, or too large."""
  result, name = fault.result, fault.primitive.name
  asked = [x.least if x.value is None else abs(x.value) for x in fault.operands]
  zero = any(x == 0 for x in asked)
  if zero and len(asked) > 1:
    text = f"{name} of these operands is not finite in any precision: one of them is 0."
    return text, "x / jnp.where(y == 0, 1, y)  # or add an epsilon to the divisor"
  if zero:
    text = f"{name} of 0 is not finite in any precision."
    return text, "jnp.where(x > 0, x, 1)  # as its operand, and a jnp.where around the result"
  if result.nan or not fault.operands:
    text = f"{name} of these operands is NaN in every precision."
    return text, "jnp.where(allowed, x, 1)  # as its operand: it is outside of what is defined"
  limit = float(jnp.finfo(jnp.dtype(result.dtype)).max)
  text = f"It overflows {result.dtype}, which ends at {limit:.3g}."
  if fault.primitive is p.exp_p:
    return text, "jnp.exp(x - jnp.max(x))  # as jax.nn.softmax and jax.nn.logsumexp do"
  return text, "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"


def _is_root(path: str) -> bool:
  """Whether a scope is likely a Flax model itself, by whose class its outermost scope is called."""
  return "/" not in path and path[:1].isupper()
