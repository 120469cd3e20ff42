"""How the loss is scaled: not at all, by a constant, or by a factor that adapts."""

import dataclasses
import math
import warnings
from typing import TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from mpjax._core.errors import MpjaxValueError, check_init
from mpjax._core.validators import check_int, check_number, check_value

SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Outside, 1/scale or the scale itself is subnormal in float32, and XLA flushes it to 0."""

INT32_MAX = 2**31 - 1


@check_init("Write mpjax.NoLossScale().")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoLossScale:
  """No scaling, no check and no skipped step: nothing is added to the jaxpr.

  For float32 and bfloat16, whose gradients do not underflow. The rest of the loss scaling API
  works with it (the scale reads 1), so that a script can switch scaling off by one argument.

  >>> import mpjax
  >>> mpjax.NoLossScale()
  NoLossScale()
  """


@check_init("Write mpjax.StaticLossScale(128).")
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
  """A scale that stays as it is; steps with non-finite gradients are still skipped.

  Args:
    scale: the factor on the loss, in [2^-126, 2^126]. Powers of two are exact; another value
      works and warns once.

  Raises:
    MpjaxTypeError: `scale` is not a number, or an array that is one (a bool and a traced value are
      not).
    MpjaxValueError: `scale` is NaN, not positive, or outside the limits.

  >>> import mpjax
  >>> mpjax.StaticLossScale(1024)
  StaticLossScale(scale=1024.0)
  """

  scale: float

  def __post_init__(self) -> None:
    call = "mpjax.StaticLossScale"
    object.__setattr__(self, "scale", positive_scale(self.scale, f"{call}(scale)"))
    _warn_unless_powers_of_two(call, {"scale": self.scale})


@check_init("Write mpjax.DynamicLossScale(init_scale=2**15).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
  """A scale that halves on overflow and doubles after a long run of finite steps.

  The scale never leaves [`min_scale`, `max_scale`]. A step that overflowed is skipped, not run
  again. The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2;
  hysteresis is that of Megatron-LM, where a finite step alone restores nothing (in Apex it does).

  Args:
    init_scale: the scale at the first step.
    growth_factor: what the scale is multiplied by when it grows, above 1.
    backoff_factor: what the scale is multiplied by on overflow, between 0 and 1.
    growth_interval: the scale grows when this many steps in a row were finite.
    min_scale: the floor; below 1 helps where the loss itself overflows.
    max_scale: the ceiling.
    hysteresis: how many overflows it takes before the scale backs off. Each overflow after that
      backs off too, until `growth_interval` finite steps in a row restore the allowance.

  Factors and limits that are powers of two only move the exponent of gradients and are exact.
  Others work and warn once.

  Raises:
    MpjaxTypeError: a field is not a plain number, or a count is not an integer.
    MpjaxValueError: a field is out of its range, or `init_scale` lies outside the limits.

  >>> import mpjax
  >>> mpjax.DynamicLossScale(growth_interval=500).init_scale
  32768.0
  """

  init_scale: float = 2.0**15
  growth_factor: float = 2.0
  backoff_factor: float = 0.5
  growth_interval: int = 2000
  min_scale: float = 1.0
  max_scale: float = 2.0**24
  hysteresis: int = 1

  def __post_init__(self) -> None:
    call = "mpjax.DynamicLossScale"
    for field in ("init_scale", "min_scale", "max_scale"):
      object.__setattr__(self, field, positive_scale(getattr(self, field), f"{call}({field})"))
    for field in ("growth_factor", "backoff_factor"):
      object.__setattr__(self, field, _float32(getattr(self, field), f"{call}({field})"))
    for field in ("growth_interval", "hysteresis"):
      count = check_int(
        getattr(self, field),
        f"{call}({field})",
        least=1,
        most=INT32_MAX,
        expected="an integer from 1 to 2^31 - 1, known before tracing",
        fix="Use 1 to act on every step.",
      )
      object.__setattr__(self, field, count)
    check_value(
      self.growth_factor,
      1.0 < self.growth_factor <= LARGEST,
      f"{call}(growth_factor)",
      expected="a number above 1 (and at most 2^126)",
      fix="Use 2, or StaticLossScale for a scale that never grows.",
    )
    check_value(
      self.backoff_factor,
      SMALLEST <= self.backoff_factor < 1.0,
      f"{call}(backoff_factor)",
      expected="a number below 1 (and at least 2^-126)",
      fix="Use 0.5, or StaticLossScale for a scale that never shrinks.",
    )
    if self.min_scale > self.max_scale:
      raise MpjaxValueError(
        f"{call}(min_scale)",
        expected=f"at most max_scale={self.max_scale:.9g}",
        got=f"{self.min_scale:.9g}",
        fix="Swap the two, or widen the range.",
      )
    if not self.min_scale <= self.init_scale <= self.max_scale:
      raise MpjaxValueError(
        f"{call}(init_scale)",
        expected=f"a scale in [{self.min_scale:.9g}, {self.max_scale:.9g}]",
        got=f"{self.init_scale:.9g}",
        fix="Move init_scale into the range, or widen min_scale and max_scale.",
      )
    scales = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
    _warn_unless_powers_of_two(call, {field: getattr(self, field) for field in scales})


LossScale: TypeAlias = NoLossScale | StaticLossScale | DynamicLossScale
"""Any of the three ways to scale a loss."""


def positive_scale(value: object, where: str) -> float:
  """Returns `value` rounded to float32, or raises if it is no usable scale."""
  scale = _float32(value, where)
  check_value(
    value,
    SMALLEST <= scale <= LARGEST,
    where,
    expected="a positive number in [2^-126, 2^126]",
    fix="Choose a power of two such as 2**15: beyond these limits 1/scale is 0 in float32.",
  )
  return scale


def _float32(value: object, where: str) -> float:
  if isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, Tracer):
    value = value.item() if value.shape == () else value
  number = check_number(
    value,
    where,
    expected="a plain number that is known before tracing",
    fix="For a scale that is an input of the step pass any number here, and call "
    "mpjax.set_loss_scale(opt_state, scale) in the step.",
  )
  with np.errstate(over="ignore", under="ignore"):
    rounded = float(np.float32(number))
  expected, fix = "a finite number that float32 can hold", "Choose a power of two such as 2**15."
  check_value(value, math.isfinite(rounded), where, expected=expected, fix=fix)
  return rounded


def warn_unless_power_of_two(where: str, values: dict[str, float], stacklevel: int) -> None:
  """Warns, once for all of `values`, that some are not powers of two."""
  inexact = [f"{k}={v:.9g}" for k, v in values.items() if math.frexp(v)[0] != 0.5]
  if inexact:
    text = f"{where}: {', '.join(inexact)} is not a power of two, so that scaling rounds gradients."
    warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


def _warn_unless_powers_of_two(call: str, values: dict[str, float]) -> None:
  # The frames between here and the user: this one, __post_init__, and the generated __init__.
  warn_unless_power_of_two(call, values, stacklevel=5)
