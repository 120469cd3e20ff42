"""Writes the tables of docs/op_lists.md anew, from the data that the lists are made of.

python -m tests.op_lists_page
"""

import pathlib

from mpjax._jaxprs.inner_jaxprs import HIGHER_ORDER
from mpjax._jaxprs.primitives import CONDITIONS, GROUPS, PARTS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "op_lists.md"
BEGIN, END = "<!-- lists -->", "<!-- end of lists -->"


NOT_ENTERED = {"call_hi_primitive", "custom_linear_solve", "linear_call"}
"""Of `HIGHER_ORDER`, which serves other walks too, those that autocast leaves as they are."""


def tables() -> str:
  """Returns what stands between the marks: a table for each part, and one for what depends."""
  lines: list[str] = []
  for part, meaning in PARTS.items():
    groups = [group for group in GROUPS if group.part == part]
    count = sum(len(group.names) for group in groups)
    lines += [f"### {part}", "", f"{meaning} {count} primitives.", ""]
    lines += ["| primitives | why |", "|---|---|"]
    lines += [f"| {_code(group.names)} | {group.reason}{_note(group.fixed)} |" for group in groups]
    lines += [""]
  lines += ["### conditional", "", "The part depends on the parameters of the equation.", ""]
  lines += ["| primitive | part | why |", "|---|---|---|"]
  lines += [f"| `{c.name}` | {c.text} | {c.reason} |" for c in CONDITIONS]
  lines += ["", "### higher-order", "", "The programs that these hold are entered:", ""]
  lines += [_code(sorted(set(HIGHER_ORDER) - NOT_ENTERED)), ""]
  lines += [
    "These run as they were traced: they come with others that must agree, or are objects of JAX:",
    "",
  ]
  lines += [_code(sorted(NOT_ENTERED))]
  return "\n".join(lines)


def _code(names: tuple[str, ...] | list[str]) -> str:
  return ", ".join(f"`{name}`" for name in names)


def _note(fixed: bool) -> str:
  return " They cannot be moved." if fixed else ""


def with_tables(page: str) -> str:
  """Returns the page with the tables that the data give now."""
  before, mark, rest = page.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not mark or not end:
    raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
  return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
  PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
