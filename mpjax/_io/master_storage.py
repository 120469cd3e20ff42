"""Masters of `mpjax.master_weights` that were saved in the other `storage`.

With `storage="split"` a master is stored in two leaves: a bfloat16 parameter and an int16
remainder. It can only be converted if its parameter is restored with it, in one tree.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import Path, path_text
from mpjax._core.trees import in_low_precision
from mpjax._core.types import Array, KeyPath, Leaf, PyTree
from mpjax._optim.optimizer_trees import states_with_path
from mpjax._optim.states import MasterWeightsState
from mpjax._optim.step.train_state import TrainState
from mpjax._optim.wrappers.master_weights import bounded, has_no_master, join, split


def masters_to_convert(
  target: PyTree, expected: Mapping[str, Leaf], saved: Mapping[str, Leaf], where: str
) -> dict[str, str]:
  """Returns the path of each master that was saved in the other storage, with its parameter's.

  Args:
    target: the tree that is wanted.
    expected: the leaves of `target` by path.
    saved: the leaves of the checkpoint, by path.
    where: the public call, for errors.

  Raises:
    MpjaxValueError: masters were saved in 17 bits; or `target` has no parameters of these masters,
      or has them twice.
  """
  states = states_with_path(target, MasterWeightsState)
  places = [_names_of(path) for path, _ in states]
  # States of optax hold trees with the paths of parameters. The parameters are outside of all
  # states. A dict of Flax NNX has mappings in place of their classes, but all moments are below the
  # masters.
  leaves = jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_state)
  outside = {_names_of(path): x for path, x in leaves if not _is_state(x)}
  params = {
    names: x
    for names, x in outside.items()
    if not any(names[: len(place)] == place for place in places)
  }
  parameter_paths: dict[str, str] = {}
  for key_path, state in states:
    place = f"{path_text(key_path)}/master".lstrip("/")
    # Early versions saved a parity array. The target may have a parameter that is called "parity".
    prefix = f"{place}/parity/"
    if any(f"{path}/".startswith(prefix) and path not in expected for path in saved):
      raise MpjaxValueError(
        where,
        expected="split masters as int16 remainders",
        got=f"two arrays of their 17 bits, remainder and parity, at {place}",
        fix='Restore it with the version that saved it into a state of storage="float32", save '
        "that, and restore it here.",
      )
    own = jax.tree_util.tree_leaves_with_path(state.master, is_leaf=has_no_master)
    # A float32 parameter has None: it is its own master. A masked one has an `optax.MaskedNode`.
    masters = {_names_of(path): master for path, master in own if master is not None}
    # Masters in the storage of the target are compared like all leaves. The others are float32 in
    # the target and a remainder in the file, or the reverse. A leaf may be missing from either.
    changed: dict[Path, str] = {}
    for names, master in masters.items():
      path = "/".join((place, *names))
      dtypes = {str(getattr(tree.get(path), "dtype", "")) for tree in (expected, saved)}
      if not has_no_master(master) and dtypes == {"float32", "int16"}:
        changed[names] = path
    root = _root(masters, set(changed), params, place, where) if changed else None
    if root is not None:
      parameter_paths |= {path: "/".join(root + x) for x, path in changed.items()}
  return parameter_paths


def _is_state(x: object) -> bool:
  """Whether a node is the state of an optimizer, which may hold copies of the parameters."""
  library = type(x).__module__.partition(".")[0]
  # A `TrainState` holds the parameters, so the search goes on inside of it.
  return hasattr(x, "_fields") and library in ("mpjax", "optax") and not isinstance(x, TrainState)


def _names_of(path: KeyPath) -> Path:
  return tuple(path_text((key,)) for key in path)


def _root(
  masters: Mapping[Path, Leaf],
  changed: set[Path],
  params: Mapping[Path, Leaf],
  place: str,
  where: str,
) -> Path | None:
  """Returns the path of the tree of parameters that `masters` belong to; None if they are damaged.

  Raises:
    MpjaxValueError: there is no such tree, or there are several.
  """
  # Masters may belong to a part of the tree, so every node is a candidate, the leaves too.
  nodes = {path[:n] for path in params for n in range(len(path) + 1)}

  def belongs(path: Path, master: Leaf) -> bool:
    # There is a parameter of the right shape for a master, or a node for an `optax.MaskedNode`.
    if has_no_master(master):
      return path in nodes
    param = params.get(path)
    return param is not None and in_low_precision(param) and param.shape == master.shape

  roots = sorted(root for root in nodes if all(belongs(root + x, m) for x, m in masters.items()))
  arrays = [x for x, master in masters.items() if not has_no_master(master)]
  # Only masters of bfloat16 parameters are split. Others, such as those of float16, are float32
  # always.
  bfloat16 = {x for root in roots for x in arrays if params[root + x].dtype == jnp.bfloat16}
  if not bfloat16 <= changed:
    # A storage has all masters of bfloat16 parameters in one form, and here only some of them
    # changed. The comparison with the target names these.
    return None
  # Two models of one structure would both fit. Their parameters would give wrong masters.
  if len(roots) != 1 or bfloat16 != changed:
    names = listed(["/".join(root) or "the root" for root in roots]) or "none"
    raise MpjaxValueError(
      where,
      expected="one tree of bfloat16 parameters beside the split masters",
      got=f"{names} for the masters at {place}",
      fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
      '{"params": params, "opt_state": opt_state}. Restore several models one by one.',
    )
  return roots[0]


def convert_masters(
  leaves: Mapping[str, Leaf], parameter_paths: Mapping[str, str], where: str
) -> dict[str, Leaf]:
  """Returns `leaves` with masters in the other storage, by the paths of their parameters.

  Raises:
    MpjaxValueError: a parameter is not the rounded float32 master, so no remainder leads to it.
  """
  result = dict(leaves)
  for path, parameter_path in parameter_paths.items():
    master, param = jnp.asarray(leaves[path]), jnp.asarray(leaves[parameter_path])
    # The file has remainders and the target wants float32, or the reverse.
    if master.dtype == jnp.int16:
      result[path] = join(param, master)
    else:
      result[path] = _split(master, param, path, where)
  return result


def _split(master: Array, param: Array, path: str, where: str) -> Array:
  """Returns the int16 remainder of a float32 master, or raises if `param` does not belong to it."""
  # Join the parts again to check that the parameter is the rounded master.
  remainder = split(master, param)
  before, after = np.asarray(bounded(master)), np.asarray(join(param, remainder))
  # A master half-way between two parameters may become one ulp less.
  is_near = np.abs(after - before) <= np.spacing(np.abs(before))
  is_same = after == before  # for infinities
  if not np.all(is_near | is_same | np.isnan(before)):
    raise MpjaxValueError(
      where,
      expected="the parameters that belong to the split masters",
      got=f"parameters that are not the rounded masters at {path}",
      fix="Restore into a state of storage='float32' first, and take the parameters from "
      "policy.cast_to_param(mpjax.states.master_params(opt_state, params)).",
    )
  return remainder
