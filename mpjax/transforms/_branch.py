"""Taking one of two branches, of which only one is to run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._tree import is_array_like
from mpjax._types import Array, PyTree


def branch(
  condition: Array,
  on_true: Callable[[PyTree], PyTree],
  on_false: Callable[[PyTree], PyTree],
  operand: PyTree,
) -> PyTree:
  """Returns one of two functions of `operand`; `jax.lax.cond`, or outside of `jit` a plain call.

  `cond` would compile both branches again at each call, since they are new functions each time.
  """
  if isinstance(condition, Tracer):
    return jax.lax.cond(condition, on_true, on_false, operand)
  return on_true(operand) if condition else on_false(operand)


def nothing_like(updates: PyTree) -> PyTree:
  """Returns updates that leave every parameter's bits alone: p + -0.0 is p, and -0.0 + 0.0 is not.

  Args:
    updates: arrays, or what `jax.eval_shape` says of them.
  """
  return jax.tree.map(lambda u: jnp.full_like(u, nothing(u.dtype)), updates)


def unchanged(old: PyTree, shapes: PyTree) -> PyTree:
  """Returns `old`, as what the other branch returns: varying over the same axes of a `shard_map`.

  Args:
    old: a tree of arrays.
    shapes: what `jax.eval_shape` says of the other branch.
  """

  def one(x: Any, other: Any) -> Any:
    if not is_array_like(x) or not jnp.issubdtype(other.dtype, jnp.number):
      return x
    return jnp.where(False, jnp.full_like(other, 0), x)

  return jax.tree.map(one, old, shapes)


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
