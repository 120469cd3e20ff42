"""The optax wrapper that unscales gradients, and skips the steps that overflowed."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

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
from mpjax._core.fused_leaves import first_nonfinite, least_nonfinite
from mpjax._core.trees import in_low_precision
from mpjax._core.types import Array, Grads, Leaf, OptState, Params, PyTree, Updates, is_inexact
from mpjax._optim.find_scale import check_scales, refuse_scale_inside
from mpjax._optim.leaf_codes import NO_LEAF, LeafKind, coded_leaves
from mpjax._optim.loss_scale import (
  DynamicLossScale,
  LossScale,
  NoLossScale,
  SkipNonfinite,
  StaticLossScale,
  adjust,
  init_scale,
  unscale_tree,
  write_label,
)
from mpjax._optim.master_weights import init_in_float32, masters_in, update_in_float32
from mpjax._optim.optimizer_trees import (
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
  unless_there_before,
)
from mpjax._optim.states import LossScaleState, LossScalingState, ScaleState
from mpjax._optim.wrapper_checks import AxisName, axes_of, check_axes, check_inner

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
  """Wrap an optimizer so that it takes gradients of a scaled loss.

  `update` casts gradients to float32, divides them by the scale, checks them for inf and NaN, and
  calls `inner.update`. If a gradient is not finite the step is *skipped*. The updates are then
  -0.0, which changes no bits of a parameter when added. The inner state stays as it was, counts of
  schedules included, and a dynamic scale backs off. Occasional overflow is expected: keep
  `jax_debug_nans` off, and call `mpjax.check_skipped_steps` to detect persistent overflow.

  Put everything that has state or reads the size of gradients inside:
  `loss_scaling(optax.chain(clip, adamw))`. Compute the gradients with `mpjax.value_and_grad`, which
  scales the loss. Test the step with `mpjax.check_loss_scaling`. `inner` works in float32, and sees
  no integers, booleans or keys.

  `update` also checks `loss=`, one or more arrays, for inf and NaN. It passes all arguments to
  `inner`, and adds `grads_finite` (bool of shape ()) and `loss_scale` (float32 of shape (), the
  divisor of the gradients). With `value_fn=` it adds nothing, because a line search passes all
  extra arguments to that function. It unscales `grad=` like the gradients.

  For several losses, give each a scale: `loss_scaling(inner, {"a": ..., "b": ...})`.
  Differentiate each loss with `mpjax.value_and_grad(..., name="a")`. Pass `update` the gradients
  (and `loss=`) as a dict with these keys. Each is unscaled by its own scale, and they are added in
  float32. If one overflows, the step is skipped, and only its scale backs off.

  Args:
    inner: the optimizer, or any optax transformation.
    loss_scale: `DynamicLossScale`, `StaticLossScale`, `SkipNonfinite` or `NoLossScale`, or a dict
      from names of losses to these. With `NoLossScale`, `inner` is called as it is and nothing is
      added to the jaxpr.
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
      `update`: the state is of another optimizer, or `grad_fn=` is passed, whose gradients would
      not be unscaled.
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
  inner = check_inner(inner, _INIT)
  by_name = _checked_scales(loss_scale, name)
  is_scaled = not any(isinstance(config, NoLossScale) for config in by_name.values())
  _check_check_updates(check_updates, is_scaled)
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
  where = "mpjax.loss_scaling(loss_scale)"
  if not isinstance(loss_scale, Mapping):
    _check_config(loss_scale, where)
    if name is not None:
      _check_name(name, "mpjax.loss_scaling(name)")
    return {name: loss_scale}
  for key, config in loss_scale.items():
    _check_config(config, where)
    _check_name(key, f"{where} with the key {key!r}")
  # A mix would need two kinds of update: `NoLossScale` calls `inner` as it is.
  unscaled = {isinstance(config, NoLossScale) for config in loss_scale.values()}
  if name is not None or len(unscaled) != 1:
    expected = "one scale for each loss, without name=, and either all or none NoLossScale()"
    got = f"{dict(loss_scale)!r} and name={name!r}"
    fix = "SkipNonfinite() leaves one of several losses unscaled, but checked."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return {**loss_scale}


def _check_config(config: object, where: str) -> None:
  """Raises unless `config` is a configuration of a loss scale."""
  if not isinstance(config, (NoLossScale, SkipNonfinite, StaticLossScale, DynamicLossScale)):
    expected = "a NoLossScale, SkipNonfinite, StaticLossScale or DynamicLossScale"
    fix = "Pass an instance: mpjax.StaticLossScale(1024), or mpjax.DynamicLossScale()."
    raise wrong_type(config, where, expected=expected, fix=fix)


