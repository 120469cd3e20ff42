"""What selects the operations of one module in a rule: for Linen, NNX and `mpjax.autocast`."""

import re
from collections.abc import Collection, Sequence

from mpjax._core.rules import Rule
from mpjax._jaxprs.autocast.scopes import PREFIX
from mpjax._jaxprs.locations import Location


def named_scopes(where: Location) -> tuple[str, ...]:
  """Returns the named scopes of an operation, without the marks of policies."""
  return tuple(name for name in where.scopes if not name.startswith(PREFIX))


def prefixes(names: Sequence[str]) -> set[str]:
  """Returns the paths of named scopes and of those around them: "", "Net" and "Net/up"."""
  return {"/".join(names[:depth]) for depth in range(len(names) + 1)}


def written(path: object) -> str:
  """Returns the path of a rule as one writes it."""
  return f'"{path}"' if isinstance(path, str) else repr(path)


def selector(path: str, scopes: Collection[str]) -> str | re.Pattern[str]:
  """Returns what selects a path, and none else."""
  # Without what `mpjax.with_policy` does not count, if possible: the class of a Flax model, and
  # the method in "Net/Net.encode/Dense_0" or "Net/rnn/cell.scan_fn/cell/hi". What is around all
  # other paths is the root of a model, which is "" there.
  others = {f"{other}/" for other in scopes if other not in ("", path)}
  if path and others and all(other.startswith(f"{path}/") for other in others):
    return re.compile(f"({re.escape(path)})?")
  names = path.split("/")
  methods = [i for i, name in enumerate(names) if _is_method(name)]
  inside = names[methods[-1] + 1 :] if methods else []
  for glob in (f"**/{'/'.join(inside or names[1:] or names)}", f"**/{path}", path):
    if _selects_only(glob, path, scopes):
      return glob
  return re.compile(re.escape(path))


def _selects_only(glob: str, path: str, scopes: Collection[str]) -> bool:
  try:
    rule = Rule("float32", path=glob)
  except ValueError:  # A name with brackets is not the glob that it looks like.
    return False
  return all(rule.matches(None, other) == _is_same(path, other) for other in scopes)


def _is_method(name: str) -> bool:
  return name.partition(".")[2].isidentifier()


def _is_same(path: str, other: str) -> bool:
  """Whether two paths are of one module: JAX writes another in the backward pass of a scan."""
  # That is "cell.scan_fn/cell/hi", without what is around the scan.
  return path == other or (path.endswith(f"/{other}") and _is_method(other.partition("/")[0]))
