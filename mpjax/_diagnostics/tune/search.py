"""Which modules are to stay in float32: a bisection on a sorted list, then cheaper choices."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray

MORE = 12
"""Evaluations after the bisection, which look for a cheaper choice."""

_ALL_SUBSETS = 12
"""Up to so many modules, all of their subsets are looked at."""

Chosen: TypeAlias = frozenset[int]
"""The numbers of the modules that compute in float32."""

Evaluate: TypeAlias = Callable[[Chosen], float]
"""Measures the error of a choice; inf where the gradient is not finite."""


class Problem(NamedTuple):
  """What is to be solved."""

  flops: tuple[int, ...]  # of each module
  alone: NumpyArray  # the error that rounding in each module alone is expected to cause
  overflows: NumpyArray  # 2 for a module that is sure to overflow, 1 for one that may
  tolerance: float  # the error that is allowed

  def cost(self, chosen: Chosen) -> tuple[int, int]:
    """Returns the operations in float32, and how many modules compute them."""
    return sum(self.flops[i] for i in chosen), len(chosen)

  @property
  def hard(self) -> Chosen:
    """The modules that are sure to overflow."""
    return frozenset(np.flatnonzero(self.overflows == 2).tolist())


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
  ratio = problem.alone**2 / np.maximum(np.asarray(problem.flops, np.float64), 1)
  return sorted(range(len(ratio)), key=lambda i: (-problem.overflows[i], -ratio[i], i))


def _cheaper(
  problem: Problem, best: Chosen, is_good: Callable[[Chosen], bool], errors: dict[Chosen, float]
) -> Chosen:
  """Returns the cheapest choice found among those that are expected to be good enough."""
  for _ in range(MORE):
    cost = problem.cost(best)
    choices, expected = _candidates(problem, best), _expectation(problem, errors)
    ranked = [
      (problem.cost(chosen), float(error), sorted(chosen), chosen)
      for chosen, error in zip(choices, expected(choices), strict=True)
      if chosen not in errors and problem.cost(chosen) < cost
    ]
    if not ranked:
      break
    good = [each for each in ranked if each[1] <= problem.tolerance]
    # Where none is expected to be good, the one that is expected to miss least.
    first = min(good) if good else min(ranked, key=lambda each: (each[1], each[0], each[2]))
    if is_good(first[3]):
      best = first[3]
  return best


def _expectation(
  problem: Problem, errors: dict[Chosen, float]
) -> Callable[[Sequence[Chosen]], NumpyArray]:
  """Returns a function that says which errors choices are expected to have."""
  # The square of an error is taken to be a sum over the modules that round, and a rest. Each term
  # is expected to be what the sensitivities say, within a factor of about two, and is fitted to
  # what was measured: a module in float32 also keeps the operations in float32 that its result
  # goes into.
  count = len(problem.flops)
  prior = problem.alone**2
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[Chosen]) -> NumpyArray:
    rounded = [[i not in chosen for i in range(count)] + [True] for chosen in choices]
    return np.asarray(rounded, np.float64)

  rows, squares = table(list(measured)), np.asarray(list(measured.values())) ** 2
  worst = int(np.argmax(rows.sum(axis=1)))
  total = max(float(np.sum(prior * rows[worst, :-1])), np.finfo(float).tiny)
  prior = np.append(prior, 0.1 * total) * (squares[worst] / total)
  spread = (prior + 0.3 * prior.mean()) ** 2
  noise = np.diag((0.05 * squares + 0.01 * squares.max()) ** 2 + np.finfo(float).tiny)
  gain = (rows * spread).T @ np.linalg.pinv((rows * spread) @ rows.T + noise, hermitian=True)
  fitted = np.maximum(prior + gain @ (squares - rows @ prior), 0)
  return lambda choices: np.sqrt(table(choices) @ fitted)


def _candidates(problem: Problem, best: Chosen) -> list[Chosen]:
  """Returns choices: all that there are of few modules."""
  hard, free = problem.hard, [i for i in range(len(problem.flops)) if i not in problem.hard]
  if len(free) > _ALL_SUBSETS:
    return list(dict.fromkeys(_near(problem, best, free)))
  sizes = range(len(free) + 1)
  return [hard | set(some) for size in sizes for some in itertools.combinations(free, size)]


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
