"""The loss scale in an optimizer state: finding it, using it, setting it."""

import warnings
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError
from mpjax._core.trees import is_nnx_object
from mpjax._core.types import Array, PyTree
from mpjax._core.validators import check_scalar, check_value
from mpjax.transforms._loss_scale import LossScaleState, unscale_tree
from mpjax.transforms._loss_scale_config import (
  label_limits,
  largest_scale,
  positive_scale,
  warn_unless_power_of_two,
)

LossScales: TypeAlias = dict[str, LossScaleState | tuple[()]]
"""Labels and what belongs to them; () for NoLossScale."""


class LossScalingState(NamedTuple):
  """The state of `mpjax.loss_scaling`.

  Args:
    loss_scale: one entry for each loss, of scalars (`scale` in float32, `finite` bool, counts in
      int32). Its key holds the name and the configuration: as part of the tree's structure they are
      static under `jit`, and a checkpoint of another configuration does not fit.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> isinstance(state, mpjax.LossScalingState), state.inner_state == optax.sgd(0.1).init(None)
  (True, True)
  """

  loss_scale: LossScales
  inner_state: Any


class Found(NamedTuple):
  """One loss scale, and its path."""

  owner: LossScalingState
  label: str

  @property
  def name(self) -> str | None:
    """The name that it was given, or None."""
    name, colon, _ = self.label.rpartition(":")
    return name if colon else None

  @property
  def config(self) -> str:
    """The label of the configuration alone."""
    return self.label.rpartition(":")[2]

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    value = self.owner.loss_scale[self.label]
    return LossScaleState(*map(plain_array, value)) if isinstance(value, LossScaleState) else None


def plain_array(x: Any) -> Any:
  """Returns the array that a variable holds (`nnx.Optimizer` keeps its state in some), or `x`."""
  held = None if isinstance(x, jax.Array) else getattr(x, "__jax_array__", None)
  return x if held is None else held()


def scales_in(tree: PyTree) -> list[Found]:
  """Returns every loss scale in `tree`, wherever it sits."""
  owners = [x for x in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(x)]
  return [Found(owner, label) for owner in owners for label in owner.loss_scale]


def _is_state(x: Any) -> bool:
  return isinstance(x, LossScalingState)


def find_scale(opt_state: PyTree, where: str, name: str | None) -> Found:
  """Returns the one loss scale in `opt_state` (called `name`, if one is given).

  Raises:
    MpjaxTypeError: there is none, or there are several to choose from.
    MpjaxValueError: none is called `name`.
  """
  found = scales_in(opt_state)
  if not found:
    raise MpjaxTypeError(
      where,
      expected="the state of an optimizer made by mpjax.loss_scaling",
      got=f"a {type(opt_state).__name__} without a loss scale",
      fix="Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)."
      if is_nnx_object(opt_state)
      else "Wrap the optimizer, tx = mpjax.loss_scaling(tx); pass opt_state = tx.init(params), "
      "not tx. A checkpoint is restored into that structure.",
    )
  refuse_outside(opt_state, where)
  names = [one.name for one in found]
  if name is not None and name not in names:
    raise MpjaxValueError(
      f"{where} with name={name!r}",
      expected="the name of a loss scale in this state",
      got=f"one of the names {names}",
      fix="Use the name that was given to mpjax.loss_scaling(..., name=...).",
    )
  picked = [one for one in found if name is None or one.name == name]
  if len(picked) > 1:
    raise MpjaxTypeError(
      where,
      expected="a state with one loss scale",
      got=f"one with {len(picked)}, named {names}",
      fix="Wrap the entire chain once, mpjax.loss_scaling(optax.chain(...)), or tell them apart "
      "by name=.",
    )
  return picked[0]


_OUTSIDE: dict[type[Any], tuple[str, str]] = {
  optax.ApplyIfFiniteState: ("optax.apply_if_finite", "loss_scaling(inner), which skips by itself"),
  optax.MultiStepsState: (
    "optax.MultiSteps",
    "loss_scaling(mpjax.accumulate_gradients(inner, every))",
  ),
  optax.InjectStatefulHyperparamsState: (
    "optax.inject_hyperparams with a schedule",
    "loss_scaling(optax.inject_hyperparams(optax.sgd)(schedule))",
  ),
  optax.LookaheadState: ("optax.lookahead", "loss_scaling(optax.lookahead(fast, ...))"),
}
"""What must not be outside of a loss scale: it would see scaled gradients, or count skipped steps.

With each, its name and the right order.
"""


