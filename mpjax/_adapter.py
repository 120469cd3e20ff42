"""`Adapter`: how the modules of one class are called under a policy, and the pieces of adapters."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._dtypes import scalar_type
from mpjax._errors import MpjaxTypeError, message
from mpjax._functions import identity
from mpjax._tree import cast_leaf, is_floating, is_nnx_object
from mpjax._types import PyTree

Cast: TypeAlias = Callable[[PyTree], PyTree]
"""Casts the floating arrays of a tree to one dtype."""

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a method."""


def cast_inputs(module: Any, method: str, call: Call, cast: Cast) -> Call:
  """Returns the arguments of a call with every floating array cast: what most modules need.

  Args:
    module: the bound module.
    method: the name of the method that is called.
    call: its positional and keyword arguments.
    cast: casts a tree to the compute dtype.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> call = ((jnp.ones(2), 3), {"train": True})
  >>> half = lambda x: x.astype(jnp.bfloat16) if hasattr(x, "dtype") else x
  >>> mpjax.linen.cast_inputs(None, "__call__", call, lambda t: jax.tree.map(half, t))
  ((Array([1, 1], dtype=bfloat16), 3), {'train': True})
  """
  args, kwargs = call
  return tuple(cast(x) for x in args), {k: cast(x) for k, x in kwargs.items()}


def cast_outputs(module: Any, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  """Returns what a call gave with every floating array cast: what most modules need.

  Args:
    module: the bound module.
    method: the name of the method that was called.
    call: its arguments, as they came in.
    outputs: what it returned.
    cast: casts a tree to the dtype that is handed on.

  >>> import jax.numpy as jnp, mpjax
  >>> mpjax.linen.cast_outputs(None, "__call__", ((), {}), jnp.ones(2), lambda t: t.astype("int8"))
  Array([1, 1], dtype=int8)
  """
  return cast(outputs)


def set_dtype(module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  """Returns the field `dtype` to set for the length of a call, if the module has one to set.

  A module whose own dtype (or `param_dtype`) is complex or an integer means what it says, and so
  does one whose field holds something that is no dtype.

  Args:
    module: the bound module.
    method: the name of the method that is called.
    dtype: the compute dtype.

  >>> import flax.linen as nn, jax.numpy as jnp, mpjax
  >>> mpjax.linen.set_dtype(nn.Dense(3), "__call__", jnp.dtype("bfloat16"))
  {'dtype': <class 'jax.numpy.bfloat16'>}
  """
  if not _has_dtype(module):
    return {}
  own = plain_attribute(module, "dtype")
  if not (_is_real(own) and _is_real(plain_attribute(module, "param_dtype"))):
    return {}
  # Code compares with `is jnp.bfloat16`, or looks a name up: hand over what it had.
  return {"dtype": dtype.name if isinstance(own, str) else scalar_type(dtype)}


def _has_dtype(module: Any) -> bool:
  """Whether a module has a field `dtype`; where its class declares no fields, an attribute."""
  if dataclasses.is_dataclass(module):
    return any(field.name == "dtype" and field.init for field in dataclasses.fields(module))
  return plain_attribute(module, "dtype", _MISSING) is not _MISSING


_MISSING = object()


def plain_attribute(module: Any, name: str, default: Any = None) -> Any:
  """Returns an attribute that is a value, without running code of the user's; else `default`.

  A property of a module may call one of its methods, read a parameter, or set up submodules. It
  computes a dtype rather than holding one, so that there is nothing in it to set.
  """
  value = inspect.getattr_static(module, name, default)
  return default if hasattr(type(value), "__get__") else value


def _is_real(dtype: Any) -> bool:
  """Whether `dtype` is unset or a floating dtype."""
  if dtype is None:
    return True
  try:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """How the modules of one class are called under a policy.

  The default fits a module that nothing special is known about. An adapter for a class goes to
  `with_policy(..., adapters={MyCell: mpjax.linen.Adapter(...)})`; subclasses inherit it. The same
  class serves NNX, as `mpjax.nnx.Adapter`.

  Args:
    params: "compute": parameters are cast at each use; "stored": the module reads them as they
      are stored, because it knows better when to cast.
    inputs: `(module, method, (args, kwargs), cast) -> (args, kwargs)`: which arguments to cast.
    fields: `(module, method, compute_dtype) -> {field: value}`: the module's fields to set for
      the length of the call.
    outputs: `(module, method, (args, kwargs), outputs, cast) -> outputs`: which outputs to cast.
    rounds: what the module returns is not in the compute dtype by itself (the rows of a stored
      table, a float32 state): cast it even at a root whose policy has no `output_dtype`.

  Raises:
    MpjaxTypeError: `params` is neither "compute" nor "stored", or another field is no function.

  >>> import mpjax
  >>> mpjax.linen.Adapter(params="stored").params
  'stored'
  """

  params: Literal["compute", "stored"] = "compute"
  inputs: Callable[[Any, str, Call, Cast], Call] = cast_inputs
  fields: Callable[[Any, str, np.dtype[Any]], dict[str, Any]] = set_dtype
  outputs: Callable[[Any, str, Call, Any, Cast], Any] = cast_outputs
  rounds: bool = False

  def __post_init__(self) -> None:
    if self.params not in ("compute", "stored"):
      where, expected = "Adapter(params=...)", "'compute' or 'stored'"
      fix = "Leave it out unless the module casts its own parameters."
      raise MpjaxTypeError(message(where, expected=expected, got=repr(self.params), fix=fix))
    for name, arguments in _ARGUMENTS.items():
      function = getattr(self, name)
      if not _takes(function, len(arguments)):
        where, expected = f"Adapter({name}=...)", f"a function of ({', '.join(arguments)})"
        fix = "See mpjax.linen.Adapter for what it is given and returns."
        raise MpjaxTypeError(message(where, expected=expected, got=repr(function), fix=fix))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Adapter) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)

  def __reduce__(self) -> Any:
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return functools.partial(type(self), **fields), ()

  @functools.cached_property
  def _key(self) -> tuple[Any, ...]:
    functions = map(identity, (self.inputs, self.fields, self.outputs))
    return (self.params, *functions, self.rounds)


