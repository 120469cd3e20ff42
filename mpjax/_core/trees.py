"""Trees: containers in their own order and of their own type; casts, selection and checks."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from mpjax._core.dtypes import FLOAT32, HALF_NAMES
from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.together import first_nonfinite_together, masks_of
from mpjax._core.types import Array, DType, Leaf, PyTree

IsLeaf: TypeAlias = Callable[[Any], bool]

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
"""The dicts that are trees to JAX."""


class Content(NamedTuple):
  """What a container holds.

  Fields:
    parts: its parts, in its own order.
    like: what tells it from another container of the same parts: keys, or its structure to JAX.
    build: makes one of other parts. It holds none of these.
  """

  parts: list[Any]
  like: Any
  build: Callable[[list[Any]], Any]

  def refill(self, container: Any) -> None:
    """Gives a list or dict what this one holds."""
    container.clear()
    if isinstance(container, list):
      container.extend(self.parts)
    else:
      container.update(zip(self.like, self.parts, strict=True))


def content_of(x: Any, is_leaf: IsLeaf | None = None) -> Content | None:
  """Returns what a container holds; None for a leaf.

  `is_leaf` says which parts of another container than a list, tuple or dict are not looked into.
  """
  cls: Any = type(x)
  if cls in DICTS:
    keys = list(x)
    more: list[Any] = [x.default_factory] if cls is collections.defaultdict else []
    make: Any = cls
    return Content(list(x.values()), keys, lambda parts: make(*more, zip(keys, parts, strict=True)))
  if cls in (list, tuple):
    return Content(list(x), None, cls)
  if isinstance(x, jax.Array) or default_registry.flatten_one_level(x) is None:
    return None
  stop = is_leaf or (lambda _: True)
  parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x and stop(y))
  order = list(x) if cls.__name__ == "FrozenDict" else []  # JAX sorts those of Flax's too.

  def build(parts: list[Any]) -> Any:
    new = jax.tree.unflatten(treedef, parts)
    return cls({key: new[key] for key in order}) if order else new

  return Content(parts, (treedef, order), build)


def mapped(fun: Callable[[Any], Any], tree: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
  """Returns a tree with `fun` of its leaves, in containers of the same order, type and identity.

  A container without a changed leaf is itself in the result.
  """
  return _mapped(fun, tree, is_leaf, {})


def _mapped(fun: Any, x: Any, is_leaf: IsLeaf | None, built: dict[int, Any]) -> Any:
  # No closure that calls itself: that cycle would keep tracers alive until the next collection.
  if x is None:
    return None
  if id(x) not in built:
    content = None if is_leaf is not None and is_leaf(x) else content_of(x)
    if content is None:
      return fun(x)
    parts = [_mapped(fun, part, is_leaf, built) for part in content.parts]
    built[id(x)] = (x, x if same_objects(parts, content.parts) else content.build(parts))
  return built[id(x)][1]


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
  """Whether two sequences have the same objects, not only equal ones."""
  return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


T = TypeVar("T")


def is_floating(x: object) -> bool:
  """Whether `x` is an array (of JAX or NumPy, concrete, traced or abstract) with a floating dtype.

  Python numbers are not arrays: JAX already lets them follow the dtype of what they meet.
  """
  return isinstance(
    x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
  ) and jnp.issubdtype(x.dtype, jnp.floating)


def is_half(x: Leaf) -> bool:
  """Whether `x` is an array in float16 or bfloat16."""
  return str(getattr(x, "dtype", None)) in HALF_NAMES


def cast_leaf(x: Leaf, dtype: DType) -> Leaf:
  """Returns `x` in `dtype` if it is a floating array, else `x` itself."""
  # A NumPy value stays one: code that uses it as a constant (a schedule, a rate) keeps a value that
  # it can look at under `jit`.
  if not is_floating(x) or x.dtype == dtype:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  if isinstance(x, (np.ndarray, np.generic)):
    # JAX would narrow float64 first; rounding twice is then what the same input gives anywhere.
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype)).astype(dtype)
  return x.astype(dtype)


def half_to_float32(x: Leaf) -> Leaf:
  """Returns `x` in float32 if it is an array in float16 or bfloat16, else `x` itself."""
  return cast_leaf(x, FLOAT32) if is_half(x) else x


def is_nnx_object(x: object) -> bool:
  """Whether `x` is a module, a container, a variable or another object of Flax NNX."""
  # Such an object may be a tree to JAX, but it is what others hold and write to: a mapped copy of
  # it loses what is written. Its class tells, so that nothing here needs NNX installed.
  names = (c.__module__ for c in type(x).__mro__ if c.__name__ in ("Pytree", "Variable"))
  return any(name.startswith("flax.nnx.") for name in names)


def map_arrays(fun: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
  """Returns `tree` with `fun` of its leaves, and objects of Flax NNX as they are."""
  # Where `fun` changes nothing the result is `tree` itself: containers stay the same objects, and
  # static arguments stay equal.
  return mapped(lambda x: x if is_nnx_object(x) else fun(x), tree, is_nnx_object)


def instances_in(value: object, cls: type[T]) -> Iterator[T]:
  """Yields the instances of a class: `value` itself, or those in plain containers."""
  if isinstance(value, cls):
    yield value
  elif isinstance(value, (tuple, list, Mapping)):
    for item in value.values() if isinstance(value, Mapping) else value:
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
  """Returns `x` with finite numbers beyond the range of `dtype` brought back to its limits.

  An inf or NaN stays what it is.
  """
  largest = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def is_inexact(x: Leaf) -> bool:
  """Whether `x` holds floating or complex numbers: a Python number or an array of any kind."""
  if isinstance(x, (float, complex)):
    return True
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def all_finite(tree: PyTree) -> Array:
  """Whether no array in `tree` holds an inf or a NaN.

  Each element is looked at by itself: a sum or a norm of finite values may overflow. Integers,
  booleans, keys, `float0` and leaves that are not arrays are finite; of a complex number both
  parts must be.

  Args:
    tree: any tree of arrays, of any shapes and dtypes.

  Returns:
    A scalar bool array; True for a tree without floating leaves.

  >>> import jax.numpy as jnp, mpjax
  >>> bool(mpjax.all_finite({"w": jnp.ones(3), "step": 7, "nothing": None}))
  True
  >>> bool(mpjax.all_finite([jnp.ones(3), jnp.array([0.0, jnp.nan])]))
  False
  """
  leaves = jax.tree.leaves(tree)
  return first_nonfinite(leaves) == len(leaves)


def first_nonfinite(leaves: Sequence[Leaf]) -> Array:
  """Returns the position of the first leaf with an inf or a NaN, or `len(leaves)` without any."""
  return first_nonfinite_together(leaves, [i for i, x in enumerate(leaves) if is_inexact(x)])


def tree_differences(expected: PyTree, got: PyTree, *, dtypes: bool) -> list[str]:
  """Returns what keeps `got` from being like `expected`: every wrong leaf, by its path.

  None counts as a leaf in both.
  """
  expected_leaves, expected_def = _flatten(expected)
  got_leaves, got_def = _flatten(got)
  missing = [f"nothing at {path}" for path in expected_leaves if path not in got_leaves]
  extra = [f"an extra leaf at {path}" for path in got_leaves if path not in expected_leaves]
  if missing or extra:
    return missing + extra
  if expected_def != got_def:
    return [_other_container(expected, got)]
  differences = []
  for path, want in expected_leaves.items():
    want_text, give_text = (_describe(x, dtypes) for x in (want, got_leaves[path]))
    if want_text != give_text:
      differences.append(f"{give_text} for {want_text} at {path}")
  return differences


def _other_container(expected: PyTree, got: PyTree) -> str:
  """Returns the first path where two trees with the same paths have other containers."""
  path = ""
  while True:
    kinds = [type(tree).__name__ for tree in (got, expected)]
    if kinds[0] != kinds[1]:
      return f"other containers: {kinds[0]} for {kinds[1]} at {path or 'the root'}"
    children = [
      jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree)
      for tree in (expected, got)
    ]
    for (key, want), (_, give) in zip(*children, strict=True):
      if jax.tree.structure(want, is_leaf=is_none) != jax.tree.structure(give, is_leaf=is_none):
        path, expected, got = path + jax.tree_util.keystr(key), want, give
        break
    else:
      return f"other static parts of a {kinds[0]} at {path or 'the root'}"


def is_none(x: object) -> bool:
  """Whether `x` is None, for `is_leaf`: to JAX it is a tree without leaves."""
  return x is None


def _flatten(tree: PyTree) -> tuple[dict[str, Leaf], object]:
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
  return {jax.tree_util.keystr(path) or "the root": x for path, x in leaves}, treedef


def _describe(x: Leaf, dtypes: bool) -> str:
  if not is_array_like(x):
    return "None" if x is None else type(x).__name__
  return f"{jnp.result_type(x) if dtypes else 'shape '}{list(jnp.shape(x))}"


def is_array_like(x: object) -> bool:
  """Whether `x` is an array of any kind (keys and `float0` too) or a Python number."""
  return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def select(
  condition: Array,
  on_true: PyTree,
  on_false: PyTree,
  where: str,
  *,
  fix: str = "Give both the same structure, shapes and dtypes: nothing is cast or broadcast here.",
) -> PyTree:
  """Returns `on_true` where the scalar `condition` holds and `on_false` where it does not."""
  if jnp.shape(condition) != ():
    raise MpjaxValueError(
      where,
      expected="a scalar flag",
      got=f"one of shape {jnp.shape(condition)}",
      fix="Reduce it first, or jax.vmap the entire call: one flag decides for all leaves.",
    )
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

  def differ(new: Leaf, old: Leaf) -> bool:
    # float0 holds nothing to select, and leaves that are not arrays cannot depend on the flag.
    is_array = is_array_like(new) and getattr(new, "dtype", None) != jax.dtypes.float0
    return is_array and new is not old

  news, treedef = jax.tree.flatten(on_true)
  pairs = list(zip(news, jax.tree.leaves(on_false), strict=True))
  chosen = [i for i, pair in enumerate(pairs) if differ(*pair)]
  for i, mask in zip(chosen, masks_of(condition, [news[i] for i in chosen]), strict=True):
    news[i] = jnp.where(mask, *pairs[i])
  return jax.tree.unflatten(treedef, news)
