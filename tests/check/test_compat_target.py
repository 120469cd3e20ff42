"""`make compat` finds the interpreters it needs, and says which it lacks."""

import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / ".ci" / "find-python"


# What is on the PATH of this machine must not be found: there are no such versions.
NEW, NEWER = "3.97", "3.98"


def output(command, **options):
  return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run(folder, *versions):
  """Runs the script where only the interpreters in `folder` are to be found."""
  environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)}
  environment["PYENV_ROOT"] = str(folder / "pyenv")
  return output([SCRIPT, *versions], env=environment)


def interpreter(path, version):
  """Writes one that gives its version first, and its path when it is asked for that."""
  path.parent.mkdir(parents=True, exist_ok=True)
  says = f'case "$2" in *executable*) echo found-{version};; *) echo {version};; esac'
  path.write_text(f"#!/bin/sh\n{says}\n")
  path.chmod(0o755)


def test_the_first_version_that_runs_is_taken_from_the_path_or_from_pyenv(tmp_path):
  # A shim of pyenv is on the PATH for every version that any user ever installed.
  interpreter(tmp_path / f"bin/python{NEW}", "3.6")
  done = run(tmp_path, NEWER, NEW)
  assert (done.returncode, done.stdout) == (1, "")
  assert f"No Python {NEWER} {NEW} runs here" in done.stderr
  for place, version in (
    (f"pyenv/versions/{NEW}.1/bin/python", NEW),
    (f"bin/python{NEWER}", NEWER),
  ):
    interpreter(tmp_path / place, version)
    done = run(tmp_path, NEWER, NEW)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"found-{version}\n", "")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_a_missing_interpreter_fails_the_target_before_any_test_is_run():
  have = f"{sys.version_info.major}.{sys.version_info.minor}"
  done = output(["make", "compat", f"OLDEST={NEW}", f"NEWEST={have}"], cwd=SCRIPT.parents[1])
  assert done.returncode != 0
  assert f"No Python {NEW} runs here" in done.stderr
  assert "passed" not in done.stdout


def test_the_table_of_tested_versions_names_the_lowest_that_are_allowed():
  root = SCRIPT.parents[1]
  page = (root / "docs" / "stability.md").read_text(encoding="utf-8")
  (oldest,) = (line for line in page.splitlines() if line.startswith("| oldest |"))
  lowest = output([sys.executable, root / ".ci" / "lowest"]).stdout.split()
  wanted = dict(line.split("==") for line in lowest)
  jax, flax, optax = (wanted[name] for name in ("jax", "flax", "optax"))
  assert oldest == f"| oldest | 3.11 | {jax} | {flax} | {optax} |"


def test_the_versions_are_printed_as_a_row_of_that_table():
  done = output([sys.executable, SCRIPT.parent / "versions.py"])
  names = [cell.split()[0] for cell in done.stdout.split(" | ")]
  assert names == ["Python", "jax", "flax", "optax"]
