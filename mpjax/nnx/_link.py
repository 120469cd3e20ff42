"""The policy of a view's module, and the link to the user's module behind it."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import jax
from flax import nnx

from mpjax._core.errors import MpjaxRuntimeError
from mpjax._core.types import Class
from mpjax._policy.rules import ModulePolicy
from mpjax.nnx import _layers

POLICY = "_mpjax_policy"
"""The class attribute that holds the `ModulePolicy` of a view's modules."""

LINK = "_mpjax_link"
"""The attribute that holds the `Link` of a module. Lists and dicts of a view have none."""


@jax.tree_util.register_pytree_node_class
class Link:
  """The way from a module of a view to the user's module.

  NNX copies a module with its attributes, so a copy has the link of its original. A link therefore
  knows which module it belongs to. From a copy it leads nowhere.

  It is a pytree node without leaves, because JAX compares the structure of a view at each call that
  takes it. A function that was traced before is traced again if a mode of the model has changed.

  Attributes:
    path: the path of the module in the model, for rules and errors.
    view: a weak reference to the module of the view; None in a copy by pickle.
    model: one to the user's module; likewise.
    modes: the modes of the user's module (`deterministic`, say) when those of the view's were last
      set: when the view was created, or since.
  """

  # JAX's caches keep structures for as long as the program runs. Strong references would keep every
  # model and its arrays alive.
  def __init__(
    self, path: str, view: nnx.Pytree | None = None, model: nnx.Pytree | None = None
  ) -> None:
    self.path = path
    self.view = None if view is None else weakref.ref(view)
    self.model = None if model is None else weakref.ref(model)
    attributes = {} if model is None else vars(model)
    # Without the modes that the module leaves unset.
    self.modes = {x: flag for x in _layers.MODES if isinstance(flag := attributes.get(x), bool)}

  def changed(self, *copies: nnx.Pytree) -> list[str]:
    """Returns the modes in which the user's module has left the view's, and copies of it.

    A mode of the view that was set to another one than that of the model is its own, and so is one
    that was set on the copy.
    """
    model, view = (None if x is None else x() for x in (self.model, self.view))
    if model is None or view is None:
      return []
    return [
      x
      for x, flag in self.modes.items()
      if vars(model).get(x) is not flag and all(vars(y).get(x) is flag for y in (view, *copies))
    ]

  def tree_flatten(self) -> tuple[tuple[()], "_Structure"]:
    return (), _Structure(self, tuple(self.changed()))

  @classmethod
  def tree_unflatten(cls, structure: "_Structure", _: object) -> "Link":
    return structure.link

  # A weak reference cannot be copied or pickled, and the link of a copy leads nowhere.
  def __reduce__(self) -> tuple[Callable[[str], "Link"], tuple[str]]:
    return Link, (self.path,)


@dataclasses.dataclass(frozen=True)
class _Structure:
  """What JAX compares of a link: another view of the same model must not be compiled again."""

  link: Link = dataclasses.field(compare=False)
  changed: tuple[str, ...]


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


def check_modes(modules: Iterable[nnx.Pytree], *, traced: bool) -> None:
  """Raises MpjaxRuntimeError if a mode of the user's module has changed since that of the view's.

  `model.eval()` does that: the view would go on training.

  Args:
    modules: the modules of a view.
    traced: whether they may be copies that a transform such as `nnx.jit` has made of the view. Any
      other copy is a model of its own.
  """
  for module in modules:
    link = vars(module).get(LINK)
    if link is None or not (traced or model_of(module) is not None):
      continue
    for name in link.changed(module):
      flag = link.modes[name]
      where = f"{link.path or 'the root'} ({type(module).__name__}) of a view of mpjax.with_policy"
      expected = "no mode of the model to change after that of the view was set"
      got = f"{name}={not flag} on the model, and {name}={flag} still on the view"
      fix = "Write view.eval() or view.train(), or make a new view."
      raise MpjaxRuntimeError(where, expected=expected, got=got, fix=fix)


def note_mode(module: nnx.Pytree, name: str) -> None:
  """Notes the mode of the user's module as that of the view's module is set."""
  model, modes = model_of(module), vars(module)[LINK].modes
  if name in modes and model is not None:
    modes[name] = vars(model).get(name)
