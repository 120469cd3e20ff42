"""Prints the names of all primitives that JAX registers, as JSON: two lists.

python -m tests.registered_primitives

The first are those that exist once every public module of JAX and ours are imported, but for
Pallas, Mosaic and Thunky: most of theirs are instructions of a kernel or an executable. The second
are those after `import jax.experimental.pallas` too. In a process of its own, since a test may make
primitives as well.
"""

import gc
import importlib
import json
import pkgutil
import warnings
from collections.abc import Iterable, Iterator

import jax
from jax.extend.core import Primitive

NOT_IMPORTED = ("_src", "collect_profile", "jax2tf", "mosaic", "pallas", "thunky", "tools")
"""Internals; scripts; what needs TensorFlow; kernels and the steps of an executable."""


def alive() -> set[str]:
  """Returns the names of the primitives that exist now."""
  return {thing.name for thing in gc.get_objects() if isinstance(thing, Primitive)}


def modules(folders: Iterable[str], prefix: str) -> Iterator[str]:
  """Yields the names of modules without importing any."""
  folders = list(folders)
  for module in pkgutil.iter_modules(folders):
    if module.name not in NOT_IMPORTED:
      yield prefix + module.name
      if module.ispkg:
        inside = [f"{folder}/{module.name}" for folder in folders]
        yield from modules(inside, f"{prefix}{module.name}.")


def registered() -> tuple[set[str], set[str]]:
  """Returns the two sets."""
  warnings.simplefilter("ignore")  # Modules that are to go soon say so.
  for name in modules(jax.__path__, "jax."):
    try:
      importlib.import_module(name)
    except ImportError:  # It needs a package that is not installed.
      continue
  importlib.import_module("mpjax._autocast.autocast")
  importlib.import_module("mpjax._optim.scaled")
  before = alive()
  importlib.import_module("jax.experimental.pallas")
  return before, alive()


if __name__ == "__main__":
  print(json.dumps([sorted(names) for names in registered()]))
