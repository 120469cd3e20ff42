"""Sections as text, HTML and JSON."""

import html
import io
import json
import math
import re
import sys
import time
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._diagnose import report
from mpjax._diagnose.report import WIDTH, Report, Section, amount, percent, progress
from tests.errors import refused

LONG = "decoder/" * 20 + "attention"
SECTIONS = (
  Section(
    "Title <1>",
    ("a line", f"   indented {LONG} and words that go on and on, " * 2),
    ("module", "n", "note"),
    ((LONG, "1.5 k", "a & b"), ("b", "2", "x" * 90)),
  ),
  Section("", ("no title",)),
  Section("last", ("line",)),
)


W = jnp.eye(4)


def _loss(w, x, *, scale):
  return scale * jnp.sum((x @ w) ** 2)


class Example(Report):
  def __init__(self, sections=SECTIONS):
    self._sections = sections

  def sections(self):
    return self._sections

  def as_dict(self):
    return {"nan": math.nan, "rows": [{"inf": math.inf, "n": 2**60}], "text": "a", "none": None}


def test_no_line_is_longer_than_a_terminal_and_nothing_is_lost():
  text = str(Example())
  assert max(map(len, text.splitlines())) <= WIDTH
  assert "".join(text.split()).count("x") >= 90
  assert "Title <1>" in text
  assert "no title" in text
  indented = [line for line in text.splitlines() if "decoder/decoder" in line and "1.5" not in line]
  assert indented[0].startswith("   ")


def test_paths_break_at_slashes_and_empty_sections_have_no_heading():
  path = "/".join(f"a_module_with_a_name_{i}" for i in range(6))
  columns = ("module", "n")
  sections = [Section("nothing", (), columns), Section("some", (path,), columns, ((path, "1"),))]
  title, *lines = str(Example(sections)).splitlines()
  assert title == "some"
  broken = [line.split()[0] for line in lines if line.startswith("a_module")]
  assert len(broken) == 4
  assert all(line.endswith(("/", "name_5")) for line in broken)


@pytest.mark.parametrize("tool", [mpjax.ranges(len), mpjax.tune(len, tolerance=0.1)])
def test_what_waits_for_arguments_says_so_where_it_is_printed(tool):
  assert re.fullmatch(r"<mpjax.(\w+)\(len\): call it .* as in mpjax.\1\(len\).*>", repr(tool))


@pytest.mark.parametrize(
  ("fn", "args", "got", "fix"),
  [
    (lambda: None, (1,), "too many positional arguments", "mpjax.audit(<lambda>)()."),
    (_loss, (), "no argument: 'w'", "mpjax.audit(_loss)(w, x, scale=...)."),
    (jax.jit(_loss), (W,), "no argument: 'x'", "mpjax.audit(_loss)(w, x, scale=...)."),
    (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), (), "no argument: 'inputs'", "(Linear)(inputs)."),
    (nn.Dense(4).apply, (), "no argument: 'variables'", "mpjax.audit(apply)(variables, *args)."),
    (nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), (), "no argument", "Sequential)(*args)."),
  ],
)
def test_a_call_without_the_arguments_of_the_function_says_what_to_pass(fn, args, got, fix):
  with refused(TypeError, ")(*args)", "argument", got, fix):
    mpjax.audit(fn)(*args)


@pytest.mark.parametrize("tool", ["audit", "compare", "find_nonfinite", "ranges", "tune"])
def test_every_tool_says_which_argument_it_lacks(tool):
  options = {"tune": {"tolerance": 0.1}, "compare": {"policy": "mixed_bfloat16"}}.get(tool, {})
  where, fix = f"mpjax.{tool}(_loss)(*args)", f"mpjax.{tool}(_loss)(w, x, scale=...)"
  with refused(TypeError, where, "arguments w, x, scale", "no argument: 'x'", fix):
    getattr(mpjax, tool)(_loss, **options)(W, scale=2.0)


