"""One int32 that says which leaf was not finite, by a checksum of its path.

The trees that `update` checks may differ from the user's tree: a mask hides leaves, `optax.flatten`
makes one array of all, and a model has functions beside its arrays. Positions therefore differ
between the two trees. Paths are the same in both.
"""

import enum
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import jax

from mpjax._core.leaves import raw_value
from mpjax._core.types import KeyPath, Leaf, PyTree, is_inexact
from mpjax._optim.optimizer_trees import leaves_with_path


class LeafKind(enum.IntEnum):
  """What a leaf is part of."""

  GRADIENT = 0
  LOSS = 1
  STATE = 2  # of the inner optimizer, after the step
  UPDATE = 3


_LAST = 2**13 - 3
"""The largest position that a code can have; later leaves have this one."""

NO_LEAF = 2**31 - 1
"""A number above all codes."""


class LeafCode(NamedTuple):
  """The parts of a code: 2 bits for the kind, 13 for the position + 1, 16 for the checksum.

  The kind has the highest bits, so the minimum of several codes is that of the first leaf.
  """

  kind: LeafKind
  position: int  # among the floating leaves of its kind
  checksum: int

  @property
  def position_text(self) -> str:
    """The position, for an error."""
    return f"{self.position} or later" if self.position == _LAST else str(self.position)


def checksum_of(path: KeyPath) -> int:
  """Returns a number below 2^16 for a path; a key counts by its name, whatever has it."""
  return zlib.crc32(jax.tree_util.keystr(path, simple=True, separator="/").encode()) % 2**16


def write_code(kind: LeafKind, position: int, path: KeyPath) -> int:
  """Returns the code of a leaf. Codes ascend with positions; all from `_LAST` on are one."""
  # All later leaves share one code. A checksum would make their order depend on paths.
  checksum = checksum_of(path) if position < _LAST else 0
  # Positions are stored from 1, so that every code is above every number of leaves below 2^16.
  return kind << 29 | (min(position, _LAST) + 1) << 16 | checksum


def read_code(code: int) -> LeafCode | None:
  """Decodes a code; returns None for a number below all codes, such as a number of leaves."""
  # The inverse of `write_code`. Position 0 means that the number is no code.
  rest, checksum = divmod(code, 2**16)
  kind, position = divmod(rest, 2**13)
  return LeafCode(LeafKind(kind), position - 1, checksum) if position else None


def floating_leaves(tree: PyTree) -> list[tuple[KeyPath, Leaf]]:
  """Returns the floating and complex leaves of a tree, those in variables of NNX as well."""
  # `update` sees arrays where the user's tree may have variables of NNX.
  leaves = ((path, raw_value(x)) for path, x in leaves_with_path(tree))
  return [(path, x) for path, x in leaves if is_inexact(x)]


def coded_leaves(kind: LeafKind, tree: PyTree) -> list[tuple[int, Leaf]]:
  """Returns the floating leaves of a tree, each with its code."""
  leaves = floating_leaves(tree)
  return [(write_code(kind, i, path), x) for i, (path, x) in enumerate(leaves)]


def find_leaf(code: LeafCode, named: Iterable[tuple[KeyPath, str]]) -> str | None:
  """Returns the name of the leaf with this code among those with names; None if it is not there.

  If several paths have this checksum, the position decides. If it fits none, all are named.
  """
  # This position stands for many leaves, and its code has no checksum.
  if code.position == _LAST:
    return None
  names = {i: name for i, (path, name) in enumerate(named) if checksum_of(path) == code.checksum}
  # Two paths may share 16 bits. The position decides, unless a mask has shifted it.
  if code.position in names:
    return names[code.position]
  return " or ".join(names.values()) if names else None
