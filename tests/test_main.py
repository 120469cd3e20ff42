"""The command line: what it prints, and that errors have no traceback."""

import json
import subprocess
import sys

import jax
import pytest

from mpjax.__main__ import main


def ran(capsys, *argv):
  status = main(argv)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def test_doctor_prints_text(capsys):
  status, out, err = ran(capsys, "doctor")
  assert (status, err) == (0, "")
  assert out.startswith("Policy for this machine: ")
  assert max(map(len, out.splitlines())) <= 80


def test_doctor_prints_json_and_writes_html(capsys, tmp_path):
  page = tmp_path / "doctor.html"
  status, out, err = ran(capsys, "doctor", "--json", "--html", str(page))
  assert (status, err) == (0, "")
  assert "preset" in json.loads(out)
  assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_a_process_of_its_own():
  command = [sys.executable, "-m", "mpjax", "doctor", "--json"]
  found = subprocess.run(command, capture_output=True, text=True, check=True)
  assert json.loads(found.stdout)["devices"]


def test_errors_are_a_line_and_status_2(capsys, monkeypatch):
  """A file that cannot be written, and a driver that JAX does not find, whose fix JAX names."""
  status, out, err = ran(capsys, "doctor", "--html", "no/such/folder.html")
  assert (status, out) == (2, "")
  assert "No such file" in err

  def devices():
    raise RuntimeError("Unable to initialize backend 'cuda': set JAX_PLATFORMS=cpu\nand so on")

  monkeypatch.setattr(jax, "devices", devices)
  status, out, err = ran(capsys, "doctor")
  assert (status, out) == (2, "")
  assert (
    err == "python -m mpjax doctor: Unable to initialize backend 'cuda': set JAX_PLATFORMS=cpu\n"
  )


def test_help_names_the_command_and_an_unknown_one_has_status_2(capsys):
  with pytest.raises(SystemExit, match="0"):
    main(["--help"])
  assert "doctor" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="2"):
    main(["diagnose"])
  assert "invalid choice" in capsys.readouterr().err
