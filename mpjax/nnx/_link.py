"""The policy of a view's module, and the link to the user's module behind it."""

import weakref
from collections.abc import Callable

from flax import nnx

from mpjax._core.errors import MpjaxRuntimeError
from mpjax._core.types import Class
from mpjax._policy.rules import ModulePolicy
from mpjax.nnx import _layers

POLICY = "_mpjax_policy"
"""The class attribute that holds the `ModulePolicy` of a view's modules."""

LINK = "_mpjax_link"
"""The attribute that holds the `Link` of a module. Lists and dicts of a view have none."""


class Link:
  """The way from a module of a view to the user's module.

  NNX copies a module with its attributes, so a copy has the link of its original. A link therefore
  knows which module it belongs to. From a copy it leads nowhere.

  Attributes:
    path: the path of the module in the model, for rules and errors.
    view: a weak reference to the module of the view; None in a copy by pickle.
    model: one to the user's module; likewise.
    modes: the modes of the user's module (`deterministic`, say) when the view was created, without
      those that were set on the view since.
  """

  # Links are static attributes, so JAX's caches keep them for as long as the program runs. Strong
  # references would keep every model and its arrays alive.
  def __init__(
    self, path: str, view: nnx.Pytree | None = None, model: nnx.Pytree | None = None
  ) -> None:
    self.path = path
    self.view = None if view is None else weakref.ref(view)
    self.model = None if model is None else weakref.ref(model)
    attributes = {} if model is None else vars(model)
    # Without the modes that the module leaves unset.
    self.modes = {x: flag for x in _layers.MODES if isinstance(flag := attributes.get(x), bool)}

  # JAX compares graph definitions. Another view of the same model must not be compiled again, so
  # all links are equal.
  def __eq__(self, other: object) -> bool:
    return isinstance(other, Link)

  def __hash__(self) -> int:
    return 0

  # A weak reference cannot be copied or pickled, and the link of a copy leads nowhere.
  def __reduce__(self) -> tuple[Callable[[str], "Link"], tuple[str]]:
    return Link, (self.path,)


def is_view(module: object) -> bool:
  """Whether a module is one of a view's."""
  return hasattr(type(module), POLICY)


def user_class(module: object) -> Class:
  """Returns the class of the user's module behind one of a view."""
  return type(module).__bases__[0]


def resolved_policy(module: nnx.Pytree) -> ModulePolicy:
  """Returns the policy of a view's module."""
  return getattr(type(module), POLICY)


def model_of(module: nnx.Pytree) -> nnx.Pytree | None:
  """Returns the user's module behind one of a view; None for a copy that a transform created."""
  link = vars(module).get(LINK)
  # A copy has the link of its original, which belongs to that.
  if link is None or link.view is None or link.model is None or link.view() is not module:
    return None
  return link.model()


def module_path(module: nnx.Pytree) -> str:
  """Returns the path of a module in the model; the name of its class if it has no link."""
  link = vars(module).get(LINK)
  return type(module).__name__ if link is None else link.path


def check_modes(module: nnx.Pytree) -> None:
  """Raises MpjaxRuntimeError if a mode was set on the user's module alone after `with_policy`."""
  # That is what `model.eval()` does: the view would go on training. A mode that was set on the view
  # is its own: a view for evaluation stays one while the model goes on training.
  model = model_of(module)
  if model is None:
    return
  link, now = vars(module)[LINK], vars(model)
  for name, flag in link.modes.items():
    if now.get(name) is not flag:
      where = f"{link.path or 'the root'} ({type(module).__name__}) of a view of mpjax.with_policy"
      expected = "no mode of the model to change after the view was created"
      got = f"{name}={now.get(name)} on the model, and {name}={flag} still on the view"
      fix = "Write view.eval() or view.train(), once, or make a new view."
      raise MpjaxRuntimeError(where, expected=expected, got=got, fix=fix)


def forget_mode(module: nnx.Pytree, name: str) -> None:
  """Stops comparing a mode of a view's module with that of the user's, since it was set on both."""
  vars(module)[LINK].modes.pop(name, None)
