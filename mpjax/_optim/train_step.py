"""A full training step: everything that it changes commits together, or not at all."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import (
  check_callable,
  check_flag,
  check_int,
  check_type,
  check_value,
)
from mpjax._core.fused_leaves import sum_of_squares
from mpjax._core.trees import all_finite
from mpjax._core.types import Array, OptState, Params, PyTree, Updates
from mpjax._optim.apply_updates import apply_updates, check_rounding
from mpjax._optim.gradients import BatchGradients, IntegerState, batch_gradients
from mpjax._optim.loss_scale import INT32_MAX
from mpjax._optim.loss_scaling import scaling_of
from mpjax._optim.metrics import keep_if_skipped, loss_scaling_metrics
from mpjax._optim.moving_average import move_average
from mpjax._optim.optimizer_call import check_updates_fit, checked_update
from mpjax._optim.optimizer_trees import as_stored, float32_view
from mpjax._optim.retries import Attempt, run_with_retries
from mpjax._optim.traced_loss import LossFn, Metrics
from mpjax._optim.train_state import TrainState, own_scale, trained_params
from mpjax._optim.train_step_checks import (
  STEP,
  check_average,
  check_batch,
  check_decision,
  check_moves,
  check_stochastic,
  check_train_state,
)
from mpjax._optim.wrapper_checks import AxisName, axes_of, check_axes

_CALL = "mpjax.make_train_step"

_ROUNDING = 2**32 - 1
"""Folded into a step's key for its rounding; micro-batches and devices count from 0."""


