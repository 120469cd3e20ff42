"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._errors import MpjaxTypeError, MpjaxValueError, message
from mpjax._loss_scale import adjust, init_scale, unscale_tree
from mpjax._loss_scale_config import (
  DynamicLossScale,
  LossScale,
  NoLossScale,
  StaticLossScale,
  config_label,
  label_limits,
)
from mpjax._tree import first_nonfinite, select
from mpjax._types import Array, PyTree
from mpjax.transforms._loss_scale_access import LossScalingState, scale_states
from mpjax.transforms._loss_scaling_trees import (
  align_gradients,
  float32_view,
  merge_updates,
  place_like,
  strong,
  warn_of_half,
)

AxisName = Hashable | Sequence[Hashable]


def loss_scaling(
  inner: optax.GradientTransformation,
  loss_scale: LossScale = DynamicLossScale(),  # noqa: B008 (frozen)
  *,
  axis_name: AxisName | None = None,
  check_updates: bool = False,
  name: str | None = None,
  **unknown: Never,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it takes gradients of a scaled loss.

  Each `update` casts the gradients to float32, divides them by the scale, looks at every element
  for an inf or NaN, and lets `inner` work. If something was not finite the step is *skipped*: the
  updates are -0.0 (the one number that changes no parameter's bits when added) and the whole inner
  state stays as it was, counts of schedules included. Then the scale moves. An inf is part of the
  method: `jax_debug_nans` stops at one outside of `jit`, so leave it off and ask
  `mpjax.check_progress` instead.

  Wrap everything that has state or reads the size of gradients, clipping too:
  `loss_scaling(optax.chain(clip, adamw))`. As an element of a chain it protects only what is
  inside. The gradients must be those of the scaled loss: nothing can tell by looking at them, so
  let `mpjax.value_and_grad` make them.

  `inner` always works in float32: half parameters are cast before it sees them, its state is
  float32, and so are the updates (`optax.apply_updates` adds in float32 and rounds once). Integer
  parameters, booleans and keys are hidden from it and stay as they are. A None in place of the
  gradient of a parameter counts as zero.

  `update(updates, state, params=None, *, loss=None, **extra_args)` hands its extra arguments on to
  `inner`, with `grads_finite` (scalar bool) and `loss_scale` (scalar float32, the one that these
  gradients were divided by) added, except beside `value_fn=`: line searches call that function with
  all the rest. Their `grad=` is unscaled like the gradients. `loss=`, scaled or not, only has to be
  finite as well.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale` or `NoLossScale`. With the last, `inner` is
      called as it is and nothing is added to the program.
    axis_name: the mapped axis, or axes, over which all devices must decide alike (`shard_map`,
      `pmap`, `vmap`). Averaging the gradients over it remains yours to do, before `update`.
    check_updates: skip as well when the gradients were finite but the updates are not; counted
      as `bad_updates`, and the scale does not back off.
    name: tells several loss scales in one state apart.
    **unknown: refused. What shapes gradients or updates is set on `inner`.

  Returns:
    An optax transformation. Its state is a NamedTuple of strongly typed arrays; its structure
    records `name` and the configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type or is unknown; `init`: there is another
      `loss_scaling` inside; `update`: the state is not one of this transformation.
    MpjaxValueError: arguments contradict each other; `update`: the gradients do not match the
      parameters, the state was made with another configuration, or `axis_name` is not bound.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale(init=4))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> updates, opt_state = tx.update(jnp.asarray([4.0, 2.0]), opt_state, params)
  >>> print(updates)
  [-1.  -0.5]
  >>> updates, opt_state = tx.update(jnp.asarray([4.0, jnp.inf]), opt_state, params)
  >>> print(updates, mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  [-0. -0.] 2.0
  """
  _check_arguments(inner, loss_scale, axis_name, check_updates, name, unknown)
  label = config_label(loss_scale) if name is None else f"{name}:{config_label(loss_scale)}"
  inner = optax.with_extra_args_support(inner)
  if isinstance(loss_scale, NoLossScale):
    return _pass_through(inner, label)
  config: StaticLossScale | DynamicLossScale = loss_scale
  below_one = label_limits(config_label(config))[0] < 1

  def init(params: PyTree) -> LossScalingState:
    warn_of_half(params)
    inner_state = inner.init(float32_view(params))
    _refuse_nesting(inner_state)
    state = LossScalingState({label: init_scale(config)}, jax.tree.map(strong, inner_state))
    return place_like(params, state)

  def update(
    updates: PyTree,
    state: PyTree,
    params: PyTree = None,
    *,
    loss: PyTree = None,
    **extra_args: Any,
  ) -> tuple[PyTree, LossScalingState]:
    old = _own_scale(state, label)
    grads = align_gradients(updates, params)
    unscaled = unscale_tree(grads, old.scale)
    if "grad" in extra_args:
      extra_args["grad"] = float32_view(unscale_tree(extra_args["grad"], old.scale))
    # Where the scale may be below 1 a quotient can overflow, so quotients are looked at. Else the
    # gradients themselves: then no quotient has to be kept in memory until the decision.
    watched = jax.tree.leaves((unscaled if below_one else grads, loss))
    first_bad = _agree(first_nonfinite(watched), axis_name)
    finite = first_bad == len(watched)
    new_updates, new_inner = inner.update(
      float32_view(unscaled),
      state.inner_state,
      None if params is None else float32_view(params),
      **_extend(inner, extra_args, finite, old.scale),
    )
    applied = finite
    if check_updates:
      leaves = jax.tree.leaves(new_updates)
      applied = jnp.logical_and(finite, _agree(first_nonfinite(leaves), axis_name) == len(leaves))
    new_updates = jax.tree.map(lambda u: _or_nothing(applied, u), new_updates)
    where = "mpjax.loss_scaling(inner).update: the state of inner"
    new_state = LossScalingState(
      {label: adjust(config, old, finite=finite, applied=applied, first_bad=first_bad)},
      select(applied, new_inner, state.inner_state, where),
    )
    return merge_updates(grads, new_updates, params), new_state

  return optax.GradientTransformationExtraArgs(init, update)


def _pass_through(
  inner: optax.GradientTransformationExtraArgs, label: str
) -> optax.GradientTransformationExtraArgs:
  """`inner` itself, in a state that the functions of this package recognise."""

  def init(params: PyTree) -> LossScalingState:
    inner_state = inner.init(params)
    _refuse_nesting(inner_state)
    return LossScalingState({label: ()}, inner_state)

  def update(
    updates: PyTree,
    state: PyTree,
    params: PyTree = None,
    *,
    loss: PyTree = None,
    **extra_args: Any,
  ) -> tuple[PyTree, LossScalingState]:
    del loss
    _own_scale(state, label)
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    extra_args = _extend(inner, extra_args, np.bool_(True), np.float32(1))
    updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    return updates, LossScalingState({label: ()}, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _extend(
  inner: optax.GradientTransformationExtraArgs, extra_args: dict[str, Any], finite: Any, scale: Any
) -> dict[str, Any]:
  """`extra_args` with the flag and the scale, where they are welcome."""
  # A line search calls value_fn with every argument that has another name.
  if "value_fn" in extra_args:
    return extra_args
  # optax asks all transformations with extra arguments to take any; optax.contrib.sam does not.
  parameters = inspect.signature(inner.update).parameters.values()
  open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
  ours = {"grads_finite": finite, "loss_scale": scale}
  return ours | extra_args if open_ended else extra_args


def _or_nothing(applied: Array, update: Any) -> Array:
  """`update`, or what leaves a parameter's bits alone: p + -0.0 is p, and -0.0 + 0.0 is not."""
  update = jnp.asarray(update)
  nothing = -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0
  if jnp.issubdtype(update.dtype, jnp.complexfloating):
    nothing = complex(-0.0, -0.0)
  return jnp.where(applied, update, jnp.asarray(nothing, update.dtype))


def _agree(first_bad: Array, axis_name: AxisName | None) -> Array:
  """The first bad leaf on any device, so that all of them decide alike."""
  if axis_name is None:
    return first_bad
  names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  try:
    for one in names:
      jax.lax.axis_size(one)  # pmin itself fails under shard_map with an AssertionError
  except NameError as error:
    mesh = jax.sharding.get_abstract_mesh()
    raise MpjaxValueError(
      message(
        f"mpjax.loss_scaling(axis_name={axis_name!r})",
        expected="the name of an axis that is mapped where update is called",
        got=f"none of that name ({error}; the axes of the mesh here: {mesh.axis_names})",
        fix="Call update inside the shard_map, pmap or vmap of that axis. Under plain jit leave "
        "axis_name out: one program already sees all devices.",
      )
    ) from error
  return jax.lax.pmin(first_bad, tuple(names))


def _own_scale(state: Any, label: str) -> Any:
  where = "mpjax.loss_scaling(inner).update(state)"
  if not isinstance(state, LossScalingState):
    raise MpjaxTypeError(
      message(
        where,
        expected="the state that init made",
        got=f"a {type(state).__name__}",
        fix="Pass the opt_state of this very transformation; restore checkpoints into the "
        "structure of tx.init(params).",
      )
    )
  if list(state.loss_scale) != [label]:
    raise MpjaxValueError(
      message(
        where,
        expected=f"a state made with the configuration {label!r}",
        got=f"one made with {', '.join(map(repr, state.loss_scale))}",
        fix="Build the optimizer as it was, or make a new state with init, put the old "
        "inner_state into it (_replace) and carry the scale over with mpjax.set_loss_scale.",
      )
    )
  return state.loss_scale[label]


def _refuse_nesting(inner_state: PyTree) -> None:
  if scale_states(inner_state):
    raise MpjaxTypeError(
      message(
        "mpjax.loss_scaling(inner)",
        expected="an optimizer without a loss scale",
        got="one that holds another mpjax.loss_scaling",
        fix="Wrap once, outermost: the inner one would divide by its scale again.",
      )
    )


def _check_arguments(
  inner: Any,
  loss_scale: Any,
  axis_name: Any,
  check_updates: Any,
  name: Any,
  unknown: dict[str, Any],
) -> None:
  call = "mpjax.loss_scaling"
  if unknown:
    raise MpjaxTypeError(
      message(
        f"{call}({', '.join(f'{key}=' for key in unknown)})",
        expected="loss_scale, axis_name, check_updates or name",
        got=f"the unknown keyword {', '.join(map(repr, unknown))}",
        fix="Clipping, decay, averaging and accumulation are set on inner.",
      )
    )
  if not isinstance(inner, optax.GradientTransformation):
    raise MpjaxTypeError(
      message(
        f"{call}(inner)",
        expected="an optax.GradientTransformation",
        got=f"a {type(inner).__name__}",
        fix="Pass an optimizer such as optax.adamw(1e-3); of optax.MultiSteps its "
        "gradient_transformation().",
      )
    )
  if not isinstance(loss_scale, (NoLossScale, StaticLossScale, DynamicLossScale)):
    raise MpjaxTypeError(
      message(
        f"{call}(loss_scale)",
        expected="a NoLossScale, StaticLossScale or DynamicLossScale",
        got=f"{loss_scale!r} of type {type(loss_scale).__name__}",
        fix="For a constant scale pass mpjax.StaticLossScale(1024); to start elsewhere, "
        "mpjax.DynamicLossScale(init=1024).",
      )
    )
  if not isinstance(check_updates, bool):
    raise MpjaxTypeError(
      message(
        f"{call}(check_updates)",
        expected="a bool",
        got=f"{check_updates!r} of type {type(check_updates).__name__}",
        fix="Pass True or False.",
      )
    )
  if check_updates and isinstance(loss_scale, NoLossScale):
    raise MpjaxValueError(
      message(
        f"{call}(check_updates)",
        expected="False with NoLossScale(), which checks nothing",
        got="True",
        fix="Use StaticLossScale(1) to check and skip without scaling.",
      )
    )
  if name is not None and (not isinstance(name, str) or not name or ":" in name or "/" in name):
    raise MpjaxValueError(
      message(
        f"{call}(name)",
        expected="a non-empty string without ':' and '/', or None",
        got=repr(name),
        fix="It becomes a key of the state; a plain word such as 'generator' will do.",
      )
    )
