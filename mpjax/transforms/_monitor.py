"""The monitor: zero gradients and lost updates, counted in the state of an optimizer."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of
from mpjax._core.leaves import changes_nothing, is_nonzero
from mpjax._core.trees import is_inexact, pick
from mpjax._core.types import Array, Grads, KeyPath, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import check_inner, check_params, check_state
from mpjax.transforms._loss_scaling import not_outermost
from mpjax.transforms._state import plain_array, scales_in
from mpjax.transforms._trees import arrays_only, differentiated, nodes_of, place_like


class MonitorState(NamedTuple):
  """The state of `mpjax.monitor`.

  Args:
    counts: int32 of shape (4,) for each parameter, by its path, of the last step that was applied:
      elements, zero gradients, nonzero updates, lost updates.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)})
  >>> isinstance(state, mpjax.states.MonitorState), state.counts["w"].dtype
  (True, dtype('int32'))
  """

  counts: dict[str, Array]
  inner_state: OptState


def monitor(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it counts, for each parameter, zero gradients and lost updates.

  Put it outermost, around `mpjax.loss_scaling` and `mpjax.master_weights`, where parameters are
  as they are stored; what it wraps works as it would alone. `mpjax.monitor_counts` returns the
  counts of the last step that was applied.

  Args:
    inner: the optimizer, with a loss scale or without.

  Returns:
    An optax transformation with the updates of `inner`. Its state is a `MonitorState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `update`: the state is another's, or there
      is an `apply`.
    MpjaxValueError: `update`: there are no parameters.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(1e-3), mpjax.StaticLossScale(1)))
  >>> params = {"lora_a": jnp.full(3, 1e5)}
  >>> grads = {"lora_a": jnp.asarray([1.0, 0.0, 80.0])}
  >>> updates, opt_state = tx.update(grads, tx.init(params), params)
  >>> {key: int(n) for key, n in mpjax.monitor_counts(opt_state)["lora_a"].items()}
  {'size': 3, 'zero_gradients': 1, 'updates': 2, 'lost_updates': 1}
  """
  where = "mpjax.monitor(inner)"
  inner = check_inner(inner, where)

  def init(params: Params) -> MonitorState:
    counts = {name: jnp.zeros((4,), jnp.int32) for name in _named(params)}
    return MonitorState(place_like(params, counts), inner.init(params))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MonitorState]:
    old = check_state(state, MonitorState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    if extra_args.get("apply") is not None:
      raise not_outermost("one inside of mpjax.monitor")
    new_updates, new = inner.update(updates, old.inner_state, params, **extra_args)
    scales = scales_in(new)
    by_loss = isinstance(updates, Mapping) and set(updates) == {one.name for one in scales}
    if by_loss and jax.tree.structure(updates) != jax.tree.structure(params):
      updates = functools.reduce(functools.partial(jax.tree.map, jnp.add), updates.values())
    counts = _count(updates, arrays_only(params), new_updates, old.counts)
    for state in (one.state for one in scales):
      counts = counts if state is None else pick(state.finite, counts, old.counts)
    return new_updates, MonitorState(counts, new)

  return optax.GradientTransformationExtraArgs(init, update)


def _named(params: Params) -> list[str]:
  """Returns the paths of the parameters that are trained; those of NNX come in variables."""
  is_variable = lambda x: plain_array(x) is not x  # noqa: E731
  leaves = jax.tree_util.tree_leaves_with_path(differentiated(params), is_leaf=is_variable)
  return [_name(path) for path, x in leaves if is_inexact(plain_array(x))]


def _name(path: KeyPath) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".") or "params"


def _count(
  grads: Grads, params: Params, updates: Updates, counted: Iterable[str]
) -> dict[str, Array]:
  """Returns the counts of a step, for the parameters as they are stored."""
  each: dict[str, Array] = {}

  def note(path: KeyPath, p: Leaf, g: Leaf, u: Leaf) -> None:
    if not is_inexact(p):
      return
    p, g, u = map(jnp.asarray, (p, g, u))
    wide = jnp.promote_types(p.dtype, u.dtype)
    new = (p.astype(wide) + u.astype(wide)).astype(p.dtype)
    lost = changes_nothing(p, new, u.astype(wide))
    sums = _sums(jnp.logical_not(_nonzero(g)), _nonzero(u), lost)
    each[_name(path)] = jnp.stack([jnp.full((), p.size, jnp.int32), *sums])

  trees = map(differentiated, (params, grads, updates))
  jax.tree_util.tree_map_with_path(note, *trees)
  # In the order of the old ones: a dict of another order is another tree to `jax.lax.cond`.
  return {name: each[name] for name in counted}


def _sums(*masks: Array) -> Sequence[Array]:
  """Returns how many elements of each mask are true, in one pass over the arrays they come from."""
  numbers = tuple(mask.astype(jnp.int32) for mask in masks)
  zeros = tuple(np.int32(0) for _ in masks)

  def added(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    return tuple(x + y for x, y in zip(a, b, strict=True))

  return jax.lax.reduce(numbers, zeros, added, tuple(range(masks[0].ndim)))


def _nonzero(x: Array) -> Array:
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return jnp.logical_or(is_nonzero(jnp.real(x)), is_nonzero(jnp.imag(x)))
  return is_nonzero(x)


def monitor_counts(opt_state: OptState) -> dict[str, dict[str, Array]]:
  """Returns what `mpjax.monitor` counted in the last applied step.

  Args:
    opt_state: a state that holds that of `mpjax.monitor`, or several for parts of the tree, after
      an `update`.

  Returns:
    A dict for each parameter, by its path ("Dense_0.kernel"), of int32 arrays of shape ():

    - `size`: how many elements it has;
    - `zero_gradients`: how many of its gradients are zero. Many of them in float16 mean underflow:
      a larger loss scale brings them back;
    - `updates`: how many of its updates are not zero;
    - `lost_updates`: how many of these change nothing, since `param + update` rounds to `param`.
      With `mpjax.master_weights` none does: what is too small for a parameter stays in its master.

  Raises:
    MpjaxTypeError: the state keeps no counts.
    MpjaxValueError: it has several of one parameter.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)})
  >>> {key: int(n) for key, n in mpjax.monitor_counts(opt_state)["w"].items()}
  {'size': 0, 'zero_gradients': 0, 'updates': 0, 'lost_updates': 0}
  """
  states = nodes_of(opt_state, MonitorState)
  if not states:
    raise MpjaxTypeError(
      "mpjax.monitor_counts(opt_state)",
      expected="a state that keeps counts",
      got=f"{kind_of(opt_state)} without a monitor",
      fix="Write tx = mpjax.monitor(mpjax.loss_scaling(inner)), and make the state with its init.",
    )
  each = [item for state in states for item in state.counts.items()]
  if len(dict(each)) < len(each):
    raise MpjaxValueError(
      "mpjax.monitor_counts(opt_state)",
      expected="monitors of separate parts of one tree, as in optax.multi_transform",
      got=f"{len(states)} that count the same parameters",
      fix="Pass the state of one optimizer alone.",
    )
  keys = ("size", "zero_gradients", "updates", "lost_updates")
  return {
    path: {key: plain_array(counts)[..., i] for i, key in enumerate(keys)} for path, counts in each
  }
