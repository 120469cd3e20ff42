"""The check of our words: it finds each one in prose, and only in prose."""

import pathlib

import pytest

from tests import words

BANNED = (
  *("hand on", "hands on", "handed it on", "handing them back", "hands back", "mend", "mends"),
  *("mended", "in force", "what reads", "who reads", "which reads", "whoever", "anew", "stand"),
  *("stands", "standing", "stood", "whole", "wholes", "bodies", "in turn", "in its turn"),
  *("in their turn", "by turns", "next turn", "turns of", "program", "programs", "made by"),
  *("made of", "in the place", "in its place", "half", "in half", "product"),
  *("products", "at the place", "by its place"),
)

ALLOWED = (
  *("standard", "understand", "stand-in", "wholly", "recommend", "enforce", "in forced order"),
  *("written by hand on a CPU", "returns", "turns it into", "return of", "body", "programmer"),
  *("in place", "half of it", "half the bytes", "cut in half the time", "the half list"),
  *("the list `half`", 'half="half" and "half"', "weight_grad=half", "halves", "dot product"),
  *("products of many numbers", "reads", "changed in place", "has a place"),
)


def test_each_word_is_found_and_others_are_not() -> None:
  for word in BANNED:
    for written in (word, word.capitalize(), word.upper()):
      assert words.in_python(f"x = 1\n# We say {written}.\n") == [(2, written)]
      assert words.in_python(f'"""One line.\n\n  We say {written}.\n"""\n') == [(3, written)]
      assert words.in_python(f'f(fix="We say " f"{written}: {{x}}.")\n') == [(1, written)]
      assert words.in_markdown(f"# Title\n\nWe say *{written}*.\n") == [(3, written)]
  for word in ALLOWED:
    assert words.in_python(f"# We say {word} here.\n") == []
    assert words.in_markdown(f"We say {word} here.\n") == []


def test_every_expression_has_a_word() -> None:
  # Each expression is needed for some word above, and each word has an expression.
  found = {
    pattern: [w for w in BANNED if words.expression(pattern).search(w)] for pattern in words.BANNED
  }
  assert all(found.values()), found
  assert {word for of_one in found.values() for word in of_one} == set(BANNED)


def test_across_the_end_of_a_line() -> None:
  assert words.in_python("# a policy in\n# force\n") == [(1, "in force")]
  assert words.in_python('f(\n  "a policy in "\n  "force",\n)\n') == [(2, "in force")]
  assert words.in_python('"""A policy in\n  force.\n"""\n') == [(1, "in force")]
  assert words.in_markdown("> a policy in\nforce\n") == [(1, "in force")]
  assert words.in_python('f("in", force)  # in\nforce("of")\n') == []


def test_code_is_not_prose() -> None:
  assert words.in_python("whole = stand(bodies)\n") == []
  assert words.in_python('f(f"{whole} leaves")\n') == []
  assert words.in_python('f("whole", {"half": 1})\n') == []
  assert words.in_python("# The `whole` of it.\n") == []
  assert words.in_python(
    '"""One.\n\n  >>> whole = 1\n  >>> whole\n  whole\n\n  A whole.\n"""\n'
  ) == [(7, "whole")]
  assert (
    words.in_python('"""Args:\n    whole: an array.\n    **bodies: all of it, the `whole`.\n"""\n')
    == []
  )
  assert words.in_markdown("`whole`\n```python\nstand = whole\n```\n") == []
  assert words.in_markdown("- a\n  ```\n  whole\n  ```\n  stand\n") == [(5, "stand")]


def test_only_the_table_of_the_glossary_is_left_out() -> None:
  glossary = "## Words\n\nA whole.\n\n| whole | entire |\n\n## More\n\n| whole |\n"
  assert words.in_markdown(glossary) == [(3, "whole"), (9, "whole")]


def test_the_glossary_names_each_word_that_is_checked() -> None:
  section = words.GLOSSARY.search((words.ROOT / "CONTRIBUTING.md").read_text())
  assert section is not None
  title, rule, *rows = [row.split("|")[1] for row in words.TABLE_ROW.findall(section[0])]
  assert (title.strip(), rule) == ("Do not write", "---")
  for pattern in words.BANNED:
    assert any(words.expression(pattern).search(row) for row in rows), pattern
  for row in rows:
    assert any(words.expression(pattern).search(row) for pattern in words.BANNED), row


def test_the_project_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
  assert len(words.pages()) > 80
  assert words.main() == 0, capsys.readouterr().out


def test_the_command_lists_and_fails(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  page, module = tmp_path / "page.md", tmp_path / "paths.py"
  page.write_text("Fine.\nIt stands.\n")
  module.write_text("# It hands\n# on all of it.\n")
  monkeypatch.setattr(words, "ROOT", tmp_path)
  monkeypatch.setattr(words, "pages", lambda: [page, module])
  assert words.main() == 1
  assert capsys.readouterr().out.splitlines() == ["page.md:2: stands", "paths.py:1: hands on"]
