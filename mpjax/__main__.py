"""The command line: `python -m mpjax doctor`, and `python -m mpjax audit module:function`."""

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import mpjax
from mpjax._core.errors import MpjaxError, MpjaxTypeError, MpjaxValueError, line_of_user
from mpjax._core.types import Function
from mpjax._diagnostics.doctor import doctor
from mpjax._diagnostics.report import Report

_COMMAND = "python -m mpjax"

_TARGET = "module:function, whose function() returns (fn, args) or (fn, args, kwargs)"


class _Parser(argparse.ArgumentParser):
  """A parser whose errors have four parts."""

  def error(self, message: str) -> NoReturn:
    raise MpjaxValueError(
      self.prog,
      expected=self.format_usage().removeprefix("usage: ").strip(),
      got=message,
      fix=f"See {self.prog} --help.",
    )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command, and returns its exit status: 2 for an error, which has four parts.

  Args:
    argv: the arguments; None for those of this process.
  """
  try:
    options = _parser().parse_args(argv)
    report = doctor() if options.command == "doctor" else _audit(options.target)
    if options.html is not None:
      _write(report, options.html)
  except MpjaxError as error:
    sys.stderr.write(f"{error}\n")
    return 2
  sys.stdout.write(f"{report.to_json() if options.json else report}\n")
  return 0


def _parser() -> _Parser:
  parser = _Parser(prog=_COMMAND, description="Tools for mixed precision in JAX.")
  commands = parser.add_subparsers(dest="command", required=True, metavar="command")
  about = {
    "doctor": "devices, versions and settings, and the policy that fits",
    "audit": "which precision each operation of a function gets, and where it leaks",
  }
  for name, text in about.items():
    command = commands.add_parser(name, help=text, description=text)
    if name == "audit":
      command.add_argument("target", metavar="module:function", help=_TARGET)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("--html", metavar="PATH", help="also write a page of HTML")
  return parser


def _write(report: Report, path: str) -> None:
  try:
    report.to_html(pathlib.Path(path))
  except OSError as error:
    raise MpjaxValueError(
      f"{_COMMAND} --html",
      expected="a path of a file that can be written",
      got=f"{path!r}: {error.strerror}",
      fix="Name a file in a folder that exists.",
    ) from error


def _audit(target: str) -> Report:
  where = f"{_COMMAND} audit {target}"
  fn, args, kwargs = _call_of(target, where)
  audit: Any = mpjax.audit
  return _of_user(lambda: audit(fn)(*args, **kwargs), where, "a function that can be traced")


def _call_of(target: str, where: str) -> tuple[Function, tuple[Any, ...], Mapping[str, Any]]:
  """Returns the function that a target names, and its arguments."""
  module_name, colon, name = target.partition(":")
  if not colon or not module_name or not name:
    raise MpjaxValueError(
      where, expected=_TARGET, got=repr(target), fix="Write for example my_project.train:audited."
    )
  if os.getcwd() not in sys.path:  # As with `python -P -m mpjax`.
    sys.path.insert(0, os.getcwd())
  module = _imported(module_name, where)
  function = getattr(module, name, None)
  if not callable(function):
    raise MpjaxValueError(
      where,
      expected=_TARGET,
      got=f"no function {name!r} in {module_name}" if function is None else repr(function),
      fix=f"Define def {name}(): return fn, (arg, ...) in {module_name}; arguments may be "
      "jax.ShapeDtypeStruct.",
    )
  found = _of_user(function, where, "a function that can be called without arguments")
  fits = isinstance(found, tuple) and len(found) in (2, 3)
  fn, args, kwargs = (*found, {})[:3] if fits else (None, None, None)
  if not (callable(fn) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)):
    raise MpjaxTypeError(
      where,
      expected="(fn, args) or (fn, args, kwargs): a function, a tuple and a dict",
      got=f"{name}() returned {_shape(found)}",
      fix="Write return fn, (arg,): with the comma, also for one argument.",
    )
  return fn, tuple(args), kwargs


def _imported(name: str, where: str) -> Any:
  def call() -> Any:
    try:
      return importlib.import_module(name)
    except ModuleNotFoundError as error:
      if error.name is None or not f"{name}.".startswith(f"{error.name}."):
        raise  # The module is there, and imports another one that is not.
      raise MpjaxValueError(
        where,
        expected="a module that can be imported",
        got=str(error),
        fix="Run it in the folder that holds the module, or name that in PYTHONPATH.",
      ) from error

  return _of_user(call, where, "a module that can be imported")


def _shape(found: object) -> str:
  if not isinstance(found, tuple):
    return f"a {type(found).__name__}"
  return f"({', '.join(type(x).__name__ for x in found)})"


def _of_user(call: Callable[[], Any], where: str, expected: str) -> Any:
  """Returns what code of the user returns; what it raises becomes an error that says where."""
  try:
    return call()
  except MpjaxError:
    raise
  except Exception as error:
    line = line_of_user(error)
    raise MpjaxValueError(
      where,
      expected=expected,
      got=f"{type(error).__name__}: {error} ({line})",
      fix="Run that line in Python to see the traceback.",
    ) from error


if __name__ == "__main__":
  sys.exit(main())
