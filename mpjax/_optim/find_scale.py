"""The loss scales in the states of optimizers: read, set, found, and refused where they go wrong.

A state may hold the classes of `states.py`, or mappings in place of them: an `nnx.State`, its pure
dict, and a checkpoint that was read without a target.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  check_scalar,
  check_value,
  kind_of,
)
from mpjax._core.frameworks import is_nnx_object, is_nnx_variable
from mpjax._core.leaves import path_text, raw_value, set_raw_value
from mpjax._core.trees import select
from mpjax._core.types import Array, KeyPath, Leaf, OptState, PyTree
from mpjax._optim.loss_scale import (
  COUNTERS,
  LARGEST,
  SMALLEST,
  LossScale,
  NoLossScale,
  SkipNonfinite,
  StaticLossScale,
  init_scale,
  is_label,
  positive_scale,
  read_kind,
  read_label,
  warn_unless_power_of_two,
)
from mpjax._optim.optimizer_trees import full_like, stands_for, states_with_path
from mpjax._optim.states import (
  AccumulationState,
  LossScaleState,
  LossScalingState,
  MasterWeightsState,
  MonitorState,
  StepCount,
  StochasticState,
  as_state,
  has_fields_of,
)
from mpjax._optim.wrapper_checks import PICKS_PARTS, refuse_around_masters

T = TypeVar("T")


def loss_scaling_metrics(
  opt_state: OptState, *, before: OptState | None = None, name: str | None = None
) -> dict[str, Array]:
  """Return metrics of loss scaling after an `update`.

  Args:
    opt_state: a state that holds a loss scale.
    before: the state before the update, for `scale_changed`.
    name: which of several loss scales to read.

  Returns:
    Arrays of shape (). Under `NoLossScale` the scale is 1, `finite` is True, and every count
    but `total` is 0.

    - `loss_scale` (float32): the scale of the next backward pass;
    - `finite` (bool): whether the last step was applied, as `mpjax.step_applied`. It is also False
      if another loss, an update or a new state was not finite;
    - `good_steps` (int32): finite steps in a row since the scale last moved;
    - `total`, `skipped` (int32): steps so far, and those that were not applied;
    - `consecutive_skips` (int32): skipped steps since the last applied one;
    - `floor_hits` (int32): overflows at the minimum scale;
    - `bad_updates` (int32): steps skipped for their updates or new state (`check_updates=True`);
    - `scale_changed` (bool), where `before` is given: whether the update moved the scale.

  Raises:
    MpjaxError: the state has no scale or several, or is a constant of the traced function.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> metrics = mpjax.loss_scaling_metrics(opt_state)
  >>> float(metrics["loss_scale"]), bool(metrics["finite"]), int(metrics["skipped"])
  (16384.0, False, 1)
  """
  where = "mpjax.loss_scaling_metrics"
  state = read_state(opt_state, f"{where}(opt_state)", name)
  metrics = {"loss_scale": state.scale, "finite": state.applied}
  metrics |= {key: getattr(state, key) for key in COUNTERS}
  if before is not None:
    # Under `NoLossScale` the scale has not changed.
    old = find_scale(before, f"{where}(before)", name).state or state
    metrics["scale_changed"] = state.scale != old.scale
  return metrics


def step_applied(opt_state: OptState, *, name: str | None = None) -> Array:
  """Return whether the last step was applied.

  Args:
    opt_state: a state that holds a loss scale, after an `update`.
    name: which of several loss scales to read.

  Returns:
    A bool of shape (), traced under `jit`; True before the first step and under `NoLossScale`.

  Raises:
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> bool(mpjax.step_applied(mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))))
  True
  """
  return read_state(opt_state, "mpjax.step_applied(opt_state)", name).applied


def keep_if_skipped(opt_state: OptState, new: T, old: T, *, name: str | None = None) -> T:
  """Return `new` if the last step was applied, and `old` if it was skipped.

  Use it for state outside the optimizer: batch statistics, moving averages and counters.

  Args:
    opt_state: the state that `update` returned; it holds a loss scale.
    new: a tree of arrays, after the step.
    old: the same tree before the step, in the same shapes and dtypes.
    name: which of several loss scales to read.

  Returns:
    A tree like `new`. Under `NoLossScale` it is `new`.

  Raises:
    MpjaxValueError: the trees differ in structure, shapes or dtypes.
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> print(mpjax.keep_if_skipped(opt_state, new=jnp.asarray(jnp.nan), old=jnp.asarray(0.5)))
  0.5
  """
  call = "mpjax.keep_if_skipped"
  # `select` compares structure, shapes and dtypes, since `where` would broadcast and promote.
  applied = read_state(opt_state, f"{call}(opt_state)", name).applied
  return select(applied, new, old, f"{call}(opt_state, new, old)")


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
    warn_unless_power_of_two(where, {"value": scale}, stacklevel=3)
  good_steps = full_like(state.good_steps, 0)
  moved = state._replace(scale=full_like(state.scale, scale), good_steps=good_steps)
  # An `nnx.Optimizer` is written to, since a new one would share its moments. An `nnx.State` is
  # replaced.
  if not target.in_variables or target.node is not target.owner:
    return replace_scale(opt_state, target, moved)
  store_scale(target, moved)
  return opt_state


# All have the state of the optimizer inside in a field `inner_state`. Add new wrappers here.
_WRAPPERS = (AccumulationState, MasterWeightsState, MonitorState, StochasticState)


def inner_state(opt_state: OptState) -> OptState:
  """Return the state of the optimizer that the wrappers of mpjax are around.

  Functions of optax that take the state of one optimizer take it, such as
  `optax.contrib.schedule_free_eval_params`. With `mpjax.master_weights`, pass these functions
  `mpjax.states.master_params(opt_state, params)` as the parameters.

  Args:
    opt_state: the state of an optimizer, a `TrainState`, an `nnx.Optimizer` or its `nnx.State`.

  Returns:
    The state that is innermost, with arrays in place of the variables of Flax NNX. Without a
    wrapper outermost it is `opt_state`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.contrib.schedule_free_sgd(0.5))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> inner = mpjax.states.inner_state(tx.init(params))
  >>> print(optax.contrib.schedule_free_eval_params(inner, params))
  [1. 2.]
  """
  # A `TrainState` and an `nnx.Optimizer` have the state in an attribute.
  state = getattr(opt_state, "opt_state", opt_state)
  while True:
    if is_scaling_state(state):
      state = with_classes(state).inner_state
    elif isinstance(state, _WRAPPERS):
      state = state.inner_state
    # From here on mappings stand for the classes, and states without arrays are missing.
    elif isinstance(state, Mapping) and "opt_state" in state:
      state = state["opt_state"]
    elif isinstance(state, Mapping) and any(stands_for(state, x, inside=True) for x in _WRAPPERS):
      state = state.get("inner_state", ())
    else:
      return jax.tree.map(raw_value, state, is_leaf=is_nnx_variable)


class OwnedScale(NamedTuple):
  """One loss scale: the state around it, and the configuration in its label."""

  node: Any  # of the tree that was searched: a `LossScalingState`, or a mapping with its fields
  owner: LossScalingState
  label: str
  name: str | None
  numbers: Any  # of a `ScaleState`, in variables perhaps
  fields: Mapping[str, float]  # of the configuration

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    return LossScaleState(*map(raw_value, self.numbers)) if self.skips else None

  @property
  def skips(self) -> bool:
    """Whether steps may be skipped."""
    return self.kind is not NoLossScale

  @property
  def dynamic(self) -> bool:
    """Whether the scale moves."""
    return "growth_interval" in self.fields

  @property
  def kind(self) -> type[LossScale]:
    """The class of the configuration."""
    return read_kind(self.label)

  @property
  def multiplies(self) -> bool:
    """Whether losses are multiplied by a scale that the user has chosen."""
    return self.kind not in (NoLossScale, SkipNonfinite)

  @property
  def in_variables(self) -> bool:
    """Whether its numbers are in variables, as those of an `nnx.Optimizer` are."""
    return any(map(is_nnx_variable, self.numbers))

  @property
  def limits(self) -> tuple[float, float]:
    """The smallest and the largest scale that may be set."""
    return self.fields.get("min_scale", SMALLEST), self.fields.get("max_scale", LARGEST)

  @property
  def largest(self) -> float:
    """The largest scale that training comes to."""
    return self.fields.get("scale", self.limits[1])


def find_scale(opt_state: OptState, where: str, name: str | None) -> OwnedScale:
  """Returns the one loss scale in `opt_state` (called `name`, if one is given)."""
  scales = scales_in(opt_state)
  if not scales:
    fix = (
      "Wrap the optimizer: tx = mpjax.loss_scaling(tx), or mpjax.loss_scaling(tx, "
      "mpjax.SkipNonfinite()) in bfloat16, which needs no loss scale."
    )
    if isinstance(opt_state, optax.GradientTransformation):
      fix = "Pass its state, opt_state = tx.init(params), or an nnx.Optimizer."
    elif is_nnx_object(opt_state):
      fix = (
        "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param). Bfloat16 needs no "
        "loss scale: differentiate by nnx.value_and_grad."
      )
    expected = "the state of an optimizer created by mpjax.loss_scaling"
    got = f"{kind_of(opt_state)} without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # The scale is there, but its place in a chain may be wrong.
  refuse_outside(opt_state, where, chains=True)
  refuse_around_masters(opt_state, where, in_container=True)
  picked = [one for one in scales if name is None or one.name == name]
  expected = "a state with one loss scale, or the name of a loss scale in it"
  got = f"one with {len(scales)}, named {[one.name for one in scales]}"
  fix = "Choose one by name=. mpjax.loss_scaling(..., name=...) gives each its name."
  if not picked:
    raise MpjaxValueError(f"{where} with name={name!r}", expected=expected, got=got, fix=fix)
  if len(picked) > 1:
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  return picked[0]


def read_state(opt_state: OptState, where: str, name: str | None) -> LossScaleState:
  """Returns the numbers of the one loss scale in `opt_state`; `NoLossScale` has those of 1."""
  owned = find_scale(opt_state, where, name)
  state = owned.state
  if state is None:
    total = raw_value(owned.numbers.total)
    state = LossScaleState(*init_scale(StaticLossScale(1)))._replace(total=total)
  if _is_constant(state.total):
    raise _stale(where, _CONSTANT)
  return state


def scale_reader(owned: OwnedScale, where: str) -> Callable[[PyTree], Array]:
  """Returns a function that reads a loss scale, and raises if the scale is stale.

  The function takes the values that the scale is for, such as the arguments of a loss. If one of
  these is traced, a dynamic scale has to be traced too, because a constant never changes. The scale
  of a donated state raises too. Outside `jit` the function cannot detect an old state, and reads
  its scale.
  """
  # Close over the scale alone. The whole state would keep the moments in memory.
  source, is_dynamic = owned.numbers.scale, owned.dynamic

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
    "mpjax.scaled(loss_fn, opt_state), with opt_state or an nnx.Optimizer. Pass that state, like "
    "params, as an argument to jit, checkpoint and eval_shape, and as the carry of scan.",
  )


def store_scale(target: OwnedScale, new: LossScaleState) -> None:
  """Writes `new` to the variables that the loss scale `target` is in."""
  for variable, x in zip(target.numbers, new, strict=True):
    set_raw_value(variable, x)


def replace_scale(opt_state: PyTree, target: OwnedScale, new: LossScaleState) -> PyTree:
  """Returns `opt_state` with `new` instead of the loss scale `target` in it."""
  numbers = {f"loss_scale/{target.label}/{field}": x for field, x in new._asdict().items()}

  def is_node(x: PyTree) -> bool:
    return x is target.node

  def in_mapping(path: KeyPath, x: Leaf) -> Leaf:
    # In a variable there is one more key, that of its value.
    return numbers.get(path_text(path[:3]), x)

  if isinstance(target.node, LossScalingState):
    scales = {**target.node.loss_scale, target.label: new}
    node = target.node._replace(loss_scale=scales)
  else:
    node = jax.tree_util.tree_map_with_path(in_mapping, target.node)
  return jax.tree.map(lambda x: node if is_node(x) else x, opt_state, is_leaf=is_node)


def scales_in(tree: PyTree) -> list[OwnedScale]:
  """Returns every loss scale in `tree`, wherever it is."""
  return [
    OwnedScale(node, owner, label, label.rpartition(":")[0] or None, numbers, read_label(label))
    for _, node, owner in scaling_states(tree)
    for label, numbers in owner.loss_scale.items()
  ]


def scaling_states(tree: PyTree) -> Iterator[tuple[KeyPath, PyTree, LossScalingState]]:
  """Yields each state of `mpjax.loss_scaling` in `tree`: its path, its node, and its content.

  A mapping in place of the class is a node that is no `LossScalingState`.
  """
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaling_state)
  yield from ((path, node, with_classes(node)) for path, node in nodes if is_scaling_state(node))


def is_scaling_state(node: object) -> bool:
  """Whether a node of a tree is a state of `mpjax.loss_scaling`, or a mapping with its fields."""
  if isinstance(node, LossScalingState):
    return True
  scales = node.get("loss_scale") if isinstance(node, Mapping) else None
  if not isinstance(scales, Mapping) or not scales:
    return False
  # Parameters may have a key `loss_scale` too, but no labels with these fields below it.
  return all(
    isinstance(label, str)
    and isinstance(numbers, Mapping)
    and is_label(label)
    and has_fields_of(_class_of(label), numbers)
    for label, numbers in scales.items()
  )


def _class_of(label: str) -> type[LossScaleState] | type[StepCount]:
  """Returns the class of the numbers that belong to a label."""
  return StepCount if read_kind(label) is NoLossScale else LossScaleState


def with_classes(node: PyTree) -> LossScalingState:
  """Returns a node that `is_scaling_state` as an instance of its class."""
  if isinstance(node, LossScalingState):
    return node
  scales = node["loss_scale"].items()
  by_class = {label: as_state(_class_of(label), numbers) for label, numbers in scales}
  return as_state(LossScalingState, {**node, "loss_scale": by_class})


def states_by_path(tree: PyTree) -> dict[str, NamedTuple]:
  """Returns each state of mpjax in a tree by its path, in its class also where a mapping is."""
  wrappers = [item for kind in _WRAPPERS for item in states_with_path(tree, kind)]
  states: dict[str, NamedTuple] = {path_text(path): state for path, state in wrappers}
  for path, _, state in scaling_states(tree):
    states[path_text(path)] = state
    for label, numbers in state.loss_scale.items():
      states[path_text((*path, *map(jax.tree_util.DictKey, ("loss_scale", label))))] = numbers
  return states


def refuse_scale_inside(inner_state: OptState, where: str, *, got: str, fix: str) -> None:
  """Raises if the optimizer inside of a wrapper has a loss scale."""
  if scales_in(inner_state):
    expected = "an optimizer without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=f"one that holds {got}", fix=fix)


def refuse_outside(tree: PyTree, where: str, *, chains: bool = False) -> None:
  """Raises if a scale is inside of a state of optax that does more than pick parts.

  With `chains` a tuple is the state of a chain: nothing beside the scale may keep a state.
  """
  if is_scaling_state(tree) or not _is_scaled(tree):
    return
  # The children of this node. Each is visited below.
  parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
  got = ""
  # A wrapper of optax around the scale: `MultiSteps` would add the NaN of an overflow to its sum.
  if type(tree).__module__.startswith("optax.") and not isinstance(tree, PICKS_PARTS):
    got = f"one inside of the state optax.{type(tree).__name__}"
  elif chains and type(tree) in (tuple, collections.OrderedDict):
    got = _beside_in_chain(parts)
  if got:
    expected = "mpjax.loss_scaling around the entire optimizer"
    fix = (
      "Put all of it inside, mpjax.loss_scaling(optax.chain(...)), once. To read one of several "
      "optimizers, pass its state alone, or keep them in a dict."
    )
    got += ": it would keep the NaN of an overflow, or count steps that are skipped"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  for part in parts:
    refuse_outside(part, where, chains=chains)


def is_damaged(state: LossScaleState) -> bool:
  """Whether the scale of a concrete state is not a positive finite number. No step causes this."""
  scales = np.asarray(raw_value(state.scale))  # several, if the state is vmapped
  return not np.all(np.isfinite(scales) & (scales > 0))


def _is_scaled(tree: PyTree) -> bool:
  """Whether there is a loss scale in `tree`, other than `NoLossScale`."""
  return any(one.skips for one in scales_in(tree))


def _beside_in_chain(parts: list[PyTree]) -> str:
  """Names a state that must not be beside a loss scale in a chain; "" if there is none."""
  # `optax.masked` may restrict each scale to other parameters. Otherwise the second one would not
  # see that the first has skipped a step.
  scaled = [x for x in parts if _is_scaled(x)]
  if len(scaled) > 1 and not all(isinstance(x, optax.MaskedState) for x in scaled):
    return f"a chain of {len(scaled)}, each of which skips steps by itself"
  # States are NamedTuples, also those of users. A transformation without arrays, such as
  # `optax.scale`, has nothing to keep.
  others = [x for x in parts if not _is_scaled(x)]
  states = jax.tree.leaves(others, is_leaf=lambda x: hasattr(x, "_fields"))
  stateful = [type(x) for x in states if isinstance(x, tuple) and jax.tree.leaves(x)]
  if not stateful:
    return ""
  kind = stateful[-1]
  library = kind.__module__.partition(".")[0]
  return f"one in a chain beside the state {library}.{kind.__name__}"