_ARGUMENTS = {
  "inputs": ("module", "method", "(args, kwargs)", "cast"),
  "fields": ("module", "method", "compute_dtype"),
  "outputs": ("module", "method", "(args, kwargs)", "outputs", "cast"),
}


def call_inputs(adapter: Adapter, module: Any, method: str, call: Call, cast: Cast) -> Call:
  """Returns what `inputs` makes of the arguments of a call.

  Raises:
    MpjaxTypeError: it is no pair of positional and keyword arguments.
  """
  new: Any = adapter.inputs(module, method, call, cast)
  pair = isinstance(new, tuple) and len(new) == 2
  if not (pair and isinstance(new[0], (tuple, list)) and isinstance(new[1], Mapping)):
    fix = "Return tuple(cast(x) for x in args), kwargs."
    raise _wrong_result(module, "inputs", "(args, kwargs), a tuple and a dict", new, fix)
  return tuple(new[0]), dict(new[1])


def call_fields(adapter: Adapter, module: Any, method: str, dtype: np.dtype[Any]) -> dict[str, Any]:
  """Returns the fields to set for the length of a call.

  Raises:
    MpjaxTypeError: they are no dict, or the module has no field of such a name.
  """
  new: Any = adapter.fields(module, method, dtype)
  known = isinstance(new, Mapping)
  missing = [name for name in new if not _has(module, name)] if known else []
  if not known or missing:
    got: Any = f"no such field: {', '.join(map(repr, missing))}" if missing else new
    fix = 'Return {"dtype": dtype}, or {} to set nothing.'
    raise _wrong_result(module, "fields", "a dict by names of the module's fields", got, fix)
  return dict(new)


