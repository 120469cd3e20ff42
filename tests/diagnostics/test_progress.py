import io
import re
import sys
import time

import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnostics import progress as module
from mpjax._diagnostics.progress import progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def hurried(monkeypatch):
  for name in ("FIRST", "EVERY", "REDRAWN"):
    monkeypatch.setattr(module, name, 0.05)


def shown(monkeypatch, stream, lasts=True):
  monkeypatch.setattr(sys, "stderr", stream)
  with progress("work") as advance:
    advance(5, 10)
    while lasts and not stream.getvalue():
      time.sleep(0.01)
  return stream.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch, hurried):
  assert shown(monkeypatch, io.StringIO(), lasts=False) == ""
  lines = shown(monkeypatch, io.StringIO()).splitlines()
  assert set(lines) == {"work: 5 of 10, 0 s"}


def test_a_terminal_gets_a_bar_that_goes_at_the_end(monkeypatch, hurried):
  text = shown(monkeypatch, Terminal())
  assert re.search(r"\rwork: ━{15} {15} 5 of 10, 0 s\r", text)
  assert text.endswith("\r")
  assert "\n" not in text


@pytest.mark.parametrize("tool", ["ranges", "tune", "find_nonfinite"])
def test_every_tool_that_runs_a_function_shows_its_progress(tool, monkeypatch, capsys):
  monkeypatch.setattr(module, "FIRST", 1e-3)
  options = {"tolerance": 0.1} if tool == "tune" else {}
  getattr(mpjax, tool)(lambda w, x: jnp.sum((x @ w) ** 2), **options)(jnp.eye(4), jnp.ones((2, 4)))
  assert f"{tool}:" in capsys.readouterr().err
