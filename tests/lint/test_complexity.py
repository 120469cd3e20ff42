"""The cognitive complexity of the library: at most 15 a function, except in folders listed here."""

import pathlib

import complexipy
import pytest

ROOT = pathlib.Path(__file__).parents[2]

LIMIT = 15
"""The highest cognitive complexity of a function. It includes the functions inside of it."""

OVER_LIMIT: dict[str, int] = {}
"""Folders that are not rebuilt yet, and how many functions are over the limit. It may only fall."""


def complex_functions() -> dict[str, list[str]]:
  """Returns the functions over the limit, by folder."""
  functions: dict[str, list[str]] = {}
  for file in sorted((ROOT / "mpjax").rglob("*.py")):
    path = file.relative_to(ROOT)
    # A comment in the code cannot exempt a function.
    complexities = complexipy.file_complexity(str(file), no_ignore=True, with_plans=False)
    for function in complexities.functions:
      if function.complexity > LIMIT:
        name = f"{path.as_posix()}:{function.line_start}: {function.name} ({function.complexity})"
        functions.setdefault(path.parent.as_posix(), []).append(name)
  return functions


def faults(functions: dict[str, list[str]], listed: dict[str, int]) -> list[str]:
  """Returns a text for each folder that has more or fewer functions over the limit than listed."""
  texts = []
  for folder in sorted(functions.keys() | listed.keys()):
    names, number = functions.get(folder, []), listed.get(folder, 0)
    if len(names) > number:
      shown = "\n  ".join(names)
      texts.append(
        f"{folder}: {len(names)} functions over {LIMIT}, {number} listed. Split one:\n  {shown}"
      )
    elif len(names) < number:
      remedy = f"lower the number to {len(names)}" if names else "remove the folder"
      texts.append(f"{folder}: {len(names)} functions over {LIMIT}, {number} listed: {remedy}.")
  return texts


def test_functions_over_the_limit_are_those_listed():
  texts = faults(complex_functions(), OVER_LIMIT)
  assert not texts, "\n".join(texts)


@pytest.mark.parametrize(
  ("names", "listed", "remedy"),
  [
    (["f"], {}, "Split one"),
    (["f"], {"mpjax": 2}, "lower the number to 1"),
    ([], {"mpjax": 1}, "remove the folder"),
  ],
)
def test_more_functions_and_fewer_are_both_a_fault(names, listed, remedy):
  (text,) = faults({"mpjax": names}, listed)
  assert remedy in text
