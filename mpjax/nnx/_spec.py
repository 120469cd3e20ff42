"""How a module of a view runs, and how it is told from others and mapped back to the user's."""

import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from flax import nnx

from mpjax._core.active import ACTIVE, Active
from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError
from mpjax._core.rules import ModulePolicy
from mpjax._core.types import Leaf, PyTree
from mpjax._jaxprs.autocast.boundary import Boundary, in_order
from mpjax.nnx._layers import MODES

Variable: TypeAlias = nnx.Variable[Leaf]

SPEC = "mpjax_spec"
"""The class attribute that holds the `ModulePolicy` of a view's modules."""

LINK = "_mpjax_link"
"""The attribute that leads from a view's module to the user's."""


class Link:
  """Leads from a module of a view to the user's module, as long as both are there.

  All links are equal: whose view it is makes no difference to a jaxpr. A copy of the module that a
  transform created is not the module that the link was created for, and its link leads nowhere.

  Attributes:
    path: that of the module in the model, for errors.
    modes: those of the user's module (`deterministic`, say) as they were when the view was created,
      but for those that were set on the view since.
  """

  def __init__(
    self, path: str, view: nnx.Pytree | None = None, model: nnx.Pytree | None = None
  ) -> None:
    self.path = path
    self.view = weakref.ref(view) if view is not None else None
    self.model = weakref.ref(model) if model is not None else None
    flags = {} if model is None else vars(model)
    self.modes = {name: flags[name] for name in MODES if isinstance(flags.get(name), bool)}

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Link)

  def __hash__(self) -> int:
    return 0

  def __reduce__(self) -> tuple[Callable[[str], "Link"], tuple[str]]:
    return Link, (self.path,)


def is_view(module: object) -> bool:
  """Whether a module is one of a view's."""
  return hasattr(type(module), SPEC)


def resolved_policy(module: nnx.Pytree) -> ModulePolicy:
  """Returns the policy of a module of a view."""
  return getattr(type(module), SPEC)


def policy_text(module: nnx.Pytree) -> str:
  """Returns the policy of a module of a view as `with_policy` takes it."""
  policy = resolved_policy(module).policy
  return repr(None if policy is None else str(policy))


def model_of(module: nnx.Pytree) -> nnx.Pytree | None:
  """Returns the user's module behind one of a view; None for a copy that a transform created."""
  link = vars(module).get(LINK)
  if not isinstance(link, Link) or link.view is None or link.view() is not module:
    return None
  return None if link.model is None else link.model()


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
      raise MpjaxRuntimeError(
        f"{link.path or 'the root'} ({type(module).__name__}) of a view of mpjax.with_policy",
        expected="no mode of the model to change after the view was created",
        got=f"{name}={now.get(name)} on the model, and {name}={flag} still on the view",
        fix="Write view.eval() or view.train(), once: a mode that was set on the view is its own "
        "from then on. Or make a new view: with_policy(model, policy).",
      )


def check_set(module: nnx.Pytree, name: str, value: object) -> None:
  """Raises MpjaxTypeError if a module with parameters that is none of a view's is set on one."""
  if not isinstance(value, nnx.Module) or is_view(value) or isinstance(value, nnx.bridge.ToNNX):
    return
  if any(isinstance(node, nnx.Param) for _, node in nnx.iter_graph(value, graph=True)):
    raise MpjaxTypeError(
      f"{type(module).__name__}.{name}, set on a view of mpjax.with_policy",
      expected="a variable, an array, or a module of the view",
      got=f"a new {type(value).__name__}, which would run without the policy and which the model "
      "would not have",
      fix="Make it in __init__, or set it on the model, and then make a new view: "
      "with_policy(model, policy).",
    )


def path_of(module: nnx.Pytree) -> str:
  """Returns where a module is in the model, for rules and errors."""
  link = vars(module).get(LINK)
  return link.path if isinstance(link, Link) else type(module).__name__


def current() -> Active | None:
  """Returns the active state of this thread; None outside of every policied method of NNX."""
  state = ACTIVE.value
  return state if type(state) is Active else None  # Linen's is of a class of its own.


def calling_state() -> Active:
  """Returns the state in which a method of a view is called, inside of a Linen model too."""
  around = ACTIVE.value
  return current() or Active(tracing=around is not None and around.tracing)


def is_node(x: object) -> bool:
  """Whether `x` is a module, a variable or another object of NNX."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def parts_of(tree: PyTree) -> tuple[list[nnx.Pytree], list[Variable]]:
  """Returns the modules of a tree, and its variables, in the order of its graph."""
  parts = [x for _, x in nnx.iter_graph(tree, graph=True)]
  variables = [x for x in parts if isinstance(x, nnx.Variable)]
  return [x for x in parts if isinstance(x, nnx.Pytree)], variables


def orders_of(tree: PyTree) -> list[object]:
  """Returns the order of what each module of a tree holds."""
  return [Boundary(vars(node), is_node).order for node in parts_of(tree)[0]]


def put_in_order(tree: PyTree, orders: Iterable[object]) -> None:
  """Puts what the modules of a tree hold, which NNX has sorted, into an order."""
  for node, order in zip(parts_of(tree)[0], orders, strict=True):
    ordered = in_order(vars(node), order)
    if ordered is not vars(node):
      vars(node).clear()
      vars(node).update(ordered)


def forget_mode(module: nnx.Pytree, name: str) -> None:
  """Notes that a mode was set on a view's module: from now on it is its own."""
  link = vars(module).get(LINK)
  if isinstance(link, Link):
    link.modes.pop(name, None)
