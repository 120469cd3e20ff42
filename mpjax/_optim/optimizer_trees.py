"""Trees before and after the inner optimizer of a wrapper, and the choice to skip a step."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.leaves import is_key, raw_value
from mpjax._core.trees import (
  in_low_precision,
  is_array_like,
  is_none,
  low_to_float32,
  pick,
  tree_differences,
)
from mpjax._core.types import (
  Array,
  Class,
  Grads,
  KeyPath,
  Leaf,
  OptState,
  Params,
  PyTree,
  Updates,
  is_inexact,
  is_low_precision,
)
from mpjax._optim.states import MasterWeightsState, S, as_state

T = TypeVar("T")


def nodes_of(tree: PyTree, kind: type[T] | tuple[type[T], ...]) -> list[T]:
  """Returns the nodes and leaves of `tree` that are a `kind`, but not those inside of them."""

  def is_kind(x: PyTree) -> bool:
    return isinstance(x, kind)

  return [x for x in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(x)]


def states_of(opt_state: PyTree, kind: type[S]) -> list[S]:
  """Returns the states of a class in an optimizer state, with arrays in place of variables.

  An `nnx.State`, its pure dict and a checkpoint that was read without a target have mappings in
  place of the classes. They lack states without arrays.
  """
  states = [state for _, state in states_with_path(opt_state, kind)]
  return [jax.tree.map(raw_value, state, is_leaf=is_nnx_variable) for state in states]


def states_with_path(opt_state: PyTree, kind: type[S]) -> list[tuple[KeyPath, S]]:
  """Returns what `states_of` does, each state with its path and in variables, if it is in some."""
  cls: Class = kind

  def is_kind(x: PyTree) -> bool:
    return isinstance(x, cls)

  leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_kind)
  in_classes = [(path, x) for path, x in leaves if is_kind(x)]
  return in_classes or [*_states_in_mapping(opt_state, kind, (), inside=False)]


def _states_in_mapping(
  tree: PyTree, kind: type[S], path: KeyPath, *, inside: bool
) -> Iterator[tuple[KeyPath, S]]:
  """Yields the states of a class in a tree of mappings and sequences, by the names of fields.

  `inside` says that the tree is the state of an optimizer, or a part of a chain of some.
  """
  if isinstance(tree, Mapping) and stands_for(tree, kind, inside=inside):
    yield path, as_state(kind, tree)
    return
  if isinstance(tree, Mapping):
    parts: Iterable[tuple[object, PyTree]] = tree.items()
  elif isinstance(tree, (list, tuple)):
    parts = enumerate(tree)
  else:
    return
  for key, subtree in parts:
    # Only where an optimizer keeps its state may a mapping lack `inner_state`. Elsewhere, it may be
    # a dict of parameters.
    is_position = str(key).isdigit()
    is_inside = key in ("opt_state", "inner_state") or (is_position and inside)
    below = (*path, jax.tree_util.DictKey(key))
    yield from _states_in_mapping(subtree, kind, below, inside=is_inside)


def stands_for(tree: Mapping[Any, PyTree], kind: type[NamedTuple], *, inside: bool) -> bool:
  """Whether a mapping has the fields of a state; `inside` of another, `inner_state` may be missing.

  Elsewhere a parameter may have the name of a field.
  """
  fields = kind._fields
  return fields[0] in tree and set(tree) <= set(fields) and (inside or "inner_state" in tree)


def map_states(f: Callable[[MasterWeightsState], MasterWeightsState], opt_state: T) -> T:
  """Returns `opt_state` with `f` of each `MasterWeightsState` in it."""

  def is_state(x: PyTree) -> bool:
    return isinstance(x, MasterWeightsState)

  return jax.tree.map(lambda x: f(x) if is_state(x) else x, opt_state, is_leaf=is_state)


def key_text(path: KeyPath) -> str:
  """Returns a path as Python writes it, "['layers'][0]", for an error."""
  return jax.tree_util.keystr(path) or "the root"


def at_least_float32(x: Leaf) -> Array:
  """Returns `x` as an array, in float32 if it is floating and narrower (float8 too)."""
  x = jnp.asarray(x)
  return x.astype(jnp.float32) if is_low_precision(x.dtype) else x


def is_by_loss(grads: PyTree, params: Params) -> bool:
  """Whether `grads` are several gradients in a dict by the names of losses."""
  if not isinstance(grads, Mapping):
    return False
  # The names of losses may be those of parameters too, so the keys alone do not tell.
  if not isinstance(params, Mapping) or set(grads) != set(params):
    return True
  # Equinox has None as the gradient of a key.
  structure = functools.partial(jax.tree.structure, is_leaf=is_none)
  return structure(grads) != structure(params)


def sum_of(losses: Iterable[Grads]) -> Grads:
  """Returns the sum of the gradients of several losses, in float32."""

  def add(*grads: Leaf) -> Leaf:
    # The `float0` gradients of integers cannot be added.
    return (
      functools.reduce(jnp.add, map(at_least_float32, grads)) if is_inexact(grads[0]) else grads[0]
    )

  return jax.tree.map(add, *losses)


def as_stored(new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` with floating leaves in the dtype of `old` where that is low precision."""
  if jax.tree.structure(old) != jax.tree.structure(new):
    return new

  def cast(n: Leaf, o: Leaf) -> Leaf:
    return n.astype(o.dtype) if in_low_precision(o) and is_inexact(n) else n

  return jax.tree.map(cast, new, old)


