"""What the wrappers do to trees before and after the inner optimizer sees them."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.paths import is_key
from mpjax._core.trees import is_array_like, is_half, is_inexact, is_none, tree_differences
from mpjax._core.types import PyTree


def float32_view(tree: PyTree) -> PyTree:
  """Returns the tree as the inner optimizer sees it.

  Half leaves become float32: moments of half parameters would be half, where 0.999 rounds to 1
  and an epsilon of 1e-8 to 0. What is neither floating nor complex becomes an
  `optax.MaskedNode`, as under `optax.masked`: optimizers fail on `float0` and on keys.
  """

  def see(x: Any) -> Any:
    if not is_array_like(x):
      return x
    if not is_inexact(x):
      return optax.MaskedNode()
    return jnp.asarray(x, jnp.float32) if is_half(x) else x

  return jax.tree.map(see, tree)


def arrays_only(params: PyTree) -> PyTree:
  """Returns `params` with None for what is no array: the functions in a model of Equinox."""
  return jax.tree.map(lambda x: x if is_array_like(x) else None, params)


def hide_untrained(tree: PyTree, params: PyTree = None) -> PyTree:
  """Returns `tree` with an `optax.MaskedNode` for each array that is no floating or complex one.

  Args:
    tree: the parameters, or a tree like them.
    params: the parameters, to decide by them.
  """

  def hide(x: Any, p: Any) -> Any:
    return optax.MaskedNode() if is_array_like(p) and not is_inexact(p) else x

  decisive = tree if params is None else arrays_only(params)
  return jax.tree.map(hide, tree, decisive)


def fill_gradients(grads: PyTree, params: PyTree) -> PyTree:
  """Returns what `align_gradients` does, without a check: trees that differ come back as given."""
  if params is None:
    return grads
  try:
    grads = _spell_out(grads, params)
    return jax.tree.map(_align_leaf, grads, arrays_only(params), is_leaf=is_none)
  except ValueError:
    return grads


def keep_half(old: PyTree, new: PyTree, params: PyTree) -> PyTree:
  """Returns the state `new` with half leaves where `old` has them, if there are half parameters.

  Their optimizer makes float32 moments of float32 gradients; as a new type they would be a new
  trace.
  """
  half = any(map(is_half, jax.tree.leaves(params)))
  if not half or jax.tree.structure(old) != jax.tree.structure(new):
    return new

  def keep(o: Any, n: Any) -> Any:
    return n.astype(o.dtype) if is_half(o) and is_inexact(n) and n.dtype != o.dtype else n

  return jax.tree.map(keep, old, new)


def align_gradients(grads: PyTree, params: PyTree, where: str) -> PyTree:
  """Returns `grads` with a zero wherever it has None and `params` an array, or a tree of them.

  A gradient is 64-bit exactly where its parameter is: the moments, made from the parameters by
  `init`, then never change dtype.

  Args:
    grads: a tree of gradients.
    params: the tree that they belong to; None checks and changes nothing.
    where: the public call, for the error.

  Raises:
    MpjaxValueError: `params` is given and has other leaves, containers or shapes, or floating
      leaves where the gradients are integers.
  """
  if params is None:
    return grads
  if grads is not None:
    grads = _spell_out(grads, params)
  problems = tree_differences(params, grads, dtypes=False, none_fits=True)
  if not problems:
    pairs = jax.tree_util.tree_map_with_path(_misfit, params, grads, is_leaf=is_none)
    problems = jax.tree.leaves(pairs)
  if problems:
    fix = "Differentiate with respect to the very tree that is passed as params."
    if _per_example(grads, params):
      fix = (
        "Take the mean over the examples; for optax.contrib.dpsgd, which does, leave params out."
      )
    raise MpjaxValueError(
      where, expected="gradients with the leaves of params", got=listed(problems), fix=fix
    )
  return jax.tree.map(_align_leaf, grads, params, is_leaf=is_none)


def _spell_out(grads: PyTree, params: PyTree) -> PyTree:
  """Returns `grads` with a None for each leaf of `params` where it has one for all of them."""
  if all(g is not None for g in jax.tree.leaves(grads, is_leaf=is_none)):
    return grads
  try:
    return jax.tree.map(
      lambda g, p: jax.tree.map(lambda _: None, p) if g is None else g,
      grads,
      params,
      is_leaf=is_none,
    )
  except ValueError:  # Another tree: the caller says where.
    return grads


def _per_example(grads: PyTree, params: PyTree) -> bool:
  """Whether each gradient has one axis more than its parameter, of examples."""
  shapes, wanted = (list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (grads, params))
  return len(shapes) == len(wanted) and all(
    len(s) > 0 and s[1:] == w for s, w in zip(shapes, wanted, strict=True)
  )


def differentiated(tree: PyTree) -> PyTree:
  """Returns that part of parameters, or of their gradients, that optax differentiates.

  Of `optax.lookahead` it is the fast parameters.
  """
  return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def by_part(f: Callable[..., PyTree], updates: PyTree, params: PyTree) -> PyTree:
  """Returns `f(updates, params)`, for the fast, then the slow parameters of lookahead."""
  if not isinstance(updates, optax.LookaheadParams):
    return f(updates, params)
  return optax.LookaheadParams(f(updates.fast, params.fast), f(updates.slow, params.slow))


def frozen_leaves(given: Iterable[PyTree], params: PyTree) -> PyTree:
  """Returns which parameters have None for a gradient in all of `given`, or None if no one has.

  Such a parameter is to stay as it is: weight decay or momentum would move it by a zero gradient.

  Args:
    given: trees of gradients.
    params: the tree that they belong to; with None nothing is known.
  """
  given = list(given)
  if params is None or not any(map(is_none, jax.tree.leaves(given, is_leaf=is_none))):
    return None

  def missing(p: Any, *gs: Any) -> bool:
    return is_inexact(p) and all(map(is_none, gs))

  try:
    frozen = jax.tree.map(missing, params, *(_spell_out(grads, params) for grads in given))
  except ValueError:  # Another tree: the caller says where.
    return None
  return frozen if any(jax.tree.leaves(frozen)) else None


def _misfit(path: Any, p: Any, g: Any) -> str | None:
  """What is wrong if a floating parameter comes with integers for a gradient."""
  if g is None or not is_inexact(p) or is_inexact(g):
    return None
  return f"{jnp.result_type(g)} for {jnp.result_type(p)} at {jax.tree_util.keystr(path)}"


def _align_leaf(g: Any, p: Any) -> Any:
  if p is None or not is_inexact(p):
    return p if g is None else g
  dtype = jnp.result_type(p)
  if g is None:
    return jnp.zeros(jnp.shape(p), dtype)
  wide = {jnp.dtype(name) for name in ("float64", "complex128")}
  if is_inexact(g) and (jnp.result_type(g) in wide) != (dtype in wide):
    complex_ = jnp.issubdtype(jnp.result_type(g), jnp.complexfloating)
    bits = 64 if dtype in wide else 32
    return jnp.asarray(g, f"complex{2 * bits}" if complex_ else f"float{bits}")
  return g


def merge_updates(grads: PyTree, updates: PyTree, params: PyTree) -> PyTree:
  """Returns `updates` with something in place of what was hidden from the inner optimizer.

  That is a zero of the parameter's own dtype, which `optax.apply_updates` can add; without
  parameters, and for keys, the leaf that came as the gradient. Of a key that had none it is None,
  which `mpjax.apply_updates` and Equinox leave alone; optax can add nothing to a key.
  """

  def merge(g: Any, u: Any, p: Any) -> Any:
    if not isinstance(u, optax.MaskedNode) or isinstance(g, optax.MaskedNode):
      return u
    if p is None:
      return g
    if is_key(jnp.result_type(p)):
      return None if is_key(jnp.result_type(g)) else g
    return jnp.zeros(jnp.shape(p), jnp.result_type(p))

  if params is None:
    return jax.tree.map(lambda g, u: merge(g, u, None), grads, updates)
  return jax.tree.map(merge, grads, updates, params)


def warn_of_half(params: PyTree, master: PyTree) -> None:
  """Warns, once, if parameters are stored in half of which `master` has no float32 copy."""
  covered = {path for path, _ in jax.tree_util.tree_leaves_with_path(master)}
  leaves = jax.tree_util.tree_leaves_with_path(params)
  half = [path for path, x in leaves if is_half(x) and path not in covered]
  if half:
    warnings.warn(
      f"mpjax.loss_scaling(inner).init(params): {len(half)} parameters are stored in half (the "
      f"first: {jax.tree_util.keystr(half[0]) or 'the root'}), where updates smaller than the "
      "rounding are lost. Store them in float32 (a policy casts them where they are used), keep a "
      "float32 copy in the optimizer state with mpjax.master_weights(inner), or round "
      'stochastically with mpjax.apply_updates(..., rounding="stochastic").',
      UserWarning,
      stacklevel=3,
    )


def strong(x: Any) -> Any:
  """Returns a leaf of a state as a strongly typed array, so that the second step is no new trace.

  A Python number becomes bool, int32 or float32 by itself, whether or not 64-bit is enabled.
  """
  if isinstance(x, jax.Array):
    return jnp.asarray(x, x.dtype) if jax.typeof(x).weak_type else x
  if isinstance(x, (np.ndarray, np.generic)):
    return x if x.dtype == jax.dtypes.float0 else jnp.asarray(x)
  for kind, dtype in ((bool, jnp.bool_), (int, jnp.int32), (float, jnp.float32)):
    if isinstance(x, kind):
      return jnp.asarray(x, dtype)
  return x


def place_like(params: PyTree, state: PyTree) -> PyTree:
  """Returns `state` with its own arrays where `params` are: replicated on their mesh.

  Scalars made by `init` sit on one device, uncommitted. `jit` returns them on the mesh, and the
  second step would be traced again for that.
  """
  concrete = [
    x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and not isinstance(x, Tracer)
  ]
  meshes = [x.sharding.mesh for x in concrete if isinstance(x.sharding, jax.sharding.NamedSharding)]
  committed = [x.sharding for x in concrete if x.committed]
  if meshes:
    spec = jax.sharding.PartitionSpec()
    where: jax.sharding.Sharding = jax.sharding.NamedSharding(meshes[0], spec)
  elif committed and len(committed[0].device_set) == 1:
    where = committed[0]
  else:
    return state

  def place(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.committed:
      return x
    if is_key(x.dtype):  # As keys they cannot be put onto the devices of other processes.
      data = jax.device_put(jax.random.key_data(x), where)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, where)

  return jax.tree.map(place, state)
