"""Leaves of trees: their paths, checks, conversions, and comparisons by bits."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of, listed
from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.trees import is_array_like, is_floating
from mpjax._core.types import Array, DType, KeyPath, Leaf, NumpyArray, PyTree, unsigned_like

Path: TypeAlias = tuple[str, ...]
"""The names on the way to a leaf or a node of a tree."""


def path_text(path: KeyPath) -> str:
  """Returns a path of JAX as text, the same whatever the containers are."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def raw_value(x: Leaf) -> PyTree:
  """Returns the value of a variable of Flax NNX as it is stored, an array or a tree.

  `variable[...]` would run hooks, and would index into a value that is a dict or a tuple. Whatever
  is no variable is returned as it is.
  """
  if not is_nnx_variable(x):
    return x
  # With `ref=True`, a variable holds a reference to its array.
  value = x.get_raw_value()
  return value[...] if isinstance(value, jax.Ref) else value


def set_raw_value(variable: Leaf, value: PyTree) -> None:
  """Stores the value of a variable of Flax NNX as it is, without the variable's hooks."""
  held = variable.get_raw_value()
  # Write through the reference: others may hold it too.
  if isinstance(held, jax.Ref):
    held[...] = value
  else:
    variable.set_raw_value(value)


def leaf_paths(tree: PyTree) -> list[Path]:
  """Returns the path of each leaf. What a box holds has the path of the box."""
  # Rules see paths without the attribute in which a box keeps its array: an `nnx.Variable`, or a
  # `Partitioned` of Linen. A name of Haiku has slashes, and is several names here.
  paths: list[Path] = []

  def is_box(x: object) -> bool:
    return hasattr(type(x), "replace_boxed") or is_nnx_variable(x)

  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
    names = tuple(path_text(path).split("/")) if path else ()
    paths += [names] * len(jax.tree.leaves(node))
  return paths


def node_paths(tree: PyTree) -> set[str]:
  """Returns the paths of the nodes that hold leaves, and of those around; "" is the root."""
  return {"/".join(path[:n]) for path in leaf_paths(tree) for n in range(len(path))}


