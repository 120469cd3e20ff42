"""Installs what would be released into clean environments, and uses it there: `make release`.

A wheel and an sdist are built. Each row of `TARGETS` gets an environment of its own outside of the
checkout, and runs from an empty folder. The last lines are one table; the exit status is 1 if
anything failed.
"""

import argparse
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """An interpreter, which versions of the dependencies it gets, and what is installed.

  "lowest" are the lowest that pyproject.toml allows.
  """

  python: str
  versions: str = "newest"
  file: str = "wheel"


TARGETS = (
  Target(python="3.11", versions="lowest"),
  Target(python="3.12"),
  Target(python="3.13"),
  Target(python="3.13", file="sdist"),
)

SDIST_TESTS = ("tests/test_import.py", "tests/lint/test_layout.py")
"""Run in the unpacked sdist, after all tests have been collected there."""

COLUMNS = ("pip check", "snippet", "doctor", "round trip", "its tests")

IMPORT_TIME = """
import time, jax
start = time.process_time()
import mpjax
print(time.process_time() - start)
"""

SHOWN = ("jax", "flax", "optax", "orbax-checkpoint")


class Failed(Exception):
  """A command failed; the text is what it printed."""


def run(command: Sequence[str | pathlib.Path], cwd: pathlib.Path) -> str:
  """Runs a command where neither this checkout nor this environment can be seen."""
  hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS")
  environment = {name: value for name, value in os.environ.items() if name not in hidden}
  environment = {"JAX_PLATFORMS": "cpu", **environment}
  done = subprocess.run(
    list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
  )
  if done.returncode != 0:
    raise Failed(f"$ {' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
  return done.stdout


def build(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Builds the sdist, and the same wheel from it and from the checkout."""
  for name, flags in {"release": (), "checkout": ("--wheel",)}.items():
    command = [sys.executable, "-m", "build", *flags, "--outdir", folder / name]
    run([*command, ROOT], folder)
  (sdist,) = (folder / "release").glob("*.tar.gz")
  (wheel,) = (folder / "release").glob("*.whl")
  (other,) = (folder / "checkout").glob("*.whl")
  if content(wheel) != content(other):
    raise Failed(f"{wheel.name} differs when it is built from {sdist.name} and from the checkout")
  for file in (sdist, wheel):
    print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")
  return {"sdist": sdist, "wheel": wheel}


def content(wheel: pathlib.Path) -> dict[str, str]:
  with zipfile.ZipFile(wheel) as archive:
    return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def snippet() -> str:
  """The first Python block of the README."""
  found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
  if found is None:
    raise Failed("README.md has no Python block")
  return found[1]


def try_out(target: Target, files: Mapping[str, pathlib.Path], folder: pathlib.Path) -> list[str]:
  """Returns the row of the table for a target."""
  found = run([ROOT / ".ci" / "find-python", target.python], ROOT).strip()
  run([found, "-m", "venv", folder / "venv"], folder)
  python = folder / "venv" / "bin" / "python"
  empty = folder / "empty"
  empty.mkdir()
  file = files[target.file]
  lowest = [sys.executable, ROOT / ".ci" / "lowest"]
  pins = run(lowest, ROOT).split() if target.versions == "lowest" else []
  start = time.monotonic()
  run([python, "-m", "pip", "install", "--quiet", f"{file}[checkpoints,reports]", *pins], empty)
  installed = f"{time.monotonic() - start:.0f} s"
  versions = run([python, "-m", "pip", "list", "--format=freeze"], empty)
  shown = [re.search(rf"^{name}==(\S+)", versions, re.M) for name in SHOWN]

  (folder / "snippet.py").write_text(snippet())
  shutil.copy(ROOT / ".ci" / "smoke_user.py", folder)
  times = [float(run([python, "-c", IMPORT_TIME], empty)) for _ in range(5)]
  run([python, "-m", "pip", "check"], empty)
  run([python, folder / "snippet.py"], empty)
  run([python, "-m", "mpjax", "doctor"], empty)
  run([python, folder / "smoke_user.py"], empty)
  tests = "-"
  if target.file == "sdist":
    tests = test_sdist(python, file, folder)
  done = [*(match[1] if match else "?" for match in shown), installed]
  return [*done, f"{statistics.median(times):.2f} s", "ok", "ok", "ok", "ok", tests]


def test_sdist(python: pathlib.Path, sdist: pathlib.Path, folder: pathlib.Path) -> str:
  """Collects the tests that the sdist holds, and runs those that read its files."""
  with tarfile.open(sdist) as archive:
    archive.extractall(folder / "sdist", filter="data")
  (source,) = (folder / "sdist").iterdir()
  run([python, "-m", "pip", "install", "--quiet", f"{sdist}[dev]"], folder)
  collected = run([python, "-m", "pytest", "--collect-only", "--quiet"], source)
  run([python, "-m", "pytest", "--quiet", "-n", "2", *SDIST_TESTS], source)
  return f"{collected.strip().splitlines()[-1].split()[0]} collected"


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  texts = sorted({text for t in TARGETS for text in (t.python, t.versions, t.file)})
  parser.add_argument("--only", choices=texts, help="rows with this text")
  only = parser.parse_args().only
  rows = [["python", "versions", "file", *SHOWN, "install", "import", *COLUMNS]]
  failures = []
  with tempfile.TemporaryDirectory(prefix="mpjax-smoke-") as temporary:
    files = build(pathlib.Path(temporary))
    for number, target in enumerate(TARGETS):
      name = [target.python, target.versions, target.file]
      if only not in (None, *name):
        continue
      folder = pathlib.Path(temporary) / str(number)
      folder.mkdir()
      print(f"{' '.join(name)} ...", flush=True)
      try:
        rows.append([*name, *try_out(target, files, folder)])
      except Failed as error:
        rows.append([*name, "FAILED"])
        failures.append(f"{' '.join(name)}:\n{error}")
      shutil.rmtree(folder)
  print(*failures, sep="\n\n")
  widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
  for row in rows:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
