"""What autocast knows of a value while it rewrites a jaxpr."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core.primitives import broadcast_in_dim_p

from mpjax._core.types import FLOAT32, HALVES, Array, DType
from mpjax._jaxpr.op_lists import OpLists
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import Atom, aval_of, shape_of
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

FLOATS = HALVES | {FLOAT32}

Scope = tuple[str, ...]  # The names of `jax.named_scope`s, the outermost first.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What was asked for; part of the key under which a rewritten jaxpr is kept.

  In a call of `modules` parameters are known: what is closed over is data. Arguments in low
  precision are shown as float32, and count as what they are. What NumPy holds is a constant.
  """

  policy: Policy  # where no rule and no mark of a module says something else
  ops: OpLists
  rules: tuple[Rule, ...] = ()
  in_derivative: bool = False  # of a rule, linear in some arguments: no matmul is in float8
  modules: bool = False


class Kind(NamedTuple):
  """What a value is, inside of a jaxpr and where it crosses a boundary: data, low or neutral.

  Data is float32 for a reason: arguments that decide, constant arrays, what was an integer, and
  what is computed from them. Low is what a matmul or convolution returned, and what is computed
  from it. All else is neutral: parameters, literals, masks, random numbers.

  Fields:
    dtype: the one that it has at rest: a low-precision dtype if it is low, else float32.
    neutral: it is neutral, or a parameter that is stored in low precision.
    parameter: it is an argument or closed over, perhaps moved or scaled, and neutral, or cast to
      low precision. Each reader casts a neutral one, so that its gradients are added in float32.
    held: it is low and was just computed in float32, which is what its readers read.
    carried: the dtype of the variable that brings it, if it is another one than they read.
    paired: it is carried in float32 for its gradient, and comes once more at rest, to be saved.
    widened: it is held for its readers alone: all that it was computed of is at rest, and so is
      what a caller gets that takes any dtype.
    added: it is a sum of what is at rest, of parameters and of such sums, as a stream is that
      layers add to: by hand it would be in low precision, whatever its range.
    solved: linear algebra returned it, of data or activations, or it is computed from such a value.
    numbers: those that its elements are among, if that is known: of literals, and of masks.
  """

  dtype: DType
  neutral: bool = False
  parameter: bool = False
  held: bool = False
  carried: DType | None = None
  paired: bool = False
  widened: bool = False
  added: bool = False
  solved: bool = False
  numbers: tuple[float, ...] | None = None

  @property
  def is_low(self) -> bool:
    return self.dtype != FLOAT32

  @property
  def is_data(self) -> bool:
    return self.dtype == FLOAT32 and not self.neutral

  @property
  def spans_float32(self) -> bool:
    """Whether its dtype has the range of float32: a rounding is never inf nor zero."""
    return bool(jnp.finfo(self.dtype).maxexp >= jnp.finfo(FLOAT32).maxexp)

  @property
  def rests(self) -> bool:
    """Whether it is low and at rest: its readers read low precision."""
    return self.is_low and not self.held

  @property
  def current(self) -> DType:
    """The dtype that its readers read."""
    return FLOAT32 if self.held else self.dtype

  @property
  def variable(self) -> DType:
    """The dtype of the variable."""
    return self.carried or self.current


Kinds: TypeAlias = tuple[Kind | None, ...]  # None for what is no floating value of ours.


