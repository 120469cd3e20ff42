"""Masters that were saved in one storage, for a target that has them in the other."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxValueError
from mpjax._core.paths import path_text
from mpjax._core.types import Array, Leaf, PyTree
from mpjax.transforms._split import bounded, join, split
from mpjax.transforms._state import MasterWeightsState

T = TypeVar("T")


def nodes_with_path(tree: PyTree, kind: type[T]) -> Iterator[tuple[str, T]]:
  """Yields the nodes of a tree that are a `kind`, each with its path."""
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
  yield from ((path_text(path), x) for path, x in nodes if isinstance(x, kind))


def crossings(
  target: PyTree, wanted: Mapping[str, Leaf], stored: Mapping[str, Leaf], where: str
) -> dict[str, str]:
  """Returns the paths of masters in another form than in `stored`, each with its parameter's."""
  result = {}
  for place, _ in nodes_with_path(target, MasterWeightsState):
    root = f"{place}/master".lstrip("/")
    if any(f"{path}/".startswith(f"{root}/parity/") and path not in wanted for path in stored):
      raise MpjaxValueError(
        where,
        expected="split masters as int16 remainders",
        got=f"two arrays of their 17 bits, remainder and parity, at {root}",
        fix='Restore it with the version that saved it into a state of storage="float32", save '
        "that, and restore it here.",
      )
    inside = [path for path in wanted if f"{path}/".startswith(f"{root}/")]
    suffixes = {path: path.removeprefix(root).lstrip("/") for path in inside}
    halves = {path for path in inside if _params(wanted, suffixes[path], wanted[path].shape)}
    both = {
      path: {str(getattr(x.get(path), "dtype", "")) for x in (wanted, stored)} for path in inside
    }
    crossed = {path for path in inside if both[path] == {"float32", "int16"}}
    # A storage has all masters of bfloat16 in one form: a single leaf of the other is damage.
    result |= {path: suffixes[path] for path in crossed if halves <= crossed}
  return result


def _params(leaves: Mapping[str, Leaf], suffix: str, shape: tuple[int, ...]) -> list[Leaf]:
  """Returns what can be the parameter of a master, by its path."""
  return [
    x
    for path, x in leaves.items()
    if not suffix or f"/{path}".endswith(f"/{suffix}")
    if getattr(x, "dtype", None) == jnp.bfloat16 and x.shape == shape
  ]


def cross(leaves: Mapping[str, Leaf], crossed: Mapping[str, str], where: str) -> dict[str, Leaf]:
  """Returns leaves as the target stores them; raises without the parameters that belong to them."""
  result = dict(leaves)
  for path, suffix in crossed.items():
    master = jnp.asarray(leaves[path])
    params = list(map(jnp.asarray, _params(leaves, suffix, master.shape)))
    if len(params) != 1:
      raise MpjaxValueError(
        where,
        expected="the bfloat16 parameters beside the masters, which are split over both",
        got=f"none, or several, for the one at {path}",
        fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
        '{"params": params, "opt_state": opt_state}.',
      )
    if master.dtype == jnp.int16:
      result[path] = join(params[0], master)
    else:
      result[path] = split(master, params[0])
      _check_split(master, join(params[0], result[path]), path, where)
  return result


def _check_split(master: Array, joined: Array, path: str, where: str) -> None:
  """Raises unless a master was split. Half-way between two parameters it may be an ulp less."""
  number, back = (np.asarray(x) for x in (bounded(master), joined))
  is_near = np.abs(back - number) <= np.spacing(np.abs(number))
  if not np.all(is_near | (back == number) | np.isnan(number)):
    raise MpjaxValueError(
      where,
      expected="the parameters that belong to the masters, which are split over both",
      got=f"others than the rounded masters at {path}",
      fix="Restore into a state of storage='float32' first, and take the parameters from "
      "policy.cast_to_param(mpjax.master_params(opt_state, params)).",
    )
