"""Writes the small inventories beside it, with which the site is built without a network.

Each holds the few names of another library that our pages lead to. Its real inventory is read
where it can be reached; where it cannot, addresses are those of the patterns below.

    python docs/inventories/make.py
"""

import pathlib
import urllib.error
import urllib.request
import zlib
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent


class Library(NamedTuple):
  """A library: where its documentation is, and role and page of the names that we need.

  In a page, `$` is the name.
  """

  url: str
  names: dict[tuple[str, str], str]


def library(url: str, **pages: str) -> Library:
  """Returns a library; `pages` has for each role lines of a page and the names on it."""
  names = {}
  for role, lines in pages.items():
    for line in lines.strip().splitlines():
      page, *found = line.split()
      names.update({(role, name): page for name in found})
  return Library(url, names)


LIBRARIES = {
  "python": library(
    "https://docs.python.org/3/",
    **{
      "class": """
        library/collections.abc.html collections.abc.Callable collections.abc.Hashable
        library/collections.abc.html collections.abc.Iterable collections.abc.Iterator
        library/collections.abc.html collections.abc.Mapping collections.abc.Sequence
        library/collections.html collections.Counter
        library/contextlib.html contextlib.AbstractContextManager
        library/functions.html bool float int type
        library/os.html os.PathLike
        library/pathlib.html pathlib.Path
        library/re.html re.Pattern
        library/stdtypes.html dict list object str tuple
      """,
      "data": """
        library/typing.html typing.Any typing.Literal
        library/constants.html None
      """,
      "exception": """
        library/exceptions.html AssertionError Exception RuntimeError TypeError ValueError
      """,
    },
  ),
  "numpy": library(
    "https://numpy.org/doc/stable/",
    **{"class": "reference/generated/$.html numpy.dtype numpy.ndarray"},
  ),
  "jax": library(
    "https://docs.jax.dev/en/latest/",
    **{
      "class": """
        _autosummary/$.html jax.Array jax.ShapeDtypeStruct jax.custom_jvp jax.custom_vjp
        jax.lax.html jax.lax.DotAlgorithmPreset jax.lax.Precision
        jax.stages.html jax.stages.Compiled
      """,
      "function": """
        _autosummary/$.html jax.checkpoint jax.devices jax.eval_shape jax.grad jax.jit jax.jvp
        _autosummary/$.html jax.lax.cond jax.lax.scan jax.make_jaxpr jax.named_scope jax.pmap
        _autosummary/$.html jax.nn.relu jax.numpy.einsum jax.numpy.where jax.shard_map
        _autosummary/$.html jax.tree.leaves jax.tree.map jax.value_and_grad jax.vjp jax.vmap
      """,
    },
  ),
  "flax": library(
    "https://flax.readthedocs.io/en/latest/",
    **{
      "class": """
        api_reference/flax.nnx/module.html flax.nnx.Module
        api_reference/flax.nnx/training/optimizer.html flax.nnx.optimizer.Optimizer
      """,
      "function": """
        api_reference/flax.nnx/transforms.html flax.nnx.jit flax.nnx.scan flax.nnx.value_and_grad
      """,
    },
  ),
  "flax_linen": library(
    "https://flax-linen.readthedocs.io/en/latest/",
    **{
      "class": "api_reference/flax.linen/module.html flax.linen.Module",
      "method": """
        api_reference/flax.linen/module.html flax.linen.Module.apply flax.linen.Module.bind
        api_reference/flax.linen/module.html flax.linen.Module.init flax.linen.Module.tabulate
        api_reference/flax.linen/module.html flax.linen.Module.init_with_output
        api_reference/flax.linen/module.html flax.linen.Module.lazy_init
      """,
    },
  ),
  "optax": library(
    "https://optax.readthedocs.io/en/latest/",
    **{
      "class": """
        api/transformations.html optax.GradientTransformation
        api/transformations.html optax.GradientTransformationExtraArgs
      """,
      "function": "api/apply_updates.html optax.apply_updates",
    },
  ),
}


def main() -> None:
  """Writes all inventories and says where each comes from."""
  for name, found in LIBRARIES.items():
    try:
      entries, source = reduced(real(found.url), found), found.url
    except (urllib.error.URLError, TimeoutError) as error:
      entries, source = written(found), f"the patterns of this script ({error})"
    missing = len(found.names) - len(entries)
    (FOLDER / f"{name}.inv").write_bytes(inventory(name, entries))
    print(f"{name}: {len(entries)} names from {source}" + f", {missing} missing" * bool(missing))


def real(url: str) -> dict[tuple[str, str], str]:
  """Returns the page of each name of Python in the inventory of a site."""
  with urllib.request.urlopen(f"{url}objects.inv", timeout=20) as response:
    data = response.read()
  lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
  found = {}
  for line in lines:
    name, role, _, page = line.split(maxsplit=4)[:4]
    if role.startswith("py:"):
      found[role.removeprefix("py:"), name] = page
  return found


def reduced(entries: dict[tuple[str, str], str], library: Library) -> dict[tuple[str, str], str]:
  """Returns the entries whose names we need, in whatever role the library has them."""
  names = {name for _, name in library.names}
  return {key: page for key, page in entries.items() if key[1] in names}


def written(library: Library) -> dict[tuple[str, str], str]:
  """Returns the entries of the patterns."""
  return {
    (role, name): f"{page.replace('$', name)}#$" for (role, name), page in library.names.items()
  }


def inventory(project: str, entries: dict[tuple[str, str], str]) -> bytes:
  """Returns an inventory in the second format of Sphinx."""
  head = (
    f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    "# The remainder of this file is compressed using zlib.\n"
  )
  lines = [f"{name} py:{role} 1 {page} -\n" for (role, name), page in sorted(entries.items())]
  return head.encode() + zlib.compress("".join(lines).encode(), 9)


if __name__ == "__main__":
  main()