def make_train_step(
  loss_fn: LossFn,
  tx: optax.GradientTransformationExtraArgs,
  *,
  micro_batches: int = 1,
  axis_name: AxisName | None = None,
  integer_state: IntegerState = None,
  max_retries: int = 0,
  ema_decay: float | None = None,
  donate: bool = True,
  rounding: Literal["nearest", "stochastic"] = "nearest",
  state_shardings: PyTree = None,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
  """Build a jitted training step that commits all of its results, or none.

  A step is skipped if a gradient or the loss is not finite, or if finite model state
  becomes inf or NaN. The state then keeps its bits, and only the loss scale moves. docs/training.md
  explains each argument.

  Args:
    loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss
      is a floating scalar, a mean over the batch. `model_state` keeps its structure, shapes and
      dtypes. `metrics` is a dict of arrays. `rng` is None if the state has none.
    tx: the optimizer, wrapped by `mpjax.loss_scaling`. It receives the loss as `value=`.
    micro_batches: number of parts of the batch. Their gradients are averaged in float32.
    axis_name: the mapped axis, or axes, of a `jax.shard_map` or `jax.pmap` around the step.
      Gradients, loss, floating model state and metrics are averaged over it.
    integer_state: how integers in `model_state` are combined under `axis_name`. "sum" adds the
      changes of all devices. "same" is for integers that are equal on all. A dict maps paths or
      branches to these.
    max_retries: number of times that an overflowed batch is repeated, at a lower scale each time.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step.
    donate: let the new state reuse the memory of the old one, which JAX then deletes.
    rounding: how 16-bit parameters without a master are rounded, see `mpjax.apply_updates`.
    state_shardings: the shardings of the new state, `jax.tree.map(lambda x: x.sharding, state)`.

  Returns:
    `step(state, batch) -> (state, metrics)`. The metrics are those of `loss_fn` and of
    `mpjax.loss_scaling_metrics`, `loss`, `grad_norm`, and `retries` with `max_retries`.
    Floating metrics of `loss_fn` are averaged, others are summed.

  Raises:
    MpjaxTypeError: an argument, or the result of `loss_fn`, has the wrong type. When called: the
      state belongs to another optimizer, or `tx` needs other arguments.
    MpjaxValueError: an argument is out of range, or does not fit state, batch and mapped axes.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> def loss_fn(params, model_state, batch, rng):
  ...   error = batch["x"] @ params - batch["y"]
  ...   return jnp.mean(error**2), (model_state, {"worst": jnp.max(jnp.abs(error))})
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
  >>> step = mpjax.make_train_step(loss_fn, tx, micro_batches=2)
  >>> state = mpjax.TrainState.create(jnp.zeros(2), tx)
  >>> batch = {"x": jnp.eye(2), "y": jnp.asarray([1.0, 3.0])}
  >>> state, metrics = step(state, batch)
  >>> print(state.params, metrics["loss"], metrics["grad_norm"], int(state.step))
  [0.1 0.3] 5.0 3.1622777 1
  """
  check_callable(loss_fn, f"{_CALL}(loss_fn)", expected="a function", fix="Pass the function.")
  expected, fix = "an optax transformation", "Pass mpjax.loss_scaling(optax.adamw(1e-3))."
  check_type(tx, optax.GradientTransformation, f"{_CALL}(tx)", expected=expected, fix=fix)
  fix = "Pass 1 to keep the batch whole."
  micro_batches = check_int(micro_batches, f"{_CALL}(micro_batches)", least=1, fix=fix)
  fix = "Pass 0 to disable retries."
  max_retries = check_int(max_retries, f"{_CALL}(max_retries)", least=0, fix=fix)
  check_flag(donate, f"{_CALL}(donate)")
  _check_decay(ema_decay)
  _check_integer_state(integer_state)
  check_rounding(_CALL, rounding)
  step = TrainStep(
    loss_fn=loss_fn,
    tx=tx,
    micro_batches=micro_batches,
    axis_name=axis_name,
    integer_state=integer_state,
    max_retries=max_retries,
    ema_decay=ema_decay,
    rounding=rounding,
  )
  return jax.jit(
    step.train_step,
    # The state is the first argument. Its old arrays have the shapes of the new ones.
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _check_decay(ema_decay: object) -> None:
  """Raises unless `ema_decay` is a float in [0, 1), or None."""
  is_decay = ema_decay is None or (isinstance(ema_decay, float) and 0 <= ema_decay < 1)
  expected, fix = "a float in [0, 1), or None", "0.999 averages over about 1000 steps."
  check_value(ema_decay, is_decay, f"{_CALL}(ema_decay)", expected=expected, fix=fix)


def _check_integer_state(integer_state: object) -> None:
  """Raises unless `integer_state` is a rule, a dict of rules, or None."""
  # Paths are compared with the model state later, when its leaves are known.
  rules = [*integer_state.values()] if isinstance(integer_state, Mapping) else [integer_state]
  is_allowed = integer_state is None or all(rule in ("sum", "same") for rule in rules)
  expected = "'sum', 'same', a dict from paths of the model state to these, or None"
  fix = "Use 'sum' for counts of rows or tokens, 'same' for counts of steps."
  check_value(integer_state, is_allowed, f"{_CALL}(integer_state)", expected=expected, fix=fix)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainStep:
  """The arguments of `make_train_step`; `train_step` is the step, other methods are its parts."""

  loss_fn: LossFn
  tx: optax.GradientTransformationExtraArgs
  micro_batches: int
  axis_name: AxisName | None
  integer_state: IntegerState
  max_retries: int
  ema_decay: float | None
  rounding: Literal["nearest", "stochastic"]

  def train_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Returns the state after a batch, and metrics."""
    fix = "Call the step inside the jax.shard_map of that axis. Under automatic sharding"
    check_axes(self.axes, f"{_CALL}(axis_name={self.axis_name!r})", call="the step", fix=fix)
    # Only shapes and types are checked, so this runs when the step is traced.
    self._check_arguments(state, batch)
    if self.max_retries:
      return run_with_retries(self.attempt, state, batch, self.max_retries)
    # Only retries ask whether the forward pass was finite.
    new, metrics, _ = self.attempt(state, batch)
    return new, metrics

  @property
  def axes(self) -> tuple[Hashable, ...]:
    """The mapped axes that are averaged over."""
    return axes_of(self.axis_name)

  def _check_arguments(self, state: object, batch: PyTree) -> None:
    """Raises unless the step can continue with a state, and cut a batch."""
    state = check_train_state(state, batch)
    check_average(state, self.ema_decay)
    # Also raises if the state has no loss scale, or has several.
    scale = own_scale(state.opt_state, STEP)
    # An overflow at a constant scale would repeat exactly.
    if self.max_retries:
      check_moves(scale, self.max_retries)
    if self.rounding == "stochastic":
      check_stochastic(state)
    check_batch(batch, self.micro_batches)

  def attempt(self, state: TrainState, batch: PyTree) -> Attempt:
    """Returns the state after one run of a batch."""
    # `step` counts applied steps. The step after a skipped one draws the same random numbers, as if
    # the skipped batch had not existed.
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    results = self._gradients(state, batch, key)
    norm = jnp.sqrt(sum_of_squares(jax.tree.leaves(results.grads)))
    params, opt_state = self._update(state, results, key)
    scaling = loss_scaling_metrics(opt_state, before=state.opt_state)
    new = self._next_state(state, params, opt_state, results.model_state)
    # The optimizer has kept its own state in a skipped step. The rest of the state is chosen here.
    if _has_scale(state):
      new = self._committed(new, state)
    # `trace_loss` has refused metrics of `loss_fn` with these names.
    metrics = {**results.metrics, "loss": results.loss, "grad_norm": norm, **scaling}
    return Attempt(new, metrics, all_finite(results.watched))

  def _gradients(self, state: TrainState, batch: PyTree, key: Array | None) -> BatchGradients:
    """Returns the results of the loss function, whose random numbers differ between devices."""
    # Each device has other rows, and needs other dropout masks.
    if self.axes and key is not None:
      key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
    return batch_gradients(
      self.loss_fn,
      state,
      batch,
      key,
      micro_batches=self.micro_batches,
      axes=self.axes,
      integer_state=self.integer_state,
    )

  def _update(
    self, state: TrainState, results: BatchGradients, key: Array | None
  ) -> tuple[Params, OptState]:
    """Returns the parameters and the state of the optimizer after a step."""
    apply = functools.partial(self._apply, key=key)
    if not _has_scale(state):
      return self._update_unchecked(state, results, apply)
    # The scale checks the loss and the model state too. An optimizer inside sees the loss alone.
    extra = {"value": results.loss, "loss": results.watched}
    # A monitor or masters around the scale need the updates themselves, by the interface of optax.
    outermost = scaling_of(self.tx)
    if outermost is None:
      updates, opt_state = checked_update(self.tx, self.tx.update, results.grads, state, **extra)
      params = apply(state.params, updates, opt_state)
    else:
      # With the scale outermost, parameters are updated in the branch that is not skipped.
      update = functools.partial(outermost.update_and_apply, apply=apply)
      params, opt_state = checked_update(self.tx, update, results.grads, state, **extra)
    # Without `axis_name` in a `shard_map`, each device would decide by its own gradients.
    if not self.axes:
      check_decision(opt_state, state.opt_state)
    return params, opt_state

  def _update_unchecked(
    self,
    state: TrainState,
    results: BatchGradients,
    apply: Callable[[Params, Updates, OptState], Params],
  ) -> tuple[Params, OptState]:
    """Returns the results of `_update` for `NoLossScale`, which checks nothing."""
    # A plain optimizer creates moments in the dtypes of its parameters, such as bfloat16. Float32
    # gradients would turn these moments into float32, another type of state.
    grads = as_stored(results.grads, trained_params(state.params, state.opt_state))
    updates, opt_state = checked_update(self.tx, self.tx.update, grads, state, value=results.loss)
    return apply(state.params, updates, opt_state), opt_state

  def _apply(
    self, params: Params, updates: Updates, opt_state: OptState, *, key: Array | None
  ) -> Params:
    """Returns parameters with updates added, or set to their masters."""
    # `apply_updates` would blame the caller. Here the optimizer made the updates.
    check_updates_fit(params, updates)
    return apply_updates(
      params,
      updates,
      opt_state,
      rounding=self.rounding,
      key=self._rounding_key(key),
    )

  def _rounding_key(self, key: Array | None) -> Array | None:
    """Returns the key of stochastic rounding, the same on all devices."""
    if key is None or self.rounding == "nearest":
      return None
    # Not folded by device: replicated parameters have to stay equal.
    return jax.random.fold_in(key, _ROUNDING)

  def _next_state(
    self, state: TrainState, params: Params, opt_state: OptState, model_state: PyTree
  ) -> TrainState:
    """Returns the state after a step that is applied."""
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops at 2^31 - 1 instead of wrapping.
    average = state.ema
    if self.ema_decay is not None:
      # The average of masters moves smoothly, that of bfloat16 parameters in jumps.
      trained = float32_view(trained_params(params, opt_state))
      average = move_average(
        average, trained, self.ema_decay, before=state.opt_state, after=opt_state
      )
    return TrainState(step, params, opt_state, model_state, average, state.rng)

  def _committed(self, new: TrainState, old: TrainState) -> TrainState:
    """Returns the new state if a step is applied; else the old one, with the new loss scale."""
    fields = ["step", "model_state", "ema"]
    if scaling_of(self.tx) is None:
      # The updates of a skipped step are -0.0. That addition keeps all bits but subnormal numbers,
      # which a CPU flushes to 0. `update_and_apply` adds nothing in a skipped step.
      fields.append("params")
    news = {name: getattr(new, name) for name in fields}
    olds = {name: getattr(old, name) for name in fields}
    return new._replace(**keep_if_skipped(new.opt_state, news, olds))


def _has_scale(state: TrainState) -> bool:
  """Whether a state has a loss scale other than `NoLossScale`. Else no step is skipped."""
  return own_scale(state.opt_state, "").state is not None
