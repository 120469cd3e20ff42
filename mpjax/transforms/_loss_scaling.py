"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Never, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_flag, check_value, wrong_type
from mpjax._core.trees import first_nonfinite, is_half, is_inexact
from mpjax._core.types import Array, Function, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import check_axes, check_inner
from mpjax.transforms._loss_scale import (
  DynamicLossScale,
  LossScale,
  LossScaleState,
  NoLossScale,
  StaticLossScale,
  adjust,
  init_scale,
  parse_label,
  unscale_tree,
  write_label,
)
from mpjax.transforms._masters import init_shown, merge_masters, update_shown
from mpjax.transforms._state import (
  ChainedLossScalingState,
  LossScales,
  LossScalingState,
  MasterWeightsState,
  own_scales,
  refuse_scale_inside,
)
from mpjax.transforms._trees import (
  align_gradients,
  arrays_only,
  as_stored,
  differentiated,
  float32_view,
  hide_untrained,
  key_text,
  merge_updates,
  nodes_of,
  place_like,
  step_or_select,
  stored_first,
)


def _check_name(name: object, where: str) -> None:
  check_value(
    name,
    isinstance(name, str) and name != "" and not set(name) & set(":/"),
    where,
    expected="a non-empty string without ':' and '/', or None",
    fix="It becomes a key of the state; a plain word such as 'generator' will do.",
  )


def warn_of_half(params: Params, inner_state: OptState) -> None:
  """Warns, once, if parameters stored in low precision have no master."""
  masters = merge_masters(
    nodes_of(inner_state, MasterWeightsState), "mpjax.loss_scaling(inner).init"
  )
  covered = {path for path, _ in jax.tree_util.tree_leaves_with_path(masters)}
  leaves = jax.tree_util.tree_leaves_with_path(params)
  half = [path for path, x in leaves if is_half(x) and path not in covered]
  if half:
    warnings.warn(
      f"mpjax.loss_scaling(inner).init(params): {len(half)} parameters are stored in low "
      f"precision (the first: {key_text(half[0])}), where updates smaller than the rounding are "
      "lost. Store them in float32 (a policy casts them where they are used), keep a "
      "float32 copy in the optimizer state with mpjax.master_weights(inner), or round "
      'stochastically with mpjax.apply_updates(..., rounding="stochastic").',
      UserWarning,
      stacklevel=3,
    )


class LossScalingTransformation(optax.GradientTransformationExtraArgs):
  """An optax transformation whose `update` takes `apply=` only where it is called by name.

  `optax.chain` unpacks its transformations: what it gets refuses `apply=`, since the next one in
  the chain would take new parameters for updates.
  """

  @property
  def init(self) -> Function:  # pyright: ignore[reportIncompatibleVariableOverride]
    return _out_of_a_chain(self[0], _init_in_a_chain)

  @property
  def update(self) -> Function:  # pyright: ignore[reportIncompatibleVariableOverride]
    return _out_of_a_chain(self[1], _update_in_a_chain)


def _out_of_a_chain(held: Leaf, in_a_chain: Function) -> Function:
  # Not what somebody has put there (`_replace`), whatever that wraps.
  ours = isinstance(held, functools.partial) and held.func is in_a_chain
  return held.args[0] if ours else held


def _init_in_a_chain(init: optax.TransformInitFn, params: Params) -> OptState:
  state: PyTree = init(params)
  return ChainedLossScalingState(*state)


def _update_in_a_chain(
  update: Function, *args: PyTree, apply: object = None, **kwargs: PyTree
) -> tuple[Updates, OptState]:
  if apply is not None:
    raise not_outermost("one that is part of an optax.chain, or was unpacked")
  return update(*args, **kwargs)


def not_outermost(got: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    "mpjax.loss_scaling(inner).update(apply)",
    expected="mpjax.loss_scaling to be outermost",
    got=got,
    fix="What is outside would take the new parameters for updates. Write "
    "mpjax.loss_scaling(optax.chain(...)) and call tx.update, or leave apply= out and apply the "
    "updates.",
  )


