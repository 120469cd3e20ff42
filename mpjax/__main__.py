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
  parser.parse_args(argv)
  # The message of JAX names the cause. A traceback would hide it.
  try:
    report = doctor()
  except RuntimeError as error:  # JAX finds no device.
    sys.stderr.write(f"python -m mpjax doctor: {str(error).splitlines()[0]}\n")
    return 2
  sys.stdout.write(f"{report}\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
