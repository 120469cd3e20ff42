"""What is refused, as a call inside of a `with` that has the four parts of its error."""

import contextlib
from collections.abc import Generator

import pytest

from tests.errors import check_error


@contextlib.contextmanager
def refused(
  builtin: type[Exception], where: str, expected: str, got: str, fix: str
) -> Generator[None]:
  """Asserts that what runs inside raises one of our errors that is a `builtin`, with these parts.

  Each part is a fragment, as in `check_error`.

  >>> with refused(ValueError, "(scale)", "a positive number", "0", "Choose a power of two"):
  ...   mpjax.StaticLossScale(0)
  """
  with pytest.raises(builtin) as excinfo:
    yield
  check_error(excinfo, where=where, expected=expected, got=got, fix=fix, builtin=builtin)
