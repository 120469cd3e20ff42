"""The loss scale: its configurations, its state, and finding, reading and setting it in others."""

import collections
import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  check_init,
  check_int,
  check_scalar,
  check_value,
  kind_of,
  wrong_type,
)
from mpjax._core.fused_leaves import read_together
from mpjax._core.leaves import Path, is_nnx_variable, path_text, raw_value, set_raw_value
from mpjax._core.trees import is_nnx_object
from mpjax._core.types import Array, Grads, KeyPath, Leaf, OptState, PyTree, is_inexact
from mpjax._optim.optimizer_trees import at_least_float32, full_like, strong
from mpjax._optim.states import LossScaleState, LossScalingState, ScaleState
from mpjax._optim.wrapper_checks import check_state

SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Outside, 1/scale or the scale itself is subnormal in float32, and XLA flushes it to 0."""

INT32_MAX = 2**31 - 1
UPDATED = ContextVar[Callable[[Array, Array], object]]("UPDATED", default=lambda *_: None)
"""Receives the counts of steps that each update read and returned. `atomic_step` sets it."""


@check_init("Write mpjax.NoLossScale().")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoLossScale:
  """No scaling, no check and no skipped step: nothing is added to the jaxpr.

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
    # The class is frozen. The stored scale is the float32 value that the state will hold.
    object.__setattr__(self, "scale", positive_scale(self.scale, f"{call}(scale)"))
    # The frames between the user and the warning: __post_init__, the generated __init__, and the
    # check of its call.
    _warn_unless_power_of_two(call, {"scale": self.scale}, stacklevel=5)


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
    min_scale: the smallest scale. Choose one below 1 if the loss itself overflows.
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
    _warn_unless_power_of_two(call, floats, stacklevel=5)


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


def _warn_unless_power_of_two(where: str, values: Mapping[str, float], stacklevel: int) -> None:
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


COUNTERS = ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits", "bad_updates")


