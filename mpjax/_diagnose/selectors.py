"""The paths that rules match at the scopes of a program, and the globs that select some of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from mpjax._diagnose.paths import merged, unnumbered
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


def layers_of(paths: Iterable[str], others: Collection[str]) -> list[tuple[str, ...]]:
  """Returns paths in groups, of which one glob selects each.

  Layers that differ in their numbers alone are a group, unless their glob matches one of `others`.

  >>> layers_of(["block_0/mlp", "block_1/mlp", "head"], others=["block_0"])
  [('block_0/mlp', 'block_1/mlp'), ('head',)]
  """
  alike: dict[str, list[str]] = {}
  for path in paths:
    alike.setdefault(unnumbered(path), []).append(path)
  groups: list[tuple[str, ...]] = []
  for group in alike.values():
    glob = glob_of_layers(group)
    if any(matches_glob(glob, other) for other in others):
      groups += [(path,) for path in group]
    else:
      groups.append((*group,))
  return groups


def glob_of_layers(paths: Sequence[str]) -> str:
  """Returns a glob for paths that differ in numbers alone, with "*" where they do."""
  return merged([*map(glob_of, paths)])


def selector(paths: Sequence[str], rule_paths: Mapping[str, str]) -> str:
  """Returns the shortest glob that matches only the paths of a group of `layers_of`."""
  every = with_enclosing(rule_paths.values()) | {*paths}
  full = glob_of_layers(paths)
  names = full.split("/") if full else []
  # The last name is easiest to read. Then try longer tails.
  for glob in (f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names)))):
    if {each for each in every if matches_glob(glob, each)} == {*paths}:
      return glob
  return full
