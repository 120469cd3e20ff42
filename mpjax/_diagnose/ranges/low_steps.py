"""The steps of a program that a policy computes in low precision, as the rewriter decides it.

A program and its rewritten form have marks with the numbers of the equations of the function. A
step is in low precision if the rewriter wrote the same primitive, of the same equation and in the
same pass, in low precision.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.autocast import autocast
from mpjax._autocast.scopes import REGION
from mpjax._core.leaves import Path
from mpjax._core.types import Array, Function, is_low_precision
from mpjax._diagnose.call import Argument, Call
from mpjax._diagnose.parameter_scopes import as_written, with_parameter_scopes, with_scopes
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import PREFIX
from mpjax._jaxpr.steps import Body, Step, body_of
from mpjax._policy.audit_record import AUDIT, AuditRecord

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


def programs_of(call: Call, fn: Function) -> Programs:
  """Returns the steps of a function, and which of them a policy puts in low precision."""
  program, outputs = call.traced(fn)
  body = body_of(program)
  if _has_policy(body):
    return Programs(body, outputs, _low_steps(body, body))
  marked, arguments = _marked(program), call.arguments(fn)
  # With a record for an audit, the rewriter keeps the marks.
  with AUDIT(AuditRecord()):
    run = jax.make_jaxpr(lambda *arrays: _under_policy(program, arguments, arrays))
    rewritten = run(*program.in_avals)
  body = body_of(marked)
  return Programs(body, outputs, _low_steps(body, body_of(rewritten)))


def programs_of_gradient(call: Call, loss_fn: Function, gradient_of: Function) -> Programs:
  """Returns the same for the gradient of a loss, of which the policy rewrites the loss.

  Args:
    call: the arguments of the loss.
    loss_fn: the loss.
    gradient_of: returns the gradient of a function.
  """
  program, outputs = call.traced(gradient_of(with_parameter_scopes(loss_fn, _as_marked)))
  body = body_of(program)
  if _has_policy(body):
    return Programs(body, outputs, _low_steps(body, body))
  rewritten, _ = call.traced(gradient_of(with_parameter_scopes(loss_fn, _under_policy)))
  return Programs(body, outputs, _low_steps(body, body_of(rewritten)))


def _has_policy(body: Body) -> bool:
  """Whether a function, or a model in it, has a policy of its own."""
  return any(step.location.marked(REGION) is not None for step in body.every_step())


def _marked(program: ClosedJaxpr) -> ClosedJaxpr:
  steps = body_of(program).every_step()
  return with_scopes(program, {step.key: (f"{_STEP}{step.number}",) for step in steps})


def _as_marked(
  program: ClosedJaxpr, arguments: Sequence[Argument], arrays: Sequence[Array]
) -> Sequence[Array]:
  return as_written(_marked(program), arguments, arrays)


def _under_policy(
  program: ClosedJaxpr, arguments: Sequence[Argument], arrays: Sequence[Array]
) -> Sequence[Array]:
  """Runs a program under a policy; all arguments but the first are inputs."""
  marked = _marked(program)
  inputs = [i for i, argument in enumerate(arguments) if not argument.is_first]
  # A number that float16 does not have makes an operation float32, so that is the policy.
  run = autocast(
    lambda *xs: as_written(marked, arguments, cast(Sequence[Array], xs)),
    "mixed_float16",
    data_argnums=inputs,
  )
  return run(*arrays)


def _low_steps(body: Body, rewritten: Body) -> set[int]:
  """Returns the numbers of the steps of a body whose work is in low precision when rewritten."""
  # What the user wrote in low precision is in low precision.
  own = {each.step.number for each in _in_low_precision(Graph(body))}
  if rewritten is body:
    return own
  low = {_work(each.step) for each in _in_low_precision(Graph(rewritten))}
  return own | {step.number for step in body.every_step() if _work(step) in low}


def _work(step: Step) -> tuple[str | None, str, str]:
  return step.location.marked(_STEP), step.location.direction, step.eqn.primitive.name


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
