"""What is in force while a method of a policied NNX module runs."""

import dataclasses
from typing import Any

import numpy as np

from mpjax._full_precision import ACTIVE
from mpjax._policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The state in force inside a call. JAX keys its caches by it.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it.

  Fields:
    policy: that of the module being called; None leaves it as it is.
    use_dtype: what parameters and caches are cast to when they are read; None as stored.
    fields: whether modules show the fields that the policy gives them, such as `dtype`.
    wide: whether it is a layer of NNX that shows those for weight gradients in a wider dtype.
    on: policies are in force.
    in_region: it is the state inside of `mpjax.full_precision`, where none is.
    given: always None, as are the two that follow: what a Linen module looks at, to find that no
      policy of its own is in force.
    held: always None.
    entered: always False.
  """

  policy: Policy | None = None
  use_dtype: np.dtype[Any] | None = None
  fields: bool = True
  wide: bool = False
  on: bool = True
  in_region: bool = False
  given: None = None
  held: None = None
  entered: bool = False

  def region(self) -> "Active":
    """Returns the state inside of `mpjax.full_precision`."""
    return _REGION


_REGION = Active(on=False, in_region=True)


def current() -> Active | None:
  """Returns the state in force in this thread; None outside of every policied method."""
  state = ACTIVE.value
  return state if isinstance(state, Active) else None