def float32_view(tree: PyTree) -> PyTree:
  """Returns the tree that an inner optimizer sees: in float32, without integers and keys."""
  # Optimizers create moments in the dtype of the parameters, and compute in it. In bfloat16, a
  # decay of 0.999 rounds to 1. In float16, an epsilon of 1e-8 rounds to 0.
  return jax.tree.map(low_to_float32, hide_untrained(tree, tree))


def arrays_only(params: Params) -> Params:
  """Returns `params` with None for leaves that are no arrays, such as functions in Equinox."""
  return jax.tree.map(lambda x: x if is_array_like(x) else None, params)


def hide_untrained(tree: PyTree, params: Params) -> PyTree:
  """Returns `tree` with an `optax.MaskedNode` for each array that is no floating or complex one."""
  # optax leaves out a MaskedNode, as under `optax.masked`. It fails on the `float0` gradients of
  # integers, and on keys. If there is nothing to hide, `tree` may have another structure.
  decisive = arrays_only(params)
  if all(map(is_inexact, jax.tree.leaves(decisive))):
    return tree

  def shown(x: Leaf, p: Leaf) -> Leaf:
    return x if p is None or is_inexact(p) else optax.MaskedNode()

  return jax.tree.map(shown, tree, decisive, is_leaf=is_none)


def align_gradients(grads: Grads, params: Params, where: str) -> Grads:
  """Returns `grads` in the precision of `params`, with untrained parameters in place of None."""
  # `init` created moments from the parameters, so gradients must not change their dtype. A gradient
  # is 64-bit exactly if its parameter is.
  if params is None:
    return grads
  refuse_none(grads, params, where, expected="a gradient for each parameter")
  params = arrays_only(params)
  # Equinox gives None as the gradient of a key or integer, where the tree of `params` has a leaf.
  with contextlib.suppress(ValueError):  # Another tree, which `tree_differences` describes.
    grads = jax.tree.map(lambda g, p: p if g is None else g, grads, params, is_leaf=is_none)
  problems = tree_differences(params, grads, dtypes=False)

  def align(path: KeyPath, p: Leaf, g: Leaf) -> Leaf:
    if not is_inexact(p):
      return g
    if not is_inexact(g):
      problems.append(f"{jnp.result_type(g)} for {jnp.result_type(p)} at {key_text(path)}")
      return g
    # `finfo` of a complex dtype has the bits of one part.
    own, bits = (jnp.finfo(jnp.result_type(x)).bits for x in (g, p))
    if (own == 64) == (bits == 64):
      return g
    return jnp.asarray(g, f"complex{2 * bits}" if jnp.iscomplexobj(g) else f"float{bits}")

  if not problems:
    grads = jax.tree_util.tree_map_with_path(align, params, grads, is_leaf=is_none)
  if problems:
    expected = "gradients with the leaves of params"
    fix = (
      "Differentiate with respect to the very tree that is passed as params, and take the mean "
      "over the examples; for optax.contrib.dpsgd, which does, leave params out."
    )
    raise MpjaxValueError(where, expected=expected, got=listed(problems), fix=fix)
  return grads


