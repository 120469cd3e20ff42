"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Never, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from mpjax._core.errors import MpjaxTypeError
from mpjax._core.trees import first_nonfinite, is_half, is_inexact
from mpjax._core.types import Array, Function, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import (
  check_axes,
  check_params,
  check_state,
  init_inner,
  take_extra_args,
  update_inner,
)
from mpjax.transforms._labels import by_loss, label_configs, parse_label
from mpjax.transforms._loss_scale import LossScaleState, adjust, init_scale, unscale_tree
from mpjax.transforms._loss_scale_config import DynamicLossScale, LossScale, NoLossScale
from mpjax.transforms._loss_scaling_checks import (
  check_arguments,
  refuse_apply_to_parts,
  refuse_nesting,
  transformation,
  warn_of_half,
)
from mpjax.transforms._master_weights import adopt_masters, merged_masters, reach_masters
from mpjax.transforms._masters import update_shown
from mpjax.transforms._monitor import MonitorState, count, no_counts
from mpjax.transforms._skip import step_or_select, stored_first
from mpjax.transforms._state import LossScales, LossScalingState, own_scales
from mpjax.transforms._trees import (
  align_gradients,
  arrays_only,
  as_stored,
  by_part,
  differentiated,
  float32_view,
  hide_untrained,
  merge_updates,
  place_like,
  strong,
)

AxisName: TypeAlias = Hashable | Sequence[Hashable]


