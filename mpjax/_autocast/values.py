"""A floating value of the jaxpr that is being written."""

import dataclasses

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import broadcast_in_dim_p

from mpjax._autocast.kinds import Kind, Role
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.reader import Atom, aval_of, is_number, shape_of


@dataclasses.dataclass(slots=True, eq=False)
class Value:
  """A floating value, and what holds it in the jaxpr that is being written.

  Attributes:
    atom: the variable or the literal. It may be float32 while the value is in low precision.
    kind: what is known of it.
    producer: the equation that was written for it; None for what no equation returns.
    stored: of a parameter that the function has cast, the variable before the cast.
    casts: what holds it in other dtypes, for all consumers.
  """

  atom: Atom
  kind: Kind
  producer: JaxprEqn | None = None
  stored: Atom | None = None
  casts: dict[DType, Atom] = dataclasses.field(default_factory=dict)

  @property
  def is_low_in_float32(self) -> bool:
    """Whether it is in low precision, and in a float32 variable."""
    return self.kind.is_low and aval_of(self.atom).dtype == FLOAT32

  @property
  def number(self) -> float | None:
    """The number that it is, if it can be written in any dtype: as a literal, or one repeated."""
    numbers, scalar = self.kind.numbers or (), self.atom
    if self.producer is not None and self.producer.primitive is broadcast_in_dim_p:
      scalar = self.producer.invars[0]
    is_scalar = not shape_of(scalar) and (scalar is not self.atom or is_number(scalar))
    return numbers[0] if is_scalar and len(numbers) == 1 else None

  @property
  def is_cast_once(self) -> bool:
    """Whether all consumers share one cast.

    Parameters and inputs are cast at each use, so that the gradients of all uses are summed in
    float32. With one cast, the gradients of a weight that is used twice would be added in bfloat16.
    """
    return self.kind.role not in (Role.PARAMETER, Role.INPUT)