def init_scale(config: LossScale) -> ScaleState:
  """Returns the state before the first step."""
  if isinstance(config, NoLossScale):
    return ()
  match config:
    # Constant scales never back off, so their hysteresis is 0.
    case SkipNonfinite():
      scale, hysteresis = 1.0, 0
    case StaticLossScale(scale):
      hysteresis = 0
    case DynamicLossScale():
      scale, hysteresis = config.init_scale, config.hysteresis
  # One array per counter: two leaves that share a buffer cannot both be donated.
  counters = {field: jnp.asarray(0, jnp.int32) for field in (*COUNTERS, "first_bad")}
  return LossScaleState(
    scale=jnp.asarray(scale, jnp.float32),
    hysteresis=jnp.asarray(hysteresis, jnp.int32),
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
  # Two flags decide. The scale follows `finite`: the gradients and the loss of its own loss. The
  # count of skipped steps follows `applied`, which covers all losses and the updates.
  dynamic = isinstance(config, DynamicLossScale)
  flags = {"finite": finite, "applied": applied, "first_bad": first_bad, "all_finite": all_finite}
  # A static scale is no result of the step. It stays the same array, and needs no kernel.
  old = {field: x for field, x in state._asdict().items() if dynamic or field != "scale"}
  read = read_together(old | flags)
  state = state._replace(**{field: read[field] for field in old})
  finite, applied, first_bad, all_finite = (read[flag] for flag in flags)
  good_steps = jnp.where(finite, _count_up(state.good_steps, finite), 0)
  scale = state.scale
  hysteresis = state.hysteresis
  floor_hits = state.floor_hits
  if dynamic:
    low, high = jnp.float32(config.min_scale), jnp.float32(config.max_scale)
    # At 0, each further overflow backs off too, until the scale has grown.
    left = jnp.where(finite, hysteresis, jnp.maximum(hysteresis - 1, 0))
    back_off = jnp.logical_and(jnp.logical_not(finite), left == 0)
    # >=, not ==: a state restored into a shorter interval may be past it already.
    grow = jnp.logical_and(finite, good_steps >= config.growth_interval)
    factor = jnp.where(back_off, jnp.float32(config.backoff_factor), jnp.float32(1))
    factor = jnp.where(grow, jnp.float32(config.growth_factor), factor)
    # An overflow at the minimum: the loss itself or the data is the cause.
    floor_hits = _count_up(floor_hits, jnp.logical_and(back_off, scale <= low))
    # The limits also catch products that overflow to inf or underflow to 0.
    scale = jnp.minimum(jnp.maximum(scale * factor, low), high)
    hysteresis = jnp.where(grow, config.hysteresis, left)
    # Growing restores the hysteresis and starts the next interval.
    good_steps = jnp.where(grow, 0, good_steps)
  skip = jnp.logical_not(applied)
  # By identity, `atomic_step` sees that one update led from the old state to the new one.
  total = _count_up(state.total, True)
  UPDATED.get()(old["total"], total)
  return LossScaleState(
    scale=scale,
    good_steps=good_steps,
    hysteresis=hysteresis,
    total=total,
    skipped=_count_up(state.skipped, skip),
    consecutive_skips=jnp.where(skip, _count_up(state.consecutive_skips, skip), 0),
    floor_hits=floor_hits,
    # All gradients were finite, so only an update or the new state can be the cause.
    bad_updates=_count_up(state.bad_updates, jnp.logical_and(all_finite, skip)),
    first_bad=first_bad,
    finite=applied,
  )


def _count_up(count: Array, by_one: Array | bool) -> Array:
  """Returns a counter after a step; it stops at 2^31 - 1 instead of wrapping to a negative."""
  return jnp.where(jnp.logical_and(by_one, count < INT32_MAX), count + 1, count)


def unscale_tree(grads: Grads, scale: Array | None) -> Grads:
  """Returns `grads` divided by `scale`, in float32 (float64 and complex leaves as they are)."""

  # XLA turns the division into a multiplication by 1/scale. It is exact for a power of two, and
  # otherwise within 1 ulp. The limits of a scale keep the reciprocal a normal number.
  def unscaled(g: Leaf) -> Leaf:
    if not is_inexact(g):
      return g
    # The cast comes first: in float16 the quotient would underflow.
    g = strong(at_least_float32(g))
    if scale is None:
      return g
    by = scale.astype(g.real.dtype)
    # A complex division computes |scale|^2, which overflows for large scales. So divide the parts.
    return jax.lax.complex(g.real / by, g.imag / by) if jnp.iscomplexobj(g) else g / by

  return jax.tree.map(unscaled, grads)


class OwnedScale(NamedTuple):
  """One loss scale: the state around it, and the configuration in its label."""

  node: Any  # of the tree that was searched: a `LossScalingState`, or a mapping with its fields
  owner: LossScalingState
  label: str
  name: str | None
  stored: Any  # the numbers, in variables perhaps; () under `NoLossScale`
  fields: Mapping[str, float]  # of the configuration

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    return LossScaleState(*map(raw_value, self.stored)) if self.stored else None

  @property
  def dynamic(self) -> bool:
    """Whether the scale moves."""
    return "growth_interval" in self.fields

  @property
  def kind(self) -> type[LossScale]:
    """The class of the configuration."""
    return next(kind for kind, text in _KINDS.items() if text == _kind_in(self.label))

  @property
  def multiplies(self) -> bool:
    """Whether losses are multiplied by a scale that the user has chosen."""
    return self.kind not in (NoLossScale, SkipNonfinite)

  @property
  def in_variables(self) -> bool:
    """Whether its numbers are in variables, as those of an `nnx.Optimizer` are."""
    return any(map(is_nnx_variable, self.stored))

  @property
  def limits(self) -> tuple[float, float]:
    """The smallest and the largest scale that may be set."""
    return self.fields.get("min_scale", SMALLEST), self.fields.get("max_scale", LARGEST)

  @property
  def largest(self) -> float:
    """The largest scale that training comes to."""
    return self.fields.get("scale", self.limits[1])


def scales_in(tree: PyTree) -> list[OwnedScale]:
  """Returns every loss scale in `tree`, wherever it is."""
  return [
    OwnedScale(node, owner, label, label.rpartition(":")[0] or None, stored, read_label(label))
    for _, node, owner in scaling_states(tree)
    for label, stored in owner.loss_scale.items()
  ]


def scaling_states(tree: PyTree) -> Iterator[tuple[KeyPath, PyTree, LossScalingState]]:
  """Yields each state of `mpjax.loss_scaling` in `tree`: its path, its node, and its content.

  An `nnx.State`, its pure dict and a checkpoint that was read without a target have mappings in
  place of classes. Their nodes are no `LossScalingState`.
  """
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaling_state)
  yield from ((path, node, with_classes(node)) for path, node in nodes if is_scaling_state(node))


def leaves_of(tree: PyTree, is_leaf: Callable[..., bool] = is_nnx_variable) -> dict[Path, Leaf]:
  """Returns all leaves of a tree by their paths, each key as Python writes it.

  In a state of `mpjax.loss_scaling` these are the keys of its classes, also where it has mappings.
  """
  # `with_classes` returns a node itself if it has the class. Another object means a mapping.
  mappings = [path for path, node, owner in scaling_states(tree) if node is not owner]
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {_names(path, mappings): x for path, x in leaves}


