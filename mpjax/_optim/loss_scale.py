"""The loss scale: its configurations, their labels, its first state, and how it moves."""

import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.errors import (
  check_init,
  check_int,
  check_value,
  wrong_type,
)
from mpjax._core.fused_leaves import read_together
from mpjax._core.types import Array
from mpjax._optim.states import LossScaleState, ScaleState, StepCount

SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Outside, 1/scale or the scale itself is subnormal in float32, and XLA flushes it to 0."""

INT32_MAX = 2**31 - 1

UPDATE_OBSERVER = ContextVar[Callable[[Array, Array], object]](
  "UPDATE_OBSERVER", default=lambda *_: None
)
"""A function that each update calls with the count of steps that it has read, and with the new one.

An update that skips has kept the optimizer's state by itself. If one update leads from the state
before a step to the state after it, `atomic_step` need not select all moments again. Values cannot
tell it, since they are traced, but the two arrays can: they are the counts before and after the
step only if this update read the one and made the other. A second update, a loop or an inner `jit`
has other arrays between. `atomic_step` then selects, which costs time and changes no number.
"""


@check_init("Write mpjax.NoLossScale().")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoLossScale:
  """No scaling, no check and no skipped step: only the steps are counted.

  For float32 and bfloat16, whose gradients do not underflow. Functions of mpjax see a scale of 1,
  so that one argument switches scaling off. `SkipNonfinite` skips steps without scaling.

  >>> import mpjax
  >>> mpjax.NoLossScale()
  NoLossScale()
  """


@check_init("Write mpjax.SkipNonfinite().")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipNonfinite:
  """A scale of 1 that skips steps with non-finite gradients, for float32 and bfloat16.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.SkipNonfinite())
  >>> params = jnp.ones(2)
  >>> updates, opt_state = tx.update(jnp.asarray([1.0, jnp.nan]), tx.init(params), params)
  >>> print(updates, mpjax.step_applied(opt_state))
  [-0. -0.] False
  """


@check_init("Write mpjax.StaticLossScale(128).")
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
  """A constant scale that skips steps with non-finite gradients.

  Args:
    scale: the factor on gradients in the backward pass, a number or an array of one, in
      [2^-126, 2^126]. Powers of two are exact; another value works and warns once.

  Raises:
    MpjaxTypeError: `scale` is no number, a bool, or traced.
    MpjaxValueError: `scale` is NaN, not positive, or outside the limits.

  >>> import mpjax
  >>> mpjax.StaticLossScale(1024)
  StaticLossScale(scale=1024.0)
  """

  scale: float

  def __post_init__(self) -> None:
    call = "mpjax.StaticLossScale"
    # The class is frozen. The stored scale is the float32 value that the state will hold.
    object.__setattr__(self, "scale", positive_scale(self.scale, f"{call}(scale)"))
    # The frames between the user and the warning: __post_init__, the generated __init__, and the
    # check of its call.
    warn_unless_power_of_two(call, {"scale": self.scale}, stacklevel=5)


@check_init("Write mpjax.DynamicLossScale(init_scale=2**15).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
  """A scale that halves on overflow and doubles after a long run of finite steps.

  The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2. The
  hysteresis is that of Megatron-LM: one finite step restores nothing (in Apex it does). Factors and
  limits that are powers of two are exact. Others round gradients.

  Args:
    init_scale: the scale at the first step.
    growth_factor: the factor of growth, above 1.
    backoff_factor: the factor after an overflow, between 0 and 1.
    growth_interval: the number of finite steps in a row before the scale grows.
    min_scale: the smallest scale. Choose one below 1 if gradients overflow at 1.
    max_scale: the largest scale.
    hysteresis: the number of overflows before the scale backs off. Each later overflow backs off
      too, until `growth_interval` finite steps in a row restore this number.

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
    expected = "an integer from 1 to 2^31 - 1, known before tracing"
    fix = "Use 1 to act on every step."
    # Counters are int32, so a larger interval would never be reached.
    count = functools.partial(check_int, least=1, most=INT32_MAX, expected=expected, fix=fix)
    # Fields that are not listed are scales.
    checks = {
      **dict.fromkeys(("growth_factor", "backoff_factor"), _number),
      **dict.fromkeys(("growth_interval", "hysteresis"), count),
    }
    for field in dataclasses.fields(self):
      check = checks.get(field.name, positive_scale)
      value = check(getattr(self, field.name), f"{call}({field.name})")
      object.__setattr__(self, field.name, value)
    low, high, backoff = self.min_scale, self.max_scale, self.backoff_factor
    # Each field is valid alone. Now check that they fit together.
    ranges = {
      "growth_factor": (1 < self.growth_factor <= LARGEST, "a number above 1 (and at most 2^126)"),
      "backoff_factor": (SMALLEST <= backoff < 1, "a number below 1 (and at least 2^-126)"),
      "min_scale": (low <= high, f"at most max_scale={high:.9g}"),
      "init_scale": (low <= self.init_scale <= high, f"a scale in [{low:.9g}, {high:.9g}]"),
    }
    fix = "Take 2 and 0.5 as factors, and limits around init_scale; StaticLossScale never moves."
    for field, (allowed, expected) in ranges.items():
      value = getattr(self, field)
      check_value(value, allowed, f"{call}({field})", expected=expected, fix=fix)
    floats = {name: x for name, x in vars(self).items() if isinstance(x, float)}
    warn_unless_power_of_two(call, floats, stacklevel=5)


