"""Pages with cells become notebooks that have their text and code, and a cell that installs."""

import pathlib
import runpy
import types

import pytest

ROOT = pathlib.Path(__file__).parents[2]

notebooks = types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs/_ext/site_notebooks.py")))
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/tutorials/*.md")}

PAGE = """---
kernelspec:
  name: python3
---

# Title

Text with a [link](other.md) and [another](https://a.b).

```{code-cell} ipython3
:tags: [remove-output]

x = 1
```

More.
"""


def test_a_page_becomes_cells():
  found = [(cell["cell_type"], cell["source"]) for cell in notebooks.notebook(PAGE)["cells"]]
  assert found == [
    ("markdown", "# Title"),
    ("code", notebooks.INSTALL),
    ("markdown", "Text with a link and [another](https://a.b)."),
    ("code", "x = 1"),
    ("markdown", "More."),
  ]


@pytest.mark.parametrize("name", ["quickstart", "find_the_nan", "find_the_rounding"])
def test_a_notebook_has_code_that_python_reads_and_a_plot(name):
  cells = notebooks.notebook(PAGES[name])["cells"]
  code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
  assert code[0] == notebooks.INSTALL
  compile("\n".join(code[1:]), name, "exec")
  assert any("plt.subplots" in source for source in code)
  assert len({cell["id"] for cell in cells}) == len(cells)