def _names(path: KeyPath, mappings: Iterable[KeyPath]) -> Path:
  """Returns the keys of a path, below `mappings` those of the classes that these stand for."""
  names = [jax.tree_util.keystr((key,)) for key in path]
  for root in mappings:
    if path[: len(root)] != root:
      continue
    # A path into a state is: a field of `LossScalingState`, a label, a field of `LossScaleState`. A
    # mapping writes fields as `['scale']`, the class as `.scale`. Labels are keys in both.
    field, _, number = range(len(root), len(root) + 3)
    is_scale = names[field : field + 1] == ["['loss_scale']"]
    positions = (field, number) if is_scale else (field,)
    names = [f".{x[2:-2]}" if i in positions else x for i, x in enumerate(names)]
  return tuple(names)


def is_scaling_state(node: object) -> bool:
  """Whether a node of a tree is a state of `mpjax.loss_scaling`, or a mapping with its fields."""
  if isinstance(node, LossScalingState):
    return True
  scales = node.get("loss_scale") if isinstance(node, Mapping) else None
  if not isinstance(scales, Mapping) or not scales:
    return False
  return all(_is_loss_scale(label, numbers) for label, numbers in scales.items())


def _is_loss_scale(label: object, numbers: object) -> bool:
  """Whether an entry of a mapping holds the numbers of a loss scale."""
  if not isinstance(label, str) or not isinstance(numbers, Mapping):
    return False
  # `NoLossScale` stores nothing.
  fields = () if _kind_in(label) == _KINDS[NoLossScale] else LossScaleState._fields
  return is_label(label) and set(numbers) == set(fields)


def is_label(label: str) -> bool:
  """Whether a key of a state was written by `write_label`."""
  return _kind_in(label) in _KINDS.values()


def _kind_in(label: str) -> str:
  return label.rpartition(":")[2].partition("(")[0]


def with_classes(node: PyTree) -> LossScalingState:
  """Returns a node that `is_scaling_state` as an instance of its class."""
  if isinstance(node, LossScalingState):
    return node
  scales = {
    label: LossScaleState(**numbers) if numbers else ()
    for label, numbers in node["loss_scale"].items()
  }
  # An `nnx.State` has no node for a state without arrays, such as that of `optax.sgd`.
  return LossScalingState(scales, node.get("inner_state", ()))


def check_scales(state: OptState, configs: Mapping[str, LossScale]) -> dict[str, ScaleState]:
  """Returns the scales in the state of the transformation with these configurations, by label."""
  where = "mpjax.loss_scaling(inner).update(state)"
  scales = check_state(state, LossScalingState, where).loss_scale
  # Another configuration would go on from numbers that its limits and intervals do not allow.
  if set(scales) != set(configs):
    expected = f"a state created with the configuration {', '.join(map(repr, configs))}"
    got = f"one created with {', '.join(map(repr, scales))}"
    fix = (
      "Build the optimizer as it was, or make a new state with init, put the old inner_state into "
      "it (_replace) and carry the scale over with mpjax.states.set_loss_scale."
    )
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return {label: scales[label] for label in configs}


def find_scale(opt_state: OptState, where: str, name: str | None) -> OwnedScale:
  """Returns the one loss scale in `opt_state` (called `name`, if one is given)."""
  scales = scales_in(opt_state)
  if not scales:
    fix = (
      "Wrap the optimizer: tx = mpjax.loss_scaling(tx). "
      "An nnx.State keeps nothing under NoLossScale(): pass the nnx.Optimizer."
    )
    if isinstance(opt_state, optax.GradientTransformation):
      fix = "Pass its state, opt_state = tx.init(params), or an nnx.Optimizer."
    elif is_nnx_object(opt_state):
      fix = "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)."
    expected = "the state of an optimizer created by mpjax.loss_scaling"
    got = f"{kind_of(opt_state)} without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # The scale is there, but its place in a chain may be wrong.
  refuse_outside(opt_state, where, chains=True)
  picked = [one for one in scales if name is None or one.name == name]
  expected = "a state with one loss scale, or the name of a loss scale in it"
  got = f"one with {len(scales)}, named {[one.name for one in scales]}"
  fix = "Tell them apart by name=, with the names in mpjax.loss_scaling(..., name=...)."
  if not picked:
    raise MpjaxValueError(f"{where} with name={name!r}", expected=expected, got=got, fix=fix)
  if len(picked) > 1:
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  return picked[0]


