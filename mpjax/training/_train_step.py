"""A whole training step: everything that it changes commits together, or not at all."""

import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._errors import MpjaxTypeError, MpjaxValueError, message
from mpjax._jaxpr import walk
from mpjax._loss_scale_config import INT32_MAX
from mpjax._types import Array, PyTree
from mpjax.training._gradients import LossFn, Metrics, batch_gradients
from mpjax.training._train_state import TrainState, averaged
from mpjax.transforms import apply_updates, commit, loss_scaling_metrics, unscale
from mpjax.transforms._loss_scale_access import find_scale
from mpjax.transforms._loss_scaling import AxisName
from mpjax.transforms._master_weights import merged_masters


def make_train_step(
  loss_fn: LossFn,
  tx: Any,
  *,
  accumulate: int = 1,
  axis_name: AxisName | None = None,
  max_retries: int = 0,
  ema_decay: float | None = None,
  donate: bool = True,
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
    tx: the optimizer, wrapped by `mpjax.loss_scaling`: anywhere, but for one loss.
    accumulate: cut the batch into this many micro-batches, which are run one after the other inside
      the step; their float32 gradients are added and divided once. Row i belongs to micro-batch
      i % accumulate, so that a batch sharded over devices stays where it is. One bad micro-batch
      skips the whole step.
    axis_name: the mapped axis, or axes, over which gradients, loss, floating model state and
      metrics are averaged in float32 (integers are summed in metrics). The step is then called
      inside of a `jax.shard_map` or `jax.pmap` with replicated parameters; to donate is then up to
      the `jax.jit` around it. Under automatic sharding leave it out.
    max_retries: run the same batch again, up to this many times, at the lower scale that a skipped
      step leaves behind (NNabla's behaviour). Off by default: a lost batch is cheaper.
    ema_decay: `ema = ema_decay * ema + (1 - ema_decay) * params` after each applied step.
    donate: let the new state take over the memory of the old one, which must not be used again.

  Returns:
    `step(state, batch) -> (state, metrics)`. The metrics are those of `loss_fn` (floating ones
    averaged over micro-batches in float32, integers and booleans summed as int32), those of
    `mpjax.loss_scaling_metrics`, `loss` and `grad_norm` (both float32, unscaled, and not finite
    when they were not), and `retries` (int32) if `max_retries` is given.
    `mpjax.check_progress(state)` on the host, now and then, raises after too many skipped steps in
    a row.

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
  _check_arguments(loss_fn, tx, accumulate, max_retries, ema_decay, donate)
  several = isinstance(axis_name, (tuple, list))
  axes: tuple[Hashable, ...] = () if axis_name is None else (axis_name,)
  axes = tuple(axis_name) if several else axes

  def attempt(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
    if axes and rng is not None:
      rng = jax.random.fold_in(rng, jax.lax.axis_index(axes))
    loss, model_state, metrics, grads = batch_gradients(
      loss_fn, state, batch, rng, accumulate, axes
    )
    norm = _norm(unscale(grads, state.opt_state))
    updates, opt_state = tx.update(grads, state.opt_state, state.params, loss=(loss, model_state))
    params = apply_updates(state.params, updates, master=merged_masters(opt_state))
    scaling = loss_scaling_metrics(opt_state)
    step = jnp.minimum(state.step, INT32_MAX - 1) + 1  # Stops there, as all counters do.
    new = TrainState(step, params, opt_state, model_state, state.ema, state.rng)
    if ema_decay is not None:
      target = averaged(params, opt_state)
      new = new._replace(ema=_average(state.ema, target, ema_decay))
    if find_scale(opt_state, "", None).state is not None:  # Else nothing is checked or skipped.
      kept = ("step", "model_state", "ema")  # The optimizer has seen to the rest.
      pair = ({name: getattr(one, name) for name in kept} for one in (new, state))
      new = new._replace(**commit(scaling["finite"], *pair))
    return new, {**metrics, "loss": loss, "grad_norm": norm, **scaling}

  def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    _check_axes(axes)
    _check_call(state, batch, accumulate, max_retries, ema_decay)
    _warn_without_float16(loss_fn, state, batch)
    if not max_retries:
      return attempt(state, batch)
    return _retried(attempt, state, batch, max_retries)

  return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def _norm(grads: PyTree) -> Array:
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)]
  return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _average(old: PyTree, new: PyTree, decay: float) -> PyTree:
  return jax.tree.map(lambda e, p: e + (p - e) * jnp.asarray(1 - decay, e.dtype), old, new)


def _retried(
  attempt: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
  state: TrainState,
  batch: PyTree,
  max_retries: int,
) -> tuple[TrainState, Metrics]:
  """Runs a batch until a step is applied, or `max_retries` more times."""
  shapes = jax.eval_shape(attempt, state, batch)[1]
  # Of these only `finite` is read: no step was applied yet.
  nothing = jax.tree.map(lambda x: jnp.full_like(x, 0), shapes)

  def again(carry: tuple[TrainState, Metrics, Array]) -> Array:
    _, metrics, runs = carry
    return jnp.logical_and(jnp.logical_not(metrics["finite"]), runs <= max_retries)

  def run(carry: tuple[TrainState, Metrics, Array]) -> tuple[TrainState, Metrics, Array]:
    state, _, runs = carry
    return *attempt(state, batch), runs + 1

  zero = jnp.zeros((), jnp.int32)
  state, metrics, runs = jax.lax.while_loop(again, run, (state, nothing, zero))
  return state, {**metrics, "retries": runs - 1}


def _warn_without_float16(loss_fn: LossFn, state: TrainState, batch: PyTree) -> None:
  """Warns, when the step is traced, if a dynamic scale protects no float16."""
  if not find_scale(state.opt_state, "", None).config.startswith("dynamic"):
    return
  program = jax.make_jaxpr(loss_fn)(state.params, state.model_state, batch, state.rng)
  try:
    float16 = any(_in_float16(visit.eqn) for visit in walk(program))
  except MpjaxValueError:  # A primitive unknown to this version: it may hold anything.
    return
  if not float16:
    warnings.warn(
      "mpjax.make_train_step: the loss scale is dynamic, but nothing in loss_fn is computed in "
      "float16. bfloat16 and float32 have the range to do without: NoLossScale() saves the work, "
      "StaticLossScale(1) skips bad steps without scaling.",
      UserWarning,
      stacklevel=2,
    )


def _in_float16(eqn: Any) -> bool:
  return any(getattr(v.aval, "dtype", None) == jnp.float16 for v in (*eqn.invars, *eqn.outvars))


def _check_axes(axes: tuple[Hashable, ...]) -> None:
  for name in axes:
    try:
      jax.lax.axis_size(name)
    except NameError as error:
      names = jax.sharding.get_abstract_mesh().axis_names
      raise MpjaxValueError(
        message(
          f"mpjax.make_train_step(axis_name={name!r})",
          expected="the name of an axis that is mapped where the step is called",
          got=f"none of that name ({error}; the axes of the mesh here: {names})",
          fix="Call the step inside the jax.shard_map of that axis. Under automatic sharding leave "
          "axis_name out: one program already sees all devices.",
        )
      ) from error


def _check_call(
  state: Any,
  batch: PyTree,
  accumulate: int,
  max_retries: int,
  ema_decay: float | None,
) -> None:
  call = "mpjax.make_train_step(...)"
  if not isinstance(state, TrainState):
    raise MpjaxTypeError(
      message(
        f"{call}: step(state)",
        expected="a mpjax.TrainState",
        got=f"a {type(state).__name__}",
        fix="Make one with mpjax.TrainState.create(params, tx).",
      )
    )
  has_average = not (isinstance(state.ema, tuple) and not state.ema)
  if has_average != (ema_decay is not None):
    raise MpjaxValueError(
      message(
        f"{call}: step(state): ema",
        expected="an average in the state exactly if ema_decay is given",
        got=f"ema_decay={ema_decay} and {'one' if has_average else 'none'}",
        fix="Use TrainState.create(..., ema=True) together with make_train_step(ema_decay=0.999).",
      )
    )
  config = find_scale(state.opt_state, f"{call}: step(state)", None).config
  if max_retries and not config.startswith("dynamic"):
    raise MpjaxValueError(
      message(
        "mpjax.make_train_step(max_retries)",
        expected="0 with a loss scale that does not move",
        got=f"{max_retries} with {config!r}",
        fix="Use DynamicLossScale: the same batch at the same scale overflows again.",
      )
    )
  if accumulate > 1:
    _check_batch(batch, accumulate)


def _check_batch(batch: PyTree, accumulate: int) -> None:
  problems = []
  for path, x in jax.tree_util.tree_leaves_with_path(batch):
    shape, parts = jnp.shape(x), accumulate * _devices_of_rows(x)
    if not shape or shape[0] % parts:
      problems.append(f"shape {list(shape)} at {jax.tree_util.keystr(path) or 'the root'}")
  if problems:
    raise MpjaxValueError(
      message(
        f"mpjax.make_train_step(accumulate={accumulate}): step(batch)",
        expected=f"leaves whose first axis can be cut into {accumulate} micro-batches (each of "
        "which fills all devices that the rows are sharded over)",
        got="; ".join(problems),
        fix="Choose a batch size that is a multiple, and drop or pad the last batch.",
      )
    )


def _devices_of_rows(x: Any) -> int:
  """How many devices the type of `x` says that its first axis is cut over."""
  sharding = jax.typeof(x).sharding
  axes = sharding.spec[0] if len(sharding.spec) else None
  names = axes if isinstance(axes, tuple) else (axes,)
  return math.prod(sharding.mesh.shape[name] for name in names if name is not None)


def _check_arguments(
  loss_fn: Any, tx: Any, accumulate: Any, max_retries: Any, ema_decay: Any, donate: Any
) -> None:
  call = "mpjax.make_train_step"
  wrong: list[tuple[bool, str, Any, str, str]] = [
    (not callable(loss_fn), "loss_fn", loss_fn, "a function", "Pass the function itself."),
    (
      not callable(getattr(tx, "update", None)),
      *("tx", tx, "an optax transformation", "Pass mpjax.loss_scaling(optax.adamw(1e-3))."),
    ),
    (not _is_int(accumulate), "accumulate", accumulate, "an integer", "Pass a Python int."),
    (not _is_int(max_retries), "max_retries", max_retries, "an integer", "Pass a Python int."),
    (
      ema_decay is not None and not isinstance(ema_decay, float),
      *("ema_decay", ema_decay, "a float or None", "Pass a number such as 0.999."),
    ),
    (not isinstance(donate, bool), "donate", donate, "a bool", "Pass True or False."),
  ]
  for is_wrong, name, value, expected, fix in wrong:
    if is_wrong:
      got = f"{value!r} of type {type(value).__name__}"
      raise MpjaxTypeError(message(f"{call}({name})", expected=expected, got=got, fix=fix))
  out_of_range = [
    (accumulate < 1, "accumulate", accumulate, "at least 1", "1 does not cut the batch."),
    (max_retries < 0, "max_retries", max_retries, "at least 0", "0 never runs a batch again."),
    (
      ema_decay is not None and not 0 <= ema_decay < 1,
      *("ema_decay", ema_decay, "a number in [0, 1)", "0.999 averages over about 1000 steps."),
    ),
  ]
  for is_wrong, name, value, expected, fix in out_of_range:
    if is_wrong:
      where = f"{call}({name})"
      raise MpjaxValueError(message(where, expected=expected, got=repr(value), fix=fix))


def _is_int(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)
