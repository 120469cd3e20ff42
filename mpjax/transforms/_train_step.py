"""A full training step: everything that it changes commits together, or not at all."""

import math
from collections.abc import Callable, Hashable
from typing import Literal, TypeAlias, cast

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
  wrong_type,
)
from mpjax._core.leaves import path_text
from mpjax._core.together import sum_of_squares
from mpjax._core.trees import all_finite, check_alike, select, tree_differences
from mpjax._core.types import (
  Array,
  Grads,
  KeyPath,
  Leaf,
  OptState,
  Params,
  PyTree,
  Updates,
)
from mpjax.transforms._apply_updates import apply_updates, check_rounding
from mpjax.transforms._checks import check_axes, init_structure
from mpjax.transforms._gradients import (
  IntegerState,
  LossFn,
  Metrics,
  batch_gradients,
  check_integer_state,
  check_signature,
)
from mpjax.transforms._loss_scale import (
  INT32_MAX,
  AccumulationState,
  LossScaleState,
  LossScalingState,
  replace_scale,
)
from mpjax.transforms._loss_scaling import AxisName
from mpjax.transforms._masters import MasterWeightsState, merged_masters
from mpjax.transforms._metrics import loss_scaling_metrics, select_tree
from mpjax.transforms._train_state import TrainState, own_scale, trained_params
from mpjax.transforms._trees import as_stored, float32_view, key_text, nodes_of
from mpjax.transforms._value_and_grad import unscale


def check_call(
  state: object,
  batch: PyTree,
  accumulate: int,
  max_retries: int,
  ema_decay: float | None,
  rounding: str,
) -> None:
  """Raises unless a step with these settings takes `state` and `batch`."""
  call = "mpjax.make_train_step(...)"
  expected, fix = "a mpjax.TrainState", "Make one with mpjax.TrainState.create(params, tx)."
  fix = "Swap the two: step(state, batch)." if isinstance(batch, TrainState) else fix
  state = check_type(state, TrainState, f"{call}: step(state)", expected=expected, fix=fix)
  has_average = not (isinstance(state.ema, tuple) and not state.ema)
  if has_average != (ema_decay is not None):
    raise MpjaxValueError(
      f"{call}: step(state): ema",
      expected="an average in the state exactly if ema_decay is given",
      got=f"ema_decay={ema_decay} and {'one' if has_average else 'none'}",
      fix="Use TrainState.create(..., ema=True) together with make_train_step(ema_decay=0.999).",
    )
  scale = own_scale(state.opt_state, f"{call}: step(state)")
  if max_retries and not scale.dynamic:
    raise MpjaxValueError(
      "mpjax.make_train_step(max_retries)",
      expected="0 with a loss scale that does not move",
      got=f"{max_retries} with {scale.label!r}",
      fix="Use DynamicLossScale: the same batch at the same scale overflows again.",
    )
  if rounding == "stochastic" and state.rng is None:
    raise MpjaxValueError(
      "mpjax.make_train_step(rounding='stochastic'): step(state): rng",
      expected="a PRNG key in the state",
      got="None",
      fix="Use TrainState.create(..., rng=jax.random.key(0)).",
    )
  if rounding == "stochastic" and nodes_of(state.opt_state, MasterWeightsState):
    raise MpjaxValueError(
      "mpjax.make_train_step(rounding='stochastic'): step(state): opt_state",
      expected="no master: the parameters are its rounding to nearest",
      got="the state of mpjax.master_weights",
      fix="Use one of the two: mpjax.master_weights, or stochastic rounding without it.",
    )
  if accumulate > 1:
    _check_batch(batch, accumulate)


def checked_update(
  tx: optax.GradientTransformationExtraArgs, grads: Grads, state: TrainState, **extra: PyTree
) -> tuple[Updates, OptState]:
  """Returns what `tx.update` does, and raises if it fails or gives another kind of state."""
  result, opt_state, failure = None, None, None
  try:
    result, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
  except (MpjaxError, jax.errors.JAXTypeError):
    raise
  except REFUSALS as error:
    failure = error
  structure = jax.tree.structure(state.opt_state)
  if jax.tree.structure(opt_state) != structure:
    own = init_structure(tx, state.params)
    if own is not None and own != structure:
      raise MpjaxTypeError(
        "mpjax.make_train_step(tx): step(state)",
        expected="a state that was created with this very tx",
        got=f"one of another optimizer, {structure}"[:500],
        fix="Give TrainState.create and make_train_step the same tx, wrapped by "
        "mpjax.loss_scaling.",
      ) from failure
  if failure is not None:
    got = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    raise _needs_more(got) from failure
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
    fix="What evaluates the loss by itself (lbfgs and other line searches, SAM in opaque mode) "
    "or takes gradients of another shape (dpsgd, lookahead) has to be called in a loop of your "
    "own: mpjax.value_and_grad, and tx.update with the arguments that it wants.",
  )


