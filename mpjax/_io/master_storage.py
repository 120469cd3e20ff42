"""Masters that were saved in another form than a target has them in.

A form is float32, an int16 remainder, or, in files of the time before, a remainder of which a 17th
bit was in an array of its own, 8 to a byte.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxValueError
from mpjax._core.paths import path_text
from mpjax._core.types import Array, Leaf, NumpyArray, PyTree
from mpjax.transforms._split import bounded, join, split
from mpjax.transforms._state import MasterWeightsState

Leaves = Mapping[str, jax.ShapeDtypeStruct]
"""Leaves by path."""


class Crossing(NamedTuple):
  """A master that was saved in another form.

  Args:
    saved: what was saved of it, by path: one array or two.
    suffix: the path of its parameter in the tree of the parameters.
  """

  saved: dict[str, jax.ShapeDtypeStruct]
  suffix: str


def crossings(target: PyTree, wanted: Leaves, stored: Mapping[str, Leaf]) -> dict[str, Crossing]:
  """Returns the masters of `target`, by path, that are in another form in `stored`."""
  result = {}
  states = jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_state)
  for root in (f"{path_text(path)}/master".lstrip("/") for path, x in states if _is_state(x)):
    for path, want in wanted.items():
      if path != root and not path.startswith(f"{root}/"):
        continue
      suffix = path.removeprefix(root)
      both = (f"{root}/remainder{suffix}", f"{root}/parity{suffix}")
      names = [path] if path in stored else [name for name in both if name in stored]
      dtypes = {str(getattr(x, "dtype", "")) for x in (want, stored.get(path))}
      if names and (path not in stored or dtypes == {"float32", "int16"}):
        saved = [jax.ShapeDtypeStruct(stored[name].shape, stored[name].dtype) for name in names]
        saved[0] = want.update(dtype=saved[0].dtype)
        result[path] = Crossing(dict(zip(names, saved, strict=True)), suffix.lstrip("/"))
  return result


def cross(
  leaves: Mapping[str, Leaf], crossed: Mapping[str, Crossing], wanted: Leaves, where: str
) -> dict[str, Leaf]:
  """Returns leaves as the target stores them.

  Raises:
    MpjaxValueError: a bfloat16 parameter is not there, or not one alone can be it; or it is not the
      rounded master, which could then not be split.
  """
  result = dict(leaves)
  for path, one in crossed.items():
    master, *parity = (result.pop(name) for name in one.saved)
    if parity or master.dtype != wanted[path].dtype:
      master, param = jnp.asarray(master), _param(leaves, one, master.shape, where)
      if parity:
        master = jnp.asarray(_unpacked(*map(np.asarray, (master, parity[0], param))))
      if wanted[path].dtype == jnp.float32:
        master = join(param, master)
      elif master.dtype == jnp.float32:
        master = _split(master, param, path, where)
    result[path] = master
  return result


def _param(leaves: Mapping[str, Leaf], one: Crossing, shape: tuple[int, ...], where: str) -> Array:
  """Returns the only array that can be the parameter of a master, by its path."""
  candidates = [
    x
    for path, x in leaves.items()
    if (path == one.suffix or path.endswith(f"/{one.suffix}".rstrip("/")) or not one.suffix)
    and getattr(x, "dtype", None) == jnp.bfloat16
    and x.shape == shape
  ]
  if len(candidates) != 1:
    raise MpjaxValueError(
      where,
      expected="the bfloat16 parameters beside the masters, which are split over both",
      got=f"none, or several, for {next(iter(one.saved))}",
      fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
      '{"params": params, "opt_state": opt_state}.',
    )
  return jnp.asarray(candidates[0])


def _split(master: Array, param: Array, path: str, where: str) -> Array:
  """Returns the remainder of a master. One half-way between two parameters may be an ulp less."""
  rest = split(master, param)
  back, number = (np.asarray(x) for x in (join(param, rest), bounded(master)))
  is_near = np.abs(back - number) <= np.spacing(np.abs(number))
  if not np.all(is_near | (back == number) | np.isnan(number)):
    raise MpjaxValueError(
      where,
      expected="the parameters that belong to the masters, which are split over both",
      got=f"others than the rounded masters at {path}",
      fix="Restore into a state of storage='float32' first, and take the parameters from "
      "policy.cast_to_param(mpjax.master_params(opt_state, params)).",
    )
  return rest


def _unpacked(low: NumpyArray, parity: NumpyArray, param: NumpyArray) -> NumpyArray:
  """Returns the remainder of the lower 16 bits of a master and, packed, the bit above them."""
  last = low.shape[-1] if low.shape else 1
  bit = np.unpackbits(parity, axis=-1, count=last).reshape(low.shape)
  odd = param.view(np.uint16) & 1
  apart = low.view(np.uint16).astype(np.int32) + ((bit ^ odd).astype(np.int32) << 16)
  apart = np.where(apart < 2**16, apart, apart - 2**17)
  # The bit above was not reliable near a bfloat16 number, where it changes.
  is_near = np.abs(low.astype(np.int32)) < 2**14
  return np.clip(np.where(is_near, low, apart), -(2**15), 2**15 - 1).astype(np.int16)


def _is_state(x: object) -> bool:
  return isinstance(x, MasterWeightsState)
