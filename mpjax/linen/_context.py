"""Which policy is active in Linen, how it is resolved for a module, and paths in trace keys."""

import dataclasses
import weakref
from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze

from mpjax._core import active
from mpjax._core.active import ACTIVE
from mpjax._core.audit_record import AUDIT
from mpjax._core.policy import Policy
from mpjax._core.policy_config import ModulePolicy, ModuleRecord, PolicyConfig, resolve_policy
from mpjax._core.trees import instances_in
from mpjax._core.types import Args, Kwargs, PyTree
from mpjax._jaxprs.autocast import region_of


@dataclasses.dataclass
class TracedCall:
  """A method that is called once more, on a copy of its module, in order to be traced.

  Interceptors of the user's, around ours, see that call too, and have changed what it is given. The
  arguments are those that came to our interceptor, `outputs` is what it returned; () until then.
  """

  args: Args
  kwargs: Kwargs
  outputs: tuple[()] | tuple[PyTree] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active(active.Active):
  """The active state inside a call of a Linen module.

  Fields:
    config: what the user gave; None where policies are switched off.
    root_policy: that of the root of this `init` or `apply`.
    exempt: a rule left the module being called, and all inside it, as it is.
    record: where to note the modules called, during `init`. It is equal to nothing but itself: no
      function compiled before is reused while it is there, so that no module is missed.
    root: the scope of the root; it tells a model that is applied inside from the root itself.
    met: where to note the paths of the modules called; those inside a cached jaxpr are not.
    again: the method that is called next, if it was called before.
  """

  config: PolicyConfig | None = None
  root_policy: Policy | None = None
  exempt: bool = False
  record: ModuleRecord | None = None
  # Compared, these would make every call another key of JAX's caches.
  root: weakref.ref[Scope] | None = dataclasses.field(default=None, compare=False)
  met: set[str] | None = dataclasses.field(default=None, compare=False)
  again: list[TracedCall] = dataclasses.field(default_factory=list, compare=False)


OFF = Active(on=False)


def current() -> Active | None:
  """Returns the active state of this thread; None where a Linen model is under no policy."""
  state = ACTIVE.value
  return state if isinstance(state, Active) else None


def begin(
  config: PolicyConfig, record: ModuleRecord | None = None, met: set[str] | None = None
) -> Active:
  """Returns the state at the root of a model that `config` was given to."""
  policy, around = config.policy, ACTIVE.value
  if AUDIT.value is not None:
    AUDIT.value.note_rules(config.rules)
  # A model inside of another that is being traced is rewritten with it.
  traced = around if around is not None and around.tracing else None
  return Active(
    config=config,
    policy=policy,
    root_policy=policy,
    tracing=traced is not None,
    region=region_of(policy) if traced is None else traced.region,
    record=record,
    met=met,
  )


def module_path(module: nn.Module) -> str:
  """Returns the path that rules see: relative to the root, or the name of what is itself a root."""
  # A child on which `.apply` is called in a forward pass is the root of that call.
  names = module.path or ((module.name,) if module.name else ())
  return "/".join(names)


def policy_of(active: Active, config: PolicyConfig, module: nn.Module) -> ModulePolicy:
  """Returns the policy of a bound module."""
  # What encloses a module is its parent; across a lifted transform, which hides the parent, it is
  # the module being called, and so it is for a model that is applied in a forward pass.
  parent = module.parent
  if isinstance(parent, nn.Module):
    around = policy_of(active, config, parent)
  elif module.path == () and not is_new_root(active, module):
    around = ModulePolicy(active.root_policy, exempt=active.exempt)
  else:
    around = ModulePolicy(active.policy, exempt=active.exempt)
  # A property `policy` may compute something; only a field says what the module runs under.
  has_field = "policy" in getattr(type(module), "__dataclass_fields__", {})
  own = getattr(module, "policy", None) if has_field else None
  audited = AUDIT.value is not None
  return resolve_policy(config, module, module_path(module), own, around, all_matches=audited)


def is_new_root(active: Active, module: nn.Module) -> bool:
  """Whether a bound module is the root of a call of its own, other than the active root."""
  # A scope that a lifted transform created for the active root shows it in its debug path.
  scope = module.scope
  if scope is None or module.path != () or scope.debug_path:
    return False
  return active.root is None or active.root() is not scope


# `nn.jit` reuses what it traced for an equal module elsewhere: under Rule("float32", path="b") the
# layer "b" would run in the dtype of an equal layer "a". Flags of scopes are part of its key.
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
    for each in (module, *instances_in(args, nn.Module)):
      _flag(each)


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
