"""A floating value of the jaxpr that is being written."""

import dataclasses

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import broadcast_in_dim_p

from mpjax._autocast.kinds import Kind, Role
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.reader import Atom, aval_of, is_number, shape_of


@dataclasses.dataclass(slots=True, eq=False)
class FloatValue:
  """A floating value, and its variable in the jaxpr that is being written."""

  # The variable or the literal. It may be float32 while the value is in low precision.
  atom: Atom
  kind: Kind  # its role and dtype
  # The equation that returns it; None for arguments, constants and literals.
  producer: JaxprEqn | None = None
  uncast: Atom | None = None  # the variable before the cast, if the function has cast a parameter
  # Its variables in other dtypes, which consumers share.
  casts: dict[DType, Atom] = dataclasses.field(default_factory=dict)

  @property
  def is_low_in_float32(self) -> bool:
    """Whether it is a low-precision value in a float32 variable."""
    return self.kind.is_low and aval_of(self.atom).dtype == FLOAT32

  @property
  def number(self) -> float | None:
    """The number of a literal or of a broadcast literal; None for other values."""
    # If a value is not known entirely, None is one of its numbers.
    number, *others = self.kind.numbers
    if others:
      return None
    # `Rewriter.cast` writes the number again in another dtype. It can do so for a literal and for a
    # broadcast scalar.
    if self.producer is not None and self.producer.primitive is broadcast_in_dim_p:
      is_scalar = not shape_of(self.producer.invars[0])
    else:
      is_scalar = is_number(self.atom)
    return number if is_scalar else None

  @property
  def is_cast_once(self) -> bool:
    """Whether all consumers share one cast.

    Parameters and inputs are cast at each use, so that their gradients are summed in float32.
    """
    return self.kind.role not in (Role.PARAMETER, Role.INPUT)
