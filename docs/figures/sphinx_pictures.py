"""A Sphinx extension: pictures that follow the theme's own switch between light and dark.

In the pages a figure is a `<picture>` of a light and a dark file, which GitHub shows. Sphinx would
leave it as it is: it copies no file that HTML names, and the browser does not know of the switch.
So each becomes two images of Markdown, with the classes that the theme hides one or the other by.
"""

import re
from typing import Any

PICTURE = re.compile(
  r'^<picture>\n<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\n'
  r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\n</picture>$',
  re.MULTILINE,
)
"""A figure as the pages have it: four lines, and nothing else."""


def as_images(markdown: str) -> str:
  """Returns a page with each picture replaced by two images; no line moves."""
  light, dark = "![\\g<alt>](\\g<light>){.only-light}", "![\\g<alt>](\\g<dark>){.only-dark}"
  return PICTURE.sub(f"{light}\n{dark}\n\n", markdown)


def setup(app: Any) -> dict[str, bool]:
  """Registers the extension; MyST needs `attrs_inline` among its own."""

  def read(app: Any, name: str, source: list[str]) -> None:
    source[0] = as_images(source[0])

  app.connect("source-read", read)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
