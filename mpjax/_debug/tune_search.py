"""The search of `tune`: which modules to upgrade, given the expected gain of each upgrade.

An upgrade moves a module to a more exact format, such as float32. A choice is a set of upgrades, by
their numbers. Its error is measured, which is expensive; its cost is the FLOPs of its upgrades. The
search sorts the upgrades by benefit, bisects how many are needed, and then looks for cheaper
choices with a model of the error that it fits to the measurements.
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
"""The most measurements after the bisection, which look for a cheaper choice."""

_CORE = 12
"""The upgrades around the cut of the sorted list. All their subsets are candidates."""

Choice: TypeAlias = frozenset[int]


class _Candidate(NamedTuple):
  """A choice that was not measured, in the order of preference if all miss the tolerance."""

  expected: float  # its error, by the model
  cost: tuple[int, int]
  upgrades: list[int]  # sorted: of equal candidates the first
  chosen: Choice


class Upgrade(NamedTuple):
  """A move of a module to a more exact format.

  Fields:
    module: the number of the module.
    level: the position of the new format among the candidates. Float32 comes after the last one.
    flops: the FLOPs of the module, once for each position that it moves.
    error: the error that the move is expected to save; inf if the module overflows before it.
    after: the number of the upgrade of the same module that comes first; None for the first.
  """

  module: int
  level: int
  flops: int
  error: float
  after: int | None


def upgrades_of(flops: Sequence[int], alone: Sequence[NumpyArray]) -> list[Upgrade]:
  """Returns the upgrades of all modules, in the order of the modules.

  Args:
    flops: the FLOPs of each module.
    alone: for each candidate format the error that each module is expected to cause in it.
  """
  upgrades = list[Upgrade]()
  # Each module may be upgraded in several steps, from format to format.
  for module, cost in enumerate(flops):
    errors = [float(of_format[module]) for of_format in alone]
    # A format that is not more exact than an earlier one costs more and gains nothing.
    levels = _levels_by_error(errors)
    costs = [cost * (level - below) for below, level in itertools.pairwise(levels)]
    # Float32, after the last format, has no error.
    of_levels = [*errors, 0.0]
    gains = _gains([of_levels[level] for level in levels], costs)
    after = None
    for level, one_cost, gain in zip(levels[1:], costs, gains, strict=True):
      # The search expects errors, which it squares again.
      upgrades.append(Upgrade(module, level, one_cost, math.sqrt(gain), after))
      after = len(upgrades) - 1
  return upgrades


def _levels_by_error(errors: Sequence[float]) -> list[int]:
  """Returns the first format, the later ones that are more exact than all before, and float32."""
  levels = [0]
  for level, error in enumerate(errors):
    if error < errors[levels[-1]]:
      levels.append(level)
  # A module without FLOPs costs 1 here, so that the division is defined.
  return [*levels, len(errors)]


class _Run(NamedTuple):
  """Successive upgrades of one module."""

  gain: float
  costs: list[int]

  @property
  def benefit(self) -> float:
    return self.gain / max(sum(self.costs), 1)


def _gains(errors: Sequence[float], costs: Sequence[int]) -> list[float]:
  """Returns by how much each upgrade reduces the square of the error.

  If a later upgrade gains more for its cost than an earlier one, both share their gain by cost. The
  benefit of the upgrades of a module therefore never rises.
  """
  runs = list[_Run]()
  for (error, better), cost in zip(itertools.pairwise(errors), costs, strict=True):
    # inf - inf would be NaN. An overflow that ends is an infinite gain.
    run = _Run(math.inf if math.isinf(error) else error**2 - better**2, [cost])
    # Merging keeps the benefits falling, as in the upper hull of the costs and gains.
    while runs and runs[-1].benefit < run.benefit:
      earlier = runs.pop()
      run = _Run(earlier.gain + run.gain, [*earlier.costs, *run.costs])
    runs.append(run)
  return [
    run.gain * max(cost, 1) / sum(max(each, 1) for each in run.costs)
    for run in runs
    for cost in run.costs
  ]


def levels_of(chosen: Choice, upgrades: Sequence[Upgrade]) -> dict[int, int]:
  """Returns the positions of the formats of the modules that a choice upgrades."""
  levels = dict[int, int]()
  # Later upgrades of a module have larger numbers, so the last one wins.
  for i in sorted(chosen):
    levels[upgrades[i].module] = upgrades[i].level
  return levels


def search(
  flops: Sequence[int],
  alone: NumpyArray,
  tolerance: float,
  evaluate: Callable[[Choice], float],
  after: Sequence[int | None] | None = None,
  below: float = math.inf,
) -> Choice | None:
  """Returns the upgrades to make; None if all of them do not suffice.

  Args:
    flops: the cost of each upgrade.
    alone: the error that each upgrade is expected to save.
    tolerance: the error that is allowed.
    evaluate: measures the error of a choice.
    after: for each upgrade the one that must be chosen with it, an earlier one; None for none.
    below: the cost of a good choice that is known, which consists of no upgrades.
  """
  # Without dependencies every upgrade is the only one of its module.
  first = after or [None] * len(flops)
  errors = dict[Choice, float]()

  def is_good(chosen: Choice) -> bool:
    # A measurement traces, compiles and runs the loss, so none is repeated.
    if chosen not in errors:
      errors[chosen] = evaluate(chosen)
    return errors[chosen] <= tolerance

  # The cheapest choice has no upgrade.
  if is_good(frozenset()):
    return frozenset()
  # Upgrade all overflowing modules together: while one overflows, the gradient is not finite.
  overflowing = int(np.sum(np.isinf(alone)))
  order = _by_benefit(flops, alone, first)
  prefixes = [frozenset(order[:size]) for size in range(overflowing, len(order) + 1)]
  cut = _first_good(prefixes, is_good)
  if cut == len(prefixes):
    return None
  best = prefixes[cut]
  # Upgrades far before the cut are needed and far behind it are not. Only those near it are in
  # doubt.
  choices = _around(order, overflowing + cut, overflowing, first)
  for _ in range(MORE):
    # Only a cheaper choice is of interest.
    limit = min(_cost(flops, best), (below, 0))
    chosen = _promising(choices, limit, flops, alone, errors, tolerance)
    # Every cheaper choice has been measured.
    if chosen is None:
      break
    if is_good(chosen):
      best = chosen
  return best


def _first_good(prefixes: Sequence[Choice], is_good: Callable[[Choice], bool]) -> int:
  """Returns the position of the first good prefix, or their number if none is good."""
  # The first prefix is often good, so it is measured before the bisection.
  if is_good(prefixes[0]):
    return 0
  # The error falls along the prefixes, apart from small exceptions.
  return bisect.bisect_left(prefixes, True, lo=1, key=is_good)


def _by_benefit(flops: Sequence[int], alone: NumpyArray, after: Sequence[int | None]) -> list[int]:
  """Returns the upgrades, those first that end an overflow, or that gain most for their cost."""
  # Squares of errors add up if the errors are independent.
  benefit = (alone**2 / np.maximum(np.asarray(flops, np.float64), 1)).tolist()
  # An upgrade must not be sorted before the one that it depends on.
  for i, first in enumerate(after):
    if first is not None:
      benefit[i] = min(benefit[i], benefit[first])
  # Equal benefits keep the order of the modules, so the search is deterministic.
  return sorted(range(len(flops)), key=lambda i: (-benefit[i], i))


def _around(
  order: Sequence[int], cut: int, overflowing: int, after: Sequence[int | None]
) -> list[Choice]:
  """Returns the choices that differ from a prefix of the order in upgrades near its end."""
  # The core stays within the list, and behind the upgrades that end an overflow.
  start = max(min(cut - _CORE // 2, len(order) - _CORE), overflowing)
  always = frozenset(order[:start])
  core = order[start : start + _CORE]
  # At most 2^12 subsets: each is only evaluated by the model.
  subsets = (itertools.combinations(core, size) for size in range(len(core) + 1))
  choices = (always.union(subset) for subset in itertools.chain(*subsets))
  return [chosen for chosen in choices if _is_complete(chosen, after)]


def _is_complete(chosen: Choice, after: Sequence[int | None]) -> bool:
  """Whether a choice has, for each upgrade, the earlier upgrades of the same module."""
  return all(after[i] is None or after[i] in chosen for i in chosen)


def _cost(flops: Sequence[int], chosen: Choice) -> tuple[int, int]:
  """Returns the FLOPs of a choice, and how many upgrades it has."""
  return sum(flops[i] for i in chosen), len(chosen)


def _promising(
  choices: Sequence[Choice],
  limit: tuple[float, int],
  flops: Sequence[int],
  alone: NumpyArray,
  errors: Mapping[Choice, float],
  tolerance: float,
) -> Choice | None:
  """Returns the choice to measure next, cheaper than a limit; None if there is none."""
  # Every choice has the upgrades that end an overflow, so they add nothing to the model.
  expected = _expected(np.where(np.isinf(alone), 0, alone), errors, choices)
  cost = functools.partial(_cost, flops)
  cheaper = [
    _Candidate(float(error), cost(chosen), sorted(chosen), chosen)
    for chosen, error in zip(choices, expected, strict=True)
    if chosen not in errors and cost(chosen) < limit
  ]
  if not cheaper:
    return None
  # Try the cheapest choice that should be good.
  good = [each for each in cheaper if each.expected <= tolerance]
  if good:
    return min(good, key=lambda each: (each.cost, each.upgrades)).chosen
  # No choice is expected to be good. Try the one with the smallest expected error.
  return min(cheaper).chosen


def _expected(
  alone: NumpyArray, errors: Mapping[Choice, float], choices: Sequence[Choice]
) -> NumpyArray:
  """Returns the expected errors of choices, given the measured ones.

  The square of an error is modelled as a sum over the upgrades that are not made, plus a rest. The
  prior of each term is its error alone, within a factor of about two. The terms are fitted to the
  measurements, since a module in float32 also keeps the consumers of its result in float32.
  """
  # An infinite error cannot be fitted.
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[Choice]) -> NumpyArray:
    rounded = [[i not in chosen for i in range(len(alone))] + [True] for chosen in choices]
    return np.asarray(rounded, np.float64)

  rows = table(list(measured))
  squares = np.asarray(list(measured.values())) ** 2
  # The measurement with the fewest upgrades has most terms. It fixes the scale of all.
  worst = int(np.argmax(rows.sum(axis=1)))
  terms = alone**2
  total = max(float(np.sum(terms * rows[worst, :-1])), np.finfo(float).tiny)
  # The rest, a tenth of the total, stands for operations that no upgrade changes.
  prior = np.append(terms, 0.1 * total) * (squares[worst] / total)
  # Variances of a Gaussian prior. The mean gives small terms room to grow.
  spread = (prior + 0.3 * prior.mean()) ** 2
  # Measured squares are trusted to 5 %. The tiny number keeps the matrix regular.
  noise = np.diag((0.05 * squares + 0.01 * squares.max()) ** 2 + np.finfo(float).tiny)
  # The linear update of the mean, as in a Kalman filter.
  gain = (rows * spread).T @ np.linalg.pinv((rows * spread) @ rows.T + noise, hermitian=True)
  # A negative square has no meaning.
  fitted = np.maximum(prior + gain @ (squares - rows @ prior), 0)
  return np.sqrt(table(choices) @ fitted)