@dataclasses.dataclass(slots=True, eq=False)
class Value:
  """A floating value of the jaxpr being written."""

  atom: Atom  # the variable, which may be float32 for numbers at rest, or the literal
  kind: Kind
  counted: bool = False  # it was an integer
  producer: JaxprEqn | None = None  # the equation that was written for it
  stored: Atom | None = None  # of a parameter that the function has cast, the variable before it
  moved: JaxprEqn | None = None  # of numbers at rest that were moved, if several read what was
  views: dict[DType, Atom] = dataclasses.field(default_factory=dict)  # by other dtypes
  pair: Atom | None = None  # of numbers at rest in a float32 variable, one of the dtype at rest
  # The float32 variable before it was rounded, or what moved such numbers, perhaps among others.
  unrounded: Atom | JaxprEqn | None = None

  @property
  def at_rest(self) -> Atom | None:
    """What holds it in the dtype that it rests in, to be saved; None if nothing does."""
    return self.atom if aval_of(self.atom).dtype == self.kind.dtype else self.pair

  @property
  def is_parameter(self) -> bool:
    """Whether it is a parameter that no cast of the function has rounded."""
    return self.kind.parameter and self.kind.neutral

  @property
  def is_wide(self) -> bool:
    """Whether it is at rest in a float32 variable: it is moved, chosen and compared there."""
    return self.kind.rests and aval_of(self.atom).dtype == FLOAT32

  @property
  def is_repeated(self) -> bool:
    """Whether a `broadcast_in_dim` produced it: its derivative is a sum."""
    return self.producer is not None and self.producer.primitive is broadcast_in_dim_p

  @property
  def number(self) -> float | None:
    """The number that it is, if it can be written in any dtype: as a literal, or one repeated."""
    scalar = self.producer.invars[0] if self.producer and self.is_repeated else self.atom
    numbers = self.kind.numbers or ()
    is_scalar = isinstance(self.atom, Literal) or (self.is_repeated and not shape_of(scalar))
    return numbers[0] if is_scalar and len(numbers) == 1 else None

  @property
  def is_reduced(self) -> bool:
    """Whether a sum over an axis produced it, or the like: a variance, say, and no activation."""
    of, ndim = self.producer, aval_of(self.atom).ndim
    return of is not None and not facts_of(of).moves and aval_of(of.invars[0]).ndim > ndim


@functools.lru_cache(maxsize=1024)
def joined(*kinds: Kind | None) -> Kind | None:
  """Returns the kind of a value that is one of several: see the table in `first_order.py`."""
  several = [kind for kind in kinds if kind is not None]
  if not several:
    return None
  neutral = all(kind.neutral for kind in several)
  parameter = all(kind.parameter for kind in several)
  solved = any(kind.solved for kind in several)
  lows = [kind for kind in several if kind.is_low]
  if not lows or any(kind.is_data for kind in several):
    return Kind(FLOAT32, neutral, parameter and neutral, solved=solved)
  held = [kind for kind in lows if kind.held]
  return Kind(
    # By name, should both float16 and bfloat16 occur.
    min((kind.dtype for kind in lows), key=lambda dtype: dtype.name),
    neutral,
    parameter,
    held=bool(held),
    widened=bool(held) and all(kind.widened for kind in held),
    added=all(kind.added for kind in lows),
    solved=solved,
  )


@functools.lru_cache(maxsize=1024)
def survives(number: float, dtype: DType) -> bool:
  """Whether a number becomes neither inf nor zero nor subnormal in a low-precision dtype."""
  size, limits = abs(number), jnp.finfo(dtype)
  return not 0 < size < np.inf or float(limits.tiny) <= size <= float(limits.max)


@functools.lru_cache(maxsize=1024)
def is_exact(number: float, dtype: DType) -> bool:
  """Whether a low-precision dtype has a number."""
  with np.errstate(over="ignore"):
    return float(np.asarray(number, dtype)) == number


def numbers_of(scalar: Any) -> tuple[float, ...] | None:
  if not getattr(scalar, "is_fully_addressable", True):
    return None
  number = float(np.asarray(scalar).item())
  return None if np.isnan(number) else (number,)  # Not equal to itself, which a key has to be.


def constants(values: Sequence[Any], settings: Settings) -> Kinds:
  """Returns the kinds of the constants of a jaxpr: an array is data, a number is neutral."""

  def one(value: Any) -> Kind | None:
    dtype: Any = getattr(value, "dtype", None)
    if dtype not in FLOATS:
      return None
    if isinstance(value, Tracer):  # A value of a trace around this one, perhaps a parameter.
      return Kind(dtype, neutral=not settings.modules, parameter=not settings.modules)
    is_number = isinstance(value, (Array, np.ndarray, np.generic))  # No reference to one.
    if not is_number or np.ndim(value) > 0 or dtype != FLOAT32:
      return Kind(dtype)
    return Kind(dtype, neutral=True, numbers=numbers_of(value))

  return tuple(map(one, values))
