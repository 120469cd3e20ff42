"""Draws the figures of the pages, in docs/figures/."""

import argparse
import json

from docs.figures import (
  audit,
  casts,
  compare,
  float8,
  formats,
  memory,
  nonfinite,
  sensitivity,
  step,
  tpu,
  tune,
  underflow,
)
from docs.figures.style import THEMES, files, svg

FIGURES = {
  "formats": formats,
  "underflow": underflow,
  "step": step,
  "casts": casts,
  "memory": memory,
  "float8": float8,
  "tpu": tpu,
  "compare": compare,
  "audit": audit,
  "nonfinite": nonfinite,
  "sensitivity": sensitivity,
  "tune": tune,
}


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m docs.figures", description=__doc__)
  parser.add_argument("names", nargs="*", help=f"some of {', '.join(FIGURES)}; without any, all")
  parser.add_argument("--measure", action="store_true", help="trace and train for *.json first")
  options = parser.parse_args()
  if unknown := [name for name in options.names if name not in FIGURES]:
    parser.error(f"unknown: {', '.join(unknown)}")
  if options.measure:
    for figure in (compare, memory, nonfinite, tune, underflow):
      found = json.dumps(figure.measure(), indent=2)
      figure.MEASURED.write_text(found + "\n", encoding="utf-8")
  for name in options.names or FIGURES:
    for theme, path in zip(THEMES, files(name), strict=True):
      svg(FIGURES[name].draw, theme, path)
      print(path)


if __name__ == "__main__":
  main()
