"""Mutants are what they say; in a small project, the tests that execute a line decide."""

import ast

import pytest

from tests.mutations import generated
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.generate import mutants, mutated

SOURCE = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
  import x
__all__ = ["TABLE", "f"]
TABLE = {"a": (1, 2), "b": 3}
Kind = dict[int, str]
def f(a, b: int | None = None):
  if not a:
    return [c for c in b if c]
  while a < b <= 3 and a is not None:
    a = 1 if a == 2 else 0
  return a
"""


@pytest.mark.parametrize(
  ("name", "old", "new"),
  [
    ("m.py::: without the row 'a'", '{"a": (1, 2), "b": 3}', '{"b": 3}'),
    ("m.py::: without the row 'b'", '{"a": (1, 2), "b": 3}', '{"a": (1, 2)}'),
    ("m.py::: without the row 1", "(1, 2)", "(2,)"),
    ("m.py::: without the row 2", "(1, 2)", "(1,)"),
    ("m.py::f: if not a, negated", "if not a:", "if a:"),
    ("m.py::f: if c, negated", "if c]", "if not c]"),
    (
      "m.py::f: if a < b <= 3 and a is not None, negated",
      "while a < b <= 3 and a is not None:",
      "while not (a < b <= 3 and a is not None):",
    ),
    ("m.py::f: a < b <= 3 and a is not None, Or for And", "3 and", "3 or"),
    ("m.py::f: a < b <= 3, LtE for Lt", "a < b", "a <= b"),
    ("m.py::f: a < b <= 3, Lt for LtE", "b <= 3", "b < 3"),
    ("m.py::f: a is not None, Is for IsNot", "is not None", "is None"),
    ("m.py::f: a == 2, NotEq for Eq", "a == 2", "a != 2"),
  ],
)
def test_a_mutant_is_one_change(name, old, new):
  by_name = {mutant.name: mutant for mutant in mutants("m.py", SOURCE)}
  assert len(by_name) == 12, sorted(by_name)
  mutant = by_name[name]
  assert mutated(mutant, SOURCE) == ast.unparse(ast.parse(SOURCE.replace(old, new))) + "\n"
  assert old.strip("]:") in "\n".join(SOURCE.splitlines()[mutant.lines[0] - 1 : mutant.lines[1]])
  assert mutant.runs_on_import == (mutant.name.startswith("m.py:::"))


def test_equal_changes_in_one_function_have_numbers():
  names = [mutant.name for mutant in mutants("m.py", "def f(a):\n  return a < 1, a < 1")]
  assert names == ["m.py::f: a < 1, LtE for Lt", "m.py::f: a < 1, LtE for Lt #2"]


def test_each_equivalent_mutant_exists_and_has_a_reason():
  names = {mutant.name for mutant in generated.all_mutants(["mpjax"])}
  assert EQUIVALENT.keys() - names == set()
  assert all(EQUIVALENT.values())


def test_a_draw_is_that_of_its_seed():
  paths = ["mpjax/_core/leaves.py", "mpjax/_core/trees.py"]
  drawn = generated.draw(paths, 5, 0, "")
  assert drawn == generated.draw(paths, 5, 0, "") != generated.draw(paths, 5, 1, "")
  assert len(set(drawn)) == 5
  assert set(drawn) < set(generated.draw(paths, 0, 0, ""))
  assert all("leaf" in m.name for m in generated.draw(paths, 0, 0, "leaf"))


FILES = {
  "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
  "mpjax/__init__.py": "",
  "mpjax/it.py": (
    "NAMES = ('a', 'b')\n"
    "def large(x):\n"
    "  if x > 2:\n"
    "    return x != 9\n"
    "  return False\n"
    "def name(i):\n"
    "  return NAMES[i]\n"
  ),
  "tests/__init__.py": "",
  "tests/test_it.py": (
    "from mpjax import it\n"
    "def test_large():\n  assert it.large(3)\n"
    "def test_small():\n  assert not it.large(1)\n"
    "def test_name():\n  assert it.name(0) == 'a'\n"
  ),
}


def test_the_tests_that_execute_a_line_decide(tmp_path, monkeypatch, capsys):
  project = tmp_path / "project"
  plugin = "tests/mutations/contexts.py"
  plugins = {"tests/mutations/__init__.py": "", plugin: (generated.ROOT / plugin).read_text()}
  for name, text in {**FILES, **plugins}.items():
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text(text)
  files = [*FILES, *plugins]

  def copy_project(target):
    for name in files:
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      (target / name).write_text((project / name).read_text())

  monkeypatch.setattr(generated, "ROOT", project)
  monkeypatch.setattr(generated, "CACHE", tmp_path / "cache")
  monkeypatch.setattr(generated, "project_files", lambda: files)
  monkeypatch.setattr(generated, "copy_project", copy_project)
  console = generated.Console(width=200)

  def results():
    base = tmp_path / "base" / "project"
    copy_project(base)
    suite = generated.Suite(base, jobs=1)
    drawn = generated.draw(["mpjax/it.py"], 0, 0, "")
    found = generated.try_all(console, base.parent, suite, drawn, jobs=1)
    assert not generated.report(console, drawn, found)
    return {mutant.name.partition(": ")[2]: result.killed_by for mutant, result in found.items()}

  killed_by = results()
  # Both tests of that function kill this one.
  assert killed_by.pop("if x > 2, negated") in (
    "tests/test_it.py::test_large",
    "tests/test_it.py::test_small",
  )
  assert killed_by == {
    "without the row 'a'": "tests/test_it.py::test_name",
    "without the row 'b'": None,
    "x > 2, GtE for Gt": None,
    "x != 9, Eq for NotEq": "tests/test_it.py::test_large",
  }
  assert "5 drawn: 3 killed, 2 survived, 0 equivalent" in capsys.readouterr().out

  # A test more: survivors are tried again, and the killed ones of that file.
  test = project / "tests" / "test_it.py"
  test.write_text(test.read_text() + "def test_edge():\n  assert not it.large(2)\n")
  again = results()
  assert again["x > 2, GtE for Gt"] == "tests/test_it.py::test_edge"
  assert again["without the row 'b'"] is None
