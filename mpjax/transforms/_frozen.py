"""Parameters that a wrapper leaves alone: those with None for a gradient.

Weight decay or momentum would move them by a zero gradient. Where an update is that of several
micro-batches, a None in one of them says nothing yet.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from mpjax._core.trees import is_inexact, is_none
from mpjax._core.types import Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._skip import nothing_like
from mpjax.transforms._state import AccumulationState, MasterWeightsState
from mpjax.transforms._trees import nodes_of, spell_out


def frozen_leaves(given: Iterable[Grads], params: Params) -> PyTree:
  """Returns which parameters have None for a gradient in all of `given`, or None if no one has.

  Without the parameters nothing is known.
  """
  given = list(given)
  if params is None or not any(map(is_none, jax.tree.leaves(given, is_leaf=is_none))):
    return None

  def missing(p: Leaf, *gs: Leaf) -> bool:
    return is_inexact(p) and all(map(is_none, gs))

  try:
    frozen = jax.tree.map(missing, params, *(spell_out(grads, params) for grads in given))
  except ValueError:  # Another tree: the caller says where.
    return None
  return frozen if any(jax.tree.leaves(frozen)) else None


def hold(frozen: PyTree, updates: Updates) -> Updates:
  """Returns `updates` that leave alone what is frozen.

  Args:
    frozen: a tree like the parameters of bools, or of arrays of them, one for each element; or None
      for nothing.
    updates: a tree like it, in which optax may have masked parts.
  """
  if frozen is None:
    return updates

  def kept(f: Leaf, u: Updates) -> Updates:
    if isinstance(f, bool):
      return nothing_like(u) if f else u
    return jax.tree.map(lambda n, x: jnp.where(f, n, x), nothing_like(u), u)

  return jax.tree.map(kept, frozen, updates)


def leave_to_window(frozen: PyTree, grads: Grads, inner_state: OptState) -> tuple[PyTree, Grads]:
  """Returns the parameters that the caller has to leave alone, and the gradients for `inner`.

  What ends a window has the gradients of all its micro-batches to apply, so that a None in the last
  of them says nothing. `mpjax.accumulate_gradients` is given the None and decides; others are given
  a zero, which `grads` has there already.
  """
  windows = (AccumulationState, optax.MultiStepsState)
  if frozen is None or not any(nodes_of(inner_state, window) for window in windows):
    return frozen, grads
  if isinstance(inner_state, (AccumulationState, MasterWeightsState)):
    grads = jax.tree.map(lambda f, g: None if f is True else g, frozen, grads)
  return None, grads
