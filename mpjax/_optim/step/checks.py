"""Checks of the states and the batch of a training step."""

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxValueError, check_type, listed
from mpjax._core.types import OptState, PyTree
from mpjax._jaxpr.compat import varying_axes
from mpjax._optim.find_scale import OwnedScale
from mpjax._optim.optimizer_trees import key_text
from mpjax._optim.step.train_state import TrainState, own_scale

_CALL = "mpjax.make_train_step"
STEP = f"{_CALL}(...): step(state)"


def check_train_state(state: object, batch: PyTree) -> TrainState:
  """Raises unless the first argument of a step is a state."""
  fix = "Make one with mpjax.TrainState.create(params, tx)."
  if isinstance(batch, TrainState):
    fix = "Swap the two: step(state, batch)."
  return check_type(state, TrainState, STEP, expected="a mpjax.TrainState", fix=fix)


def check_moves(scale: OwnedScale, max_retries: int) -> None:
  """Raises unless a loss scale is lower after an overflow."""
  # A retry needs a lower scale, and a constant one never moves.
  if not scale.dynamic:
    expected = "0 with a constant loss scale"
    got = f"{max_retries} with {scale.label!r}"
    fix = "Use DynamicLossScale: the same batch at the same scale overflows again."
    raise MpjaxValueError(f"{_CALL}(max_retries)", expected=expected, got=got, fix=fix)


def check_batch(batch: PyTree, micro_batches: int) -> None:
  """Raises unless a batch can be cut into micro-batches."""
  if micro_batches == 1:
    return
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


def check_decision(new: OptState, old: OptState) -> None:
  """Raises if devices that had one state decide differently, each by its own loss."""
  # Each device decides by its own loss if the flag varies over more axes than before the step. Only
  # a `shard_map` that checks varying values shows this in types. `pmap` and `check_vma=False` do
  # not.
  decisions = [own_scale(x, "").state for x in (new, old)]
  after, before = ({*varying_axes(jax.typeof(x.finite))} for x in decisions if x is not None)
  apart = sorted(after - before)
  if apart:
    where = f"{_CALL}(axis_name=None)"
    expected = f"the name of the axis that the batch is divided over, one of {apart}"
    got = "None inside of a shard_map, where each device would take another step"
    fix = f"Pass axis_name={apart[0]!r}, and gradients, loss and state are averaged over it."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
