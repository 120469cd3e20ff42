"""The code that a cure pastes."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.suggested_changes import cures_of
from mpjax._jaxpr.steps import body_of
from tests.models.values import normal


def steps_of(path, text):
  """Returns the operations of `fn` in a program, and those at the lines that say "here"."""
  path.write_text(text)
  names = {"jax": jax, "jnp": jnp, "mpjax": mpjax}
  exec(compile(text, str(path), "exec"), names)
  program = jax.make_jaxpr(names["fn"])(normal(4, 4), normal(4, 4))
  steps = [*body_of(program).every_step()]
  lines = {n for n, line in enumerate(text.splitlines(), 1) if "here" in line}
  return steps, lambda name: [
    step for step in steps if step.location.source.line in lines and step.eqn.primitive.name == name
  ]


def cure(path, text, name="dot_general"):
  """Returns the cures of the operations of a kind at the lines that say "here"."""
  steps, at_the_lines = steps_of(path, text)
  assert at_the_lines(name)
  return [each.code for each in cures_of(at_the_lines(name), steps)]


INNER = "def inner(x):\n  return jnp.sin(x) @ x\n"


@pytest.mark.parametrize(
  ("text", "wanted"),
  [
    (
      "def fn(x, w):\n  y = x @ w  # here\n  return y",
      "y = mpjax.full_precision(lambda: x @ w)()",
    ),
    (
      "def fn(x, w):\n  y = (x  # here\n    @ w)\n  return y",
      "y = mpjax.full_precision(lambda: x @ w)()",
    ),
    ("def fn(x, w):\n  return x @ w  # here", "return mpjax.full_precision(lambda: x @ w)()"),
    (
      "def fn(x, w):\n  x += x @ w  # here\n  return x",
      "x = mpjax.full_precision(lambda: x + x @ w)()",
    ),
    ("fn = lambda x, w: x @ w  # here", "fn = mpjax.full_precision(lambda x, w: x @ w)"),
    ("fn = jax.jit(lambda x, w: x @ w)  # here", "mpjax.full_precision(lambda x, w: x @ w)"),
    # They bind a name of the function, or are no expression.
    (
      "def fn(x, w):\n  y = (z := x @ w)  # here\n  return y + z",
      "fn = mpjax.full_precision(fn)  # behind its definition",
    ),
    (
      "def fn(x, w):\n  for y in x @ w:  # here\n    pass\n  return y",
      "fn = mpjax.full_precision(fn)  # behind its definition",
    ),
    # Other code stays outside, and with it what its arguments do not need.
    (
      f"{INNER}def fn(x, w):\n  return x @ inner(2 * w)  # here",
      "return mpjax.full_precision(lambda inner_2: x @ inner_2)(inner(2 * w))",
    ),
    (
      f"{INNER}def fn(x, w):\n  return x + inner(x @ w)  # here",
      "return x + inner(mpjax.full_precision(lambda: x @ w)())",
    ),
    # What runs perhaps, or several times, cannot run before.
    (
      f"{INNER}def fn(x, w):\n  return x @ (inner(w) if True else w)  # here",
      "return mpjax.full_precision(lambda: x @ (inner(w) if True else w))()",
    ),
  ],
)
def test_a_cure_is_the_statement_in_a_region(tmp_path, text, wanted):
  assert cure(tmp_path / "program.py", text) == [wanted]


def test_a_cure_covers_what_runs_inside_of_the_region(tmp_path):
  text = f"{INNER}def fn(x, w):\n  return inner(x) @ inner(w) @ (x + w)  # here"
  steps, at_the_lines = steps_of(tmp_path / "program.py", text)
  (change,) = cures_of(at_the_lines("dot_general")[-1:], steps)
  covered = [step.eqn.primitive.name for step in steps if change.covers(step)]
  assert covered == ["dot_general", "add", "dot_general"]
  (both,) = cures_of([step for step in steps if step.eqn.primitive.name == "add"], steps)
  assert change.code == both.code


def test_an_operation_without_a_line_is_covered_alone(tmp_path):
  steps, at_the_lines = steps_of(tmp_path / "gone.py", "def fn(x, w):\n  return x @ w  # here")
  (tmp_path / "gone.py").unlink()
  (change,) = cures_of(at_the_lines("dot_general"), steps)
  assert change.code.startswith(("return ", "fn = mpjax.full_precision(fn)"))
