"""The optax wrapper that carries a loss scale, and skips the steps that overflowed."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import (
  MpjaxValueError,
  check_call,
  check_flag,
  check_value,
  wrong_type,
)
from mpjax._core.fused_leaves import first_nonfinite, least_nonfinite
from mpjax._core.trees import in_low_precision
from mpjax._core.types import Array, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax._optim.find_scale import refuse_scale_inside
from mpjax._optim.loss_scale import (
  DynamicLossScale,
  LossScale,
  NoLossScale,
  SkipNonfinite,
  StaticLossScale,
  adjust,
  count_up,
  init_scale,
  write_label,
)
from mpjax._optim.optimizer_trees import (
  align_gradients,
  arrays_only,
  as_stored,
  differentiated,
  float32_view,
  hide_untrained,
  is_by_loss,
  key_text,
  merge_updates,
  place_like,
  step_or_select,
  sum_of,
  unless_there_before,
)
from mpjax._optim.states import LossScaleState, LossScalingState, ScaleState, StepCount
from mpjax._optim.wrapper_checks import AxisName, axes_of, check_axes, check_inner, check_state
from mpjax._optim.wrappers.leaf_codes import NO_LEAF, LeafKind, coded_leaves
from mpjax._optim.wrappers.master_weights import init_in_float32, masters_in, update_in_float32

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
  """Wrap an optimizer so that it carries a loss scale, and skips steps that overflow.

  Its state holds the scale for `mpjax.scaled(loss_fn, opt_state)`, which runs the backward pass of
  the loss at that scale and returns the plain gradients. `update` takes these. If one of them is
  inf or NaN, the step is *skipped*. The updates are then -0.0, which changes no bits of a parameter
  when added. The inner state stays as it was, counts of schedules included, and a dynamic scale
  backs off. Occasional overflow is expected: keep `jax_debug_nans` off, and call
  `mpjax.check_skipped_steps` to detect persistent overflow.

  Put every transformation with state inside: `loss_scaling(optax.chain(clip, adamw))`. State
  outside would keep the NaN of a skipped step. Test the step with `mpjax.check_loss_scaling`.
  `inner` works in float32, and sees no integers, booleans or keys.

  `update` also checks `loss=`, one or more arrays, for inf and NaN. It passes all extra arguments
  to `inner`.

  For several losses, give each a scale: `loss_scaling(inner, {"a": ..., "b": ...})`. Scale each
  loss with `mpjax.scaled(..., name="a")`, and pass `update` the gradients (and `loss=`) as a dict
  with these keys. Gradients are added in float32. If those of one loss overflow, the step is
  skipped, and only the scale of that loss backs off. `update` also takes the gradient of the sum of
  the losses. It does not show which loss caused an overflow, so all scales back off.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale`, `SkipNonfinite` or `NoLossScale`, or a dict
      from names of losses to these. With `NoLossScale`, `inner` is called as it is, and only
      the steps are counted.
    axis_name: the mapped axis, or axes, over which all devices must decide alike (`shard_map`,
      `pmap`, `vmap`). Average the gradients over it before `update`.
    check_updates: also skip a step if an update or the new inner state is not finite. Unchanged
      numbers of the state do not count. `bad_updates` counts such steps, and the scale does not
      back off. The step is computed twice: on an H200, a GPT of 129 million parameters moves 14 %
      more bytes with adamw.
    name: tells several loss scales in one state apart.

  Returns:
    An optax transformation. It takes gradients of any floating dtype, in the shapes of the
    parameters. Its updates are float32 (64-bit and complex ones as the parameters). Its state is a
    `LossScalingState`, whose structure records `name` and configuration.

  Raises:
    MpjaxTypeError: an argument has the wrong type; `init`: there is another `loss_scaling` inside;
      `update`: the state is of another optimizer.
    MpjaxValueError: arguments contradict each other; `update`: the gradients do not match the
      parameters, the state was created with another configuration, or `axis_name` is not bound.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale(init_scale=4))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> updates, opt_state = tx.update(jnp.asarray([1.0, 0.5]), opt_state, params)
  >>> print(updates)
  [-1.  -0.5]
  >>> updates, opt_state = tx.update(jnp.asarray([4.0, jnp.inf]), opt_state, params)
  >>> print(updates, mpjax.loss_scaling_metrics(opt_state)["loss_scale"])
  [-0. -0.] 2.0
  """
  inner = check_inner(inner, _INIT)
  by_name = _checked_scales(loss_scale, name)
  is_scaled = not any(isinstance(config, NoLossScale) for config in by_name.values())
  where = "mpjax.loss_scaling(check_updates)"
  check_flag(check_updates, where)
  expected = "False with NoLossScale(), which checks nothing"
  fix, possible = "Use SkipNonfinite() to check and skip.", is_scaled or not check_updates
  check_value(check_updates, possible, where, expected=expected, fix=fix)
  # JAX sorts the keys of dicts. In the order of labels, all dicts here have the order of the state.
  labels = {key: write_label(config, key) for key, config in by_name.items()}
  labels = dict(sorted(labels.items(), key=lambda item: item[1]))
  scaling = LossScaling(
    inner=inner,
    labels=labels,
    configs={label: by_name[key] for key, label in labels.items()},
    is_scaled=is_scaled,
    several=isinstance(loss_scale, Mapping),
    axis_name=axis_name,
    check_updates=check_updates,
  )
  return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


def scaling_of(tx: optax.GradientTransformation) -> "LossScaling | None":
  """Returns the object whose methods a transformation of `loss_scaling` has; None of another."""
  # `update` is a bound method, so the transformation itself leads to its `LossScaling`.
  owner = getattr(tx.update, "__self__", None)
  return owner if isinstance(owner, LossScaling) else None


def _checked_scales(
  loss_scale: LossScale | Mapping[str, LossScale], name: str | None
) -> dict[str | None, LossScale]:
  """Returns the configuration of each loss by its name, which is None for an only loss."""
  where, several = "mpjax.loss_scaling(loss_scale)", isinstance(loss_scale, Mapping)
  by_name: dict[str | None, LossScale]
  if isinstance(loss_scale, Mapping):
    by_name = {**loss_scale}
  else:
    by_name = {name: loss_scale}
  for key, config in by_name.items():
    if not isinstance(config, (NoLossScale, SkipNonfinite, StaticLossScale, DynamicLossScale)):
      expected = "a NoLossScale, SkipNonfinite, StaticLossScale or DynamicLossScale"
      fix = "Pass an instance: mpjax.StaticLossScale(1024), or mpjax.DynamicLossScale()."
      raise wrong_type(config, where, expected=expected, fix=fix)
    # The name becomes a part of a label. An only loss may have none.
    is_word = isinstance(key, str) and key != "" and not set(key) & set(":/")
    expected = "a non-empty string without ':' and '/', or None"
    fix = "It becomes a key of the state; a plain word such as 'generator' will do."
    of_name = f"{where} with the key {key!r}" if several else "mpjax.loss_scaling(name)"
    is_allowed = is_word or (key is None and not several)
    check_value(key, is_allowed, of_name, expected=expected, fix=fix)
  # A mix would need two kinds of update: `NoLossScale` calls `inner` as it is.
  checks_nothing = {isinstance(config, NoLossScale) for config in by_name.values()}
  if several and (name is not None or len(checks_nothing) != 1):
    expected = "one scale for each loss, without name=, and either all or none NoLossScale()"
    got = f"{by_name!r} and name={name!r}"
    fix = "SkipNonfinite() gives one of several losses no scale, and checks it."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return by_name


class _Step(NamedTuple):
  """A step of `inner` that is decided, and not computed yet."""

  grads: Grads  # in the tree and the precision of the parameters
  params: Params
  run: Callable[[OptState, Params], tuple[Updates, OptState]]
  applied: Array | None  # whether the step is applied; None under `NoLossScale`, which applies all
  scales: dict[str, ScaleState]  # after the step, by label


class _Decision(NamedTuple):
  """Whether a step is applied, and which of its numbers were finite."""

  applied: Array
  own_finite: dict[str, Array]  # by label: the gradients and the loss of one loss
  all_finite: Array  # those of all losses, and the sum of their gradients
  first_bad: dict[str, Array]  # by label: the code of the first leaf that was not finite


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossScaling:
  """The arguments of `loss_scaling`, and the functions of its transformation as methods."""

  inner: optax.GradientTransformationExtraArgs
  labels: dict[str | None, str]  # by the name of a loss
  configs: dict[str, LossScale]  # by label
  is_scaled: bool
  several: bool
  axis_name: AxisName | None
  check_updates: bool

  def init(self, params: Params) -> LossScalingState:
    """Returns the state before the first step."""
    if self.is_scaled:
      params = arrays_only(params)
      inner_state = init_in_float32(self.inner, params, _INIT)
      _warn_of_half(params, inner_state)
    else:
      # `NoLossScale`: `inner` gets the parameters in their own precision, as without a wrapper.
      inner_state = self.inner.init(hide_untrained(params, params))
    fix = "Wrap once, outermost: each scale needs gradients, and the outer one passes on updates."
    refuse_scale_inside(inner_state, _INIT, got="another mpjax.loss_scaling", fix=fix)
    scales = {label: init_scale(config) for label, config in self.configs.items()}
    state = LossScalingState(scales, inner_state)
    if self.is_scaled:
      return place_like(params, state)
    # The state of a plain optimizer stays where that has put it.
    return state._replace(loss_scale=place_like(params, scales))

  def update(
    self, updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, LossScalingState]:
    """Returns the updates of a step, or updates that change nothing, and the next state."""
    step = self._step(updates, state, params, extra_args, extra_args.get("loss"))
    new, inner_state = step_or_select(
      step.applied, lambda old: step.run(old, step.params), state.inner_state
    )
    new_updates = merge_updates(step.grads, new, step.params)
    return new_updates, LossScalingState(step.scales, inner_state)

  def update_and_apply(
    self,
    updates: Grads,
    state: OptState,
    params: Params,
    *,
    apply: Callable[[Params, Updates, OptState], Params],
    loss: PyTree,
    **extra_args: PyTree,
  ) -> tuple[Params, LossScalingState]:
    """Returns new parameters instead of updates, for a step that owns the gradients.

    Updates are applied in the branch that computes them, so they need not be stored. `loss` is
    checked for inf and NaN, and not passed to `inner`.
    """
    step = self._step(updates, state, params, extra_args, loss)

    def run_and_apply(old: tuple[OptState, Params]) -> tuple[tuple[()], PyTree]:
      old_inner, old_params = old
      new, new_inner = step.run(old_inner, old_params)
      new_updates = merge_updates(step.grads, new, old_params)
      # Parameters are part of the state that a skipped step keeps, so there are no updates to
      # return.
      return (), (new_inner, apply(old_params, new_updates, new_inner))

    old = (state.inner_state, step.params)
    _, (inner_state, new_params) = step_or_select(step.applied, run_and_apply, old)
    return new_params, LossScalingState(step.scales, inner_state)

  def _step(
    self,
    updates: Grads,
    state: OptState,
    params: Params,
    extra_args: Mapping[str, PyTree],
    loss: PyTree,
  ) -> _Step:
    """Returns the step of `inner`, whether it is applied, and how the scales move."""
    scales = self._scales_of(state)
    params = arrays_only(params) if self.is_scaled else params
    by_label, total = self._gradients(updates, params, "updates")
    if "grad" in extra_args:  # A line search gets the gradient a second time.
      _, again = self._gradients(extra_args["grad"], params, "grad")
      extra_args = {**extra_args, "grad": self._shown(again, params)}
    gradient = self._shown(total, params)
    run = functools.partial(self._run_inner, gradient, extra_args)
    if not self.is_scaled:
      counts: dict[str, ScaleState] = {
        label: StepCount(count_up(scales[label].total)) for label in self.configs
      }
      return _Step(total, params, run, None, counts)
    decision = self._decide(by_label, gradient, loss)
    if self.check_updates:
      # The step is computed twice: once into a reduction that stores nothing, and once to apply it.
      # This takes less memory than keeping old and new values until the decision.
      old = state.inner_state
      decision = self._decide_by_updates(decision, run(old, params), old)
    # A loss whose gradients were finite keeps its scale, even if another loss skipped the step.
    moved: dict[str, ScaleState] = {
      label: adjust(
        config,
        cast("LossScaleState", scales[label]),
        own_finite=decision.own_finite[label],
        first_bad=decision.first_bad[label],
        applied=decision.applied,
        all_finite=decision.all_finite,
      )
      for label, config in self.configs.items()
    }
    return _Step(total, params, run, decision.applied, moved)

  def _scales_of(self, state: OptState) -> dict[str, ScaleState]:
    """Returns the scales in a state, or raises if it was created with another configuration."""
    scales = check_state(state, LossScalingState, f"{_CALL}(state)").loss_scale
    # Another configuration would go on from numbers that its limits and intervals do not allow.
    if set(scales) != set(self.configs):
      expected = f"a state created with the configuration {', '.join(map(repr, self.configs))}"
      got = f"one created with {', '.join(map(repr, scales))}"
      fix = (
        "Build the optimizer as it was, or make a new state with init, put the old inner_state "
        "into it (_replace) and carry the scale over with mpjax.states.set_loss_scale."
      )
      raise MpjaxValueError(f"{_CALL}(state)", expected=expected, got=got, fix=fix)
    return scales

  def _shown(self, grads: Grads, params: Params) -> Grads:
    """Returns gradients as `inner` is shown them; under `NoLossScale` as they are stored."""
    if self.is_scaled:
      return float32_view(grads)
    return hide_untrained(grads, differentiated(params))

  def _run_inner(
    self,
    gradient: Grads,
    extra_args: Mapping[str, PyTree],
    inner_state: OptState,
    params: Params,
  ) -> tuple[Updates, OptState]:
    """Returns the updates and the new state of `inner`."""
    if self.is_scaled:
      return update_in_float32(self.inner, gradient, inner_state, params, extra_args, _CALL)
    # Under `NoLossScale`, `inner` sees what is stored.
    seen = hide_untrained(params, params)
    new, new_inner = self.inner.update(gradient, inner_state, seen, **extra_args)
    # float32 gradients turn bfloat16 moments into float32. A state of another dtype compiles the
    # next step again.
    has_half = any(map(in_low_precision, jax.tree.leaves(params)))
    return new, as_stored(new_inner, inner_state) if has_half else new_inner

  def _decide(self, by_label: Mapping[str, Grads], gradient: Grads, loss: PyTree) -> _Decision:
    """Decides about a step by its gradients and losses."""
    by_name = self.several and isinstance(loss, Mapping)
    losses = self._by_label(loss, "loss") if by_name else dict.fromkeys(self.configs, loss)
    first_bad, own_finite = dict[str, Array](), dict[str, Array]()
    for label, grads in by_label.items():
      # The kind orders codes, so a bad gradient is named before a bad loss.
      leaves = coded_leaves(LeafKind.GRADIENT, grads) + coded_leaves(LeafKind.LOSS, losses[label])
      first_bad[label], own_finite[label] = self._first_bad(leaves)
    all_finite = functools.reduce(jnp.logical_and, own_finite.values())
    if self.several:
      # The sum of finite gradients may overflow; no single scale is to blame for that.
      arrays = jax.tree.leaves(gradient)
      all_finite &= self._agreed(first_nonfinite(arrays)) == len(arrays)
    return _Decision(all_finite, own_finite, all_finite, first_bad)

  def _decide_by_updates(
    self, decision: _Decision, new: tuple[Updates, OptState], old_inner: OptState
  ) -> _Decision:
    """Decides about the same step by its updates and the new inner state, too."""
    updates, new_inner = new
    # An inf that the state has kept from the start is no fault: a best loss so far.
    changed = jax.tree.map(unless_there_before, new_inner, old_inner)
    leaves = coded_leaves(LeafKind.STATE, changed) + coded_leaves(LeafKind.UPDATE, updates)
    code, is_finite = self._first_bad(leaves)
    applied = jnp.logical_and(decision.all_finite, is_finite)
    # If a gradient was not finite already, its leaf is the first one, not a consequence of it.
    is_bad = jnp.logical_and(decision.all_finite, jnp.logical_not(is_finite))
    first_bad = {x: jnp.where(is_bad, code, own) for x, own in decision.first_bad.items()}
    return decision._replace(applied=applied, first_bad=first_bad)

  def _gradients(
    self, tree: PyTree, params: Params, argument: str
  ) -> tuple[dict[str, Grads], Grads]:
    """Returns the gradients of each label, and those of the sum of the losses."""
    trained = differentiated(params)
    aligned = functools.partial(align_gradients, params=trained, where=f"{_CALL}({argument})")
    tree = differentiated(tree)
    if not self.several or not is_by_loss(tree, trained):
      total = aligned(tree)
      return dict.fromkeys(self.configs, total), total
    by_label = {label: aligned(each) for label, each in self._by_label(tree, argument).items()}
    # In float32, because a sum of bfloat16 gradients would round once more.
    total = sum_of([*by_label.values()])
    # `NoLossScale` goes on in the dtype of the gradients.
    return by_label, total if self.is_scaled else as_stored(total, next(iter(by_label.values())))

  def _by_label(self, tree: Mapping[str | None, PyTree], argument: str) -> dict[str, PyTree]:
    """Returns the gradients, or the value, of each loss by its label."""
    if set(tree) != set(self.labels):
      expected = f"a dict with one entry for each loss, {sorted(map(str, self.labels))}"
      got = f"one with {sorted(map(str, tree))}"
      fix = "Differentiate each loss by itself, and pass {name: gradients, ...}, or their sum."
      raise MpjaxValueError(f"{_CALL}({argument})", expected=expected, got=got, fix=fix)
    return {label: tree[key] for key, label in self.labels.items()}

  def _first_bad(self, leaves: Sequence[tuple[int, Leaf]]) -> tuple[Array, Array]:
    """Returns the code of the first leaf that is not finite, and whether there is none.

    Without such a leaf, the code is the number of leaves. It is below every code, so `read_code`
    tells the two apart.
    """
    codes = [code for code, _ in leaves]
    code = self._agreed(least_nonfinite([x for _, x in leaves], codes, NO_LEAF))
    is_finite = code == NO_LEAF
    return jnp.where(is_finite, np.int32(len(codes)), code), is_finite

  def _agreed(self, least: Array) -> Array:
    """Returns the least number of all devices, so that all of them decide alike."""
    if self.axis_name is None:
      return least
    # An integer minimum over devices: every device has the same code, and so the same decision.
    axes = axes_of(self.axis_name)
    fix = "Call update inside the shard_map, pmap or vmap of that axis. Under plain jit"
    call = f"mpjax.loss_scaling(axis_name={self.axis_name!r})"
    check_axes(axes, call, call="update", fix=fix)
    return jax.lax.pmin(least, axes)


def _warn_of_half(params: Params, inner_state: OptState) -> None:
  """Warns, once, if parameters stored in low precision have no master."""
  # A master stores what rounding cuts off, so its parameter loses no updates.
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
      'stochastically with mpjax.apply_updates(..., rounding="stochastic"). Frozen parameters lose '
      "nothing: leave them out of params, or filter this warning.",
      UserWarning,
      stacklevel=3,
    )
