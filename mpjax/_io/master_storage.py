"""Masters that were saved in one storage, for a target that has them in the other."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxValueError
from mpjax._core.paths import path_text
from mpjax._core.types import Array, Leaf, PyTree
from mpjax.transforms._split import SplitMaster, join, rounded, split
from mpjax.transforms._state import MasterWeightsState

Wanted = Mapping[str, jax.ShapeDtypeStruct]
"""Leaves by path."""


class Crossing(NamedTuple):
  """A master that was saved in the other storage.

  Args:
    master: the path of its float32 array, or of its lower 16 bits.
    parity: the path of the 17th bits of what is split.
    suffix: the path of its parameter in the tree of the parameters.
    to_split: whether it was saved in float32 and is to be split, or the other way round.
  """

  master: str
  parity: str
  suffix: str
  to_split: bool


def crossings(target: PyTree, wanted: Wanted, names: Collection[str]) -> list[Crossing]:
  """Returns the masters of `target` that were saved, as `names` say, in the other storage."""
  found = []
  for key_path, state in jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_state):
    if not _is_state(state):
      continue
    place = path_text(key_path)
    master, parity = (f"{place}/{field}".lstrip("/") for field in ("master", "parity"))
    for path in wanted:
      if path == master or path.startswith(f"{master}/"):
        suffix = path.removeprefix(master)
        other = parity + suffix
        if path in names and (other in wanted) != (other in names):
          found.append(Crossing(path, other, suffix.lstrip("/"), other in wanted))
  return found


def as_saved(wanted: Wanted, crossed: Collection[Crossing]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the leaves of the target as they are in the storage that was saved."""
  saved = dict(wanted)
  for one in crossed:
    want = wanted[one.master]
    if one.to_split:
      del saved[one.parity]
      saved[one.master] = want.update(dtype=jnp.float32)
    else:
      saved[one.master] = want.update(dtype=jnp.int16)
      last = want.shape[-1] if want.shape else 1
      shape = (*want.shape[:-1], -(-last // 8))
      saved[one.parity] = jax.ShapeDtypeStruct(shape, jnp.uint8)
  return saved


def cross(leaves: Mapping[str, Leaf], crossed: Collection[Crossing], where: str) -> dict[str, Leaf]:
  """Returns leaves as the target stores them.

  Raises:
    MpjaxValueError: there are no parameters that what is split belongs to, or not one alone; or
      they are not the rounded masters, which could then not be split.
  """
  result = dict(leaves)
  for one in crossed:
    param = _param(leaves, one)
    if one.to_split:
      master = jnp.asarray(leaves[one.master])
      held, same = _split_checked(master, param)
      if not same:
        raise MpjaxValueError(
          where,
          expected="the parameters that belong to the masters, which are split over both",
          got=f"others than the rounded masters at {one.master}",
          fix="Restore into a state of storage='float32' first, and take the parameters from "
          "policy.cast_to_param(mpjax.master_params(opt_state, params)).",
        )
      result[one.master], result[one.parity] = held
    elif param is None:
      raise MpjaxValueError(
        where,
        expected="the bfloat16 parameters beside the masters that were split from them",
        got=f"none, or several, for {one.master}",
        fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
        '{"params": params, "opt_state": opt_state}.',
      )
    else:
      held = SplitMaster(jnp.asarray(leaves[one.master]), jnp.asarray(leaves[one.parity]))
      result[one.master] = jax.jit(join)(param, held)
      del result[one.parity]
  return result


def _param(leaves: Mapping[str, Leaf], one: Crossing) -> Array | None:
  """Returns the only array that can be the parameter of a master, by its path; None if none is."""
  found = [
    x
    for path, x in leaves.items()
    if (path == one.suffix or path.endswith(f"/{one.suffix}".rstrip("/")) or not one.suffix)
    and getattr(x, "dtype", None) == jnp.bfloat16
    and x.shape == leaves[one.master].shape
  ]
  return jnp.asarray(found[0]) if len(found) == 1 else None


def _split_checked(master: Array, param: Array | None) -> tuple[SplitMaster, bool]:
  """Returns a master split from its parameter, and whether the two give it again."""

  def both(master: Array, param: Array) -> tuple[SplitMaster, Array]:
    held = split(master, param)
    back, bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (join(param, held), master))
    return held, jnp.all(jnp.logical_or(back == bits, jnp.isnan(master)))

  held, same = jax.jit(both)(master, rounded(master) if param is None else param)
  return held, bool(np.asarray(same))


def _is_state(x: object) -> bool:
  return isinstance(x, MasterWeightsState)
