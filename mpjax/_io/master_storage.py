"""Masters that were saved in one storage, for a target that has them in the other."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxValueError
from mpjax._core.paths import path_text
from mpjax._core.types import Array, Leaf, PyTree
from mpjax.transforms._masters import is_split
from mpjax.transforms._split import SplitMaster, join, split
from mpjax.transforms._state import MasterWeightsState

Wanted = Mapping[str, jax.ShapeDtypeStruct]
"""Leaves by path."""


class Crossing(NamedTuple):
  """A master that was saved in the other storage.

  Args:
    master: its path in float32.
    remainder: the path of its lower 16 bits; or of all of it, where it is of a float16 parameter.
    parity: the path of its 17th bit, or None of such a one.
    suffix: the path of its parameter in the tree of the parameters.
    to_split: whether it was saved in float32 and the target splits, or the other way round.
  """

  master: str
  remainder: str
  parity: str | None
  suffix: str
  to_split: bool


def crossings(target: PyTree, wanted: Wanted, names: Collection[str]) -> list[Crossing]:
  """Returns the masters of `target` that were saved, as `names` say, in the other storage."""
  found = []
  for key_path, state in jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_state):
    if not _is_state(state):
      continue
    root = f"{path_text(key_path)}/master".lstrip("/")
    to_split = is_split(state)
    inside = f"{root}/remainder" if to_split else root
    for path in wanted:
      if path == inside or path.startswith(f"{inside}/"):
        suffix = path.removeprefix(inside)
        master, remainder, parity = (
          root + suffix,
          f"{root}/remainder{suffix}",
          f"{root}/parity{suffix}",
        )
        if path not in names and (master if to_split else remainder) in names:
          bits = parity if parity in (wanted if to_split else names) else None
          found.append(Crossing(master, remainder, bits, suffix.lstrip("/"), to_split))
  return found


def as_saved(wanted: Wanted, crossed: Collection[Crossing]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the leaves of the target as they are in the storage that was saved."""
  saved = dict(wanted)
  for one in crossed:
    if one.to_split:
      saved[one.master] = saved.pop(one.remainder).update(dtype=jnp.float32)
      saved.pop(one.parity or "", None)
      continue
    want = saved.pop(one.master)
    saved[one.remainder] = want if one.parity is None else want.update(dtype=jnp.int16)
    if one.parity is not None:
      last = want.shape[-1] if want.shape else 1
      shape = (*want.shape[:-1], -(-last // 8))
      saved[one.parity] = jax.ShapeDtypeStruct(shape, jnp.uint8)
  return saved


def cross(leaves: Mapping[str, Leaf], crossed: Collection[Crossing], where: str) -> dict[str, Leaf]:
  """Returns leaves as the target stores them.

  Raises:
    MpjaxValueError: a bfloat16 parameter is not there, or not one alone can be it; or it is not the
      rounded master, which could then not be split.
  """
  result = dict(leaves)
  for one in crossed:
    held = result.pop(one.master if one.to_split else one.remainder)
    if one.parity is None:
      result[one.remainder if one.to_split else one.master] = held
      continue
    held, param = jnp.asarray(held), _param(leaves, one, held.shape, where)
    if not one.to_split:
      parity = jnp.asarray(result.pop(one.parity))
      result[one.master] = jax.jit(join)(param, SplitMaster(held, parity))
      continue
    (result[one.remainder], result[one.parity]), same = jax.jit(_split_and_compare)(held, param)
    if not same:
      raise MpjaxValueError(
        where,
        expected="the parameters that belong to the masters, which are split over both",
        got=f"others than the rounded masters at {one.master}",
        fix="Restore into a state of storage='float32' first, and take the parameters from "
        "policy.cast_to_param(mpjax.master_params(opt_state, params)).",
      )
  return result


def _param(leaves: Mapping[str, Leaf], one: Crossing, shape: tuple[int, ...], where: str) -> Array:
  """Returns the only array that can be the parameter of a master, by its path."""
  found = [
    x
    for path, x in leaves.items()
    if (path == one.suffix or path.endswith(f"/{one.suffix}".rstrip("/")) or not one.suffix)
    and getattr(x, "dtype", None) == jnp.bfloat16
    and x.shape == shape
  ]
  if len(found) != 1:
    raise MpjaxValueError(
      where,
      expected="the bfloat16 parameters beside the masters, which are split over both",
      got=f"none, or several, for {one.master if one.to_split else one.remainder}",
      fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
      '{"params": params, "opt_state": opt_state}.',
    )
  return jnp.asarray(found[0])


def _split_and_compare(master: Array, param: Array) -> tuple[SplitMaster, Array]:
  """Returns a master split from its parameter, and whether the two give it again."""
  held = split(master, param)
  back, bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (join(param, held), master))
  return held, jnp.all(jnp.logical_or(back == bits, jnp.isnan(master)))


def _is_state(x: object) -> bool:
  return isinstance(x, MasterWeightsState)
