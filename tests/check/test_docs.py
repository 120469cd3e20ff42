"""Every example runs: the doctests of public names, and the Python blocks of README and docs."""

import contextlib
import doctest
import io
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.lint.test_public_api import NAMES, members, resolve

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_RUN = ("text", "bash")
"""Languages of blocks that are not Python. Anything else, or none, is a misspelt ```python."""

OUTPUT = "text output"
"""The language of a block that holds what the Python block before it printed."""

DIRECTIVES = ("{eval-rst}", "{toctree}", "{figure}")
"""Blocks that the site alone understands, and that hold no Python."""

CELL = "{code-cell}"
"""The language of a cell of a notebook. Its options are lines of `:name: value` at the top."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


class Block(NamedTuple):
  """A fenced block; `line` is that of its first line of content."""

  language: str
  line: int
  text: str


def blocks(markdown: str) -> Iterator[Block]:
  fence, language, start, lines = "", "", 0, []
  for number, line in enumerate(markdown.splitlines(), 1):
    match = re.match(r" *(```+|~~~+)\s*(.*?)\s*$", line)
    if fence:
      if match and match[1] == fence and not match[2]:
        yield Block(language, start, textwrap.dedent("\n".join(lines)) + "\n")
        fence = ""
      else:
        lines.append(line)
    elif match:
      fence, language, start, lines = match[1], match[2], number + 1, []
  if fence:
    raise ValueError(f"the block at line {start} is not closed")


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
  names: dict[str, Any] = {"__name__": "__main__"}
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
  monkeypatch.chdir(tmp_path)
  run_page(page.read_text(encoding="utf-8"), str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_commands_lead_somewhere(page):
  text = page.read_text(encoding="utf-8")
  links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
  assert [link for link in links if not (page.parent / link).exists()] == []
  targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
  commands = [
    c for b in blocks(text) if b.language == "bash" for c in re.findall(r"\bmake ([a-z-]+)", b.text)
  ]
  assert [command for command in commands if command not in targets] == []


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
"""


def test_blocks_share_names():
  assert run_page(GOOD, "page") == 3


NOTEBOOK = """
```{code-cell} ipython3
:tags: [remove-output]

x = [1]
```

::::{tab-set}
:::{tab-item} Two
```{code-cell}
x[0] = y = 2
```
:::
::::

```{toctree}
not python
```
"""


def test_cells_and_the_blocks_in_tabs_run():
  assert run_page(NOTEBOOK, "page") == 2


@pytest.mark.parametrize(("old", "line"), [("x = [1]", 5), ("x[0] = y = 2", 11)])
def test_a_broken_cell_fails_at_its_line(old, line):
  with pytest.raises(ZeroDivisionError) as excinfo:
    run_page(NOTEBOOK.replace(old, "1 / 0"), "page")
  assert excinfo.traceback[-1].lineno == line - 1


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("x = 2", "x = y"),
    ("x = 2", "assert False"),
    ("\n3\n", "\n4\n"),
    ("a b", "a c"),
    ('print("a   b")', "pass"),
    (">>> x + 1", ">>> x + "),
    ("bash", "py"),
    ("bash", ""),
  ],
)
def test_a_broken_page_fails(old, new):
  assert old in GOOD
  with pytest.raises((AssertionError, NameError)):
    run_page(GOOD.replace(old, new, 1), "page")


def test_a_block_that_is_not_closed_fails():
  with pytest.raises(ValueError, match="line 3 is not closed"):
    run_page("\n```python\nx = 1\n", "page")


def test_a_failure_names_the_line_of_the_page():
  with pytest.raises(ZeroDivisionError) as excinfo:
    run_page("text\n\n```python\nx = 1\n1 / 0\n```\n", "page")
  assert excinfo.traceback[-1].lineno == 4  # counted from 0: the fifth line
