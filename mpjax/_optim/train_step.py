"""A full training step: everything that it changes commits together, or not at all."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, cast

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
  check_value,
  listed,
)
from mpjax._core.together import sum_of_squares
from mpjax._core.trees import all_finite, check_alike, select, tree_differences
from mpjax._core.types import Array, Grads, KeyPath, OptState, Params, PyTree, Updates
from mpjax._jaxpr.compat import varying_axes
from mpjax._optim.apply_updates import apply_updates, check_rounding
from mpjax._optim.checks import check_axes, refuse_other_state
from mpjax._optim.gradients import IntegerState, LossFn, Metrics, batch_gradients
from mpjax._optim.loss_scale import (
  INT32_MAX,
  AccumulationState,
  LossScaleState,
  replace_scale,
)
from mpjax._optim.loss_scaling import AxisName, scaling_of
from mpjax._optim.masters import MasterWeightsState
from mpjax._optim.metrics import keep_if_skipped, loss_scaling_metrics
from mpjax._optim.train_state import TrainState, own_scale, trained_params
from mpjax._optim.trees import as_stored, float32_view, key_text, nodes_of
from mpjax._optim.value_and_grad import unscale


def checked_update(
  tx: optax.GradientTransformationExtraArgs,
  update: Callable[..., tuple[PyTree, OptState]],
  grads: Grads,
  state: TrainState,
  **extra: PyTree,
) -> tuple[PyTree, OptState]:
  """Returns what `update` of `tx` does, and raises if it fails or gives another kind of state."""
  where = "mpjax.make_train_step(tx): step(state)"
  try:
    result, opt_state = update(grads, state.opt_state, state.params, **extra)
  except (MpjaxError, jax.errors.JAXTypeError):
    raise
  except REFUSALS as error:
    refuse_other_state(tx, state.params, state.opt_state, where, error)
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise _needs_more(got) from error
  # What has no state itself, such as sgd, passes on that of another.
  refuse_other_state(tx, state.params, state.opt_state, where, None)
  check_alike(
    opt_state,
    state.opt_state,
    "mpjax.make_train_step(tx): the state of the optimizer",
    expected="the structure, shapes and dtypes that it had before the step",
    fix="Parameters stored in low precision need mpjax.master_weights, or a loss scale other "
    "than NoLossScale, for their moments to be float32.",
  )
  return result, opt_state


def _needs_more(got: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    "mpjax.make_train_step(tx): tx.update",
    expected="an optimizer that needs the parameters, the gradients of the mean loss and "
    "value=, and no more",
    got=got,
    fix="Call what evaluates the loss by itself (line searches, SAM in opaque mode) or takes other "
    "gradients (dpsgd, lookahead) in a loop of your own: mpjax.value_and_grad, and tx.update.",
  )


def check_decision(new: OptState, old: OptState) -> None:
  """Raises if devices that had one state decide differently, each by its own loss."""
  # A `shard_map` with `check_vma=False`, and a `pmap`, do not tell.
  decisions = [own_scale(x, "").state for x in (new, old)]
  after, before = ({*varying_axes(jax.typeof(x.finite))} for x in decisions if x is not None)
  if apart := sorted(after - before):
    where = "mpjax.make_train_step(axis_name=None)"
    expected = f"the name of the axis that the batch is divided over, one of {apart}"
    got = "None inside of a shard_map: each device would take a step of its own"
    fix = f"Pass axis_name={apart[0]!r}, and gradients, loss and state are averaged over it."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)


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
  """Returns a jitted step: scaled gradients, micro-batches, and one decision for everything.

  If a gradient or the loss is not finite, or a number of the model state becomes so, the step is
  skipped: all keep their bits, and only the loss scale moves. docs/training.md has more about each
  argument.

  Args:
    loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss
      is a floating scalar, a mean over the batch; `metrics` is a dict of arrays; `model_state`
      keeps its structure, shapes and dtypes; `rng` is None if the state has none.
    tx: the optimizer, with `mpjax.loss_scaling` around it; the loss is passed to it as `value=`.
    micro_batches: cut the batch into this many micro-batches, whose float32 gradients are added.
    axis_name: the mapped axis, or axes, of a `jax.shard_map` or `jax.pmap` around the step, over
      which gradients, loss, floating model state and metrics are averaged.
    integer_state: what becomes of integers in `model_state` under `axis_name`: "sum" adds the
      changes of all devices, "same" is the same on all; or a dict from paths or branches to these.
    max_retries: run a batch that overflowed again, each time at a lower scale, up to so many times.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step.
    donate: let the new state take over the memory of the old one, which JAX then calls deleted.
    rounding: how 16-bit parameters without a master are rounded, see `mpjax.apply_updates`.
    state_shardings: where the new state is to be, `jax.tree.map(lambda x: x.sharding, state)`.

  Returns:
    `step(state, batch) -> (state, metrics)`. The metrics are those of `loss_fn` (floating ones
    averaged, others summed) and of `mpjax.loss_scaling_metrics`, `loss` and `grad_norm` (unscaled),
    and `retries` if `max_retries` is given.

  Raises:
    MpjaxTypeError: an argument, or what `loss_fn` returns, has the wrong type; when called: the
      state is that of another optimizer, or `tx` needs other arguments.
    MpjaxValueError: an argument is out of range, or does not fit to state, batch and mapped axes.

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
  call = "mpjax.make_train_step"
  check_callable(loss_fn, f"{call}(loss_fn)", expected="a function", fix="Pass the function.")
  expected, fix = "an optax transformation", "Pass mpjax.loss_scaling(optax.adamw(1e-3))."
  check_type(tx, optax.GradientTransformation, f"{call}(tx)", expected=expected, fix=fix)
  fix = "1 does not cut the batch."
  micro_batches = check_int(micro_batches, f"{call}(micro_batches)", least=1, fix=fix)
  max_retries = check_int(max_retries, f"{call}(max_retries)", least=0, fix="0 never retries.")
  check_flag(donate, f"{call}(donate)")
  is_decay = ema_decay is None or (isinstance(ema_decay, float) and 0 <= ema_decay < 1)
  expected, fix = "a float in [0, 1), or None", "0.999 averages over about 1000 steps."
  check_value(ema_decay, is_decay, f"{call}(ema_decay)", expected=expected, fix=fix)
  rules = [*integer_state.values()] if isinstance(integer_state, Mapping) else [integer_state]
  expected = "'sum', 'same', a dict from paths of the model state to these, or None"
  is_allowed = integer_state is None or all(rule in ("sum", "same") for rule in rules)
  fix = "Use 'sum' for what counts rows or tokens, 'same' for what counts steps."
  check_value(integer_state, is_allowed, f"{call}(integer_state)", expected=expected, fix=fix)
  check_rounding(call, rounding)
  several = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  axes: tuple[Hashable, ...] = () if axis_name is None else tuple(several)

  def check(state: object, batch: PyTree) -> None:
    where = f"{call}(...): step(state)"
    expected, fix = "a mpjax.TrainState", "Make one with mpjax.TrainState.create(params, tx)."
    fix = "Swap the two: step(state, batch)." if isinstance(batch, TrainState) else fix
    state = check_type(state, TrainState, where, expected=expected, fix=fix)
    has_average = bool(jax.tree.leaves(state.ema))
    if has_average != (ema_decay is not None):
      expected = "an average in the state exactly if ema_decay is given"
      got = f"ema_decay={ema_decay} and {'one' if has_average else 'none'}"
      fix = "Use TrainState.create(..., ema=True) together with make_train_step(ema_decay=0.999)."
      raise MpjaxValueError(f"{where}: ema", expected=expected, got=got, fix=fix)
    scale = own_scale(state.opt_state, where)
    if max_retries and not scale.dynamic:
      expected = "0 with a loss scale that does not move"
      got = f"{max_retries} with {scale.label!r}"
      fix = "Use DynamicLossScale: the same batch at the same scale overflows again."
      raise MpjaxValueError(f"{call}(max_retries)", expected=expected, got=got, fix=fix)
    has_masters = bool(nodes_of(state.opt_state, MasterWeightsState))
    if rounding == "stochastic" and (has_masters or state.rng is None):
      raise MpjaxValueError(
        f"{call}(rounding='stochastic'): step(state): {'opt_state' if has_masters else 'rng'}",
        expected="a PRNG key in the state, and no masters, which are rounded to nearest",
        got="the state of mpjax.master_weights" if has_masters else "None for rng",
        fix="Use one of the two, mpjax.master_weights or stochastic rounding, which takes its bits "
        "from TrainState.create(..., rng=jax.random.key(0)).",
      )
    leaves = jax.tree_util.tree_leaves_with_path(batch) if micro_batches > 1 else []
    rows = {jnp.shape(x)[:1] for _, x in leaves}
    if len(rows) > 1 or any(not shape or shape[0] % micro_batches for shape in rows):
      raise MpjaxValueError(
        f"{call}(micro_batches={micro_batches}): step(batch)",
        expected="leaves with one first axis, that of the examples, which can be cut into "
        f"{micro_batches} micro-batches",
        got=listed([f"shape {list(jnp.shape(x))} at {key_text(path)}" for path, x in leaves]),
        fix="Choose a batch size that is a multiple, and drop or pad the last batch. Let loss_fn "
        "close over what belongs to all of it (a mask, class weights).",
      )

  def attempt(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Array]:
    # The last says whether loss and model state were finite.
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    rng = key
    if axes and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(axes))
    loss, model_state, metrics, grads, forward = batch_gradients(
      loss_fn,
      state,
      batch,
      rng,
      micro_batches=micro_batches,
      axes=axes,
      integer_state=integer_state,
    )
    norm = jnp.sqrt(sum_of_squares(jax.tree.leaves(unscale(grads, state.opt_state))))

    def apply(params: Params, updates: Updates, opt_state: OptState) -> Params:
      problems = tree_differences(params, updates, dtypes=False)
      if problems:
        raise _needs_more(f"updates with {listed(problems)}")
      return apply_updates(
        params,
        updates,
        opt_state,
        rounding=rounding,
        key=None if key is None or rounding == "nearest" else jax.random.fold_in(key, _ROUNDING),
      )

    scaled = own_scale(state.opt_state, "").state is not None
    # What is checked beside the gradients is for the loss scale, and no loss to an inner optimizer.
    extra = {"value": loss} | ({"loss": forward} if scaled else {})
    # With the scale outermost, parameters are updated in the branch that is not skipped.
    scaler = scaling_of(tx) if scaled else None
    if scaler is not None:
      update = functools.partial(scaler.update_and_apply, apply=apply)
      params, opt_state = checked_update(tx, update, grads, state, **extra)
    else:
      if not scaled:
        # The optimizer is called as it is, which without a loss scale wants gradients in the dtypes
        # of what it trains: its moments of bfloat16 parameters are bfloat16.
        grads = as_stored(grads, trained_params(state.params, state.opt_state))
      updates, opt_state = checked_update(tx, tx.update, grads, state, **extra)
      params = apply(state.params, updates, opt_state)
    if scaled and not axes:
      check_decision(opt_state, state.opt_state)
    scaling = loss_scaling_metrics(opt_state, before=state.opt_state)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops there, as all counters do.
    new = TrainState(step, params, opt_state, model_state, state.ema, state.rng)
    if ema_decay is not None:
      target = float32_view(trained_params(params, opt_state))
      new = new._replace(ema=_average(state, target, ema_decay, opt_state))
    if scaled:  # Else nothing is checked or skipped.
      # Parameters too: -0.0 leaves them alone, but for subnormals, which a CPU flushes to 0.
      kept = ("step", "model_state", "ema", *(("params",) if scaler is None else ()))
      pair = ({name: getattr(one, name) for name in kept} for one in (new, state))
      new = new._replace(**keep_if_skipped(opt_state, *pair))
    return new, {**metrics, "loss": loss, "grad_norm": norm, **scaling}, all_finite(forward)

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    fix = "Call the step inside the jax.shard_map of that axis. Under automatic sharding"
    check_axes(axes, f"{call}(axis_name={axis_name!r})", call="the step", fix=fix)
    check(state, batch)
    if not max_retries:
      return attempt(state, batch)[:2]
    return _retried(attempt, state, batch, max_retries)

  return jax.jit(
    train_step,
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _average(state: TrainState, new: Params, decay: float, opt_state: OptState) -> Params:
  """Returns the average one step later."""
  # What is trained in windows stays as it is between two updates, and so does this. optax may
  # skip a batch, and then begins no window.
  old, kind, leaves = state.ema, optax.MultiStepsState, jax.tree_util.tree_leaves_with_path
  windows = [(w.micro_batches == 0, w.total) for w in nodes_of(opt_state, AccumulationState)]
  for was, w in zip(nodes_of(state.opt_state, kind), nodes_of(opt_state, kind), strict=True):
    windows.append((jnp.not_equal(w.gradient_step, was.gradient_step), w.acc_grads))
  updated = dict[KeyPath, Array]()
  for ended, total in windows:  # One may be inside of another.
    updated |= {path: updated.get(path, True) & ended for path, _ in leaves(total)}
  if not updated.keys() <= {path for path, _ in leaves(old)}:
    where = "mpjax.make_train_step(ema_decay)"
    expected = "an optimizer that adds up gradients in the tree of the parameters"
    got = "a window of micro-batches inside of what changes the tree, such as optax.flatten"
    fix = "Put it outside of that: mpjax.accumulate_gradients(optax.flatten(inner), every)."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)

  def one(path: KeyPath, e: Array, p: Array) -> Array:
    moved = e + (p - e) * jnp.asarray(1 - decay, e.dtype)
    return jnp.where(updated[path], moved, e) if path in updated else moved

  return jax.tree_util.tree_map_with_path(one, old, new)


