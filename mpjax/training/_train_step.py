"""A whole training step: everything that it changes commits together, or not at all."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._jaxpr import walk
from mpjax._loss_scale_config import INT32_MAX
from mpjax._tree import all_finite
from mpjax._types import Array, PyTree
from mpjax.training._gradients import (
  LossFn,
  Metrics,
  batch_gradients,
  checked,
  first_micro_batch,
)
from mpjax.training._train_state import TrainState, applies_updates, averaged, own_scale
from mpjax.training._train_step_checks import (
  check_arguments,
  check_axes,
  check_call,
  check_dtypes,
)
from mpjax.transforms import apply_updates, commit, loss_scaling_metrics, unscale
from mpjax.transforms._apply_updates import check_rounding
from mpjax.transforms._loss_scale_access import replace_scale
from mpjax.transforms._loss_scaling import AxisName
from mpjax.transforms._master_weights import merged_masters

_ROUNDING = 2**32 - 1
"""Folded into a step's key for its rounding; micro-batches and devices count from 0."""


def make_train_step(
  loss_fn: LossFn,
  tx: Any,
  *,
  accumulate: int = 1,
  axis_name: AxisName | None = None,
  max_retries: int = 0,
  ema_decay: float | None = None,
  donate: bool = True,
  rounding: Literal["nearest", "stochastic"] = "nearest",
  state_shardings: PyTree = None,
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
  """Returns a jitted step: scaled gradients, micro-batches, and one decision for everything.

  If a gradient, the loss or the new model state is not finite, the step is skipped: parameters,
  optimizer, model state, average and `step` keep their bits, and only the loss scale moves. Half
  parameters with `mpjax.master_weights` are set to their rounded masters.

  The key that `loss_fn` gets is folded from `state.rng` and `state.step` (and the device, under
  `axis_name`; and the micro-batch), so that a skipped step leaves no trace in later ones either.

  Args:
    loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss
      is a floating scalar, a mean over the batch; `metrics` is a dict of arrays; `model_state`
      keeps its structure, shapes and dtypes; `rng` is None if the state has none.
    tx: the optimizer, wrapped by `mpjax.loss_scaling` as a whole (`master_weights` may stand around
      that). With `NoLossScale` nothing is checked and no step is skipped; `StaticLossScale(1)`
      checks without scaling. The loss is handed on as `value=`, for `optax.contrib`'s schedules.
    accumulate: cut the batch into this many micro-batches, which are run one after the other inside
      the step; their float32 gradients are added and divided once. Row i belongs to micro-batch
      i % accumulate, so that a batch sharded over devices stays where it is. One bad micro-batch
      skips the whole step.
    axis_name: the mapped axis, or axes, over which gradients, loss, floating model state and
      metrics are averaged in float32 (integers are summed in metrics). The step is then called
      inside of a `jax.shard_map` or `jax.pmap` with replicated parameters; to donate is then up to
      the `jax.jit` around it. Under automatic sharding leave it out.
    max_retries: run the same batch again, up to this many times, at the lower scale that a skipped
      step leaves behind (NNabla runs it again with a new batch). Off by default: a lost batch is
      cheaper. A batch whose loss or model state is not finite is not run again, since no scale can
      help there; if no run helped, it counts as one skipped step.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step.
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
    `max_retries` is given. `mpjax.check_progress(state)` on the host, now and then, raises after
    too many skipped steps in a row.

  Raises:
    MpjaxTypeError: an argument has the wrong type; when called: the state is no `TrainState`, or
      has not one loss scale, or `loss_fn` returns something else.
    MpjaxValueError: an argument is out of range; when called: a batch that cannot be cut, a model
      state that changes its structure, shapes or dtypes, an unbound `axis_name`, parameters that
      differ along it, or an average that is kept but not updated, or the other way round.

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
  check_rounding("mpjax.make_train_step", rounding)
  several = isinstance(axis_name, (tuple, list))
  axes: tuple[Hashable, ...] = () if axis_name is None else (axis_name,)
  axes = tuple(axis_name) if several else axes

  def attempt(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Array]:
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    rng = key
    if axes and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(axes))
    loss, model_state, metrics, grads = batch_gradients(
      loss_fn, state, batch, rng, accumulate, axes
    )
    norm = _norm(unscale(grads, state.opt_state))

    def apply(params: PyTree, updates: PyTree, opt_state: PyTree) -> PyTree:
      return apply_updates(
        params,
        updates,
        master=merged_masters(opt_state),
        rounding=rounding,
        key=None if key is None or rounding == "nearest" else jax.random.fold_in(key, _ROUNDING),
      )

    watched = {"loss": (loss, model_state), "value": loss}
    applied = applies_updates(state.opt_state)
    if applied:
      params, opt_state = tx.update(grads, state.opt_state, state.params, **watched, apply=apply)
    else:
      updates, opt_state = tx.update(grads, state.opt_state, state.params, **watched)
      params = apply(state.params, updates, opt_state)
    check_dtypes(opt_state, state.opt_state)
    scaling = loss_scaling_metrics(opt_state)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops there, as all counters do.
    new = TrainState(step, params, opt_state, model_state, state.ema, state.rng)
    if ema_decay is not None:
      target = averaged(params, opt_state)
      new = new._replace(ema=_average(state.ema, target, ema_decay))
    if own_scale(opt_state, "").state is not None:  # Else nothing is checked or skipped.
      # Parameters too: -0.0 leaves them alone, but for subnormals, which a CPU flushes to 0.
      kept = ("step", "model_state", "ema", *(() if applied else ("params",)))
      pair = ({name: getattr(one, name) for name in kept} for one in (new, state))
      new = new._replace(**commit(scaling["finite"], *pair))
    forward = all_finite((loss, model_state))
    return new, {**metrics, "loss": loss, "grad_norm": norm, **scaling}, forward

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    check_axes(axes)
    check_call(state, batch, accumulate, max_retries, ema_decay, rounding)
    _warn_without_float16(loss_fn, state, batch, accumulate)
    if not max_retries:
      return attempt(state, batch)[:2]
    return _retried(attempt, state, batch, max_retries)

  return jax.jit(
    train_step,
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _norm(grads: PyTree) -> Array:
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)]
  return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _average(old: PyTree, new: PyTree, decay: float) -> PyTree:
  return jax.tree.map(lambda e, p: e + (p - e) * jnp.asarray(1 - decay, e.dtype), old, new)


_Attempt: TypeAlias = Callable[[TrainState, PyTree], tuple[TrainState, Metrics, Array]]
"""Returns the state, the metrics, and whether loss and model state were finite."""


def _retried(
  attempt: _Attempt, state: TrainState, batch: PyTree, max_retries: int
) -> tuple[TrainState, Metrics]:
  """Runs a batch until a step is applied, or `max_retries` more times while that may help.

  It does not where the forward pass is not finite, which is not scaled; where the scale is at its
  floor; or where the updates alone were bad. Where no run helped, one was skipped: the batch is to
  blame, not the scale, which then is as after a single skip.
  """
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
    stuck = jnp.logical_or(
      after.floor_hits > before.floor_hits, after.bad_updates > before.bad_updates
    )
    return new, metrics, first, runs + 1, jnp.logical_or(stuck, jnp.logical_not(forward))

  zero, no = jnp.zeros((), jnp.int32), jnp.asarray(False)
  start = (state, nothing, _scale(state), zero, no)
  state, metrics, first, runs, _ = jax.lax.while_loop(again, run, start)
  found = own_scale(state.opt_state, "")
  kept = jax.tree.map(lambda a, f: jnp.where(metrics["finite"], a, f), _scale(state), first)
  state = state._replace(opt_state=replace_scale(state.opt_state, found, kept))
  metrics = metrics | loss_scaling_metrics(state.opt_state)
  return state, {**metrics, "retries": runs - 1}


def _scale(state: TrainState) -> Any:
  return own_scale(state.opt_state, "").state


def _warn_without_float16(
  loss_fn: LossFn, state: TrainState, batch: PyTree, accumulate: int
) -> None:
  """Warns, when the step is traced, if a dynamic scale protects no float16."""
  if not own_scale(state.opt_state, "").config.startswith("dynamic"):
    return
  part = jax.eval_shape(lambda b: first_micro_batch(b, accumulate), batch)
  traced = checked(loss_fn)
  program = jax.make_jaxpr(traced)(state.params, state.model_state, part, state.rng)
  # A primitive that this version cannot enter may hold anything.
  if not any(_in_float16(visit.eqn) or not visit.entered for visit in walk(program)):
    warnings.warn(
      "mpjax.make_train_step: the loss scale is dynamic, but nothing in loss_fn is computed in "
      "float16. bfloat16 and float32 have the range to do without: StaticLossScale(1) skips bad "
      "steps without scaling, NoLossScale() does not even look for them.",
      UserWarning,
      stacklevel=2,
    )


def _in_float16(eqn: Any) -> bool:
  return any(getattr(v.aval, "dtype", None) == jnp.float16 for v in (*eqn.invars, *eqn.outvars))