def refuse_outside(opt_state: PyTree, where: str) -> None:
  """Raises if a scale is inside of what works with true gradients and applied steps alone."""

  def is_outside(x: Any) -> bool:
    # Of injected hyperparameters only schedules count steps.
    return isinstance(x, tuple(_OUTSIDE)) and bool(getattr(x, "hyperparams_states", True))

  for x in jax.tree.leaves(opt_state, is_leaf=is_outside):
    if is_outside(x) and any(one.state is not None for one in scales_in(x)):
      outside, order = _OUTSIDE[type(x)]
      raise MpjaxTypeError(
        where,
        expected="mpjax.loss_scaling around the optimizer",
        got=f"one inside of {outside}, which would see scaled gradients or count skipped steps",
        fix=f"Write {order}.",
      )


def scale_loss(loss: Array, opt_state: PyTree, *, name: str | None = None) -> Array:
  """Returns `loss` times the loss scale of `opt_state`, to be differentiated.

  A loss in low precision is cast to float32 before it is multiplied: 5 * 2^15 is inf in float16.
  Its derivative starts with the scale in its own dtype: where that is float16 and the scale may
  exceed 2^15, there is a warning. `mpjax.value_and_grad` does without it, and returns the plain
  loss as well.

  Args:
    loss: a floating scalar.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`, or any tree that holds
      one such state (a chain, a mask, a train state).
    name: which of several loss scales to use.

  Returns:
    A scalar in float32 (float64 if `loss` is); `loss` itself under `NoLossScale`.

  Raises:
    MpjaxTypeError: the loss is not a floating number, or the state has no scale, or has two.
    MpjaxValueError: the loss is not a scalar, or no scale is called `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> mpjax.scale_loss(jnp.asarray(5.0, jnp.float16), tx.init(jnp.ones(3)))
  Array(163840., dtype=float32)
  """
  found = find_scale(opt_state, "mpjax.scale_loss(opt_state)", name)
  check_loss(loss, "mpjax.scale_loss(loss)")
  if isinstance(loss, Tracer) and _may_overflow(loss, found):
    largest = largest_scale(found.config)
    warnings.warn(
      "mpjax.scale_loss(loss): the loss is float16. Its derivative starts with the loss scale, "
      f"which in float16 is inf from 2^16 on, and this one may be {largest:.9g}: such steps are "
      "skipped. Let mpjax.value_and_grad scale it, cast to float32 in the loss function, before "
      "the mean (losses.astype(jnp.float32)), or pass DynamicLossScale(max_scale=2**15).",
      UserWarning,
      stacklevel=2,
    )
  state = found.state
  return loss if state is None else _times(jnp.asarray(loss), state.scale)


def scale_in_range(loss: Array, opt_state: PyTree, name: str | None) -> tuple[Array, Array | None]:
  """Returns the loss times a scale, and what the gradients are then to be multiplied by.

  The derivative of a float16 loss starts with the scale in float16, which is inf from 2^16 on. So
  no more than 2^15 of it is multiplied there. None: gradients need not be multiplied.
  """
  found = find_scale(opt_state, "mpjax.value_and_grad(opt_state)", name)
  state = found.state
  if state is None:
    return loss, None
  loss = jnp.asarray(loss)
  if not _may_overflow(loss, found):
    return _times(loss, state.scale), None
  within = jnp.minimum(state.scale, jnp.float32(2**15))
  return _times(loss, within), state.scale / within


def _may_overflow(loss: Array, found: Found) -> bool:
  """Whether the scale, as the cotangent of the loss, may become too large for its dtype."""
  too_large = largest_scale(found.config) > float(jnp.finfo(jnp.float16).max)
  return found.state is not None and jnp.result_type(loss) == jnp.float16 and too_large


def _times(loss: Array, scale: Array) -> Array:
  dtype = jnp.float64 if loss.dtype == jnp.float64 else jnp.float32
  return loss.astype(dtype) * scale.astype(dtype)


