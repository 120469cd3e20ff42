"""Parameters that a wrapper leaves alone, where an update may be that of several micro-batches."""

from typing import Any, NamedTuple

import jax
import optax

from mpjax._types import Array, PyTree


class AccumulateState(NamedTuple):
  """The state of `mpjax.accumulate`."""

  micro_batches: Array  # int32: those in the open window
  updates_done: Array  # int32: updates of the inner optimizer, which its schedules count as well
  total: PyTree  # float32: the sum of the window's gradients; -0.0 where there was none yet
  inner_state: Any
  value: Any = None  # float32: the sum of the window's value=, if inner reads it


class MasterWeightsState(NamedTuple):
  """The state of `mpjax.master_weights`.

  `master` is like the parameters, with None in place of those that are not stored in half: they are
  their own master, and a second copy would be memory for nothing.
  """

  master: PyTree  # float32
  inner_state: Any


def leave_to_window(frozen: PyTree, grads: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
  """Returns the parameters that the caller has to leave alone, and the gradients for `inner`.

  What ends a window has the gradients of all its micro-batches to apply, so that a None in the last
  of them says nothing. `mpjax.accumulate` is given the None and decides; others are given a zero.

  Args:
    frozen: what `hold` takes.
    grads: the gradients, with zeros there.
    inner_state: the state of what is inside.
  """

  def is_window(x: Any) -> bool:
    return isinstance(x, (AccumulateState, optax.MultiStepsState))

  if frozen is None or not any(map(is_window, jax.tree.leaves(inner_state, is_leaf=is_window))):
    return frozen, grads
  if isinstance(inner_state, (AccumulateState, MasterWeightsState)):
    grads = jax.tree.map(lambda f, g: None if f is True else g, frozen, grads)
  return None, grads