def read_state(opt_state: OptState, where: str, name: str | None) -> LossScaleState:
  """Returns the numbers of the one loss scale in `opt_state`; `NoLossScale` has those of 1."""
  if (state := find_scale(opt_state, where, name).state) is None:
    return LossScaleState(*init_scale(StaticLossScale(1)))
  if _is_constant(state.total):
    raise _stale(where, _CONSTANT)
  return state


def scale_reader(owned: OwnedScale, where: str) -> Callable[[PyTree], Array | None]:
  """Returns a function that reads a loss scale, and raises if the scale is stale.

  The function takes the values that the scale is for: a loss, gradients, parameters. If one of
  these is traced, a dynamic scale has to be traced too, because a constant never changes. The scale
  of a donated state raises too. Outside `jit` the function cannot detect an old state, and reads
  its scale.
  """
  if not owned.stored:
    return lambda beside: None
  # Close over the scale alone. The whole state would keep the moments in memory.
  source, is_dynamic = owned.stored.scale, owned.dynamic

  def read(beside: PyTree) -> Array:
    scale = raw_value(source)
    # A donated array raises an error of XLA when it is read, which does not say why.
    if isinstance(scale, jax.Array) and not isinstance(scale, Tracer) and scale.is_deleted():
      raise _stale(where, "one of a state that was donated to a step")
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(beside))
    if is_dynamic and is_traced and _is_constant(scale):
      raise _stale(where, _CONSTANT)
    return scale

  return read


_CONSTANT = "one from outside of the function that is being traced, where it would be a constant"


def _is_constant(x: Leaf) -> bool:
  """Whether `x` is a constant of a function that is traced."""
  # Under `jit` or `scan` an operation on a constant returns a tracer. Under `vmap` or `grad` alone
  # it returns an array, and the scale is read again at each call.
  return not isinstance(x, Tracer) and isinstance(jax.lax.neg(x), Tracer)


def _stale(where: str, got: str) -> MpjaxRuntimeError:
  return MpjaxRuntimeError(
    where,
    expected="the loss scale of the state that this step updates",
    got=got,
    fix="Build it inside of the step, from the state that the step is given: "
    "mpjax.value_and_grad(loss_fn, opt_state)(params, batch), opt_state or an nnx.Optimizer. To "
    "jit, scan, checkpoint or eval_shape that state is an argument or the carry, as params are.",
  )


def refuse_scale_inside(inner_state: OptState, where: str, *, got: str, fix: str) -> None:
  """Raises if the optimizer inside of a wrapper has a loss scale."""
  if scales_in(inner_state):
    expected = "an optimizer without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=f"one that holds {got}", fix=fix)


_HARMLESS = (optax.MaskedState, optax.PartitionState, optax.contrib.SplitRealAndImaginaryState)
"""The states of those wrappers of optax that count nothing and compute nothing: they pick parts."""


def refuse_outside(tree: PyTree, where: str, *, chains: bool = False) -> None:
  """Raises if a scale is inside of the state of a wrapper not known to be harmless there.

  With `chains` a tuple is the state of a chain: nothing beside the scale may keep a state.
  """
  if is_scaling_state(tree) or not _is_scaled(tree):
    return
  # The children of this node. Each is visited below.
  parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
  got = ""
  # A wrapper of optax around the scale: `MultiSteps` would add scaled gradients.
  if type(tree).__module__.startswith("optax.") and not isinstance(tree, _HARMLESS):
    got = f"one inside of the state optax.{type(tree).__name__}"
  elif chains and type(tree) in (tuple, collections.OrderedDict):
    got = _beside_in_chain(parts)
  if got:
    expected = "mpjax.loss_scaling around the entire optimizer"
    fix = (
      "Put all of it inside, mpjax.loss_scaling(optax.chain(...)), once. To read one of several "
      "optimizers, pass its state alone, or keep them in a dict."
    )
    got += ": it would see scaled gradients, or steps that are skipped"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  for part in parts:
    refuse_outside(part, where, chains=chains)


def _is_scaled(tree: PyTree) -> bool:
  """Whether there is a loss scale in `tree`, other than `NoLossScale`."""
  return any(one.stored for one in scales_in(tree))


