"""The cognitive complexity of a function of the library is at most 15."""

import pathlib

import complexipy

ROOT = pathlib.Path(__file__).parents[2]

LIMIT = 15
"""The highest cognitive complexity of a function. It includes the functions inside of it."""


def complex_functions(folder: pathlib.Path) -> list[str]:
  """Returns the functions over the limit, each with its place and complexity."""
  names = []
  for file in sorted(folder.rglob("*.py")):
    # A comment in the code cannot exempt a function.
    complexities = complexipy.file_complexity(str(file), no_ignore=True, with_plans=False)
    names += [
      f"{file.relative_to(folder).as_posix()}:{one.line_start}: {one.name} ({one.complexity})"
      for one in complexities.functions
      if one.complexity > LIMIT
    ]
  return names


def test_no_function_is_over_the_limit():
  names = complex_functions(ROOT / "mpjax")
  assert not names, "Split these into functions of one thought:\n" + "\n".join(names)


def test_a_function_over_the_limit_is_named(tmp_path):
  lines = ["def nested(x):  # noqa: complexipy", *("  " * n + "if x:" for n in range(1, 7))]
  (tmp_path / "module.py").write_text("\n".join([*lines, "  " * 7 + "return x"]) + "\n")
  assert complex_functions(tmp_path) == ["module.py:1: nested (21)"]
