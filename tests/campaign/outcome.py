"""What became of injected faults: states compared step by step, and what was lost put down."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Outcome:
  """One class of faults."""

  name: str
  injected: int = 0
  lost: int = 0
  first: str = ""  # where the first loss showed

  def lose(self, count: int, where: str) -> None:
    """Puts down lost faults, if there are some."""
    self.lost += count
    self.first = self.first or where * bool(count)

  def add(self, other: "Outcome") -> None:
    """Takes over what became of more faults of the class."""
    self.injected += other.injected
    self.lost += other.lost
    self.first = self.first or other.first


class BrokenCampaign(Exception):
  """The campaign did not do what it says: nothing follows from its figures."""


def require(condition: Any, what: str) -> None:
  """Raises `BrokenCampaign` unless `condition` holds."""
  if not condition:
    raise BrokenCampaign(what)


def digest(*trees: Any) -> Any:
  """Returns one uint32 for each tree, made of the bits of all leaves."""
  # The factor of each word is odd: one that changes is always seen, several but once in 2^32.
  return jnp.stack([_digest(tree) for tree in trees])


def _digest(tree: Any) -> Any:
  leaves = jax.tree.leaves(tree)
  words = jnp.concatenate([jnp.zeros(0, jnp.uint32), *map(_words, leaves)])
  factors = np.arange(words.size, dtype=np.uint32) * np.uint32(0x9E3779B2) + np.uint32(1)
  return jnp.sum(words * factors, dtype=jnp.uint32)


def _words(x: Any) -> Any:
  if jnp.issubdtype(x.dtype, jnp.floating):
    x = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
  return x.reshape(-1).astype(jnp.uint32)


def differing(found: Any, expected: Any) -> np.ndarray:
  """Returns for each run whether a leaf is not bit-equal, bool [runs]; containers may differ.

  Args:
    found: a tree of arrays [runs, ...].
    expected: the same leaves, in the same order.
  """
  found, expected = jax.device_get((jax.tree.leaves(found), jax.tree.leaves(expected)))
  wrong = np.zeros(len(found[0]), bool)
  for a, b in zip(found, expected, strict=True):
    require((a.dtype, a.shape) == (b.dtype, b.shape), f"{a.dtype}{a.shape}, {b.dtype}{b.shape}")
    rows = (
      np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (a[:, None], b[:, None])
    )
    wrong |= np.any(np.not_equal(*rows), axis=1)
  return wrong


def judge(
  outcome: Outcome, planted: np.ndarray, wrong: Mapping[str, np.ndarray], where: str
) -> np.ndarray:
  """Counts faults and losses in runs, step by step.

  A fault is lost if anything is wrong from its step up to the next fault. Something wrong before
  the first fault of a run is a loss too: nothing after it would show anything.

  Args:
    outcome: takes the counts.
    planted: bool [runs, steps], where a fault was injected.
    wrong: what was found wrong, bool [runs, steps], by its name.
    where: says which runs these are.

  Returns:
    Whether a step began in the right state, bool [runs, steps].
  """
  outcome.injected += int(planted.sum())
  any_wrong = np.any(list(wrong.values()), axis=0)
  right = np.ones_like(planted)
  right[:, 1:] = ~np.logical_or.accumulate(any_wrong, axis=1)[:, :-1]
  if not any_wrong.any():
    return right
  segment = np.cumsum(planted, axis=1)
  lost = sum(len(set(segment[run][any_wrong[run]])) for run in range(len(planted)))
  run, step = (int(i) for i in np.argwhere(any_wrong)[0])
  names = [name for name, found in wrong.items() if found[run, step]]
  outcome.lose(lost, f"{where}, run {run}: first wrong after step {step}: {', '.join(names)}")
  return right
