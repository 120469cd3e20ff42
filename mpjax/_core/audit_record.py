"""What `mpjax.audit` is told while it traces a function: which module has which policy, and why."""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from mpjax._core.policy import Policy
from mpjax._core.rules import Rule


class AuditedModule(NamedTuple):
  """A module that was called under a policy.

  Fields:
    name: its class.
    policy: None leaves it as it is.
    rule: the one that gave it the policy, or gave it to a module around it; None if no rule did.
    own_dtype: the value of its field `dtype`, which the policy overrules; None for none.
    is_norm: it is a norm of Flax's, which computes in float32 by itself.
    hidden: rules that match it too, and come later.
  """

  name: str
  policy: Policy | None
  rule: Rule | None
  own_dtype: str | None
  is_norm: bool = False
  hidden: tuple[Rule, ...] = ()


class AuditRecord:
  """What is noted while a function is traced for an audit.

  It is equal to nothing but itself: as a value of a user context of JAX, it makes every jitted
  function be traced anew, with the marks of policies in its jaxpr.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked.
    hidden: how many modules each rule matches that an earlier rule picked.
    autocast: `mpjax.autocast` was called, whose arguments take the dtype of what they meet.
    scaled: a loss was multiplied by a loss scale.
  """

  def __init__(self) -> None:
    self.autocast = self.scaled = False
    self.modules: dict[str, AuditedModule] = {}
    self.rules: dict[Rule, int] = {}
    self.hidden: dict[Rule, int] = {}

  def note_autocast(self) -> None:
    """Notes that `mpjax.autocast` was called."""
    self.autocast = True

  def note_scaled(self) -> None:
    """Notes that a loss was multiplied by a loss scale."""
    self.scaled = True

  def note(self, path: str, module: AuditedModule) -> None:
    """Notes the call of a module."""
    if path not in self.modules and module.rule is not None:
      self.rules[module.rule] = self.rules.get(module.rule, 0) + 1
      for rule in module.hidden:
        self.rules.setdefault(rule, 0)
        self.hidden[rule] = self.hidden.get(rule, 0) + 1
    self.modules[path] = module

  def note_rules(self, rules: Iterable[Rule]) -> None:
    """Notes rules that the user gave, whether they pick a module or not."""
    for rule in rules:
      self.rules.setdefault(rule, 0)


AUDIT = jax.make_user_context(None)
"""The record of the audit that traces in this thread; None outside of one."""
