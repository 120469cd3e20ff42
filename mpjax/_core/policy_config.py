"""What the user gave to `with_policy` or `policy_scope`, and which policy a module gets of it."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Self

from mpjax._core.dtypes import HALVES
from mpjax._core.policy import Policy, PolicyLike, parse_policy
from mpjax._core.rules import (
  Rule,
  depends_on_path,
  first_match,
  parse_rules,
  parse_unmatched,
  unmatched_error,
)
from mpjax._core.types import DType, Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """What the user gave to `with_policy` or `policy_scope`, checked; hashed once."""

  policy: Policy | None
  rules: tuple[Rule, ...]
  unmatched: str
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # JAX hashes the value of a user context at each call of a jitted function.
    key = (self.policy, self.rules, self.unmatched)
    object.__setattr__(self, "hash", hash(key))

  def __hash__(self) -> int:
    return self.hash

  def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
    # Another process hashes strings and classes in another way.
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return functools.partial(type(self), **values), ()

  def __str__(self) -> str:
    """Returns the arguments of `with_policy` that were given, without those that say nothing."""
    parts = [repr(None if self.policy is None else str(self.policy))]
    if self.rules:
      parts.append(f"rules={list(self.rules)!r}")
    return ", ".join(parts)

  @property
  def rewrites(self) -> bool:
    """Whether anything that was given changes the operations of a module, see `rewrites`."""
    return any(map(rewrites, (self.policy, *(rule.policy for rule in self.rules))))

  @property
  def by_path(self) -> bool:
    """Whether two equal modules can get different policies because of their paths."""
    return any(map(depends_on_path, self.rules))

  @property
  def output_dtype(self) -> DType | None:
    """The dtype of results where a policy begins that names none itself."""
    return None if self.policy is None else self.policy.output_dtype


def parse_config(
  where: str,
  policy: PolicyLike | None,
  rules: Iterable[Rule],
  *,
  unmatched: str,
) -> PolicyConfig:
  """Returns the arguments of `with_policy` and `policy_scope`, checked."""
  return PolicyConfig(
    policy=None if policy is None else parse_policy(policy, f"{where}(policy)"),
    rules=parse_rules(rules, f"{where}(rules=...)"),
    unmatched=parse_unmatched(unmatched, where),
  )


def is_low(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return policy is not None and policy.compute_dtype in HALVES


def rewrites(policy: Policy | None) -> bool:
  """Whether operations under a policy change: it has low precision, or says how to multiply."""
  return policy is not None and (is_low(policy) or policy.precision is not None)


class ModulePolicy(NamedTuple):
  """Which policy a module runs under, and why.

  Fields:
    policy: None leaves the module as it is.
    picked: a rule or a field of its own gave it the policy, not a module around it.
    exempt: a rule leaves it as it is, and all inside it.
    output_dtype: that of results where a policy begins that names none.
    rule: the rule that picked it, or a module around it; None if none did.
    hidden: rules of the user that match it too, where all that match were asked for.
  """

  policy: Policy | None
  picked: bool = False
  exempt: bool = False
  output_dtype: DType | None = None
  rule: Rule | None = None
  hidden: tuple[Rule, ...] = ()


def resolve_policy(
  config: PolicyConfig,
  module: Module,
  path: str,
  own: object,
  around: ModulePolicy,
  *,
  all_matches: bool = False,
) -> ModulePolicy:
  """Returns the policy of a module at `path`: the only place that defines precedence.

  A rule that exempts a module beats all that is inside. Then a policy in the module's `own` field
  beats rules, and the first matching rule wins. A module that nothing picks has the policy `around`
  it. `all_matches` also finds the rules that match and that an earlier one hides.
  """
  run = ModulePolicy(around.policy, output_dtype=config.output_dtype, rule=around.rule)
  if around.exempt:
    return run._replace(policy=None, exempt=True)
  if isinstance(own, Policy):
    return run._replace(policy=own, picked=True, rule=None)
  rule = first_match(config.rules, module, path)
  if rule is None:
    return run
  later = [each for each in config.rules if each is not rule] if all_matches else []
  hidden = tuple(each for each in later if each.matches(module, path))
  exempt = rule.policy is None
  return run._replace(policy=rule.policy, picked=True, exempt=exempt, rule=rule, hidden=hidden)


class ModuleRecord:
  """The modules of a model by path, and the rules that picked some of them.

  Attributes:
    classes: the names of the modules' classes by path.
    matched: the rules that match one of them, the first that does or not.
    output_dtype: that of the root, where it is known.
  """

  def __init__(self, config: PolicyConfig) -> None:
    self.config = config
    self.classes: dict[str, str] = {}
    self.matched: set[Rule] = set()
    self.output_dtype: DType | None = None

  def note(self, module: Module, path: str) -> None:
    """Notes a module."""
    self.classes[path] = type(module).__name__
    self.matched |= {rule for rule in self.config.rules if rule.matches(module, path)}

  def note_paths(self, paths: Collection[str]) -> None:
    """Notes the paths of modules that no call has met; only rules with a path can match those."""
    rules = [rule for rule in self.config.rules if rule.path is not None]
    self.matched |= {rule for rule in rules if any(rule.matches(None, path) for path in paths)}

  def check(self, origin: str, stacklevel: int, *, kind: str = "module", note: str = "") -> None:
    """Raises UnmatchedRuleError, or warns with a `note`, if a rule matched nothing.

    `origin` says which modules these are, and `stacklevel` is that of the warning for the caller.
    """
    paths, classes = tuple(self.classes), tuple(self.classes.values())
    for rule in self.config.rules if self.config.unmatched != "ignore" else ():
      if rule not in self.matched:
        error = unmatched_error(rule, paths, classes, kind=kind, origin=origin)
        if self.config.unmatched == "raise":
          raise error
        warnings.warn(f"{error} {note}".rstrip(), stacklevel=stacklevel + 1)


def warn_unmatched_paths(
  config: PolicyConfig, paths: Collection[str], origin: str, stacklevel: int
) -> None:
  """Warns of rules with a path that is none of `paths`.

  It is no error: a module without variables may be there that a call had no use for.
  """
  rules = tuple(rule for rule in config.rules if rule.path is not None)
  record = ModuleRecord(dataclasses.replace(config, rules=rules, unmatched="warn"))
  record.classes = dict.fromkeys(paths, "")
  record.note_paths(paths)
  note = "If the module is one that this call leaves out (only training calls it), it is fine."
  record.check(origin, stacklevel + 1, note=note)
