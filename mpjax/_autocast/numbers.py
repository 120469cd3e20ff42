"""The numbers among the elements of a value, and whether a low-precision dtype can hold them.

Literals and masks have few numbers, which are known when a function is rewritten. A value that is
computed from them keeps the numbers that a low-precision dtype cannot hold, even if parameters are
operands too. Under float16, adding `jnp.where(mask, bias, -1e9)` therefore runs in float32, and so
does dividing by a sum of 70,000 ones.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

from mpjax._core.types import HALVES, DType
from mpjax._jaxpr.primitives import UNCOUNTED, facts_of
from mpjax._jaxpr.reader import LARGEST, shape_of

Numbers: TypeAlias = frozenset[float | None]
"""The numbers of a value: each element equals one of them, or lies between two of them or 0.

None stands for any number. The others are then kept only if a low-precision dtype cannot hold them.
"""

UNKNOWN: Numbers = frozenset((None,))
"""The numbers of a value of which nothing is known."""

MASK: Numbers = frozenset((0.0, 1.0))
"""The numbers of booleans that are cast to a floating dtype."""

MOST_NUMBERS = 8
"""The most numbers that are kept for a value. They are part of a cache key."""

FEW_TURNS = 4
"""How often the body of a loop is rewritten before the numbers of its carry count as unlimited."""


@functools.lru_cache(maxsize=1024)
def survives(number: float | None, dtype: DType) -> bool:
  """Whether a number stays finite, nonzero and normal in a low-precision dtype."""
  if number is None:
    return True
  size, limits = abs(number), jnp.finfo(dtype)
  if size == 0 or not np.isfinite(size):  # Every dtype has these.
    return True
  return float(limits.tiny) <= size <= float(limits.max)


def numbers_of(scalar: Any) -> Numbers:
  """Returns the number that a scalar holds."""
  if not getattr(scalar, "is_fully_addressable", True):  # It is on another machine.
    return UNKNOWN
  return _kept([float(np.asarray(scalar).item())])


def united(each: Iterable[Numbers]) -> Numbers:
  """Returns the numbers of a value whose elements are those of others."""
  return _kept(itertools.chain(*each))


def _kept(numbers: Iterable[float | None]) -> Numbers:
  """Returns numbers as part of a cache key, without those that do not matter."""
  each = list(numbers)
  among = set(map(_key, each))
  # -0.0 is equal to 0.0, so a key with it could lead to the jaxpr of the other number.
  if among == {0.0} and any(math.copysign(1, x) < 0 for x in each if x is not None):
    return UNKNOWN
  if None in among:
    among = {x for x in among if x is None or not all(survives(x, half) for half in HALVES)}
  if len(among) > MOST_NUMBERS:
    among = {*_ends(among), *_others(among)}
  return frozenset(among)


def _key(number: float | None) -> float | None:
  # NaN is not equal to itself, so a key with it would never be found again.
  if number is None or math.isnan(number):
    return None
  return number if math.isinf(number) else min(max(number + 0.0, -LARGEST), LARGEST)


def _ends(numbers: Iterable[float | None]) -> tuple[float, float]:
  """Returns the least and the largest of the finite numbers and 0."""
  known = [0.0, *(x for x in numbers if x is not None and math.isfinite(x))]
  return min(known), max(known)


def _others(numbers: Iterable[float | None]) -> set[float | None]:
  return {x for x in numbers if x is None or math.isinf(x)}


def numbers_of_result(eqn: JaxprEqn, each: Sequence[Numbers]) -> Numbers:
  """Returns the numbers of the results of an operation, from those of its floating operands."""
  # Of most values nothing is known, and then nothing is known of the results.
  if set(each) <= {UNKNOWN}:
    return UNKNOWN
  facts = facts_of(eqn)
  # A matmul may cast an operand of integers itself.
  if facts.folds is not None and len(each) < len(eqn.invars):
    return UNKNOWN
  if facts.folds is not None:
    numbers = _folded(facts.folds, *each)
  elif facts.terms or facts.exact or facts.moves or facts.keeps_numbers:
    numbers = united(each)  # No new number is computed, except by the sum below.
  else:
    return UNKNOWN
  if facts.terms is None:
    return numbers
  terms: Any = facts.terms([shape_of(v) for v in eqn.invars], eqn.params)
  return _summed(numbers, UNCOUNTED if is_symbolic_dim(terms) else terms)


@functools.lru_cache(maxsize=1024)
def _folded(fold: Callable[..., Any], *each: Numbers) -> Numbers:
  """Returns the results of an operation on numbers. A number that is not known counts as 1."""
  # Any combination of numbers may meet at some position. The operation would run in float32.
  among: set[float | None] = set().union(*(numbers & UNKNOWN for numbers in each))
  with np.errstate(all="ignore"):
    for some in itertools.product(*each):
      among.add(float(fold(*(np.float32(1 if x is None else x) for x in some))))
  return _kept(among)


def _summed(numbers: Numbers, terms: float) -> Numbers:
  """Returns the numbers of a sum of `terms` values, each of which has the given numbers."""
  return _kept([*(terms * end for end in _ends(numbers)), *_others(numbers)])


def numbers_of_carry(
  start: Numbers, state: Numbers, returned: Numbers, times: int | None, turn: int
) -> Numbers:
  """Returns the numbers with which a carry may enter any iteration of a loop.

  Args:
    start: the numbers with which it enters the first iteration.
    state: the numbers for which the body was rewritten: at first `start`, then the last result.
    returned: the numbers with which the body returns it.
    times: the number of iterations; None if the values decide it.
    turn: how often the body has been rewritten before.
  """
  if state == start:  # This may be no growth: the body may replace it once, or change its sign.
    return united((state, returned))
  count = UNCOUNTED if times is None or is_symbolic_dim(times) else times
  (least, most), (low, high), (lower, higher) = map(_ends, (start, state, returned))
  down, up = (low - lower if lower < low else 0.0), (higher - high if higher > high else 0.0)
  reach: Numbers = frozenset()
  if (down or up) and count * max(down, up) > 2 * max(least - low, high - most):
    # Each iteration may add as much as this one. A carry that doubles exceeds these limits again,
    # so after a few turns it counts as unlimited.
    limits = (low - count * down, high + count * up) if turn < FEW_TURNS else (-LARGEST, LARGEST)
    reach = _kept(limits)
  return united((state, returned & UNKNOWN, reach))
