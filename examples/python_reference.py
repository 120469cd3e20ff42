"""Text that comes with Python, for language models: the reference of the language itself.

`pydoc_data.topics` holds what `help("for")` and its like print: 370,000 characters of English,
grammar and code without what is said twice. Each release of Python words some of it anew, so that
figures differ a little from one to the next. There is nothing about mixed precision in here.
"""

from pydoc_data import topics
from typing import NamedTuple

import numpy as np

VOCABULARY = 96
"""A line break and the printable characters of ASCII: a multiple of 8, which half units want."""


class Text(NamedTuple):
  """Characters as int32 numbers below `VOCABULARY`."""

  train: np.ndarray
  held_out: np.ndarray  # no paragraph of which is in `train`


def load_text():
  """Returns the text; the last tenth is held out."""
  pages = (paragraph for page in topics.topics.values() for paragraph in page.split("\n\n"))
  paragraphs = list(dict.fromkeys(paragraph.strip("\n") for paragraph in pages))
  cut = len(paragraphs) * 9 // 10
  return Text(*(encode("\n\n".join(part)) for part in (paragraphs[:cut], paragraphs[cut:])))


def encode(text):
  """Returns the numbers of characters; one that is not ASCII counts as a question mark."""
  codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
  return np.where(codes == ord("\n"), 0, np.clip(codes - ord(" ") + 1, 1, VOCABULARY - 1))


def decode(tokens):
  """Returns the characters of numbers."""
  return "".join("\n" if token == 0 else chr(token - 1 + ord(" ")) for token in tokens)
