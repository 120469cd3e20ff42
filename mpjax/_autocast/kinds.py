"""The kind of a value: its role and dtype, which decide the dtype of operations on it.

role         values                                                       dtype
number       literals, masks, random numbers                              decides nothing
parameter    parameters of a module, arguments and closed-over arrays of  decides nothing; cast at
             an `autocast` function                                       each use
input        other arguments, constants and state of a module, integers   float32
             cast to float
activation   results of matmuls and of Flax layers with a `dtype`         the compute dtype, or
                                                                          float32

The result of an operation has the largest role of its operands.
"""

import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.core import Tracer

from mpjax._autocast.numbers import UNKNOWN, Numbers, numbers_of, survives, united
from mpjax._autocast.scopes import Settings
from mpjax._core.types import FLOAT32, FLOATS, Array, DType


class Role(enum.IntEnum):
  """The role of a value. A result has the largest role of its operands."""

  # The order matters. The table at the top says which values have which role.
  NUMBER = 0
  PARAMETER = 1
  INPUT = 2
  # An activation that low precision has not rounded: the result of a float32 matmul of parameters,
  # inputs or other unrounded values. It decides dtypes like any activation. Only the warning of
  # linear algebra distinguishes the two.
  UNROUNDED = 3
  ACTIVATION = 4


class Kind(NamedTuple):
  """The role and dtype of a value, inside a jaxpr and at its boundary."""

  role: Role  # the role
  # The dtype that consumers see. A parameter may be stored in low precision.
  dtype: DType
  # The dtype of its variable, if that differs. A low-precision value is in a float32 variable if
  # its gradients are summed in float32.
  variable: DType | None = None
  # Whether it is one parameter, perhaps moved, scaled or cast by the user. Recipes for
  # matmuls in a format need to know.
  weight: bool = False
  # The numbers among its elements, as far as they matter. Inputs and activations need none, because
  # their dtype already decides in which precision operations run.
  numbers: Numbers = UNKNOWN

  @property
  def is_low(self) -> bool:
    return self.dtype != FLOAT32


Kinds: TypeAlias = tuple[Kind | None, ...]
"""One kind for each value; None for values of other dtypes."""


@functools.lru_cache(maxsize=4096)
def joined(*kinds: Kind) -> Kind:
  """Returns the kind of a value that is computed or selected from values of these kinds.

  Inputs and activations decide the dtype. Without them parameters decide it, and then numbers.
  """
  role = max(kind.role for kind in kinds)
  deciding = [kind for kind in kinds if kind.role >= min(role, Role.INPUT)]
  # A weight times a number is still a weight. The sum of a weight and an input is none.
  arrays = [kind for kind in kinds if kind.role != Role.NUMBER]
  is_weight = bool(arrays) and all(kind.weight for kind in arrays)
  numbers = united(kind.numbers for kind in kinds) if role < Role.INPUT else UNKNOWN
  return Kind(role, widest(deciding), weight=is_weight, numbers=numbers)


def widest(kinds: Iterable[Kind]) -> DType:
  """Returns float32 if one of the kinds has it, otherwise their low-precision dtype."""
  dtypes = {kind.dtype for kind in kinds}
  if FLOAT32 in dtypes:
    return FLOAT32
  # Code that casts may mix float16 and bfloat16. By name, so that the choice has no random order.
  return min(dtypes, key=lambda dtype: dtype.name)


def fits(kinds: Iterable[Kind], dtype: DType) -> bool:
  """Whether all known numbers are in the range of a low-precision dtype."""
  return all(survives(x, dtype) for kind in kinds for x in kind.numbers)


def kind_of_constant(value: Any, settings: Settings) -> Kind | None:
  """Returns the kind of a constant of a jaxpr; None if it is not a floating array."""
  is_array = isinstance(value, (Array, np.ndarray, np.generic))  # A mutable `Ref` is not.
  dtype: Any = getattr(value, "dtype", None)
  if not is_array or dtype not in FLOATS:
    return None
  # A scalar such as an epsilon decides no dtype. The value of a tracer is not known.
  if not isinstance(value, Tracer) and np.ndim(value) == 0 and dtype == FLOAT32:
    return Kind(Role.NUMBER, dtype, numbers=numbers_of(value))
  if settings.modules:
    return kind_of_input(dtype)
  # An `autocast` function may close over its parameters, as a loss closes over a model.
  return Kind(Role.PARAMETER, dtype, weight=True)


def kind_of_input(dtype: DType) -> Kind:
  """Returns the kind of a value in a dtype that the user has chosen, such as an argument.

  It is an input in float32, and an activation in low precision.
  """
  return Kind(Role.INPUT if dtype == FLOAT32 else Role.ACTIVATION, dtype)


def kinds_of_constants(values: Sequence[Any], settings: Settings) -> Kinds:
  """Returns the kinds of the constants of a jaxpr."""
  return tuple(kind_of_constant(value, settings) for value in values)
