"""A full training step: everything that it changes commits together, or not at all."""

from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax._core.paths import path_text
from mpjax._core.trees import all_finite, is_half
from mpjax._core.types import Array, PyTree
from mpjax.transforms._across_devices import IntegerState, check_integer_state
from mpjax.transforms._apply_updates import apply_updates, check_rounding
from mpjax.transforms._checks import check_axes
from mpjax.transforms._gradients import Metrics, batch_gradients
from mpjax.transforms._loss_program import LossFn, check_signature
from mpjax.transforms._loss_scale_access import unscale
from mpjax.transforms._loss_scale_config import INT32_MAX
from mpjax.transforms._loss_scaling import AxisName
from mpjax.transforms._master_weights import master_params, merged_masters
from mpjax.transforms._progress import loss_scaling_metrics, select_tree
from mpjax.transforms._retries import retried
from mpjax.transforms._train_state import (
  TrainState,
  applies_updates,
  averaged,
  own_scale,
  updated_parameters,
)
from mpjax.transforms._train_step_checks import (
  check_arguments,
  check_call,
  check_decision,
  check_shardings,
  check_updates,
  checked_update,
)

_ROUNDING = 2**32 - 1
"""Folded into a step's key for its rounding; micro-batches and devices count from 0."""


def make_train_step(
  loss_fn: LossFn,
  tx: Any,
  *,
  accumulate: int = 1,
  axis_name: AxisName | None = None,
  integer_state: IntegerState = None,
  max_retries: int = 0,
  ema_decay: float | None = None,
  donate: bool = True,
  rounding: Literal["nearest", "stochastic"] = "nearest",
  state_shardings: PyTree = None,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
  """Returns a jitted step: scaled gradients, micro-batches, and one decision for everything.

  If a gradient or the loss is not finite, or a number of the model state becomes so that was not so
  before, the step is skipped: parameters, optimizer, model state, average and `step` keep their
  bits, and only the loss scale moves. Half parameters with `mpjax.master_weights` are set to their
  rounded masters. `loss_fn` is traced once.

  The key that `loss_fn` gets is folded from `state.rng` and `state.step` (and the device, under
  `axis_name`; and the micro-batch), so that a skipped step leaves no trace in later ones either.

  Args:
    loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss
      is a floating scalar, a mean over the batch; `metrics` is a dict of arrays; `model_state`
      keeps its structure, shapes and dtypes; `rng` is None if the state has none.
    tx: the optimizer, with `mpjax.loss_scaling` around all of it (`master_weights` may be around
      that). With `NoLossScale` nothing is checked and no step is skipped; `StaticLossScale(1)`
      checks without scaling. The loss is passed as `value=`, for `optax.contrib`'s schedules.
    accumulate: cut the batch into this many micro-batches, which are run one after the other inside
      the step; their float32 gradients are added and divided once. Row i belongs to micro-batch
      i % accumulate, so that a batch sharded over devices stays where it is. One bad micro-batch
      skips the entire step.
    axis_name: the mapped axis, or axes, over which gradients, loss, floating model state and
      metrics are averaged in float32 (integers are summed in metrics). The step is then called
      inside of a `jax.shard_map` or `jax.pmap` with replicated parameters; to donate is then up to
      the `jax.jit` around it. A loss that `loss_fn` has averaged over the axis itself will do as
      well. Under automatic sharding leave it out.
    integer_state: what becomes, under `axis_name`, of integers and booleans in `model_state` that
      `loss_fn` changes. "sum" adds the changes of all devices to the old value, for what counts
      rows or tokens and is not set back; "same" is for what is the same on all devices, such as a
      count of steps. Or a dict from paths of leaves or branches to these, `{"counts/tokens":
      "sum"}`. Of booleans both are true where one device says so. What passes through unchanged
      needs no word, nor do keys.
    max_retries: run the same batch again, up to this many times, each time at a lower scale,
      whatever the hysteresis (NNabla runs it again with a new batch). Off by default: a lost batch
      is cheaper. A batch whose loss or model state is not finite is not run again, since no scale
      can help there; if no run helped, it counts as one skipped step.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step; of
      parameters in `mpjax.accumulate_gradients`, after each update.
    donate: let the new state take over the memory of the old one, which must not be used again.
    rounding: how half parameters without a master are rounded, see `mpjax.apply_updates`. The keys
      of "stochastic" are folded from `state.rng`.
    state_shardings: where the new state is to be, `jax.tree.map(lambda x: x.sharding, state)`.
      With sharded parameters XLA may otherwise choose another place for leaves that it computes
      from them, and compile the next step anew.

  Returns:
    `step(state, batch) -> (state, metrics)`. The metrics are those of `loss_fn` (floating ones
    averaged over micro-batches in float32, integers and booleans summed as int32), those of
    `mpjax.loss_scaling_metrics`, `loss` and `grad_norm` (both float32, unscaled, and not finite
    when they were not; the norm also where a sum of squares is not), and `retries` (int32) if
    `max_retries` is given. `mpjax.check_skipped_steps(state)` on the host, now and then, raises
    after too many skipped steps in a row.

  Raises:
    MpjaxTypeError: an argument has the wrong type; when called: the state is no `TrainState`, or
      has not one loss scale or that of another optimizer, `loss_fn` returns something else or wants
      a key that the state lacks, or `tx` needs other arguments.
    MpjaxValueError: an argument is out of range; when called: a batch that cannot be cut, a model
      state that changes its structure, shapes or dtypes, an unbound or a missing `axis_name`,
      parameters that differ along it, integers that change without `integer_state`, or an average
      that is kept but not updated, or the other way round.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> def loss_fn(params, model_state, batch, rng):
  ...   error = batch["x"] @ params - batch["y"]
  ...   return jnp.mean(error**2), (model_state, {"worst": jnp.max(jnp.abs(error))})
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
  >>> step = mpjax.make_train_step(loss_fn, tx, accumulate=2)
  >>> state = mpjax.TrainState.create(jnp.zeros(2), tx)
  >>> batch = {"x": jnp.eye(2), "y": jnp.asarray([1.0, 3.0])}
  >>> state, metrics = step(state, batch)
  >>> print(state.params, metrics["loss"], metrics["grad_norm"], int(state.step))
  [0.1 0.3] 5.0 3.1622777 1
  """
  check_arguments(loss_fn, tx, accumulate, max_retries, ema_decay, donate)
  check_signature(loss_fn)
  check_integer_state(integer_state)
  check_rounding("mpjax.make_train_step", rounding)
  several = isinstance(axis_name, (tuple, list))
  axes: tuple[Hashable, ...] = () if axis_name is None else (axis_name,)
  axes = tuple(axis_name) if several else axes

  def attempt(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Array]:
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    rng = key
    if axes and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(axes))
    loss, model_state, metrics, grads, watched = batch_gradients(
      loss_fn, state, batch, rng, accumulate, axes, integer_state
    )
    forward = (loss, watched)
    norm = _norm(unscale(grads, state.opt_state))

    def apply(params: PyTree, updates: PyTree, opt_state: PyTree) -> PyTree:
      check_updates(params, updates)
      return apply_updates(
        params,
        updates,
        master=merged_masters(opt_state),
        rounding=rounding,
        key=None if key is None or rounding == "nearest" else jax.random.fold_in(key, _ROUNDING),
      )

    scaled = own_scale(state.opt_state, "").state is not None
    extra = {"loss": forward, "value": loss}
    applied = applies_updates(state.opt_state)
    if applied:
      params, opt_state = checked_update(tx, grads, state, **extra, apply=apply)
    else:
      grads = grads if scaled else _as_stored(grads, state)
      updates, opt_state = checked_update(tx, grads, state, **extra)
      params = apply(state.params, updates, opt_state)
    if scaled and not axes:
      check_decision(opt_state, state.opt_state)
    scaling = loss_scaling_metrics(opt_state)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops there, as all counters do.
    new = TrainState(step, params, opt_state, model_state, state.ema, state.rng)
    if ema_decay is not None:
      target = averaged(params, opt_state)
      new = new._replace(ema=_average(state.ema, target, ema_decay, updated_parameters(opt_state)))
    if scaled:  # Else nothing is checked or skipped.
      # Parameters too: -0.0 leaves them alone, but for subnormals, which a CPU flushes to 0.
      kept = ("step", "model_state", "ema", *(() if applied else ("params",)))
      pair = ({name: getattr(one, name) for name in kept} for one in (new, state))
      new = new._replace(**select_tree(scaling["finite"], *pair))
    return new, {**metrics, "loss": loss, "grad_norm": norm, **scaling}, all_finite(forward)

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    check_axes(
      axes,
      f"mpjax.make_train_step(axis_name={axis_name!r})",
      call="the step",
      fix="Call the step inside the jax.shard_map of that axis. Under automatic sharding",
    )
    check_call(state, batch, accumulate, max_retries, ema_decay, rounding)
    check_shardings(state_shardings, state)
    if not max_retries:
      return attempt(state, batch)[:2]
    return retried(attempt, state, batch, max_retries)

  return jax.jit(
    train_step,
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _norm(grads: PyTree) -> Array:
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)]
  return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _average(old: PyTree, new: PyTree, decay: float, updated: dict[str, Array]) -> PyTree:
  """Returns the average one step later; `updated` says which parameters wait for their update."""

  def one(path: Any, e: Array, p: Array) -> Array:
    moved = e + (p - e) * jnp.asarray(1 - decay, e.dtype)
    flag = updated.get(path_text(path))
    return moved if flag is None else jnp.where(flag, moved, e)

  return jax.tree_util.tree_map_with_path(one, old, new)


def _as_stored(grads: PyTree, state: TrainState) -> PyTree:
  """Returns gradients in the dtypes of what they train, as plain optax takes them.

  Without a loss scale the optimizer is called as it is: its moments of half parameters are half.
  """
  has_masters = merged_masters(state.opt_state) is not None
  trained = master_params(state.opt_state, state.params) if has_masters else state.params
  return jax.tree.map(lambda g, p: g.astype(p.dtype) if is_half(p) else g, grads, trained)
