"""A full training step: everything that it changes commits together, or not at all."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import (
  REFUSALS,
  MpjaxError,
  MpjaxTypeError,
  MpjaxValueError,
  check_callable,
  check_flag,
  check_int,
  check_type,
  listed,
)
from mpjax._core.fused_leaves import sum_of_squares
from mpjax._core.trees import all_finite, check_alike, select, tree_differences
from mpjax._core.types import Array, OptState, Params, PyTree, Updates
from mpjax._jaxpr.compat import varying_axes
from mpjax._optim.find_scale import keep_if_skipped, loss_scaling_metrics, replace_scale
from mpjax._optim.loss_scale import count_up
from mpjax._optim.optimizer_trees import as_stored, key_text, nodes_of
from mpjax._optim.states import LossScaleState, MasterWeightsState
from mpjax._optim.step.gradients import LossResults, batch_gradients
from mpjax._optim.step.traced_loss import LossFn, Metrics
from mpjax._optim.step.train_state import TrainState, own_scale
from mpjax._optim.wrapper_checks import AxisName, axes_of, check_axes, refuse_other_state
from mpjax._optim.wrappers.apply_updates import apply_updates
from mpjax._optim.wrappers.loss_scaling import scaling_of
from mpjax._optim.wrappers.master_weights import master_params

_CALL = "mpjax.make_train_step"
_STEP = f"{_CALL}(...): step(state)"


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
  axes = axes_of(axis_name)

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Returns the state after a batch, and metrics."""
    fix = "Call the step inside the jax.shard_map of that axis. Under automatic sharding"
    check_axes(axes, f"{_CALL}(axis_name={axis_name!r})", call="the step", fix=fix)
    # Only shapes and types are checked, so this runs when the step is traced.
    fix = "Make one with mpjax.TrainState.create(params, tx)."
    fix = "Swap the two: step(state, batch)." if isinstance(batch, TrainState) else fix
    state = check_type(state, TrainState, _STEP, expected="a mpjax.TrainState", fix=fix)
    # Also raises if the state has no loss scale, or has several.
    scale = own_scale(state.opt_state, _STEP)
    if micro_batches > 1:
      _check_batch(batch, micro_batches)
    if not max_retries:
      # Only retries ask whether the forward pass was finite.
      new, metrics, _ = attempt(state, batch)
      return new, metrics
    # A retry needs a lower scale, and a constant one never moves.
    if not scale.dynamic:
      expected = "0 with a constant loss scale"
      got = f"{max_retries} with {scale.label!r}"
      fix = "Use DynamicLossScale: the same batch at the same scale overflows again."
      raise MpjaxValueError(f"{_CALL}(max_retries)", expected=expected, got=got, fix=fix)
    return _run_with_retries(attempt, state, batch, max_retries)

  def attempt(state: TrainState, batch: PyTree) -> _Attempt:
    """Returns the state after one run of a batch."""
    # `step` counts applied steps. The step after a skipped one draws the same random numbers, as if
    # the skipped batch had not existed. Each device has other rows, and needs other dropout masks.
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    if axes and key is not None:
      key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    results, watched = batch_gradients(
      loss_fn, state, batch, key, micro_batches=micro_batches, axes=axes
    )
    # `NoLossScale` applies every step.
    skips = own_scale(state.opt_state, "").skips
    params, opt_state = _update_and_apply(tx, state, results, watched if skips else None)
    # Without `axis_name` in a `shard_map`, each device would decide by its own gradients.
    if skips and not axes:
      _check_decision(opt_state, state.opt_state)
    new = TrainState(count_up(state.step), params, opt_state, results.model_state, state.rng)
    # In a skipped step, `update_and_apply` has kept parameters and the optimizer's state. The rest
    # of the state is chosen here.
    kept = ("step", "model_state")
    news, olds = ({name: getattr(tree, name) for name in kept} for tree in (new, state))
    new = new._replace(**keep_if_skipped(opt_state, news, olds)) if skips else new
    # `trace_loss` has refused metrics of `loss_fn` with these names.
    norm = jnp.sqrt(sum_of_squares(jax.tree.leaves(results.grads)))
    scaling = loss_scaling_metrics(opt_state, before=state.opt_state)
    metrics = {**results.metrics, "loss": results.loss, "grad_norm": norm, **scaling}
    return _Attempt(new, metrics, all_finite(watched))

  return jax.jit(
    train_step,
    # The state is the first argument. Its old arrays have the shapes of the new ones.
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


class _Attempt(NamedTuple):
  """The results of one run of a batch. A skipped run returns the old state with a new scale."""

  state: TrainState
  metrics: Metrics
  forward_finite: Array  # whether the loss and the new model state were finite


def _update_and_apply(
  tx: optax.GradientTransformationExtraArgs,
  state: TrainState,
  results: LossResults,
  watched: PyTree,
) -> tuple[Params, OptState]:
  """Returns the parameters and the state of the optimizer after a step, and raises if it fails.

  `watched` has the numbers beside the gradients that decide about skipping; it is None under
  `NoLossScale`, which never skips.
  """
  grads, extra = results.grads, {"value": results.loss}
  # With the scale outermost, parameters are updated in the branch that is not skipped. A monitor or
  # masters around the scale need the updates themselves, by the interface of optax.
  outermost = None if watched is None else scaling_of(tx)
  if watched is not None:
    # The scale checks the loss and the model state too. An optimizer inside sees the loss alone.
    extra["loss"] = watched
  else:
    # A plain optimizer creates moments in the dtypes of its parameters, such as bfloat16. Float32
    # gradients would turn these moments into float32, another type of state.
    has_masters = nodes_of(state.opt_state, MasterWeightsState)
    trained = master_params(state.opt_state, state.params) if has_masters else state.params
    grads = as_stored(grads, trained)

  def apply(params: Params, updates: Updates, opt_state: OptState) -> Params:
    # optax broadcasts updates to larger shapes, and so would change the parameters' shapes
    # silently. `apply_updates` would blame the caller. Here the optimizer made the updates.
    problems = tree_differences(params, updates, dtypes=False)
    if problems:
      raise _needs_more(f"updates with {listed(problems)}")
    return apply_updates(params, updates, opt_state)

  where = f"{_CALL}(tx): step(state)"
  try:
    if outermost is not None:
      update = outermost.update_and_apply
      result, opt_state = update(grads, state.opt_state, state.params, apply=apply, **extra)
    else:
      result, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
  # These explain themselves: ours, and reads of a traced value in the user's code.
  except (MpjaxError, jax.errors.JAXTypeError):
    raise
  except REFUSALS as error:
    # The likely cause is a state of another optimizer. Else, `tx` wants arguments that no step has.
    refuse_other_state(tx, state.params, state.opt_state, where, error)
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise _needs_more(got) from error
  # An optimizer without a state, such as sgd, passes on any state, so a wrong one raises nothing.
  refuse_other_state(tx, state.params, state.opt_state, where, None)
  # A skipped step selects between both states, and a loop carries them. Both need equal types.
  check_alike(
    opt_state,
    state.opt_state,
    f"{_CALL}(tx): the state of the optimizer",
    expected="the structure, shapes and dtypes that it had before the step",
    fix="Parameters stored in low precision need mpjax.master_weights, or a loss scale other "
    "than NoLossScale, for their moments to be float32.",
  )
  return (apply(state.params, result, opt_state) if outermost is None else result), opt_state


def _needs_more(got: str) -> MpjaxTypeError:
  """Returns the error for an optimizer that the step cannot call."""
  return MpjaxTypeError(
    f"{_CALL}(tx): tx.update",
    expected="an optimizer that needs the parameters, the gradients of the mean loss and "
    "value=, and no more",
    got=got,
    fix="Call line searches, SAM in opaque mode, dpsgd and lookahead in a loop of your own: "
    "jax.value_and_grad(mpjax.scaled(loss_fn, opt_state)), and tx.update.",
  )


class _Runs(NamedTuple):
  """The runs of a batch so far: the carry of the loop."""

  state: TrainState
  metrics: Metrics  # of the last run
  first_scale: LossScaleState  # after the first run
  number: Array  # of runs, int32
  is_futile: Array  # whether the next run would fail like the last one

  @property
  def applied(self) -> Array:
    """Whether the last run was applied."""
    return self.metrics["finite"]


def _run_with_retries(
  attempt: Callable[[TrainState, PyTree], _Attempt],
  state: TrainState,
  batch: PyTree,
  max_retries: int,
) -> tuple[TrainState, Metrics]:
  """Runs a batch until its step is applied, or `max_retries` more times while that may help.

  Each run has a lower loss scale.
  """
  where = f"{_CALL}(max_retries)"
  # `jit` caches the trace, so that `eval_shape` and the loop share one call of the loss function.
  attempt = jax.jit(attempt, inline=True)

  def scale_in(state: TrainState) -> LossScaleState:
    # `train_step` has checked that the scale moves, so it has numbers.
    return cast("LossScaleState", own_scale(state.opt_state, "").state)

  def with_scale(state: TrainState, scale: LossScaleState) -> TrainState:
    own = own_scale(state.opt_state, "")
    return state._replace(opt_state=replace_scale(state.opt_state, own, scale))

  def may_help(runs: _Runs) -> Array:
    return ~(runs.applied | runs.is_futile) & (runs.number <= max_retries)

  def run(runs: _Runs) -> _Runs:
    new, metrics, forward_finite = attempt(runs.state, batch)
    # A skipped run returns the old state but for the scale, so the next run starts from the same
    # numbers.
    before, after = scale_in(runs.state), scale_in(new)
    # Keep the scale after the first run: if no run helps, it is the result.
    first = select(runs.number == 0, after, runs.first_scale, where)
    own = own_scale(runs.state.opt_state, "")
    # A lower scale changes only the backward pass. It does not help at the minimum, or if the loss,
    # the model state or the updates were not finite.
    is_lowest = before.scale <= own.limits[0]
    is_futile = is_lowest | (after.bad_updates > before.bad_updates) | ~forward_finite
    # An applied run keeps its scale. A failed one goes down, also if the hysteresis would wait,
    # because the same batch fails at the same scale.
    factor = jnp.asarray(own.fields["backoff_factor"], jnp.float32)
    lower = jnp.clip(before.scale * factor, *own.limits)
    after = after._replace(scale=jnp.where(after.applied, after.scale, lower))
    return _Runs(with_scale(new, after), metrics, first, runs.number + 1, is_futile)

  # A loop needs the types of the metrics before the first run.
  metrics = jax.eval_shape(attempt, state, batch).metrics
  # The loop reads only whether the last run was applied. All zeros say that it was not.
  zeros = jax.tree.map(lambda x: jnp.full_like(x, 0), metrics)
  start = _Runs(state, zeros, scale_in(state), jnp.zeros((), jnp.int32), jnp.asarray(False))
  last = jax.lax.while_loop(may_help, run, start)
  # If no run helped, the batch caused the overflow, not the scale. Then the scale moves as after
  # one run without retries.
  scale = select(last.applied, scale_in(last.state), last.first_scale, where)
  new = with_scale(last.state, scale)
  moved = loss_scaling_metrics(new.opt_state, before=state.opt_state)
  return new, {**last.metrics, **moved, "retries": last.number - 1}


def _check_batch(batch: PyTree, micro_batches: int) -> None:
  """Raises unless a batch can be cut into micro-batches."""
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  # The first axis of each leaf. A scalar has the shape (), which cannot be cut.
  rows = {jnp.shape(x)[:1] for _, x in leaves}
  if len(rows) > 1 or any(not shape or shape[0] % micro_batches for shape in rows):
    raise MpjaxValueError(
      f"{_CALL}(micro_batches={micro_batches}): step(batch)",
      expected="leaves with one first axis, that of the examples, which can be cut into "
      f"{micro_batches} micro-batches",
      got=listed([f"shape {list(jnp.shape(x))} at {key_text(path)}" for path, x in leaves]),
      fix="Choose a batch size that is a multiple, and drop or pad the last batch. Let loss_fn "
      "close over arrays of the entire batch, such as class weights.",
    )


def _check_decision(new: OptState, old: OptState) -> None:
  """Raises if devices that had one state decide differently, each by its own loss."""
  # Each device decides by its own loss if the flag varies over more axes than before the step. Only
  # a `shard_map` that checks varying values shows this in types. `pmap` and `check_vma=False` do
  # not.
  decisions = [own_scale(x, "").state for x in (new, old)]
  after, before = ({*varying_axes(jax.typeof(x.applied))} for x in decisions if x is not None)
  apart = sorted(after - before)
  if apart:
    where = f"{_CALL}(axis_name=None)"
    expected = f"the name of the axis that the batch is divided over, one of {apart}"
    got = "None inside of a shard_map, where each device would take another step"
    fix = f"Pass axis_name={apart[0]!r}, and gradients, loss and state are averaged over it."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
