"""The active state inside a call of a Linen module, and the policy that it gives a module."""

import dataclasses
import weakref
from typing import Any

import flax.linen as nn
from flax.core import Scope

from mpjax._policy.active import ACTIVE, AUDIT, Active, Region, outside_policies
from mpjax._policy.rules import NO_POLICY, ModulePolicy, ModuleRecord, PolicyConfig, resolve_policy
from mpjax.linen._repeated_call import TracedCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinenActive(Active):
  """The active state inside a call of a Linen module.

  Fields:
    config: what the user gave; None where policies are switched off.
    of_root: the policy of the root of this `init` or `apply`.
    root_path: the path of that root, to which the paths of rules are relative. It is longer than ()
      for a model under a policy that is a submodule of another one.
    record: where to note the modules called, during `init`. It is equal to nothing but itself: no
      function compiled before is reused while it is there, so that no module is missed.
    root: the scope of the root; it tells a model that is applied inside from the root itself.
    met: where to note the modules called; those inside a cached jaxpr are not.
    again: the method that is called next, if it was called before.
  """

  config: PolicyConfig | None = None
  of_root: ModulePolicy = NO_POLICY
  root_path: tuple[str, ...] = ()
  record: ModuleRecord | None = None
  # JAX compares the active state to find traces. These fields differ in each call, and would make
  # each call another key of its caches.
  root: weakref.ref[Scope] | None = dataclasses.field(default=None, compare=False)
  met: ModuleRecord | None = dataclasses.field(default=None, compare=False)
  again: list[TracedCall] = dataclasses.field(default_factory=list, compare=False)


def current() -> LinenActive | None:
  """Returns the active state of this thread; None where a Linen model is under no policy."""
  state = ACTIVE.value
  return state if isinstance(state, LinenActive) else None


def begin(config: PolicyConfig, **fields: Any) -> LinenActive:
  """Returns the state at the root of a model that `config` was given to."""
  policy, around = ModulePolicy(config.policy), ACTIVE.value
  if AUDIT.value is not None:
    AUDIT.value.note_rules(config.rules)
  # A model inside of another one that is being traced is rewritten with it, so it keeps that state
  # of tracing.
  traced = around if around is not None and around.tracing else None
  return LinenActive(
    config=config,
    around=policy,
    of_root=policy,
    tracing=traced is not None,
    region=Region(config.policy) if traced is None else traced.region,
    outside_policies=outside_policies(),
    **fields,
  )


def module_path(active: LinenActive, module: nn.Module) -> str:
  """Returns the path that rules see: relative to the root, or the name of a root."""
  path, root = tuple(module.path or ()), active.root_path
  # A child on which `.apply` is called in a forward pass is the root of that call, and has only a
  # name.
  return "/".join(path[len(root) :] if path[: len(root)] == root else path) or module.name or ""


def module_policy(active: LinenActive, config: PolicyConfig, module: nn.Module) -> ModulePolicy:
  """Returns the policy of a module: its own, that of a rule, or the one around it."""
  # The policy around a module is that of its parent. A lifted transform hides the parent. The
  # policy around is then that of the module being called, as it is for a model that is applied in a
  # forward pass.
  around = active.around
  if module.path == active.root_path and not is_new_root(active, module):
    around = active.of_root
  elif isinstance(module.parent, nn.Module):
    around = module_policy(active, config, module.parent)
  # A module's own policy is a dataclass field. A property of that name may compute something else.
  has_field = "policy" in getattr(type(module), "__dataclass_fields__", {})
  own = getattr(module, "policy", None) if has_field else None
  # An audit lists rules that never win, so all rules have to be tried.
  audited = AUDIT.value is not None
  return resolve_policy(
    config, module, module_path(active, module), own, around, all_matches=audited
  )


def is_new_root(active: LinenActive, module: nn.Module) -> bool:
  """Whether a bound module is the root of a call of its own, other than the active root."""
  # A lifted transform creates a new scope for the active root, with a debug path.
  scope = module.scope
  if scope is None or module.path != () or scope.debug_path:
    return False
  return active.root is None or active.root() is not scope
