"""The command line: `python -m mpjax doctor`."""

import argparse
import sys
from collections.abc import Sequence

from mpjax._core.errors import MpjaxError
from mpjax._diagnostics.doctor import doctor


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command, and returns its exit status: 2 for an error.

  Args:
    argv: the arguments; None for those of this process.
  """
  parser = argparse.ArgumentParser("python -m mpjax", description="Mixed precision in JAX.")
  commands = parser.add_subparsers(required=True, metavar="command")
  about = "devices, versions and settings, and the policy that fits"
  command = commands.add_parser("doctor", help=about, description=about)
  command.add_argument("--json", action="store_true", help="print JSON instead of text")
  command.add_argument("--html", metavar="PATH", help="also write a page of HTML")
  options = parser.parse_args(argv)
  try:
    report = doctor()
    if options.html is not None:
      report.to_html(options.html)
  except (MpjaxError, OSError) as error:
    sys.stderr.write(f"{error}\n")
    return 2
  sys.stdout.write(f"{report.to_json() if options.json else report}\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
