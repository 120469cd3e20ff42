"""Taking one of two branches, of which only one is to run."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.types import Array, PyTree

Step: TypeAlias = Callable[[PyTree], tuple[PyTree, PyTree]]
"""From an old state to updates and a new state."""


def step_or_skip(condition: Array, step: Step, old: PyTree) -> tuple[PyTree, PyTree]:
  """Returns `step(old)`, or updates that change nothing and the old state.

  By `jax.lax.cond`, but outside of `jit` by a plain call: `cond` would compile both branches again
  each time, since they are new functions.

  Args:
    condition: scalar bool, whether to step.
    step: computes updates of any tree, and a state like `old`.
    old: the state.
  """
  if not isinstance(condition, Tracer):
    if condition:
      return step(old)
    shapes = jax.eval_shape(step, old)
    return nothing_like(shapes[0]), old
  seen = []

  def noted(old: PyTree) -> tuple[PyTree, PyTree]:
    out = step(old)
    seen.append(jax.eval_shape(lambda: out))
    return out

  def skip(old: PyTree) -> tuple[PyTree, PyTree]:
    # `cond` traces one branch after the other; if it begins with this one, that costs a trace more.
    shapes = seen[0] if seen else jax.eval_shape(step, old)
    return nothing_like(shapes[0]), _unchanged(old, shapes[1])

  return jax.lax.cond(condition, noted, skip, old)


def nothing_like(updates: PyTree) -> PyTree:
  """Returns updates that leave every parameter's bits alone: p + -0.0 is p, and -0.0 + 0.0 is not.

  Args:
    updates: arrays, or what `jax.eval_shape` says of them.
  """
  return jax.tree.map(lambda u: jnp.full_like(u, nothing(u.dtype)), updates)


def hold(frozen: PyTree, updates: PyTree) -> PyTree:
  """Returns `updates` that leave alone what is frozen.

  Args:
    frozen: a tree like the parameters of bools, or of arrays of them, one for each element; or None
      for nothing.
    updates: a tree like it, in which optax may have masked parts.
  """
  if frozen is None:
    return updates

  def kept(f: Any, u: PyTree) -> PyTree:
    if isinstance(f, bool):
      return nothing_like(u) if f else u
    return jax.tree.map(lambda n, x: jnp.where(f, n, x), nothing_like(u), u)

  return jax.tree.map(kept, frozen, updates)


def _unchanged(old: PyTree, shapes: PyTree) -> PyTree:
  """Returns `old`, as what the other branch returns: varying over the same axes of a `shard_map`.

  Args:
    old: a tree of arrays.
    shapes: what `jax.eval_shape` says of the other branch.
  """

  def one(x: Any, own: Any, other: Any) -> Any:
    if own == other or not jnp.issubdtype(other.dtype, jnp.number):
      return x
    return jnp.where(False, jnp.full_like(other, 0), x)

  return jax.tree.map(one, old, jax.eval_shape(lambda: old), shapes)


def nothing(dtype: Any) -> Any:
  """Returns the number that changes nothing when it is added."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return complex(-0.0, -0.0)
  return -0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def one_at_a_time() -> Array:
  """Whether the program is compiled for CPU, known when it is compiled.

  There XLA does not compute several results in one loop. Where both the new state and the updates
  read the old state, a donated buffer is then copied before it is overwritten; in a branch of its
  own the choice between old and new is gone, and with it the copies. A GPU writes all results in
  one pass, and would have to wait for the host to take a branch.
  """
  return jax.lax.platform_dependent(
    cpu=lambda: jnp.asarray(True), default=lambda: jnp.asarray(False)
  )


def stored_first(grads: PyTree) -> PyTree:
  """Returns `grads`, each computed and stored on a CPU before anything reads it.

  Else XLA for CPU keeps the transposed gradient of a matrix product and copies it for each of its
  readers (the branch, the check, the norm), and all copies of all gradients are there at once.
  """
  return jax.lax.platform_dependent(
    grads,
    cpu=lambda tree: jax.tree.map(jax.lax.optimization_barrier, tree),
    default=lambda tree: tree,
  )
