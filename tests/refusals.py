"""One way to check that a call is refused: `from tests.refusals import check_refused`."""

from collections.abc import Callable

import pytest

import mpjax
from tests.errors import check_error


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