def check_loss(loss: Any, where: str) -> None:
  """Raises unless `loss` is a floating scalar."""
  fix = "Return one number to minimise, such as jnp.mean(losses)."
  is_number = isinstance(loss, float) or hasattr(loss, "dtype")
  if not is_number or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    got = str(jax.typeof(loss)) if hasattr(loss, "dtype") else f"a {type(loss).__name__}"
    raise MpjaxTypeError(where, expected="a floating scalar", got=got, fix=fix)
  check_scalar(loss, where, expected="a floating scalar", fix=fix)


def unscale(grads: PyTree, opt_state: PyTree, *, name: str | None = None) -> PyTree:
  """Returns the gradients of the plain loss, to look at.

  `update` still takes the scaled ones: it unscales them itself.

  Args:
    grads: the gradients of the scaled loss.
    opt_state: the state whose scale multiplied that loss, before `update`.
    name: which of several loss scales to use.

  Returns:
    `grads` divided by the scale, in float32 (float64 and complex leaves keep their dtype; None,
    integers and keys stay as they are).

  Raises:
    MpjaxTypeError: the state has no scale, or has two.
    MpjaxValueError: no scale is called `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(4))
  >>> mpjax.unscale(jnp.asarray([8.0, 2.0], jnp.float16), tx.init(jnp.ones(2)))
  Array([2. , 0.5], dtype=float32)
  """
  state = find_scale(opt_state, "mpjax.unscale(opt_state)", name).state
  return unscale_tree(grads, None if state is None else state.scale)


def set_loss_scale(opt_state: PyTree, value: float, *, name: str | None = None) -> PyTree:
  """Returns `opt_state` with its loss scale set to `value`.

  The count of good steps starts again: the window for growth was observed at another scale.
  To carry a scale over when the tree of parameters has grown, set it in the state that `init`
  makes for the new tree.

  Args:
    opt_state: a state that holds a loss scale. It is not changed.
    value: a plain number within the limits of the state's configuration. A power of two is exact;
      another warns once.
    name: which of several loss scales to set.

  Raises:
    MpjaxTypeError: `value` is no plain number (a traced one is not), or the state has no scale,
      or has two.
    MpjaxValueError: `value` is not positive or outside the limits, scaling is off, or no scale is
      called `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> opt_state = mpjax.set_loss_scale(opt_state, 1024)
  >>> float(mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  1024.0
  """
  where = "mpjax.set_loss_scale(value)"
  target = find_scale(opt_state, "mpjax.set_loss_scale(opt_state)", name)
  state = target.state
  if state is None:
    raise MpjaxValueError(
      "mpjax.set_loss_scale(opt_state)",
      expected="a state with a scale that can move",
      got="one of NoLossScale(), whose scale is always 1",
      fix="Build the optimizer with StaticLossScale or DynamicLossScale.",
    )
  scale = positive_scale(value, where)
  low, high = label_limits(target.config)
  check_value(
    value,
    low <= scale <= high,
    where,
    expected=f"a scale in [{low:.9g}, {high:.9g}], the limits of this state",
    fix="Choose a value within, or widen min_scale and max_scale of DynamicLossScale.",
  )
  warn_unless_power_of_two(where, {"value": scale}, stacklevel=2)
  # full_like keeps shape (a vmapped state), dtype and placement: the next step does not retrace.
  moved = state._replace(
    scale=jnp.full_like(state.scale, scale), good_steps=jnp.zeros_like(state.good_steps)
  )

  return replace_scale(opt_state, target, moved)


def replace_scale(opt_state: PyTree, found: Found, new: LossScaleState) -> PyTree:
  """Returns `opt_state` with `new` in place of the loss scale `found` in it."""

  def replace(x: Any) -> Any:
    if x is not found.owner:
      return x
    # In the structure of the old one: an `nnx.Optimizer` goes on with variables.
    like_old = jax.tree.unflatten(jax.tree.structure(x.loss_scale[found.label]), new)
    return x._replace(loss_scale={**x.loss_scale, found.label: like_old})

  return jax.tree.map(replace, opt_state, is_leaf=_is_state)
