"""The body of a method, run in the state of its call; also a generator's, which runs later."""

import types
from collections.abc import Callable, Generator
from typing import Any

from mpjax._core.active import Active
from mpjax._core.errors import MpjaxTypeError
from mpjax._jaxprs.module_calls import call_method
from mpjax.nnx._spec import path_of


def finished(
  module: Any,
  name: str,
  inside: Active,
  outputs: Any,
  finish: Callable[[Any], Any],
) -> Any:
  """Returns what a method returns; a generator's body, which has not run yet, runs as the method.

  Args:
    module: a module of a view.
    name: that of the method.
    inside: the state in which the method was called.
    outputs: what it returned.
    finish: what is done to an output, and so to what a generator yields or returns.

  Raises:
    MpjaxTypeError: the method is async.
  """
  if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
    if isinstance(outputs, types.CoroutineType):
      outputs.close()  # Else Python warns that nobody awaited it.
    raise MpjaxTypeError(
      f"{type(module).__name__}.{name}, a method of a view of mpjax.nnx.with_policy",
      expected="a method that has run when it returns",
      got="an async method, whose body would run later, without the policy",
      fix="Write the async function around the view, and let it call methods that are not async.",
    )
  if not isinstance(outputs, types.GeneratorType):
    return finish(outputs)
  return _steps(module, inside, outputs, finish)


def _steps(
  module: Any,
  inside: Active,
  body: Generator[Any, Any, Any],
  finish: Callable[[Any], Any],
) -> Generator[Any, Any, Any]:
  step, given = body.send, None
  while True:
    try:
      made = call_method(step, ((given,), {}), module, path_of(module), inside)
    except StopIteration as stop:
      return finish(stop.value)
    try:
      step, given = body.send, (yield finish(made))
    except BaseException as error:  # GeneratorExit too: the body is to close.
      step, given = body.throw, error
