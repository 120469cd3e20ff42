"""The words that our prose avoids, and where it has them: `make lint` runs this.

The table "Words" of CONTRIBUTING.md says what to write instead. Prose is the comments and the
strings of `mpjax/`, and the pages, without their code. `python tests/words.py` lists
`file:line: word` and fails if there is any.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent

BANNED = (
  r"(?<!by\s)hand(s|ed|ing)?\s+((it|them|one)\s+)?(on|back)",
  r"mend(s|ed|ing)?|anew|whoever",
  r"in\s+force",
  r"(what|who|which|whatever)\s+reads",
  r"stand(s|ing)?",
  r"stood",
  r"wholes?",
  r"bodies",
  r"in(\s+(its|their))?\s+turn",
  r"(by|each|every|such|next)\s+turns?",
  r"turns?\s+of",
  r"programs?",
  r"made\s+(by|of|from|with)",
  r"in\s+(the|its|their)\s+place",
  r"in\s+half(?!\s+(an?|(of\s+)?the)\b)",
  r"(?<![\"'=])half(?!=|\s+(of|an?|as|the|lists?)\b)",
  r"(?<!dot\s)(?<!outer\s)(?<!inner\s)(?<!scalar\s)products?(?!\s+of\s+(many\s+)?numbers\b)",
  r"(at|by|to|from)\s+(a|each|every|its|the|their|this|that)\s+places?",
)
"""Regular expressions of entire words, in any case, also across the end of a line."""


CODE = "\x00"
"""Replaces each character of code, since the words around it do not belong together."""

MARKDOWN_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
GLOSSARY = re.compile(r"^## Words$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
DOCTEST = re.compile(r"^ *>>> .*?(?=^ *$|\Z)", re.MULTILINE | re.DOTALL)
ARGUMENT = re.compile(r"(?<=\n) +\*{0,2}\w+:")


def expression(banned: str) -> re.Pattern[str]:
  """Returns the regular expression of entire words."""
  return re.compile(rf"(?<![\w-])(?:{banned})(?![\w-])", re.IGNORECASE)


def main() -> int:
  found = [
    f"{path.relative_to(ROOT)}:{line}: {word}" for path in pages() for line, word in words(path)
  ]
  print("\n".join(found), end="\n" if found else "")
  return 1 if found else 0


def pages() -> list[pathlib.Path]:
  """The files whose prose is checked."""
  return [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "mpjax").rglob("*.py")),
  ]


def words(path: pathlib.Path) -> list[tuple[int, str]]:
  text = path.read_text()
  return in_python(text) if path.suffix == ".py" else in_markdown(text)


def banned_words(prose: str, first: int = 1) -> list[tuple[int, str]]:
  """The line of each banned word, and the word; `first` is the line of the first character."""
  return [
    (first + prose.count("\n", 0, match.start()), " ".join(match[0].split()))
    for match in expression("|".join(BANNED)).finditer(prose)
  ]


def in_markdown(text: str) -> list[tuple[int, str]]:
  """The words of a page without its code and the rows of the glossary."""
  text = GLOSSARY.sub(lambda glossary: TABLE_ROW.sub(_blank, glossary[0]), text)
  return banned_words(MARKDOWN_CODE.sub(_blank, text))


def in_python(source: str) -> list[tuple[int, str]]:
  """The words of the comments and strings of a module; a string of one name is no prose."""
  found: list[tuple[int, str]] = []
  pieces = set()
  for node in ast.walk(ast.parse(source)):
    text = ""
    if isinstance(node, ast.JoinedStr):
      pieces |= set(node.values)
      text = "".join(v.value if isinstance(v, ast.Constant) else CODE for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
      text = "" if node.value.isidentifier() else node.value
    for code in (DOCTEST, ARGUMENT, MARKDOWN_CODE):
      text = code.sub(_blank, text)
    found += banned_words(text, getattr(node, "lineno", 0))
  # A comment of several lines is one text.
  for comment in re.finditer(r"(^ *#.*\n?)+|#.*$", source, re.MULTILINE):
    line = 1 + source.count("\n", 0, comment.start())
    found += banned_words(MARKDOWN_CODE.sub(_blank, comment[0].replace("#", " ")), line)
  return sorted(found)


def _blank(text: re.Match[str]) -> str:
  return re.sub(r"[^\n]", CODE, text[0])


if __name__ == "__main__":
  sys.exit(main())
