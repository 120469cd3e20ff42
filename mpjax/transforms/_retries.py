"""Running a batch again at a lower scale."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._core.types import Array, PyTree
from mpjax.transforms._gradients import Metrics
from mpjax.transforms._loss_scale_access import replace_scale
from mpjax.transforms._loss_scale_config import label_number
from mpjax.transforms._progress import loss_scaling_metrics
from mpjax.transforms._train_state import TrainState, own_scale

Attempt: TypeAlias = Callable[[TrainState, PyTree], tuple[TrainState, Metrics, Array]]
"""Returns the state, the metrics, and whether loss and model state were finite."""


def retried(
  attempt: Attempt, state: TrainState, batch: PyTree, max_retries: int
) -> tuple[TrainState, Metrics]:
  """Runs a batch until a step is applied, or `max_retries` more times while that may help.

  Each time at a lower scale, hysteresis or not: at the same one the same overflows. It does not
  help where the forward pass is not finite, which is not scaled; where the scale is at its floor;
  or where the updates alone were bad. Where no run helped, one was skipped: the batch is to blame,
  not the scale, which then is as after a single skip.
  """
  found = own_scale(state.opt_state, "")
  factor, low = (label_number(found.config, name) for name in ("backoff_factor", "min_scale"))
  # The shapes of the metrics are asked for first, and the loop then takes the same trace.
  attempt = jax.jit(attempt, inline=True)
  shapes = jax.eval_shape(attempt, state, batch)[1]
  # Of these only `finite` is read: no step was applied yet.
  nothing = jax.tree.map(lambda x: jnp.full_like(x, 0), shapes)

  def again(carry: tuple[TrainState, Metrics, Any, Array, Array]) -> Array:
    _, metrics, _, runs, futile = carry
    failed = jnp.logical_not(jnp.logical_or(metrics["finite"], futile))
    return jnp.logical_and(failed, runs <= max_retries)

  def run(carry: tuple[TrainState, Metrics, Any, Array, Array]) -> Any:
    state, _, first, runs, _ = carry
    new, metrics, forward = attempt(state, batch)
    before, after = (_scale(s) for s in (state, new))
    first = jax.tree.map(lambda a, f: jnp.where(runs == 0, a, f), after, first)
    stuck = jnp.logical_or(before.scale <= low, after.bad_updates > before.bad_updates)
    futile = jnp.logical_or(stuck, jnp.logical_not(forward))
    withheld = jnp.logical_and(jnp.logical_not(metrics["finite"]), after.scale == before.scale)
    lower = jnp.maximum(after.scale * jnp.asarray(factor, jnp.float32), low)
    after = after._replace(scale=jnp.where(withheld, lower, after.scale))
    return _with_scale(new, after), metrics, first, runs + 1, futile

  zero, no = jnp.zeros((), jnp.int32), jnp.asarray(False)
  start = (state, nothing, _scale(state), zero, no)
  state, metrics, first, runs, _ = jax.lax.while_loop(again, run, start)
  kept = jax.tree.map(lambda a, f: jnp.where(metrics["finite"], a, f), _scale(state), first)
  state = _with_scale(state, kept)
  metrics = metrics | loss_scaling_metrics(state.opt_state)
  return state, {**metrics, "retries": runs - 1}


def _scale(state: TrainState) -> Any:
  return own_scale(state.opt_state, "").state


def _with_scale(state: TrainState, scale: Any) -> TrainState:
  found = own_scale(state.opt_state, "")
  return state._replace(opt_state=replace_scale(state.opt_state, found, scale))
