"""Lists the rows of docs/design/reliability.md that no test carries.

python tests/uncovered_cases.py
"""

import ast
import functools
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
TABLE = ROOT / "docs" / "design" / "reliability.md"
PARTS = ("policy", "linen", "scaling", "training", "autocast", "nnx", "audit", "float8")


class Case(NamedTuple):
  """A row of the table."""

  part: str
  text: str


def read_table(markdown: str) -> dict[str, Case]:
  """Returns the rows by id; raises if an id stands twice or a part is not one of `PARTS`."""
  found: dict[str, Case] = {}
  for id_, part, text in re.findall(
    r"^\| ([ABI]\d+) \| ([^|]*) \| (.*) \|$", markdown, re.MULTILINE
  ):
    if id_ in found:
      raise ValueError(f"{id_} stands twice")
    if part not in PARTS:
      raise ValueError(f"{id_}: no part is called {part!r}")
    found[id_] = Case(part, text)
  return found


def carried_ids(source: str) -> list[str]:
  """Returns the ids in each `pytest.mark.case(...)` of a test file; raises if one is computed."""
  found: list[str] = []
  for node in ast.walk(ast.parse(source)):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
      continue
    if node.func.attr != "case" or not ast.unparse(node.func).endswith("mark.case"):
      continue
    for argument in node.args:
      if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
        raise ValueError(f"line {node.lineno}: write the id out, not {ast.unparse(argument)}")
      found.append(argument.value)
  return found


@functools.cache
def carried_by_tests() -> dict[str, list[str]]:
  """Returns the test files that carry each id."""
  found: dict[str, list[str]] = {}
  for path in sorted((ROOT / "tests").rglob("test_*.py")):
    try:
      ids = carried_ids(path.read_text(encoding="utf-8"))
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None
    for id_ in ids:
      found.setdefault(id_, []).append(path.relative_to(ROOT).as_posix())
  return found


def uncovered() -> dict[str, Case]:
  """Returns the rows whose id no test carries."""
  carried = carried_by_tests()
  table = read_table(TABLE.read_text(encoding="utf-8"))
  return {id_: case for id_, case in table.items() if id_ not in carried}


def main() -> None:
  for id_, case in uncovered().items():
    print(f"{id_}  {case.part}  {case.text}")


if __name__ == "__main__":
  main()
