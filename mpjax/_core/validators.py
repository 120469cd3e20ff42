"""Checks of single arguments, which raise errors of four parts.

Each takes the value and `where`, the public call with the argument's name, and returns the value
with its type known. `expected` and `fix` are the parts of the text that only the caller knows.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of, nearest
from mpjax._core.types import Leaf

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


def wrong_type(value: object, where: str, *, expected: str, fix: str) -> MpjaxTypeError:
  """Returns the error for a value of another type, which shows the value too."""
  got = f"{value!r} of type {type(value).__name__}"
  return MpjaxTypeError(where, expected=expected, got=got, fix=fix)


def check_type(
  value: object, kind: type[T] | tuple[type[T], ...], where: str, *, expected: str, fix: str
) -> T:
  """Raises unless `value` is a `kind`; for states and trees, whose values would fill a screen."""
  if not isinstance(value, kind):
    raise MpjaxTypeError(where, expected=expected, got=kind_of(value), fix=fix)
  return value


def check_flag(value: object, where: str) -> bool:
  """Raises unless `value` is True or False."""
  if not isinstance(value, bool):
    raise wrong_type(value, where, expected="a bool", fix="Pass True or False.")
  return value


def check_int(
  value: object,
  where: str,
  *,
  least: int,
  most: int | None = None,
  expected: str | None = None,
  fix: str,
  fix_type: str = "Pass a Python int.",
) -> int:
  """Raises unless `value` is an integer of Python or NumPy (a bool is none) in the limits.

  `expected` is their text where they are no plain numbers or not all that is allowed; `fix` is for
  an integer out of range, `fix_type` for another type.
  """
  upto = "" if most is None else f" and at most {most}"
  wanted = expected or f"an integer, at least {least}{upto}"
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise wrong_type(value, where, expected=wanted, fix=fix_type)
  number = int(value)
  in_range = number >= least and (most is None or number <= most)
  check_value(number, in_range, where, expected=wanted, fix=fix)
  return number


def check_number(value: object, where: str, *, expected: str, fix: str) -> numbers.Real:
  """Raises unless `value` is a real number of Python or NumPy: no bool, array or traced value."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise wrong_type(value, where, expected=expected, fix=fix)
  return value


def check_value(value: object, allowed: bool, where: str, *, expected: str, fix: str) -> None:
  """Raises unless `value`, of the right type, is `allowed`."""
  if not allowed:
    raise MpjaxValueError(where, expected=expected, got=repr(value), fix=fix)


def check_choice(value: object, choices: Sequence[str], where: str) -> None:
  """Raises unless `value` is one of `choices`, and names those most like it."""
  if value not in choices:
    raise MpjaxValueError(
      where,
      expected=" or ".join(map(repr, choices)),
      got=repr(value),
      fix=f"Did you mean {' or '.join(map(repr, nearest(str(value), choices)))}?",
    )


def check_callable(value: F, where: str, *, expected: str, fix: str) -> F:
  """Raises unless `value` can be called."""
  if not callable(value):
    raise MpjaxTypeError(where, expected=expected, got=kind_of(value), fix=fix)
  return value


def check_scalar(x: Leaf, where: str, *, expected: str, fix: str) -> None:
  """Raises unless `x`, an array or a Python number, has the shape ()."""
  if jnp.shape(x) != ():
    got = f"an array of shape {jnp.shape(x)}"
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
