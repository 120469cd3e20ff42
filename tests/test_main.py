"""The command line: what it prints, and that errors have no traceback."""

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


@pytest.mark.slow
def test_a_process_of_its_own():
  command = [sys.executable, "-m", "mpjax", "doctor"]
  found = subprocess.run(command, capture_output=True, text=True, check=True)
  assert found.stdout.startswith("Policy for this machine: ")


def test_an_error_of_jax_is_a_line_and_status_2(capsys, monkeypatch):
  # JAX does not find a driver, and names the fix.
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
