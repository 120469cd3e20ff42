"""Which modules are to stay in float32: a bisection on a sorted list, then cheaper choices."""

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray

MORE = 12
"""Evaluations after the bisection, which look for a cheaper choice."""

_CORE = 12
"""Of so many modules, those around where the sorted list was cut, all subsets are looked at."""

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
  # The modules that overflow, that may, and that help most for what they cost.
  ratio = problem.alone**2 / np.maximum(np.asarray(problem.flops, np.float64), 1)
  order = sorted(range(count), key=lambda i: (-problem.overflows[i], -ratio[i], i))
  # What overflows goes together: with a part of it in float32 the gradient is still not finite.
  sure = int(np.sum(problem.overflows == 2))
  lists = [frozenset(order[:size]) for size in range(sure, count + 1)]
  place = 0 if is_good(lists[0]) else bisect.bisect_left(lists, True, lo=1, key=is_good)
  if place == len(lists):
    return None
  best = lists[place]
  start = max(min(sure + place - _CORE // 2, count - _CORE), sure)
  core, always = order[start : start + _CORE], frozenset(order[:start])
  choices = [
    always.union(some)
    for size in range(len(core) + 1)
    for some in itertools.combinations(core, size)
  ]
  for _ in range(MORE):
    expected = _expected(problem, errors, choices)
    ranked = [
      (problem.cost(chosen), float(error), sorted(chosen), chosen)
      for chosen, error in zip(choices, expected, strict=True)
      if chosen not in errors and problem.cost(chosen) < problem.cost(best)
    ]
    if not ranked:
      break
    good = [each for each in ranked if each[1] <= problem.tolerance]
    # Where none is expected to be good, the one that is expected to miss least.
    first = min(good) if good else min(ranked, key=lambda each: (each[1], each[0], each[2]))
    if is_good(first[3]):
      best = first[3]
  return best


def _expected(
  problem: Problem, errors: Mapping[Chosen, float], choices: Sequence[Chosen]
) -> NumpyArray:
  """Returns the errors that choices are expected to have."""
  # The square of an error is taken to be a sum over the modules that round, and a rest. Each term
  # is expected to be what the sensitivities say, within a factor of about two, and is fitted to
  # what was measured: a module in float32 also keeps the operations in float32 that its result
  # goes into.
  count = len(problem.flops)
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[Chosen]) -> NumpyArray:
    rounded = [[i not in chosen for i in range(count)] + [True] for chosen in choices]
    return np.asarray(rounded, np.float64)

  rows, squares = table(list(measured)), np.asarray(list(measured.values())) ** 2
  worst, alone = int(np.argmax(rows.sum(axis=1))), problem.alone**2
  total = max(float(np.sum(alone * rows[worst, :-1])), np.finfo(float).tiny)
  prior = np.append(alone, 0.1 * total) * (squares[worst] / total)
  spread = (prior + 0.3 * prior.mean()) ** 2
  noise = np.diag((0.05 * squares + 0.01 * squares.max()) ** 2 + np.finfo(float).tiny)
  gain = (rows * spread).T @ np.linalg.pinv((rows * spread) @ rows.T + noise, hermitian=True)
  fitted = np.maximum(prior + gain @ (squares - rows @ prior), 0)
  return np.sqrt(table(choices) @ fitted)
