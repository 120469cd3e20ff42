"""The paths that rules match at the scopes of a program, and the rule that selects one of them."""

from collections.abc import Mapping

from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._policy.rules import glob_of, matches_glob, with_enclosing


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


def selector(path: str, rule_paths: Mapping[str, str]) -> str:
  """Returns the shortest glob that matches the path of a module, and no other one."""
  every = with_enclosing(rule_paths.values()) | {path}
  names = path.split("/") if path else []
  # The last name is easiest to read. Then try longer tails.
  tails = (f"**/{glob_of('/'.join(names[i:]))}" for i in reversed(range(len(names))))
  for glob in tails:
    if [each for each in every if matches_glob(glob, each)] == [path]:
      return glob
  return glob_of(path)
