"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from mpjax._core.errors import MpjaxTypeError
from mpjax._core.trees import first_nonfinite, select
from mpjax._core.types import Array, PyTree
from mpjax.transforms._branch import (
  Step,
  hold,
  nothing_like,
  one_at_a_time,
  step_or_skip,
  stored_first,
)
from mpjax.transforms._checks import check_axes, init_inner, take_extra_args, update_inner
from mpjax.transforms._loss_scale import LossScaleState, adjust, init_scale, unscale_tree
from mpjax.transforms._loss_scale_access import Found, LossScales, LossScalingState
from mpjax.transforms._loss_scale_config import (
  DynamicLossScale,
  LossScale,
  NoLossScale,
  label_limits,
)
from mpjax.transforms._loss_scaling_checks import (
  by_loss,
  check_arguments,
  label_configs,
  own_scales,
  refuse_apply_to_parts,
  refuse_nesting,
  transformation,
)
from mpjax.transforms._master_weights import (
  adopt_masters,
  keep_masters,
  merged_masters,
  reach_masters,
)
from mpjax.transforms._no_loss_scale import flag_and_scale, without_loss_scale
from mpjax.transforms._windows import leave_to_window
from mpjax.transforms._wrapper_trees import (
  align_gradients,
  arrays_only,
  by_part,
  differentiated,
  float32_view,
  frozen_leaves,
  merge_updates,
  place_like,
  strong,
  warn_of_half,
)

_STATE_FIX = (
  "Let inner return the same structure, shapes and dtypes as its init makes: nothing is cast or "
  "broadcast here. optax.monitor begins with an empty state; optax.snapshot measures in init."
)

AxisName = Hashable | Sequence[Hashable]


