"""A full training step: everything that it changes commits together, or not at all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import (
  check_callable,
  check_flag,
  check_int,
  check_type,
)
from mpjax._core.fused_leaves import sum_of_squares
from mpjax._core.trees import all_finite
from mpjax._core.types import OptState, Params, PyTree, Updates
from mpjax._optim.find_scale import keep_if_skipped, loss_scaling_metrics
from mpjax._optim.loss_scale import INT32_MAX
from mpjax._optim.optimizer_trees import as_stored
from mpjax._optim.step.checks import (
  STEP,
  check_batch,
  check_decision,
  check_moves,
  check_train_state,
)
from mpjax._optim.step.gradients import BatchGradients, batch_gradients
from mpjax._optim.step.optimizer_call import check_updates_fit, checked_update
from mpjax._optim.step.retries import Attempt, run_with_retries
from mpjax._optim.step.traced_loss import LossFn, Metrics
from mpjax._optim.step.train_state import TrainState, own_scale, trained_params
from mpjax._optim.wrapper_checks import AxisName, axes_of, check_axes
from mpjax._optim.wrappers.apply_updates import apply_updates
from mpjax._optim.wrappers.loss_scaling import scaling_of

_CALL = "mpjax.make_train_step"


def make_train_step(
  loss_fn: LossFn,
  tx: optax.GradientTransformationExtraArgs,
  *,
  micro_batches: int = 1,
  axis_name: AxisName | None = None,
  max_retries: int = 0,
  donate: bool = True,
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
      Gradients, loss, floating model state and metrics are averaged over it. Integers of the
      model state have to be the same on all devices, because an integer has no mean.
    max_retries: number of times that an overflowed batch is repeated, at a lower scale each time.
    donate: let the new state reuse the memory of the old one, which JAX then deletes.
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
  axes, outermost = axes_of(axis_name), scaling_of(tx)

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Returns the state after a batch, and metrics."""
    fix = "Call the step inside the jax.shard_map of that axis. Under automatic sharding"
    check_axes(axes, f"{_CALL}(axis_name={axis_name!r})", call="the step", fix=fix)
    # Only shapes and types are checked, so this runs when the step is traced.
    state = check_train_state(state, batch)
    # Also raises if the state has no loss scale, or has several.
    scale = own_scale(state.opt_state, STEP)
    check_batch(batch, micro_batches)
    if max_retries:
      # An overflow at a constant scale would repeat exactly.
      check_moves(scale, max_retries)
      return run_with_retries(attempt, state, batch, max_retries)
    # Only retries ask whether the forward pass was finite.
    new, metrics, _ = attempt(state, batch)
    return new, metrics

  def attempt(state: TrainState, batch: PyTree) -> Attempt:
    """Returns the state after one run of a batch."""
    # `step` counts applied steps. The step after a skipped one draws the same random numbers, as if
    # the skipped batch had not existed. Each device has other rows, and needs other dropout masks.
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    if axes and key is not None:
      key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    results = batch_gradients(loss_fn, state, batch, key, micro_batches=micro_batches, axes=axes)
    params, opt_state = update_and_apply(state, results)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops at 2^31 - 1 instead of wrapping.
    new = TrainState(step, params, opt_state, results.model_state, state.rng)
    # The optimizer has kept its own state in a skipped step. The rest of the state is chosen here.
    # The updates of that step are -0.0, with which `apply_updates` keeps all bits.
    kept = ("step", "model_state")
    news, olds = ({name: getattr(tree, name) for name in kept} for tree in (new, state))
    new = new._replace(**keep_if_skipped(opt_state, news, olds)) if _skips(state) else new
    # `trace_loss` has refused metrics of `loss_fn` with these names.
    norm = jnp.sqrt(sum_of_squares(jax.tree.leaves(results.grads)))
    scaling = loss_scaling_metrics(opt_state, before=state.opt_state)
    metrics = {**results.metrics, "loss": results.loss, "grad_norm": norm, **scaling}
    return Attempt(new, metrics, all_finite(results.watched))

  def update_and_apply(state: TrainState, results: BatchGradients) -> tuple[Params, OptState]:
    """Returns the parameters and the state of the optimizer after a step."""
    grads, extra = results.grads, {"value": results.loss}
    if _skips(state):
      # The scale checks the loss and the model state too. An optimizer inside sees the loss alone.
      extra["loss"] = results.watched
    else:
      # A plain optimizer creates moments in the dtypes of its parameters, such as bfloat16. Float32
      # gradients would turn these moments into float32, another type of state.
      grads = as_stored(grads, trained_params(state.params, state.opt_state))
    if outermost and _skips(state):
      # With the scale outermost, parameters are updated in the branch that is not skipped.
      update = functools.partial(outermost.update_and_apply, apply=_apply)
      params, opt_state = checked_update(tx, update, grads, state, **extra)
    else:
      # A monitor or masters around the scale need the updates themselves, by the interface of
      # optax.
      updates, opt_state = checked_update(tx, tx.update, grads, state, **extra)
      params = _apply(state.params, updates, opt_state)
    # Without `axis_name` in a `shard_map`, each device would decide by its own gradients.
    if _skips(state) and not axes:
      check_decision(opt_state, state.opt_state)
    return params, opt_state

  return jax.jit(
    train_step,
    # The state is the first argument. Its old arrays have the shapes of the new ones.
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _apply(params: Params, updates: Updates, opt_state: OptState) -> Params:
  """Returns parameters with updates added, or set to their masters."""
  # `apply_updates` would blame the caller. Here the optimizer made the updates.
  check_updates_fit(params, updates)
  return apply_updates(params, updates, opt_state)


def _skips(state: TrainState) -> bool:
  """Whether steps may be skipped, which `NoLossScale` never does."""
  return own_scale(state.opt_state, "").state is not None
