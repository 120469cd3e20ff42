"""What became of injected faults: states compared step by step, and what was lost put down."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.loss_scale_oracle import LIMIT, Oracle


@dataclasses.dataclass
class Outcome:
  """One class of faults."""

  name: str
  injected: int = 0
  lost: int = 0
  seconds: float = 0.0
  first: str = ""  # where the first loss showed
  part: str = ""  # the module that it comes from

  def lose(self, count: int, where: str) -> None:
    """Puts down lost faults, if there are some."""
    self.lost += count
    self.first = self.first or where * bool(count)

  def add(self, other: "Outcome") -> None:
    """Takes over what became of more faults of the class."""
    self.injected += other.injected
    self.lost += other.lost
    self.seconds += other.seconds
    self.first = self.first or other.first


class Job(NamedTuple):
  """A piece of the campaign: some programs and the faults that they meet."""

  part: str  # the module that it is of
  run: Callable[[np.random.Generator], list[Outcome]]


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


def good_steps(planted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns what the control of each run is fed, and which of its states belongs to which step.

  Args:
    planted: bool [runs, steps], the steps to delete.

  Returns:
    The good steps of each run in their order, then its bad ones to fill it up; bool, whether it is
    a good one; how many good steps a run has seen after each step. All [runs, steps].
  """
  order = np.argsort(planted, axis=1, kind="stable")
  active = np.arange(planted.shape[1])[None] < (~planted).sum(1, keepdims=True)
  return order, active, np.cumsum(~planted, axis=1)


def unlike_digests(found: Any, control: Any, seen: np.ndarray, fields: Any) -> dict[str, Any]:
  """Returns where digests differ from those of the control, bool [runs, steps] for each field.

  Args:
    found: uint32 [runs, steps, fields], after each step.
    control: uint32 [runs, 1 + steps, fields], before the first good step and after each.
    seen: how many good steps the run has seen after each step, [runs, steps].
    fields: their names, or more.
  """
  expected = control[np.arange(len(seen))[:, None], seen]
  return dict(zip(fields, np.moveaxis(found != expected, -1, 0), strict=False))


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


def check_clean(clean: Outcome, outcome: Outcome, guard: bool) -> None:
  """Sees to what was wrong in runs without a fault: a loss, unless nothing was guarded anyway."""
  text = f"without any fault: {clean.first}"
  require(guard or not clean.lost, text)
  outcome.lose(clean.lost, text)


SCALE_FIELDS = (
  *("scale", "good_steps", "hysteresis", "total", "skipped", "consecutive_skips"),
  *("floor_hits", "bad_updates"),
)


def oracle_numbers(oracle: Oracle) -> list[float]:
  """Returns the numbers of the oracle now; counters of ours stop at 2^31 - 1."""
  numbers = oracle.numbers()
  return [numbers["scale"], *(min(numbers[field], LIMIT) for field in SCALE_FIELDS[1:])]


def unlike_oracle(found: Any, expected: Any) -> np.ndarray:
  """Whether the numbers of a `LossScaleState` differ from [runs, steps, fields] of the oracle."""
  numbers = [np.asarray(getattr(found, field), np.float64) for field in SCALE_FIELDS]
  return np.any(np.stack(numbers, axis=-1) != np.asarray(expected), axis=-1)
