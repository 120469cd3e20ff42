"""`make compat` finds the interpreters it needs, and says which it lacks."""

import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / ".ci" / "find-python"


def run(folder, *versions):
  """Runs the script where only the interpreters in `folder` are to be found."""
  environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)}
  environment["PYENV_ROOT"] = str(folder / "pyenv")
  return subprocess.run(
    [SCRIPT, *versions], env=environment, capture_output=True, text=True, check=False
  )


def interpreter(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{text}\n")
  path.chmod(0o755)


# What is on the PATH of this machine must not be found: there are no such versions.
NEW, NEWER = "3.97", "3.98"


def says(version):
  """An interpreter that gives its version first, and its path when it is asked for that."""
  return f'case "$2" in *executable*) echo found-{version};; *) echo {version};; esac'


def test_the_first_version_that_runs_is_taken_from_the_path_or_from_pyenv(tmp_path):
  for place in (f"bin/python{NEW}", f"pyenv/versions/{NEW}.1/bin/python"):
    interpreter(tmp_path / "one" / place, says(NEW))
    done = run(tmp_path / "one", NEWER, NEW)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"found-{NEW}\n", "")
    (tmp_path / "one" / place).unlink()
  for version in (NEW, NEWER):
    interpreter(tmp_path / "bin" / f"python{version}", says(version))
  assert run(tmp_path, NEWER, NEW).stdout == f"found-{NEWER}\n"


def test_one_that_does_not_run_is_passed_over(tmp_path):
  """A shim of pyenv is on the PATH for every version that any user ever installed."""
  for name, text in {"shim": "exit 127", "another": "echo 3.6", "silent": ""}.items():
    interpreter(tmp_path / name / "bin" / f"python{NEW}", text)
    done = run(tmp_path / name, NEW)
    assert (done.returncode, done.stdout) == (1, ""), name
    assert f"No Python {NEW} runs here" in done.stderr, name
    interpreter(tmp_path / name / "pyenv" / "versions" / f"{NEW}.2" / "bin" / "python", says(NEW))
    assert run(tmp_path / name, NEW).stdout == f"found-{NEW}\n", name


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_a_missing_interpreter_fails_the_target_before_any_test_is_run():
  have = f"{sys.version_info.major}.{sys.version_info.minor}"
  root = SCRIPT.parents[1]
  done = subprocess.run(
    ["make", "compat", f"OLDEST={NEW}", f"NEWEST={have}"],
    cwd=root,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode != 0
  assert f"No Python {NEW} runs here" in done.stderr
  assert "passed" not in done.stdout
