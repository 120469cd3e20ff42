"""Sections as text, HTML and JSON."""

import html.parser
import json
import math

from mpjax._diagnostics.report import (
  WIDTH,
  Cell,
  Column,
  Report,
  Section,
  amount,
  as_html,
  as_text,
  page,
  percent,
)

LONG = "decoder/" * 20 + "attention"
SECTIONS = (
  Section(
    "Title <1>",
    ("a line", f"   indented {LONG} and words that go on and on, " * 2),
    (Column("module", wide=True), Column("n", "right"), Column("note", wide=True)),
    ((LONG, Cell("1.5 k", 1500.0), "a & b"), ("b", Cell("2", 2.0), "x" * 90)),
  ),
  Section("", ("no title",)),
  Section("folded", ("hidden at first",), folded=True),
)


class Example(Report):
  def sections(self):
    return SECTIONS

  def as_dict(self):
    return {"nan": math.nan, "rows": [{"inf": math.inf, "n": 2**60}], "text": "a", "none": None}


class Tags(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.open, self.texts, self.seen = [], [], []

  def handle_starttag(self, tag, attrs):
    self.seen.append((tag, dict(attrs)))
    if tag not in ("meta", "link"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


def test_no_line_is_longer_than_a_terminal_and_nothing_is_lost():
  text = as_text(SECTIONS)
  assert max(map(len, text.splitlines())) <= WIDTH
  assert "".join(text.split()).count("x") >= 90
  assert "Title <1>" in text
  assert "no title" in text
  indented = [line for line in text.splitlines() if "decoder/decoder" in line and "1.5" not in line]
  assert indented[0].startswith("   ")
  assert str(Example()) == text


def test_html_is_well_formed_and_escaped():
  for source in (as_html(SECTIONS), page("Example", SECTIONS), Example()._repr_html_()):
    parser = Tags()
    parser.feed(source)
    assert parser.open == []
    assert "Title <1>" in parser.texts
    assert "a & b" in parser.texts
    keys = [attrs["data-key"] for _, attrs in parser.seen if "data-key" in attrs]
    assert keys == ["1500.0", "2.0"]
  details = [attrs for tag, attrs in parser.seen if tag == "details"]
  assert [("open" in attrs) for attrs in details] == [True, False]


def test_html_indents_as_text_does_and_breaks_what_is_wide():
  columns = (Column("module", wide=True), Column("n", "right"))
  source = as_html(
    [Section("", ("1. first", "   cause"), columns, ((LONG, "1"),), footer=("end",))]
  )
  assert '<p class="item">1. first</p><p style="margin-left:3ch">cause</p>' in source
  assert f'<td class="left wide">{LONG}</td><td class="right">1</td>' in source
  assert source.index("<p>end</p>") > source.index("</table>")


def test_text_of_a_numbered_item_is_indented_and_a_footer_comes_last():
  lines = (f"1. {LONG}", "   cause")
  text = as_text([Section("", lines, (Column("n"),), (("x",),), footer=("end",))]).splitlines()
  assert text[0].startswith("1. decoder/")
  assert all(line.startswith("   ") for line in text[1 : text.index("   cause") + 1])
  assert text[-2:] == ["x", "end"]


def test_a_page_loads_nothing(tmp_path):
  Example().to_html(tmp_path / "page.html")
  source = (tmp_path / "page.html").read_text(encoding="utf-8")
  assert source.startswith("<!doctype html>")
  assert "http" not in source
  assert "src=" not in source


def test_json_has_no_nan():
  assert json.loads(Example().to_json()) == {
    "nan": "nan",
    "rows": [{"inf": "inf", "n": 2**60}],
    "text": "a",
    "none": None,
  }


def test_amounts_and_percents():
  numbers = {0: "0 B", 999: "999 B", 999.6: "1 kB", 1234: "1.23 kB", 19.5e9: "19.5 GB"}
  assert [amount(number, "B") for number in numbers] == list(numbers.values())
  shares = {0.0: "0.0 %", 1e-6: "<0.1 %", 0.978: "97.8 %", 1 - 1e-6: ">99.9 %", 1.0: "100.0 %"}
  assert [percent(share) for share in shares] == list(shares.values())
  assert percent(math.nan) == "-"
