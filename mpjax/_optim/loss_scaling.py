"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  check_call,
  check_flag,
  check_value,
  wrong_type,
)
from mpjax._core.trees import first_nonfinite, in_low_precision, is_inexact
from mpjax._core.types import Array, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax._optim.checks import check_axes, check_inner
from mpjax._optim.loss_scale import (
  DynamicLossScale,
  LossScale,
  LossScaleState,
  LossScalingState,
  NoLossScale,
  StaticLossScale,
  adjust,
  init_scale,
  own_scales,
  refuse_scale_inside,
  unscale_tree,
  write_label,
)
from mpjax._optim.masters import init_shown, masters_in, update_shown
from mpjax._optim.trees import (
  align_gradients,
  arrays_only,
  as_stored,
  differentiated,
  float32_view,
  hide_untrained,
  key_text,
  merge_updates,
  place_like,
  step_or_select,
  stored_first,
)

AxisName: TypeAlias = Hashable | Sequence[Hashable]

_INIT = "mpjax.loss_scaling(inner)"
_CALL = f"{_INIT}.update"


@check_call(
  "mpjax.loss_scaling", fix="Clipping, decay, averaging and accumulation are set on inner."
)
def loss_scaling(
  inner: optax.GradientTransformation,
  loss_scale: LossScale | Mapping[str, LossScale] = DynamicLossScale(),  # noqa: B008 (frozen)
  *,
  axis_name: AxisName | None = None,
  check_updates: bool = False,
  name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it takes gradients of a scaled loss.

  Each `update` casts the gradients to float32, divides them by the scale, looks at every element
  for an inf or NaN, and lets `inner` work. If something was not finite the step is *skipped*: the
  updates are -0.0 (the one number that changes no parameter's bits when added) and the entire inner
  state stays as it was, counts of schedules included. Then the scale moves. An inf is part of the
  method: leave `jax_debug_nans` off, and ask `mpjax.check_skipped_steps` instead.

  It protects only what is inside: wrap everything that has state or reads the size of gradients,
  `loss_scaling(optax.chain(clip, adamw))`. The gradients must be those of the scaled loss: let
  `mpjax.value_and_grad` make them, and test a step by `mpjax.check_loss_scaling`. `inner` works in
  float32, and sees neither integers, booleans nor keys.

  `update` also looks at `loss=`, arrays that have to be finite. It passes on all arguments and adds
  `grads_finite` (bool of shape ()) and `loss_scale` (float32 of shape (), the one that these
  gradients were divided by), but not beside the `value_fn=` of a line search, which calls it
  with all the rest; its `grad=` is unscaled like the gradients.

  Several losses into one optimizer have a scale each, `loss_scaling(inner, {"a": ..., "b": ...})`:
  differentiate one after the other with `mpjax.value_and_grad(..., name="a")`, and give `update`
  the gradients (and `loss=`) as a dict with these keys. They are unscaled, each by its own scale,
  and added in float32. If one overflows, the step is skipped, and its scale alone backs off.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale` or `NoLossScale`, or a dict from names of
      losses to these. With the last, `inner` is called as it is and nothing is added to the jaxpr.
    axis_name: the mapped axis, or axes, over which all devices must decide alike (`shard_map`,
      `pmap`, `vmap`). Averaging the gradients over it remains yours to do, before `update`.
    check_updates: skip as well when the gradients were finite but the updates are not; counted
      as `bad_updates`, and the scale does not back off. The updates are computed twice.
    name: tells several loss scales in one state apart.

  Returns:
    An optax transformation. It takes gradients in the shapes of the parameters, of any floating
    dtype, and returns updates in these shapes, in float32 (64-bit and complex ones as the
    parameters). Its state is a `LossScalingState`; its structure records `name` and configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type; `init`: there is another `loss_scaling` inside;
      `update`: the state is another's, or there is a `grad_fn`, whose gradients nobody unscales.
    MpjaxValueError: arguments contradict each other; `update`: the gradients do not match the
      parameters, the state was created with another configuration, or `axis_name` is not bound.

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
  call = "mpjax.loss_scaling"
  inner = check_inner(inner, f"{call}(inner)")
  where, several = f"{call}(loss_scale)", isinstance(loss_scale, Mapping)
  named: dict[str | None, LossScale] = (
    {**loss_scale} if isinstance(loss_scale, Mapping) else {name: loss_scale}
  )
  for key, config in named.items():
    if not isinstance(config, (NoLossScale, StaticLossScale, DynamicLossScale)):
      expected = "a NoLossScale, StaticLossScale or DynamicLossScale"
      fix = "Pass an instance: mpjax.StaticLossScale(1024), or mpjax.DynamicLossScale()."
      raise wrong_type(config, where, expected=expected, fix=fix)
    if several or key is not None:
      is_word = isinstance(key, str) and key != "" and not set(key) & set(":/")
      at = f"{where} with the key {key!r}" if several else f"{call}(name)"
      expected = "a non-empty string without ':' and '/', or None"
      fix = "It becomes a key of the state; a plain word such as 'generator' will do."
      check_value(key, is_word, at, expected=expected, fix=fix)
  unscaled = {isinstance(config, NoLossScale) for config in named.values()}
  if several and (name is not None or len(unscaled) != 1):
    expected = "one scale for each loss, without name=, and either all or none NoLossScale()"
    got = f"{named!r} and name={name!r}"
    fix = "StaticLossScale(1) leaves one of several losses unscaled, but checked."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  scaled = True not in unscaled
  check_flag(check_updates, f"{call}(check_updates)")
  expected = "False with NoLossScale(), which checks nothing"
  fix, possible = "Use StaticLossScale(1) to check and skip.", scaled or not check_updates
  check_value(check_updates, possible, f"{call}(check_updates)", expected=expected, fix=fix)
  # By the labels that they have in a state, in the order of a tree.
  labels = {key: write_label(config, key) for key, config in named.items()}
  labels = dict(sorted(labels.items(), key=lambda item: item[1]))
  configs = {label: named[key] for key, label in labels.items()}

  def init(params: Params) -> LossScalingState:
    if scaled:
      params = arrays_only(params)
      inner_state = init_shown(inner, params, _INIT)
      _warn_of_half(params, inner_state)
    else:
      # Without a scale inner works as if it were alone.
      inner_state = inner.init(hide_untrained(params, params))
    fix = "Wrap once, outermost: the inner one would divide by its scale again."
    refuse_scale_inside(inner_state, _INIT, got="another mpjax.loss_scaling", fix=fix)
    state = LossScalingState({k: init_scale(config) for k, config in configs.items()}, inner_state)
    return place_like(params, state) if scaled else state

  def update(
    updates: Grads,
    state: OptState,
    params: Params = None,
    *,
    _apply: Callable[[Params, Updates, OptState], Params] | None = None,
    **extra_args: PyTree,
  ) -> tuple[Updates, LossScalingState]:
    # `_apply` is for `make_train_step`, which knows that nothing is outside: there `update` returns
    # new parameters, and updates that are applied where they are computed need not be stored.
    scales = own_scales(state, configs)
    moving = {k: one for k, one in scales.items() if isinstance(one, LossScaleState)}
    params = arrays_only(params) if scaled else params
    trained = differentiated(params)
    # That of `make_train_step`, which has the model state in it, comes to inner as value=.
    loss = extra_args.get("loss") if _apply is None else extra_args.pop("loss", None)
    if "grad_fn" in extra_args and (scaled or several):
      expected = "an inner that takes gradients, and computes none"
      got = "a function whose gradients would be those of the scaled loss"
      fix = "Use optax.contrib.sam with its default opaque_mode=False, or NoLossScale()."
      raise MpjaxTypeError(f"{_CALL}(grad_fn)", expected=expected, got=got, fix=fix)

    # Gradients come by loss, and are computed with in the precision of the parameters.
    def by_label(tree: PyTree, argument: str) -> dict[str, PyTree]:
      if not several:
        return dict.fromkeys(configs, tree)
      if not isinstance(tree, Mapping) or set(tree) != set(labels):
        expected = f"a dict with one entry for each loss, {sorted(map(str, labels))}"
        is_dict = isinstance(tree, Mapping)
        got = f"one with {sorted(map(str, tree))}" if is_dict else type(tree).__name__
        fix = "Differentiate each loss by itself, and pass {name: gradients, ...}."
        raise MpjaxValueError(f"{_CALL}({argument})", expected=expected, got=got, fix=fix)
      return {label: tree[key] for key, label in labels.items()}

    def aligned(tree: Grads, argument: str) -> dict[str, Grads]:
      return {
        label: align_gradients(differentiated(g), trained, f"{_CALL}({argument})")
        for label, g in by_label(tree, argument).items()
      }

    def plain(grads: Mapping[str, Grads]) -> Grads:
      # The gradient of the sum of the losses, as `inner` sees it.
      if not scaled and not several:
        return hide_untrained(next(iter(grads.values())), trained)
      parts = [unscale_tree(g, moving[k].scale if scaled else None) for k, g in grads.items()]
      add = lambda *g: functools.reduce(jnp.add, g) if is_inexact(g[0]) else g[0]  # noqa: E731
      total = jax.tree.map(add, *parts)
      return float32_view(total) if scaled else hide_untrained(as_stored(total, first), trained)

    grads = aligned(updates, "updates")
    first = next(iter(grads.values()))
    if "grad" in extra_args:
      extra_args["grad"] = plain(aligned(extra_args["grad"], "grad"))
    # In a step of `make_train_step` nobody else has the gradients, and their quotients take over
    # the memory. Else they are computed where inner reads them, and need none.
    stored = stored_first(plain(grads)) if scaled and _apply is not None else None

    # What is looked at: where is the first number that is not finite?
    losses = by_label(loss, "loss") if scaled and loss is not None else {}
    first_bad, finite = dict[str, Array](), dict[str, Array]()
    for label, scale in moving.items():
      # Where the scale may be below 1 a quotient can overflow, so quotients are looked at. Else the
      # gradients: then no quotient has to be kept in memory until the decision.
      config = configs[label]
      exact = stored is None and isinstance(config, DynamicLossScale) and config.min_scale >= 1
      looked_at = grads[label] if exact else unscale_tree(grads[label], scale.scale)
      leaves = jax.tree.leaves((looked_at, losses.get(label)))
      first_bad[label] = _agree(first_nonfinite(leaves), axis_name)
      finite[label] = first_bad[label] == len(leaves)
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    all_finite: Leaf = functools.reduce(jnp.logical_and, finite.values(), np.bool_(True))
    if several and scaled:
      # The sum of finite gradients may overflow; no single scale is to blame for that.
      all_finite = jnp.logical_and(all_finite, _all_finite(plain(grads), axis_name))
    # A line search calls value_fn with every argument that has another name.
    if "value_fn" not in extra_args:
      divisors = {key: moving[label].scale for key, label in labels.items() if label in moving}
      divisor = divisors if several and scaled else divisors.get(name, np.float32(1))
      extra_args = {"grads_finite": all_finite, "loss_scale": divisor} | extra_args

    # What inner does with the plain gradient.
    def step(inner_state: OptState, params: Params) -> tuple[Updates, OptState]:
      gradient = plain(grads) if stored is None else stored
      if scaled:
        return update_shown(inner, gradient, inner_state, params, extra_args, _CALL)
      shown = hide_untrained(params, params)
      new, new_inner = inner.update(gradient, inner_state, shown, **extra_args)
      # float32 gradients turn bfloat16 moments into float32, and a new dtype is a new trace.
      has_half = any(map(in_low_precision, jax.tree.leaves(params)))
      return new, as_stored(new_inner, inner_state) if has_half else new_inner

    # The decision. With `check_updates` once to look at, and once more to apply: to decide first,
    # by updates that are never stored, takes less memory than the old and the new of everything.
    applied = all_finite if scaled else None
    if check_updates:
      looked_at, _ = step(state.inner_state, params)
      applied = jnp.logical_and(all_finite, _all_finite(looked_at, axis_name))

    # The step, or nothing.
    if _apply is None:
      new, new_inner = step_or_select(applied, lambda old: step(old, params), state.inner_state)
      result = merge_updates(first, new, params)
    else:

      def step_and_apply(old: PyTree) -> tuple[tuple[()], PyTree]:
        new, new_inner = step(*old)
        return (), (new_inner, _apply(old[1], merge_updates(first, new, old[1]), new_inner))

      _, (new_inner, result) = step_or_select(applied, step_and_apply, (state.inner_state, params))

    # And the scales move, each by what its own gradients were.
    flags = {"applied": applied, "all_finite": all_finite}
    moved = {
      label: adjust(configs[label], moving[label], finite=finite[label], first_bad=leaf, **flags)
      for label, leaf in first_bad.items()
    }
    return result, state._replace(loss_scale=scales | moved, inner_state=new_inner)

  return optax.GradientTransformationExtraArgs(init, update)


def _warn_of_half(params: Params, inner_state: OptState) -> None:
  """Warns, once, if parameters stored in low precision have no master."""
  masters = masters_in(inner_state, f"{_INIT}.init")
  covered = {path for path, _ in jax.tree_util.tree_leaves_with_path(masters)}
  leaves = jax.tree_util.tree_leaves_with_path(params)
  half = [path for path, x in leaves if in_low_precision(x) and path not in covered]
  if half:
    warnings.warn(
      f"{_INIT}.init(params): {len(half)} parameters are stored in low "
      f"precision (the first: {key_text(half[0])}), where updates smaller than the rounding are "
      "lost. Store them in float32 (a policy casts them where they are used), keep a "
      "float32 copy in the optimizer state with mpjax.master_weights(inner), or round "
      'stochastically with mpjax.apply_updates(..., rounding="stochastic").',
      UserWarning,
      stacklevel=3,
    )


def _all_finite(tree: PyTree, axis_name: AxisName | None) -> Array:
  leaves = jax.tree.leaves(tree)
  return _agree(first_nonfinite(leaves), axis_name) == len(leaves)


def _agree(first_bad: Array, axis_name: AxisName | None) -> Array:
  """The first bad leaf on any device, so that all of them decide alike."""
  if axis_name is None:
    return first_bad
  names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  fix = "Call update inside the shard_map, pmap or vmap of that axis. Under plain jit"
  check_axes(names, f"mpjax.loss_scaling(axis_name={axis_name!r})", call="update", fix=fix)
  return jax.lax.pmin(first_bad, tuple(names))
