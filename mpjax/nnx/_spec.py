"""How a module of a view runs, and how it is told from others and mapped back to the user's."""

import dataclasses
import weakref
from typing import Any

import numpy as np
from flax import nnx

from mpjax._core.active import ACTIVE, Active
from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError
from mpjax._core.policy import Policy

SPEC = "mpjax_spec"
"""The class attribute that says how a view's modules run."""

MODES = ("deterministic", "use_running_average")
"""What `train()` and `eval()` of NNX set. Other flags are a module's own business."""

LINK = "_mpjax_link"
"""The attribute that leads from a view's module to the user's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """How the modules of one class run. Fixed when the view is made.

  Fields:
    policy: the policy; None leaves the module as it is.
    output_dtype: that of results where a policy begins that names none.
    picked: a rule or a field of its own gave the module its policy, not a module around it.
  """

  policy: Policy | None
  output_dtype: np.dtype[Any] | None
  picked: bool


class Link:
  """Leads from a module of a view to the user's module, as long as both are there.

  All links are equal: whose view it is makes no difference to a program. A copy of the module that
  a transform made is not the module that the link was made for, and its link leads nowhere.

  Attributes:
    path: that of the module in the model, for errors.
    modes: those of the user's module (`deterministic`, say) as they were when the view was made,
      but for those that were set on the view since.
  """

  def __init__(self, path: str, view: Any = None, model: Any = None) -> None:
    self.path = path
    self.view = weakref.ref(view) if view is not None else None
    self.model = weakref.ref(model) if model is not None else None
    flags = {} if model is None else vars(model)
    self.modes = {name: flags[name] for name in MODES if isinstance(flags.get(name), bool)}

  def of(self, view: Any) -> Any:
    """Returns the user's module for the module `view`, or None."""
    if self.view is None or self.model is None or self.view() is not view:
      return None
    return self.model()

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Link)

  def __hash__(self) -> int:
    return 0

  def __reduce__(self) -> Any:
    return Link, (self.path,)


def is_view(module: Any) -> bool:
  """Whether a module is one of a view's."""
  return hasattr(type(module), SPEC)


def model_of(module: Any) -> Any:
  link = vars(module).get(LINK)
  return link.of(module) if isinstance(link, Link) else None


def check_modes(module: Any) -> None:
  """Raises MpjaxRuntimeError if a mode was set on the user's module alone since the view was made.

  That is what `model.eval()` does: the view would go on training. A mode that was set on the view
  is its own: a view for evaluation stays one while the model goes on training.
  """
  model, link = model_of(module), vars(module).get(LINK)
  if model is None:
    return
  now = vars(model)
  for name, flag in link.modes.items():
    if now.get(name) is not flag:
      raise MpjaxRuntimeError(
        f"{link.path or 'the root'} ({type(module).__name__}) of a view of mpjax.nnx.with_policy",
        expected="no mode of the model to change after the view was made",
        got=f"{name}={now.get(name)} on the model, and {name}={flag} still on the view",
        fix="Write view.eval() or view.train(), once: a mode that was set on the view is its own "
        "from then on. Or make the view anew: with_policy(model, policy).",
      )


def check_set(module: Any, name: str, value: Any) -> None:
  """Raises MpjaxTypeError if a module with parameters that is none of a view's is set on one.

  It would run without the policy, and the user's model would not have its parameters.
  """
  if not isinstance(value, nnx.Module) or is_view(value) or isinstance(value, nnx.bridge.ToNNX):
    return
  if any(isinstance(node, nnx.Param) for _, node in nnx.iter_graph(value, graph=True)):
    raise MpjaxTypeError(
      f"{type(module).__name__}.{name}, set on a view of mpjax.nnx.with_policy",
      expected="a variable, an array, or a module of the view",
      got=f"a new {type(value).__name__}, which would run without the policy and which the model "
      "would not have",
      fix="Make it in __init__, or set it on the model, and then make the view anew: "
      "with_policy(model, policy).",
    )


def path_of(module: Any) -> str:
  """Returns where a module is in the model, for rules and errors."""
  link = vars(module).get(LINK)
  return link.path if isinstance(link, Link) else type(module).__name__


def current() -> Active | None:
  """Returns the active state of this thread; None outside of every policied method of NNX."""
  state = ACTIVE.value
  return state if type(state) is Active else None  # Linen's is of a class of its own.


def is_node(x: Any) -> bool:
  """Whether `x` is a module, a variable or another object of NNX."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))