def check_decision(new: OptState, old: OptState) -> None:
  """Raises if devices that had one state decide differently, each by its own loss."""
  # A `shard_map` with `check_vma=False`, and a `pmap`, do not tell.
  decisions = [own_scale(x, "").state for x in (new, old)]
  after, before = (scale.finite for scale in decisions if scale is not None)
  names = jax.sharding.get_abstract_mesh().manual_axes
  apart = [name for name in names if _varies(after, name) and not _varies(before, name)]
  if apart:
    raise MpjaxValueError(
      "mpjax.make_train_step(axis_name=None)",
      expected=f"the name of the axis that the batch is divided over, one of {apart}",
      got="None inside of a shard_map: each device would take a step of its own",
      fix=f"Pass axis_name={apart[0]!r}, and gradients, loss and state are averaged over it.",
    )


def _varies(x: Array, axis: Hashable) -> bool:
  try:
    jax.lax.pcast(x, axis, to="varying")
  except ValueError:
    return True
  return False


def _check_batch(batch: PyTree, accumulate: int) -> None:
  where = f"mpjax.make_train_step(accumulate={accumulate}): step(batch)"
  problems = []
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  paths = [(key_text(path), x) for path, x in leaves]
  for path, x in paths:
    shape, parts = jnp.shape(x), accumulate * _devices_of_rows(x)
    if not shape or shape[0] % parts:
      problems.append(f"shape {list(shape)} at {path}")
  if not problems and len({jnp.shape(x)[0] for _, x in paths}) > 1:
    raise MpjaxValueError(
      where,
      expected="leaves with one first axis, that of the examples: all are cut along it",
      got=listed([f"shape {list(jnp.shape(x))} at {path}" for path, x in paths]),
      fix="What belongs to the entire batch (a mask, class weights) is no part of it: let loss_fn "
      "close over it, or keep it in model_state. What has several rows for each example can be "
      "reshaped to one.",
    )
  if problems:
    raise MpjaxValueError(
      where,
      expected=f"leaves whose first axis can be cut into {accumulate} micro-batches (each of "
      "which fills all devices that the rows are sharded over)",
      got=listed(problems),
      fix="Choose a batch size that is a multiple, and drop or pad the last batch.",
    )


def _devices_of_rows(x: Leaf) -> int:
  """How many devices the type of `x` says that its first axis is cut over."""
  sharding = jax.typeof(x).sharding
  axes = sharding.spec[0] if len(sharding.spec) else None
  names = axes if isinstance(axes, tuple) else (axes,)
  return math.prod(sharding.mesh.shape[name] for name in names if name is not None)


Tries: TypeAlias = tuple[TrainState, Metrics, LossScaleState, Array, Array]
"""State and metrics, the scale after the first run, the count of runs, and whether no more help."""

_ROUNDING = 2**32 - 1
"""Folded into a step's key for its rounding; micro-batches and devices count from 0."""