def call_outputs(
  adapter: Adapter, module: Any, method: str, call: Call, outputs: Any, cast: Cast
) -> Any:
  """Returns what `outputs` makes of the outputs of a call.

  Raises:
    MpjaxTypeError: it is None, where the module returned something.
  """
  new = adapter.outputs(module, method, call, outputs, cast)
  if new is None and outputs is not None:
    fix = "Return cast(outputs), or outputs as they are."
    raise _wrong_result(module, "outputs", "the outputs of the module", new, fix)
  return new


def warn_of_uncast(module: Any, outputs: Any, dtype: np.dtype[Any]) -> None:
  """Warns if arrays in another dtype are returned inside of an object that is no tree to JAX.

  Args:
    module: the outermost module, whose policy has an output dtype.
    outputs: what it returned, cast.
    dtype: the output dtype.
  """
  try:
    leaves = jax.tree.leaves(outputs, is_leaf=is_nnx_object)
  except (TypeError, ValueError):
    leaves = [outputs]
  for x in leaves:
    fields = {} if is_nnx_object(x) or isinstance(x, type) else getattr(x, "__dict__", {})
    kept = [name for name, v in fields.items() if is_floating(v) and v.dtype != dtype]
    if kept and not hasattr(x, "dtype") and not callable(x):
      warnings.warn(
        message(
          f"{type(module).__name__} under a policy with output_dtype={dtype.name}",
          expected="outputs that are arrays, or trees of them to JAX",
          got=f"a {type(x).__name__}, of which {', '.join(kept)} stay in {fields[kept[0]].dtype}",
          fix="Register its class (jax.tree_util.register_dataclass), or cast them in the module.",
        ),
        stacklevel=2,
      )


def _has(module: Any, name: str) -> bool:
  return inspect.getattr_static(module, name, _MISSING) is not _MISSING


def _takes(function: Any, count: int) -> bool:
  """Whether something can be called with so many arguments, as far as it says."""
  try:
    inspect.signature(function).bind(*range(count))
  except TypeError:
    return False
  except ValueError:
    return True  # Something built in that does not say.
  return True


def _wrong_result(module: Any, name: str, expected: str, got: Any, fix: str) -> MpjaxTypeError:
  where = f"Adapter({name}=...) for {type(module).__name__}: what it returned"
  shown = got if isinstance(got, str) else repr(got)[:200]
  return MpjaxTypeError(message(where, expected=expected, got=shown, fix=fix))


def like(new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` with its floating arrays in the dtypes of `old`, where the two agree in shape."""
  if jax.tree.structure(new) != jax.tree.structure(old):
    return new

  def leaf(n: Any, o: Any) -> Any:
    same = hasattr(o, "dtype") and jnp.shape(n) == jnp.shape(o)
    return cast_leaf(n, o.dtype) if same and _is_real(o.dtype) else n

  return jax.tree.map(leaf, new, old)


def keep_carry_inputs(module: Any, method: str, call: Call, cast: Cast) -> Call:
  """Returns a cell's arguments with all but the carry cast."""
  args, kwargs = call
  if method != "__call__":
    return args, kwargs
  kept = {k: x if k == "carry" else cast(x) for k, x in kwargs.items()}
  return (*args[:1], *(cast(x) for x in args[1:])), kept


def keep_carry_outputs(module: Any, method: str, call: Call, outputs: Any, cast: Cast) -> Any:
  """Returns `(carry, outputs)` with the carry in the dtypes it came in and the outputs cast."""
  args, kwargs = call
  if method != "__call__" or not (isinstance(outputs, tuple) and len(outputs) == 2):
    return outputs if method != "__call__" else cast(outputs)
  carry = args[0] if args else kwargs.get("carry")
  return like(outputs[0], carry), cast(outputs[1])
