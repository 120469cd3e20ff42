"""What a recipe for low-precision matmuls is asked, and what it answers: see docs/float8.md."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from mpjax._core.types import Array, DType

Role: TypeAlias = Literal["input", "weight", "gradient"]
"""An operand of the forward pass, or the gradient that comes into the backward pass."""

Product: TypeAlias = Literal["forward", "input_grad", "weight_grad"]
"""The three matmuls of a layer, by what they compute."""


class Operand(NamedTuple):
  """What a recipe is told of an operand that it quantises.

  Fields:
    summed: the axes that the matmul sums over.
    role: what the operand is.
    product: the matmul that it is quantised for.
  """

  summed: Sequence[int]
  role: Role
  product: Product


class Scaled(NamedTuple):
  """An operand in the format of a recipe, and its scales.

  Fields:
    values: the operand divided by its scales.
    scale: one number; or an array with the axes of `values`, of size 1 where they share a scale. In
      blocks: an array of which each axis divides that of `values`.
    of_tensor: a second scale, one float32 number.
  """

  values: Array
  scale: Array | None = None
  of_tensor: Array | None = None


Multiply: TypeAlias = "Callable[[Scaled, Scaled, DType], Array]"
"""Returns the matmul of two scaled arrays in float32, which is in this dtype until it is scaled."""


class Recipe(Protocol):
  """A low-precision format for matmuls.

  It can be hashed, and `str(recipe)` leads back to it: "package.module:NAME".
  """

  @property
  def name(self) -> str: ...
  @property
  def block(self) -> int | None: ...
  def why_not(self, depth: int, columns: int) -> str | None: ...
  def multiplies_gradient(self, *, of_weight: bool) -> bool: ...
  def quantise(self, x: Array, operand: Operand) -> Scaled: ...
  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array: ...