def loss_scaling(
  inner: optax.GradientTransformation,
  loss_scale: LossScale | Mapping[str, LossScale] = DynamicLossScale(),  # noqa: B008 (frozen)
  *,
  axis_name: AxisName | None = None,
  check_updates: bool = False,
  monitor: bool = False,
  name: str | None = None,
  **unknown: Never,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it takes gradients of a scaled loss.

  Each `update` casts the gradients to float32, divides them by the scale, looks at every element
  for an inf or NaN, and lets `inner` work. If something was not finite the step is *skipped*: the
  updates are -0.0 (the one number that changes no parameter's bits when added) and the entire inner
  state stays as it was, counts of schedules included. Then the scale moves. An inf is part of the
  method: `jax_debug_nans` stops at one outside of `jit`, so leave it off and ask
  `mpjax.check_skipped_steps` instead.

  Wrap everything that has state or reads the size of gradients, clipping too:
  `loss_scaling(optax.chain(clip, adamw))`. As an element of a chain it protects only what is
  inside, and what keeps state beside it, or around it, is refused where the scale is read. The
  gradients must be those of the scaled loss: nothing can tell by looking at them, so let
  `mpjax.value_and_grad` make them; `mpjax.check_loss_scaling` tests a step.

  `inner` always works in float32: 16-bit parameters are cast before it sees them, its state is
  float32, and so are the updates (`optax.apply_updates` adds in float32 and rounds once). Integer
  parameters, booleans and keys are hidden from it and stay as they are. A None instead of the
  gradient of a parameter is refused: what is to be frozen is given `optax.set_to_zero()` inside of
  `inner`, by `optax.multi_transform` or `optax.masked`.

  `update(updates, state, params=None, *, loss=None, **extra_args)` passes its extra arguments on to
  `inner`, those that it takes, with `grads_finite` (bool of shape ()) and `loss_scale` (float32 of
  shape (), the one that these gradients were divided by) added, except beside `value_fn=`: line
  searches call that function with all the rest. `grad=` of line searches and what `grad_fn=` of
  `optax.contrib.sam` returns are unscaled like the gradients: give them as `mpjax.value_and_grad`
  makes them. Where a gradient of `grad_fn`, which `inner` has to call in Python, is not finite, the
  step is skipped as well. `loss=`, a tree of arrays of any shapes, scaled or not, only has to be
  finite. With `apply=`, a function of parameters, updates and the new state of `inner`, `update`
  returns what that returns, new parameters, instead of updates, or the old ones where it
  skips: updates that are applied where they are made need not be stored. Outside of this there must
  be no other transformation, which would take them for updates: `optax.chain`, masks and
  `mpjax.master_weights` around it are refused, others cannot be seen from here.

  Several losses into one optimizer have a scale each, `loss_scaling(inner, {"a": ..., "b": ...})`:
  differentiate one after the other with `mpjax.value_and_grad(..., name="a")`, and give `update`
  the gradients (and `loss=`) as a dict with these keys. They are unscaled, each by its own scale,
  and added in float32. If one overflows, the step is skipped, and its scale alone backs off.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale` or `NoLossScale`. With the last, `inner` is
      called as it is and nothing is added to the jaxpr. Or a dict from names of losses to these.
    axis_name: the mapped axis, or axes, over which all devices must decide alike (`shard_map`,
      `pmap`, `vmap`). Averaging the gradients over it remains yours to do, before `update`.
    check_updates: skip as well when the gradients were finite but the updates are not; counted
      as `bad_updates`, and the scale does not back off. The updates are computed once to look at
      them and once more to apply them, so that they need not be kept (on a GPU XLA may compute them
      once, and keep old and new). Without it such a step is applied.
    monitor: keep counts for each parameter in the state, which `mpjax.monitor_counts` returns: how
      many gradients are zero, and how many updates round away when they are added. It reads
      gradients, parameters and updates once more, in the operations that compute them.
    name: tells several loss scales in one state apart.
    **unknown: refused. What shapes gradients or updates is set on `inner`.

  Returns:
    An optax transformation. It takes gradients in the shapes of the parameters, of any floating
    dtype, and returns updates in these shapes, in float32 (64-bit and complex ones as the
    parameters). Its state is a `LossScalingState` of strongly typed arrays; its structure records
    `name` and the configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type or is unknown; `init`: there is another
      `loss_scaling` inside; `update`: the state is not one of this transformation, or `inner` calls
      `grad_fn` in a loop or branch that JAX traces.
    MpjaxValueError: arguments contradict each other; `update`: the gradients do not match the
      parameters, `monitor` has no parameters, the state was created with another configuration, or
      `axis_name` is not bound.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale(init_scale=4))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> updates, opt_state = tx.update(jnp.asarray([4.0, 2.0]), opt_state, params)
  >>> print(updates)
  [-1.  -0.5]
  >>> updates, opt_state = tx.update(jnp.asarray([4.0, jnp.inf]), opt_state, params)
  >>> print(updates, mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  [-0. -0.] 2.0
  """
  check_arguments(inner, loss_scale, check_updates, monitor, name, unknown)
  configs, several = label_configs(loss_scale, name), isinstance(loss_scale, Mapping)
  scaled = not any(isinstance(config, NoLossScale) for config in configs.values())
  inner = take_extra_args(inner)
  call = "mpjax.loss_scaling(inner).update"

  def shown(params: Params) -> Params:
    # Without a scale `inner` works as if it were alone: its moments have the parameters' dtypes.
    return float32_view(params) if scaled else hide_untrained(params, params)

  def init(params: Params) -> LossScalingState:
    where = "mpjax.loss_scaling(inner)"
    params = arrays_only(params) if scaled else params
    inner_state = init_inner(inner, shown(params), where)
    if scaled:
      inner_state = jax.tree.map(strong, adopt_masters(params, inner_state, where))
      warn_of_half(params, merged_masters(inner_state, params))
    refuse_nesting(inner_state)
    if monitor:
      inner_state = MonitorState(no_counts(params), inner_state)
    state = LossScalingState({k: init_scale(config) for k, config in configs.items()}, inner_state)
    return place_like(params, state) if scaled else state

  def update(
    updates: Grads,
    state: OptState,
    params: Params = None,
    *,
    loss: PyTree = None,
    apply: Callable[[Params, Updates, OptState], Params] | None = None,
    **extra_args: PyTree,
  ) -> tuple[Updates, LossScalingState]:
    scales = own_scales(state, configs)
    old = {k: scale for k, scale in scales.items() if isinstance(scale, LossScaleState)}
    if apply is not None:
      refuse_apply_to_parts(params)
    params = arrays_only(params) if scaled else params
    if monitor:
      check_params(params, f"{call}(params)")
    own = differentiated(params)
    grad_fn: Function | None = extra_args.get("grad_fn")

    def by_label(tree: Grads, argument: str) -> dict[str, Grads]:
      parts = by_loss(tree, configs, several, f"{call}({argument})")
      return {label: differentiated(grads) for label, grads in parts.items()}

    def aligned(given: dict[str, Grads], argument: str) -> dict[str, Grads]:
      where, strict = f"{call}({argument})", scaled or several
      return {k: align_gradients(g, own, where, strict=strict) for k, g in given.items()}

    def total(grads: dict[str, Grads]) -> Grads:
      """The gradient of the sum of the losses, unscaled, as `inner` sees it."""
      if scaled:
        return float32_view(_sum([unscale_tree(g, old[k].scale) for k, g in grads.items()]))
      return hide_untrained(_sum(list(grads.values())), own)

    grads = aligned(by_label(updates, "updates"), "updates")
    if "grad" in extra_args:
      extra_args["grad"] = total(aligned(by_label(extra_args["grad"], "grad"), "grad"))
    # In a step of `make_train_step` nobody else has the gradients, and their quotients take over
    # the memory.
    stored = stored_first(total(grads)) if scaled and apply is not None else None
    losses = by_loss(loss, configs, several, f"{call}(loss)") if scaled and loss is not None else {}
    first_bad, number, finite = {}, {}, {}
    for label, scale in old.items():
      # Where the scale may be below 1 a quotient can overflow, so quotients are looked at. Else the
      # gradients themselves: then no quotient has to be kept in memory until the decision.
      exact = stored is None and parse_label(label).limits[0] >= 1
      seen = grads[label] if exact else unscale_tree(grads[label], scale.scale)
      watched = jax.tree.leaves((seen, losses.get(label)))
      number[label] = len(watched)
      first_bad[label] = _agree(first_nonfinite(watched), axis_name)
      finite[label] = first_bad[label] == number[label]
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    all_finite: Leaf = np.bool_(True)
    loss_scales: PyTree = np.float32(1)
    if scaled:
      all_finite = functools.reduce(jnp.logical_and, finite.values())
      loss_scales = {parse_label(label).name: one.scale for label, one in old.items()}
      loss_scales = loss_scales if several else next(iter(loss_scales.values()))
    if several and scaled:
      # The sum of finite gradients may overflow; no single scale is to blame for that.
      all_finite = jnp.logical_and(all_finite, _all_finite(total(grads), axis_name))
    # A line search calls value_fn with every argument that has another name.
    if "value_fn" not in extra_args:
      extra_args = {"grads_finite": all_finite, "loss_scale": loss_scales} | extra_args

    def step(
      inner_state: OptState, params: Params, seen: list[dict[str, Array]] | None = None
    ) -> tuple[Updates, OptState]:
      if not monitor:
        return plain_step(inner_state, params, seen)
      watched = check_state(inner_state, MonitorState, f"{call}(state)")
      new_updates, new_inner = plain_step(watched.inner_state, params, seen)
      # A window of accumulation that is open moves nothing: its updates are zeros.
      counts = count(total(grads), params, merged(new_updates, params), watched, new_inner)
      return new_updates, MonitorState(counts, new_inner)

    def plain_step(
      inner_state: OptState, params: Params, seen: list[dict[str, Array]] | None
    ) -> tuple[Updates, OptState]:
      # In here, where an optimizer reads it, a quotient is never stored.
      gradient = total(grads) if stored is None else stored
      more = extra_args
      if grad_fn is not None:
        more = {**extra_args, "grad_fn": plain_grad_fn(grad_fn, seen)}
      if scaled:
        new_updates, new_inner = update_shown(inner, gradient, inner_state, params, more, call)
      else:
        view = None if params is None else shown(params)
        new_updates, new_inner = update_inner(inner, gradient, inner_state, view, more, call)
      if not scaled and any(map(is_half, jax.tree.leaves(params))):
        # float32 gradients turn bfloat16 moments into float32, and a new dtype is a new trace.
        new_inner = as_stored(new_inner, inner_state)
      if scaled:
        new_updates = reach_masters(params, new_updates, new_inner)
      return new_updates, new_inner

    def plain_grad_fn(
      grad_fn: Function, seen: list[dict[str, Array]] | None
    ) -> Callable[..., Grads]:
      """`grad_fn` that returns plain gradients, and notes where they are not finite."""
      outside = get_opaque_trace_state()

      def plain(*args: PyTree, **kwargs: PyTree) -> Grads:
        given = aligned(by_label(grad_fn(*args, **kwargs), "grad_fn"), "grad_fn")
        if seen is not None:
          watched = {k: (unscale_tree(g, old[k].scale), losses.get(k)) for k, g in given.items()}
          first = {k: first_nonfinite(jax.tree.leaves(w)) for k, w in watched.items()}
          if get_opaque_trace_state() != outside:
            _refuse_traced(first)
          seen.append(first)
        return total(given)

      return plain

    def merged(new_updates: Updates, params: Params) -> Updates:
      grad = next(iter(grads.values()))
      return by_part(lambda u, p: merge_updates(grad, u, p), new_updates, params)

    kept, where = state.inner_state, f"{call}: the state of inner"
    applied = all_finite if scaled else None
    if scaled and (check_updates or grad_fn is not None):
      # Once to look at, and once more to apply: to decide first, by updates that are never stored,
      # takes less memory than to have the old and the new of everything until the decision.
      seen: list[dict[str, Array]] = []
      looked_at, _ = step(kept, params, seen)
      for label, first in (pair for one in seen for pair in one.items()):
        first_bad[label] = jnp.minimum(first_bad[label], _agree(first, axis_name))
        finite[label] = first_bad[label] == number[label]
        all_finite = jnp.logical_and(all_finite, finite[label])
      good = _all_finite(looked_at, axis_name) if check_updates else True
      applied = jnp.logical_and(all_finite, good)
    if apply is None:
      new_updates, new_inner = step_or_select(applied, lambda kept: step(kept, params), kept, where)
      result = merged(new_updates, params)
    else:

      def step_and_apply(kept: PyTree) -> tuple[tuple[()], PyTree]:
        new_updates, new_inner = step(*kept)
        return (), (new_inner, apply(kept[1], merged(new_updates, kept[1]), new_inner))

      _, (new_inner, result) = step_or_select(applied, step_and_apply, (kept, params), where)
    flags = {"all_finite": all_finite, "applied": applied}
    new_scales: LossScales = dict(scales)
    for label, scale in old.items():
      own_flags = {"finite": finite[label], "first_bad": first_bad[label], **flags}
      new_scales[label] = adjust(configs[label], scale, **own_flags)
    return result, LossScalingState(new_scales, new_inner)

  return transformation(init, update)


def _sum(grads: Sequence[Grads]) -> Grads:
  """Returns the sum of gradients, added in float32, in the dtype that they have."""
  if len(grads) == 1:
    return grads[0]

  def add(*leaves: Leaf) -> Leaf:
    if not is_inexact(leaves[0]):
      return leaves[0]
    return functools.reduce(jnp.add, float32_view(leaves)).astype(jnp.result_type(*leaves))

  return jax.tree.map(add, *grads)


def _all_finite(tree: PyTree, axis_name: AxisName | None) -> Array:
  leaves = jax.tree.leaves(tree)
  return _agree(first_nonfinite(leaves), axis_name) == len(leaves)


def _refuse_traced(first: PyTree) -> None:
  """Raises if it is a value of a trace inside of `inner`, where it cannot be looked at later."""
  if any(isinstance(x, Tracer) for x in jax.tree.leaves(first)):
    raise MpjaxTypeError(
      "mpjax.loss_scaling(inner).update(grad_fn)",
      expected="inner to call it in Python, where its gradients can be looked at",
      got="a call inside of a loop, a branch or a function that inner gives to JAX to trace",
      fix="Call it outside of jax.lax.scan, cond and the like in inner, or use NoLossScale(), "
      "which looks at nothing.",
    )


def _agree(first_bad: Array, axis_name: AxisName | None) -> Array:
  """The first bad leaf on any device, so that all of them decide alike."""
  if axis_name is None:
    return first_bad
  names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  check_axes(
    names,
    f"mpjax.loss_scaling(axis_name={axis_name!r})",
    call="update",
    fix="Call update inside the shard_map, pmap or vmap of that axis. Under plain jit",
  )
  return jax.lax.pmin(first_bad, tuple(names))
