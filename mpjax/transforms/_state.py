"""The states of the wrappers, and the loss scale in one: finding it, reading it, setting it."""

import collections
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

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
  Label,
  LossScale,
  LossScaleState,
  ScaleState,
  StaticLossScale,
  init_scale,
  parse_label,
  positive_scale,
  warn_unless_power_of_two,
)
from mpjax.transforms._trees import nodes_of, put_like

LossScales: TypeAlias = dict[str, ScaleState]
"""Labels and what belongs to them."""


class LossScalingState(NamedTuple):
  """The state of `mpjax.loss_scaling`.

  Args:
    loss_scale: one entry for each loss, of scalars (`scale` in float32, `finite` bool, counts in
      int32). Its key holds the name and the configuration: static under `jit` as part of the tree's
      structure, so that a checkpoint of another configuration does not fit.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> isinstance(state, mpjax.states.LossScalingState), len(state.inner_state)
  (True, 2)
  """

  loss_scale: LossScales
  inner_state: OptState


class ChainedLossScalingState(LossScalingState):
  """The same in `optax.chain`, whose state is a tuple, as those of two optimizers may be."""


class AccumulationState(NamedTuple):
  """The state of `mpjax.accumulate_gradients`.

  Args:
    micro_batches: int32 of shape (), how many are in the open window.
    updates_done: int32 of shape (), the updates of the inner optimizer, which schedules count too.
    total: float32 in the shapes of the parameters, the sum of the window's gradients; -0.0, which
      changes nothing that is added to it, before the first.
    inner_state: the state of the inner optimizer.
    value: float32 of shape (), the sum of the window's `value=`; None unless `inner` takes it.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.accumulate_gradients(optax.sgd(0.1), 4).init(jnp.ones(2))
  >>> isinstance(state, mpjax.states.AccumulationState), int(state.micro_batches), state.total.dtype
  (True, 0, dtype('float32'))
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
  >>> state = mpjax.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16))
  >>> isinstance(state, mpjax.states.MasterWeightsState), state.master.dtype
  (True, dtype('float32'))
  """

  master: PyTree
  inner_state: OptState


class OwnedScale(NamedTuple):
  """One loss scale, and the state that it is in."""

  owner: LossScalingState
  label: str

  @property
  def says(self) -> Label:
    """What the label says: the name, or None, and the configuration."""
    return parse_label(self.label)

  @property
  def name(self) -> str | None:
    return self.says.name

  @property
  def stored(self) -> Any:
    """The numbers as they are stored, in variables perhaps; () under `NoLossScale`."""
    return self.owner.loss_scale[self.label]

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    return LossScaleState(*map(plain_array, self.stored)) if self.stored else None

  @property
  def in_variables(self) -> bool:
    """Whether it is in an `nnx.Optimizer`, which keeps its state in variables."""
    return any(plain_array(x) is not x for x in self.stored)


def plain_array(x: Leaf) -> Leaf:
  """Returns the array that a variable holds (`nnx.Optimizer` keeps its state in some), or `x`."""
  held = None if isinstance(x, jax.Array) else getattr(x, "__jax_array__", None)
  return x if held is None else held()


def scales_in(tree: PyTree) -> list[OwnedScale]:
  """Returns every loss scale in `tree`, wherever it sits."""
  return [
    OwnedScale(owner, label)
    for owner in nodes_of(tree, LossScalingState)
    for label in owner.loss_scale
  ]


def own_scales(state: OptState, configs: Mapping[str, LossScale]) -> LossScales:
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
  names = [one.name for one in scales]
  if name is not None and name not in names:
    raise MpjaxValueError(
      f"{where} with name={name!r}",
      expected="the name of a loss scale in this state",
      got=f"one of the names {names}",
      fix="Use the name that was given to mpjax.loss_scaling(..., name=...).",
    )
  picked = [one for one in scales if name is None or one.name == name]
  if len(picked) > 1:
    raise MpjaxTypeError(
      where,
      expected="a state with one loss scale",
      got=f"one with {len(picked)}, named {names}",
      fix="Tell them apart by name=.",
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
  source, steps, seen = state.scale, state.good_steps, False
  dynamic = owned.says.dynamic
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
    expected, got = "an optimizer without a loss scale", f"one that holds {got}"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)


_HARMLESS = (optax.MaskedState, optax.PartitionState, optax.contrib.SplitRealAndImaginaryState)
"""The states of those wrappers of optax that count nothing and compute nothing: they pick parts."""


def refuse_outside(tree: PyTree, where: str, *, chains: bool = False) -> None:
  """Raises if a scale is inside of the state of a wrapper not known to be harmless there.

  With `chains`, also if it is in a chain beside the state of something else, or another scale.
  """
  if isinstance(tree, LossScalingState) or not _any_scale(tree):
    return
  got = ""
  if _is_of_optax(tree) and not isinstance(tree, _HARMLESS):
    got = f"one inside of the state optax.{type(tree).__name__}"
  parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
  scaled = [x for x in parts if _any_scale(x)]
  # Two in masks, or a tuple of states that no chain has created, are of several optimizers.
  chained = any(isinstance(x, ChainedLossScalingState) for x in parts)
  is_chain = isinstance(tree, collections.OrderedDict) or (
    type(tree) is tuple and (chained or any(isinstance(x, _HARMLESS) for x in scaled))
  )
  if chains and is_chain:
    for x in parts:
      beside = _is_of_optax(x) or (chained and isinstance(x, tuple))
      if beside and not _any_scale(x) and jax.tree.leaves(x):
        name = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
        got = f"one in a chain beside the state {name}"
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


def _is_of_optax(x: object) -> bool:
  return type(x).__module__.startswith("optax.")


def _any_scale(tree: PyTree) -> bool:
  return any(one.state is not None for one in scales_in(tree))


def set_loss_scale(
  opt_state: OptState, value: Array | float, *, name: str | None = None
) -> OptState:
  """Returns `opt_state` with its loss scale set to `value`.

  The count of good steps starts again: the window for growth was observed at another scale.
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
    MpjaxValueError: `value` is not positive or outside the limits, scaling is off, or no scale is
      called `name`.
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
    raise MpjaxValueError(
      where,
      expected="a state with a scale that can move",
      got="one of NoLossScale(), whose scale is always 1",
      fix="Build the optimizer with StaticLossScale or DynamicLossScale.",
    )
  scale_reader(target, where)(value)
  low, high = target.says.limits
  where = "mpjax.set_loss_scale(value)"
  if isinstance(value, Tracer):
    fix = "Pass a number, one for all."
    check_scalar(value, where, expected="a scale of shape ()", fix=fix)
    scale: Array | float = jnp.clip(jnp.asarray(value, jnp.float32), low, high)
  else:
    scale = positive_scale(value, where)
    check_value(
      value,
      low <= scale <= high,
      where,
      expected=f"a scale in [{low:.9g}, {high:.9g}], the limits of this state",
      fix="Choose a value within, or widen min_scale and max_scale of DynamicLossScale.",
    )
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

  def replace(x: Leaf) -> Leaf:
    if x is not target.owner:
      return x
    # In the structure of the old one: an `nnx.Optimizer` goes on with variables.
    like_old = jax.tree.unflatten(jax.tree.structure(target.stored), new)
    return x._replace(loss_scale={**x.loss_scale, target.label: like_old})

  return jax.tree.map(replace, opt_state, is_leaf=lambda x: x is target.owner)
