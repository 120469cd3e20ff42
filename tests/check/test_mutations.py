"""The table of mutations keeps pace with the code, and its runner knows a caught one from others.

The mutations themselves are tried by `make mutations`.
"""

import ast
import collections
import functools
import pathlib
import re

import pytest

from tests.mutations import run, table

ROOT = pathlib.Path(__file__).parents[2]


GONE = {63}
"""Numbers of mutations whose code is gone; they are not used again."""


def test_the_40_of_the_list_are_there_and_those_of_nnx():
  letters = collections.defaultdict(list)
  for mutation in table.MUTATIONS:
    letters[mutation.number].append(mutation.letter)
  assert set(letters) == set(range(1, 69)) - GONE
  for number, found in letters.items():
    assert sorted(found) in ([""], ["a", "b"]), number


def test_each_fits_the_code_as_it_is_and_names_a_test_that_there_is():
  functions = functools.cache(
    lambda file: {
      node.name
      for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
      if isinstance(node, ast.FunctionDef)
    }
  )
  for mutation in table.MUTATIONS:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.file.startswith("mpjax/"), mutation.name
    changed = run.mutated(source, mutation)  # An error unless there is exactly one place.
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation.name
    file, _, function = mutation.test.partition("::")
    assert function in functions(file), mutation.name


MUTATION = table.Mutation(
  number=1,
  breaks="",
  function="mpjax/__init__.py::large",
  old="x > 2",
  new="x > 3",
  test="tests/test_it.py::test_it",
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
    found = {f"tests/test_it.py::{name}": outcome for name, outcome in found.items()}
    assert run.judge(MUTATION.test, found) is verdict, found


def test_code_that_is_not_there_once_is_refused(tmp_path):
  (tmp_path / "mpjax").mkdir()
  once = "its code is in mpjax/__init__.py::large"
  for source, message in {
    "def large(x):\n  return x > 1": f"{once} 0 times",
    "def large(x):\n  return x > 2 and x > 2": f"{once} 2 times",
    "def large(x):\n  return x\ndef small(x):\n  return x > 2": f"{once} 0 times",
    "def larger(x):\n  return x > 2": "in mpjax/__init__.py, large is defined 0 times",
    "x > 2\n" + 2 * "def large(x):\n    return x > 2\n": "large is defined 2 times",
  }.items():
    (tmp_path / MUTATION.file).write_text(source)
    with pytest.raises(ValueError, match=rf"mutation 1: .*{re.escape(message)}"):
      run.mutate(tmp_path, MUTATION)
    assert (tmp_path / MUTATION.file).read_text() == source


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


@pytest.fixture
def project(tmp_path):
  """A project as small as can be: one function and its test."""
  root = tmp_path / "project"
  files = {
    "pytest.ini": "[pytest]\n",
    "mpjax/__init__.py": "def large(x):\n    return x > 2\n",
    "tests/__init__.py": "",
    "tests/test_it.py": "import mpjax\ndef test_it():\n  assert mpjax.large(3)\n"
    "def test_other():\n  assert not mpjax.large(2)\n",
  }
  for name, text in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  return root


def test_a_mutation_is_applied_to_a_copy_and_its_test_run_there(project, capsys):
  run.check_unmutated(project, [MUTATION], jobs=1)
  results = {}
  # Two as long as the code that they replace: compiled files of before would seem up to date.
  for number, new in enumerate(("x > 3", "2 < x", "await x"), 1):
    mutation = MUTATION._replace(number=number, new=new)
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
