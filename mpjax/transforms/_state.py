"""The states of the wrappers, and the loss scale in one: finding it, reading it, setting it."""

import collections
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  check_scalar,
  check_value,
  kind_of,
)
from mpjax._core.trees import is_nnx_object
from mpjax._core.types import Array, Leaf, OptState, PyTree
from mpjax.transforms._checks import check_state
from mpjax.transforms._loss_scale import (
  LARGEST,
  SMALLEST,
  LossScale,
  LossScaleState,
  ScaleState,
  StaticLossScale,
  init_scale,
  positive_scale,
  read_label,
  warn_unless_power_of_two,
)
from mpjax.transforms._trees import nodes_of, put_like


class LossScalingState(NamedTuple):
  """The state of `mpjax.loss_scaling`.

  Args:
    loss_scale: one entry for each loss, of scalars (`scale` in float32, `finite` bool, counts in
      int32). Its key holds the name and the configuration: static under `jit` as part of the tree's
      structure, so that a checkpoint of another configuration does not fit.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> list(mpjax.loss_scaling(optax.sgd(0.1), name="actor").init(jnp.ones(2)).loss_scale)
  ['actor:dynamic']
  """

  loss_scale: dict[str, ScaleState]
  inner_state: OptState


class AccumulationState(NamedTuple):
  """The state of `mpjax.accumulate_gradients`.

  Args:
    micro_batches: int32 of shape (), how many are in the open window.
    updates_done: int32 of shape (), the updates of the inner optimizer, which schedules count too.
    total: float32 in the shapes of the parameters, the sum of the window's gradients; -0.0 before
      the first.
    inner_state: the state of the inner optimizer.
    value: float32 of shape (), the sum of the window's `value=`; None unless `inner` takes it.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.accumulate_gradients(optax.sgd(0.1), 4).init(jnp.ones(2)).total.dtype
  dtype('float32')
  """

  micro_batches: Array
  updates_done: Array
  total: PyTree
  inner_state: OptState
  value: PyTree = None


class MasterWeightsState(NamedTuple):
  """The state of `mpjax.master_weights`.

  Args:
    master: float32 in the shapes of the parameters, None for those that are not stored in low
      precision, which are their own master. With `storage="split"` it is int16 for bfloat16
      parameters: the bits of the master minus 2^16 times those of its parameter.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16)).master.dtype
  dtype('float32')
  """

  master: PyTree
  inner_state: OptState


class OwnedScale(NamedTuple):
  """One loss scale: the state that it is in, and what its label says."""

  owner: LossScalingState
  label: str
  name: str | None
  stored: Any  # the numbers, in variables perhaps; () under `NoLossScale`
  fields: Mapping[str, float]  # of the configuration

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    return LossScaleState(*map(plain_array, self.stored)) if self.stored else None

  @property
  def dynamic(self) -> bool:
    """Whether the scale moves."""
    return "growth_interval" in self.fields

  @property
  def limits(self) -> tuple[float, float]:
    """The smallest and the largest scale that may be set."""
    return self.fields.get("min_scale", SMALLEST), self.fields.get("max_scale", LARGEST)

  @property
  def largest(self) -> float:
    """The largest scale that training comes to."""
    return self.fields.get("scale", self.limits[1])


def plain_array(x: Leaf) -> Leaf:
  """Returns the array that a variable holds (`nnx.Optimizer` keeps its state in some), or `x`."""
  held = None if isinstance(x, jax.Array) else getattr(x, "__jax_array__", None)
  return x if held is None else held()


def scales_in(tree: PyTree) -> list[OwnedScale]:
  """Returns every loss scale in `tree`, wherever it is."""
  return [
    OwnedScale(owner, label, label.rpartition(":")[0] or None, stored, read_label(label))
    for owner in nodes_of(tree, LossScalingState)
    for label, stored in owner.loss_scale.items()
  ]