AxisName: TypeAlias = Hashable | Sequence[Hashable]


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
  method: leave `jax_debug_nans` off, and ask `mpjax.check_skipped_steps` instead.

  Wrap everything that has state or reads the size of gradients, clipping too:
  `loss_scaling(optax.chain(clip, adamw))`. As an element of a chain it protects only what is
  inside, and what keeps state beside it, or around it, is refused where the scale is read. The
  gradients must be those of the scaled loss: let `mpjax.value_and_grad` make them, and test a step
  by `mpjax.check_loss_scaling`.

  `inner` works in float32: 16-bit parameters are cast before it sees them, its state is float32,
  and so are the updates (`optax.apply_updates` adds in float32 and rounds once). Integer
  parameters, booleans and keys are hidden from it and stay as they are. None instead of the
  gradient of a parameter is refused: to freeze it, put `optax.set_to_zero()` inside of `inner`, by
  `optax.multi_transform` or `optax.masked`.

  `update(updates, state, params=None, *, loss=None, apply=None, **extra_args)` also takes:

  - `loss=`: a tree of arrays, scaled or not, that only have to be finite.
  - `apply=`: a function of parameters, updates and the new state of `inner`. `update` returns what
    it returns, new parameters, instead of updates, or the old ones where it skips: updates that are
    applied where they are made need not be stored. There must be no other transformation outside,
    which would take them for updates: `optax.chain`, masks and `mpjax.master_weights` are refused.
  - what `inner` takes, with `grads_finite` (bool of shape ()) and `loss_scale` (float32 of shape
    (), the one that these gradients were divided by) added, except beside `value_fn=`: line
    searches call that function with all the rest. `grad=` of line searches and what `grad_fn=` of
    `optax.contrib.sam` returns are unscaled like the gradients. Where `grad_fn`, which `inner` has
    to call in Python, returns an inf or NaN, the step is skipped as well.

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
      as `bad_updates`, and the scale does not back off. The updates are computed once to look at
      them and once more to apply them (on a GPU XLA may compute them once, and keep old and new).
    name: tells several loss scales in one state apart.
    **unknown: refused. What shapes gradients or updates is set on `inner`.

  Returns:
    An optax transformation. It takes gradients in the shapes of the parameters, of any floating
    dtype, and returns updates in these shapes, in float32 (64-bit and complex ones as the
    parameters). Its state is a `LossScalingState`; its structure records `name` and configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type or is unknown; `init`: there is another
      `loss_scaling` inside; `update`: the state is another's, or `inner` calls `grad_fn` in a loop
      or branch that JAX traces.
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
  if unknown:
    raise MpjaxTypeError(
      f"{call}({', '.join(f'{key}=' for key in unknown)})",
      expected="loss_scale, axis_name, check_updates or name",
      got=f"the unknown keyword {', '.join(map(repr, unknown))}",
      fix="Clipping, decay, averaging and accumulation are set on inner; mpjax.monitor counts.",
    )
  inner = check_inner(inner, f"{call}(inner)")
  where, several = f"{call}(loss_scale)", isinstance(loss_scale, Mapping)
  named: dict[str | None, LossScale] = (
    {**loss_scale} if isinstance(loss_scale, Mapping) else {name: loss_scale}
  )
  for config in named.values():
    if not isinstance(config, (NoLossScale, StaticLossScale, DynamicLossScale)):
      raise wrong_type(
        config,
        where,
        expected="a NoLossScale, StaticLossScale or DynamicLossScale",
        fix="For a constant scale pass mpjax.StaticLossScale(1024); to start elsewhere, "
        "mpjax.DynamicLossScale(init_scale=1024).",
      )
  for key in named:
    if several or key is not None:
      place = f"{where} with the key {key!r}" if several else f"{call}(name)"
      _check_name(key, place)
  unscaled = {isinstance(config, NoLossScale) for config in named.values()}
  if several and (name is not None or len(unscaled) != 1):
    raise MpjaxValueError(
      where,
      expected="one scale for each loss, without name=, and either all or none NoLossScale()",
      got=f"{named!r} and name={name!r}",
      fix="The keys are the names. StaticLossScale(1) leaves one of several losses unscaled, but "
      "checked.",
    )
  scaled = True not in unscaled
  check_flag(check_updates, f"{call}(check_updates)")
  if check_updates and not scaled:
    expected = "False with NoLossScale(), which checks nothing"
    fix = "Use StaticLossScale(1) to check and skip without scaling."
    raise MpjaxValueError(f"{call}(check_updates)", expected=expected, got="True", fix=fix)
  # By the labels that they have in a state, in the order of a tree.
  configs = dict(sorted((write_label(config, key), config) for key, config in named.items()))

  def init(params: Params) -> LossScalingState:
    if scaled:
      params = arrays_only(params)
      inner_state = init_shown(inner, params, _INIT)
      warn_of_half(params, inner_state)
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
    loss: PyTree = None,
    apply: Callable[[Params, Updates, OptState], Params] | None = None,
    **extra_args: PyTree,
  ) -> tuple[Updates, LossScalingState]:
    # What came: gradients by loss, in the precision of the parameters, and what divides them.
    scales = own_scales(state, configs)
    if apply is not None and nodes_of(params, optax.MaskedNode):
      raise not_outermost("one that sees a part of the parameters (optax.masked, multi_transform)")
    params = arrays_only(params) if scaled else params
    losses = _Losses(configs, scales, several, differentiated(params))
    grads = losses.gradients(updates, "updates")
    if "grad" in extra_args:
      extra_args["grad"] = losses.total(losses.gradients(extra_args["grad"], "grad"))
    # In a step of `make_train_step` nobody else has the gradients, and their quotients take over
    # the memory.
    stored = stored_first(losses.total(grads)) if scaled and apply is not None else None

    # What is looked at: where is the first number that is not finite?
    values = losses.by_label(loss, "loss") if scaled and loss is not None else {}
    watched = {k: losses.watched(k, grads[k], values, stored is None) for k in losses.old}
    first_bad = {k: _agree(first_nonfinite(leaves), axis_name) for k, leaves in watched.items()}
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    all_finite: Leaf = np.bool_(True)
    for label, leaves in watched.items():
      all_finite = jnp.logical_and(all_finite, first_bad[label] == len(leaves))
    if several and scaled:
      # The sum of finite gradients may overflow; no single scale is to blame for that.
      all_finite = jnp.logical_and(all_finite, _all_finite(losses.total(grads), axis_name))
    # A line search calls value_fn with every argument that has another name.
    if "value_fn" not in extra_args:
      by_name = {parse_label(label).name: one.scale for label, one in losses.old.items()}
      divisors = by_name if several and scaled else next(iter(by_name.values()), np.float32(1))
      extra_args = {"grads_finite": all_finite, "loss_scale": divisors} | extra_args

    # What inner does with the plain gradient. In here, where it reads it, no quotient is stored.
    def step(
      inner_state: OptState, params: Params, seen: list[dict[str, Array]] | None = None
    ) -> tuple[Updates, OptState]:
      gradient, more = losses.total(grads) if stored is None else stored, extra_args
      if "grad_fn" in extra_args:
        more = extra_args | {"grad_fn": losses.plain(extra_args["grad_fn"], values, seen)}
      if scaled:
        return update_shown(inner, gradient, inner_state, params, more, _CALL)
      view = None if params is None else hide_untrained(params, params)
      new, new_inner = inner.update(gradient, inner_state, view, **more)
      if any(map(is_half, jax.tree.leaves(params))):
        # float32 gradients turn bfloat16 moments into float32, and a new dtype is a new trace.
        new_inner = as_stored(new_inner, inner_state)
      return new, new_inner

    def merged(new: Updates, params: Params) -> Updates:
      return merge_updates(next(iter(grads.values())), new, params)

    # The decision. Once to look at, and once more to apply: to decide first, by updates that are
    # never stored, takes less memory than to have the old and the new of everything until then.
    applied = all_finite if scaled else None
    if scaled and (check_updates or "grad_fn" in extra_args):
      seen: list[dict[str, Array]] = []
      looked_at, _ = step(state.inner_state, params, seen)
      for label, first in (pair for one in seen for pair in one.items()):
        first_bad[label] = jnp.minimum(first_bad[label], _agree(first, axis_name))
        all_finite = jnp.logical_and(all_finite, first_bad[label] == len(watched[label]))
      good = _all_finite(looked_at, axis_name) if check_updates else True
      applied = jnp.logical_and(all_finite, good)

    # The step, or nothing.
    where = f"{_CALL}: the state of inner"
    if apply is None:
      new_updates, new_inner = step_or_select(
        applied, lambda old: step(old, params), state.inner_state, where
      )
      result = merged(new_updates, params)
    else:

      def step_and_apply(old: PyTree) -> tuple[tuple[()], PyTree]:
        new, new_inner = step(*old)
        return (), (new_inner, apply(old[1], merged(new, old[1]), new_inner))

      old = (state.inner_state, params)
      _, (new_inner, result) = step_or_select(applied, step_and_apply, old, where)

    # And the scales move, each by what its own gradients were.
    new_scales, flags = dict(scales), {"applied": applied, "all_finite": all_finite}
    for label, scale in losses.old.items():
      finite = first_bad[label] == len(watched[label])
      own = {"finite": finite, "first_bad": first_bad[label], **flags}
      new_scales[label] = adjust(configs[label], scale, **own)
    return result, state._replace(loss_scale=new_scales, inner_state=new_inner)

  return LossScalingTransformation(
    functools.partial(_init_in_a_chain, init), functools.partial(_update_in_a_chain, update)
  )


