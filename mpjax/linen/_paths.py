"""Paths of modules in the keys by which Flax's lifted transforms find their traces."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze

from mpjax._core.trees import instances_in
from mpjax.linen._active import current

# `nn.jit` reuses a trace for an equal module elsewhere. Under Rule("float32", path="b") the layer
# "b" would run in the dtype of an equal layer "a". Of what its key is made of, only the flags of a
# module's scope can hold the path. They have to be there when the scope is created, because no
# interceptor sees a call of a class of `nn.jit` before the key is made.
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
  # A module creates the scopes of its submodules by `push` of its own scope, so that has to be a
  # scope of ours. Flax has no hook for it: `push`, `rewound`, `lift.pack`, `bind` and `apply` name
  # the class `Scope`, and children take over the flags of their parent (a test says so). A copy of
  # our class does not do: it needs the variables, a private attribute, and would stay valid where
  # Flax invalidates the original. So the object gets the class. Without an active policy it behaves
  # as before.
  if type(scope) is Scope:
    scope.__class__ = PathScope
  active, path = current(), "/".join(scope.path)
  # A child inherits the flags of its parent, so the path has to be replaced.
  if active is not None and active.config is not None and scope.flags.get(_FLAG) != path:
    scope.flags = freeze({**scope.flags, _FLAG: path})
  return scope
