"""Every example runs: the doctests of public names, and the Python blocks of README and docs."""

import contextlib
import doctest
import io
import re
import sys
import types
from typing import Any

import pytest

from tests.lint.test_links import PAGES, ROOT, Block, blocks
from tests.lint.test_public_api import NAMES, members, resolve

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_RUN = ("text", "bash")
"""Languages of blocks that are not Python. Anything else, or none, is a misspelt ```python."""

OUTPUT = "text output"
"""The language of a block that holds what the Python block before it printed."""

DIRECTIVES = ("{eval-rst}", "{toctree}", "{figure}")
"""Blocks that the site alone understands, and that hold no Python."""

NEEDS = {"hugging_face.md": "transformers"}
"""Pages that need a package which `make` installs into an environment of its own."""

CELL = "{code-cell}"
"""The language of a cell of a notebook. Its options are lines of `:name: value` at the top."""


def python_of_cell(cell: Block) -> Block:
  """Returns a cell of a notebook as a Python block: its options become empty lines."""
  lines = cell.text.splitlines()
  code = next((i for i, line in enumerate(lines) if not line.startswith(":")), len(lines))
  return cell._replace(language="python", text="\n".join([""] * code + lines[code:]) + "\n")


def run_examples(text: str, name: str, line: int, names: dict[str, Any]) -> None:
  """Runs the `>>>` lines of `text` and compares what they print."""
  test = doctest.DocTestParser().get_doctest(text, names, name, name, line - 1)
  report: list[str] = []
  runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
  result = runner.run(test, out=report.append, clear_globs=False)
  names.update(test.globs)
  assert result.attempted > 0, f"{name}: no example found"
  assert result.failed == 0, "".join(report)


def run_page(markdown: str, name: str) -> int:
  """Runs the Python blocks of a page in one namespace, and returns how many there were.

  What a block without `>>>` prints is compared with the block of language `OUTPUT` after it.
  """
  # As in a notebook, texts such as "__main__:RECIPE" name objects of the page.
  page = types.ModuleType("__main__")
  # `mock.patch.dict` would also forget the modules that the page imports, and those in C cannot be
  # loaded twice.
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "__main__", page)
    return _run_blocks(markdown, name, vars(page))


def _run_blocks(markdown: str, name: str, names: dict[str, Any]) -> int:
  """Runs the Python blocks of a page in a namespace, and returns how many there were."""
  count = 0
  printed = ""
  for block in blocks(markdown):
    kind = block.language.split(" ")[0]
    if block.language in NOT_RUN or kind in DIRECTIVES:
      continue
    if kind == CELL:
      block = python_of_cell(block)
    if block.language == OUTPUT:
      where = f"{name}:{block.line}"
      assert printed, f"{where}: nothing was printed"
      same = doctest.OutputChecker().check_output(block.text, printed, OPTIONS)
      assert same, f"{where}: this was printed:\n{printed}"
      continue
    assert block.language == "python", f"{name}:{block.line}: unknown language {block.language!r}"
    count += 1
    if re.search(r"^>>> ", block.text, re.MULTILINE):
      run_examples(block.text, name, block.line, names)
    else:
      # The blank lines make a traceback point at the line of the page.
      with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), names)
      printed = output.getvalue()
  return count


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
  things = {name: resolve(name), **members(name)}
  ran = 0
  for key, thing in things.items():
    if ">>> " in (thing.__doc__ or ""):
      run_examples(thing.__doc__, key, 1, {})
      ran += 1
  assert ran > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page(page, tmp_path, monkeypatch):
  if page.name in NEEDS:
    pytest.importorskip(NEEDS[page.name], reason="see the Makefile")
  monkeypatch.chdir(tmp_path)
  run_page(page.read_text(encoding="utf-8"), str(page))


GOOD = """
```python
x = 2
```

```bash
not python
```

```python
>>> x + 1
3
>>> print(list(range(100)))
[0, 1, ...
```

```python
print("a   b")
```

```text output
a b
```

```{code-cell} ipython3
:tags: [remove-output]

y = [1]
```

::::{tab-set}
:::{tab-item} Two
```{code-cell}
y[0] = z = x
```
:::
::::

```{toctree}
not python
```
"""


def test_all_blocks_of_a_page_run_in_one_namespace():
  assert run_page(GOOD, "page") == 5


@pytest.mark.parametrize(
  ("old", "new", "error"),
  [
    ("x = 2", "x = y", NameError),
    ("x = 2", "assert False", AssertionError),
    ("\n3\n", "\n4\n", AssertionError),
    ("a b", "a c", AssertionError),
    ('print("a   b")', "pass", AssertionError),
    (">>> x + 1", ">>> x + ", AssertionError),
    ("bash", "py", AssertionError),
    ("bash", "", AssertionError),
    ("y = [1]", "pass", NameError),
    ("y[0] = z = x", "z = w", NameError),
    ("{toctree}\nnot python\n```", "{toctree}\nnot python", ValueError),
  ],
)
def test_a_broken_page_fails(old, new, error):
  assert old in GOOD
  with pytest.raises(error):
    run_page(GOOD.replace(old, new, 1), "page")