def own_scales(state: OptState, configs: Mapping[str, LossScale]) -> dict[str, ScaleState]:
  """Returns the scales in the state of the transformation with these configurations, by label."""
  where = "mpjax.loss_scaling(inner).update(state)"
  scales = check_state(state, LossScalingState, where).loss_scale
  if set(scales) != set(configs):
    raise MpjaxValueError(
      where,
      expected=f"a state created with the configuration {', '.join(map(repr, configs))}",
      got=f"one created with {', '.join(map(repr, scales))}",
      fix="Build the optimizer as it was, or make a new state with init, put the old "
      "inner_state into it (_replace) and carry the scale over with mpjax.set_loss_scale.",
    )
  return {label: scales[label] for label in configs}


def find_scale(opt_state: OptState, where: str, name: str | None) -> OwnedScale:
  """Returns the one loss scale in `opt_state` (called `name`, if one is given)."""
  scales = scales_in(opt_state)
  if not scales:
    raise MpjaxTypeError(
      where,
      expected="the state of an optimizer created by mpjax.loss_scaling",
      got=f"{kind_of(opt_state)} without a loss scale",
      fix="Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)."
      if is_nnx_object(opt_state)
      else "Wrap the optimizer, tx = mpjax.loss_scaling(tx); pass opt_state = tx.init(params), "
      "not tx. A checkpoint is restored into that structure.",
    )
  refuse_outside(opt_state, where, chains=True)
  picked = [one for one in scales if name is None or one.name == name]
  if len(picked) != 1:
    at = f"{where} with name={name!r}"
    error, place = (MpjaxTypeError, where) if picked else (MpjaxValueError, at)
    raise error(
      place,
      expected="a state with one loss scale, or the name of a loss scale in it",
      got=f"one with {len(scales)}, named {[one.name for one in scales]}",
      fix="Tell them apart by name=, with the names in mpjax.loss_scaling(..., name=...).",
    )
  return picked[0]


def read_state(opt_state: OptState, where: str, name: str | None) -> LossScaleState:
  """Returns the numbers of the one loss scale in `opt_state`; `NoLossScale` has those of 1."""
  state = find_scale(opt_state, where, name).state
  if state is None:
    return LossScaleState(*init_scale(StaticLossScale(1)))
  if _is_constant(state.total):
    raise _stale(where, _CONSTANT)
  return state


def scale_reader(owned: OwnedScale, where: str) -> Callable[[PyTree], Array | None]:
  """Returns a function that reads a loss scale, and raises if it is not that of the step."""
  # It takes what the scale is for: a loss, gradients, parameters. A static scale is always right,
  # and so is one in a variable, or in a state that is traced. Else two things show that it was
  # built outside of the step: a constant scale where the rest is traced, and a state that was there
  # at the first call and is not at a later one, since every update makes a new count of good steps.
  state = owned.stored
  if not state:
    return lambda beside: None
  # Not all of the state: moments must not live on for the sake of the scale.
  source, steps, dynamic, seen = state.scale, state.good_steps, owned.dynamic, False
  may_go = dynamic and isinstance(steps, jax.Array) and not isinstance(steps, Tracer)
  witness = weakref.ref(steps) if may_go else lambda: source

  def read(beside: PyTree) -> Array:
    nonlocal seen
    if seen and witness() is None:
      raise _stale(where, "one of a state that is gone since the first call")
    seen = witness() is not None
    scale = plain_array(source)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(beside))
    if dynamic and traced and _is_constant(scale):
      raise _stale(where, _CONSTANT)
    return scale

  return read


_CONSTANT = "one from outside of the function that is being traced, where it would be a constant"


def _is_constant(x: Leaf) -> bool:
  """Whether `x` is a constant of a function that is traced."""
  # Under `vmap` or `grad` alone what is computed from a constant is an array again.
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
  """Raises if what a wrapper is around has a loss scale."""
  if scales_in(inner_state):
    expected = "an optimizer without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=f"one that holds {got}", fix=fix)


_HARMLESS = (optax.MaskedState, optax.PartitionState, optax.contrib.SplitRealAndImaginaryState)
"""The states of those wrappers of optax that count nothing and compute nothing: they pick parts."""


