"""Which pass a step belongs to: what JAX computes ahead for the backward pass belongs to that."""

import os
from typing import Literal

from jax.extend.core import JaxprEqn

from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._jaxprs.compat import frames_of
from mpjax._jaxprs.locations import source_of

_DIFFERENTIATES = os.path.join("interpreters", "ad.py")
"""The file of JAX that calls the derivative rules of primitives."""


def direction_of(body: Body, step: Step) -> Literal["forward", "backward"]:
  """Returns the pass of a step of a function.

  The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward pass
  reads it: of a function that is not differentiated it is no part. What `remat` computes again is
  part of the forward pass.
  """
  direction = step.location.direction
  if direction == "backward":
    return "backward"
  inside = body.around(step.number)[0]
  slope = direction == "forward" and _is_slope(step.eqn) and _only_backward(inside, step)
  return "backward" if slope else "forward"


def _is_slope(eqn: JaxprEqn) -> bool:
  """Whether the rule of a primitive wrote an equation: JAX called it, below the user's line."""
  traceback, source = eqn.source_info.traceback, source_of(eqn)
  for frame in () if traceback is None else frames_of(traceback):
    if source is not None and (frame.file, frame.line) == (source.file, source.line):
      return False
    if frame.file.endswith(_DIFFERENTIATES):
      return True
  return False


def _only_backward(body: Body, step: Step) -> bool:
  """Whether nothing but the backward pass reads what a step computes."""
  if step.location.direction != "forward":
    return step.location.direction == "backward"
  made = set(step.outs)
  readers = [each for each in body.steps if not made.isdisjoint(each.reads)]
  if not readers or any(isinstance(slot, int) and slot in made for slot in body.outputs):
    return False
  return all(not each.bodies and _only_backward(body, each) for each in readers)