def _beside_in_chain(parts: list[PyTree]) -> str:
  """Names a state that must not be beside a loss scale in a chain; "" if there is none."""
  # `optax.masked` may restrict each scale to other parameters. Otherwise the second divides again.
  scaled = [x for x in parts if _is_scaled(x)]
  if len(scaled) > 1 and not all(isinstance(x, optax.MaskedState) for x in scaled):
    return f"a chain of {len(scaled)}, each of which divides the gradients again"
  # States are NamedTuples, also those of users. A transformation without arrays, such as
  # `optax.scale`, computes the same for scaled gradients.
  others = [x for x in parts if not _is_scaled(x)]
  states = jax.tree.leaves(others, is_leaf=lambda x: hasattr(x, "_fields"))
  stateful = [type(x) for x in states if isinstance(x, tuple) and jax.tree.leaves(x)]
  if not stateful:
    return ""
  kind = stateful[-1]
  library = kind.__module__.partition(".")[0]
  return f"one in a chain beside the state {library}.{kind.__name__}"


def set_loss_scale(
  opt_state: OptState, value: Array | float, *, name: str | None = None
) -> OptState:
  """Set the loss scale in `opt_state` to `value`, and restart its count of good steps.

  To carry a scale over to a larger tree of parameters, set it in the state that `init` makes.

  Args:
    opt_state: a state that holds a loss scale. The variables of an `nnx.Optimizer` are written; an
      `nnx.State` is not changed.
    value: a number, or an array of shape (), within the limits of the state's configuration. A
      power of two is exact; another warns once. A traced one is brought within the limits.
    name: which of several loss scales to set.

  Returns:
    A state of the same structure, shapes, dtypes and shardings.

  Raises:
    MpjaxTypeError: `value` is no number, or the state has no scale, or has two.
    MpjaxValueError: `value` is outside the limits, scaling is off, or no scale is called `name`.
    MpjaxRuntimeError: `value` is traced, and the state is from outside of what is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> opt_state = mpjax.states.set_loss_scale(opt_state, 1024)
  >>> float(mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  1024.0
  """
  where = "mpjax.states.set_loss_scale(opt_state)"
  target = find_scale(opt_state, where, name)
  state = target.state
  if state is None or not target.multiplies:
    expected = "a state with a scale that can move"
    got = f"one of {target.kind.__name__}(), which is always 1"
    fix = "Build the optimizer with StaticLossScale or DynamicLossScale."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  # Reading the scale raises if `value` is traced and the scale is a constant of that trace.
  read = scale_reader(target, where)
  read(value)
  low, high = target.limits
  where = "mpjax.states.set_loss_scale(value)"
  if isinstance(value, Tracer):
    check_scalar(value, where, expected="a scale of shape ()", fix="Pass a number, one for all.")
    # A traced number cannot be checked. `fmax` returns the other argument for a NaN.
    scale: Array | float = jnp.minimum(jnp.fmax(jnp.asarray(value, jnp.float32), low), high)
  else:
    scale = positive_scale(value, where)
    expected = f"a scale in [{low:.9g}, {high:.9g}], the limits of this state"
    fix = "Choose a value within, or widen min_scale and max_scale of DynamicLossScale."
    check_value(value, low <= scale <= high, where, expected=expected, fix=fix)
    _warn_unless_power_of_two(where, {"value": scale}, stacklevel=3)
  good_steps = full_like(state.good_steps, 0)
  moved = state._replace(scale=full_like(state.scale, scale), good_steps=good_steps)
  # An `nnx.Optimizer` is written to, since a new one would share its moments. An `nnx.State` is
  # replaced.
  if not target.in_variables or target.node is not target.owner:
    return replace_scale(opt_state, target, moved)
  store_scale(target, moved)
  return opt_state


def store_scale(target: OwnedScale, new: LossScaleState) -> None:
  """Writes `new` to the variables that the loss scale `target` is in."""
  for variable, x in zip(target.stored, new, strict=True):
    set_raw_value(variable, x)


def replace_scale(opt_state: PyTree, target: OwnedScale, new: LossScaleState) -> PyTree:
  """Returns `opt_state` with `new` instead of the loss scale `target` in it."""
  node = _with_scale(target, new)

  def is_node(x: PyTree) -> bool:
    return x is target.node

  return jax.tree.map(lambda x: node if is_node(x) else x, opt_state, is_leaf=is_node)


def _with_scale(target: OwnedScale, new: LossScaleState) -> PyTree:
  """Returns the node that the loss scale `target` is in, with `new` instead of it."""
  if isinstance(target.node, LossScalingState):
    return target.node._replace(loss_scale={**target.node.loss_scale, target.label: new})
  # A mapping: replace its leaves by their paths.
  numbers = {f"loss_scale/{target.label}/{field}": x for field, x in new._asdict().items()}

  def replaced(path: KeyPath, x: Leaf) -> Leaf:
    # In a variable there is one more key, that of its value.
    return numbers.get(path_text(path[:3]), x)

  return jax.tree_util.tree_map_with_path(replaced, target.node)