def test_an_error_inside_of_the_function_stays_as_it_is():
  def fn(w):
    return _loss(w)

  with pytest.raises(TypeError, match="missing") as info:
    mpjax.audit(fn)(W)
  assert not isinstance(info.value, mpjax.MpjaxError)


def test_html_is_the_text_escaped(tmp_path):
  Example().to_html(tmp_path / "page.html")
  page = (tmp_path / "page.html").read_text(encoding="utf-8")
  for source in (page, Example()._repr_html_()):
    tags = r"</?(?:pre|span|body|html|head|meta|title)[^>]*>|<!doctype html>"
    text = html.unescape(re.sub(tags, "", re.sub("<title>.*</title>", "", source)))
    assert "".join(text.split()) == "".join(str(Example()).split())
  assert page.startswith("<!doctype html>")
  assert "<title>Example</title>" in page
  assert "http" not in page
  assert "src=" not in page


def test_a_notebook_can_neither_change_the_font_of_html_nor_wrap_it():
  """JupyterLab has rules for `pre`, and the style of the element itself is stronger."""
  (style,) = re.findall("<pre style='([^']*)'>", Example()._repr_html_())
  properties = dict(each.split(":") for each in style.split(";"))
  assert properties["font-family"] == "monospace"
  assert properties["white-space"] == "pre"
  assert (properties["word-break"], properties["overflow-wrap"]) == ("normal", "normal")


def test_text_of_a_numbered_item_is_indented():
  text = str(Example([Section("", (f"1. {LONG}", "   cause"))])).splitlines()
  assert text[0].startswith("1. decoder/")
  assert all(line.startswith("   ") for line in text[1 : text.index("   cause") + 1])


def test_json_has_no_nan():
  assert json.loads(Example().to_json()) == {
    "nan": "nan",
    "rows": [{"inf": "inf", "n": 2**60}],
    "text": "a",
    "none": None,
  }


def test_amounts_and_percents():
  numbers = {0: "0 B", 999: "999 B", 999.6: "1 kB", 1234: "1.23 kB", 19.5e9: "19.5 GB"}
  assert [amount(number, "B") for number in numbers] == list(numbers.values())
  shares = {0.0: "0.0 %", 1e-6: "<0.1 %", 0.978: "97.8 %", 1 - 1e-6: ">99.9 %", 1.0: "100.0 %"}
  assert [percent(share) for share in shares] == list(shares.values())
  assert percent(math.nan) == "-"


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def hurried(monkeypatch):
  for name in ("FIRST", "EVERY", "REDRAWN"):
    monkeypatch.setattr(report, name, 0.05)


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


class Output:
  """An output of a notebook, as in `IPython.display`, which need not be installed."""

  events = ()

  def display(self, data, *, raw):
    self.events += (("display", data["text/plain"], raw),)
    type(self).last = self

  def update(self, data, *, raw):
    self.events += (("update", data["text/plain"], raw),)


def test_a_notebook_gets_one_output_that_is_replaced(monkeypatch, hurried):
  console = types.SimpleNamespace(is_jupyter=True)
  monkeypatch.setattr(report, "Console", lambda **_: console)
  monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(DisplayHandle=Output))
  stderr = io.StringIO()
  monkeypatch.setattr(sys, "stderr", stderr)
  with progress("work") as advance:
    advance(5, 10)
    time.sleep(0.5)
  assert stderr.getvalue() == ""
  first, *others, last = Output.last.events
  assert first == ("display", f"work: {'━' * 15}{' ' * 15} 5 of 10, 0 s", True)
  assert {each[0] for each in others} == {"update"}
  assert last == ("update", "", True)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["ranges", "tune", "find_nonfinite"])
def test_every_tool_that_runs_a_function_shows_its_progress(tool, monkeypatch, capsys):
  monkeypatch.setattr(report, "FIRST", 1e-3)
  options = {"tolerance": 0.1} if tool == "tune" else {}
  getattr(mpjax, tool)(lambda w, x: jnp.sum((x @ w) ** 2), **options)(jnp.eye(8), jnp.ones((2, 8)))
  assert f"{tool}:" in capsys.readouterr().err
