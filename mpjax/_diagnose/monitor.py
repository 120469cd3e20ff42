"""Counts of zero gradients and lost updates, kept beside the state of an optimizer."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of
from mpjax._core.leaves import changes_nothing, is_nonzero, raw_value
from mpjax._core.trees import pick
from mpjax._core.types import Array, Grads, Leaf, OptState, Params, PyTree, Updates, is_inexact
from mpjax._optim.find_scale import scales_in
from mpjax._optim.loss_scale import INT32_MAX, sum_of_counts
from mpjax._optim.optimizer_trees import (
  at_least_float32,
  differentiated,
  is_by_loss,
  leaves_with_path,
  place_like,
  states_of,
  sum_of,
)
from mpjax._optim.states import MonitorState
from mpjax._optim.wrapper_checks import check_inner, check_params, check_state

_COUNTS = ("size", "zero_gradients", "updates", "lost_updates")
"""The counts of a parameter, in the order in which `_count` stacks them."""


def monitor(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that it counts zero gradients and lost updates of each parameter.

  Put it outermost, because it compares updates with the stored parameters. It does not change
  the updates. `mpjax.states.monitor_counts` returns the counts of the last step that updated the
  parameters. A step is not counted if all updates are zero although a gradient is not, because it
  was skipped, or was a micro-batch of an open window.

  Args:
    inner: the optimizer, with a loss scale or without.

  Returns:
    An optax transformation with the updates of `inner`. Its state is a `MonitorState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `update`: the state is another's.
    MpjaxValueError: `update`: there are no parameters.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(1e-3), mpjax.SkipNonfinite()))
  >>> params = {"lora_a": jnp.full(3, 1e5)}
  >>> grads = {"lora_a": jnp.asarray([1.0, 0.0, 80.0])}
  >>> updates, opt_state = tx.update(grads, tx.init(params), params)
  >>> {key: int(n) for key, n in mpjax.states.monitor_counts(opt_state)["lora_a"].items()}
  {'size': 3, 'zero_gradients': 1, 'updates': 2, 'lost_updates': 1}
  """
  where = "mpjax.monitor(inner)"
  inner = check_inner(inner, where)

  def init(params: Params) -> MonitorState:
    # Any single leaf will do in place of the dict of counts.
    zeros: PyTree = jnp.zeros(len(_COUNTS), jnp.int32)
    if not _stands_for_parameters(params):
      names = [name for name, x in _by_name(params).items() if is_inexact(x)]
      zeros = {name: jnp.zeros(len(_COUNTS), jnp.int32) for name in names}
    return place_like(params, MonitorState(zeros, inner.init(params)))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MonitorState]:
    old = check_state(state, MonitorState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    new_updates, new = inner.update(updates, old.inner_state, params, **extra_args)
    scales = scales_in(new)
    # Gradients of several losses are counted as `inner` sees them, as their sum.
    names = {one.name for one in scales}
    if is_by_loss(updates, params) and set(updates) == names:
      updates = sum_of(updates.values())
    counts = _count(updates, params, new_updates, old.counts)
    counts = pick(_is_update(counts), counts, old.counts)
    # A skipped step has updates of -0.0, which are no news. Keep the counts of the applied step.
    for one in scales:
      if one.state is not None:
        counts = pick(one.state.applied, counts, old.counts)
    return new_updates, MonitorState(counts, new)

  return optax.GradientTransformationExtraArgs(init, update)


def _stands_for_parameters(params: Params) -> bool:
  """Whether `params` is a node that `optax.tree_map_params` puts where the parameters would be."""
  # It has no children, and is no empty container.
  has_children = jax.tree_util.treedef_children(jax.tree.structure(params))
  is_leaf = jax.tree_util.all_leaves([params])
  return not (has_children or is_leaf or isinstance(params, (Mapping, Sequence, NoneType)))


def _by_name(tree: PyTree) -> dict[str, Leaf]:
  """Returns the arrays of a tree by their paths as text. Different paths have different texts."""
  # Names are joined by dots. A key with a dot or bracket is quoted, so that no two paths share a
  # text.
  text = jax.tree_util.keystr

  def part(key: Any) -> str:
    plain = text((key,), simple=True)
    return text((key,)) if "." in plain or "[" in plain else plain

  leaves = leaves_with_path(differentiated(tree))
  return {".".join(map(part, path)) or "params": raw_value(x) for path, x in leaves}


def _count(
  grads: Grads, params: Params, updates: Updates, counted: Iterable[str]
) -> dict[str, Array]:
  """Returns the counts of a step, for the parameters as they are stored."""

  def nonzero(x: Array) -> Array:
    # By bits: a comparison with 0 on a CPU takes subnormal numbers for zero.
    return is_nonzero(jnp.real(x)) | is_nonzero(jnp.imag(x))

  def count(p: Leaf, g: Leaf, u: Leaf) -> Array:
    p, g, u = map(jnp.asarray, (p, g, u))
    # Add as `mpjax.apply_updates` does: in float32, then rounded to the dtype of the parameter.
    # Sums of 16-bit numbers are those of `optax.apply_updates` too, bit for bit.
    wide = jnp.promote_types(at_least_float32(p).dtype, at_least_float32(u).dtype)
    new = (p.astype(wide) + u.astype(wide)).astype(p.dtype)
    lost = changes_nothing(p, new, u.astype(wide))
    masks = jnp.logical_not(nonzero(g)), nonzero(u), lost
    # One variadic reduction, not three sums: each array that the masks read is read once.
    numbers = tuple(mask.astype(jnp.int32) for mask in masks)
    zeros = (np.int32(0),) * len(masks)
    sums = jax.lax.reduce(numbers, zeros, added, tuple(range(p.ndim)))
    return jnp.stack([jnp.full((), min(p.size, INT32_MAX), jnp.int32), *sums])

  trees = tuple(map(_by_name, (params, grads, updates)))
  # In the order of the old counts, since a dict of another order is another tree to `jax.lax.cond`.
  return {name: count(*(tree[name] for tree in trees)) for name in counted}


def added(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
  """Returns sums of counts. They stop at 2^31 - 1, since a parameter may have more elements."""
  return tuple(map(sum_of_counts, a, b))


def _is_update(counts: Mapping[str, Array]) -> Array:
  """Whether a step with these counts has updated the parameters, or has had nothing to do.

  A micro-batch of an open window has gradients, and updates of zero.
  """
  rows = [jnp.stack([size - zeros, updates]) for size, zeros, updates, _ in counts.values()]
  gradients, updates = functools.reduce(jnp.maximum, rows, np.zeros(2, np.int32))
  return jnp.logical_or(updates > 0, gradients == 0)


def monitor_counts(opt_state: OptState) -> dict[str, dict[str, Array]]:
  """Return the counts of `mpjax.monitor` for the last step that updated the parameters.

  Args:
    opt_state: a state that holds one of `mpjax.monitor`, or several for parts of the tree; an
      `nnx.Optimizer`, or its `nnx.State`.

  Returns:
    A dict for each parameter, by its path ("Dense_0.kernel"), of int32 arrays of shape ():

    - `size`: how many elements it has;
    - `zero_gradients`: how many of its gradients are zero: underflow, where they are float16;
    - `updates`: how many of its updates are not zero;
    - `lost_updates`: how many of these change nothing, since `param + update` rounds to `param`.

  Raises:
    MpjaxTypeError: the state keeps no counts.
    MpjaxValueError: it has several of one parameter.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> list(mpjax.states.monitor_counts(mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)}))["w"])
  ['size', 'zero_gradients', 'updates', 'lost_updates']
  """
  where = "mpjax.states.monitor_counts(opt_state)"
  if not (states := states_of(opt_state, MonitorState)):
    expected, got = "a state that keeps counts", f"{kind_of(opt_state)} without a monitor"
    fix = "Write tx = mpjax.monitor(mpjax.loss_scaling(inner)), and make the state with its init."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # Several states count parts of one tree, as in `optax.multi_transform`. No path may be in two.
  each = [item for state in states for item in state.counts.items()]
  if len(dict(each)) < len(each):
    expected = "monitors of separate parts of one tree, as in optax.multi_transform"
    got = f"{len(states)} that count the same parameters"
    fix = "Pass the state of one optimizer alone."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return {path: {key: counts[..., i] for i, key in enumerate(_COUNTS)} for path, counts in each}
