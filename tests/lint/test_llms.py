"""The list of pages for language models has each page of the site, its title and a sentence."""

import pathlib
import re
import runpy
import types

ROOT = pathlib.Path(__file__).parents[2]

llms = types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs/_ext/site_llms.py")))


def test_every_page_of_the_site_has_a_title_and_a_sentence():
  text = llms.llms_text(ROOT)
  entries = re.findall(r"^- \[(.+)\]\((.+)\.html\): (.+)$", text, re.MULTILINE)
  named = [page for _, page, _ in entries]
  pages = {
    page.relative_to(ROOT).with_suffix("").as_posix()
    for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"))
  }
  assert len(named) == len(set(named)) == text.count("\n- ")
  assert pages - set(named) == {"docs/index"}
  assert all(len(summary) > 8 and "```" not in summary for _, _, summary in entries)


def test_a_page_is_told_by_its_first_sentence_without_code_and_markup(tmp_path):
  page = tmp_path / "page.md"
  lines = [
    "---",
    "kernel: python3",
    "---",
    "",
    "# `mpjax` in use",
    "",
    "```python",
    "x = 1",
    "",
    "y",
  ]
  page.write_text("\n".join([*lines, "```", "", "A [link](a.md) to it. More text."]))
  assert llms.title_and_summary(page) == ("mpjax in use", "A link to it.")
