"""Functions around functions of users."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def name_of(fn: object) -> str:
  """Returns the name of a function, or of the class of a model that is called."""
  return getattr(fn, "__name__", type(fn).__name__)


def wraps(
  fn: Callable[..., Any], updated: Sequence[str] = functools.WRAPPER_UPDATES
) -> Callable[[_F], _F]:
  """Returns a decorator that gives a function the name and the signature of another one.

  A wrapper of a `functools.partial` is one too. Its fixed keywords are defaults in its signature,
  which JAX and Flax would take for keyword arguments of the call, unless the class tells them.

  Args:
    fn: the other function, or any callable.
    updated: the attributes that are updated, as for `functools.wraps`.
  """

  def decorate(wrapper: _F) -> _F:
    functools.update_wrapper(wrapper, fn, updated=updated)
    partial: Any = functools.partial(wrapper)
    return partial if isinstance(fn, functools.partial) else wrapper

  return decorate