LossScale: TypeAlias = NoLossScale | SkipNonfinite | StaticLossScale | DynamicLossScale


def positive_scale(value: object, where: str) -> float:
  """Returns `value` rounded to float32, or raises if it is no usable scale."""
  scale, expected = _number(value, where), "a positive number in [2^-126, 2^126]"
  fix = "Choose a power of two such as 2**15: beyond these limits 1/scale is 0 in float32."
  check_value(value, SMALLEST <= scale <= LARGEST, where, expected=expected, fix=fix)
  return scale


def _number(value: object, where: str) -> float:
  """Returns a concrete real number rounded to float32, or raises."""
  # An array of shape () is a number, such as a scale from a checkpoint.
  if isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, Tracer):
    value = value.item() if value.shape == () else value
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    expected = "a plain number that is known before tracing"
    fix = (
      "If it is an input of the step, pass any number here, and call "
      "mpjax.states.set_loss_scale(opt_state, scale) in the step."
    )
    raise wrong_type(value, where, expected=expected, fix=fix)
  # Round first: a Python float may be finite and still overflow in float32.
  with np.errstate(over="ignore", under="ignore"):
    rounded = float(np.float32(value))
  expected, fix = "a finite number that float32 can hold", "Choose a power of two such as 2**15."
  check_value(value, math.isfinite(rounded), where, expected=expected, fix=fix)
  return rounded


def warn_unless_power_of_two(where: str, values: Mapping[str, float], stacklevel: int) -> None:
  """Warns if a factor is inexact: a product with a power of two rounds nothing."""
  # frexp returns 0.5 for powers of two, and only for these.
  inexact = [f"{name}={x:.9g}" for name, x in values.items() if math.frexp(x)[0] != 0.5]
  if inexact:
    text = f"{where}: {', '.join(inexact)} is not a power of two, so that scaling rounds gradients."
    warnings.warn(text, UserWarning, stacklevel=stacklevel)


def write_label(config: LossScale, name: str | None = None) -> str:
  """Returns the key for a configuration."""
  kind = next(text for cls, text in _KINDS.items() if isinstance(config, cls))
  omitted = _OMITTED.get(kind, {})
  # A state holds its own scale, so `init_scale` is no part of its label.
  stated = [
    f"{field.name}={getattr(config, field.name):.9g}"
    for field in dataclasses.fields(config)
    if field.name != "init_scale" and getattr(config, field.name) != omitted.get(field.name)
  ]
  text = kind + (f"({','.join(stated)})" if stated else "")
  return text if name is None else f"{name}:{text}"


_KINDS: dict[type[LossScale], str] = {
  NoLossScale: "none",
  SkipNonfinite: "skip",
  StaticLossScale: "static",
  DynamicLossScale: "dynamic",
}
_OMITTED: dict[str, dict[str, float]] = {
  "skip": {"scale": 1.0},
  "dynamic": {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
    "hysteresis": 1,
  },
}
"""The values that a label leaves out, by its kind.

Labels are in checkpoints, so no value here may change: it would change what those states mean. A
default of a class may, and is then written out. A new field takes the value that does what older
versions did.
"""


def read_label(label: str) -> dict[str, float]:
  """Returns the fields of the configuration that a key names, with those that it leaves out."""
  kind, _, text = label.rpartition(":")[2].removesuffix(")").partition("(")
  pairs = (field.split("=") for field in text.split(",") if field)
  # Nine digits tell all float32 values apart, so this gives back the very number.
  fields = {key: float(np.float32(number)) for key, number in pairs}
  return _OMITTED.get(kind, {}) | fields


def is_label(label: str) -> bool:
  """Whether a key of a state was written by `write_label`."""
  return _kind_in(label) in _KINDS.values()


def read_kind(label: str) -> type[LossScale]:
  """Returns the class of the configuration that a key names."""
  return next(kind for kind, text in _KINDS.items() if text == _kind_in(label))


def _kind_in(label: str) -> str:
  return label.rpartition(":")[2].partition("(")[0]


_NO_COUNTERS = ("scale", "hysteresis", "first_bad", "finite")

COUNTERS = tuple(field for field in LossScaleState._fields if field not in _NO_COUNTERS)
"""The fields that `loss_scaling_metrics` returns by their names."""


