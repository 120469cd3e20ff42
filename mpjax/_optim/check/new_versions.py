"""Which results of a training step may be new versions of which arguments."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import Path
from mpjax._core.types import DType

Names: TypeAlias = tuple[str, ...]
"""A path without its punctuation: an object, its `nnx.State` and a dict have the same."""

Spec: TypeAlias = tuple[tuple[int, ...], DType]
"""The shape and dtype of an array."""

Tree: TypeAlias = frozenset[tuple[Names, Spec]]
"""The arrays below a node: their names from there on, their shapes and dtypes."""

STATED = "mpjax.check_loss_scaling(returns)"
STATE_THEM = (
  "State them: for `params, opt_state, loss = step(params, opt_state, batch)` write "
  "mpjax.check_loss_scaling(step, returns=(0, 1, None)), with an entry for each result. A number "
  "is the position of an argument, None a log."
)


class Group(NamedTuple):
  """Arguments with equal trees, and the results with this tree, which have to equal arguments."""

  arguments: list[Names]
  results: list[Names]


def names_of(path: Path) -> Names:
  """Returns the names on a path: kernel for `.kernel` and for `['kernel']`, 0 for `[0]`."""
  return tuple(key[1:] if key.startswith(".") else key[1:-1].strip("'\"") for key in path)


def trees_of(specs: Mapping[Names, Spec]) -> dict[Names, Tree]:
  """Returns the tree below each node, from the root to the leaves."""
  below: dict[Names, list[tuple[Names, Spec]]] = {}
  for names, spec in specs.items():
    # Every prefix of a leaf's path is a node.
    for n in range(len(names) + 1):
      below.setdefault(names[:n], []).append((names[n:], spec))
  return {node: frozenset(tree) for node, tree in below.items()}


def is_below(path: Names, node: Names) -> bool:
  """Whether a path is that of a node or of a part of it."""
  return path[: len(node)] == node


def groups_by_tree(
  arguments: Mapping[Names, Spec], results: Mapping[Names, Spec], roots: Iterable[Names]
) -> list[Group]:
  """Returns the arguments for which a result has an equal tree, or else parts for which one has.

  `roots` are the paths of entire arguments.
  """
  trees, groups, free = trees_of(arguments), [], set(results)
  fitting: dict[_Kind, list[Names]] = {}
  for node, tree in trees_of(results).items():
    fitting.setdefault(_kind(tree, node), []).append(node)
  waiting: dict[_Kind, list[Names]] = {}

  def wait(node: Names, place: Names) -> None:
    waiting.setdefault(_kind(trees[node], place), []).append(node)

  places = {root: len(root) - 1 for root in roots if root in trees}
  for root, n in places.items():
    wait(root, root[n:])
  while waiting:
    # Start with the largest. A larger tree is a safer match than one of its parts.
    kind = max(waiting, key=lambda one: len(one[1]))
    alike, tree = waiting.pop(kind), kind[1]
    leaves = {node: {(*node, *names) for names, _ in tree} for node in fitting.get(kind, ())}
    if found := [node for node, below in leaves.items() if below <= free]:
      groups.append(Group(alike, found))
      free.difference_update(*(leaves[node] for node in found))
      continue
    children = {names[:1] for names, _ in tree if names}
    for part in sorted((*node, *key) for node in alike for key in children):
      # Parts of a tuple, such as a batch, are arrays without names. Equal shapes mean little there.
      if _last_name(part) or not _is_leaf(trees[part]):
        wait(part, part)
  return groups


def groups_as_stated(
  stated: Mapping[Names, int | str | None],
  arguments: Mapping[Names, Spec],
  results: Mapping[Names, Spec],
  roots: Mapping[int | str, Names],
) -> list[Group]:
  """Returns each result with the argument that the user has stated; raises if they do not fit."""
  trees, new, nothing = trees_of(arguments), trees_of(results), Tree()
  groups = []
  for result, argument in stated.items():
    if argument is None:
      continue
    if argument not in roots:
      expected = f"positions or names of arguments: {', '.join(map(repr, roots))}"
      raise MpjaxValueError(STATED, expected=expected, got=repr(argument), fix=STATE_THEM)
    # An entry inside of a result is for the part of the argument that is at the same place there.
    places = [(*roots[argument], *result[n:]) for n in range(len(result) + 1)]
    same = {x: trees.get(x, nothing) & new.get(result, nothing) for x in places}
    part = max(places, key=lambda x: len(same[x]))
    if not same[part]:
      raise MpjaxValueError(
        STATED,
        expected=f"a new version of argument {argument} at {'/'.join(result) or 'the root'}",
        got="no array there with the name, shape and dtype of one in that argument",
        fix="In returns=, give each result the position of the argument it replaces, or None.",
      )
    groups.append(Group([part], [result]))
  # An entry covers all leaves below it.
  without = ["/".join(x) for x in results if not any(is_below(x, node) for node in stated)]
  if without:
    expected, got = "an entry for each result", f"none for {listed(without, most=3)}"
    raise MpjaxValueError(STATED, expected=expected, got=got, fix=STATE_THEM)
  return groups


_Kind: TypeAlias = tuple[Names, Tree]
"""The tree of an argument and of its new version, and the name of a single array."""


def _kind(tree: Tree, place: Names) -> _Kind:
  if not _is_leaf(tree):
    return (), tree
  # All arrays of one shape have the same tree, and only the name tells a mean from a variance. A
  # number without a name is a loss or a metric more often than a state. It needs the same place.
  ((_, (shape, _)),) = tree
  return _last_name(place) or (() if shape else place), tree


def _is_leaf(tree: Tree) -> bool:
  return any(names == () for names, _ in tree)


def _last_name(place: Names) -> Names:
  """Returns the last name and the positions behind it; nothing if there are only positions."""
  named = [i for i, name in enumerate(place) if not name.isdigit()]
  return place[named[-1] :] if named else ()
