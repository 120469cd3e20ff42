"""The functions of the library with a high cognitive complexity, which lint prints."""

import pathlib

import complexipy

ROOT = pathlib.Path(__file__).parents[2]

PRINTED = 20
"""The cognitive complexity above which a function is printed, with the functions inside of it.

It asks for another look, and is no limit: a function that is one thought stays one.
"""


def complex_functions(folder: pathlib.Path) -> list[str]:
  """Returns the functions that are printed, each with its place and complexity."""
  names = []
  for file in sorted(folder.rglob("*.py")):
    # A comment in the code cannot exempt a function.
    complexities = complexipy.file_complexity(str(file), no_ignore=True, with_plans=False)
    names += [
      f"{file.relative_to(folder).as_posix()}:{one.line_start}: {one.name} ({one.complexity})"
      for one in complexities.functions
      if one.complexity > PRINTED
    ]
  return names


def test_complex_functions_are_printed(capsys):
  names = complex_functions(ROOT / "mpjax")
  with capsys.disabled():
    print(f"\nFunctions with a complexity above {PRINTED}: {', '.join(names) or 'none'}")


def test_a_complex_function_is_named(tmp_path):
  lines = ["def nested(x):  # noqa: complexipy", *("  " * n + "if x:" for n in range(1, 7))]
  (tmp_path / "module.py").write_text("\n".join([*lines, "  " * 7 + "return x"]) + "\n")
  assert complex_functions(tmp_path) == ["module.py:1: nested (21)"]
