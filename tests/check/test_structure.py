"""The script that measures what a reader has to read counts as its docstring says."""

import ast
import textwrap

import pytest

from tests.scripts import benchmark

structure = benchmark("structure")

SOURCE = textwrap.dedent('''
  """A docstring
  of two lines."""
  import a  # a comment


  def f(x):
    """Another one."""
    # A comment alone.
    return g(
      x,
    )
''')


def test_comments_docstrings_and_empty_lines_are_no_code(structure):
  assert structure.lines_of_code(SOURCE, ast.parse(SOURCE)) == {4, 7, 10, 11, 12}


def test_a_package_is_read_with_its_chain_of_imports(structure, tmp_path, monkeypatch):
  folder = tmp_path / "read_me"
  folder.mkdir()
  (folder / "__init__.py").write_text("from read_me.top import once\n")
  (folder / "top.py").write_text("from . import low\ndef once(): return low.f()\n")
  (folder / "low.py").write_text("def f():\n  return 1\ndef twice(): return f()\n")
  (folder / "low_test.py").write_text("def test(): pass\n")
  monkeypatch.syspath_prepend(tmp_path)
  size = structure.size_of("read_me")
  assert size == (3, 6, 3, pytest.approx(4 / 3), 0.0, 3)


@pytest.mark.parametrize("way", ["autocast: a matmul", "loss_scaling: update"])
def test_a_way_is_entered_at_its_public_name_and_stays_in_the_package(structure, way):
  (found,) = (structure.passed(each) for each in structure.WAYS if each.what == way)
  files = {file.rpartition("/mpjax/")[2] for file, _ in found}
  assert any(file in files for file in ("_autocast/autocast.py", "_optim/wrappers/loss_scaling.py"))
  assert len(files) > 5
