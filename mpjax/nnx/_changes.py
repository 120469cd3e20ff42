"""Copy the changes of a call from the modules of a view to the user's modules."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
from flax import nnx

from mpjax.nnx._graph import CONTAINERS, is_node
from mpjax.nnx._link import LINK, is_view, model_of, note_mode, user_class

_MISSING = object()


class Models:
  """The user's objects behind the objects of a view, as they are before a call.

  The user's module is at the end of a link. An `nnx.List` or `nnx.Dict` has no link, which would be
  one of its items. The user's is in the same attribute of the user's module.
  """

  def __init__(self, modules: Iterable[nnx.Pytree]) -> None:
    self._by_id: dict[int, nnx.Pytree] = {}
    for module in modules:
      model = model_of(module)
      if model is not None:
        self._pair(module, model)

  def _pair(self, module: nnx.Pytree, model: nnx.Pytree) -> None:
    """Notes the user's object behind one of a view, and behind the containers in it."""
    # Several modules may share a container.
    if id(module) in self._by_id:
      return
    self._by_id[id(module)] = model
    for name, x in vars(module).items():
      theirs = vars(model).get(name)
      if isinstance(x, CONTAINERS) and isinstance(theirs, CONTAINERS):
        self._pair(x, theirs)

  def get(self, x: object, default: Any = None) -> Any:
    """Returns the user's object behind an object of the view, or the default."""
    return self._by_id.get(id(x), default)

  def behind(self, x: Any) -> Any:
    """Returns what the user's module has to hold where that of the view holds `x`.

    Behind a container that a call has created, this is a new one with the user's modules in it.
    """
    if isinstance(x, CONTAINERS) and id(x) not in self._by_id:
      new = object.__new__(user_class(x) if is_view(x) else type(x))
      self._by_id[id(x)] = new
      vars(new).update({name: self.behind(part) for name, part in vars(x).items()})
    return self.get(x, x)


def copy_changes(module: nnx.Pytree, before: Mapping[str, Any], models: Models) -> None:
  """Copies what a call has changed on a view's module to the user's module.

  Args:
    module: the view's module; nothing happens if there is none of the user's behind it.
    before: its attributes before the call.
    models: the user's objects.
  """
  model = models.get(module)
  if model is None:
    return
  now, held = vars(module), vars(model)
  gone = before.keys() - now.keys() - {LINK}
  changed = [
    (name, x) for name, x in now.items() if x is not before.get(name, _MISSING) and name != LINK
  ]
  if isinstance(model, CONTAINERS):
    # Write to `vars`, without `__setattr__`: the items and the length, an attribute beside them,
    # must change together.
    for name in gone:
      held.pop(name, None)
    held.update({name: models.behind(x) for name, x in changed})
    return
  for name in gone:
    # Delete only the counterpart of what the view had. The user may have set another object since.
    if held.get(name) is models.get(before[name], before[name]):
      delattr(model, name)
  for name, new in changed:
    if isinstance(new, Mapping) and LINK in new:
      # NNX notes which attributes are data. The user's module has no link.
      new = cast(Any, type(new))({key: x for key, x in new.items() if key != LINK})
    old, theirs = held.get(name), models.behind(new)
    if _is_plain(new) or theirs is not new:
      setattr(model, name, theirs)
      note_mode(module, name)
    elif old is before.get(name) and type(new) is type(old):
      # Both held this list or dict, and NNX replaced that of the view by a copy. Put the content
      # into the original, which other code of the user's may hold. Other objects that a call sets
      # stay with the view.
      vars(module)[name] = held[name] = _refilled(old, new)


def _refilled(original: Any, copy: Any) -> Any:
  """Returns a list or dict with the content of its copy; the copy of any other object."""
  if type(original) is not type(copy):
    return copy
  if type(original) is list:
    # `map` stops at the shorter list. Items that are new have no original.
    original[:] = [*map(_refilled, original, copy), *copy[len(original) :]]
    return original
  if type(original) is dict:
    parts = {key: _refilled(original.get(key), x) for key, x in copy.items()}
    original.clear()
    original.update(parts)
    return original
  return copy


def _is_plain(x: object) -> bool:
  """Whether a module of the user's may hold the very object that a call has set on the view's.

  It may hold a variable and an array, but no container of these, and none of the view's modules.
  """
  if isinstance(x, (nnx.Variable, jax.Array)):
    return True
  # Inside of a container, an array or module would be one of the view's.
  leaves = jax.tree.leaves(x, is_leaf=is_node)
  return not any(isinstance(leaf, (nnx.Variable, jax.Array, nnx.Pytree)) for leaf in leaves)
