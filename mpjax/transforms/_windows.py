"""Parameters that a wrapper leaves alone, where an update may be that of several micro-batches."""

from typing import Any, NamedTuple

import jax
import optax

from mpjax._core.types import Array, PyTree


class AccumulationState(NamedTuple):
  """The state of `mpjax.accumulate_gradients`.

  Args:
    micro_batches: int32 of shape (), how many are in the open window.
    updates_done: int32 of shape (), the updates of the inner optimizer, which schedules count too.
    total: float32 in the shapes of the parameters, the sum of the window's gradients; -0.0 where
      there was none yet.
    inner_state: the state of the inner optimizer.
    value: float32 of shape (), the sum of the window's `value=`; None unless `inner` takes it.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.accumulate_gradients(optax.sgd(0.1), 4).init(jnp.ones(2))
  >>> isinstance(state, mpjax.AccumulationState), int(state.micro_batches), state.total.dtype
  (True, 0, dtype('float32'))
  """

  micro_batches: Array
  updates_done: Array
  total: PyTree
  inner_state: Any
  value: Any = None


class MasterWeightsState(NamedTuple):
  """The state of `mpjax.master_weights`.

  Args:
    master: float32 in the shapes of the parameters, None for those that are not stored in low
      precision: they are their own master, and a second copy would be memory for nothing.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16))
  >>> isinstance(state, mpjax.MasterWeightsState), state.master.dtype
  (True, dtype('float32'))
  """

  master: PyTree
  inner_state: Any


def leave_to_window(frozen: PyTree, grads: PyTree, inner_state: PyTree) -> tuple[PyTree, PyTree]:
  """Returns the parameters that the caller has to leave alone, and the gradients for `inner`.

  What ends a window has the gradients of all its micro-batches to apply, so that a None in the last
  of them says nothing. `mpjax.accumulate_gradients` is given the None and decides; others are given
  a zero.

  Args:
    frozen: what `hold` takes.
    grads: the gradients, with zeros there.
    inner_state: the state of what is inside.
  """

  def is_window(x: Any) -> bool:
    return isinstance(x, (AccumulationState, optax.MultiStepsState))

  if frozen is None or not any(map(is_window, jax.tree.leaves(inner_state, is_leaf=is_window))):
    return frozen, grads
  if isinstance(inner_state, (AccumulationState, MasterWeightsState)):
    grads = jax.tree.map(lambda f, g: None if f is True else g, frozen, grads)
  return None, grads