_INIT = "mpjax.loss_scaling(inner)"
_CALL = f"{_INIT}.update"


class _Losses(NamedTuple):
  """The losses whose gradients an update is given, and the parameters that they are of."""

  configs: Mapping[str, LossScale]
  scales: LossScales
  several: bool
  params: Params

  @property
  def old(self) -> dict[str, LossScaleState]:
    """The scales; none under `NoLossScale`."""
    return {k: one for k, one in self.scales.items() if isinstance(one, LossScaleState)}

  def by_label(self, tree: PyTree, argument: str) -> dict[str, PyTree]:
    """What belongs to each loss: an entry of `tree`, or all of it where there is one loss."""
    if not self.several:
      return dict.fromkeys(self.configs, tree)
    names = {str(parse_label(label).name): label for label in self.configs}
    if not isinstance(tree, Mapping) or set(tree) != set(names):
      is_dict = isinstance(tree, Mapping)
      raise MpjaxValueError(
        f"{_CALL}({argument})",
        expected=f"a dict with one entry for each loss, {sorted(names)}",
        got=f"one with {sorted(map(str, tree))}" if is_dict else type(tree).__name__,
        fix="Differentiate each loss by itself, and pass {name: gradients, ...}.",
      )
    return {label: tree[key] for key, label in names.items()}

  def gradients(self, tree: Grads, argument: str) -> dict[str, Grads]:
    """The gradients of each loss, in the precision of the parameters."""
    strict = bool(self.old) or self.several
    return {
      k: align_gradients(differentiated(g), self.params, f"{_CALL}({argument})", strict=strict)
      for k, g in self.by_label(tree, argument).items()
    }

  def total(self, grads: Mapping[str, Grads]) -> Grads:
    """The gradient of the sum of the losses, unscaled, as `inner` sees it."""
    if self.old:
      return float32_view(_sum([unscale_tree(g, self.old[k].scale) for k, g in grads.items()]))
    return hide_untrained(_sum(list(grads.values())), self.params)

  def watched(
    self, label: str, grads: Grads, losses: Mapping[str, PyTree], exact: bool = False
  ) -> list[Leaf]:
    """What has to be finite for a loss."""
    # Where the scale may be below 1 a quotient can overflow, so quotients are looked at. Else, if
    # `exact`, the gradients: then no quotient has to be kept in memory until the decision.
    exact = exact and parse_label(label).limits[0] >= 1
    seen = grads if exact else unscale_tree(grads, self.old[label].scale)
    return jax.tree.leaves((seen, losses.get(label)))

  def plain(
    self, grad_fn: Function, losses: Mapping[str, PyTree], seen: list[dict[str, Array]] | None
  ) -> Callable[..., Grads]:
    """`grad_fn` that returns plain gradients, and notes in `seen` where they are not finite."""
    outside = get_opaque_trace_state()

    def plain(*args: PyTree, **kwargs: PyTree) -> Grads:
      grads = self.gradients(grad_fn(*args, **kwargs), "grad_fn")
      if seen is not None:
        first = {k: first_nonfinite(self.watched(k, g, losses)) for k, g in grads.items()}
        # A value of a trace inside of `inner` cannot be looked at later.
        traced = any(isinstance(x, Tracer) for x in first.values())
        if traced and get_opaque_trace_state() != outside:
          raise MpjaxTypeError(
            "mpjax.loss_scaling(inner).update(grad_fn)",
            expected="inner to call it in Python, where its gradients can be looked at",
            got="a call inside of a loop, a branch or a function that inner gives to JAX to trace",
            fix="Call it outside of jax.lax.scan, cond and the like in inner, or use "
            "NoLossScale(), which looks at nothing.",
          )
        seen.append(first)
      return self.total(grads)

    return plain


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
