"""One way to check the text of an error, as pytest caught it, of a block, or of a call."""

import contextlib
from collections.abc import Callable, Generator

import pytest

import mpjax


def check_error(
  excinfo: pytest.ExceptionInfo[BaseException] | BaseException,
  *,
  where: str,
  expected: str,
  got: str,
  fix: str,
  builtin: type[Exception] | None = None,
) -> None:
  """Asserts that an error is one of ours and has its four parts, in order.

  >>> with pytest.raises(mpjax.MpjaxError) as excinfo:
  ...   mpjax.Policy.parse("bf61")
  >>> check_error(excinfo, where="Policy.parse", expected="...", got="'bf61'", fix="bf16")

  The parts are fragments: of the public call with its argument, or of a path; of what would have
  been accepted; of what came; of what to do. Without `builtin` any of the three will do.
  """
  error = excinfo if isinstance(excinfo, BaseException) else excinfo.value
  assert isinstance(error, mpjax.MpjaxError), f"{type(error).__name__} is not a MpjaxError"
  assert isinstance(error, builtin or (ValueError, TypeError, RuntimeError)), type(error).__mro__
  assert all((where, expected, got, fix)), "an empty fragment checks nothing"
  text = str(error)
  rest = text
  # Each fragment stands after the one before it, and the two marks of message() between them.
  for name, fragment in (
    ("where", where),
    ("mark", ": expected "),
    ("expected", expected),
    ("mark", ", got "),
    ("got", got),
    ("fix", fix),
  ):
    _, found, rest = rest.partition(fragment)
    assert found, f"{name}: no {fragment!r} in its place in {text!r}"


@contextlib.contextmanager
def refused(
  builtin: type[Exception], where: str, expected: str, got: str, fix: str
) -> Generator[None]:
  """Asserts that what runs inside raises one of our errors that is a `builtin`, with these parts.

  >>> with refused(ValueError, "(scale)", "a positive number", "0", "Choose a power of two"):
  ...   mpjax.StaticLossScale(0)
  """
  with pytest.raises(builtin) as excinfo:
    yield
  check_error(excinfo, where=where, expected=expected, got=got, fix=fix, builtin=builtin)


def check_refused(
  call: Callable[[], object],
  *,
  where: str,
  expected: str,
  got: str,
  fix: str,
  builtin: type[Exception] | None = None,
) -> str:
  """Asserts that a call raises an error of ours with these four parts, and returns its text."""
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    call()
  check_error(excinfo, where=where, expected=expected, got=got, fix=fix, builtin=builtin)
  return str(excinfo.value)
