"""The loss scale of a function: in the state of an optimizer, or a number that the loss meets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from mpjax._core.types import Args, Array, Kwargs, Leaf
from mpjax._diagnostics.nonfinite.uses import is_cast, is_move
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.steps import Body, Step
from mpjax.transforms._loss_scale import scales_in

_LEAST = 8
"""A smaller factor of a loss is rather a weight of it than a loss scale."""


Rescale: TypeAlias = Callable[[Step, Sequence[Any]], Sequence[Any]]
"""Returns the operands of a step, at another loss scale."""


class Scale(NamedTuple):
  """A loss scale: an argument, or an operand of the steps that multiply by it."""

  value: float = 1.0
  least: float = 1.0  # the smallest that it may become
  step: int | None = None  # how many steps it has seen, if it is in the state of an optimizer
  arguments: frozenset[int] = frozenset()  # the positions of those that hold it
  operands: Mapping[int, int] = {}  # the positions of such operands, by the numbers of the steps

  def of_arguments(self, factor: Array, arguments: Sequence[Array]) -> list[Array]:
    """Returns the arguments with the scale multiplied by a factor."""
    return [x * factor if i in self.arguments else x for i, x in enumerate(arguments)]

  def of_operands(self, factor: Array, step: Step, ins: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a step with the scale multiplied by a factor."""
    position = self.operands.get(step.number)
    if position is None:
      return ins
    number = jnp.asarray(ins[position])
    return [*ins[:position], number * factor.astype(number.dtype), *ins[position + 1 :]]


def scale_of(args: Args, kwargs: Kwargs, leaves: Sequence[Leaf]) -> Scale | None:
  """Returns the loss scale in the arguments of a function, if there is one."""
  scales = [(one, one.state) for one in scales_in((args, kwargs)) if one.state is not None]
  if not scales:
    return None
  owned, largest = max(scales, key=lambda each: float(np.max(each[1].scale)))
  held = {id(state.scale) for _, state in scales}
  return Scale(
    value=float(np.max(largest.scale)),
    least=owned.limits[0] if owned.dynamic else 1.0,
    step=int(np.max(largest.total)),
    arguments=frozenset(i for i, x in enumerate(leaves) if id(x) in held),
  )


def implied_scale(body: Body, leaves: Sequence[Leaf]) -> Scale | None:
  """Returns the loss scale that a function multiplies its loss by, if it looks like one."""
  # That is a power of two which is a factor of scalars in both passes, of a loss and the cotangent
  # that starts its backward pass: an argument or a constant, moved and cast, or a number in the
  # code.
  values: dict[int, Leaf] = {**body.consts, **dict(zip(body.inputs, leaves, strict=True))}
  factors: dict[float, list[tuple[Step, int]]] = {}
  for step in body.steps:
    first = step.ins[0] if step.ins else None
    if (is_move(step) or is_cast(step)) and isinstance(first, int) and first in values:
      values.update(dict.fromkeys(step.outs, values[first]))
    if step.eqn.primitive is p.mul_p and shape_of(step.eqn.outvars[0]) == ():
      for position, slot in enumerate(step.ins):
        value = slot.val if isinstance(slot, Literal) else values.get(slot, 0.0)
        number = float(np.real(np.asarray(value)).item()) if np.size(value) == 1 else 0.0
        if number >= _LEAST and math.isfinite(number) and math.log2(number).is_integer():
          factors.setdefault(number, []).append((step, position))
  for number, steps in sorted(factors.items(), reverse=True):
    if len({step.location.direction == "backward" for step, _ in steps}) == 2:
      return Scale(number, operands={step.number: position for step, position in steps})
  return None
