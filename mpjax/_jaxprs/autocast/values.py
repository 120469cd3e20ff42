"""What autocast knows of a value while it rewrites a jaxpr."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.float8 import Float8
from mpjax._core.precision import MatmulPrecision
from mpjax._core.rules import Rule
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom
from mpjax._jaxprs.op_lists import OpLists

FLOATS = HALVES | {FLOAT32}

R = TypeVar("R")

Scope = tuple[str, ...]
"""The names of `jax.named_scope`s, the outermost first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What was asked for; part of the key under which a rewritten jaxpr is kept.

  Fields:
    compute: the dtype that float32 gives way to where no rule says something else. Float32 itself
      leaves everything as it is there.
    ops: the lists.
    rules: tried in order against scopes; the policy of the first that matches applies there.
    precision: that of a matmul or convolution of which neither the function nor a policy says
      anything, and which is left as it is: what `jax_default_matmul_precision` asks for.
    asked: the precision of matmuls that the policy asks for; None if it says nothing.
    weight_grads: the dtype of the gradients of weights, see `_weight_grads.py`; None for that of
      the matmuls.
    float8: the recipe for matmuls in float8; None if there are to be none.
    in_derivative: the jaxpr is that of a derivative, such as the rule of a `jax.custom_jvp`. It has
      to be linear in tangents, of which it is not known which they are: no matmul is in float8.
    modules: the function is a call of modules, whose parameters are known. So what it closes over
      decides, whoever made it; in a plain function, a value of a trace around it may be a
      parameter, and does not. Arguments in low precision are shown to modules as float32, and count
      as what they are. And only a `jax.Array` is traced: what NumPy holds is a constant.
  """

  compute: DType
  ops: OpLists
  rules: tuple[Rule, ...] = ()
  precision: object = None
  asked: MatmulPrecision | None = None
  weight_grads: DType | None = None
  float8: Float8 | None = None
  in_derivative: bool = False
  modules: bool = False


class Kind(NamedTuple):
  """How a value comes into a jaxpr, or leaves it.

  Fields:
    dtype: the dtype it has.
    neutral: it was created from arguments, numbers and masks alone, by operations that have no
      opinion: it takes the dtype of what it meets.
    held: the dtype in which it comes, if that is not yet the one that it has where operands decide.
    weight: it is a parameter that the function has cast to low precision, as `Value` has it.
  """

  dtype: DType
  neutral: bool = False
  held: DType | None = None
  weight: bool = False


Kinds: TypeAlias = tuple[Kind | None, ...]
"""Those of several values; None for what is no floating value of ours."""


class Value:
  """A floating value of the jaxpr being written.

  Fields:
    atom: the variable or literal that holds it.
    held: the dtype of `atom`.
    dtype: the dtype in which it counts where operands decide; a cast to it may still be to come.
    neutral: as in `Kind`.
    scope: where it was made; None for what came in from outside.
    wanted: what its readers are, see `demands`.
    once: casts are made once for all readers. Not so for a parameter, whose gradients, one from
      each cast, are then added in float32.
    given: it is an argument, or of the shape of one from which it was made.
    counted: it was an integer.
    filled: the equation that repeats a literal to make it, if that is what it is.
    views: variables that hold it in other dtypes.
    weight: it is a parameter that the function has cast to low precision, and perhaps moved. Noted
      for matmuls in float8 alone.
    stored: what holds that parameter before the cast, if it was not moved since.
  """

  __slots__ = (
    "atom",
    "counted",
    "dtype",
    "filled",
    "given",
    "held",
    "neutral",
    "once",
    "scope",
    "stored",
    "views",
    "wanted",
    "weight",
  )

  def __init__(
    self,
    atom: Atom,
    dtype: DType,
    neutral: bool = False,
    scope: Scope | None = None,
    wanted: int = 0,
    once: bool = True,
    held: DType | None = None,
  ) -> None:
    self.atom = atom
    self.held = dtype if held is None else held
    self.dtype = dtype
    self.neutral = neutral
    self.scope = scope
    self.wanted = wanted
    self.once = once
    self.given = self.counted = self.weight = False
    self.stored: Atom | None = None
    self.filled: JaxprEqn | None = None
    self.views: dict[DType, Atom] | None = None  # Most never need one.

  @property
  def kind(self) -> Kind:
    return Kind(self.dtype, self.neutral, weight=self.weight)


def kept(fun: Callable[..., R]) -> Callable[..., R]:
  """Returns a function of a jaxpr, and of more, that remembers its results as long as the jaxpr is.

  So what a jaxpr closes over lives no longer than it would without.
  """
  known: weakref.WeakKeyDictionary[Jaxpr, dict[Any, R]] = weakref.WeakKeyDictionary()

  @functools.wraps(fun)
  def remembering(jaxpr: Jaxpr, *key: Any) -> R:
    results = known.setdefault(jaxpr, {})
    if key not in results:
      results[key] = fun(jaxpr, *key)
    return results[key]

  return remembering


def is_statistic(shape: tuple[int, ...]) -> bool:
  """Whether a result is of the shape of a mean or a norm: a number, or kept axes of size 1.

  The first axis does not count: a batch may have one row.
  """
  return not shape or 1 in shape[1:]


_NEAR_ONE = 2.0**-6
"""A decay this close to 1 is about its distance from it: 0.999 is 1 in bfloat16, 0.99 is 0.988."""


def survives(number: SupportsFloat, dtype: DType) -> bool:
  """Whether a number is still what it was in a 16-bit dtype, but for its last digits.

  It must not become inf, zero or subnormal, nor a decay like 0.999 another one.
  """
  size = abs(float(number))
  if size == 0 or not np.isfinite(size):
    return True
  if size != 1 and abs(1 - size) < _NEAR_ONE:
    return False
  limits = jnp.finfo(dtype)
  return float(limits.tiny) <= size <= float(limits.max)


_LARGEST_MASK = 2**24
"""The size of an array that is looked at for being a mask: one of attention for 4,096 tokens."""


def is_neutral_constant(number: Any, *halves: DType) -> bool:
  """Whether a float32 constant is a mask, or a single number that survives in each of `halves`.

  Another array may be a grid of coordinates, whose distances low precision loses once something is
  added. A large one is taken for such a grid: looking costs time at each trace, and a copy.
  """
  if np.ndim(number) > 0:
    local = getattr(number, "is_fully_addressable", True)
    if not local or np.size(number) > _LARGEST_MASK:
      return False
    values = np.asarray(number)
    return bool(np.all((values == 0) | (values == 1)))
  return all(survives(number, half) for half in halves)


class Constant(NamedTuple):
  """How a constant comes into a jaxpr.

  Fields:
    neutral: as in `Kind`.
    once: no gradient flows to it, and one cast is enough.
  """

  neutral: bool
  once: bool


def constants(values: Sequence[Any], settings: Settings) -> tuple[Constant, ...]:
  """Returns how the constants of a jaxpr come in, of their values."""
  dtypes = (settings.compute, *(r.policy.compute_dtype for r in settings.rules if r.policy))
  halves = [dtype for dtype in dtypes if dtype in HALVES]

  def one(value: Any) -> Constant:
    if isinstance(value, Tracer):  # A value of a trace around this one.
      return Constant(not settings.modules, False)
    dtype = getattr(value, "dtype", None)
    return Constant(dtype == FLOAT32 and is_neutral_constant(value, *halves), True)

  return tuple(one(value) for value in values)


def literal_value(literal: Literal, half: DType) -> Value:
  """Returns the value of a float32 literal."""
  return Value(literal, FLOAT32, neutral=is_neutral_constant(literal.val, half))