def _check_name(name: object, where: str) -> None:
  """Raises unless `name` can be a part of a label."""
  is_word = isinstance(name, str) and name != "" and not set(name) & set(":/")
  expected = "a non-empty string without ':' and '/', or None"
  fix = "It becomes a key of the state; a plain word such as 'generator' will do."
  check_value(name, is_word, where, expected=expected, fix=fix)


def _check_check_updates(check_updates: bool, is_scaled: bool) -> None:
  """Raises unless `check_updates` is a bool, and False without a scale."""
  where = "mpjax.loss_scaling(check_updates)"
  check_flag(check_updates, where)
  expected = "False with NoLossScale(), which checks nothing"
  fix, possible = "Use SkipNonfinite() to check and skip.", is_scaled or not check_updates
  check_value(check_updates, possible, where, expected=expected, fix=fix)


class _Inputs(NamedTuple):
  """The inputs of one update."""

  grads: dict[str, Grads]  # by label: scaled, and in the precision of the parameters
  scales: dict[str, ScaleState]  # by label
  params: Params
  plain: Grads | None = None  # the plain gradient, where it is computed once and kept

  @property
  def moving(self) -> dict[str, LossScaleState]:
    """The scales that are divided by: none under `NoLossScale`."""
    return {label: x for label, x in self.scales.items() if isinstance(x, LossScaleState)}

  @property
  def first(self) -> Grads:
    """The gradients of one loss: all losses have the same tree."""
    return next(iter(self.grads.values()))


class _Finite(NamedTuple):
  """Where gradients and losses are finite: by label, and all of them."""

  first_bad: dict[str, Array]
  by_label: dict[str, Array]
  all: Leaf


class _Decision(NamedTuple):
  """Whether the step is applied (None: nothing decides), and the first bad leaf by label."""

  applied: Array | None
  first_bad: dict[str, Array]


InnerStep: TypeAlias = Callable[[OptState, Params], tuple[Updates, OptState]]


