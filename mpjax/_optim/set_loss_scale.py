"""Setting the loss scale in the state of an optimizer."""

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxValueError,
  check_scalar,
  check_value,
)
from mpjax._core.leaves import path_text, set_raw_value
from mpjax._core.types import Array, KeyPath, Leaf, OptState, PyTree
from mpjax._optim.find_scale import OwnedScale, find_scale, scale_reader
from mpjax._optim.loss_scale import positive_scale, warn_unless_power_of_two
from mpjax._optim.optimizer_trees import full_like
from mpjax._optim.states import LossScaleState, LossScalingState


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


def store_scale(target: OwnedScale, new: LossScaleState) -> None:
  """Writes `new` to the variables that the loss scale `target` is in."""
  for variable, x in zip(target.numbers, new, strict=True):
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
