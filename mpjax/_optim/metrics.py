"""Metrics of the last step, and the choice of state that a skipped step keeps."""

from typing import TypeVar

from mpjax._core.trees import select
from mpjax._core.types import Array, OptState
from mpjax._optim.find_scale import find_scale, read_state
from mpjax._optim.loss_scale import COUNTERS

T = TypeVar("T")


def loss_scaling_metrics(
  opt_state: OptState, *, before: OptState | None = None, name: str | None = None
) -> dict[str, Array]:
  """Return metrics of loss scaling after an `update`.

  Args:
    opt_state: a state that holds a loss scale.
    before: the state before the update, for `scale_changed`.
    name: which of several loss scales to read.

  Returns:
    Arrays of shape (). Under `NoLossScale` the scale is 1, `finite` is True, and every count
    but `total` is 0.

    - `loss_scale` (float32): the scale of the next backward pass;
    - `finite` (bool): whether the last step was applied, as `mpjax.step_applied`. It is also False
      if another loss, an update or a new state was not finite;
    - `good_steps` (int32): finite steps in a row since the scale last moved;
    - `total`, `skipped` (int32): steps so far, and those that were not applied;
    - `consecutive_skips` (int32): skipped steps since the last applied one;
    - `floor_hits` (int32): overflows at the minimum scale;
    - `bad_updates` (int32): steps skipped for their updates or new state (`check_updates=True`);
    - `scale_changed` (bool), where `before` is given: whether the update moved the scale.

  Raises:
    MpjaxError: the state has no scale or several, or is a constant of the traced function.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> metrics = mpjax.loss_scaling_metrics(opt_state)
  >>> float(metrics["loss_scale"]), bool(metrics["finite"]), int(metrics["skipped"])
  (16384.0, False, 1)
  """
  where = "mpjax.loss_scaling_metrics"
  state = read_state(opt_state, f"{where}(opt_state)", name)
  metrics = {"loss_scale": state.scale, "finite": state.finite}
  metrics |= {key: getattr(state, key) for key in COUNTERS}
  if before is not None:
    # Under `NoLossScale` the scale has not changed.
    old = find_scale(before, f"{where}(before)", name).state or state
    metrics["scale_changed"] = state.scale != old.scale
  return metrics


def step_applied(opt_state: OptState, *, name: str | None = None) -> Array:
  """Return whether the last step was applied.

  Args:
    opt_state: a state that holds a loss scale, after an `update`.
    name: which of several loss scales to read.

  Returns:
    A bool of shape (), traced under `jit`; True before the first step and under `NoLossScale`.

  Raises:
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> bool(mpjax.step_applied(mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))))
  True
  """
  return read_state(opt_state, "mpjax.step_applied(opt_state)", name).finite


def keep_if_skipped(opt_state: OptState, new: T, old: T, *, name: str | None = None) -> T:
  """Return `new` if the last step was applied, and `old` if it was skipped.

  Use it for state outside the optimizer: batch statistics, moving averages and counters.

  Args:
    opt_state: the state that `update` returned; it holds a loss scale.
    new: a tree of arrays, after the step.
    old: the same tree before the step, in the same shapes and dtypes.
    name: which of several loss scales to read.

  Returns:
    A tree like `new`. Under `NoLossScale` it is `new`.

  Raises:
    MpjaxValueError: the trees differ in structure, shapes or dtypes.
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> print(mpjax.keep_if_skipped(opt_state, new=jnp.asarray(jnp.nan), old=jnp.asarray(0.5)))
  0.5
  """
  call = "mpjax.keep_if_skipped"
  # `select` compares structure, shapes and dtypes, since `where` would broadcast and promote.
  applied = read_state(opt_state, f"{call}(opt_state)", name).finite
  return select(applied, new, old, f"{call}(opt_state, new, old)")
