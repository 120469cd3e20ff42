"""How a module of a view runs, and how it is told from others and led back to the user's."""

import dataclasses
import weakref
from typing import Any

import numpy as np

from mpjax._adapter import Adapter
from mpjax._op_lists import OpLists
from mpjax._policy import Policy

SPEC = "mpjax_spec"
"""The class attribute that says how a view's modules run."""

LINK = "_mpjax_link"
"""The attribute that leads from a view's module to the user's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """How the modules of one class run. Fixed when the view is made.

  Fields:
    policy: the policy; None leaves the module as it is.
    output_dtype: what is handed on if this module is the outermost one called; None as computed.
    picked: a rule or a field of its own gave the module its policy, not a module around it.
    adapter: what is known about its class.
    fields: names and values of the fields that the policy sets.
    product: the field that holds the product of a layer of NNX, if its weight gradients are to be
      in the policy's `weight_grad_dtype`.
    ops: which operations run in float32, if a method is the outermost one called; None leaves them.
  """

  policy: Policy | None
  output_dtype: np.dtype[Any] | None
  picked: bool
  adapter: Adapter
  fields: tuple[tuple[str, Any], ...]
  product: str | None = None
  ops: OpLists | None = None


class Link:
  """Leads from a module of a view to the user's module, as long as both are there.

  All links are equal: whose view it is makes no difference to a program. A copy of the module that
  a transform made is not the module that the link was made for, and its link leads nowhere.

  Attributes:
    path: where the module stands in the model, for errors.
  """

  def __init__(self, path: str, view: Any = None, model: Any = None) -> None:
    self.path = path
    self.view = weakref.ref(view) if view is not None else None
    self.model = weakref.ref(model) if model is not None else None

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
