"""Which result of a training step is the new version of which argument."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import Path
from mpjax._optim.step_call import Spec

Names: TypeAlias = tuple[str, ...]
"""A path without its punctuation: an object, its `nnx.State` and a dict have the same."""

Tree: TypeAlias = frozenset[tuple[Names, Spec]]
"""The names, shapes and dtypes of the arrays below a node."""

NodeKind: TypeAlias = tuple[Names, Tree]
"""What an argument and its new version share: the tree, and the name of a single array."""

Stated: TypeAlias = Sequence[tuple[Names | None, Names]]
"""Pairs that a user has stated: an argument, and the result that is its new version.

None stands for a result that is no new version.
"""

STATED = "mpjax.check_loss_scaling(returns)"
STATE_THEM = (
  "State them: for `params, opt_state, loss = step(params, opt_state, batch)` write "
  "mpjax.check_loss_scaling(step, returns=(0, 1, None)), with an entry for each result. A number "
  "is the position of an argument, None a log."
)


def names_of(path: Path) -> Names:
  """Returns the names on a path: kernel for `.kernel` and for `['kernel']`, 0 for `[0]`."""
  return tuple(_name(key) for key in path)


def text_of(path: Path) -> str:
  """Returns the path of a result as Python writes it."""
  return "".join(path) or "the whole result"


class Nodes:
  """The nodes of a tree, from its root to its leaves, by their names.

  Attributes:
    leaves: the path of each leaf.
    paths: the path of each node.
    trees: the arrays below each node.
    by_kind: the nodes of each kind.
  """

  def __init__(self, specs: Mapping[Path, Spec]) -> None:
    self.leaves = {names_of(path): path for path in specs}
    self.paths: dict[Names, Path] = {}
    self._below: dict[Names, dict[Names, Spec]] = {(): {}}
    # Every prefix of a leaf's path is a node.
    for names, path in self.leaves.items():
      for n in range(len(names) + 1):
        self.paths[names[:n]] = path[:n]
        self._below.setdefault(names[:n], {})[names[n:]] = specs[path]
    self.trees: dict[Names, Tree] = {node: frozenset(x.items()) for node, x in self._below.items()}
    # Equal trees have equal kinds, so candidates for a pair are one look-up away.
    self.by_kind: dict[NodeKind, list[Names]] = {}
    for node in self.trees:
      self.by_kind.setdefault(self.kind(node), []).append(node)

  def kind(self, node: Names) -> NodeKind:
    """Returns the properties that a pair shares: the tree, and the name of a single array."""
    # All arrays of one shape have the same tree. Only the name tells a mean from a variance.
    return _last_name(node) if node in self.leaves else (), self.trees[node]

  def leaves_below(self, node: Names) -> list[Names]:
    """Returns the leaves of a node, or the node itself if it is one."""
    return [(*node, *names) for names in self._below[node]]

  def is_number(self, node: Names) -> bool:
    """Whether a node is an array of shape () that has a position and no name."""
    shapes = [shape for _, (shape, _) in self.trees[node]]
    return node in self.leaves and not _last_name(node) and shapes == [()]

  def children(self, node: Names) -> list[Names]:
    """Returns the nodes one level below a node, in the order of the tree."""
    if node in self.leaves:
      return []
    # A dict keeps the order of the tree, and drops repetitions.
    parts = dict.fromkeys(names[0] for names in self._below[node])
    return [(*node, part) for part in parts]


class NewVersions:
  """The pairs of one step: arrays among its arguments, and the results that replace them.

  Args:
    arguments: the shapes and dtypes of the arguments, `(*args, kwargs)`, by path.
    results: those of the results.
    positional: how many arguments have no name.
  """

  def __init__(
    self, arguments: Mapping[Path, Spec], results: Mapping[Path, Spec], positional: int
  ) -> None:
    self._arguments, self._results = Nodes(arguments), Nodes(results)
    self._pairs: dict[Names, Names] = {}
    self._taken: set[Names] = set()  # results that are in a pair
    self._inferred: set[Names] = set()
    # Positional arguments are children of the root, keyword arguments of the dict behind them.
    self._roots: list[Names] = [(), (str(positional),)]
    # Pairs of nodes below which an equal path means the same place. At first: an argument is at the
    # place of the result with the same position, or with its keyword.
    self._places: list[tuple[Names, Names]] = [(root, ()) for root in self._roots]

  @property
  def pairs(self) -> dict[Path, Path]:
    """The path of the result for each array among the arguments that has a new version."""
    arguments, results = self._arguments.leaves, self._results.leaves
    return {arguments[names]: results[new] for names, new in self._pairs.items()}

  @property
  def inferred(self) -> frozenset[Path]:
    """The arrays whose pair follows from the trees alone."""
    return frozenset(self._arguments.leaves[names] for names in self._inferred)

  def pair_stated(self, stated: Stated) -> None:
    """Pairs arguments with the results that the user has stated."""
    for argument, result in stated:
      if argument is not None and not self._pair(argument, result):
        raise MpjaxValueError(
          STATED,
          expected=f"a new version of argument {argument[-1]} at {'/'.join(result) or 'the root'}",
          got="no array there with the name, shape and dtype of one in that argument",
          fix="In returns=, give each result the position of the argument it replaces, or None.",
        )

  def check_all_stated(self, stated: Stated) -> None:
    """Raises if a result has no entry in `returns`. States with a loss scale need none."""
    places = {result for _, result in stated}
    without: list[str] = []
    for names, path in self._results.leaves.items():
      # A stated entry covers all leaves below it.
      is_stated = any(names[:n] in places for n in range(len(names) + 1))
      if names not in self._taken and not is_stated:
        without.append(text_of(path))
    if without:
      expected, got = "an entry for each result", f"none for {listed(without, most=3)}"
      raise MpjaxValueError(STATED, expected=expected, got=got, fix=STATE_THEM)

  def pair_state(self, argument: Path, result: Path) -> None:
    """Pairs states that have the same loss scale."""
    self._pair(names_of(argument), names_of(result))

  def pair_around(self, argument: Path, result: Path) -> None:
    """Pairs the nodes around two states of a pair, as far as names and trees agree."""
    node, new = names_of(argument), names_of(result)
    # Go outwards while names agree: from `train_state.opt_state` to `train_state`.
    while node and new and node[-1] == new[-1]:
      node, new = node[:-1], new[:-1]
      is_same = self._arguments.trees.get(node) == self._results.trees[new]
      # The roots hold all arguments of the call, which do not belong together.
      if is_same and node not in self._roots:
        self._pair(node, new)
    # A place seen from the state is a better hint than a position in the call.
    self._places.insert(0, (node, new))

  def pair_trees(self) -> None:
    """Pairs equal trees, the largest first; raises if several results fit one argument."""
    # Start with entire arguments. A larger tree is a safer match than one of its parts.
    waiting: dict[NodeKind, list[Names]] = {}
    self._wait(self._unpaired(()), waiting)
    while waiting:
      kind = max(waiting, key=_size)
      arguments = waiting.pop(kind)
      results = [node for node in self._results.by_kind.get(kind, ()) if self._is_free(node)]
      # Only if no result has the entire tree, look for its parts.
      if results:
        self._pair_alike(arguments, results)
      else:
        self._wait(self._named_parts(arguments), waiting)

  def _wait(self, nodes: list[Names], waiting: dict[NodeKind, list[Names]]) -> None:
    """Adds arguments to those that wait for a result of their kind."""
    for node in nodes:
      waiting.setdefault(self._arguments.kind(node), []).append(node)

  def _named_parts(self, nodes: list[Names]) -> list[Names]:
    """Returns the children of some nodes, as far as these have names."""
    # Parts of a tuple, such as a batch, have positions but no names. Equal shapes mean little
    # there.
    parts = [part for node in nodes for part in self._arguments.children(node)]
    return [part for part in parts if _last_name(part)]

  def _pair(self, argument: Names, result: Names) -> bool:
    """Pairs the arrays that are the same below two nodes, and returns whether there are any."""
    nothing = Tree()
    # Below two nodes, the same path with the same shape and dtype is a pair.
    same = self._arguments.trees.get(argument, nothing) & self._results.trees.get(result, nothing)
    for names, _ in same:
      # `setdefault`: stated pairs and pairs of states come first, and stay.
      self._pairs.setdefault((*argument, *names), (*result, *names))
      self._taken.add((*result, *names))
    return bool(same)

  def _is_free(self, result: Names) -> bool:
    """Whether no array below a result is in a pair."""
    return self._taken.isdisjoint(self._results.leaves_below(result))

  def _unpaired(self, node: Names) -> list[Names]:
    """Returns the arguments below a node in which nothing is paired, or the parts of others."""
    unpaired: list[Names] = []
    for child in self._arguments.children(node):
      paired = [names in self._pairs for names in self._arguments.leaves_below(child)]
      if not any(paired):
        unpaired.append(child)
      elif not all(paired):
        unpaired += self._unpaired(child)
    return unpaired

  def _pair_alike(self, arguments: list[Names], results: list[Names]) -> None:
    """Pairs arguments with results that all have the same tree."""
    # A scalar without a name is a loss or a metric more often than it is a state. It needs a place.
    is_number = self._arguments.is_number(arguments[0])
    if len(arguments) == len(results) == 1 and not is_number:
      pairs = {arguments[0]: results[0]}
    else:
      pairs = self._pairs_by_place(arguments, results)
    for argument, result in pairs.items():
      self._pair(argument, result)
      self._inferred.update(self._arguments.leaves_below(argument))
    # An argument without a result stays out: a batch. If results are left over too, only the user
    # can tell which belongs to which.
    without = [self._arguments.paths[x] for x in arguments if x not in pairs]
    others = [self._results.paths[x] for x in results if x not in pairs.values()]
    if without and others and not is_number:
      raise _ambiguous(without, others)

  def _pairs_by_place(self, arguments: list[Names], results: list[Names]) -> dict[Names, Names]:
    """Returns those arguments for which a result is at the same place."""
    pairs: dict[Names, Names] = {}
    for argument in arguments:
      place = self._at_place(argument, results)
      # Two arguments cannot have one new version.
      if place is not None and place not in pairs.values():
        pairs[argument] = place
    return pairs

  def _at_place(self, argument: Names, results: list[Names]) -> Names | None:
    """Returns the result at the place of an argument, if it is one of these."""
    for node, new in self._places:
      # The argument's path below `node`, continued from `new`.
      place = (*new, *argument[len(node) :])
      if argument[: len(node)] == node and place in results:
        return place
    return None


def _ambiguous(arguments: list[Path], results: list[Path]) -> MpjaxValueError:
  """Returns the error for arguments whose new version may be one of several results."""
  names = listed([text_of(path) for path in arguments], most=3)
  trees = listed([text_of(path) for path in results], most=3)
  return MpjaxValueError(
    "mpjax.check_loss_scaling(step)",
    expected="one result with the names, shapes and dtypes of each argument that step replaces",
    got=f"several that fit: for the arguments {names} the results {trees}",
    fix=STATE_THEM,
  )


def _name(key: str) -> str:
  """Returns a key without its punctuation: `.a`, `['a']` and `[0]` become a, a and 0."""
  return key[1:] if key.startswith(".") else key[1:-1].strip("'\"")


def _size(kind: NodeKind) -> int:
  """Returns the number of arrays in a tree of this kind."""
  return len(kind[1])


def _last_name(node: Names) -> Names:
  """Returns the last name and the positions behind it; nothing if there are only positions."""
  named = [i for i, name in enumerate(node) if not name.isdigit()]
  return node[named[-1] :] if named else ()
