"""When two functions are the same: what keys of caches compare them by."""

import types
from typing import Any


def identity(function: Any) -> Any:
  """Returns what a function is compared by: its code, and the values that it was made with.

  A lambda that is written in a loop, or inside of a step, is made anew each time. Compared as the
  object that it is, it would make every function that is compiled for it another one. One that was
  made with something that has no hash (an array, a list) is compared as the object that it is, and
  so is what is no plain function.

  >>> def equals(wanted):
  ...   return lambda name: name == wanted
  >>> identity(equals("a")) == identity(equals("a")), identity(equals("a")) == identity(equals("b"))
  (True, False)
  """
  if not isinstance(function, types.FunctionType):
    return function
  try:
    values = tuple(cell.cell_contents for cell in function.__closure__ or ())
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    made_with = (*values, *defaults)
    key = (function.__code__, id(function.__globals__), made_with, tuple(map(type, made_with)))
    hash(key)
  except (TypeError, ValueError):  # No hash, or a name that has no value yet.
    return function
  return key
