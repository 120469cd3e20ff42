"""The search of `tune`: which modules to compute in float32, given what each is expected to gain.

A choice is the set of modules in float32, by their numbers. Its error is measured, which is
expensive; its cost is the FLOPs of its modules. The search sorts the modules by benefit, bisects
how many are needed, and then looks for cheaper choices with a model of the error that it fits to
the measurements.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray

MORE = 12
"""Measurements after the bisection, which look for a cheaper choice."""

_CORE = 12
"""How many modules, around the place where the sorted list was cut, have all subsets tried."""

Choice: TypeAlias = frozenset[int]


class _Candidate(NamedTuple):
  """A choice that was not measured, in the order of preference if all miss the tolerance."""

  expected: float  # its error, by the model
  cost: tuple[int, int]
  modules: list[int]  # sorted: of equal candidates the first
  chosen: Choice


def search(
  flops: Sequence[int],
  alone: NumpyArray,
  tolerance: float,
  evaluate: Callable[[Choice], float],
) -> Choice | None:
  """Returns the modules that are to compute in float32; None if all of them do not suffice.

  `alone` is the error that each module is expected to cause, and `evaluate` measures a choice.
  """
  errors = dict[Choice, float]()

  def is_good(chosen: Choice) -> bool:
    if chosen not in errors:
      errors[chosen] = evaluate(chosen)
    return errors[chosen] <= tolerance

  if is_good(frozenset()):
    return frozenset()
  # Modules that overflow go together: as long as one does, the gradient is not finite.
  overflowing = int(np.sum(np.isinf(alone)))
  order = _by_benefit(flops, alone)
  prefixes = [frozenset(order[:size]) for size in range(overflowing, len(order) + 1)]
  cut = 0 if is_good(prefixes[0]) else bisect.bisect_left(prefixes, True, lo=1, key=is_good)
  if cut == len(prefixes):
    return None
  best = prefixes[cut]
  choices = _around(order, overflowing + cut, overflowing)
  for _ in range(MORE):
    chosen = _promising(choices, best, flops, alone, errors, tolerance)
    if chosen is None:
      break
    if is_good(chosen):
      best = chosen
  return best


def _by_benefit(flops: Sequence[int], alone: NumpyArray) -> list[int]:
  """Returns the modules, those first that overflow, or that gain most for what they cost."""
  benefit = alone**2 / np.maximum(np.asarray(flops, np.float64), 1)
  return sorted(range(len(flops)), key=lambda i: (-benefit[i], i))


def _around(order: Sequence[int], cut: int, overflowing: int) -> list[Choice]:
  """Returns the choices that differ from a prefix of the order in modules near its end."""
  start = max(min(cut - _CORE // 2, len(order) - _CORE), overflowing)
  always, core = frozenset(order[:start]), order[start : start + _CORE]
  subsets = (itertools.combinations(core, size) for size in range(len(core) + 1))
  return [always.union(subset) for subset in itertools.chain(*subsets)]


def _cost(flops: Sequence[int], chosen: Choice) -> tuple[int, int]:
  """Returns the FLOPs of a choice, and how many modules it has."""
  return sum(flops[i] for i in chosen), len(chosen)


def _promising(
  choices: Sequence[Choice],
  best: Choice,
  flops: Sequence[int],
  alone: NumpyArray,
  errors: Mapping[Choice, float],
  tolerance: float,
) -> Choice | None:
  """Returns the choice to measure next, cheaper than the best one; None if there is none."""
  expected = _expected(np.where(np.isinf(alone), 0, alone), errors, choices)
  cost = functools.partial(_cost, flops)
  cheaper = [
    _Candidate(float(error), cost(chosen), sorted(chosen), chosen)
    for chosen, error in zip(choices, expected, strict=True)
    if chosen not in errors and cost(chosen) < cost(best)
  ]
  if not cheaper:
    return None
  good = [each for each in cheaper if each.expected <= tolerance]
  if good:
    return min(good, key=lambda each: (each.cost, each.modules)).chosen
  # None is expected to be good: the one that is expected to miss least.
  return min(cheaper).chosen


def _expected(
  alone: NumpyArray, errors: Mapping[Choice, float], choices: Sequence[Choice]
) -> NumpyArray:
  """Returns the expected errors of choices, given those that were measured.

  The square of an error is modelled as a sum over the modules that round, plus a rest. Each term is
  expected to be what the sensitivities say, within a factor of about two. The terms are fitted to
  the measurements, since a module in float32 also keeps the consumers of its result in float32.
  """
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[Choice]) -> NumpyArray:
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
