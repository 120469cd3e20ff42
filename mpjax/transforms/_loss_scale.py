"""How the loss is scaled: not at all, by a constant, or by a factor that adapts."""

import dataclasses
import functools
import math
import warnings
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.errors import check_init, check_int, check_number, check_value
from mpjax._core.together import read_together
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Grads, Leaf
from mpjax.transforms._trees import at_least_float32, strong

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
    scale: the factor on the loss, a number or an array of one, in [2^-126, 2^126]. Powers of two
      are exact; another value works and warns once.

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
    object.__setattr__(self, "scale", positive_scale(self.scale, f"{call}(scale)"))
    # Between the user and here: __post_init__, the generated __init__, and the check of its call.
    warn_unless_power_of_two(call, {"scale": self.scale}, stacklevel=4)


@check_init("Write mpjax.DynamicLossScale(init_scale=2**15).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
  """A scale that halves on overflow and doubles after a long run of finite steps.

  The scale never leaves [`min_scale`, `max_scale`]. A step that overflowed is skipped, not run
  again. The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2;
  hysteresis is that of Megatron-LM, where a finite step alone restores nothing (in Apex it does).
  Factors and limits that are powers of two are exact; others work and warn once.

  Args:
    init_scale: the scale at the first step.
    growth_factor: what the scale is multiplied by when it grows, above 1.
    backoff_factor: what the scale is multiplied by on overflow, between 0 and 1.
    growth_interval: the scale grows when this many steps in a row were finite.
    min_scale: the floor; below 1 helps where the loss itself overflows.
    max_scale: the ceiling.
    hysteresis: how many overflows it takes before the scale backs off. Each overflow after that
      backs off too, until `growth_interval` finite steps in a row restore the allowance.

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
    count = functools.partial(check_int, least=1, most=INT32_MAX, expected=expected, fix=fix)
    checks = {
      **dict.fromkeys(("growth_factor", "backoff_factor"), _number),
      **dict.fromkeys(("growth_interval", "hysteresis"), count),
    }
    for field in dataclasses.fields(self):
      check = checks.get(field.name, positive_scale)
      value = check(getattr(self, field.name), f"{call}({field.name})")
      object.__setattr__(self, field.name, value)
    low, high = self.min_scale, self.max_scale
    ranges = {
      "growth_factor": (1 < self.growth_factor <= LARGEST, "a number above 1 (and at most 2^126)"),
      "backoff_factor": (
        SMALLEST <= self.backoff_factor < 1,
        "a number below 1 (and at least 2^-126)",
      ),
      "min_scale": (low <= high, f"at most max_scale={high:.9g}"),
      "init_scale": (low <= self.init_scale <= high, f"a scale in [{low:.9g}, {high:.9g}]"),
    }
    fix = "Take 2 and 0.5 as factors, and limits around init_scale; StaticLossScale never moves."
    for field, (allowed, expected) in ranges.items():
      value = getattr(self, field)
      check_value(value, allowed, f"{call}({field})", expected=expected, fix=fix)
    values = {field: getattr(self, field) for field in (*ranges, "max_scale")}
    warn_unless_power_of_two(call, values, stacklevel=4)


LossScale: TypeAlias = NoLossScale | StaticLossScale | DynamicLossScale
"""Any of the three ways to scale a loss."""


def positive_scale(value: object, where: str) -> float:
  """Returns `value` rounded to float32, or raises if it is no usable scale."""
  scale = _number(value, where)
  check_value(
    value,
    SMALLEST <= scale <= LARGEST,
    where,
    expected="a positive number in [2^-126, 2^126]",
    fix="Choose a power of two such as 2**15: beyond these limits 1/scale is 0 in float32.",
  )
  return scale


def _number(value: object, where: str) -> float:
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


def write_label(config: LossScale, name: str | None = None) -> str:
  """Returns the key for a configuration."""
  # `init_scale` is left out, since the state's own scale replaces it, and so are defaults: a field
  # that a later version adds does not change the text of older states.
  changed = [
    f"{field.name}={getattr(config, field.name):.9g}"
    for field in dataclasses.fields(config)
    if field.name != "init_scale" and getattr(config, field.name) != field.default
  ]
  text = _KINDS[type(config)] + (f"({','.join(changed)})" if changed else "")
  return text if name is None else f"{name}:{text}"


_KINDS = {NoLossScale: "none", StaticLossScale: "static", DynamicLossScale: "dynamic"}
_DEFAULTS = dataclasses.asdict(DynamicLossScale())


def read_label(label: str) -> dict[str, float]:
  """Returns the fields of the configuration that a key names, a dynamic one's with defaults."""
  kind, _, text = label.rpartition(":")[2].removesuffix(")").partition("(")
  pairs = (field.split("=") for field in text.split(",") if field)
  # Nine digits tell all float32 values apart, so this gives back the very number.
  fields = {key: float(np.float32(number)) for key, number in pairs}
  return _DEFAULTS | fields if kind == "dynamic" else fields


class LossScaleState(NamedTuple):
  """The scale and its counters: strongly typed scalars, which stop at 2^31 - 1."""

  scale: Array  # float32: the factor on the next loss
  good_steps: Array  # int32: finite steps in a row since the scale last moved
  hysteresis: Array  # int32: overflows left before the scale backs off
  total: Array  # int32: calls of update
  skipped: Array  # int32: steps that were not applied, for whatever reason
  consecutive_skips: Array  # int32: the skipped steps since the last applied one
  floor_hits: Array  # int32: overflows that found the scale at its minimum already
  bad_updates: Array  # int32: steps skipped for their updates alone
  first_bad: Array  # int32: the last step's first non-finite leaf; their number if none was
  finite: Array  # bool: the last step was applied


COUNTERS = ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits", "bad_updates")
"""The fields that are metrics."""

ScaleState: TypeAlias = LossScaleState | tuple[()]
"""What belongs to one loss; () for `NoLossScale`."""


def init_scale(config: LossScale) -> ScaleState:
  """Returns the state before the first step."""
  if isinstance(config, NoLossScale):
    return ()
  dynamic = isinstance(config, DynamicLossScale)
  counters = {field: jnp.asarray(0, jnp.int32) for field in (*COUNTERS, "first_bad")}
  return LossScaleState(
    scale=jnp.asarray(config.init_scale if dynamic else config.scale, jnp.float32),
    hysteresis=jnp.asarray(config.hysteresis if dynamic else 0, jnp.int32),
    finite=jnp.asarray(True, jnp.bool_),
    **counters,
  )


def adjust(
  config: LossScale,
  state: LossScaleState,
  *,
  finite: Array,
  applied: Array,
  first_bad: Array,
  all_finite: Array,
) -> LossScaleState:
  """Returns the state after a step."""
  # The scale follows the gradients of its own loss alone; what counts as skipped follows `applied`.
  # `finite` is about the gradients (and the loss) of this loss, `all_finite` about those of all;
  # `first_bad` is the position of its first gradient leaf that is not finite.
  dynamic = isinstance(config, DynamicLossScale)
  flags = {"finite": finite, "applied": applied, "first_bad": first_bad, "all_finite": all_finite}
  # A static scale is not computed from anything, and stays the array that it is.
  old = {field: x for field, x in state._asdict().items() if dynamic or field != "scale"}
  read = read_together(old | flags)
  state = state._replace(**{field: read[field] for field in old})
  finite, applied, first_bad, all_finite = (read[flag] for flag in flags)
  good_steps = jnp.where(finite, _count_up(state.good_steps, finite), 0)
  scale, hysteresis, floor_hits = state.scale, state.hysteresis, state.floor_hits
  if dynamic:
    low, high = jnp.float32(config.min_scale), jnp.float32(config.max_scale)
    left = jnp.where(finite, hysteresis, jnp.maximum(hysteresis - 1, 0))
    back_off = jnp.logical_and(jnp.logical_not(finite), left == 0)
    # >=, not ==: a state restored into a shorter interval may be past it already.
    grow = jnp.logical_and(finite, good_steps >= config.growth_interval)
    factor = jnp.where(back_off, jnp.float32(config.backoff_factor), jnp.float32(1))
    factor = jnp.where(grow, jnp.float32(config.growth_factor), factor)
    floor_hits = _count_up(floor_hits, jnp.logical_and(back_off, scale <= low))
    # A multiplication that overflows is inf, one that underflows is 0: the limits catch both.
    scale = jnp.minimum(jnp.maximum(scale * factor, low), high)
    hysteresis = jnp.where(grow, config.hysteresis, left)
    good_steps = jnp.where(grow, 0, good_steps)
  skip = jnp.logical_not(applied)
  return LossScaleState(
    scale=scale,
    good_steps=good_steps,
    hysteresis=hysteresis,
    total=_count_up(state.total, True),
    skipped=_count_up(state.skipped, skip),
    consecutive_skips=jnp.where(skip, _count_up(state.consecutive_skips, skip), 0),
    floor_hits=floor_hits,
    bad_updates=_count_up(state.bad_updates, jnp.logical_and(all_finite, skip)),
    first_bad=first_bad,
    finite=applied,
  )


def _count_up(count: Array, by_one: Array | bool) -> Array:
  return jnp.where(jnp.logical_and(by_one, count < INT32_MAX), count + 1, count)


def unscale_tree(grads: Grads, scale: Array | None) -> Grads:
  """Returns `grads` divided by `scale`, in float32 (float64 and complex leaves as they are)."""

  # XLA turns the division into a multiplication by 1/scale, which is exact for a power of two and
  # otherwise within 1 ulp of the gradient; the limits of a scale keep the reciprocal a normal
  # number. Leaves that are no floating or complex numbers are returned as they are.
  def unscaled(g: Leaf) -> Leaf:
    if not is_inexact(g):
      return g
    # The cast comes first: in float16 the quotient would underflow.
    g = strong(at_least_float32(g))
    if scale is None:
      return g
    by = scale.astype(g.real.dtype)
    # Part by part: a complex division squares the scale on the way, which overflows.
    return jax.lax.complex(g.real / by, g.imag / by) if jnp.iscomplexobj(g) else g / by

  return jax.tree.map(unscaled, grads)
