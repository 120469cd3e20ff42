"""What selects the operations of one module in a rule: for Linen, NNX and `mpjax.autocast`."""

import re
from collections.abc import Collection

from mpjax._core.rules import Rule


def prefixes(path: str) -> set[str]:
  """Returns a path and those around it: "", "Net" and "Net/up"."""
  names = path.split("/")
  return {"/".join(names[:depth]) for depth in range(len(names) + 1)}


def written(path: object) -> str:
  """Returns the path of a rule as one writes it."""
  return f'"{path}"' if isinstance(path, str) else repr(path)


def selector(path: str, scopes: Collection[str]) -> str | re.Pattern[str]:
  """Returns what selects a path, and none else."""
  # What is around all other paths is the root of a model, which is "" for `mpjax.with_policy`. That
  # counts neither the class of the model nor a module that only calls what another one has: the
  # last names decide.
  others = {f"{other}/" for other in scopes if other not in ("", path)}
  if path and others and all(other.startswith(f"{path}/") for other in others):
    return re.compile(f"({re.escape(path)})?")
  names = path.split("/")
  for glob in (*(f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names)))), path):
    if _selects_only(glob, path, scopes):
      return glob
  return re.compile(re.escape(path))


def _selects_only(glob: str, path: str, scopes: Collection[str]) -> bool:
  try:
    rule = Rule("float32", path=glob)
  except ValueError:  # A name with brackets is not the glob that it looks like.
    return False
  # JAX moves a constant out of a scan without the scopes around that: it is in a tail of the path.
  others = (other for other in scopes if not path.endswith(f"/{other}"))
  return all(rule.matches(None, other) == (path == other) for other in others)
