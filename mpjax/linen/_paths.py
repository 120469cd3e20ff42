"""Paths of modules in the keys by which Flax's lifted transforms find their traces."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze

from mpjax._core.trees import instances_in
from mpjax.linen._active import current

# `nn.jit` reuses a trace for an equal module elsewhere. Under Rule("float32", path="b") the layer
# "b" would run in the dtype of an equal layer "a". The flags of a scope are part of its key.
_FLAG = "mpjax_path"


class PathScope(Scope):
  """A Flax scope that gives the scopes created from it a flag that holds their path."""

  def push(self, *args: Any, **kwargs: Any) -> Scope:
    return _flagged(super().push(*args, **kwargs))

  def rewound(self, rewind_rngs: bool = False) -> Scope:
    return _flagged(super().rewound(rewind_rngs))


def flag_paths(modules: Iterable[nn.Module]) -> None:
  """Flags the scopes of modules, and of those that they hold."""
  for module in modules:
    if module.scope is not None:
      _flagged(module.scope)
      flag_paths(x for x in instances_in(vars(module), nn.Module) if x.parent is module)


def _flagged(scope: Scope) -> Scope:
  # Flax creates scopes in many functions and shares them by identity, so a copy would be another
  # scope. Give the object itself the class. Without an active policy it behaves as before.
  if type(scope) is Scope:
    scope.__class__ = PathScope
  active, path = current(), "/".join(scope.path)
  # A child inherits the flags of its parent, so the path has to be replaced.
  if active is not None and active.config is not None and scope.flags.get(_FLAG) != path:
    scope.flags = freeze({**scope.flags, _FLAG: path})
  return scope
