"""The code that a cure pastes."""

import pytest

from mpjax._debug.suggested_changes import wrapped_in_full_precision
from mpjax._jaxpr.locations import Source


def cure(path, text):
  """Returns the cure of the line of a program that says "here"."""
  path.write_text(text)
  number = next(n for n, line in enumerate(text.splitlines(), 1) if "here" in line)
  function = "<lambda>" if "lambda" in text.splitlines()[number - 1] else "fn"
  return wrapped_in_full_precision(Source(str(path), number, function))


@pytest.mark.parametrize(
  ("text", "wanted"),
  [
    ("def fn(x, w):\n  y = x @ w  # here", "y = mpjax.full_precision(lambda: x @ w)()"),
    ("def fn(x, w):\n  y = (x\n    @ w)  # here", "y = mpjax.full_precision(lambda: x @ w)()"),
    ("def fn(x, w):\n  return x @ w  # here", "return mpjax.full_precision(lambda: x @ w)()"),
    ("f = lambda x, w: x @ w  # here", "f = mpjax.full_precision(f)"),
    ("f = jax.jit(lambda x: x @ x)  # here", "mpjax.full_precision(lambda x: x @ x)"),
    # They bind a name of the function, or are no expression.
    ("def fn(x):\n  y = (z := x @ x)  # here", "fn = mpjax.full_precision(fn)"),
    ("def fn(x):\n  for y in x @ x:  # here\n    pass", "fn = mpjax.full_precision(fn)"),
    ("%magic here", "fn = mpjax.full_precision(fn)"),
  ],
)
def test_a_cure_is_the_statement_in_a_region(tmp_path, text, wanted):
  assert cure(tmp_path / "program.py", text) == wanted


def test_an_unknown_line_has_a_cure():
  assert wrapped_in_full_precision(None) == "mpjax.full_precision(fn)(...)"
  assert (
    wrapped_in_full_precision(Source("gone.py", 1, "Model.head"))
    == "head = mpjax.full_precision(head)"
  )
