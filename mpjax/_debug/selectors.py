"""The paths that rules match at the scopes of a program, and the rule that selects one of them."""

import contextlib
import re
from collections.abc import Mapping

from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._policy.rules import Rule, with_enclosing


def rule_paths_of(graph: Graph) -> dict[str, str]:
  """Returns by scope the path that rules match there. In a model it is relative to the root."""
  rule_paths = {each.where.path: each.where.marked(MODULE) for each in graph.operations}
  # JAX moves a constant out of a scan without the scopes around it, so its path is only a tail.
  tails = {path for path in rule_paths if any(other.endswith(f"/{path}") for other in rule_paths)}
  # A matmul is never a moved constant, so its path is a module.
  tails -= {each.where.path for each, *_ in graph.matmuls()}
  # A model under a policy marks its modules. Elsewhere the scope itself is the path.
  return {
    scope: scope if rule_path is None else rule_path
    for scope, rule_path in rule_paths.items()
    if scope not in tails
  }


def selector(path: str, rule_paths: Mapping[str, str]) -> str | re.Pattern[str]:
  """Returns a glob, or else a pattern, that matches a path and its scopes, and no other scope."""
  # The rule must match each scope of the module, and no other scope.
  own = {path, *(scope for scope, rule_path in rule_paths.items() if rule_path == path)}
  every = with_enclosing([*rule_paths, *rule_paths.values()]) | own
  names = path.split("/")
  scopes = "|".join(map(re.escape, sorted(own - {""})))
  # The shortest glob is easiest to read: try the last name first, then longer tails.
  globs = (f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names) if path else 0)))
  for glob in (*globs, path):
    with contextlib.suppress(ValueError):  # A name with brackets is not the glob it looks like.
      rule = Rule("float32", path=glob)
      if {scope for scope in every if rule.matches(None, scope)} == own:
        return glob
  # A regular expression states the scopes exactly. The root of a model has an empty path.
  return re.compile(f"({scopes})?" if "" in own else scopes)