def loss_scaling(
  inner: optax.GradientTransformation,
  loss_scale: LossScale | Mapping[str, LossScale] = DynamicLossScale(),  # noqa: B008 (frozen)
  *,
  axis_name: AxisName | None = None,
  check_updates: bool = False,
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
  inside. The gradients must be those of the scaled loss: nothing can tell by looking at them, so
  let `mpjax.value_and_grad` make them; `mpjax.check_loss_scaling` tests a step.

  `inner` always works in float32: half parameters are cast before it sees them, its state is
  float32, and so are the updates (`optax.apply_updates` adds in float32 and rounds once). Integer
  parameters, booleans and keys are hidden from it and stay as they are. A None in place of the
  gradient of a parameter (in those of all losses) freezes it for this step: it keeps its bits, and
  so does its master, whatever decay or momentum would do with a zero. If `inner` adds up several
  micro-batches, a None is a zero to it, and only `mpjax.accumulate_gradients` (or
  `mpjax.master_weights` of it) directly inside freezes what has None in all of a window.

  `update(updates, state, params=None, *, loss=None, **extra_args)` passes its extra arguments on to
  `inner`, those that it takes, with `grads_finite` (scalar bool) and `loss_scale` (scalar float32,
  the one that these gradients were divided by) added, except beside `value_fn=`: line searches call
  that function with all the rest. `grad=` of line searches and what `grad_fn=` of
  `optax.contrib.sam` returns are unscaled like the gradients: give them as `mpjax.value_and_grad`
  makes them. Where a gradient of `grad_fn`, which `inner` has to call in Python, is not finite, the
  step is skipped as well. `loss=`,
  scaled or not, only has to be finite. With `apply=`, a function of parameters, updates and the new
  state of `inner`, `update` returns what that returns, new parameters, in the place of updates, or
  the old ones where it skips: updates that are applied where they are made need not be stored.
  Outside of this there must be no other transformation, which would take them for updates:
  `optax.chain`, masks and `mpjax.master_weights` around it are refused, others cannot be seen from
  here.

  Several losses into one optimizer have a scale each, `loss_scaling(inner, {"a": ..., "b": ...})`:
  differentiate one after the other with `mpjax.value_and_grad(..., name="a")`, and give `update`
  the gradients (and `loss=`) as a dict with these keys. They are unscaled, each by its own scale,
  and added in float32. If one overflows, the step is skipped, and its scale alone backs off.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale` or `NoLossScale`. With the last, `inner` is
      called as it is and nothing is added to the program. Or a dict from names of losses to these.
    axis_name: the mapped axis, or axes, over which all devices must decide alike (`shard_map`,
      `pmap`, `vmap`). Averaging the gradients over it remains yours to do, before `update`.
    check_updates: skip as well when the gradients were finite but the updates are not; counted
      as `bad_updates`, and the scale does not back off. The updates are computed once to look at
      them and once more to apply them, so that they need not be kept (on a GPU XLA may compute them
      once, and keep old and new). Without it such a step is applied.
    name: tells several loss scales in one state apart.
    **unknown: refused. What shapes gradients or updates is set on `inner`.

  Returns:
    An optax transformation. Its state is a NamedTuple of strongly typed arrays; its structure
    records `name` and the configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type or is unknown; `init`: there is another
      `loss_scaling` inside; `update`: the state is not one of this transformation, or `inner` calls
      `grad_fn` in a loop or branch that JAX traces.
    MpjaxValueError: arguments contradict each other; `update`: the gradients do not match the
      parameters, the state was made with another configuration, or `axis_name` is not bound.

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
  check_arguments(inner, loss_scale, axis_name, check_updates, name, unknown)
  labels, several = label_configs(loss_scale, name), isinstance(loss_scale, Mapping)
  inner = take_extra_args(inner)
  configs = {k: v for k, v in labels.items() if not isinstance(v, NoLossScale)}
  if not configs:
    return without_loss_scale(inner, labels, several)

  def init(params: PyTree) -> LossScalingState:
    where = "mpjax.loss_scaling(inner)"
    params = arrays_only(params)
    inner_state = adopt_masters(params, init_inner(inner, float32_view(params), where), where)
    warn_of_half(params, merged_masters(inner_state))
    refuse_nesting(inner_state)
    scales: LossScales = {label: init_scale(config) for label, config in configs.items()}
    return place_like(params, LossScalingState(scales, jax.tree.map(strong, inner_state)))

  def update(
    updates: PyTree,
    state: PyTree,
    params: PyTree = None,
    *,
    loss: PyTree = None,
    apply: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, LossScalingState]:
    old = own_scales(state, configs)
    call = where = "mpjax.loss_scaling(inner).update"
    if apply is not None:
      refuse_apply_to_parts(params)
    params = arrays_only(params)
    own = differentiated(params)
    given = by_loss(updates, configs, several, f"{where}(updates)")
    given = {label: differentiated(g) for label, g in given.items()}
    grads = {k: align_gradients(g, own, f"{where}(updates)") for k, g in given.items()}
    frozen = frozen_leaves(given.values(), own)
    if "grad" in extra_args:
      given = by_loss(extra_args["grad"], configs, several, f"{where}(grad)")
      extra_args["grad"] = _unscaled_sum(given, old)
    grad_fn: Any = extra_args.get("grad_fn")
    losses = by_loss(loss, configs, several, f"{where}(loss)") if loss is not None else {}
    first_bad, finite, number = {}, {}, {}
    # In a step of `make_train_step` nobody else has the gradients, and their quotients take over
    # the memory.
    total = None if apply is None else stored_first(_unscaled_sum(grads, old))
    for label, g in grads.items():
      # Where the scale may be below 1 a quotient can overflow, so quotients are looked at. Else the
      # gradients themselves: then no quotient has to be kept in memory until the decision.
      below_one = label_limits(Found(state, label).config)[0] < 1
      seen = g if total is None and not below_one else unscale_tree(g, old[label].scale)
      watched = jax.tree.leaves((seen, losses.get(label)))
      first_bad[label] = _agree(first_nonfinite(watched), axis_name)
      number[label] = len(watched)
      finite[label] = first_bad[label] == number[label]
    all_finite = functools.reduce(jnp.logical_and, finite.values())
    if several:  # The sum of finite gradients may overflow; no single scale is to blame for that.
      all_finite = jnp.logical_and(all_finite, _all_finite(_unscaled_sum(grads, old), axis_name))
    scales = {Found(state, label).name: one.scale for label, one in old.items()}
    loss_scales = scales if several else next(iter(scales.values()))
    extra_args = flag_and_scale(extra_args, all_finite, loss_scales)

    def step(
      inner_state: PyTree, params: PyTree, seen: list[dict[str, Array]] | None = None
    ) -> tuple[PyTree, PyTree]:
      view = None if params is None else float32_view(params)
      # In here, where an optimizer reads it, a quotient is never stored.
      gradient = _unscaled_sum(grads, old) if total is None else total
      held, gradient = leave_to_window(frozen, gradient, inner_state)
      more = extra_args if grad_fn is None else {**extra_args, "grad_fn": unscaled_by(seen)}
      new_updates, new_inner = update_inner(inner, gradient, inner_state, view, more, call)
      new_inner = keep_masters(held, inner_state, new_inner)
      new_updates = reach_masters(params, new_updates, new_inner)
      return by_part(lambda u, _: hold(held, u), new_updates, params), new_inner

    def unscaled_by(seen: list[dict[str, Array]] | None) -> Callable[..., PyTree]:
      """`grad_fn` that returns plain gradients, and notes where they are not finite."""
      outside = get_opaque_trace_state()

      def unscaled(*args: Any, **kwargs: Any) -> PyTree:
        at = f"{call}(grad_fn)"
        given = by_loss(grad_fn(*args, **kwargs), configs, several, at)
        given = {k: align_gradients(differentiated(g), own, at) for k, g in given.items()}
        if seen is not None:
          watched = {k: (unscale_tree(g, old[k].scale), losses.get(k)) for k, g in given.items()}
          first = {k: first_nonfinite(jax.tree.leaves(w)) for k, w in watched.items()}
          if get_opaque_trace_state() != outside:
            _refuse_traced(first)
          seen.append(first)
        return _unscaled_sum(given, old)

      return unscaled

    def merged(new_updates: PyTree, params: PyTree) -> PyTree:
      grad = next(iter(grads.values()))
      return by_part(lambda u, p: merge_updates(grad, u, p), new_updates, params)

    kept, where = state.inner_state, f"{where}: the state of inner"
    applied = all_finite
    if check_updates or grad_fn is not None:
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
      new_updates, new_inner = _unless_skipped(
        lambda kept: step(kept, params), kept, applied, where
      )
      result = merged(new_updates, params)
    else:

      def step_and_apply(kept: PyTree) -> tuple[PyTree, PyTree]:
        new_updates, new_inner = step(*kept)
        return (), (new_inner, apply(kept[1], merged(new_updates, kept[1]), new_inner))

      _, (new_inner, result) = _unless_skipped(step_and_apply, (kept, params), applied, where)
    flags = {"all_finite": all_finite, "applied": applied}
    new_state = LossScalingState(
      {
        label: adjust(config, old[label], finite=finite[label], first_bad=first_bad[label], **flags)
        for label, config in configs.items()
      },
      new_inner,
    )
    return result, new_state

  return transformation(init, update)


def _unscaled_sum(grads: dict[str, PyTree], old: dict[str, LossScaleState]) -> PyTree:
  """The gradient of the sum of the losses, in float32."""
  return _sum(unscale_tree(g, old[label].scale) for label, g in grads.items())


def _sum(grads: Iterable[PyTree]) -> PyTree:
  return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), map(float32_view, grads))


def _unless_skipped(step: Step, old: PyTree, applied: Array, where: str) -> tuple[PyTree, PyTree]:
  """Returns updates and state of `step(old)`; nothing and the old state where it does not apply."""
  traced = isinstance(applied, Tracer)
  cpu = one_at_a_time() if traced else False
  # In a branch that is only taken when the step applies, there is nothing to select.
  keep = jnp.logical_or(applied, cpu)

  def selected(old: PyTree) -> tuple[PyTree, PyTree]:
    updates, new = step(old)
    kept = jax.tree.map(lambda u, n: jnp.where(keep, u, n), updates, nothing_like(updates))
    return kept, select(keep, new, old, where, fix=_STATE_FIX)

  if not traced:
    return selected(old)
  return step_or_skip(jnp.logical_or(applied, jnp.logical_not(cpu)), selected, old)


def _all_finite(tree: PyTree, axis_name: AxisName | None) -> Array:
  leaves = jax.tree.leaves(tree)
  return _agree(first_nonfinite(leaves), axis_name) == len(leaves)


def _refuse_traced(first: Any) -> None:
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
