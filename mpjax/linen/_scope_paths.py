"""Scopes that tell `nn.jit` where a module is, where rules depend on it.

`nn.jit` reuses what it traced for an equal module elsewhere: under `Rule("float32", path="b")` the
layer "b" would run in the dtype of an equal layer "a". Flags of scopes are part of its key.
"""

from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze

from mpjax._core.policy_config import PolicyConfig
from mpjax._core.trees import instances_in
from mpjax.linen._context import current

_FLAG = "mpjax_path"


class PathScope(Scope):
  """A Flax scope that gives the scopes created from it a flag that holds their path."""

  def push(self, *args: Any, **kwargs: Any) -> Scope:
    """Returns a child scope with its own flag."""
    return _flagged(super().push(*args, **kwargs))

  def rewound(self, rewind_rngs: bool = False) -> Scope:
    """Returns a rewound scope with its own flag."""
    return _flagged(super().rewound(rewind_rngs))


def flag_paths(module: nn.Module, args: object, config: PolicyConfig) -> None:
  """Flags the scopes of a module, and of the modules that it holds or is given."""
  if config.by_path:
    for found in (module, *instances_in(args, nn.Module)):
      _flag(found)


def _flag(module: nn.Module) -> None:
  if module.scope is not None:
    _flagged(module.scope)
    for held in instances_in(vars(module), nn.Module):
      if held.parent is module:
        _flag(held)


def _flagged(scope: Scope) -> Scope:
  # Flax creates scopes in many functions and shares them by identity, so the object itself is given
  # the class. Where no policy is active, it behaves as before.
  if type(scope) is Scope:
    scope.__class__ = PathScope
  active, path = current(), "/".join(scope.path)
  # A child begins with the flags of its parent.
  if active is not None and active.config is not None and scope.flags.get(_FLAG) != path:
    scope.flags = freeze({**scope.flags, _FLAG: path})
  return scope
