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
  """Returns masters that are float32 where `stored` has a remainder, or the other way round.

  By path, each with the path of its parameter in the tree of the parameters. Raises where masters
  were saved as 17 bits.
  """
  result = {}
  for place, _ in nodes_with_path(target, MasterWeightsState):
    root = f"{place}/master".lstrip("/")
    for path in (path for path in wanted if f"{path}/".startswith(f"{root}/")):
      suffix = path.removeprefix(root)
      if path not in stored and f"{root}/parity{suffix}" in stored:
        raise MpjaxValueError(
          where,
          expected="split masters as int16 remainders",
          got=f"two arrays of their 17 bits, remainder and parity, at {root}",
          fix='Restore it with the version that saved it into a state of storage="float32", save '
          "that, and restore it here.",
        )
      dtypes = {str(getattr(x, "dtype", "")) for x in (wanted[path], stored.get(path))}
      if dtypes == {"float32", "int16"}:
        result[path] = suffix.lstrip("/")
  return result


def cross(leaves: Mapping[str, Leaf], crossed: Mapping[str, str], where: str) -> dict[str, Leaf]:
  """Returns leaves as the target stores them; raises without the parameters that belong to them."""
  result = dict(leaves)
  for path, suffix in crossed.items():
    master = jnp.asarray(leaves[path])
    params = [
      jnp.asarray(x)
      for other, x in leaves.items()
      if not suffix or f"/{other}".endswith(f"/{suffix}")
      if getattr(x, "dtype", None) == jnp.bfloat16 and x.shape == master.shape
    ]
    if len(params) != 1:
      raise MpjaxValueError(
        where,
        expected="the bfloat16 parameters beside the masters, which are split over both",
        got=f"none, or several, for {path}",
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
