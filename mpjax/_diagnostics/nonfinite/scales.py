"""The loss scale of a function: in the state of an optimizer, or a number that the loss meets."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from mpjax._core.types import Args, Kwargs, Leaf
from mpjax._diagnostics.nonfinite.probes import is_cast, is_move
from mpjax._jaxprs.reader import aval_of, shape_of
from mpjax._jaxprs.steps import Body, Step
from mpjax.transforms._state import scales_in

_LEAST = 8
"""A smaller factor of a loss is rather a weight of it than a loss scale."""


class Scale(NamedTuple):
  """A loss scale."""

  value: float
  positions: Sequence[int]  # of the arguments that hold it
  least: float = 1.0  # the smallest that it may become
  step: int | None = None  # how many steps it has seen, if it is in the state of an optimizer


def scale_of(args: Args, kwargs: Kwargs, leaves: Sequence[Leaf]) -> Scale | None:
  """Returns the loss scale in the arguments of a function, if there is one."""
  scales = [(one.says, one.state) for one in scales_in((args, kwargs)) if one.state is not None]
  if not scales:
    return None
  says, largest = max(scales, key=lambda each: float(np.max(each[1].scale)))
  held = {id(state.scale) for _, state in scales}
  return Scale(
    float(np.max(largest.scale)),
    [i for i, x in enumerate(leaves) if id(x) in held],
    least=says.limits[0] if says.dynamic else 1.0,
    step=int(np.max(largest.total)),
  )


def implied_scale(body: Body, leaves: Sequence[Leaf]) -> tuple[Scale | None, Body, list[Leaf]]:
  """Returns the loss scale that a function multiplies its loss by, if it looks like one.

  The function that is returned takes it as further arguments, which are returned with the others.
  """
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
  for number, places in sorted(factors.items(), reverse=True):
    if len({step.location.direction == "backward" for step, _ in places}) == 2:
      # Each factor becomes an argument, with a number that no value has.
      new = {(step, position): -1 - i for i, (step, position) in enumerate(places)}
      avals = {slot: aval_of(step.eqn.invars[position]) for (step, position), slot in new.items()}
      steps = tuple(
        dataclasses.replace(
          step, ins=tuple(new.get((step, i), slot) for i, slot in enumerate(step.ins))
        )
        for step in body.steps
      )
      body = dataclasses.replace(
        body, inputs=(*body.inputs, *avals), avals={**body.avals, **avals}, steps=steps
      )
      held = [np.asarray(number, aval.dtype) for aval in avals.values()]
      positions = range(len(leaves), len(leaves) + len(held))
      return Scale(number, positions), body, [*leaves, *held]
  return None, body, [*leaves]
