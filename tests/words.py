"""The words that our prose avoids, and where it has them: `make lint` runs this.

The table "Words" of CONTRIBUTING.md says what to write instead. Prose is the comments and the
strings of `mpjax/`, and the pages, without their code. `python tests/words.py` lists
`file:line: word` and fails if there is any.
"""

import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent

BANNED = (
  r"(?<!by\s)hand(s|ed|ing)?\s+((it|them|one)\s+)?(on|back)",
  r"mend(s|ed|ing)?",
  r"in\s+force",
  r"(what|who|which|whoever|whatever)\s+reads",
  r"stand(s|ing)?",
  r"stood",
  r"wholes?",
  r"bodies",
  r"in(\s+(its|their))?\s+turn",
  r"(by|each|every|such|next)\s+turns?",
  r"turns?\s+of",
  r"programs?",
  r"made\s+(by|of|from|with|anew)",
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
NAME = re.compile(r"""["']\w+["']""")
QUOTES = re.compile(r"""^[A-Za-z]*("{3}|'{3}|["'])|("{3}|'{3}|["'])$""")
FIELD = re.compile(r"\{[^{}\n]*\}")
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


def words(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  text = path.read_text()
  return banned_words(prose_of_python(text) if path.suffix == ".py" else prose_of_markdown(text))


def banned_words(prose: str) -> Iterator[tuple[int, str]]:
  """The line of each banned word, and the word."""
  for match in expression("|".join(BANNED)).finditer(prose):
    yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def prose_of_markdown(text: str) -> str:
  """The text with its code, and the rows of the glossary, blanked; lines keep their numbers."""
  text = GLOSSARY.sub(lambda glossary: TABLE_ROW.sub(_blank, glossary[0]), text)
  return MARKDOWN_CODE.sub(_blank, text)


def prose_of_python(source: str) -> str:
  """The comments and strings of a module, with everything else blanked.

  A comment of several lines is one text, and so are strings that Python joins: a space replaces
  their `#` and quotes, and `CODE` replaces code.
  """
  lines = source.splitlines(keepends=True)
  starts = [0]
  for line in lines:
    starts.append(starts[-1] + len(line))
  prose = list(_blank(source))
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    kind = tokenize.tok_name[token.type]
    if kind not in ("COMMENT", "STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END"):
      continue
    first = starts[token.start[0] - 1] + token.start[1]
    last = starts[token.end[0] - 1] + token.end[1]
    text = source[first:last]
    if kind == "COMMENT":
      text = MARKDOWN_CODE.sub(_blank, text.replace("#", " ", 1))
    elif kind in ("FSTRING_START", "FSTRING_END"):
      text = " " * len(text)
    elif kind == "STRING":
      joined = source[:first].rstrip().endswith(('"', "'"))
      text = _string(text) if joined or not NAME.fullmatch(text) else _blank(text)
    prose[first:last] = text
  return "".join(_space(character, old) for character, old in zip(prose, source, strict=True))


def _string(text: str) -> str:
  is_format = "f" in text[:2].lower().split('"')[0]  # before Python 3.12, one token
  text = QUOTES.sub(lambda quote: " " * len(quote[0]), text)
  text = FIELD.sub(_blank, text) if is_format else text
  for code in (DOCTEST, ARGUMENT, MARKDOWN_CODE):
    text = code.sub(_blank, text)
  return text


def _blank(text: str | re.Match[str]) -> str:
  text = text if isinstance(text, str) else text[0]
  return re.sub(r"[^\n]", CODE, text)


def _space(character: str, old: str) -> str:
  return " " if character == CODE and old.isspace() else character


if __name__ == "__main__":
  sys.exit(main())
