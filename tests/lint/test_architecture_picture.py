"""The picture of the architecture is that of the imports as they are."""

import pathlib
import re
import runpy
import types

from tests.lint.test_layout import RANKS, part

FOLDER = pathlib.Path(__file__).parents[2] / "docs/design"
picture = types.SimpleNamespace(**runpy.run_path(str(FOLDER / "architecture_picture.py")))


def test_the_picture_is_current():
  for name, theme in picture.THEMES.items():
    drawn = (FOLDER / f"architecture-{name}.svg").read_text(encoding="utf-8")
    assert drawn == picture.svg(theme), "run `python docs/design/architecture_picture.py`"
    assert "Reading jaxprs" in re.sub(r"<[^>]+>", " ", drawn)


def test_every_part_is_drawn_below_what_imports_it():
  edges = picture.edges()
  rows = picture.rows(edges)
  depth = {name: d for d, row in enumerate(rows) for name in row}
  assert sorted(depth) == sorted(RANKS)
  assert all(depth[a] < depth[b] for a, b in edges)
  assert part("mpjax/_core/errors.py") == rows[-1][0]
  # An edge that others imply is left out.
  assert picture.needed({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}
  lines = (
    *("import mpjax", "import optax", "from mpjax import linen"),
    *("from mpjax._core.errors import MpjaxError", "from mpjaxlib import other"),
  )
  assert list(picture.imported("\n".join(lines))) == ["__init__", "linen", "_core"]
