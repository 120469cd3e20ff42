"""What a framework says of its layers and of its state, so that a policy can treat them."""

import dataclasses
from typing import Literal, NamedTuple

from mpjax._core.types import Class


class Layers(NamedTuple):
  """Layer classes of a framework that need special treatment."""

  # Layers with a `dtype`. Their results are rounded to the compute dtype.
  rounded: tuple[Class, ...] = ()
  # Layers that return the dtype of their argument, such as dropout. No consumer widens them.
  as_given: tuple[Class, ...] = ()
  # Layers that start each step from their last result, so that rounding errors add up. Their own
  # operations run in float32.
  iterates: tuple[Class, ...] = ()
  # Layers that look up rows. Float8 is too coarse for them, so their own matmuls run in the compute
  # dtype.
  tables: tuple[Class, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateKind:
  """How one kind of state is treated: a collection of Linen, or a class of variables of NNX."""

  # Whether its arrays are parameters. Other state is an input.
  is_parameter: bool = False
  # The dtype of new state. "param_dtype" is the `param_dtype` of the policy. "computed" is the
  # dtype that the model computes under the policy. "declared" is the dtype in the code.
  dtype_rule: Literal["param_dtype", "computed", "declared"] = "declared"
