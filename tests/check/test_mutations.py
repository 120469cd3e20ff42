"""The table of mutations keeps pace with the code, and mutants of both kinds are judged rightly.

The mutants themselves are tried by `make mutations`.
"""

import ast
import re

import pytest

from tests.mutations import generated, run, table
from tests.mutations.generate import mutants, mutated
from tests.mutations.run import ROOT
from tests.scripts import is_test


def test_each_fits_the_code_as_it_is_and_names_a_test_that_there_is():
  for mutation in table.MUTATIONS:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.file.startswith("mpjax/"), mutation.name
    changed = run.mutated(source, mutation)  # An error unless there is exactly one place.
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation.name
    assert is_test(mutation.test), mutation.name


MUTATION = table.Mutation(
  name="1",
  breaks="",
  function="mpjax/__init__.py::large",
  old="x > 2",
  new="x > 3",
  test="tests/test_init.py::test_it",
)


def test_only_a_failure_of_the_named_test_counts():
  for found, verdict in (
    ({"test_it[a]": "passed", "test_it[b]": "failure"}, run.Verdict.CAUGHT),
    ({"test_it": "passed", "test_its_neighbour": "failure"}, run.Verdict.MISSED),
    ({"test_it": "error"}, run.Verdict.BROKEN),
    ({"test_it": "skipped"}, run.Verdict.BROKEN),
    ({"test_it[a]": "passed", "test_it[b]": "skipped"}, run.Verdict.BROKEN),
    ({}, run.Verdict.BROKEN),
  ):
    found = {f"tests/test_init.py::{name}": outcome for name, outcome in found.items()}
    assert run.judge(MUTATION.test, found) is verdict, found


def test_code_that_is_not_there_once_is_refused():
  once = "its code is in mpjax/__init__.py::large"
  for source, message in {
    "def large(x):\n  return x > 1": f"{once} 0 times",
    "def large(x):\n  return x > 2 and x > 2": f"{once} 2 times",
    "def large(x):\n  return x\ndef small(x):\n  return x > 2": f"{once} 0 times",
    "def larger(x):\n  return x > 2": "in mpjax/__init__.py, large is defined 0 times",
    "x > 2\n" + 2 * "def large(x):\n    return x > 2\n": "large is defined 2 times",
  }.items():
    with pytest.raises(ValueError, match=rf"mutation 1: .*{re.escape(message)}"):
      run.mutated(source, MUTATION)


def test_code_is_found_in_the_syntax_tree_of_its_function():
  for function, old, new, source, expected in (
    # Layout, a nested function, a method, a module, statements, and one that is deleted.
    ("f", "g(a, 'b')", "a", 'def f(a):\n  return g(  # é\n    a, "b",\n  )', "def f(a): return a"),
    ("f", "a", "b", "a\ndef f():\n  def g(): return a", "a\ndef f():\n  def g(): return b"),
    ("C.f", "1", "2", "class C:\n  def f(): 1\n  y = 1", "class C:\n  def f(): 2\n  y = 1"),
    ("", "a = 1", "a = 2", "a = 1\ndef f(): a = 1", "a = 2\ndef f(): a = 1"),
    ("f", "a = 1\nb = 2", "b = 3", "def f():\n  a = 1\n  b = 2\n  a = 1", "def f(): b = 3; a = 1"),
    ("f", "g()", "", "def f():\n  h()\n  g()", "def f(): h()"),
  ):
    mutation = MUTATION._replace(function=f"mpjax/__init__.py::{function}", old=old, new=new)
    assert run.mutated(source, mutation) == ast.unparse(ast.parse(expected)) + "\n"


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


FILES = {
  "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
  "mpjax/__init__.py": "def large(x):\n    return x > 2\n",
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
  "tests/mutations/__init__.py": "",
  "tests/mutations/contexts.py": (ROOT / "tests/mutations/contexts.py").read_text(),
  "tests/test_init.py": (
    "import mpjax\n"
    "def test_it():\n  assert mpjax.large(3)\n"
    "def test_other():\n  assert not mpjax.large(2)\n"
  ),
  "tests/test_it.py": (
    "from mpjax import it\n"
    "def test_large():\n  assert it.large(3)\n"
    "def test_small():\n  assert not it.large(1)\n"
    "def test_name():\n  assert it.name(0) == 'a'\n"
  ),
}


@pytest.fixture
def project(tmp_path, monkeypatch):
  """A project as small as can be, in which both kinds of mutants are tried."""
  root = tmp_path / "project"

  def copy_project(target):
    for name, text in FILES.items():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      (target / name).write_text((root / name).read_text() if target != root else text)

  copy_project(root)
  monkeypatch.setattr(generated, "ROOT", root)
  monkeypatch.setattr(generated, "CACHE", tmp_path / "cache")
  monkeypatch.setattr(generated, "project_files", lambda: list(FILES))
  monkeypatch.setattr(generated, "copy_project", copy_project)
  monkeypatch.setattr(run, "copy_project", copy_project)
  return root


def test_a_mutation_is_applied_to_a_copy_and_its_test_run_there(project, capsys):
  run.check_unmutated(project, [MUTATION], jobs=1)
  results = {}
  # Two as long as the code that they replace: compiled files of before would seem up to date.
  for number, new in enumerate(("x > 3", "2 < x", "await x"), 1):
    mutation = MUTATION._replace(name=str(number), new=new)
    results[mutation] = run.try_mutation(project, mutation)
  assert (project / MUTATION.file).read_text() == "def large(x):\n    return x > 2\n"
  verdicts = [result.verdict for result in results.values()]
  assert verdicts == [run.Verdict.CAUGHT, run.Verdict.MISSED, run.Verdict.BROKEN]
  assert not run.report(run.Console(), results)
  assert "1/3 caught" in capsys.readouterr().out
  assert run.report(run.Console(), dict(list(results.items())[:1]))
  assert "1/1 caught" in capsys.readouterr().out


def test_a_run_that_would_say_nothing_is_refused(project):
  (project / MUTATION.file).write_text("def large(x):\n  return x > 9\n")
  with pytest.raises(SystemExit, match=r"not passed without any mutation: .*::test_it"):
    run.check_unmutated(project, [MUTATION], jobs=1)


def test_the_tests_that_execute_a_line_decide(project, tmp_path, capsys):
  console = generated.Console(width=200)

  def results():
    base = tmp_path / "base" / "project"
    generated.copy_project(base)
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
