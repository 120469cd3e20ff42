"""What the library may know of a primitive: the columns of the table in `primitives.py`."""

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

Part: TypeAlias = Literal["half", "float32", "promote", "keep", "opaque"]

PARTS: Mapping[Part, str] = types.MappingProxyType(
  {
    "half": "Its operands are cast to the compute dtype, and its result is in it.",
    "float32": "Its operands are cast to float32, and its result is float32.",
    "promote": "It runs in float32 unless all operands are low and at rest, or neutral: see "
    "docs/concepts.md for what these words mean, and for sums, multiplications and choices.",
    "keep": "It runs in the type that its operand has. Where it writes into a buffer, that is the "
    "first operand, and what is written is cast.",
    "opaque": "It runs in the types in which the jaxpr was written, as without autocast.",
  }
)
"""What each part means."""

EqnParams: TypeAlias = Mapping[str, Any]
"""The parameters of an equation."""

Predicate: TypeAlias = Callable[[EqnParams], str]
"""From the parameters of an equation to a part."""

Degree: TypeAlias = Callable[[Sequence[float], EqnParams], float]
"""From how fast the operands grow, as exponents, to how fast the result does."""


class Holds(enum.Enum):
  """How a primitive runs the jaxprs in its parameters."""

  CALL = enum.auto()
  """Once, on all operands."""
  COMPOSITE = enum.auto()
  """Likewise; a compiler may put something else of the same name and types there."""
  SHARD_MAP = enum.auto()
  """Likewise, on each device."""
  CUSTOM_JVP = enum.auto()
  CUSTOM_VJP = enum.auto()
  CUSTOM_VMAP = enum.auto()
  COND = enum.auto()
  SCAN = enum.auto()
  WHILE = enum.auto()
  LINEAR_CALL = enum.auto()
  """Once, on all operands; another jaxpr, its transpose, has to match."""
  LINEAR_SOLVE = enum.auto()
  """Four that must agree, on operands that are not known."""
  OBJECT = enum.auto()
  """In an object of JAX, of which nothing can be changed."""
  BINARY = enum.auto()
  """The operation on two numbers that combines elements. It is not entered."""
  KERNEL = enum.auto()
  """A kernel written by hand. It is not entered."""


class Row(NamedTuple):
  """Primitives of which all these facts are the same.

  Fields:
    names: the primitives, as `jax.make_jaxpr` prints them, separated by spaces.
    exact: it chooses or moves numbers and computes none: in low precision it loses nothing of
      low-precision operands. Not the maximum of an axis: its derivative counts the positions that
      have it.
    moves: each element of a result is one of an operand: it may as well be cast before.
    elementwise: each element of a result depends on the elements at its own position alone.
    bounded: its result is finite where its operands are.
    tests: its result is boolean, and says something about the size of numbers.
    role: how errors of its operands go into its result: those of a sum, or of a `floor`, are
      absolute, so that rounding an operand may be all of the result; those of a multiplication are
      relative.
    neutral: its results are random numbers, which take the dtype of what they meet, unless it is
      given a floating operand.
    gradient: where the derivative is a sum over elements of the result, how the operand was used;
      "result" where the derivative reads the result itself, which is saved for it.
    degree: how fast the result grows, for an elementwise operation that an activation function may
      contain.
    dtype_param: the parameter that names the dtype, or holds a jaxpr in it.
    flops: the formula for its floating-point operations.
    collective: it sends arrays between devices.
    holds: how it runs the jaxprs that it holds; None if it holds none.
    saves: its operands are what is saved for the derivative.
    jaxpr_params: the parameters that hold the jaxprs which are replaced, separated by spaces;
      "a|b" for one whose name depends on the version of JAX.
  """

  names: str
  exact: bool = False
  moves: bool = False
  elementwise: bool = False
  bounded: bool = False
  tests: bool = False
  role: Literal["sum", "product"] | None = None
  neutral: bool = False
  gradient: Literal["repeated", "added", "multiplied", "chosen", "result"] | None = None
  degree: Degree | None = None
  dtype_param: Literal["preferred_element_type", "update_jaxpr"] | None = None
  flops: Literal["dot", "ragged_dot", "convolution"] | None = None
  collective: bool = False
  holds: Holds | None = None
  jaxpr_params: str = ""
  saves: bool = False


class Family(NamedTuple):
  """Primitives that are in one part for one reason.

  Fields:
    part: where they are, or what decides it from the parameters of the equation; None for
      higher-order primitives, whose jaxprs are entered.
    reason: why they are there, a sentence or two for the page.
    rows: the primitives.
    fixed: whether they cannot be moved, because they hold a jaxpr, or a reference to memory, in
      types that were fixed when it was written.
    decides: what `part` decides, in words.
  """

  part: Part | Predicate | None
  reason: str
  rows: tuple[Row, ...]
  fixed: bool = False
  decides: str = ""

  @property
  def names(self) -> tuple[str, ...]:
    """The primitives, sorted."""
    return tuple(sorted(name for row in self.rows for name in row.names.split()))


def family(
  part: Part | Predicate | None,
  reason: str,
  *rows: str | Row,
  fixed: bool = False,
  decides: str = "",
) -> Family:
  """Returns a family. A string is a row of primitives of which nothing else is to be known."""
  made = tuple(Row(row) if isinstance(row, str) else row for row in rows)
  return Family(part, reason, made, fixed, decides)
