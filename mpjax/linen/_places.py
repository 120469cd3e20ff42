"""Scopes that tell `nn.jit` where a module is, as far as a rule does.

`nn.jit` reuses what it traced for an equal module elsewhere. Flags of scopes are part of its key.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze

from mpjax._core.policy_config import Given
from mpjax._core.rules import place_of
from mpjax.linen._context import current

_FLAG = "mpjax_place"


class PlacedScope(Scope):
  """A Flax scope that gives the scopes made from it a flag for where they are."""

  def push(self, *args: Any, **kwargs: Any) -> Scope:
    """Returns a child scope with its own flag."""
    return _placed(super().push(*args, **kwargs))

  def rewound(self, *args: Any, **kwargs: Any) -> Scope:
    """Returns a rewound scope with its own flag."""
    return _placed(super().rewound(*args, **kwargs))


def tell_places(module: nn.Module, args: Any, given: Given) -> None:
  """Flags the scopes of a module, and of the modules that it holds or is given.

  Args:
    module: the module being called.
    args: its arguments.
    given: the rules that tell places apart, or do not.
  """
  if given.by_place:
    for found in (module, *held_in(args)):
      _tell(found)


def _tell(module: nn.Module) -> None:
  if module.scope is not None:
    _placed(module.scope)
    for held in held_in(vars(module)):
      if held.parent is module:
        _tell(held)


def _placed(scope: Scope) -> Scope:
  # Flax makes scopes in many places and shares them by identity, so that the object itself is given
  # the class. Where no policy is active, it behaves as before.
  if type(scope) is Scope:
    scope.__class__ = PlacedScope
  active = current()
  given = None if active is None else active.given
  if given is not None:
    place = place_of((*given.rules, *given.defaults), "/".join(scope.path))
    if scope.flags.get(_FLAG) != place:
      scope.flags = freeze({**scope.flags, _FLAG: place})
  return scope


def held_in(value: Any) -> Iterator[nn.Module]:
  """Yields the modules in a field or in arguments: alone, or in plain containers."""
  if isinstance(value, nn.Module):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from held_in(item)
  elif isinstance(value, Mapping):
    for item in value.values():
      yield from held_in(item)
