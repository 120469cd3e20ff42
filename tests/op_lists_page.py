"""Writes the tables of docs/op_lists.md anew, from the data that the lists are made of.

python -m tests.op_lists_page
"""

import pathlib

from mpjax._jaxpr.primitives import FAMILIES, PARTS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "op_lists.md"
BEGIN, END = "<!-- lists -->", "<!-- end of lists -->"


def tables() -> str:
  """Returns what stands between the marks: a table for each part, and one for what depends."""
  lines: list[str] = []
  for part, meaning in PARTS.items():
    families = [family for family in FAMILIES if family.part == part]
    count = sum(len(family.names) for family in families)
    lines += [f"### `{part}`", "", f"{meaning} {count} primitives.", ""]
    lines += ["| primitives | why |", "|---|---|"]
    lines += [f"| {_code(f.names)} | {f.reason}{_note(f.fixed)} |" for f in families]
    lines += [""]
  lines += ["### conditional", "", "Parameters of the equation choose the part.", ""]
  lines += ["| primitive | part | why |", "|---|---|---|"]
  lines += [f"| {_code(f.names)} | {f.decides} | {f.reason} |" for f in FAMILIES if f.decides]
  lines += ["", "### higher-order", "", "The jaxprs in these are rewritten:", ""]
  entered, left = [family for family in FAMILIES if family.part is None]
  lines += [_code(entered.names), ""]
  lines += ["The jaxprs in these run as they were traced:", ""]
  lines += [_code(left.names)]
  return "\n".join(lines)


def _code(names: tuple[str, ...]) -> str:
  return ", ".join(f"`{name}`" for name in names)


def _note(fixed: bool) -> str:
  return " Fixed." if fixed else ""


def with_tables(page: str) -> str:
  """Returns the page with the tables that the data give now."""
  before, mark, rest = page.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not mark or not end:
    raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
  return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
  PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
