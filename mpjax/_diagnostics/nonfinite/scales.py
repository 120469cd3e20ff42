"""The loss scale of a function: in the state of an optimizer, or a number that the loss meets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from mpjax._core.types import Args, Array, Kwargs, Leaf
from mpjax._diagnostics.arguments import Call
from mpjax._diagnostics.nonfinite.uses import is_cast, is_move
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.steps import Body, Step
from mpjax.transforms._state import replace_scale, scales_in

_LEAST = 8
"""A smaller factor of a loss is rather a weight of it than a loss scale."""


Rescale: TypeAlias = Callable[[Step, Sequence[Any]], Sequence[Any]]
"""Returns the operands of a step, at another loss scale."""


class Scale(NamedTuple):
  """A loss scale in the arguments."""

  value: float
  least: float  # the smallest that it may become
  step: int  # how many steps it has seen
  with_factor: Callable[[float], list[Leaf]]  # returns the arguments with it multiplied by a number


def scale_of(call: Call, args: Args, kwargs: Kwargs) -> Scale | None:
  """Returns the loss scale in the arguments of a function, if there is one."""
  states = [(one, one.state) for one in scales_in((args, kwargs)) if one.state is not None]
  if not states:
    return None

  def with_factor(factor: float) -> list[Leaf]:
    now = (args, kwargs)
    for position in range(len(states)):
      owner = [one for one in scales_in(now) if one.state is not None][position]
      state = states[position][1]
      # Not put anywhere: that would bind the run of several devices to one.
      moved = state.scale * np.float32(factor)
      now = replace_scale(now, owner, state._replace(scale=moved))
    return call.arrays_of(now)

  owner, largest = max(states, key=lambda each: float(np.max(each[1].scale)))
  least = owner.says.limits[0] if owner.says.dynamic else 1.0
  return Scale(float(np.max(largest.scale)), least, int(np.max(largest.total)), with_factor)


class Implied(NamedTuple):
  """A number that a loss meets, and the cotangent that starts its backward pass."""

  value: float
  places: Mapping[int, int]  # the position of that operand, by the numbers of the steps

  def rescale(self, factor: Array, step: Step, ins: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a step with this number multiplied by a factor."""
    position = self.places.get(step.number)
    if position is None:
      return ins
    number = jnp.asarray(ins[position])
    return [*ins[:position], number * factor.astype(number.dtype), *ins[position + 1 :]]


def implied_scale(body: Body, leaves: Sequence[Leaf]) -> Implied | None:
  """Returns the loss scale that a function multiplies its loss by, if it looks like one."""
  # That is a power of two which is a factor of scalars in both passes: an argument or a constant,
  # moved and cast, or a number in the code.
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
  for number, places in sorted(factors.items(), reverse=True):
    if len({step.location.direction == "backward" for step, _ in places}) == 2:
      return Implied(number, {step.number: position for step, position in places})
  return None
