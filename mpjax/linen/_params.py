"""Parameters and caches cast where they are read: at each use, not when a model is entered.

Cast at use, a parameter that is used T times (a cell over time, a shared layer) adds up the T
cotangents in its stored dtype; cast once at entry, it would add them up in half.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict, Scope, freeze
from flax.core.meta import AxisMetadata, is_axis_metadata

from mpjax._dtypes import scalar_type
from mpjax._full_precision import ACTIVE
from mpjax._rules import place_of
from mpjax._tree import cast_leaf, is_floating
from mpjax._types import PyTree
from mpjax.linen._context import Active

COLLECTIONS = ("params", "cache")
"""What is cast. Statistics, intermediates and all that users keep in other collections never is."""

_PLACE_FLAG = "mpjax_place"


class CastScope(Scope):
  """A Flax scope that reads parameters and caches through the policy in force.

  What is stored stays as it is: transforms, mutation and the variables that `apply` returns see
  plain arrays in a plain tree. With no policy in force it is a scope like any other.
  """

  def get_variable(self, col: str, name: str, default: Any = None) -> Any:
    """Returns a variable, cast to the dtype it is used in."""
    return _read(col, super().get_variable(col, name, default))

  def put_variable(self, col: str, name: str, value: Any) -> None:
    """Stores a variable in the dtype it already has."""
    if col in COLLECTIONS and _policied() is not None:
      value = _like_stored(value, super().get_variable(col, name))
    super().put_variable(col, name, value)

  def param(
    self, name: str, init_fn: Any, *init_args: Any, unbox: bool = True, **kwargs: Any
  ) -> Any:
    """Returns a parameter, cast to the dtype it is used in; creates it as without a policy."""
    active = _policied()
    if active is None or active.policy is None:
      return super().param(name, init_fn, *init_args, unbox=unbox, **kwargs)
    own, kwargs = _own_dtypes(active, init_args, kwargs)
    value = super().param(name, init_fn, *own, unbox=unbox, **kwargs)
    if self.is_mutable_collection("params") and self.get_flag("initializing", False):
      stored = super().get_variable("params", name)
      dtype = active.policy.param_dtype
      super().put_variable("params", name, jax.tree.map(lambda x: cast_leaf(x, dtype), stored))
    return _read("params", value) if unbox else value

  def variable(
    self, col: str, name: str, init_fn: Any = None, *init_args: Any, **kwargs: Any
  ) -> Any:
    """Returns a variable; creates it as without a policy, a cache in the dtype of what it holds."""
    active = _policied()
    if active is None or active.policy is None or init_fn is None or col == "cache":
      return super().variable(col, name, init_fn, *init_args, **kwargs)
    unbox = kwargs.pop("unbox", True)
    own, kwargs = _own_dtypes(active, init_args, kwargs)
    if col != "params":
      return super().variable(col, name, init_fn, *own, unbox=unbox, **kwargs)
    dtype = active.policy.param_dtype

    def made(*args: Any, **kwargs: Any) -> Any:
      return jax.tree.map(lambda x: cast_leaf(x, dtype), init_fn(*args, **kwargs))

    return super().variable(col, name, made, *own, unbox=unbox, **kwargs)

  def variables(self) -> Any:
    """Returns the variables; a parameter that is read from them behaves as an array in use."""
    found = super().variables()
    active = _policied()
    if active is None or active.use_dtype is None:
      return found
    lazy = {col: _lazy(found[col], active) for col in COLLECTIONS if col in found}
    return found.copy(lazy) if isinstance(found, FrozenDict) else {**found, **lazy}

  def push(self, *args: Any, **kwargs: Any) -> Scope:
    """Returns a child scope that reads through the policy too."""
    return attach(super().push(*args, **kwargs))

  def rewound(self, *args: Any, **kwargs: Any) -> Scope:
    """Returns a rewound scope that reads through the policy too."""
    return attach(super().rewound(*args, **kwargs))


def attach(scope: Scope) -> Scope:
  """Makes `scope` read through the policy in force, and returns it.

  Flax makes scopes in many places and shares them by identity, so the object itself is given the
  class; outside of a policy nothing about it changes.
  """
  if type(scope) is Scope:
    scope.__class__ = CastScope
  active = _policied()
  if active is not None and active.given is not None and isinstance(scope, CastScope):
    # nn.jit reuses what it traced for an equal module elsewhere. Flags are part of its key, and
    # tell two places apart where a rule does.
    given, flags = active.given, {k: v for k, v in scope.flags.items() if k != _PLACE_FLAG}
    if given.by_place:
      rules = (*given.rules, *given.defaults)
      flags[_PLACE_FLAG] = place_of(rules, "/".join(scope.path))
    if flags != scope.flags:
      scope.flags = freeze(flags)
  return scope


def _policied() -> Active | None:
  """Returns the active state where there is a policy to apply."""
  active = ACTIVE.value
  return None if active is None or active.given is None else active


def _own_dtypes(active: Active, args: Any, kwargs: Any) -> tuple[Any, Any]:
  """Returns the arguments of an initialiser as they are without a policy.

  A module may hand it its own `dtype` field, as what variables are made in. That field is set to
  the compute dtype now; random numbers drawn in half are other numbers.
  """
  own = tuple(_own_dtype(active, arg) for arg in args)
  return own, {key: _own_dtype(active, arg) for key, arg in kwargs.items()}


def _own_dtype(active: Active, arg: Any) -> Any:
  """Returns the module's own dtype where `arg` is the compute dtype that its field is set to."""
  if not active.own_dtype or active.policy is None:
    return arg
  compute = active.policy.compute_dtype
  is_set = arg is scalar_type(compute) or (isinstance(arg, (str, np.dtype)) and arg == compute)
  return active.own_dtype[0] if is_set else arg