class _DecidedStep(NamedTuple):
  """An update that is decided, and not computed yet."""

  old: LossScalingState
  inputs: _Inputs
  finite: _Finite
  step: InnerStep
  decision: _Decision


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
    fix = "Wrap once, outermost: the inner one would divide by its scale again."
    refuse_scale_inside(inner_state, _INIT, got="another mpjax.loss_scaling", fix=fix)
    scales = {label: init_scale(config) for label, config in self.configs.items()}
    state = LossScalingState(scales, inner_state)
    return place_like(params, state) if self.is_scaled else state

  def update(
    self, updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, LossScalingState]:
    """Returns the updates of a step, or updates that change nothing, and the next state."""
    inputs = self._inputs(updates, state, params)
    extra_args = self._unscaled_arguments(extra_args, inputs)
    decided = self._decided(inputs, state, extra_args, extra_args.get("loss"))
    new, new_inner = step_or_select(
      decided.decision.applied,
      lambda old: decided.step(old, inputs.params),
      state.inner_state,
    )
    new_updates = merge_updates(inputs.first, new, inputs.params)
    return new_updates, self._next(decided, new_inner)

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

    Updates are applied in the branch that computes them, and need not be stored. `loss` is looked
    at, and not passed to `inner`.
    """
    inputs = self._inputs(updates, state, params)
    extra_args = self._unscaled_arguments(extra_args, inputs)
    # The caller has no other use of the gradients. Their quotients are computed once and reuse the
    # memory of the gradients.
    inputs = inputs._replace(plain=stored_first(self._plain(inputs.grads, inputs)))
    decided = self._decided(inputs, state, extra_args, loss)

    def step_and_apply(old: tuple[OptState, Params]) -> tuple[tuple[()], PyTree]:
      old_inner, old_params = old
      new, new_inner = decided.step(old_inner, old_params)
      new_updates = merge_updates(inputs.first, new, old_params)
      # Parameters are part of the state that a skipped step keeps, so there are no updates to
      # return.
      return (), (new_inner, apply(old_params, new_updates, new_inner))

    old = (state.inner_state, inputs.params)
    _, (new_inner, new_params) = step_or_select(decided.decision.applied, step_and_apply, old)
    return new_params, self._next(decided, new_inner)

  def _decided(
    self,
    inputs: _Inputs,
    state: LossScalingState,
    extra_args: dict[str, PyTree],
    loss: PyTree,
  ) -> _DecidedStep:
    """Returns the step of `inner`, and whether it is applied."""
    # Find the first non-finite leaf of each loss, over all devices. With `check_updates` the
    # decision needs the updates too.
    finite = self._finite(inputs, loss)
    step = self._step(inputs, self._with_flags(extra_args, inputs, finite))
    decision = self._decision(finite, step, inputs, state)
    return _DecidedStep(state, inputs, finite, step, decision)

  def _inputs(self, updates: Grads, state: OptState, params: Params) -> _Inputs:
    scales = check_scales(state, self.configs)
    params = arrays_only(params) if self.is_scaled else params
    return _Inputs(self._aligned(updates, params, "updates"), scales, params)

  def _by_label(self, tree: PyTree, argument: str) -> dict[str, PyTree]:
    """Returns the gradients, or the loss, of each label."""
    # One loss: its gradients belong to the only label.
    if not self.several:
      return dict.fromkeys(self.configs, tree)
    if not isinstance(tree, Mapping) or set(tree) != set(self.labels):
      expected = f"a dict with one entry for each loss, {sorted(map(str, self.labels))}"
      is_dict = isinstance(tree, Mapping)
      got = f"one with {sorted(map(str, tree))}" if is_dict else type(tree).__name__
      fix = "Differentiate each loss by itself, and pass {name: gradients, ...}."
      raise MpjaxValueError(f"{_CALL}({argument})", expected=expected, got=got, fix=fix)
    return {label: tree[key] for key, label in self.labels.items()}

  def _aligned(self, grads: Grads, params: Params, argument: str) -> dict[str, Grads]:
    """Returns the gradients of each label, in the precision of the parameters."""
    trained = differentiated(params)
    return {
      label: align_gradients(differentiated(each), trained, f"{_CALL}({argument})")
      for label, each in self._by_label(grads, argument).items()
    }

  def _plain(self, grads: Mapping[str, Grads], inputs: _Inputs) -> Grads:
    """Returns the gradient of the sum of the losses, as `inner` sees it."""
    trained = differentiated(inputs.params)
    # `NoLossScale` of one loss adds nothing to the jaxpr, not even a cast.
    if not self.is_scaled and not self.several:
      return hide_untrained(next(iter(grads.values())), trained)
    # Unscale before adding: each loss has a scale of its own.
    parts: list[Grads] = []
    for label, scaled in grads.items():
      scale = inputs.moving[label].scale if self.is_scaled else None
      parts.append(unscale_tree(scaled, scale))
    total = jax.tree.map(_sum, *parts)
    if self.is_scaled:
      return float32_view(total)
    # `NoLossScale` of several losses: added in float32, then back in the dtype of the gradients.
    return hide_untrained(as_stored(total, inputs.first), trained)

  def _unscaled_arguments(
    self, extra_args: Mapping[str, PyTree], inputs: _Inputs
  ) -> dict[str, PyTree]:
    """Returns the extra arguments with `grad=` unscaled like the gradients."""
    # Opaque SAM calls `grad_fn` at other parameters, where nothing would divide by the scale.
    if "grad_fn" in extra_args and (self.is_scaled or self.several):
      expected = "an inner that takes gradients, and computes none"
      got = "a function whose gradients would be those of the scaled loss"
      fix = "Use optax.contrib.sam with its default opaque_mode=False, or NoLossScale()."
      raise MpjaxTypeError(f"{_CALL}(grad_fn)", expected=expected, got=got, fix=fix)
    if "grad" not in extra_args:
      return {**extra_args}
    grads = self._aligned(extra_args["grad"], inputs.params, "grad")
    return {**extra_args, "grad": self._plain(grads, inputs)}

  def _looked_at(self, label: str, inputs: _Inputs) -> Grads:
    """Returns the gradients of one loss as they are checked: scaled or unscaled."""
    # Dividing by a scale of at least 1 cannot overflow, so the gradients are finite exactly if the
    # quotients are. Checking gradients then saves memory: no quotient waits for the decision. Below
    # 1 a quotient may overflow, so quotients are checked. `set_loss_scale` may set a static scale
    # to any number.
    config = self.configs[label]
    never_below_1 = isinstance(config, SkipNonfinite) or (
      isinstance(config, DynamicLossScale) and config.min_scale >= 1
    )
    if inputs.plain is None and never_below_1:
      return inputs.grads[label]
    return unscale_tree(inputs.grads[label], inputs.moving[label].scale)

  def _finite(self, inputs: _Inputs, loss: PyTree) -> _Finite:
    """Returns which losses have finite gradients, and the first leaf that has not."""
    losses = self._by_label(loss, "loss") if self.is_scaled and loss is not None else {}
    first_bad: dict[str, Array] = {}
    finite: dict[str, Array] = {}
    for label in inputs.moving:
      leaves = coded_leaves(LeafKind.GRADIENT, self._looked_at(label, inputs))
      # The kind orders codes, so a bad gradient is named before a bad loss.
      leaves += coded_leaves(LeafKind.LOSS, losses.get(label))
      first_bad[label], finite[label] = self._first_bad(leaves)
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    all_finite: Leaf = functools.reduce(jnp.logical_and, finite.values(), np.bool_(True))
    if self.several and self.is_scaled:
      # The sum of finite gradients may overflow; no single scale is to blame for that.
      total = jax.tree.leaves(self._plain(inputs.grads, inputs))
      position = self._agreed(first_nonfinite(total))
      all_finite = jnp.logical_and(all_finite, position == len(total))
    return _Finite(first_bad, finite, all_finite)

  def _with_flags(
    self, extra_args: dict[str, PyTree], inputs: _Inputs, finite: _Finite
  ) -> dict[str, PyTree]:
    """Returns the extra arguments for `inner`, with the decision and the scale."""
    # A line search passes all extra arguments to `value_fn`, which takes no flags of ours.
    if "value_fn" in extra_args:
      return extra_args
    moving = inputs.moving
    divisors: PyTree = np.float32(1)
    if self.is_scaled and self.several:
      divisors = {name: moving[label].scale for name, label in self.labels.items()}
    elif self.is_scaled:
      (only,) = moving.values()
      divisors = only.scale
    return {"grads_finite": finite.all, "loss_scale": divisors} | extra_args

  def _step(self, inputs: _Inputs, extra_args: Mapping[str, PyTree]) -> InnerStep:
    """Returns what `inner` does with the plain gradient."""

    def step(inner_state: OptState, params: Params) -> tuple[Updates, OptState]:
      # Computed inside of the step, so that a skipped branch computes no quotients.
      gradient = self._plain(inputs.grads, inputs) if inputs.plain is None else inputs.plain
      if self.is_scaled:
        return update_in_float32(self.inner, gradient, inner_state, params, extra_args, _CALL)
      shown = hide_untrained(params, params)
      new, new_inner = self.inner.update(gradient, inner_state, shown, **extra_args)
      # float32 gradients turn bfloat16 moments into float32. A state of another dtype compiles the
      # next step again.
      has_half = any(map(in_low_precision, jax.tree.leaves(params)))
      return new, as_stored(new_inner, inner_state) if has_half else new_inner

    return step

  def _decision(
    self, finite: _Finite, step: InnerStep, inputs: _Inputs, state: LossScalingState
  ) -> _Decision:
    """Returns whether the step is applied, and what was not finite."""
    if not self.is_scaled:
      return _Decision(None, {})
    if not self.check_updates:
      return _Decision(finite.all, finite.first_bad)
    # The step is computed twice: once into a reduction that stores nothing, and once to apply it.
    # This takes less memory than keeping old and new values until the decision.
    new, new_inner = step(state.inner_state, inputs.params)
    # An inf that the state has kept from the start is no fault: a best loss so far.
    changed = jax.tree.map(unless_there_before, new_inner, state.inner_state)
    leaves = coded_leaves(LeafKind.STATE, changed) + coded_leaves(LeafKind.UPDATE, new)
    bad, is_finite = self._first_bad(leaves)
    # If a gradient was not finite already, its leaf is the first one, not a consequence of it.
    is_bad = jnp.logical_and(finite.all, jnp.logical_not(is_finite))
    first_bad = {label: jnp.where(is_bad, bad, x) for label, x in finite.first_bad.items()}
    return _Decision(jnp.logical_and(finite.all, is_finite), first_bad)

  def _first_bad(self, leaves: Sequence[tuple[int, Leaf]]) -> tuple[Array, Array]:
    """Returns the code of the first leaf that is not finite, and whether all leaves are finite.

    If all are finite, it is their number instead of a code.
    """
    codes = [code for code, _ in leaves]
    code = self._agreed(least_nonfinite([x for _, x in leaves], codes, NO_LEAF))
    is_finite = code == NO_LEAF
    # The number of leaves is below every code, so `read_code` tells the two apart.
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

  def _next(self, decided: _DecidedStep, inner_state: OptState) -> LossScalingState:
    """Returns the next state: each scale moves by the gradients of its own loss."""
    old, inputs, finite, _, decision = decided
    flags = {"applied": decision.applied, "all_finite": finite.all}
    # A loss whose gradients were finite keeps its scale, even if another loss skipped the step.
    moved = {
      label: adjust(
        self.configs[label],
        scale,
        own_finite=finite.by_label[label],
        first_bad=decision.first_bad[label],
        **flags,
      )
      for label, scale in inputs.moving.items()
    }
    return old._replace(loss_scale=inputs.scales | moved, inner_state=inner_state)


def _sum(*grads: Leaf) -> Leaf:
  """Returns the sum of one leaf over losses; the first of what has no gradient."""
  return functools.reduce(jnp.add, grads) if is_inexact(grads[0]) else grads[0]


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
      'stochastically with mpjax.apply_updates(..., rounding="stochastic").',
      UserWarning,
      stacklevel=3,
    )
