"""When two functions are the same, and methods of other objects."""

import dis
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any


class _Itself:
  """A value without a hash, compared as the object that it is."""

  def __init__(self, value: object) -> None:
    self.value = value

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Itself) and self.value is other.value

  def __hash__(self) -> int:
    return id(self.value)


def identity(function: object, *, inside: tuple[object, ...] = ()) -> object:
  """Returns what a function is compared by: its code, and the values that it reads.

  A lambda in a loop, or inside of a step, is created anew each time. Compared as the object that it
  is, every function that is compiled for it would be another one. One that closes over
  something without a hash (an array, a list) is compared as the object that it is, as is what is
  no plain function. Globals count with the values that they have now: a key that is kept says what
  the function did when the key was created. What is inside of an object (an attribute, an item) is
  not read, nor what functions of other modules read.

  Args:
    function: the function.
    inside: the functions around, whose globals it is one of.

  >>> def equals(wanted):
  ...   return lambda name: name == wanted
  >>> identity(equals("a")) == identity(equals("a")), identity(equals("a")) == identity(equals("b"))
  (True, False)
  """
  if not isinstance(function, types.FunctionType) or any(function is f for f in inside):
    return function
  try:
    values = tuple(cell.cell_contents for cell in function.__closure__ or ())
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    made_with = (*values, *defaults)
    key: object = (function.__code__, id(function.__globals__), made_with, _types(made_with))
    hash(key)
  except (TypeError, ValueError):  # No hash, or a name that has no value yet.
    key = function
  names = (name for name in _global_names(function.__code__) if name in function.__globals__)
  read = {name: function.__globals__[name] for name in names}
  if not read:
    return key
  around = (*inside, function)

  def known_by(value: object) -> object:
    ours = getattr(value, "__globals__", None) is function.__globals__
    return _hashable(identity(value, inside=around) if ours else value)

  known = tuple(map(known_by, read.values()))
  # Changed in place, a list is the same object: a function that reads one is compared as itself.
  held = function if any(isinstance(value, _Itself) for value in known) else key
  return (held, tuple(read), known, _types(read.values()))


def _types(values: Iterable[object]) -> tuple[type, ...]:
  return tuple(map(type, values))


def _hashable(value: object) -> object:
  try:
    hash(value)
  except TypeError:
    return _Itself(value)
  return value


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
  """Returns the names that code, and the code of functions inside, looks for among globals.

  Not `co_names`: the names of attributes are there too. With `lambda m: m.params` a global `params`
  would be compared, kept alive by each key, and another value of it would be another rule.
  """
  here = {op.argval for op in dis.get_instructions(code) if op.opname in _READS_GLOBAL}
  nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
  return tuple(sorted(here.union(*map(_global_names, nested))))


_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


def rebound(value: Any, counterparts: Mapping[int, object]) -> Any:
  """Returns a method, alone or in `functools.partial`, as that of the counterpart of its object.

  Args:
    value: the method. Arguments of the partial that have a counterpart become that.
    counterparts: other objects by the identities of those that they replace.
  """
  if isinstance(value, types.MethodType):
    to = counterparts.get(id(value.__self__))
    return value if to is None else getattr(to, value.__name__)
  if isinstance(value, functools.partial):
    args = [rebound(x, counterparts) for x in value.args]
    kwargs = {name: rebound(x, counterparts) for name, x in value.keywords.items()}
    return functools.partial(rebound(value.func, counterparts), *args, **kwargs)
  return counterparts.get(id(value), value)