def refuse_none(tree: PyTree, params: Params, where: str, *, expected: str) -> None:
  """Raises if `tree` has None in place of a trained parameter, or of a tree with one."""
  problems = []

  def look(path: KeyPath, x: Leaf, param: Params) -> None:
    if x is not None:
      return
    # None may stand in place of an entire subtree of parameters.
    for rest, p in jax.tree_util.tree_leaves_with_path(param):
      if is_inexact(p):
        dtype, shape = jnp.result_type(p), list(jnp.shape(p))
        problems.append(f"None for {dtype}{shape} at {key_text((*path, *rest))}")

  with contextlib.suppress(ValueError):  # Another tree, which the caller reports.
    jax.tree_util.tree_map_with_path(look, tree, params, is_leaf=is_none)
  if problems:
    fix = (
      "Differentiate with respect to all of params, or pass zeros. To freeze parameters, wrap "
      'optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels) or '
      "optax.chain(inner, optax.masked(optax.set_to_zero(), frozen)) instead of inner. What is "
      "None in params, gradients and state alike is left out."
    )
    raise MpjaxValueError(where, expected=expected, got=listed(problems), fix=fix)


def unless_there_before(new: Leaf, old: Leaf) -> Leaf:
  """Returns `new` with 0 for unchanged numbers: an inf that was there before is no overflow."""
  if not is_inexact(new):
    return new
  # NaN is not equal to itself.
  both_nan = jnp.logical_and(jnp.isnan(new), jnp.isnan(old))
  return jnp.where(jnp.logical_or(new == old, both_nan), jnp.zeros_like(new), new)


def differentiated(tree: PyTree) -> PyTree:
  """Returns that part of parameters, or of their gradients, that optax differentiates."""
  # `optax.lookahead` has a pair of parameters. Gradients belong to the fast ones.
  return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def merge_updates(grads: Grads, updates: Updates, params: Params) -> Updates:
  """Returns `updates` with leaves for those that were hidden from the inner optimizer."""
  # `optax.apply_updates` can add a zero of the parameter's dtype. Without parameters, and for keys,
  # the leaf is that of the gradients. For a key without gradient it is None: `mpjax.apply_updates`
  # and Equinox then keep the key, and optax raises.

  def merge(g: Leaf, u: Leaf, p: Leaf = None) -> Leaf:
    if not isinstance(u, optax.MaskedNode):
      return u
    if p is not None and not is_key(jnp.result_type(p)):
      return jnp.zeros(jnp.shape(p), jnp.result_type(p))
    return None if p is not None and is_key(jnp.result_type(g)) else g

  if isinstance(updates, optax.LookaheadParams):
    pairs = ((updates.fast, params.fast), (updates.slow, params.slow))
    return optax.LookaheadParams(*(merge_updates(grads, u, p) for u, p in pairs))
  if not nodes_of(updates, optax.MaskedNode):
    return updates
  return jax.tree.map(merge, grads, updates, *([] if params is None else [arrays_only(params)]))


def strong(x: Leaf) -> Leaf:
  """Returns a leaf of a state as a strongly typed array: else the second step is a new trace."""
  if isinstance(x, jax.Array):
    return jnp.asarray(x, x.dtype) if jax.typeof(x).weak_type else x
  if isinstance(x, (np.ndarray, np.generic)):
    return x if x.dtype == jax.dtypes.float0 else jnp.asarray(x)
  # Whether or not 64-bit is enabled.
  numbers = {bool: jnp.bool_, int: jnp.int32, float: jnp.float32}
  return jnp.asarray(x, numbers[type(x)]) if type(x) in numbers else x


def place_like(params: Params, state: T) -> T:
  """Returns `state` on the devices of `params`, replicated, with a buffer for each array."""

  def is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)

  # A step cannot donate one buffer twice. If it donates a buffer of the parameters with the state,
  # the parameters are deleted.
  used = set(map(id, jax.tree.leaves(params)))

  def own(x: Leaf) -> Leaf:
    if is_concrete(x) and id(x) in used:
      x = jnp.copy(x)
    used.add(id(x))
    return x

  state = jax.tree.map(own, state)
  # `init` creates scalars uncommitted, on the default device. `jit` returns them on the mesh, which
  # is another type of argument. The second step would be compiled again.
  committed = [x.sharding for x in jax.tree.leaves(params) if is_concrete(x) and x.committed]
  meshes = [sharding.mesh for sharding in committed if isinstance(sharding, jax.NamedSharding)]
  if meshes:
    where: jax.sharding.Sharding = jax.NamedSharding(meshes[0], jax.P())
  elif committed and len(committed[0].device_set) == 1:
    where = committed[0]
  else:
    return state

  def place(x: Leaf) -> Leaf:
    if not is_concrete(x) or x.committed:
      return x
    if is_key(x.dtype):  # JAX puts only plain arrays onto the devices of other processes.
      data = jax.device_put(jax.random.key_data(x), where)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, where)

  return jax.tree.map(place, state)


