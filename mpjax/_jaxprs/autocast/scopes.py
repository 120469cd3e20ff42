"""The named scopes of an equation, and what the rules say of them."""

import functools
import re
from collections.abc import Sequence

import numpy as np
from jax.extend.core import Jaxpr

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import UnmatchedRuleError, nearest
from mpjax._core.full_precision import SCOPE as FULL_PRECISION
from mpjax._core.policy import Policy
from mpjax._core.rules import Rule, first_match
from mpjax._core.types import DType
from mpjax._jaxprs.autocast.marks import AS_IT_IS, OUTPUT, REGION, REST, policy_of
from mpjax._jaxprs.autocast.values import Scope, Settings
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs

_TRANSFORM = re.compile(
  r"(jvp|transpose|vmap|pmap|linearize|checkpoint|remat|rematted_computation)\("
)


@functools.lru_cache(maxsize=4096)
def names_of(stack: str) -> Scope:
  """Returns the scopes in a name stack such as "transpose(jvp(Net))/head".

  Brackets of the user's own, as in "block(1)", belong to the name.
  """
  text, place, own = [], 0, []
  while place < len(stack):
    found = _TRANSFORM.match(stack, place)
    if found:
      own.append(False)
      place = found.end()
      continue
    if stack[place] == "(":
      own.append(True)
    if stack[place] != ")" or not own or own.pop():
      text.append(stack[place])
    place += 1
  return tuple(name for name in "".join(text).split("/") if name)


@functools.lru_cache(maxsize=4096)
def policy_at(scope: Scope, settings: Settings) -> Policy | None:
  """Returns the policy in a scope; None where all stays as it was traced.

  The innermost mark of a policy decides. Where there is none, it is the innermost scope that a rule
  matches, and there the first of the rules.
  """
  if FULL_PRECISION in scope:
    return None
  region = marked(scope)
  if region is not None:
    return policy_of(region)
  rule = _rule_for(scope, settings.rules)
  return settings.policy if rule is None else rule.policy


def low_dtype(policy: Policy | None) -> DType | None:
  """Returns the compute dtype of a policy if it is a low-precision one."""
  return policy.compute_dtype if policy is not None and policy.compute_dtype in HALVES else None


def marked(scope: Scope) -> str | None:
  """Returns what the innermost mark of a region says; None if there is none."""
  marks = (name[len(REGION) :] for name in reversed(scope) if name.startswith(REGION))
  return next(marks, None)


def _rule_for(scope: Scope, rules: tuple[Rule, ...]) -> Rule | None:
  """Returns the rule for the innermost scope that one matches; None if there is none."""
  depths = range(len(scope), -1, -1) if rules else ()
  found = (first_match(rules, None, "/".join(scope[:depth])) for depth in depths)
  return next((rule for rule in found if rule is not None), None)


@functools.lru_cache(maxsize=4096)
def as_written(scope: Scope, settings: Settings) -> bool:
  """Whether all in a scope is as the user wrote it: what is computed there is data."""
  if FULL_PRECISION in scope:  # Also inside of a module that has a policy of its own.
    return True
  low = low_dtype(policy_at(scope, settings))
  return low is None and marked(scope) in (None, AS_IT_IS)


def output_of(scope: Scope) -> DType | None:
  """Returns the dtype that an equation right in this scope gives the result of a module, if any."""
  name = scope[-1] if scope else ""
  return np.dtype(name[len(OUTPUT) :]) if name.startswith(OUTPUT) else None


def rest_of(scope: Scope) -> DType | None:
  """Returns the dtype that an equation right in this scope gives the result of a layer, if any."""
  name = scope[-1] if scope else ""
  return np.dtype(name[len(REST) :]) if name.startswith(REST) else None


def check_rules_match(jaxpr: Jaxpr, rules: Sequence[Rule], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule is that of no scope of the jaxpr."""
  scopes: set[Scope] = set()
  _collect(jaxpr, (), scopes)
  paths = sorted({"/".join(s[:depth]) for s in scopes for depth in range(len(s) + 1)})
  for rule in rules:
    if not any(rule.matches(None, path) for path in paths):
      sought = rule.path.pattern if isinstance(rule.path, re.Pattern) else str(rule.path)
      named = [path for path in paths if path]
      near = ", ".join(map(repr, nearest(sought, named)))
      raise UnmatchedRuleError(
        f"{where}: {rule}",
        expected="a rule that picks out at least one named scope",
        got=f"none of the {len(paths)} scopes of the jaxpr" if named else "a jaxpr without any",
        fix="The jaxpr has none: write `with jax.named_scope(...):` where the rule is to hold."
        if not named
        else f"The nearest: {near}. A Flax model is the outermost scope, by its class: begin the "
        'path with "**/".',
      )


def _collect(jaxpr: Jaxpr, scope: Scope, found: set[Scope]) -> None:
  for eqn in jaxpr.eqns:
    here = scope + names_of(str(eqn.source_info.name_stack))
    found.add(here)
    for inner in inner_jaxprs(eqn) or ():
      _collect(inner.jaxpr, here, found)
