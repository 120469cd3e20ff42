"""The body of a method, run in the state of its call; also a generator's, which runs later."""

import types
from collections.abc import Callable, Generator
from typing import Any

import jax

from mpjax._errors import MpjaxTypeError, has_note, message, mixed_dtypes_note
from mpjax._full_precision import ACTIVE
from mpjax.nnx._active import Active, current
from mpjax.nnx._spec import LINK, Link


def run(
  module: Any,
  inside: Active,
  function: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> Any:
  """Calls a function in a state; errors of mixed dtypes name the module.

  Args:
    module: a module of a view.
    inside: the state to be in force.
    function: a method of the module, or a step of its body.
    args: of the function.
    kwargs: of the function.
  """
  with ACTIVE(inside):
    return _name_in_errors(module, function, args, kwargs)


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
    MpjaxTypeError: the method is async, or a generator that `ops=` would have to trace.
  """
  if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
    if isinstance(outputs, types.CoroutineType):
      outputs.close()  # Else Python warns that nobody awaited it.
    fix = "Write the async function around the view, and let it call methods that are not async."
    raise _runs_later(module, name, "an async method", "without the policy", fix)
  if not isinstance(outputs, types.GeneratorType):
    return finish(outputs)
  if current() is None and type(module).mpjax_spec.ops is not None:
    fix = "Return a list, or make the view without ops=."
    raise _runs_later(module, name, "a generator", "outside of the program that ops= rewrites", fix)
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
      made = run(module, inside, step, (given,), {})
    except StopIteration as stop:
      return finish(stop.value)
    try:
      step, given = body.send, cast((yield finish(made)))
    except BaseException as error:  # GeneratorExit too: the body is to close.
      step, given = body.throw, error


def _runs_later(module: Any, name: str, what: str, where: str, fix: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    message(
      f"{type(module).__name__}.{name}, a method of a view of mpjax.nnx.with_policy",
      expected="a method that has run when it returns",
      got=f"{what}, whose body would run later, {where}",
      fix=fix,
    )
  )


def _name_in_errors(
  module: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
  """Calls a function; a TypeError out of it is told which module was running, and under what."""
  try:
    return function(*args, **kwargs)
  except TypeError as error:
    noted = isinstance(error, MpjaxTypeError) or has_note(error)
    policy, link = type(module).mpjax_spec.policy, vars(module).get(LINK)
    path = link.path if isinstance(link, Link) else type(module).__name__
    if policy is not None and not noted and not isinstance(error, jax.errors.JAXTypeError):
      error.add_note(mixed_dtypes_note(path, type(module).__name__, str(policy)))
    raise
