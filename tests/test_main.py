"""The command line: what it prints, and that errors have four parts and no traceback."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from mpjax.__main__ import main

ROOT = pathlib.Path(__file__).parent.parent


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


def test_a_process_of_its_own():
  command = [sys.executable, "-m", "mpjax", "doctor", "--json"]
  found = subprocess.run(command, capture_output=True, text=True, check=True)
  assert json.loads(found.stdout)["devices"]


MODULE = """
import jax, jax.numpy as jnp

def product(x, transposed=False):
  return x @ (x if transposed else x.T)

def good():
  return product, (jax.ShapeDtypeStruct((2, 2), jnp.float32),)

def with_keywords():
  return (lambda x, y: x.T @ y, good()[1], {"y": good()[1][0]})

def wrong_shapes():
  return product, (jax.ShapeDtypeStruct((2, 3), jnp.float32), True)

def bare():
  return jnp.sin, 1.0

def alone():
  return jnp.sin

def raises():
  return 1 / 0

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The working directory of the command, with two modules in it."""
  (tmp_path / "for_the_command_line.py").write_text(MODULE)
  (tmp_path / "broken_for_the_command_line.py").write_text("import no_such_module_anywhere\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  return tmp_path


@pytest.mark.parametrize(
  ("argv", "parts"),
  [
    ([], ["expected python -m mpjax [-h] command", "required: command", "--help"]),
    (["diagnose"], ["invalid choice: 'diagnose'", "See python -m mpjax --help."]),
    (["audit"], ["python -m mpjax audit:", "module:function", "audit --help"]),
    (["audit", "train"], ["expected module:function", "got 'train'", "Write for example"]),
    (["audit", ":f"], ["expected module:function", "got ':f'"]),
    (["audit", "no_such.module:f"], ["No module named 'no_such'", "PYTHONPATH"]),
    (
      ["audit", "broken_for_the_command_line:f"],
      ["No module named 'no_such_module_anywhere'", "broken_for_the_command_line.py:1", "Run that"],
    ),
    (["audit", "for_the_command_line:gone"], ["no function 'gone'", "Define def gone()"]),
    (["audit", "for_the_command_line:number"], ["got 3", "Define def number()"]),
    (
      ["audit", "for_the_command_line:bare"],
      ["(fn, args) or (fn, args, kwargs)", "bare() returned (", "float)", "the comma"],
    ),
    (["audit", "for_the_command_line:alone"], ["alone() returned a ", "Write return fn, (arg,)"]),
    (
      ["audit", "for_the_command_line:raises"],
      ["ZeroDivisionError: division by zero", "for_the_command_line.py:23: return 1 / 0"],
    ),
    (["doctor", "--html", "no/such/folder.html"], ["--html", "No such file", "Name a file"]),
  ],
)
def test_errors_have_four_parts_and_status_2(capsys, folder, argv, parts):
  status, out, err = ran(capsys, *argv)
  assert (status, out) == (2, "")
  for part in ["python -m mpjax", ": expected ", ", got ", *parts]:
    assert part in err
  assert "Traceback" not in err


def test_a_process_with_an_error_has_status_2_and_no_traceback(folder):
  command = [sys.executable, "-m", "mpjax", "audit", "for_the_command_line:raises"]
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
  env = os.environ | {"PYTHONPATH": path}
  found = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
  assert found.returncode == 2
  assert "ZeroDivisionError" in found.stderr
  assert "Traceback" not in found.stderr


def test_help_names_the_commands(capsys):
  with pytest.raises(SystemExit) as excinfo:
    main(["--help"])
  assert excinfo.value.code == 0
  out = capsys.readouterr().out
  assert "doctor" in out
  assert "audit" in out


@pytest.mark.parametrize("name", ["good", "with_keywords"])
def test_audit_calls_the_function_and_audits_what_it_returns(capsys, folder, name):
  status, out, err = ran(capsys, "audit", f"for_the_command_line:{name}")
  assert (status, err) == (0, "")
  assert out.startswith("Precision audit")
  assert max(map(len, out.splitlines())) <= 80
  status, out, err = ran(capsys, "audit", f"for_the_command_line:{name}", "--json")
  assert json.loads(out)["operations"] == {"dot_general": 1, "transpose": 1}


def test_what_the_audited_function_raises_is_an_error_with_its_line(capsys, folder):
  status, _, err = ran(capsys, "audit", "for_the_command_line:wrong_shapes")
  assert status == 2
  assert "for_the_command_line.py:" in err
  assert "Traceback" not in err
