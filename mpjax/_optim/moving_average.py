"""The moving average of parameters, which moves when they do."""

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxValueError
from mpjax._core.types import Array, KeyPath, OptState, Params, PyTree
from mpjax._optim.optimizer_trees import nodes_of
from mpjax._optim.states import AccumulationState


def move_average(
  average: Params, params: Params, decay: float, *, before: OptState, after: OptState
) -> Params:
  """Returns the average one step later, of parameters in float32.

  A parameter that is trained in windows of micro-batches is constant inside of a window. So is its
  average.
  """
  ended = _ended_windows(before, after)
  # A wrapper such as `optax.flatten` accumulates in another tree, whose windows fit no parameter.
  paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(average)}
  if not ended.keys() <= paths:
    where = "mpjax.make_train_step(ema_decay)"
    expected = "an optimizer that adds up gradients in the tree of the parameters"
    got = "a window of micro-batches inside a wrapper that changes the tree, such as optax.flatten"
    fix = "Put it outside: mpjax.accumulate_gradients(optax.flatten(inner), every)."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)

  def next_leaf(path: KeyPath, old: Array, param: Array) -> Array:
    # Subtract in Python: in float32, 1 - 0.9999 has only 11 correct bits.
    moved = old + (param - old) * jnp.asarray(1 - decay, old.dtype)
    return jnp.where(ended[path], moved, old) if path in ended else moved

  return jax.tree_util.tree_map_with_path(next_leaf, average, params)


def _ended_windows(before: OptState, after: OptState) -> dict[KeyPath, Array]:
  """Returns whether a step has ended the window of each parameter that is trained in windows."""
  ended: dict[KeyPath, Array] = {}
  for has_ended, total in _windows(before, after):
    for path, _ in jax.tree_util.tree_leaves_with_path(total):
      # A window may be inside of another. Then both have to end.
      ended[path] = ended.get(path, True) & has_ended
  return ended


def _windows(before: OptState, after: OptState) -> list[tuple[Array, PyTree]]:
  """Returns whether each window has ended, and the sums of gradients in it."""
  # A window that is full resets its count to 0.
  ours = nodes_of(after, AccumulationState)
  windows = [(window.micro_batches == 0, window.total) for window in ours]
  pairs = zip(*(nodes_of(state, optax.MultiStepsState) for state in (before, after)), strict=True)
  for old, new in pairs:
    # `MultiSteps` counts 0 micro-batches after a batch that it skipped, too. Its count of updates
    # moves only if a window has ended.
    windows.append((jnp.not_equal(new.gradient_step, old.gradient_step), new.acc_grads))
  return windows