def check_leaves(leaves: Mapping[str, Leaf], where: str, *, abstract: bool) -> None:
  """Raises MpjaxTypeError unless all leaves are arrays, not traced; abstract ones if asked."""
  refused = (Tracer,) if abstract else (Tracer, jax.ShapeDtypeStruct)
  wrong = [
    f"{kind_of(x)} at {path or 'the root'}"
    for path, x in leaves.items()
    if not is_array_like(x) or isinstance(x, refused)
  ]
  if wrong:
    raise MpjaxTypeError(
      where,
      expected=f"arrays{' or jax.ShapeDtypeStruct' if abstract else ''} as leaves",
      got=listed(wrong),
      fix="Call it on the host, outside of jit, and leave out what is not an array.",
    )


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array that JAX takes; a Python number, or an array of text, is not."""
  # NumPy gives bfloat16 and the other dtypes of `ml_dtypes` the kind "V".
  return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV")


def is_key(dtype: DType) -> bool:
  """Whether `dtype` is that of typed PRNG keys."""
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_array(x: Leaf, dtype: DType) -> Leaf:
  """Returns a Python number as the array that JAX makes of it beside a `dtype`, else `x` itself.

  A number that does not fit into 32 bits, or into an integer `dtype`, gets another dtype.
  """
  if hasattr(x, "dtype"):
    return np.asarray(x) if isinstance(x, np.generic) else x
  if isinstance(x, int) and not isinstance(x, bool) and jnp.issubdtype(dtype, jnp.integer):
    # JAX raises for an int that its dtype cannot hold. Without a dtype, NumPy chooses a wider one,
    # and the caller can name the leaf.
    limits = jnp.iinfo(dtype)
    return np.asarray(x, dtype if limits.min <= x <= limits.max else None)
  if isinstance(x, (float, complex)) and dtype.name not in ("float64", "complex128"):
    with np.errstate(over="ignore"):
      narrow = np.asarray(x, np.float32 if isinstance(x, float) else np.complex64)
    # A finite number that is inf in 32 bits stays in 64, so that the caller can refuse it.
    return narrow if np.isfinite(narrow) or not np.isfinite(x) else np.asarray(x)
  return np.asarray(x) if isinstance(x, (bool, int, float, complex)) else x


def misfit(x: Leaf, want: jax.ShapeDtypeStruct, *, cast: bool) -> str | None:
  """Returns how `x` differs from `want`, another floating dtype only if not `cast`, or None."""
  spec = f"{want.dtype}{list(want.shape)}"
  if not is_array_like(x) or isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
    return f"{kind_of(x)} for {spec}"
  if is_key(want.dtype) and x.dtype == np.uint32:  # Files hold the data of keys: see `convert`.
    want = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(want.shape, want.dtype))
  # A cast between floating dtypes is allowed. Between integers and floats it would hide a mistake.
  floats = is_floating(x) and is_floating(want)
  if x.shape == want.shape and (x.dtype == want.dtype or (cast and floats)):
    return None
  return f"{x.dtype}{list(x.shape)} for {spec}"


def convert(x: Array, dtype: DType) -> Array:
  """Returns `x`, which fits but for its dtype, in `dtype`; key data become keys."""
  if x.dtype == dtype:
    return x
  if is_key(dtype):
    # `wrap_key_data` needs the name of the generator, which JAX tells only of keys, not of a dtype.
    # So trace an abstract key.
    generators: list[Any] = []
    keys = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: generators.append(jax.random.key_impl(key)), keys)
    return jax.random.wrap_key_data(jnp.asarray(x), impl=generators[0])
  with np.errstate(over="ignore"):
    return x.astype(dtype)


def refuse_overflow(casts: Mapping[str, tuple[Leaf, Leaf]], where: str) -> None:
  """Raises MpjaxValueError if a finite number became an inf or a NaN, and names all such leaves.

  `casts` has the leaves before and after, by path. Traced and abstract ones cannot be looked at.
  """
  wrong: list[str] = []
  for path, (before, after) in casts.items():
    abstract = isinstance(after, (Tracer, jax.ShapeDtypeStruct))
    if before is not after and not abstract and is_floating(before) and is_floating(after):
      # NumPy on the host stays there. `jnp` would copy the array to a device.
      finite = np.isfinite if isinstance(before, np.ndarray) else jnp.isfinite
      # An inf that was there before is no overflow.
      if not (finite(after) | ~finite(before)).all():
        wrong.append(f"{before.dtype} beyond {after.dtype} at {path or 'the root'}")
  if wrong:
    fix = "They would be inf or NaN: keep these leaves in float32 or bfloat16."
    expected = "values that the new dtype can hold"
    raise MpjaxValueError(where, expected=expected, got=listed(wrong), fix=fix)


def put(x: Array | NumpyArray, sharding: jax.sharding.Sharding | None, *, alias: bool) -> jax.Array:
  """Returns `x` as a strongly typed array on `sharding`, or uncommitted if that is None.

  Only with `alias` may it share memory with `x`.
  """
  if sharding is not None:
    placed = jax.device_put(x, sharding, may_alias=alias)
  elif is_key(x.dtype):
    data = jnp.array(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  else:
    # Through the host, since only that makes an uncommitted array of a committed one.
    placed = jnp.array(np.asarray(x))
  return jnp.asarray(placed, placed.dtype) if jax.typeof(placed).weak_type else placed


# The functions below compare bits. On a CPU, a comparison of floats takes subnormal numbers for
# zero. XLA may also compare the float32 result of an operation in place of the bfloat16 number that
# is stored.


def _bits(x: Array) -> tuple[Array, Array]:
  """Returns the bits of a floating array, and those of its magnitude, as unsigned integers."""
  unsigned = unsigned_like(x.dtype)
  bits = jax.lax.bitcast_convert_type(x, unsigned)
  return bits, bits & np.asarray(2 ** (8 * x.dtype.itemsize - 1) - 1, unsigned)


def same_numbers(a: Array, b: Array) -> Array:
  """Returns where two arrays of one floating dtype are equal, as `==` of NumPy is.

  Two zeros are equal, whatever their signs, and a NaN equals nothing.
  """
  (first, size), (second, other) = _bits(a), _bits(b)
  with np.errstate(all="ignore"):
    infinity = np.asarray(np.inf, a.dtype)
  # Some float8 formats have no inf: NumPy makes it NaN. Their largest number is finite.
  largest = np.asarray(jnp.finfo(a.dtype).max, a.dtype) if np.isnan(infinity) else infinity
  # Not `isnan`: LLVM then sees a comparison of floats, and compiles one.
  is_number = size <= largest.view(first.dtype)
  # 0.0 and -0.0 are equal, and differ in their bits.
  zeros = jnp.logical_and(size == 0, other == 0)
  return jnp.logical_or(zeros, jnp.logical_and(first == second, is_number))


def is_nonzero(x: Array) -> Array:
  """Returns where a floating array is not zero. Subnormal numbers are not."""
  return _bits(x)[1] != 0


def changes_nothing(old: Array, new: Array, update: Array) -> Array:
  """Returns which updates are lost: not zero, and `new`, the rounded sum, is the `old` number.

  Of a complex number either part may be lost. The update may have any floating dtype.
  """
  if jnp.issubdtype(old.dtype, jnp.complexfloating):
    real, imag = (changes_nothing(f(old), f(new), f(update)) for f in (jnp.real, jnp.imag))
    return jnp.logical_or(real, imag)
  return jnp.logical_and(same_numbers(old, new), is_nonzero(update))
