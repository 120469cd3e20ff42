"""Methods that are generators: their bodies run later, and then in the state of the call."""

import types
from collections.abc import Generator

from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import PyTree
from mpjax._jaxprs.module_calls import ModuleCall


def finished(call: ModuleCall, name: str, outputs: PyTree) -> PyTree:
  """Returns what a method returns; a generator's body, which has not run yet, runs as the method.

  Raises:
    MpjaxTypeError: the method is async.
  """
  if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
    if isinstance(outputs, types.CoroutineType):
      outputs.close()  # Else Python warns that nobody awaited it.
    raise MpjaxTypeError(
      f"{type(call.module).__name__}.{name}, a method of a view of mpjax.nnx.with_policy",
      expected="a method that has run when it returns",
      got="an async method, whose body would run later, without the policy",
      fix="Write the async function around the view, and let it call methods that are not async.",
    )
  return _steps(call, outputs) if isinstance(outputs, types.GeneratorType) else call.result(outputs)


def _steps(
  call: ModuleCall, body: Generator[PyTree, PyTree, PyTree]
) -> Generator[PyTree, PyTree, PyTree]:
  step, sent = body.send, None
  while True:
    try:
      yielded = call.run(step, (sent,), {})
    except StopIteration as stop:
      return call.result(stop.value)
    try:
      step, sent = body.send, (yield call.result(yielded))
    except BaseException as error:  # GeneratorExit too: the body is to close.
      step, sent = body.throw, error
