"""The picture of the architecture is that of the imports as they are."""

import importlib.util
import pathlib
import re

import pytest

from tests.lint.test_layout import RANKS, part

FOLDER = pathlib.Path(__file__).parents[2] / "docs/design"
_spec = importlib.util.spec_from_file_location("picture", FOLDER / "architecture_picture.py")
assert _spec
assert _spec.loader
picture = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(picture)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_current(theme):
  drawn = (FOLDER / f"architecture-{theme}.svg").read_text(encoding="utf-8")
  assert drawn == picture.svg(picture.THEMES[theme]), (
    "run `python docs/design/architecture_picture.py`"
  )


def test_every_part_is_drawn_below_what_imports_it():
  rows = picture.rows(picture.edges())
  depth = {name: d for d, row in enumerate(rows) for name in row}
  assert sorted(depth) == sorted(RANKS)
  assert all(depth[a] < depth[b] for a, b in picture.edges())
  assert part("mpjax/_core/errors.py") == rows[-1][0]


def test_an_edge_that_others_imply_is_left_out():
  assert picture.needed({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}


def test_all_forms_of_an_import_are_read():
  source = """
    import mpjax
    import optax
    from mpjax import linen
    from mpjax._core.errors import MpjaxError
    from mpjaxlib import other
  """
  lines = "\n".join(line.strip() for line in source.splitlines())
  assert list(picture.imported(lines)) == ["__init__", "linen", "_core"]


def test_the_text_of_each_box_is_in_the_picture():
  text = re.sub(r"<[^>]+>", " ", picture.svg(picture.THEMES["light"]))
  assert "Reading jaxprs" in text
