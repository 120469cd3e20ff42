"""The command line: `python -m mpjax doctor`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from mpjax._core.errors import MpjaxError, MpjaxValueError
from mpjax._diagnostics.doctor import doctor
from mpjax._diagnostics.report import Report

_COMMAND = "python -m mpjax"


class _Parser(argparse.ArgumentParser):
  """A parser whose errors have four parts."""

  def error(self, message: str) -> NoReturn:
    raise MpjaxValueError(
      self.prog,
      expected=self.format_usage().removeprefix("usage: ").strip(),
      got=message,
      fix=f"See {self.prog} --help.",
    )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command, and returns its exit status: 2 for an error, which has four parts.

  Args:
    argv: the arguments; None for those of this process.
  """
  try:
    options = _parser().parse_args(argv)
    report = doctor()
    if options.html is not None:
      _write(report, options.html)
  except MpjaxError as error:
    sys.stderr.write(f"{error}\n")
    return 2
  sys.stdout.write(f"{report.to_json() if options.json else report}\n")
  return 0


def _parser() -> _Parser:
  parser = _Parser(prog=_COMMAND, description="Tools for mixed precision in JAX.")
  commands = parser.add_subparsers(dest="command", required=True, metavar="command")
  about = "devices, versions and settings, and the policy that fits"
  command = commands.add_parser("doctor", help=about, description=about)
  command.add_argument("--json", action="store_true", help="print JSON instead of text")
  command.add_argument("--html", metavar="PATH", help="also write a page of HTML")
  return parser


def _write(report: Report, path: str) -> None:
  try:
    report.to_html(pathlib.Path(path))
  except OSError as error:
    raise MpjaxValueError(
      f"{_COMMAND} --html",
      expected="a path of a file that can be written",
      got=f"{path!r}: {error.strerror}",
      fix="Name a file in a folder that exists.",
    ) from error


if __name__ == "__main__":
  sys.exit(main())
