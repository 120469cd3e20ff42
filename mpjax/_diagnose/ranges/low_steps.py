"""The steps of a program that a policy computes in low precision, as the rewriter decides it.

A program and its rewritten form have marks with the numbers of the equations of the function. A
step is in low precision if the rewriter wrote the same primitive, of the same equation and in the
same pass, in low precision.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.autocast import autocast
from mpjax._autocast.scopes import REGION, region_in
from mpjax._core.leaves import Path
from mpjax._core.types import Array, Function, is_low_precision
from mpjax._diagnose.call import Argument, Call, Traced
from mpjax._diagnose.gradient import gradient_of
from mpjax._diagnose.parameter_scopes import (
  Evaluate,
  as_written,
  with_parameter_scopes,
  with_scopes,
)
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import PREFIX
from mpjax._jaxpr.steps import Body, Step, body_of
from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditRecord

_STEP = PREFIX + "step="
"""A mark with the number of the equation that an operation comes from."""


class Programs(NamedTuple):
  """A program, and what the rewriter makes of it.

  Fields:
    body: its steps, as the user wrote them.
    outputs: the paths of its results.
    low: the numbers of the steps that are in low precision under a policy.
  """

  body: Body
  outputs: Sequence[Path]
  low: set[int]


def programs_of(traced: Traced, arguments: Sequence[Argument]) -> Programs:
  """Returns the steps of a function, and which of them a policy puts in low precision."""

  def rewritten() -> ClosedJaxpr:
    # With a record for an audit, the rewriter keeps the marks.
    with AUDIT(AuditRecord()):
      run = jax.make_jaxpr(lambda *arrays: _under_policy(traced.program, arguments, arrays))
      return run(*traced.program.in_avals)

  return _programs(_marked(traced.program), traced.outputs, rewritten)


def programs_of_gradient(call: Call, loss_fn: Function) -> Programs:
  """Returns the same for the gradient of a loss, of which the policy rewrites the loss."""

  def traced(evaluate: Evaluate) -> Traced:
    return call.traced(gradient_of(with_parameter_scopes(loss_fn, evaluate)))

  marked = traced(lambda program, *operands: as_written(_marked(program), *operands))
  return _programs(marked.program, marked.outputs, lambda: traced(_under_policy).program)


def _programs(
  marked: ClosedJaxpr, outputs: Sequence[Path], rewritten: Callable[[], ClosedJaxpr]
) -> Programs:
  """Returns the steps of a program, of which `rewritten` returns what the rewriter makes of it."""
  body = body_of(marked)
  # What the user wrote in low precision is in low precision.
  low = {each.step.number for each in _in_low_precision(Graph(body))}
  # A function, or a model in it, may have a policy of its own. One that computes in float32 puts
  # nothing in low precision, so it says nothing about what another one would leave in float32.
  regions = {step.location.marked(REGION) for step in body.every_step()}
  policies = [region_in(region).policy for region in regions if region is not None]
  if any(policy is None or is_low_precision(policy.compute_dtype) for policy in policies):
    return Programs(body, outputs, low)

  def work(step: Step) -> tuple[str | None, str, str]:
    return step.location.marked(_STEP), step.location.direction, step.eqn.primitive.name

  written_low = {work(each.step) for each in _in_low_precision(Graph(body_of(rewritten())))}
  low |= {step.number for step in body.every_step() if work(step) in written_low}
  return Programs(body, outputs, low)


def _marked(program: ClosedJaxpr, without: str | None = None) -> ClosedJaxpr:
  """Returns a program whose steps are marked by their numbers, without some of its marks."""
  numbers = {step.key: (f"{_STEP}{step.number}",) for step in body_of(program).every_step()}
  return with_scopes(program, numbers, without=without)


def _under_policy(
  program: ClosedJaxpr, arguments: Sequence[Argument], arrays: Sequence[Array]
) -> Sequence[Array]:
  """Runs a program under a policy instead of its own; all arguments but the first are inputs."""
  marked = _marked(program, without=REGION)
  inputs = [i for i, argument in enumerate(arguments) if not argument.is_first]
  # A number that float16 does not have makes an operation float32, so that is the policy.
  run = autocast(
    lambda *xs: as_written(marked, arguments, cast(Sequence[Array], xs)),
    "mixed_float16",
    data_argnums=inputs,
  )
  return run(*arrays)


def _in_low_precision(graph: Graph) -> Iterator[Operation]:
  """Yields the operations that multiply in low precision, or whose results are stored in it.

  A float32 result counts if it is cast to low precision, as for a matmul.
  """
  rounded = set[Value]()
  for _ in range(graph.walks):
    for operation in reversed(graph.operations):
      passes_on = operation.moves or operation.casts
      if passes_on and any(v.is_low or v in rounded for v in operation.results):
        rounded.update(v for v in operation.operands if v.is_floating)
  for operation in graph.computing():
    dtype = operation.matmul_dtype
    multiplies_low = dtype is not None and is_low_precision(dtype)
    if multiplies_low or any(v.is_low or v in rounded for v in operation.results):
      yield operation
