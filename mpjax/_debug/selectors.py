"""The paths that rules match at the scopes of a program, and the rule that selects one of them."""

import contextlib
import re
from collections.abc import Mapping

from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._policy.rules import Rule, around


def homes_of(graph: Graph) -> dict[str, str]:
  """Returns by scope the path that rules match there: in a model its own, relative to the root."""
  homes = {each.where.path: each.where.marked(MODULE) for each in graph.operations}
  # JAX moves a constant out of a scan without the scopes around that: it is in a tail of the path.
  tails = {path for path in homes if any(other.endswith(f"/{path}") for other in homes)}
  tails -= {each.where.path for each, *_ in graph.matmuls()}
  return {k: k if home is None else home for k, home in homes.items() if k not in tails}


def selector(path: str, homes: Mapping[str, str]) -> str | re.Pattern[str]:
  """Returns what selects a path, and the scopes that it is home to if it can, and none else."""
  own = {path, *(scope for scope, home in homes.items() if home == path)}
  every = around([*homes, *homes.values()]) | own
  names, scopes = path.split("/"), "|".join(map(re.escape, sorted(own - {""})))
  globs = (f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names) if path else 0)))
  for glob in (*globs, path):
    with contextlib.suppress(ValueError):  # A name with brackets is not the glob it looks like.
      rule = Rule("float32", path=glob)
      if {scope for scope in every if rule.matches(None, scope)} == own:
        return glob
  return re.compile(f"({scopes})?" if "" in own else scopes)
