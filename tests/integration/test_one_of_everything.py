"""What Linen and NNX share is written once: no function twice, and one precedence of policies."""

import inspect
import pathlib
import types

import mpjax

LIBRARY = pathlib.Path(mpjax.__file__).parent


def functions(*folders):
  """Yields the functions in some folders of the library, nested ones too, as compiled code."""
  for path in sorted(path for folder in folders for path in (LIBRARY / folder).rglob("*.py")):
    # Without docstrings.
    codes = [compile(path.read_text(), path.relative_to(LIBRARY), "exec", optimize=2)]
    for code in codes:
      codes.extend(x for x in code.co_consts if isinstance(x, types.CodeType))
      is_function = code.co_flags & inspect.CO_OPTIMIZED
      if is_function and not code.co_name.startswith("<"):
        yield f"{code.co_filename}::{code.co_name}", code


def arithmetic(code):
  """Returns what a function does, whatever its own names are: those that it binds are numbers."""
  consts = [arithmetic(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
  return code.co_code, code.co_names, tuple(consts)


def test_no_function_is_written_twice_for_linen_and_nnx():
  first, same = {}, []
  for name, function in functions("linen", "nnx"):
    other = first.setdefault(arithmetic(function), name)
    if other != name:
      same.append(f"{name} is {other}")
  assert same == []


def test_what_goes_before_what_is_known_in_one_place():
  # A policy of a module's own, rules and the module around: one function reads them.
  reads = [
    name for name, code in functions("_core", "linen", "nnx") if "first_match" in code.co_names
  ]
  assert reads == ["_core/rules.py::resolve_policy"]
