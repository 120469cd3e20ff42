"""The command line: `python -m mpjax doctor`."""

import argparse
import sys
from collections.abc import Sequence

from mpjax._diagnose.doctor import doctor


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command, and returns its exit status: 2 for an error."""
  parser = argparse.ArgumentParser("python -m mpjax", description="Mixed precision in JAX.")
  about = "devices, versions and settings, and the policy that fits"
  parser.add_argument("command", choices=["doctor"], help=about)
  parser.add_argument("--json", action="store_true", help="print JSON instead of text")
  parser.add_argument("--html", metavar="PATH", help="also write a page of HTML")
  options = parser.parse_args(argv)
  # A message is enough for these errors. A traceback would hide it.
  try:
    report = doctor()
    if options.html is not None:
      report.to_html(options.html)
  except (RuntimeError, OSError) as error:  # JAX finds no device, or the file cannot be written.
    sys.stderr.write(f"python -m mpjax doctor: {str(error).splitlines()[0]}\n")
    return 2
  # Standard output has the report alone, so JSON can be piped.
  sys.stdout.write(f"{report.to_json() if options.json else report}\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
