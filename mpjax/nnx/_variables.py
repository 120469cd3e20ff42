"""Variables as a module under a policy sees them: cast where they are read, stored as they were.

Cast at use, a parameter that is used T times (a cell over time, a shared layer) adds up its T
cotangents in the dtype it is stored in; cast once at entry, it would add them up in half.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax._tree import cast_leaf, is_floating
from mpjax._types import PyTree
from mpjax.nnx._active import current

CAST = (nnx.Param, nnx.Cache)
"""What is cast when it is read. Statistics, intermediates and users' own types never are."""

_LEFT_ALONE = (nnx.Intermediate, nnx.Perturbation, nnx.RngState)
"""What modules write for others to read, in the dtype that they write."""

_AS_STORED = frozenset({"shape", "ndim", "size", "sharding"})
"""What can be asked of an array without a cast."""


class InUse:
  """A variable while a module under a policy uses it; mixed into a class of its own type.

  What is read has the dtype that the module being called computes in, what is written goes to the
  variable itself in the dtype that it has. Trees of JAX and the graph functions of NNX see the
  stored array.
  """

  __slots__ = ()

  mpjax_stored: Any

  @property
  def var_type(self) -> Any:
    """The type of the variable that this is a view of."""
    return type(self).__mro__[2]

  @property
  def type(self) -> Any:
    """The type of the variable that this is a view of."""
    return self.var_type

  @property
  def shape(self) -> Any:
    """The shape of the array."""
    return stored(self).get_raw_value().shape

  def get_value(self, **options: Any) -> Any:
    """Returns the value, cast to the dtype it is used in."""
    return _cast_to_use(stored(self), _owner(self).get_value(**options))

  def set_value(self, value: Any, **options: Any) -> None:
    """Stores a value in the dtype that the variable already has."""
    kept = like_stored(value, stored(self).get_raw_value())
    _owner(self).set_value(kept, **options)

  def __getattr__(self, name: str) -> Any:
    variable = stored(self)
    if variable.has_metadata(name):
      return variable.get_metadata(name)
    raw = variable.get_raw_value()
    if name in _AS_STORED:
      return getattr(raw, name)
    if name == "dtype":
      use = _use_dtype(variable)
      return use if use is not None and is_floating(raw) else raw.dtype
    return getattr(self.get_value(), name)


def _owner(view: Any) -> Any:
  """Returns what does a variable's own work: the variable, or the view if it has lost it."""
  variable = stored(view)
  return super(InUse, view) if variable is view else variable


def _forwarded(name: str) -> Any:
  def method(self: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(_owner(self), name)(*args, **kwargs)

  method.__name__ = name
  return method


_FORWARDED = (
  *("set_raw_value", "update_from_state", "copy_from", "set_metadata", "del_metadata"),
  *("copy", "replace", "to_state"),
)
for _name in _FORWARDED:
  setattr(InUse, _name, _forwarded(_name))


@functools.cache
def _in_use_class(cls: Any) -> Any:
  return type(cls)(cls.__name__, (InUse, cls), {"__slots__": ("mpjax_stored",)})


def in_use(variable: Any) -> Any:
  """Returns a variable as the module being called is to see it."""
  if isinstance(variable, (InUse, *_LEFT_ALONE)) or variable.hijax:
    return variable
  new = _in_use_class(type(variable)).from_metadata(
    variable.get_raw_value(), variable.get_metadata()
  )
  object.__setattr__(new, "mpjax_stored", variable)
  return new


def stored(variable: Any) -> Any:
  """Returns the variable itself, where `variable` may be a view of it.

  A view that went through a transform of JAX has lost its variable, and is one by itself.
  """
  try:
    return object.__getattribute__(variable, "mpjax_stored")
  except AttributeError:
    return variable


def strip(tree: PyTree) -> PyTree:
  """Returns `tree` with the variable itself in place of every view; itself if it has none."""
  found = False

  def leaf(x: Any) -> Any:
    nonlocal found
    found = found or isinstance(x, InUse)
    return stored(x) if isinstance(x, InUse) else x

  new = map_leaves(leaf, tree)
  return new if found else tree


def map_leaves(fun: Any, tree: PyTree) -> PyTree:
  """Maps `fun` over the leaves of `tree`; modules and variables are leaves, not trees."""
  try:
    return jax.tree.map(fun, tree, is_leaf=is_node)
  except (TypeError, ValueError):
    return tree  # Not a tree to JAX (keys that do not sort, say).


def is_node(x: Any) -> bool:
  """Whether `x` is a module, a variable or another object of NNX."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def like_stored(value: PyTree, old: PyTree) -> PyTree:
  """Returns `value` with its floating arrays in the dtypes of `old`, where the two agree."""
  if jax.tree.structure(value) != jax.tree.structure(old):
    return value

  def leaf(new: Any, before: Any) -> Any:
    floating = hasattr(before, "dtype") and jnp.issubdtype(before.dtype, jnp.floating)
    return cast_leaf(new, before.dtype) if floating else new

  return jax.tree.map(leaf, value, old)


def _use_dtype(variable: Any) -> np.dtype[Any] | None:
  active = current()
  return active.use_dtype if active is not None and isinstance(variable, CAST) else None


def _cast_to_use(variable: Any, value: PyTree) -> PyTree:
  use = _use_dtype(variable)
  if use is None:
    return value
  return jax.tree.map(lambda x: _cast(x, use), value)


def _cast(x: Any, dtype: np.dtype[Any]) -> Any:
  return jax.lax.convert_element_type(x, dtype) if is_floating(x) and x.dtype != dtype else x
