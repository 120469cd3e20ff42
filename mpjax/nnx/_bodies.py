"""The body of a method, run in the state of its call; also a generator's, which runs later."""

import contextlib
import types
from collections.abc import Callable, Generator
from typing import Any

from mpjax._autocast import mark
from mpjax._errors import MpjaxTypeError, message
from mpjax._full_precision import ACTIVE
from mpjax._regions import named_in_errors
from mpjax.nnx._active import Active
from mpjax.nnx._spec import path_of


def run(module: Any, inside: Active, function: Callable[..., Any], call: Any) -> Any:
  """Calls a function in a state, in its region; errors of mixed dtypes name the module.

  Args:
    module: a module of a view.
    inside: the state to be in force.
    function: a method of the module, or a step of its body.
    call: positional and keyword arguments of the function.
  """
  around = ACTIVE.value
  marks = inside.tracing and (around is None or around.region != inside.region)
  spec = type(module).mpjax_spec
  with ACTIVE(inside), mark(inside.region) if marks else contextlib.nullcontext():
    return named_in_errors(function, call, module, path_of(module), spec.policy, inside.failed)


def finished(
  module: Any,
  name: str,
  inside: Active,
  outputs: Any,
  cast: Callable[[Any], Any],
  finish: Callable[[Any], Any],
) -> Any:
  """Returns what a method hands on; a generator's body, which has not run yet, runs as the method.

  Args:
    module: a module of a view.
    name: that of the method.
    inside: the state in which the method was called.
    outputs: what it returned.
    cast: what is done to an argument, and so to what a generator is sent.
    finish: what is done to an output, and so to what a generator yields or returns.

  Raises:
    MpjaxTypeError: the method is async.
  """
  if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
    if isinstance(outputs, types.CoroutineType):
      outputs.close()  # Else Python warns that nobody awaited it.
    raise MpjaxTypeError(
      message(
        f"{type(module).__name__}.{name}, a method of a view of mpjax.nnx.with_policy",
        expected="a method that has run when it returns",
        got="an async method, whose body would run later, without the policy",
        fix="Write the async function around the view, and let it call methods that are not async.",
      )
    )
  if not isinstance(outputs, types.GeneratorType):
    return finish(outputs)
  return _steps(module, inside, outputs, cast, finish)


def _steps(
  module: Any,
  inside: Active,
  body: Generator[Any, Any, Any],
  cast: Callable[[Any], Any],
  finish: Callable[[Any], Any],
) -> Generator[Any, Any, Any]:
  step, given = body.send, None
  while True:
    try:
      made = run(module, inside, step, ((given,), {}))
    except StopIteration as stop:
      return finish(stop.value)
    try:
      step, given = body.send, cast((yield finish(made)))
    except BaseException as error:  # GeneratorExit too: the body is to close.
      step, given = body.throw, error
