"""Skipping a step: updates that change nothing, and the old state.

Once here for all: by a branch that is not taken, by a selection, or by whichever of the two is
better where the step is compiled for.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.trees import check_alike, pick
from mpjax._core.types import Array, DType, Grads, Leaf, OptState, PyTree, Updates

Step: TypeAlias = Callable[[OptState], tuple[Updates, OptState]]
"""From an old state to updates and a new state."""

_STATE_FIX = (
  "Let inner return the same structure, shapes and dtypes as its init makes: nothing is cast or "
  "broadcast here. optax.monitor begins with an empty state; optax.snapshot measures in init."
)


def step_or_skip(condition: Array, step: Step, old: OptState) -> tuple[Updates, OptState]:
  """Returns `step(old)`, or updates that change nothing and the old state."""
  # By `jax.lax.cond`, but outside of `jit` by a plain call: `cond` would compile both branches
  # again each time, since they are new functions.
  if not isinstance(condition, Tracer):
    if condition:
      return step(old)
    shapes = jax.eval_shape(step, old)
    return nothing_like(shapes[0]), old
  seen = []

  def noted(old: OptState) -> tuple[Updates, OptState]:
    out = step(old)
    seen.append(jax.eval_shape(lambda: out))
    return out

  def skip(old: OptState) -> tuple[Updates, OptState]:
    # `cond` traces one branch after the other; if it begins with this one, that costs a trace more.
    shapes = seen[0] if seen else jax.eval_shape(step, old)
    return nothing_like(shapes[0]), _unchanged(old, shapes[1])

  return jax.lax.cond(condition, noted, skip, old)


def step_or_select(
  applied: Array | None, step: Step, old: OptState, where: str
) -> tuple[Updates, OptState]:
  """Returns what `step_or_skip` does; where both are computed anyway, selects from them."""
  # Nothing is skipped where `applied` is None. `where` is for the error about a new state that is
  # unlike the old one.
  if applied is None:
    return step(old)
  traced = isinstance(applied, Tracer)
  cpu = compiled_for_cpu() if traced else False
  # In a branch that is only taken when the step applies, there is nothing to select.
  keep = jnp.logical_or(applied, cpu)

  def selected(old: OptState) -> tuple[Updates, OptState]:
    updates, new = step(old)
    check_alike(new, old, where, fix=_STATE_FIX)
    # In one call: what shares a mask, an update and the moments it comes from, shares a kernel.
    return pick(keep, (updates, new), (nothing_like(updates), old))

  if not traced:
    return selected(old)
  return step_or_skip(jnp.logical_or(applied, jnp.logical_not(cpu)), selected, old)


def nothing_like(updates: Updates) -> Updates:
  """Returns updates that leave all bits of parameters alone: p + -0.0 is p, -0.0 + 0.0 is not."""
  # `updates` may be what `jax.eval_shape` says of them.
  return jax.tree.map(lambda u: jnp.full_like(u, nothing(u.dtype)), updates)


def _unchanged(old: PyTree, shapes: PyTree) -> PyTree:
  """Returns `old` varying over the same axes of a `shard_map` as the other branch's `shapes`."""

  def one(x: Leaf, own: object, other: jax.ShapeDtypeStruct) -> Leaf:
    if own == other or not jnp.issubdtype(other.dtype, jnp.number):
      return x
    return jnp.where(False, jnp.full_like(other, 0), x)

  return jax.tree.map(one, old, jax.eval_shape(lambda: old), shapes)


def nothing(dtype: DType) -> complex:
  """Returns the number that changes nothing when it is added."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return complex(-0.0, -0.0)
  return -0.0 if jnp.issubdtype(dtype, jnp.floating) else 0


def compiled_for_cpu() -> Array:
  """Returns whether the step is compiled for a CPU, a constant once it is compiled."""
  # There XLA does not compute several results in one loop. Where both the new state and the updates
  # read the old state, a donated buffer is then copied before it is overwritten; in a branch of its
  # own the choice between old and new is gone, and with it the copies. A GPU writes all results in
  # one pass, and would have to wait for the host to take a branch.
  return jax.lax.platform_dependent(
    cpu=lambda: jnp.asarray(True), default=lambda: jnp.asarray(False)
  )


def stored_first(grads: Grads) -> Grads:
  """Returns `grads`, each computed and stored on a CPU before its consumers run."""
  # Else XLA for CPU keeps the transposed gradient of a matmul and copies it for each of its
  # consumers (the branch, the check, the norm), and all copies of all gradients are there at once.
  return jax.lax.platform_dependent(
    grads,
    cpu=lambda tree: jax.tree.map(jax.lax.optimization_barrier, tree),
    default=lambda tree: tree,
  )
