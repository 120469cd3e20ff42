"""What an audit is told while it traces: the modules that are called, and the rules."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule


class AuditedModule(NamedTuple):
  """A module that was called under a policy, see `ModulePolicy`. The policy beats `own_dtype`."""

  name: str  # its class
  policy: Policy | None
  rule: Rule | None  # the rule that gives the policy
  own_dtype: str | None  # its attribute `dtype`
  is_norm: bool = False  # whether it is a norm of Flax
  hidden: tuple[Rule, ...] = ()  # later rules that match it too


class AuditRecord:
  """Notes of a function that is traced for an audit.

  A record equals only itself, so every jitted function is traced again, with its marks.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked.
    hidden: how many modules each rule matched that an earlier rule picked.
    uses: "autocast" and "loss scale", if the function uses them.
    shows_roundings: whether each rounding is an operation of the jaxpr. A number that low
      precision rounds has a cast, and an operand that a recipe quantises a `format_rounding`.
      Otherwise the rewriter writes the rounded number, and the steps of the recipe.
  """

  def __init__(self, *, shows_roundings: bool = False) -> None:
    self.shows_roundings = shows_roundings
    self.uses: set[str] = set()
    self.modules: dict[str, AuditedModule] = {}
    self.rules, self.hidden = Counter[Rule](), Counter[Rule]()

  def note(self, path: str, module: AuditedModule) -> None:
    """Notes a module that is called. Only its first call counts for the rules."""
    if path not in self.modules and module.rule is not None:
      self.rules[module.rule] += 1
      self.hidden.update(module.hidden)
      self.note_rules(module.hidden)
    self.modules[path] = module

  def note_rules(self, rules: Iterable[Rule]) -> None:
    """Notes rules that the user gave, whether they pick a module or not."""
    self.rules.update(dict.fromkeys(rules, 0))
