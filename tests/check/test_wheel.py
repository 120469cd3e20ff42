"""The wheel holds the package and nothing else, and the sdist all that git has.

`make release` installs them into clean environments; here nothing needs a network.
"""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

import mpjax

ROOT = pathlib.Path(__file__).parent.parent.parent
INFO = f"mpjax-{mpjax.__version__}.dist-info/"


def run(*command, **options):
  done = subprocess.run(
    [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False, **options
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("wheel")
  # Without isolation: the backend is in the development environment, so no network is needed.
  flags = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
  run("-m", "pip", "wheel", *flags, "--wheel-dir", str(folder), str(ROOT))
  (found,) = folder.glob("*.whl")
  return found


def test_content_and_metadata(wheel):
  archive = zipfile.ZipFile(wheel)
  names = set(archive.namelist())
  package = {name for name in names if not name.startswith(INFO)}
  sources = {file.relative_to(ROOT).as_posix() for file in (ROOT / "mpjax").rglob("*.py")}
  assert package == sources | {"mpjax/py.typed"}
  assert f"{INFO}licenses/LICENSE" in names
  metadata, _, description = archive.read(f"{INFO}METADATA").decode().partition("\n\n")
  lines = metadata.splitlines()
  assert "Requires-Python: >=3.11" in lines
  assert "License-Expression: Apache-2.0" in lines
  needed = {line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line}
  names = {line.split()[1].split(">")[0] for line in needed}
  assert names == {"flax", "jax", "optax"}
  # The description has no dead link.
  assert description.startswith("# mpjax")
  targets = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=[\"']([^\"']*)", description)
  assert [target for target in map("".join, targets) if "://" not in target] == []
  assert "[Getting started](" not in description
  assert "Getting started" in description


def test_the_sdist_holds_what_git_does(tmp_path):
  git = ["git", "-C", str(ROOT), "ls-files"]
  known = subprocess.run(git, capture_output=True, text=True, check=False)
  if known.returncode != 0:
    pytest.skip("no git checkout: this is an sdist, or there is no git")
  build = "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1]))"
  name = run("-c", build, str(tmp_path), cwd=ROOT).split()[-1]
  with tarfile.open(tmp_path / name) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
  assert {file for file in known.stdout.split("\n") if file and (ROOT / file).exists()} <= names


def test_files_of_a_release_name_the_same_version():
  citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
  assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [mpjax.__version__]
  changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
  assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)[0] == mpjax.__version__


def test_import_from_the_wheel(wheel, tmp_path):
  zipfile.ZipFile(wheel).extractall(tmp_path)
  environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
  found = run("-c", "import mpjax; print(mpjax.__file__)", cwd=tmp_path, env=environment)
  assert pathlib.Path(found.strip()) == tmp_path / "mpjax" / "__init__.py"
