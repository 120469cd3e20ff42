"""What the user gave to `with_policy` or `policy_scope`, and which policy a module gets of it."""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mpjax._core.policy import Policy, PolicyLike
from mpjax._core.rules import (
  Rule,
  default_rules,
  depends_on_path,
  first_match,
  parse_rules,
  parse_unmatched,
  unmatched_error,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
  """What the user gave to `with_policy` or `policy_scope`, checked; hashed once."""

  policy: Policy | None
  rules: tuple[Rule, ...]
  defaults: tuple[Rule, ...]
  unmatched: str
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # JAX hashes the value of a user context at each call of a jitted function.
    key = (self.policy, self.rules, self.defaults, self.unmatched)
    object.__setattr__(self, "hash", hash(key))

  def __hash__(self) -> int:
    return self.hash

  def __reduce__(self) -> Any:
    # Another process hashes strings and classes in another way.
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return functools.partial(Given, **values), ()

  @property
  def low(self) -> bool:
    """Whether anything that was given computes in low precision."""
    rules = (*self.rules, *self.defaults)
    policies = (self.policy, *(rule.policy for rule in rules))
    return any(p is not None and p.compute_dtype.itemsize < 4 for p in policies)

  @property
  def by_path(self) -> bool:
    """Whether two equal modules can get different policies because of their paths."""
    return any(map(depends_on_path, (*self.rules, *self.defaults)))

  @property
  def output_dtype(self) -> Any:
    """The dtype of results where a policy begins that names none itself."""
    return None if self.policy is None else self.policy.output_dtype


def give(
  where: str,
  policy: PolicyLike | None,
  rules: Iterable[Rule],
  *,
  defaults: Iterable[Rule] | None,
  unmatched: str,
) -> Given:
  """Returns the arguments of `with_policy` and `policy_scope`, checked.

  Raises:
    MpjaxTypeError: rules of the wrong type.
    MpjaxValueError: an unknown policy or value of `unmatched`.
  """
  return Given(
    policy=None if policy is None else Policy.parse(policy),
    rules=parse_rules(rules, f"{where}(rules=...)"),
    defaults=default_rules()
    if defaults is None
    else parse_rules(defaults, f"{where}(defaults=...)"),
    unmatched=parse_unmatched(unmatched, where),
  )


class Resolved(NamedTuple):
  """How a module runs.

  Fields:
    policy: its policy; None leaves it as it is.
    picked: a rule or a field of its own gave it its policy, not a module around it.
    exempt: a rule leaves it as it is, and all inside it.
  """

  policy: Policy | None
  picked: bool = False
  exempt: bool = False


def resolved(given: Given, module: Any, path: str, own: Any, around: Resolved) -> Resolved:
  """Returns how a module runs.

  A policy in the module's own field beats rules, the first matching rule wins, and a module that
  nothing picks has that of the nearest enclosing module.

  Args:
    given: what the user gave.
    module: a module.
    path: where it is, for rules.
    own: the value of its field `policy`, if it has one.
    around: how the module around it runs.
  """
  if around.exempt:
    return Resolved(None, exempt=True)
  if isinstance(own, Policy):
    return Resolved(own, picked=True)
  rule = first_match((*given.rules, *given.defaults), module, path)
  if rule is not None:
    return Resolved(rule.policy, picked=True, exempt=rule.policy is None)
  return Resolved(around.policy)


def matched_by(given: Given, module: Any, path: str) -> set[Rule]:
  """Returns the rules that match a module, the first of them or not."""
  return {rule for rule in given.rules if first_match((rule,), module, path)}


def check_matched(
  given: Given, matched: set[Rule], classes: Mapping[str, str], origin: str, stacklevel: int
) -> None:
  """Raises UnmatchedRuleError, or warns, if a rule matched no module.

  Args:
    given: what the user gave, which says what to do.
    matched: the rules that matched one.
    classes: names of classes by the paths of modules.
    origin: which modules those are, for the error.
    stacklevel: of the warning, as seen from here.
  """
  for rule in given.rules if given.unmatched != "ignore" else ():
    if rule not in matched:
      error = unmatched_error(rule, tuple(classes), tuple(classes.values()), origin=origin)
      if given.unmatched == "raise":
        raise error
      warnings.warn(str(error), stacklevel=stacklevel + 1)