def _read(col: str, value: PyTree) -> PyTree:
  """Returns a stored value as the module being called uses it."""
  active = _policied()
  if col not in COLLECTIONS or active is None or active.use_dtype is None or value is None:
    return value
  if any(map(is_axis_metadata, jax.tree.leaves(value, is_leaf=is_axis_metadata))):
    # A sharding constraint belongs on the stored array, and the cast after it.
    return _lazy(value, active)
  return jax.tree.map(lambda x: _cast(x, active.use_dtype), value)


def _cast(x: Any, dtype: Any) -> Any:
  return jax.lax.convert_element_type(x, dtype) if is_floating(x) and x.dtype != dtype else x


def _like_stored(value: PyTree, stored: PyTree) -> PyTree:
  if jax.tree.structure(value) != jax.tree.structure(stored):
    return value
  return jax.tree.map(_written, value, stored)


def _written(new: Any, old: Any) -> Any:
  """Returns what is stored where `new` is written over `old`: `old` where that was only rounded.

  An NNX model inside of Linen writes all of its parameters back, changed or not.
  """
  if not (is_floating(old) and is_floating(new)) or new.dtype == old.dtype:
    return new
  if jnp.shape(new) != jnp.shape(old) or new.dtype.itemsize >= old.dtype.itemsize:
    return cast_leaf(new, old.dtype)
  return _unrounded(new, old)


@jax.custom_jvp
def _unrounded(new: Any, old: Any) -> Any:
  return jnp.where(new == cast_leaf(old, new.dtype), old, cast_leaf(new, old.dtype))


@_unrounded.defjvp
def _unrounded_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
  """The derivative of the cast: what was computed may be equal to what it replaces by chance."""
  new, old = primals
  return _unrounded(new, old), cast_leaf(tangents[0], old.dtype)


def _lazy(tree: PyTree, active: Active) -> PyTree:
  def box(path: Any, x: Any) -> Any:
    pending = is_floating(x) and x.dtype != active.use_dtype
    return LazyParam(x, _Name(path[-1] if path else None)) if pending else x

  return jax.tree_util.tree_map_with_path(box, tree, is_leaf=is_lazy)


def is_lazy(x: Any) -> bool:
  """Whether `x` is a `LazyParam`: to be passed as `is_leaf`."""
  return isinstance(x, LazyParam)


def strip(tree: PyTree) -> PyTree:
  """Returns `tree` with the stored array in place of every `LazyParam`; itself if it has none."""
  try:
    leaves = jax.tree.leaves(tree, is_leaf=is_lazy)
  except (TypeError, ValueError):
    return tree  # No tree to JAX (keys that do not sort, say).
  if not any(map(is_lazy, leaves)):
    return tree
  return jax.tree.map(lambda x: x.stored if is_lazy(x) else x, tree, is_leaf=is_lazy)


@dataclasses.dataclass(frozen=True)
class _Name:
  """The name of a variable, as a tree path shows it: the same step again, and without text.

  It is equal to every other name: what a parameter is called is no part of a tree's structure.
  """

  key: Any

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Name)

  def __hash__(self) -> int:
    return 0


class _Step:
  """The last step of the path to a stored array: `.key` is the variable's name, its text empty."""

  def __init__(self, name: _Name) -> None:
    self.key = getattr(name.key, "key", name.key)

  def __str__(self) -> str:
    return ""

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Step) and other.key == self.key

  def __hash__(self) -> int:
    return hash(self.key)


class LazyParam(AxisMetadata[Any]):
  """A parameter found in `module.variables`: stored array to trees, half array in use.

  `jax.tree` sees the stored array, so that a weight penalty over `self.variables` is computed in
  float32 and its gradient has the stored dtype. Anything else that is done with it (a product,
  `.T`, an index: the ways in which a tied head reads its table) is done with the cast value.
  """

  def __init__(self, stored: Any, name: _Name) -> None:
    self.stored = stored
    self.name = name

  def unbox(self) -> Any:
    """Returns the parameter in the dtype the module being called uses."""
    active = _policied()
    use = None if active is None else active.use_dtype
    return self.stored if use is None else _cast(self.stored, use)

  def replace_boxed(self, val: Any) -> Any:
    """Returns `val` in the dtype of the stored array."""
    return cast_leaf(val, self.stored.dtype) if is_floating(self.stored) else val

  def add_axis(self, index: int, params: dict[Any, Any]) -> "LazyParam":
    """Returns itself: nothing here depends on the axes."""
    return self

  def remove_axis(self, index: int, params: dict[Any, Any]) -> "LazyParam":
    """Returns itself: nothing here depends on the axes."""
    return self

  def __jax_array__(self) -> Any:
    return jnp.asarray(self.unbox())

  def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
    return np.asarray(self.unbox(), dtype=dtype)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__") or name in ("stored", "name"):
      raise AttributeError(name)
    return getattr(self.unbox(), name)

  def __repr__(self) -> str:
    return f"LazyParam({self.stored!r})"


def _forward(name: str) -> Any:
  def method(self: LazyParam, *args: Any) -> Any:
    return getattr(self.unbox(), name)(*args)

  method.__name__ = name
  return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHER = ("getitem", "len", "iter", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge")
for _op in (*_BINARY, *(f"r{op}" for op in _BINARY), *_OTHER, "float", "int", "bool"):
  setattr(LazyParam, f"__{_op}__", _forward(f"__{_op}__"))
LazyParam.__hash__ = object.__hash__

jax.tree_util.register_pytree_with_keys(
  LazyParam,
  lambda box: (((_Step(box.name), box.stored),), box.name),
  lambda name, children: LazyParam(next(iter(children)), name),
  lambda box: ((box.stored,), box.name),
)
