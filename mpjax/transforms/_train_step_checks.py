"""What a training step may be created from, and called with."""

import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import REFUSALS, MpjaxError, MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.trees import check_alike, tree_differences
from mpjax._core.types import Array, Function, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax._core.validators import (
  check_callable,
  check_flag,
  check_int,
  check_type,
  check_value,
  wrong_type,
)
from mpjax.transforms._checks import init_structure
from mpjax.transforms._masters import has_split
from mpjax.transforms._train_state import TrainState, own_scale
from mpjax.transforms._trees import key_text


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
  label = own_scale(state.opt_state, f"{call}: step(state)").says
  if max_retries and not label.dynamic:
    raise MpjaxValueError(
      "mpjax.make_train_step(max_retries)",
      expected="0 with a loss scale that does not move",
      got=f"{max_retries} with {label.config!r}",
      fix="Use DynamicLossScale: the same batch at the same scale overflows again.",
    )
  if rounding == "stochastic" and state.rng is None:
    raise MpjaxValueError(
      "mpjax.make_train_step(rounding='stochastic'): step(state): rng",
      expected="a PRNG key in the state",
      got="None",
      fix="Use TrainState.create(..., rng=jax.random.key(0)).",
    )
  if rounding == "stochastic" and has_split(state.opt_state):
    raise MpjaxValueError(
      "mpjax.make_train_step(rounding='stochastic'): step(state): opt_state",
      expected="no master: the parameters are its rounding to nearest",
      got="the state of mpjax.master_weights",
      fix="Use one of the two: mpjax.master_weights, or stochastic rounding without it.",
    )
  if accumulate > 1:
    _check_batch(batch, accumulate)


def check_shardings(shardings: PyTree, state: TrainState) -> None:
  """Raises unless `shardings` has an entry for each part of `state`."""
  try:
    jax.tree.broadcast(shardings, state, is_leaf=lambda x: x is None)
  except ValueError as error:
    raise MpjaxValueError(
      "mpjax.make_train_step(state_shardings)",
      expected="the structure of the state, or of its upper part",
      got=f"another one ({' '.join(str(error).split())[:300]})",
      fix="Pass jax.tree.map(lambda x: x.sharding, state) of the state that you pass.",
    ) from error


def checked_update(
  tx: optax.GradientTransformationExtraArgs, grads: Grads, state: TrainState, **extra: PyTree
) -> tuple[Updates, OptState]:
  """Returns what `tx.update` does, and raises if it fails or gives another kind of state."""
  try:
    result, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
  except (MpjaxError, jax.errors.JAXTypeError):
    raise
  except REFUSALS as error:
    _check_own_state(tx, state, error)
    raise _needs_more(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
  if jax.tree.structure(opt_state) != jax.tree.structure(state.opt_state):
    _check_own_state(tx, state, None)
  check_alike(
    opt_state,
    state.opt_state,
    "mpjax.make_train_step(tx): the state of the optimizer",
    expected="the structure, shapes and dtypes that it had before the step",
    fix="Parameters stored in low precision need mpjax.master_weights, or a loss scale other "
    "than NoLossScale, for their moments to be float32.",
  )
  return result, opt_state


def check_updates(params: Params, updates: Updates) -> None:
  """Raises unless the optimizer has made updates like the parameters."""
  problems = tree_differences(params, updates, dtypes=False)
  if problems:
    raise _needs_more(f"updates with {listed(problems)}")


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


def _check_own_state(
  tx: optax.GradientTransformationExtraArgs, state: TrainState, error: Exception | None
) -> None:
  """Raises if the state is that of another optimizer."""
  own = init_structure(tx, state.params)
  if own is not None and own != jax.tree.structure(state.opt_state):
    raise MpjaxTypeError(
      "mpjax.make_train_step(tx): step(state)",
      expected="a state that was created with this very tx",
      got=f"one of another optimizer, {jax.tree.structure(state.opt_state)}"[:500],
      fix="Give TrainState.create and make_train_step the same tx, wrapped by mpjax.loss_scaling.",
    ) from error


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


def check_arguments(
  loss_fn: Function,
  tx: object,
  accumulate: object,
  max_retries: object,
  ema_decay: object,
  donate: object,
) -> tuple[int, int]:
  """Returns `accumulate` and `max_retries`; raises if an argument of `make_train_step` is wrong."""
  call = "mpjax.make_train_step"
  fix = "Pass the function itself."
  check_callable(loss_fn, f"{call}(loss_fn)", expected="a function", fix=fix)
  if not callable(getattr(tx, "update", None)):
    fix = "Pass mpjax.loss_scaling(optax.adamw(1e-3))."
    raise wrong_type(tx, f"{call}(tx)", expected="an optax transformation", fix=fix)
  parts = check_int(accumulate, f"{call}(accumulate)", least=1, fix="1 does not cut the batch.")
  retries = check_int(
    max_retries, f"{call}(max_retries)", least=0, fix="0 never runs a batch again."
  )
  check_flag(donate, f"{call}(donate)")
  if ema_decay is None:
    return parts, retries
  where, fix = f"{call}(ema_decay)", "Pass a number such as 0.999."
  if not isinstance(ema_decay, float):
    raise wrong_type(ema_decay, where, expected="a float or None", fix=fix)
  expected, fix = "a number in [0, 1)", "0.999 averages over about 1000 steps."
  check_value(ema_decay, 0 <= ema_decay < 1, where, expected=expected, fix=fix)
  return parts, retries
