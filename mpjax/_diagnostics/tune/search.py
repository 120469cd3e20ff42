"""Which modules are to stay in float32: a bisection on a sorted list, then cheaper choices."""

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray

MORE = 12
"""Evaluations after the bisection, which look for a cheaper choice."""

_CORE = 12
"""Of so many modules, those around where the sorted list was cut, all subsets are looked at."""

Chosen: TypeAlias = frozenset[int]
"""The numbers of the modules that compute in float32."""


def most_evaluations(count: int) -> int:
  """Returns how often a choice among so many modules is evaluated at most."""
  # Nothing in float32, what overflows, all modules, all of the function; the steps between; and
  # those that look for something cheaper.
  return 4 + math.ceil(math.log2(max(count, 1))) + MORE


def search(
  flops: Sequence[int], alone: NumpyArray, tolerance: float, evaluate: Callable[[Chosen], float]
) -> Chosen | None:
  """Returns the cheapest choice found within the tolerance; None where there is none.

  Args:
    flops: those of each module.
    alone: the error that rounding in each module alone is expected to cause.
    tolerance: the error that is allowed.
    evaluate: measures the error of a choice; inf where the gradient is not finite.
  """
  count, errors = len(flops), dict[Chosen, float]()

  def is_good(chosen: Chosen) -> bool:
    if chosen not in errors:
      errors[chosen] = evaluate(chosen)
    return errors[chosen] <= tolerance

  def cost(chosen: Chosen) -> tuple[int, int]:
    return sum(flops[i] for i in chosen), len(chosen)

  if is_good(frozenset()):
    return frozenset()
  # The modules that overflow, and those that help most for what they cost.
  ratio = alone**2 / np.maximum(np.asarray(flops, np.float64), 1)
  order = sorted(range(count), key=lambda i: (-ratio[i], i))
  # What overflows goes together: with a part of it in float32 the gradient is still not finite.
  sure = int(np.sum(np.isinf(alone)))
  lists = [frozenset(order[:size]) for size in range(sure, count + 1)]
  cut = 0 if is_good(lists[0]) else bisect.bisect_left(lists, True, lo=1, key=is_good)
  if cut == len(lists):
    return None
  best = lists[cut]
  start = max(min(sure + cut - _CORE // 2, count - _CORE), sure)
  core, always = order[start : start + _CORE], frozenset(order[:start])
  subsets = (itertools.combinations(core, size) for size in range(len(core) + 1))
  choices = [always.union(some) for some in itertools.chain(*subsets)]
  for _ in range(MORE):
    expected = _expected(np.where(np.isinf(alone), 0, alone), errors, choices)
    ranked = [
      (float(error), cost(chosen), sorted(chosen), chosen)
      for chosen, error in zip(choices, expected, strict=True)
      if chosen not in errors and cost(chosen) < cost(best)
    ]
    if not ranked:
      break
    good = [each for each in ranked if each[0] <= tolerance]
    # Where none is expected to be good, the one that is expected to miss least.
    *_, chosen = min(good, key=lambda each: each[1:3]) if good else min(ranked)
    if is_good(chosen):
      best = chosen
  return best


def _expected(
  alone: NumpyArray, errors: Mapping[Chosen, float], choices: Sequence[Chosen]
) -> NumpyArray:
  """Returns the errors that choices are expected to have."""
  # The square of an error is taken to be a sum over the modules that round, and a rest. Each term
  # is expected to be what the sensitivities say, within a factor of about two, and is fitted to
  # what was measured: a module in float32 also keeps the operations in float32 that its result
  # goes into.
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[Chosen]) -> NumpyArray:
    rounded = [[i not in chosen for i in range(len(alone))] + [True] for chosen in choices]
    return np.asarray(rounded, np.float64)

  rows, squares = table(list(measured)), np.asarray(list(measured.values())) ** 2
  worst, terms = int(np.argmax(rows.sum(axis=1))), alone**2
  total = max(float(np.sum(terms * rows[worst, :-1])), np.finfo(float).tiny)
  prior = np.append(terms, 0.1 * total) * (squares[worst] / total)
  spread = (prior + 0.3 * prior.mean()) ** 2
  noise = np.diag((0.05 * squares + 0.01 * squares.max()) ** 2 + np.finfo(float).tiny)
  gain = (rows * spread).T @ np.linalg.pinv((rows * spread) @ rows.T + noise, hermitian=True)
  fitted = np.maximum(prior + gain @ (squares - rows @ prior), 0)
  return np.sqrt(table(choices) @ fitted)