def _retried(
  attempt: Callable[..., tuple[TrainState, Metrics, Array]],
  state: TrainState,
  batch: PyTree,
  max_retries: int,
) -> tuple[TrainState, Metrics]:
  """Runs a batch until a step is applied, or `max_retries` more times while that may help."""
  # Each time at a lower scale, hysteresis or not: at the same one the same overflows. It does not
  # help where the forward pass is not finite, which is not scaled; where the scale is at its floor;
  # or where the updates alone were bad. Where no run helped, one was skipped: the batch is to
  # blame, not the scale, which then is as after a single skip.
  where = "mpjax.make_train_step(max_retries)"
  scale = own_scale(state.opt_state, "")
  factor, (low, high) = scale.fields["backoff_factor"], scale.limits
  # The shapes of the metrics are asked for first, and the loop then takes the same trace.
  attempt = jax.jit(attempt, inline=True)
  shapes = jax.eval_shape(attempt, state, batch)[1]
  # Of these only `finite` is read: no step was applied yet.
  nothing = jax.tree.map(lambda x: jnp.full_like(x, 0), shapes)

  # State and metrics, the scale after the first run, the count of runs, and whether no more help.
  def again(carry: tuple[PyTree, ...]) -> Array:
    _, metrics, _, runs, futile = carry
    return ~(metrics["finite"] | futile) & (runs <= max_retries)

  def run(carry: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    state, _, first, runs, _ = carry
    new, metrics, forward = attempt(state, batch)
    before, after = (_scale(s) for s in (state, new))
    first = select(runs == 0, after, first, where)
    futile = (before.scale <= low) | (after.bad_updates > before.bad_updates) | ~forward
    lower = jnp.clip(before.scale * jnp.asarray(factor, jnp.float32), low, high)
    after = after._replace(scale=jnp.where(metrics["finite"], after.scale, lower))
    return _with_scale(new, after), metrics, first, runs + 1, futile

  start = (state, nothing, _scale(state), jnp.zeros((), jnp.int32), jnp.asarray(False))
  last, metrics, first, runs, _ = jax.lax.while_loop(again, run, start)
  last = _with_scale(last, select(metrics["finite"], _scale(last), first, where))
  metrics |= loss_scaling_metrics(last.opt_state, before=state.opt_state)
  return last, {**metrics, "retries": runs - 1}


def _scale(state: TrainState) -> LossScaleState:
  # The step has checked that it is one that moves.
  return cast("LossScaleState", own_scale(state.opt_state, "").state)


def _with_scale(state: TrainState, scale: LossScaleState) -> TrainState:
  own = own_scale(state.opt_state, "")
  return state._replace(opt_state=replace_scale(state.opt_state, own, scale))