def make_train_step(
  loss_fn: LossFn,
  tx: optax.GradientTransformationExtraArgs,
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
  bits, and only the loss scale moves. 16-bit parameters with `mpjax.master_weights` are set to
  their rounded masters. `loss_fn` is traced once. Its key is folded from `state.rng` and
  `state.step` (and the device, under `axis_name`; and the micro-batch), so that a skipped step
  leaves no trace in later ones either.

  Args:
    loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss
      is floating of shape (), a mean over the batch; `metrics` is a dict of arrays; `model_state`
      keeps its structure, shapes and dtypes; `rng` is None if the state has none.
    tx: the optimizer, with `mpjax.loss_scaling` around all of it (`master_weights` may be around
      that). With `NoLossScale` nothing is checked and no step is skipped; `StaticLossScale(1)`
      checks without scaling. The loss is passed as `value=`, for `optax.contrib`'s schedules.
    accumulate: cut the batch, leaves of shape (n, ...), into this many micro-batches, which are run
      one after the other inside the step; their float32 gradients are added and divided once. Row i
      belongs to micro-batch i % accumulate, so that a batch sharded over devices stays where it is.
    axis_name: the mapped axis, or axes, of a `jax.shard_map` or `jax.pmap` that the step is called
      inside of, with replicated parameters. Gradients, loss, floating model state and metrics are
      averaged over it in float32 (integers are summed in metrics), also where `loss_fn` has
      averaged the loss itself. To donate is then up to the `jax.jit` around it. Under automatic
      sharding leave it out.
    integer_state: what becomes, under `axis_name`, of integers and booleans in `model_state` that
      `loss_fn` changes. "sum" adds the changes of all devices to the old value, for what counts
      rows or tokens and is not set back; "same" is for what is the same on all devices, such as a
      count of steps. Or a dict from paths of leaves or branches to these, `{"counts/tokens":
      "sum"}`. Of booleans both are true where one device says so.
    max_retries: run the same batch again, up to this many times, each time at a lower scale,
      whatever the hysteresis. Off by default: a lost batch is cheaper. A batch whose loss or model
      state is not finite is not run again, since no scale can help there; if no run helped, it
      counts as one skipped step.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step; of
      parameters in `mpjax.accumulate_gradients`, after each update.
    donate: let the new state take over the memory of the old one, which must not be used again.
    rounding: how 16-bit parameters without a master are rounded, see `mpjax.apply_updates`. The
      keys of "stochastic" are folded from `state.rng`.
    state_shardings: where the new state is to be, `jax.tree.map(lambda x: x.sharding, state)`.
      With sharded parameters XLA may otherwise choose another sharding for leaves that it computes
      from them, and compile the next step again.

  Returns:
    `step(state, batch) -> (state, metrics)`. The metrics are those of `loss_fn` (floating ones
    averaged over micro-batches in float32, integers and booleans summed as int32), those of
    `mpjax.loss_scaling_metrics` with `scale_changed`, `loss` and `grad_norm` (both float32 of shape
    (), unscaled, and not finite when they were not; the norm also where a sum of squares is not),
    and `retries` (int32) if `max_retries` is given.

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
  call = "mpjax.make_train_step"
  fix = "Pass the function itself."
  check_callable(loss_fn, f"{call}(loss_fn)", expected="a function", fix=fix)
  if not callable(getattr(tx, "update", None)):
    fix = "Pass mpjax.loss_scaling(optax.adamw(1e-3))."
    raise wrong_type(tx, f"{call}(tx)", expected="an optax transformation", fix=fix)
  fix = "1 does not cut the batch."
  accumulate = check_int(accumulate, f"{call}(accumulate)", least=1, fix=fix)
  fix = "0 never runs a batch again."
  max_retries = check_int(max_retries, f"{call}(max_retries)", least=0, fix=fix)
  check_flag(donate, f"{call}(donate)")
  if ema_decay is not None:
    where, fix = f"{call}(ema_decay)", "Pass a number such as 0.999."
    if not isinstance(ema_decay, float):
      raise wrong_type(ema_decay, where, expected="a float or None", fix=fix)
    expected, fix = "a number in [0, 1)", "0.999 averages over about 1000 steps."
    check_value(ema_decay, 0 <= ema_decay < 1, where, expected=expected, fix=fix)
  check_signature(loss_fn)
  check_integer_state(integer_state)
  check_rounding(call, rounding)
  several = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  axes: tuple[Hashable, ...] = () if axis_name is None else tuple(several)

  def attempt(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Array]:
    # The last says whether loss and model state were finite.
    key = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    rng = key
    if axes and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(axes))
    loss, model_state, metrics, grads, watched = batch_gradients(
      loss_fn, state, batch, rng, accumulate, axes, integer_state
    )
    forward = (loss, watched)
    norm = jnp.sqrt(sum_of_squares(jax.tree.leaves(unscale(grads, state.opt_state))))

    def apply(params: Params, updates: Updates, opt_state: OptState) -> Params:
      problems = tree_differences(params, updates, dtypes=False)
      if problems:
        raise _needs_more(f"updates with {listed(problems)}")
      return apply_updates(
        params,
        updates,
        master=merged_masters(opt_state),
        rounding=rounding,
        key=None if key is None or rounding == "nearest" else jax.random.fold_in(key, _ROUNDING),
      )

    scaled = own_scale(state.opt_state, "").state is not None
    extra = {"loss": forward, "value": loss}
    # With the scale outermost, parameters are updated in the branch that is not skipped.
    applied = scaled and isinstance(state.opt_state, LossScalingState)
    if applied:
      params, opt_state = checked_update(tx, grads, state, **extra, _apply=apply)
    else:
      if not scaled:
        # The optimizer is called as it is, which without a loss scale wants gradients in the dtypes
        # of what it trains: its moments of bfloat16 parameters are bfloat16.
        grads = as_stored(grads, trained_params(state.params, state.opt_state))
      updates, opt_state = checked_update(tx, grads, state, **extra)
      params = apply(state.params, updates, opt_state)
    if scaled and not axes:
      check_decision(opt_state, state.opt_state)
    scaling = loss_scaling_metrics(opt_state, before=state.opt_state)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops there, as all counters do.
    new = TrainState(step, params, opt_state, model_state, state.ema, state.rng)
    if ema_decay is not None:
      target = float32_view(trained_params(params, opt_state))
      new = new._replace(ema=_average(state.ema, target, ema_decay, opt_state))
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
    try:
      jax.tree.broadcast(state_shardings, state, is_leaf=lambda x: x is None)
    except ValueError as error:
      raise MpjaxValueError(
        f"{call}(state_shardings)",
        expected="the structure of the state, or of its upper part",
        got=f"another one ({' '.join(str(error).split())[:300]})",
        fix="Pass jax.tree.map(lambda x: x.sharding, state) of the state that you pass.",
      ) from error
    if not max_retries:
      return attempt(state, batch)[:2]
    return _retried(attempt, state, batch, max_retries)

  return jax.jit(
    train_step,
    donate_argnums=(0,) if donate else (),
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _average(old: Params, new: Params, decay: float, opt_state: OptState) -> Params:
  """Returns the average one step later."""
  # What `mpjax.accumulate_gradients` trains stays as it is between two updates, and so does this.
  updated = {
    path_text(path): window.micro_batches == 0
    for window in nodes_of(opt_state, AccumulationState)
    for path, _ in jax.tree_util.tree_leaves_with_path(window.total)
  }

  def one(path: KeyPath, e: Array, p: Array) -> Array:
    moved = e + (p - e) * jnp.asarray(1 - decay, e.dtype)
    flag = updated.get(path_text(path))
    return moved if flag is None else jnp.where(flag, moved, e)

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

  def again(carry: Tries) -> Array:
    _, metrics, _, runs, futile = carry
    failed = jnp.logical_not(jnp.logical_or(metrics["finite"], futile))
    return jnp.logical_and(failed, runs <= max_retries)

  def run(carry: Tries) -> Tries:
    state, _, first, runs, _ = carry
    new, metrics, forward = attempt(state, batch)
    before, after = (_scale(s) for s in (state, new))
    first = select(runs == 0, after, first, where)
    stuck = jnp.logical_or(before.scale <= low, after.bad_updates > before.bad_updates)
    futile = jnp.logical_or(stuck, jnp.logical_not(forward))
    lower = jnp.clip(before.scale * jnp.asarray(factor, jnp.float32), low, high)
    after = after._replace(scale=jnp.where(metrics["finite"], after.scale, lower))
    return _with_scale(new, after), metrics, first, runs + 1, futile

  zero, no = jnp.zeros((), jnp.int32), jnp.asarray(False)
  start = (state, nothing, _scale(state), zero, no)
  last, metrics, first, runs, _ = jax.lax.while_loop(again, run, start)
  last = _with_scale(last, select(metrics["finite"], _scale(last), first, where))
  metrics |= loss_scaling_metrics(last.opt_state, before=state.opt_state)
  return last, {**metrics, "retries": runs - 1}


def _scale(state: TrainState) -> LossScaleState:
  scale = own_scale(state.opt_state, "").state
  return cast("LossScaleState", scale)  # The step has checked that it is one that moves.


def _with_scale(state: TrainState, scale: LossScaleState) -> TrainState:
  own = own_scale(state.opt_state, "")
  return state._replace(opt_state=replace_scale(state.opt_state, own, scale))
