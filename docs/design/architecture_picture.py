"""Draws docs/design/architecture-*.svg from the imports of mpjax: which part needs which.

    python docs/design/architecture_picture.py

A part is a folder or a module directly in `mpjax/`; what it is for is the first sentence of its
docstring. An arrow leads to what a part imports, where no other arrows lead there already.
"""

import ast
import html
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = pathlib.Path(__file__).parent

WIDTH, HEIGHT, GAP, ROW = 182, 108, 12, 44
THEMES = {
  "light": {"text": "#1f2328", "faint": "#59636e", "fill": "#eef1f4", "line": "#59636e"},
  "dark": {"text": "#e6edf3", "faint": "#9da7b1", "fill": "#262c34", "line": "#9da7b1"},
}
NAMES = {"__init__": "mpjax", "__main__": "python -m mpjax"}
PUBLIC = {"linen": "mpjax.linen", "nnx": "mpjax.nnx"}

Edges = set[tuple[str, str]]


def part(path: pathlib.Path) -> str:
  """Returns the folder or module of `mpjax/` that a file belongs to. Public modules are one."""
  name, *inside = path.relative_to(ROOT / "mpjax").parts
  name = name.removesuffix(".py")
  return name if inside or name.startswith("_") else "__init__"


def imported(source: str) -> Iterator[str]:
  """Yields the part of each of our modules that a source imports."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ImportFrom) and node.module == "mpjax":
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpjax."):
      yield (node.module or "").split(".")[1]
    elif isinstance(node, ast.Import):
      yield from ("__init__" for alias in node.names if alias.name.split(".")[0] == "mpjax")


def edges() -> Edges:
  """Returns (part, part that it imports) for all parts."""
  files = sorted((ROOT / "mpjax").rglob("*.py"))
  parts = {part(path) for path in files}
  found = {(part(f), name) for f in files for name in imported(f.read_text(encoding="utf-8"))}
  named = {(a, b if b in parts else "__init__") for a, b in found}
  return {(a, b) for a, b in named if a != b}


def needed(edges: Edges) -> Edges:
  """Returns the edges without those that a longer way replaces."""
  after: dict[str, set[str]] = {}
  for a, b in edges:
    after.setdefault(a, set()).add(b)

  def reach(a: str) -> set[str]:
    return {c for b in after.get(a, ()) for c in {b} | reach(b)}

  return {(a, b) for a, b in edges if not any(b in reach(c) for c in after[a] - {b})}


def rows(edges: Edges) -> list[list[str]]:
  """Returns the parts, each below all that import it."""
  before: dict[str, set[str]] = {}
  for a, b in edges:
    before.setdefault(b, set()).add(a)
    before.setdefault(a, set())

  def depth(b: str) -> int:
    return max((depth(a) + 1 for a in before[b]), default=0)

  lowest = max(map(depth, before))
  return [sorted(a for a in before if depth(a) == d) for d in range(lowest + 1)]


def purpose(name: str) -> str:
  """Returns the first sentence of the docstring of a part."""
  folder = ROOT / "mpjax" / name
  file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
  doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
  return re.split(r"\.(?:\s|$)", " ".join(doc.split("\n\n")[0].split()))[0].replace("`", "")


def svg(theme: dict[str, str]) -> str:
  """Returns the picture."""
  drawn = edges()
  table = rows(drawn)
  columns = max(map(len, table))
  width = columns * (WIDTH + GAP) - GAP + 4
  height = len(table) * (HEIGHT + ROW) - ROW + 4
  places = {
    name: (
      2 + (width - 4 - len(row) * (WIDTH + GAP) + GAP) / 2 + i * (WIDTH + GAP),
      2 + r * (HEIGHT + ROW),
    )
    for r, row in enumerate(table)
    for i, name in enumerate(row)
  }
  size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
  tip = f'<path d="M0,0 L8,4 L0,8 z" fill="{theme["line"]}"/>'
  marker = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
  out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
    f'<defs><marker {marker} orient="auto">{tip}</marker></defs>',
  ]
  for a, b in sorted(needed(drawn)):
    (x0, y0), (x1, y1) = places[a], places[b]
    x0, y0, x1, y1 = x0 + WIDTH / 2, y0 + HEIGHT, x1 + WIDTH / 2, y1 - 1
    turn = y1 - min(40.0, (y1 - y0) / 2)  # straight down, past the rows between
    curve = f"C{x0:g},{turn + 14:g} {x1:g},{turn - 14:g} {x1:g},{y1:g}"
    out.append(
      f'<path d="M{x0:g},{y0:g} V{turn - 22:g} {curve}" '
      f'fill="none" stroke="{theme["line"]}" stroke-width="1.3" marker-end="url(#tip)"/>'
    )
  for name, (x, y) in places.items():
    out.append(
      f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
      f'fill="{theme["fill"]}" stroke="{theme["line"]}"/>'
    )
    label = NAMES.get(name) or PUBLIC.get(name) or f"mpjax/{name}"
    lines = textwrap.wrap(purpose(name), 28)[:5]
    out.append(
      f'<text x="{x + 10:g}" y="{y + 21:g}" font-size="14" font-weight="bold" '
      f'font-family="monospace" fill="{theme["text"]}">{html.escape(label)}</text>'
    )
    out += [
      f'<text x="{x + 10:g}" y="{y + 38 + 15 * i:g}" font-size="12" '
      f'fill="{theme["faint"]}">{html.escape(line)}</text>'
      for i, line in enumerate(lines)
    ]
  return "\n".join([*out, "</svg>", ""])


def main() -> None:
  """Writes both pictures."""
  for name, theme in THEMES.items():
    (FOLDER / f"architecture-{name}.svg").write_text(svg(theme), encoding="utf-8")


if __name__ == "__main__":
  main()