def refuse_outside(tree: PyTree, where: str, *, chains: bool = False) -> None:
  """Raises if a scale is inside of the state of a wrapper not known to be harmless there.

  With `chains` a tuple is the state of a chain: nothing beside the scale may keep a state.
  """
  if isinstance(tree, LossScalingState) or not _any_scale(tree):
    return
  parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
  scaled = [x for x in parts if _any_scale(x)]
  got = ""
  if _library(tree) == "optax" and not isinstance(tree, _HARMLESS):
    got = f"one inside of the state optax.{type(tree).__name__}"
  elif chains and type(tree) in (tuple, collections.OrderedDict):
    others = [x for x in parts if not _any_scale(x)]
    for x in jax.tree.leaves(others, is_leaf=lambda x: _library(x) != ""):
      if _library(x) and jax.tree.leaves(x):
        got = f"one in a chain beside the state {_library(x)}.{type(x).__name__}"
    if len(scaled) > 1 and not all(isinstance(x, optax.MaskedState) for x in scaled):
      got = f"a chain of {len(scaled)}, each of which divides the gradients again"
  if got:
    raise MpjaxTypeError(
      where,
      expected="mpjax.loss_scaling around the entire optimizer",
      got=f"{got}: it would see scaled gradients, or steps that are skipped",
      fix="Put all of it inside, mpjax.loss_scaling(optax.chain(...)), once. To read one of "
      "several optimizers, pass its state alone, or keep them in a dict.",
    )
  for x in scaled:
    refuse_outside(x, where, chains=chains)


def _library(state: object) -> str:
  """Returns the library whose state this is; "" where it is no state of optax or mpjax."""
  library = type(state).__module__.partition(".")[0]
  return library if library in ("optax", "mpjax") else ""


def _any_scale(tree: PyTree) -> bool:
  return any(one.state is not None for one in scales_in(tree))


def set_loss_scale(
  opt_state: OptState, value: Array | float, *, name: str | None = None
) -> OptState:
  """Returns `opt_state` with its loss scale set to `value`, which starts a new window for growth.

  To carry a scale over to a larger tree of parameters, set it in the state that `init` makes.

  Args:
    opt_state: a state that holds a loss scale. It is not changed.
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
  >>> opt_state = mpjax.set_loss_scale(opt_state, 1024)
  >>> float(mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  1024.0
  """
  where = "mpjax.set_loss_scale(opt_state)"
  target = find_scale(opt_state, where, name)
  state = target.state
  if state is None:
    expected, got = "a state with a scale that can move", "one of NoLossScale(), which is always 1"
    fix = "Build the optimizer with StaticLossScale or DynamicLossScale."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  scale_reader(target, where)(value)
  low, high = target.limits
  where = "mpjax.set_loss_scale(value)"
  if isinstance(value, Tracer):
    fix = "Pass a number, one for all."
    check_scalar(value, where, expected="a scale of shape ()", fix=fix)
    scale: Array | float = jnp.clip(jnp.asarray(value, jnp.float32), low, high)
  else:
    scale = positive_scale(value, where)
    expected = f"a scale in [{low:.9g}, {high:.9g}], the limits of this state"
    fix = "Choose a value within, or widen min_scale and max_scale of DynamicLossScale."
    check_value(value, low <= scale <= high, where, expected=expected, fix=fix)
    warn_unless_power_of_two(where, {"value": scale}, stacklevel=2)
  good_steps = full_like(state.good_steps, 0)
  moved = state._replace(scale=full_like(state.scale, scale), good_steps=good_steps)
  return replace_scale(opt_state, target, moved)


def full_like(x: Array, number: Array | float) -> Array:
  """Returns an array of one number with the shape (of a vmapped state), dtype and place of `x`."""
  # So the next step does not retrace. jnp.full_like itself fails of an array in host memory.
  is_traced = isinstance(x, Tracer)
  return jnp.full_like(x, number) if is_traced else put_like(jnp.full(x.shape, number, x.dtype), x)


def replace_scale(opt_state: PyTree, target: OwnedScale, new: LossScaleState) -> PyTree:
  """Returns `opt_state` with `new` instead of the loss scale `target` in it."""
  # In the structure of the old one: an `nnx.Optimizer` goes on with variables.
  like_old = jax.tree.unflatten(jax.tree.structure(target.stored), new)
  owner = target.owner._replace(loss_scale={**target.owner.loss_scale, target.label: like_old})
  is_owner = lambda x: x is target.owner  # noqa: E731
  return jax.tree.map(lambda x: owner if is_owner(x) else x, opt_state, is_leaf=is_owner)
