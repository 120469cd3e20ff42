"""Running a batch that overflowed again, each time at a lower loss scale."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from mpjax._core.trees import select
from mpjax._core.types import Array, PyTree
from mpjax._optim.find_scale import OwnedScale, loss_scaling_metrics, replace_scale
from mpjax._optim.states import LossScaleState
from mpjax._optim.step.traced_loss import Metrics
from mpjax._optim.step.train_state import TrainState, own_scale

_WHERE = "mpjax.make_train_step(max_retries)"


class Attempt(NamedTuple):
  """The results of one run of a batch. A skipped run returns the old state with a new scale."""

  state: TrainState
  metrics: Metrics
  forward_finite: Array  # whether the loss and the new model state were finite


class _Runs(NamedTuple):
  """The runs of a batch so far: the carry of the loop."""

  state: TrainState
  metrics: Metrics  # of the last run
  first_scale: LossScaleState  # after the first run
  number: Array  # of runs, int32
  is_futile: Array  # whether the next run would fail like the last one


def run_with_retries(
  attempt: Callable[[TrainState, PyTree], Attempt],
  state: TrainState,
  batch: PyTree,
  max_retries: int,
) -> tuple[TrainState, Metrics]:
  """Runs a batch until its step is applied, or `max_retries` more times while that may help."""
  # `jit` caches the trace, so that `eval_shape` and the loop share one call of the loss function.
  attempt = jax.jit(attempt, inline=True)

  def may_help(runs: _Runs) -> Array:
    return ~(runs.metrics["finite"] | runs.is_futile) & (runs.number <= max_retries)

  def run(runs: _Runs) -> _Runs:
    new, metrics, forward_finite = attempt(runs.state, batch)
    # A skipped run returns the old state but for the scale, so the next run starts from the same
    # numbers.
    before, after = _scale_in(runs.state), _scale_in(new)
    # Keep the scale after the first run: if no run helps, it is the result.
    first = select(runs.number == 0, after, runs.first_scale, _WHERE)
    is_futile = _is_futile(runs.state, before, after, forward_finite)
    lower = _backed_off(runs.state, before)
    # An applied run keeps its scale. A failed one goes down, also if the hysteresis would wait.
    after = after._replace(scale=jnp.where(metrics["finite"], after.scale, lower))
    return _Runs(_with_scale_in(new, after), metrics, first, runs.number + 1, is_futile)

  # A loop needs the types of the metrics before the first run.
  metrics = jax.eval_shape(attempt, state, batch).metrics
  # The loop reads only `finite`, which is False: no step is applied yet.
  zeros = jax.tree.map(lambda x: jnp.full_like(x, 0), metrics)
  start = _Runs(state, zeros, _scale_in(state), jnp.zeros((), jnp.int32), jnp.asarray(False))
  last = jax.lax.while_loop(may_help, run, start)
  # If no run helped, the batch caused the overflow, not the scale. Then the scale moves as after
  # one run without retries.
  applied = last.metrics["finite"]
  scale = select(applied, _scale_in(last.state), last.first_scale, _WHERE)
  new = _with_scale_in(last.state, scale)
  moved = loss_scaling_metrics(new.opt_state, before=state.opt_state)
  return new, {**last.metrics, **moved, "retries": last.number - 1}


def _is_futile(
  state: TrainState, before: LossScaleState, after: LossScaleState, forward_finite: Array
) -> Array:
  """Returns whether a lower scale cannot help."""
  # A lower scale changes only the backward pass. It does not help at the minimum, or if the loss,
  # the model state or the updates were not finite.
  lowest, _ = _own_scale(state).limits
  is_lowest = before.scale <= lowest
  return is_lowest | (after.bad_updates > before.bad_updates) | ~forward_finite


def _backed_off(state: TrainState, before: LossScaleState) -> Array:
  """Returns the scale of the next run, lower whatever the hysteresis: at the same one it fails."""
  own = _own_scale(state)
  factor = jnp.asarray(own.fields["backoff_factor"], jnp.float32)
  return jnp.clip(before.scale * factor, *own.limits)


def _own_scale(state: TrainState) -> OwnedScale:
  return own_scale(state.opt_state, "")


def _scale_in(state: TrainState) -> LossScaleState:
  """Returns the numbers of the loss scale of a state; `make_train_step` checked that it moves."""
  return cast("LossScaleState", _own_scale(state).state)


def _with_scale_in(state: TrainState, scale: LossScaleState) -> TrainState:
  """Returns a state with other numbers of its loss scale."""
  return state._replace(opt_state=replace_scale(state.opt_state, _own_scale(state), scale))
