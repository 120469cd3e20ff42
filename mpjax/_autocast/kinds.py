"""The kind of a value: its role and its dtype, which decide the dtype of operations on it.

role         what it is                                                   its dtype
number       literals, masks, random numbers; all computed from these     decides nothing
parameter    parameters of a module, arguments and closed-over arrays of  decides nothing; cast at
             an `autocast` function; all computed from these and numbers  each use
input        other arguments, constants and state of a module, integers   float32
             cast to float; all computed from inputs without an activation
activation   results of matmuls and of Flax layers with a `dtype`, and    the compute dtype, or
             all computed from an activation                              float32
"""

import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._autocast.settings import Settings
from mpjax._core.types import FLOAT32, HALVES, Array, DType

FLOATS = HALVES | {FLOAT32}

MOST_NUMBERS = 8
"""How many numbers the elements of a value may be among: they are part of the key of a cache."""


class Role(enum.IntEnum):
  """What a value is. A result has the largest role among the operands."""

  NUMBER = 0
  PARAMETER = 1
  INPUT = 2
  ACTIVATION = 3


class Kind(NamedTuple):
  """What is known of a value, inside of a jaxpr and where it enters or leaves one.

  Fields:
    role: what it is.
    dtype: the dtype in which consumers find it. A parameter may be stored in low precision.
    variable: the dtype of the variable that holds it, if another one. A low-precision value is in
      a float32 variable if its gradients are summed in float32.
    weight: it is one parameter, perhaps moved, scaled or cast by the user. A recipe for matmuls
      such as float8 asks for it.
    numbers: all values that its elements may have, if these are few: of literals and of masks.
  """

  role: Role
  dtype: DType
  variable: DType | None = None
  weight: bool = False
  numbers: tuple[float, ...] | None = None

  @property
  def is_low(self) -> bool:
    return self.dtype != FLOAT32


Kinds: TypeAlias = tuple[Kind | None, ...]
"""One kind for each value; None for values of other dtypes."""


@functools.lru_cache(maxsize=4096)
def joined(*kinds: Kind) -> Kind:
  """Returns the kind of a value that is computed from values of these kinds, or chosen among them.

  Inputs and activations decide the dtype where there are some, else parameters, else numbers.
  """
  role = max(kind.role for kind in kinds)
  deciding = [kind for kind in kinds if kind.role >= min(role, Role.INPUT)]
  arrays = [kind for kind in kinds if kind.role != Role.NUMBER]
  return Kind(role, widest(deciding), weight=bool(arrays) and all(kind.weight for kind in arrays))


def widest(kinds: Iterable[Kind]) -> DType:
  """Returns float32 if one of some kinds is in it, else their low-precision dtype."""
  dtypes = {kind.dtype for kind in kinds}
  # By name, should both float16 and bfloat16 occur.
  return FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=lambda dtype: dtype.name)


def fits(kinds: Iterable[Kind], dtype: DType) -> bool:
  """Whether all known numbers are in the range of a low-precision dtype."""
  return all(survives(x, dtype) for kind in kinds for x in kind.numbers or ())


@functools.lru_cache(maxsize=1024)
def survives(number: float, dtype: DType) -> bool:
  """Whether a number becomes neither inf nor zero nor subnormal in a low-precision dtype."""
  size, limits = abs(number), jnp.finfo(dtype)
  return not 0 < size < np.inf or float(limits.tiny) <= size <= float(limits.max)


def numbers_of(scalar: Any) -> tuple[float, ...] | None:
  """Returns the number that a scalar holds, if it may be part of the key of a cache."""
  if not getattr(scalar, "is_fully_addressable", True):  # It is on another machine.
    return None
  number = float(np.asarray(scalar).item())
  # NaN is not equal to itself, and -0.0 is equal to 0.0.
  is_key = not np.isnan(number) and not (number == 0 and np.signbit(number))
  return (number,) if is_key else None


def united(each: Iterable[tuple[float, ...] | None]) -> tuple[float, ...] | None:
  """Returns all numbers of a selection, if they are known and few."""
  operands = list(each)
  if None in operands:
    return None
  among = set(itertools.chain(*(numbers or () for numbers in operands)))
  return tuple(sorted(among)) if len(among) <= MOST_NUMBERS else None


def kind_of_constant(value: Any, settings: Settings) -> Kind | None:
  """Returns the kind of a constant of a jaxpr; None for what is no floating array."""
  is_array = isinstance(value, (Array, np.ndarray, np.generic))  # A reference to one is no array.
  dtype: Any = getattr(value, "dtype", None)
  if not is_array or dtype not in FLOATS:
    return None
  if not isinstance(value, Tracer) and np.ndim(value) == 0 and dtype == FLOAT32:
    return Kind(Role.NUMBER, dtype, numbers=numbers_of(value))
  if settings.modules:
    return kind_of_input(dtype)
  return Kind(Role.PARAMETER, dtype, weight=True)


def kind_of_input(dtype: DType) -> Kind:
  """Returns the kind of an argument that decides: an input, or an activation if it comes in low."""
  return Kind(Role.INPUT if dtype == FLOAT32 else Role.ACTIVATION, dtype)


def kinds_of_constants(values: Sequence[Any], settings: Settings) -> Kinds:
  return tuple(kind_of_constant(value, settings) for value in values)
