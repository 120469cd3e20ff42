"""Trees: containers in their own order and of their own type; casts, selection and checks."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.frameworks import is_nnx_object
from mpjax._core.fused_leaves import first_nonfinite, masks_of
from mpjax._core.types import FLOAT32, Array, DType, Leaf, PyTree, is_low_precision

IsLeaf: TypeAlias = Callable[[Any], bool]

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
"""The dicts that are trees to JAX."""


class Content(NamedTuple):
  """The parts of a container in its own order, and a function that builds one of other parts."""

  parts: list[Any]
  like: Any  # keys (a list if JAX sorts them) or structure: tells containers of equal parts apart
  build: Callable[[list[Any]], Any]

  def refill(self, container: Any) -> None:
    """Replaces the content of a list or dict by this one."""
    container.clear()
    if isinstance(container, list):
      container.extend(self.parts)
    else:
      container.update(zip(self.like, self.parts, strict=True))


def content_of(x: Any, is_leaf: IsLeaf | None = None) -> Content | None:
  """Returns the content of a container, None for a leaf. `is_leaf` is for registered nodes."""
  cls: Any = type(x)
  if cls in DICTS:
    # JAX sorts the keys of a dict, but not of an OrderedDict. The order of insertion is kept here,
    # so that a user's loop over the dict sees it.
    keys: Any = tuple(x) if cls is collections.OrderedDict else list(x)
    more: list[Any] = [x.default_factory] if cls is collections.defaultdict else []
    make: Any = cls
    return Content(list(x.values()), keys, lambda parts: make(*more, zip(keys, parts, strict=True)))
  if cls in (list, tuple):
    return Content(list(x), None, cls)
  if isinstance(x, jax.Array) or default_registry.flatten_one_level(x) is None:
    return None
  # A node that is registered with JAX. One level: every child is a leaf, or as `is_leaf` says.
  stop = is_leaf or (lambda _: True)
  parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x and stop(y))
  order = list(x) if cls.__name__ == "FrozenDict" else []  # JAX sorts the keys of these too.

  def build(parts: list[Any]) -> Any:
    new = jax.tree.unflatten(treedef, parts)
    return cls({key: new[key] for key in order}) if order else new

  return Content(parts, (treedef, order), build)


def mapped(
  fun: Callable[[Any], Any],
  tree: PyTree,
  is_leaf: IsLeaf | None = None,
  built: dict[int, Any] | None = None,
) -> PyTree:
  """Returns a tree with `fun` of its leaves, in containers of the same order, type and identity.

  A container without a changed leaf is itself in the result. `built` are those of a tree around.
  """
  # A closure that calls itself is a reference cycle, and keeps tracers alive until the next garbage
  # collection. So this recurses by arguments.
  built = {} if built is None else built
  # A container that occurs twice is built once, so that both places hold one object.
  if tree is None or id(tree) in built:
    return None if tree is None else built[id(tree)][1]
  content = None if is_leaf is not None and is_leaf(tree) else content_of(tree)
  if content is None:
    return fun(tree)
  parts = [mapped(fun, part, is_leaf, built) for part in content.parts]
  # Keep `tree` alive beside its copy, or a new object could get its id.
  built[id(tree)] = tree, tree if same_objects(parts, content.parts) else content.build(parts)
  return built[id(tree)][1]


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
  """Whether two sequences have the same objects, not only equal ones."""
  return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_floating(x: object) -> bool:
  """Whether `x` is an array, of JAX or NumPy or abstract, in a floating dtype; no Python number."""
  return isinstance(x, _ARRAYS) and jnp.issubdtype(x.dtype, jnp.floating)


def in_low_precision(x: Leaf) -> bool:
  """Whether `x` is an array in a floating dtype narrower than float32."""
  return is_floating(x) and is_low_precision(x.dtype)


def cast_leaf(x: Leaf, dtype: DType) -> Leaf:
  """Returns `x` in `dtype` if it is a floating array, else `x` itself."""
  # A NumPy array stays on the host, so that Python can read it under `jit`: a schedule, or a
  # learning rate.
  if not is_floating(x) or x.dtype == dtype:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  if isinstance(x, (np.ndarray, np.generic)):
    # Without x64, JAX narrows float64 to float32 first. Round in the same two steps, so that the
    # result does not depend on where the array is.
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype)).astype(dtype)
  return x.astype(dtype)


def low_to_float32(x: Leaf) -> Leaf:
  """Returns `x` in float32 if it is an array in low precision, else `x` itself."""
  return cast_leaf(x, FLOAT32) if in_low_precision(x) else x


def map_arrays(fun: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
  """Returns `tree` with `fun` of its leaves, and objects of Flax NNX as they are."""
  return mapped(lambda x: x if is_nnx_object(x) else fun(x), tree, is_nnx_object)


def instances_in(value: object, cls: type[T] | tuple[type[T], ...]) -> Iterator[T]:
  """Yields the instances of classes: `value` itself, or those in plain containers."""
  if isinstance(value, cls):
    yield value
  elif isinstance(value, (tuple, list, Mapping)):
    items = value.values() if isinstance(value, Mapping) else value
    for item in items:
      yield from instances_in(item, cls)


def cast_arrays(tree: PyTree, dtype: DType) -> PyTree:
  """Returns `tree` with its floating arrays in `dtype`, and all else as it is."""
  return map_arrays(lambda x: cast_leaf(x, dtype), tree)


def cast_like(tree: PyTree, dtypes: PyTree) -> PyTree | None:
  """Returns a tree of arrays in the dtypes of another; None if the two are not alike."""
  if jax.tree.structure(tree) != jax.tree.structure(dtypes):
    return None
  return jax.tree.map(lambda x, d: cast_leaf(x, d.dtype) if is_floating(x) else x, tree, dtypes)


def round_to(x: Array, dtype: DType) -> Array:
  """Returns `x` rounded to nearest in `dtype`, a rounding that the compiler keeps."""
  # XLA for GPU may drop a cast to low precision together with a cast back that follows it.
  # `reduce_precision` would stay, but flushes all subnormal numbers of float16 to 0.
  return x if x.dtype == dtype else jax.lax.optimization_barrier(x.astype(dtype))


def saturate(x: Array, dtype: DType) -> Array:
  """Returns `x` with finite numbers beyond the range of `dtype` brought back to its limits."""
  largest = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def all_finite(tree: PyTree) -> Array:
  """Whether no array in `tree` holds an inf or a NaN, in any element or part of a complex number.

  Integers, keys and leaves that are not arrays are finite.
  """
  leaves = jax.tree.leaves(tree)
  return first_nonfinite(leaves) == len(leaves)


def tree_differences(expected: PyTree, got: PyTree, *, dtypes: bool) -> list[str]:
  """Returns the differences between two trees, by path. None counts as a leaf."""
  wants, treedef = _described(expected, dtypes)
  gives, other = _described(got, dtypes)
  # Name paths first: they say more than a difference of structures.
  missing = [f"nothing at {path}" for path in wants if path not in gives]
  extra = [f"an extra leaf at {path}" for path in gives if path not in wants]
  if missing or extra:
    return missing + extra
  # All paths agree: a list in place of a tuple, or another static field of a dataclass.
  if treedef != other:
    return [_other_container(expected, got)]
  return [f"{gives[p]} for {want} at {p}" for p, want in wants.items() if want != gives[p]]


def _other_container(expected: PyTree, got: PyTree, path: str = "") -> str:
  """Returns the first path where two trees with the same paths have other containers."""
  kinds = [type(tree).__name__ for tree in (got, expected)]
  if kinds[0] != kinds[1]:
    return f"other containers: {kinds[0]} for {kinds[1]} at {path or 'the root'}"
  children = [
    jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree)
    for tree in (expected, got)
  ]
  # An empty container has no leaves. Paths may agree although the numbers of children differ.
  expected_count, count = map(len, children)
  if count != expected_count:
    return f"other containers: {kinds[0]} of {count} for {expected_count} at {path or 'the root'}"
  for (key, want), (_, give) in zip(*children, strict=True):
    if jax.tree.structure(want, is_leaf=is_none) != jax.tree.structure(give, is_leaf=is_none):
      return _other_container(want, give, path + jax.tree_util.keystr(key))
  return f"other static parts of a {kinds[0]} at {path or 'the root'}"


def is_none(x: object) -> bool:
  """Whether `x` is None, for `is_leaf`: to JAX it is a tree without leaves."""
  return x is None


def _described(tree: PyTree, dtypes: bool) -> tuple[dict[str, str], object]:
  """Returns a description of each leaf of a tree, by path, and the structure of the tree."""
  texts: dict[str, str] = {}
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
  for path, x in leaves:
    text = "None" if x is None else type(x).__name__
    if x is not None and is_array_like(x):
      text = f"{jnp.result_type(x) if dtypes else 'shape '}{list(jnp.shape(x))}"
    texts[jax.tree_util.keystr(path) or "the root"] = text
  return texts, treedef


def is_array_like(x: object) -> bool:
  """Whether `x` is an array of any kind (keys and `float0` too) or a Python number."""
  return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def select(condition: Array, on_true: PyTree, on_false: PyTree, where: str) -> PyTree:
  """Returns `on_true` where the scalar `condition` holds and `on_false` where it does not."""
  if jnp.shape(condition) != ():
    raise MpjaxValueError(
      where,
      expected="a scalar flag",
      got=f"one of shape {jnp.shape(condition)}",
      fix="Reduce it first, or jax.vmap the entire call: one flag decides for all leaves.",
    )
  fix = "Give both the same structure, shapes and dtypes: nothing is cast or broadcast here."
  check_alike(on_true, on_false, where, fix=fix)
  # Never a multiplication by a mask: 0 * NaN is NaN.
  return pick(condition, on_true, on_false)


def check_alike(
  new: PyTree,
  old: PyTree,
  where: str,
  *,
  fix: str,
  expected: str = "the new tree to be like the old one",
  dtypes: bool = True,
) -> None:
  """Raises unless two trees have the same structure and shapes, and dtypes where these count."""
  problems = tree_differences(old, new, dtypes=dtypes)
  if problems:
    raise MpjaxValueError(where, expected=expected, got=listed(problems), fix=fix)


def pick(condition: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
  """Returns what `select` does, of trees that are known to be alike."""
  news, treedef = jax.tree.flatten(on_true)
  olds = jax.tree.leaves(on_false)
  # `float0` has no values, and leaves that are not arrays cannot depend on a traced flag: keep the
  # new one. The same object in both trees needs no selection.
  selected = [
    i
    for i, (new, old) in enumerate(zip(news, olds, strict=True))
    if new is not old and is_array_like(new)
    if getattr(new, "dtype", None) != jax.dtypes.float0
  ]
  for i, mask in zip(selected, masks_of(condition, [news[i] for i in selected]), strict=True):
    news[i] = jnp.where(mask, news[i], olds[i])
  return jax.tree.unflatten(treedef, news)