def init_scale(config: LossScale) -> ScaleState:
  """Returns the state before the first step."""
  match config:
    case NoLossScale():
      return StepCount(jnp.asarray(0, jnp.int32))
    # Constant scales never back off, so their hysteresis is 0.
    case SkipNonfinite():
      scale, hysteresis = 1.0, 0
    case StaticLossScale(scale):
      hysteresis = 0
    case DynamicLossScale():
      scale, hysteresis = config.init_scale, config.hysteresis
  # All others start at 0. Each has an array of its own, since two leaves that share a buffer cannot
  # both be donated.
  zeros = LossScaleState(*(jnp.asarray(0, jnp.int32) for _ in LossScaleState._fields))
  return zeros._replace(
    scale=jnp.asarray(scale, jnp.float32),
    hysteresis=jnp.asarray(hysteresis, jnp.int32),
    finite=jnp.asarray(True, jnp.bool_),
  )


def adjust(
  config: LossScale,
  state: LossScaleState,
  *,
  own_finite: Array,
  applied: Array,
  first_bad: Array,
  all_finite: Array,
) -> LossScaleState:
  """Returns the state after a step.

  Args:
    config: the configuration of the scale.
    state: the state before the step.
    own_finite: whether this scale's own loss and its gradients were finite.
    applied: whether the step was applied.
    first_bad: the code of the first leaf that was not finite.
    all_finite: whether the gradients of all losses, and their sum, were finite.
  """
  # Two flags decide. The scale follows `own_finite`. The count of skipped steps follows `applied`,
  # which covers all losses and the updates.
  dynamic = isinstance(config, DynamicLossScale)
  new = [first_bad, own_finite, applied, all_finite]
  # Nothing depends on the old `finite` and `first_bad`. A static scale is no result of the step. It
  # stays the same array, and needs no kernel.
  unread = {"finite", "first_bad"} if dynamic else {"finite", "first_bad", "scale"}
  old = [field for field in state._fields if field not in unread]
  read = read_together([*(getattr(state, field) for field in old), *new])
  count_before = state.total
  state = state._replace(**dict(zip(old, read, strict=False)))
  first_bad, own_finite, applied, all_finite = read[len(old) :]
  good_steps = jnp.where(own_finite, count_up(state.good_steps, own_finite), 0)
  scale = state.scale
  hysteresis = state.hysteresis
  floor_hits = state.floor_hits
  if dynamic:
    low, high = jnp.float32(config.min_scale), jnp.float32(config.max_scale)
    # At 0, each further overflow backs off too, until the scale has grown.
    left = jnp.where(own_finite, hysteresis, jnp.maximum(hysteresis - 1, 0))
    back_off = jnp.logical_and(jnp.logical_not(own_finite), left == 0)
    # >=, not ==: a state restored into a shorter interval may be past it already.
    grow = jnp.logical_and(own_finite, good_steps >= config.growth_interval)
    factor = jnp.where(back_off, jnp.float32(config.backoff_factor), jnp.float32(1))
    factor = jnp.where(grow, jnp.float32(config.growth_factor), factor)
    # An overflow at the minimum: the loss itself or the data is the cause.
    floor_hits = count_up(floor_hits, jnp.logical_and(back_off, scale <= low))
    # The limits also catch products that overflow to inf or underflow to 0.
    scale = jnp.minimum(jnp.maximum(scale * factor, low), high)
    hysteresis = jnp.where(grow, config.hysteresis, left)
    # Growing restores the hysteresis and starts the next interval.
    good_steps = jnp.where(grow, 0, good_steps)
  skip = jnp.logical_not(applied)
  total = count_up(state.total, True)
  UPDATE_OBSERVER.get()(count_before, total)
  return state._replace(
    scale=scale,
    good_steps=good_steps,
    hysteresis=hysteresis,
    total=total,
    skipped=count_up(state.skipped, skip),
    consecutive_skips=jnp.where(skip, count_up(state.consecutive_skips, skip), 0),
    floor_hits=floor_hits,
    # All gradients and losses were finite, so only an update or the new state can be the cause.
    bad_updates=count_up(state.bad_updates, jnp.logical_and(all_finite, skip)),
    first_bad=first_bad,
    finite=applied,
  )


def as_skipped(old: LossScaleState, new: LossScaleState) -> LossScaleState:
  """Returns the numbers after updates that are taken back because another one was skipped.

  Their gradients were what they were, so the scale moves. All of them count as skipped.

  Args:
    old: the numbers before the updates.
    new: the numbers after them.
  """
  # A count that has stopped says nothing about the number of updates. One is the most likely.
  count = jnp.where(old.total < INT32_MAX, new.total - old.total, 1)
  return new._replace(
    skipped=sum_of_counts(old.skipped, count),
    consecutive_skips=sum_of_counts(old.consecutive_skips, count),
    finite=new.applied & (count == 0),
  )


def count_up(count: Array, by_one: Array | bool = True) -> Array:
  """Returns a counter after a step; it stops at 2^31 - 1 instead of wrapping to a negative."""
  return jnp.where(jnp.logical_and(by_one, count < INT32_MAX), count + 1, count)


def sum_of_counts(count: Array, other: Array) -> Array:
  """Returns the sum of two counts; it stops at 2^31 - 1 instead of wrapping to a negative."""
  return count + jnp.minimum(other, INT32_MAX - count)