def put_like(new: Array, old: Leaf) -> Array:
  """Returns `new` on the devices, and in the memory, where `old` is."""
  # `device_put` commits an array. An uncommitted state must stay so, or the next step is compiled
  # again.
  is_placed = not isinstance(new, Tracer) and getattr(old, "committed", False)
  return jax.device_put(new, old.sharding) if is_placed else new


def leaves_with_path(tree: PyTree) -> list[tuple[KeyPath, Leaf]]:
  """Returns the leaves of a tree; of NNX these are variables, but for those that hold no array."""
  # Optimizers hide a parameter with an `optax.MaskedNode`. In NNX, a variable holds that node.
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_variable)
  return [(path, x) for path, x in leaves if jax.tree.leaves(x)]


def full_like(x: Array, number: Array | float) -> Array:
  """Returns an array of one number with the shape (of a vmapped state), dtype and place of `x`."""
  # Equal shape, dtype and placement keep the compiled step. `jnp.full_like` fails for an array in
  # host memory, so concrete arrays take another way.
  is_traced = isinstance(x, Tracer)
  return jnp.full_like(x, number) if is_traced else put_like(jnp.full(x.shape, number, x.dtype), x)


OptimizerStep: TypeAlias = Callable[[OptState], tuple[Updates, OptState]]


def step_or_skip(condition: Array, step: OptimizerStep, old: OptState) -> tuple[Updates, OptState]:
  """Returns `step(old)`, or updates that change nothing and the old state."""
  # Outside of `jit`, `cond` would compile both branches at each call, since they are new functions.
  traced = isinstance(condition, Tracer)
  if not traced and condition:
    return step(old)
  # `jit` caches the trace, so that `eval_shape` and the branch of `cond` share it.
  step = jax.jit(step, inline=True) if traced else step
  updates, new = jax.eval_shape(step, old)

  def varying_like(x: Leaf, own: object, other: jax.ShapeDtypeStruct) -> Leaf:
    # Inside a `shard_map`, both branches must return types that vary over the same axes. A `where`
    # between two arrays varies over the axes of both.
    if own == other or not jnp.issubdtype(other.dtype, jnp.number):
      return x
    return jnp.where(False, jnp.full_like(other, 0), x)

  def skip(old: OptState) -> tuple[Updates, OptState]:
    unchanged = jax.tree.map(varying_like, old, jax.eval_shape(lambda: old), new)
    return nothing_like(updates), unchanged

  return jax.lax.cond(condition, step, skip, old) if traced else (nothing_like(updates), old)


def step_or_select(
  applied: Array | None, step: OptimizerStep, old: OptState
) -> tuple[Updates, OptState]:
  """Returns what `step_or_skip` does; where both are computed anyway, selects from them."""
  # None means `NoLossScale`: every step is applied.
  if applied is None:
    return step(old)
  traced = isinstance(applied, Tracer)
  cpu = compiled_for_cpu() if traced else False
  # On a CPU the branch below is taken only if the step applies, so it need not select. A constant
  # True lets XLA drop the `where`.
  keep = jnp.logical_or(applied, cpu)

  def selected(old: OptState) -> tuple[Updates, OptState]:
    updates, new = step(old)
    # One call selects an update and its moments by one mask, so that XLA fuses them into a kernel.
    return pick(keep, (updates, new), (nothing_like(updates), old))

  if not traced:
    return selected(old)
  # On other devices the condition is the constant True. XLA removes the `cond` and keeps the
  # `where`.
  return step_or_skip(jnp.logical_or(applied, jnp.logical_not(cpu)), selected, old)


def nothing_like(updates: Updates) -> Updates:
  """Returns updates that leave all bits of parameters alone: p + -0.0 is p, -0.0 + 0.0 is not."""
  # Uses only shape and dtype: `updates` may come from `jax.eval_shape`.

  def one(u: Leaf) -> Array:
    zero = complex(-0.0, -0.0) if jnp.issubdtype(u.dtype, jnp.complexfloating) else -0.0
    return jnp.full_like(u, zero if jnp.issubdtype(u.dtype, jnp.inexact) else 0)

  return jax.tree.map(one, updates)


def compiled_for_cpu() -> Array:
  """Returns whether the step is compiled for a CPU, a constant once it is compiled."""
  # On a CPU, XLA computes one result per loop. If the new state and the updates both read the old
  # state, it copies a donated buffer before it overwrites it. A branch needs no choice between old
  # and new, and therefore no copies. A GPU writes all results in one pass, and would have to wait
  # for the host to take a branch.
  return jax.lax.platform_dependent(cpu=lambda: jnp.bool_(True), default=lambda: jnp.bool_(False))
