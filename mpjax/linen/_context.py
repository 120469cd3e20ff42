"""Which policy is active in Linen, and how it is resolved for the module being called."""

import contextlib
import dataclasses
import weakref
from typing import Any

import flax.linen as nn
from flax.core import Scope

from mpjax._core import active
from mpjax._core.active import ACTIVE
from mpjax._core.policy import Policy
from mpjax._core.policy_config import Given, Resolved, resolved
from mpjax._core.rules import Rule, default_rules
from mpjax._jaxprs.autocast import region_of


class Visits:
  """The modules that one `init` passed, the rules that picked some, and the root's output dtype.

  It is part of the active context, where it is equal to nothing but itself: no function compiled
  before is reused while it is there, so that no module is missed.
  """

  def __init__(self) -> None:
    self.classes: dict[str, str] = {}
    self.matched: set[Rule] = set()
    self.output_dtype: Any = None


@dataclasses.dataclass
class Held:
  """A scope that a user has entered.

  Fields:
    before: the state that it found, of Linen or NNX.
    interceptor: what to close when no state is left; None if that is for others to do.
    left: it has been left.
  """

  before: Any
  interceptor: contextlib.ExitStack | None
  left: bool = False


@dataclasses.dataclass
class Again:
  """A method that is called once more, on a copy of its module, in order to be traced.

  Interceptors of the user's, around ours, see that call too, and have changed what it is given.

  Fields:
    call: its arguments, as they came to our interceptor.
    outputs: what it returned there; () until then.
  """

  call: Any
  outputs: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active(active.Active):
  """The active state inside a call of a Linen module.

  Fields:
    given: what the user gave; None where policies are switched off.
    root_policy: that of the root of this `init` or `apply`.
    exempt: a rule left the module being called, and all inside it, as it is.
    visits: where to note the modules passed, during `init`.
    root: the scope of the root; it tells a model that is applied inside from the root itself.
    held: the user's scope that this state belongs to, if any.
    met: where to note the paths of the modules met; those inside a cached program are not.
    again: the method that is called next, if it was called before.
  """

  given: Given | None = None
  root_policy: Policy | None = None
  exempt: bool = False
  visits: Visits | None = None
  # Compared, these would make every call another program.
  root: weakref.ref[Scope] | None = dataclasses.field(default=None, compare=False)
  held: Held | None = dataclasses.field(default=None, compare=False)
  met: set[str] | None = dataclasses.field(default=None, compare=False)
  again: list[Again] = dataclasses.field(default_factory=list, compare=False)


OFF = Active(on=False)


def current() -> Active | None:
  """Returns the active state of this thread; None where a Linen model is under no policy."""
  state = ACTIVE.value
  return state if isinstance(state, Active) else None


def begin(given: Given, visits: Visits | None = None, met: set[str] | None = None) -> Active:
  """Returns the state at the root of a model that `given` was given to."""
  policy, around = given.policy, ACTIVE.value
  # A model inside of another that is being traced is rewritten with it.
  traced = around if around is not None and around.tracing else None
  return Active(
    given=given,
    policy=policy,
    root_policy=policy,
    tracing=traced is not None,
    region=region_of(policy) if traced is None else traced.region,
    visits=visits,
    met=met,
  )


def module_path(module: nn.Module) -> str:
  """Returns the path that rules see: relative to the root, or the name of what is itself a root.

  A child on which `.apply` is called in a forward pass is the root of that call; it has its name.
  """
  names = module.path or ((module.name,) if module.name else ())
  return "/".join(names)


def resolve(active: Active, given: Given, module: nn.Module) -> Resolved:
  """Returns how a bound module runs.

  What encloses a module is its parent; across a lifted transform, which hides the parent, it is the
  module being called, and so it is for a model on which `.apply` is called in a forward pass.
  """
  parent = module.parent
  if isinstance(parent, nn.Module):
    around = resolve(active, given, parent)
  elif module.path == () and not is_new_root(active, module):
    around = Resolved(active.root_policy, exempt=active.exempt)
  else:
    around = Resolved(active.policy, exempt=active.exempt)
  own = getattr(module, "policy", None) if _has_policy_field(type(module)) else None
  return resolved(given, module, module_path(module), own, around)


def is_new_root(active: Active, module: nn.Module) -> bool:
  """Whether a bound module is the root of a call of its own, other than the active root.

  A scope that a lifted transform created for the active root shows the transform in its debug path.
  """
  scope = module.scope
  if scope is None or module.path != () or scope.debug_path:
    return False
  return active.root is None or active.root() is not scope


def _has_policy_field(cls: type[Any]) -> bool:
  return "policy" in getattr(cls, "__dataclass_fields__", {})


def shown(given: Given) -> str:
  """Returns the arguments of `with_policy` that were given, those that say nothing left out."""
  parts = [repr(None if given.policy is None else str(given.policy))]
  if given.rules:
    parts.append(f"rules={list(given.rules)!r}")
  if given.defaults != default_rules():
    parts.append(f"defaults={given.defaults!r}")
  return ", ".join(parts)
