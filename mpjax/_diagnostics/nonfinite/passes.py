"""Which pass a step belongs to: what JAX computes ahead for the backward pass belongs to that."""

import os
from collections.abc import Sequence
from typing import Literal

from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._jaxprs.compat import Frame, frames_of
from mpjax._jaxprs.locations import source_of
from mpjax._jaxprs.primitive_facts import Holds

_DIFFERENTIATES = os.path.join("interpreters", "ad.py")
"""The file of JAX that calls the derivative rules of primitives."""

_OWN_RULES = "custom_derivatives.py"
"""That of functions with rules of their own: what those compute is not a slope."""


def direction_of(body: Body, step: Step) -> Literal["forward", "backward"]:
  """Returns the pass of a step of a function.

  The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward pass
  reads it: of a function that is not differentiated it is no part. What `remat` computes again is
  part of the forward pass.
  """
  direction = step.location.direction
  if direction == "backward":
    return "backward"
  around = _around(body, step.number)
  inside = around[-1][0]
  slope = direction == "forward" and all(_only_backward(around, slot) for slot in step.outs)
  return "backward" if slope and _is_slope(inside, step) else "forward"


def _is_slope(body: Body, step: Step) -> bool:
  """Whether the rule of a primitive wrote a step: beside the primitive, which came before it."""
  call = _call(step)
  before = (each for each in body.steps if each.number < step.number and not each.bodies)
  other = (each for each in before if each.eqn.primitive is not step.eqn.primitive)
  return bool(call) and any(_call(each) == call for each in other)


def _call(step: Step) -> tuple[Frame, ...]:
  """Returns the lines that called a primitive, which are also those of what its rule writes."""
  traceback, source = step.eqn.source_info.traceback, source_of(step.eqn)
  frames = () if traceback is None else frames_of(traceback)
  called = 0
  for place, frame in enumerate(frames):
    if source is not None and (frame.file, frame.line) == (source.file, source.line):
      break
    if frame.file.endswith(_OWN_RULES):
      return ()
    if frame.file.endswith(_DIFFERENTIATES) and frame.function.endswith("process_primitive"):
      called = place + 1
  return frames[called:]


def _around(body: Body, number: int) -> list[tuple[Body, Step]]:
  """Returns the steps that a step is in, with their lists, the outermost first; itself last."""
  for step in body.steps:
    if step.number == number:
      return [(body, step)]
  inner = ((step, each) for step in body.steps for each in step.bodies)
  step, within = next(pair for pair in inner if pair[1].holds_step(number))
  return [(body, step), *_around(within, number)]


def _only_backward(around: Sequence[tuple[Body, Step]], slot: int) -> bool:
  """Whether nothing but the backward pass reads a value of the innermost body."""
  body = around[-1][0]
  readers = [each for each in body.steps if slot in each.reads]
  returned = [place for place, each in enumerate(body.outputs) if each == slot]
  for place in returned:
    if len(around) == 1:
      return False
    outer = around[-2][1]
    if outer.holds is Holds.WHILE or (outer.holds is Holds.SCAN and place in outer.inner[0].carry):
      return False
    if not _only_backward(around[:-1], outer.outs[place]):
      return False
  for each in readers:
    direction = each.location.direction
    if direction == "backward":
      continue
    if each.bodies or direction != "forward":
      return False
    if not all(_only_backward(around, made) for made in each.outs):
      return False
  return bool(readers or returned)
