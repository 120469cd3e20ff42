"""Where an equation stands: its named scopes, and what the rules say of them."""

import functools
import re
from collections.abc import Sequence

from jax.extend.core import Jaxpr

from mpjax._autocast._values import FLOAT32, Dtype, Scope, Settings
from mpjax._errors import UnmatchedRuleError, message, nearest
from mpjax._full_precision import SCOPE as FULL_PRECISION
from mpjax._inner_jaxprs import inner_jaxprs
from mpjax._rules import Rule, first_match

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
def region(scope: Scope, settings: Settings) -> Dtype | None:
  """Returns the half dtype to compute in, in a scope; None if all is to stay as it was traced.

  The innermost scope that a rule matches decides, and there the first of the rules.
  """
  if FULL_PRECISION in scope:
    return None
  dtype: Dtype | None = settings.compute
  for depth in range(len(scope), -1, -1) if settings.rules else ():
    rule = first_match(settings.rules, None, "/".join(scope[:depth]))
    if rule is not None:
      dtype = None if rule.policy is None else rule.policy.compute_dtype
      break
  return None if dtype == FLOAT32 else dtype


def check_rules_match(jaxpr: Jaxpr, rules: Sequence[Rule], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule is that of no scope of the program."""
  scopes: set[Scope] = set()
  _collect(jaxpr, (), scopes)
  paths = sorted({"/".join(s[:depth]) for s in scopes for depth in range(len(s) + 1)})
  for rule in rules:
    if not any(rule.matches(None, path) for path in paths):
      sought = rule.path.pattern if isinstance(rule.path, re.Pattern) else str(rule.path)
      near = ", ".join(map(repr, nearest(sought, paths)))
      raise UnmatchedRuleError(
        message(
          f"{where}: {rule}",
          expected="a rule that picks out at least one named scope",
          got=f"none of the {len(paths)} scopes of the program",
          fix="The program has none: write `with jax.named_scope(...):` where the rule is to hold."
          if paths == [""]
          else f"The nearest: {near}. A Flax model is the outermost scope, by its class: begin the "
          'path with "**/".',
        )
      )


def _collect(jaxpr: Jaxpr, scope: Scope, found: set[Scope]) -> None:
  for eqn in jaxpr.eqns:
    here = scope + names_of(str(eqn.source_info.name_stack))
    found.add(here)
    for inner in inner_jaxprs(eqn) or ():
      _collect(inner.jaxpr, here, found)
