"""The protocol of recipes for low-precision matmuls: see docs/float8.md."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mpjax._core.types import Array, DType

OperandRole: TypeAlias = Literal["input", "weight", "gradient"]
"""The role of an operand: in the forward pass, or as the incoming gradient of the backward pass."""

Product: TypeAlias = Literal["forward", "input_grad", "weight_grad"]
"""The three matmuls of a layer: its result, and the gradients of its input and its weight."""


class Operand(NamedTuple):
  """The description of an operand that a recipe quantises."""

  summed: Sequence[int]  # the axes that the matmul sums over
  role: OperandRole
  product: Product  # the matmul for which it is quantised


class Scaled(NamedTuple):
  """An operand in the format of a recipe, and its scales."""

  values: Array  # the operand divided by its scales
  # One number, or an array with the axes of `values`. An axis along which elements share a scale
  # has size 1. With blocks, the size of each axis divides that of `values`.
  scale: Array | None = None
  of_tensor: Array | None = None  # a second scale, one float32 number


LEAST_SCALE = np.finfo(np.float32).tiny
"""The least scale of the recipes of mpjax. The reciprocal of a smaller one may overflow float32."""


Multiply: TypeAlias = "Callable[[Scaled, Scaled, DType], Array]"
"""A function that returns the float32 matmul of two scaled arrays.

The third argument is the dtype of the matmul before its result is scaled.
"""


class Recipe(Protocol):
  """A low-precision format for matmuls.

  It can be hashed, and `str(recipe)` leads back to it: "package.module:NAME".
  """

  # The name in audits and in policies of `jax.checkpoint`.
  @property
  def name(self) -> str: ...

  # The elements of a block along the summed axis. Operands are then stacks of matrices. None means
  # that operands keep their shape.
  @property
  def block(self) -> int | None: ...

  # Why a matmul with K = `depth` and N = `columns` stays in the compute dtype; None if it does not.
  def why_not(self, depth: int, columns: int) -> str | None: ...

  # Why the gradient of a weight, or of an input, is multiplied in the compute dtype, of a sum of
  # `depth` products; None if it is multiplied in the format.
  def why_not_gradient(self, depth: int, *, of_weight: bool) -> str | None: ...

  # Returns an operand in the format.
  def quantise(self, x: Array, operand: Operand) -> Scaled: ...

  # Returns the matmul in `dtype`, by a call of `multiply` with two operands in the format.
  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array: ...


@runtime_checkable
class Transforms(Protocol):
  """A recipe that multiplies operands by an orthogonal matrix before it rounds them."""

  # Returns an operand that was quantised and dequantised, multiplied by the inverse of the matrix.
  def restored(self, x: Array, operand: Operand) -> Array: ...
