"""One way to check the text of an error: that of a block, or one that was made."""

import contextlib
from collections.abc import Generator

import pytest

import mpjax


def check_error(
  error: BaseException, builtin: type[Exception], where: str, expected: str, got: str, fix: str
) -> None:
  """Asserts that an error is one of ours and has its four parts, in order.

  The parts are fragments: of the public call with its argument, or of a path; of what would have
  been accepted; of what came; of what to do. `builtin` is what users who know nothing of us catch.
  """
  assert isinstance(error, mpjax.MpjaxError), f"{type(error).__name__} is not a MpjaxError"
  assert isinstance(error, builtin), type(error).__mro__
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
) -> Generator[pytest.ExceptionInfo[Exception]]:
  """Asserts that what runs inside raises one of our errors that is a `builtin`, with these parts.

  >>> with refused(ValueError, "(scale)", "a positive number", "0", "Choose a power of two"):
  ...   mpjax.StaticLossScale(0)
  """
  with pytest.raises(builtin) as excinfo:
    yield excinfo
  check_error(excinfo.value, builtin, where, expected, got, fix)
