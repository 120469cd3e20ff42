"""Which modules are to stay in float32: a bisection on a sorted list, then cheaper choices."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray
from mpjax._diagnostics.tune.sensitivity import Sensitivity

MORE = 12
"""Evaluations after the bisection, which look for a cheaper choice."""

_ALL_SUBSETS = 14
"""Up to so many modules, all of their subsets are looked at."""

Chosen: TypeAlias = frozenset[int]
"""The numbers of the modules that compute in float32."""

Evaluate: TypeAlias = Callable[[Chosen], float]
"""Measures the error of a choice; inf where the gradient is not finite."""


class Problem(NamedTuple):
  """What is to be solved.

  Fields:
    flops: the operations of each module.
    sensitivity: what rounding does.
    tolerance: the error that is allowed.
  """

  flops: tuple[int, ...]
  sensitivity: Sensitivity
  tolerance: float

  def cost(self, chosen: Chosen) -> tuple[int, int]:
    """Returns the operations in float32, and how many modules compute them."""
    return sum(self.flops[i] for i in chosen), len(chosen)

  @property
  def hard(self) -> Chosen:
    """The modules that are sure to overflow."""
    return frozenset(np.flatnonzero(self.sensitivity.overflows == 2).tolist())

  def expected(self, chosen: Chosen) -> float:
    """Returns the error that a choice is expected to have."""
    rounded = np.asarray([i not in chosen for i in range(len(self.flops))])
    return float(self.sensitivity.error(rounded))


def most_evaluations(count: int) -> int:
  """Returns how often a choice among so many modules is evaluated at most."""
  # Nothing in float32, what overflows, all modules, all of the function; the steps between; and
  # those that look for something cheaper.
  return 4 + math.ceil(math.log2(max(count, 1))) + MORE


def search(problem: Problem, evaluate: Evaluate) -> Chosen | None:
  """Returns the cheapest choice found within the tolerance; None where there is none."""
  count, errors = len(problem.flops), dict[Chosen, float]()

  def is_good(chosen: Chosen) -> bool:
    if chosen not in errors:
      errors[chosen] = evaluate(chosen)
    return errors[chosen] <= problem.tolerance

  if is_good(frozenset()):
    return frozenset()
  if not count:
    return None
  order = _order(problem)
  # What overflows goes together: with a part of it in float32 the gradient is still not finite.
  low, high = max(len(problem.hard) - 1, 0), count
  while high - low > 1:
    middle = (low + high) // 2 if low >= len(problem.hard) else low + 1
    if is_good(frozenset(order[:middle])):
      high = middle
    else:
      low = middle
  best = frozenset(order[:high])
  if not is_good(best):
    return None
  return _cheaper(problem, best, is_good, errors)


def _order(problem: Problem) -> list[int]:
  """Returns the modules: those that overflow, that may, and that help most for what they cost."""
  single = np.mean(problem.sensitivity.projections**2, axis=0)
  ratio = single / np.maximum(np.asarray(problem.flops, np.float64), 1)
  overflows = problem.sensitivity.overflows
  return sorted(range(len(ratio)), key=lambda i: (-overflows[i], -ratio[i], i))


def _cheaper(
  problem: Problem, best: Chosen, is_good: Callable[[Chosen], bool], errors: dict[Chosen, float]
) -> Chosen:
  """Returns the cheapest choice among those that the sensitivities say are good enough."""
  caution = 1.0
  for _ in range(MORE):
    factor = _calibration(problem, errors) * caution
    cost = problem.cost(best)
    ranked = [
      (problem.cost(chosen), expected, sorted(chosen), chosen)
      for chosen, expected in _candidates(problem, best)
      if chosen not in errors and problem.cost(chosen) < cost
    ]
    good = [each for each in ranked if each[1] * factor <= problem.tolerance]
    if good:
      chosen = min(good)[3]
    elif ranked:  # None is expected to be good: the one that misses least.
      chosen = min(ranked, key=lambda each: (each[1], each[0], each[2]))[3]
    else:
      break
    if is_good(chosen):
      best = chosen
    elif good:
      caution *= 1.1
  return best


def _calibration(problem: Problem, errors: dict[Chosen, float]) -> float:
  """Returns by which factor the errors so far were larger than expected."""
  ratios = [
    error / expected
    for chosen, error in errors.items()
    if math.isfinite(error) and (expected := problem.expected(chosen)) > 0
  ]
  return float(np.median(ratios)) if ratios else 1.0


def _candidates(problem: Problem, best: Chosen) -> Iterator[tuple[Chosen, float]]:
  """Yields choices, with the errors that they are expected to have."""
  count = len(problem.flops)
  free = [i for i in range(count) if i not in problem.hard]
  if len(free) <= _ALL_SUBSETS:
    bits = (np.arange(2 ** len(free))[:, None] >> np.arange(len(free))) & 1
    table: NumpyArray = np.zeros((len(bits), count), bool)
    table[:, free] = bits == 1
    table[:, list(problem.hard)] = True
  else:
    rows = [frozenset(row) for row in _near(problem, best, free)]
    table = np.asarray([[i in row for i in range(count)] for row in dict.fromkeys(rows)])
  for row, expected in zip(table, problem.sensitivity.error(~table), strict=True):
    yield frozenset(np.flatnonzero(row).tolist()), float(expected)


def _near(problem: Problem, best: Chosen, free: list[int]) -> Iterator[Chosen]:
  """Yields choices of many modules: one or two less, one for another, and those of one or two."""
  inside = [i for i in free if i in best]
  outside = [i for i in free if i not in best]
  hard = problem.hard
  for i in free:
    yield hard | {i}
  for i in inside:
    yield best - {i}
    for j in outside:
      yield (best - {i}) | {j}
    for j in inside:
      if i < j:
        yield best - {i, j}
  # All in float32, without what costs most for what it helps, one module after the other.
  order = _order(problem)
  for start in (order, sorted(order, key=lambda i: (i not in hard, problem.flops[i], i))):
    for stop in range(len(hard), len(start)):
      yield frozenset(start[:stop]) | hard
