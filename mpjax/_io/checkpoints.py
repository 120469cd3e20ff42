"""Saved states: leaves as arrays by path, which any file format holds, and back into a tree.

The tree says which dtype, shape and sharding each leaf has, and how masters are stored.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import (
  as_array,
  check_leaves,
  convert,
  is_key,
  misfit,
  path_text,
  put,
  raw_value,
  refuse_overflow,
)
from mpjax._core.trees import in_low_precision, is_floating
from mpjax._core.types import DType, KeyPath, Leaf, NumpyArray, PyTree
from mpjax._optim.loss_scale import LossScaleState, scales_in, scaling_states
from mpjax._optim.masters import MasterWeightsState, bounded, is_hole, join, split
from mpjax._optim.train_state import TrainState

_KEY = "key:"


def to_arrays(tree: PyTree) -> dict[str, NumpyArray]:
  """Returns the leaves of `tree` as NumPy arrays by path, which any file format can hold.

  NumPy's files and msgpack know no typed keys, and NumPy's neither bfloat16 nor the 8-bit types.
  Those are stored as unsigned integers, and a tag behind an "@" in the name says what they are:
  `"params/w@bfloat16"`, `"rng@key:threefry2x32"`. `mpjax.checkpoints.restore_like` reads the tags.

  Args:
    tree: any tree of arrays, keys and Python numbers. This process must hold all of each array.

  Returns:
    One array per leaf; the parts of a path are joined by "/". What has no leaf (None, an empty
    state) is not in it.

  Raises:
    MpjaxValueError: two leaves have the same path as text.
    MpjaxTypeError: a leaf is not an array, or is traced or abstract.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> tree = {"w": jnp.ones(2, jnp.bfloat16), "rng": [jax.random.key(7)]}
  >>> arrays = mpjax.checkpoints.to_arrays(tree)
  >>> for name, array in arrays.items():
  ...   print(name, array)
  rng/0@key:threefry2x32 [0 7]
  w@bfloat16 [16256 16256]
  """
  where = "mpjax.checkpoints.to_arrays(tree)"
  leaves = leaves_by_path(tree, where)
  check_leaves(leaves, where, abstract=False)
  arrays: dict[str, NumpyArray] = {}
  for path, x in leaves.items():
    tag = ""  # For what NumPy's files know.
    if not hasattr(x, "dtype"):
      array = np.asarray(x, jnp.result_type(x))
    elif is_key(x.dtype):
      tag, array = f"{_KEY}{jax.random.key_impl(x)}", np.asarray(jax.random.key_data(x))
    else:
      array = np.asarray(x)
      if _is_registered(array.dtype):
        tag, array = array.dtype.name, array.view(_bits(array.dtype))
    name = f"{path}@{tag}" if tag else path
    if name in arrays:
      raise same_path(where, name)
    arrays[name] = array
  return arrays


def leaves_by_path(tree: PyTree, where: str) -> dict[str, Leaf]:
  """Returns the leaves of `tree`, in its order, by path; two of one path as text are an error."""
  # A path does not tell a field of a class from the key of a dict, nor a position from its digits:
  # checkpoints turn one into the other.
  if isinstance(tree, Mapping) and jax.tree_util.all_leaves([tree]):
    tree = dict(tree)  # one that JAX does not know, such as numpy.load of an npz file
  leaves: dict[str, Leaf] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    text = path_text(path)
    if text in leaves:
      raise same_path(where, text)
    leaves[text] = x
  return leaves


def same_path(where: str, name: str) -> MpjaxValueError:
  return MpjaxValueError(
    where,
    expected="leaves with different paths",
    got=f"two at {name!r}",
    fix="Rename a key that contains '/' or '@'.",
  )


def _is_registered(dtype: DType) -> bool:
  """Whether `dtype` is one that another package has added to NumPy, such as bfloat16."""
  return dtype.isbuiltin == 2


def _bits(dtype: DType) -> DType:
  return np.dtype(f"uint{8 * dtype.itemsize}")


def decode(name: str, x: Leaf) -> tuple[str, Leaf]:
  """Returns the path and the leaf behind a name and an array of `to_arrays`.

  Without a tag of ours they are what was given: a key of a tree may well hold an "@".
  """
  path, _, tag = name.rpartition("@")
  try:
    if tag.startswith(_KEY):
      return path, jax.random.wrap_key_data(jnp.asarray(x), impl=tag.removeprefix(_KEY))
    dtype = jnp.dtype(tag)
  except (TypeError, ValueError):
    return name, x
  if _is_registered(dtype) and getattr(x, "dtype", None) == _bits(dtype):
    return path, np.asarray(x).view(dtype)
  return name, x


T = TypeVar("T")


def nodes_with_path(tree: PyTree, kind: type[T]) -> Iterator[tuple[str, T]]:
  """Yields the nodes of a tree that are a `kind`, each with its path."""
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
  yield from ((path_text(path), x) for path, x in nodes if isinstance(x, kind))


def crossings(
  target: PyTree, expected: Mapping[str, Leaf], stored: Mapping[str, Leaf], where: str
) -> dict[str, str]:
  """Returns the paths of masters in another form than in `stored`, each with its parameter's."""
  result = {}
  leaves = jax.tree_util.tree_leaves_with_path(target, is_leaf=_is_state)
  params = {_keys(path): x for path, x in leaves if not _is_state(x)}
  shapes = {path: x.shape for path, x in params.items() if in_low_precision(x)}
  nodes = {path[:n] for path in params for n in range(len(path) + 1)}
  for place, state in nodes_with_path(target, MasterWeightsState):
    at = f"{place}/master".lstrip("/")
    if any(f"{path}/".startswith(f"{at}/parity/") and path not in expected for path in stored):
      raise MpjaxValueError(
        where,
        expected="split masters as int16 remainders",
        got=f"two arrays of their 17 bits, remainder and parity, at {at}",
        fix='Restore it with the version that saved it into a state of storage="float32", save '
        "that, and restore it here.",
      )
    # The tree of the parameters has one in 16 bits for each master, at the same path in it, and
    # something wherever optax has masked a master. None is the master of what has no other.
    masters = jax.tree_util.tree_leaves_with_path(state.master, is_leaf=is_hole)
    held = {_keys(path): m for path, m in masters if m is not None}
    fits = lambda x, m: x in nodes if is_hole(m) else shapes.get(x) == m.shape  # noqa: E731
    roots = sorted(root for root in nodes if all(fits(root + x, m) for x, m in held.items()))
    inside = {"/".join((at, *path)): path for path, m in held.items() if not is_hole(m)}
    dtypes = {x: {str(getattr(y.get(x), "dtype", "")) for y in (expected, stored)} for x in inside}
    crossed = {x for x in inside if dtypes[x] == {"float32", "int16"}}
    # A storage has all masters of bfloat16 in one form: a single leaf of the other is damage.
    halves = {x for x in inside for r in roots if params[r + inside[x]].dtype == jnp.bfloat16}
    if crossed and halves <= crossed:
      if len(roots) != 1 or halves < crossed:
        names = listed(["/".join(root) or "the root" for root in roots]) or "none"
        raise MpjaxValueError(
          where,
          expected="the bfloat16 parameters beside the masters, which are split over both",
          got=f"{names} for those at {at}",
          fix="Restore parameters and optimizer state in one tree, such as a mpjax.TrainState or "
          '{"params": params, "opt_state": opt_state}; models, or copies in bfloat16, one by one.',
        )
      result |= {x: "/".join(roots[0] + inside[x]) for x in crossed}
  return result


def _is_state(x: object) -> bool:
  """Whether a node is a state of an optimizer, which may hold copies of the parameters."""
  library = type(x).__module__.partition(".")[0]
  return hasattr(x, "_fields") and library in ("mpjax", "optax") and not isinstance(x, TrainState)


def _keys(path: KeyPath) -> tuple[str, ...]:
  return tuple(path_text((key,)) for key in path)


def cross(leaves: Mapping[str, Leaf], crossed: Mapping[str, str]) -> dict[str, Leaf]:
  """Returns leaves as the target stores them; raises for parameters that no master rounds to."""
  result = dict(leaves)
  for path, owner in crossed.items():
    master, param = jnp.asarray(leaves[path]), jnp.asarray(leaves[owner])
    if master.dtype == jnp.int16:
      result[path] = join(param, master)
      continue
    result[path] = split(master, param)
    # Half-way between two parameters it may be an ulp less.
    number, back = (np.asarray(x) for x in (bounded(master), join(param, result[path])))
    is_near = np.abs(back - number) <= np.spacing(np.abs(number))
    if not np.all(is_near | (back == number) | np.isnan(number)):
      raise MpjaxValueError(
        _WHERE,
        expected="the parameters that belong to the masters, which are split over both",
        got=f"others than the rounded masters at {path}",
        fix="Restore into a state of storage='float32' first, and take the parameters from "
        "policy.cast_to_param(mpjax.states.master_params(opt_state, params)).",
      )
  return result


_WHERE = "mpjax.checkpoints.restore_like(target, restored)"
_TARGET = "mpjax.checkpoints.restore_like(target)"

_Expected = Mapping[str, jax.ShapeDtypeStruct]
"""The leaves of target by path; a sharding is one that the result must have, or None."""


def restore_like(target: PyTree, restored: PyTree, *, cast: bool = False) -> PyTree:
  """Returns what was saved as a tree like `target`; nothing is cast, cut or left out silently.

  Each leaf that differs is named in an error, where Orbax and Flax round, or return what was saved.

  Leaves are found by path: names of fields, keys of dicts and positions, joined by "/". So
  `restored` may be like `target`, or may have lost its classes: what Orbax's
  `StandardCheckpointer().restore(path)` gives without a target, or
  `flax.serialization.msgpack_restore`, or the arrays of `mpjax.checkpoints.to_arrays`
  (`numpy.load` of an npz file). Or it is the path of an Orbax checkpoint: that is compared with
  `target` before anything is read, and each leaf is read straight to its devices.

  Masters of `mpjax.master_weights` that were saved in the other `storage` become those of the
  target, bit for bit, if their parameters are beside them in one tree.

  Args:
    target: the tree that is wanted, of arrays or of `jax.ShapeDtypeStruct` (`jax.eval_shape`).
    restored: what was saved, or the path of an Orbax checkpoint, a str or an `os.PathLike`.
    cast: round floating leaves to the floating dtype of `target`. Integers, booleans, complex
      numbers and keys are never cast.

  Returns:
    A tree with the structure of `target`, whose leaves are strongly typed `jax.Array`s of its
    dtypes: where `target` is committed to devices (or names a sharding) they are there, elsewhere
    they are uncommitted. So a step that was compiled for `target` is not traced again. For a typed
    key plain key data will do.

  Raises:
    MpjaxValueError: leaves are missing, left over, or of another shape or dtype; masters in another
      storage are without the parameters that belong to them; rounding makes a finite number
      infinite; the loss scale was saved under another configuration, or is no positive finite
      number; there is no checkpoint at the path.
    MpjaxTypeError: a leaf of `target` is not an array.

  >>> import jax.numpy as jnp, mpjax
  >>> saved = {"w": jnp.ones(2, jnp.float32), "b": jnp.zeros(1, jnp.float32)}
  >>> target = {"w": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(1, jnp.float32)}
  >>> mpjax.checkpoints.restore_like(target, saved, cast=True)["w"]
  Array([1, 1], dtype=bfloat16)
  """
  expected = _expected_leaves(target)
  stored, own = restored, isinstance(restored, (str, os.PathLike))
  if own:
    restored = os.fspath(restored)
    restored = restored if "://" in restored else os.path.abspath(restored)
    stored = _metadata(restored)
  leaves = leaves_by_path(stored, _WHERE)
  crossed = crossings(target, expected, leaves, _WHERE)
  saved = expected | {path: expected[path].update(dtype=leaves[path].dtype) for path in crossed}
  if own:
    restored = _read(restored, stored, target, saved, cast)
  matched = _match(target, saved, restored, cast)
  converted = {path: convert(matched[path], want.dtype) for path, want in saved.items()}
  casts = {path: (matched[path], x) for path, x in converted.items()}
  refuse_overflow(casts, "mpjax.checkpoints.restore_like(cast=True)")
  converted = cross(converted, crossed)
  placed = [put(converted[path], want.sharding, alias=own) for path, want in expected.items()]
  result = jax.tree.unflatten(jax.tree.structure(target), placed)
  _refuse_damaged_scale(result)
  return result


def _refuse_damaged_scale(result: PyTree) -> None:
  """Raises if a loss scale in `result` is no positive finite number."""
  states = [state for _, state in nodes_with_path(result, LossScaleState)]
  states += [each.state for each in scales_in(result) if each.node is not each.owner]
  for state in filter(None, states):
    scales = np.asarray(raw_value(state.scale))
    if not np.all(np.isfinite(scales) & (scales > 0)):
      raise MpjaxValueError(
        "mpjax.checkpoints.restore_like(restored)",
        expected="a positive finite loss scale",
        got=f"{scales}",
        fix="No step leaves it so, the file is damaged: restore another checkpoint, or put a "
        "scale into what was read.",
      )


def _expected_leaves(target: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
  leaves = leaves_by_path(target, _TARGET)
  check_leaves(leaves, _TARGET, abstract=True)
  # A Python number has the dtype that jit would give it.
  return {
    path: jax.ShapeDtypeStruct(
      np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x), sharding=_sharding(x)
    )
    for path, x in leaves.items()
  }


def _sharding(x: Leaf) -> jax.sharding.Sharding | None:
  """Returns where the leaf `x` of target says that it is; None if that is anywhere."""
  if isinstance(x, jax.Array):
    return x.sharding if x.committed else None
  sharding = getattr(x, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  if isinstance(sharding.mesh, jax.sharding.Mesh):
    return sharding
  # jax.eval_shape of arrays on a mesh with explicit axes knows its shape, not its devices.
  mesh = jax.sharding.get_mesh()
  if mesh.empty or mesh.abstract_mesh.shape_tuple != sharding.mesh.shape_tuple:
    raise MpjaxValueError(
      _TARGET,
      expected="shardings on devices",
      got=f"one on an abstract mesh, {dict(sharding.mesh.shape)}",
      fix="Call it inside `with jax.set_mesh(mesh)`, or pass arrays as the target.",
    )
  return jax.sharding.NamedSharding(mesh, sharding.spec)


def _metadata(path: str) -> PyTree:
  """Returns a tree like the Orbax checkpoint at `path`, of stand-ins."""
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      metadata = checkpointer.metadata(path).item_metadata
    except OSError:
      metadata = None
    if metadata is None:
      raise MpjaxValueError(
        "mpjax.checkpoints.restore_like(restored)",
        expected="the path of an Orbax checkpoint, a folder that holds _METADATA",
        got=f"{path}, which is none",
        fix="A CheckpointManager writes to directory/step/default. Read other files first: "
        "numpy.load(path), flax.serialization.msgpack_restore(bytes).",
      )
  return jax.tree.map(_stand_in, metadata.tree)


def _read(path: str, stored: PyTree, target: PyTree, expected: _Expected, cast: bool) -> PyTree:
  """Returns what the Orbax checkpoint at `path` holds, in its own structure and dtypes.

  What does not fit is refused by its metadata alone, which `stored` is. Arrays are read to their
  sharding, or to the host where that is anywhere.
  """
  _match(target, expected, stored, cast)
  with ocp.StandardCheckpointer() as checkpointer:

    def where_to(key_path: KeyPath, x: Leaf) -> Leaf:
      want = expected[_resolve(path_text(key_path), x, expected)[0]]
      if is_key(want.dtype):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_everywhere(want.sharding))
      if want.sharding is None or not isinstance(x, np.ndarray):
        return x
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=want.sharding)

    return checkpointer.restore(path, jax.tree_util.tree_map_with_path(where_to, stored))


def _stand_in(metadata: Any) -> Leaf:
  """Returns what has the type, dtype and shape of a stored leaf, in next to no memory."""
  if isinstance(metadata, ocp.metadata.ScalarMetadata):
    return np.zeros((), metadata.dtype).item()
  if isinstance(metadata, ocp.metadata.StringMetadata):
    return ""
  return np.broadcast_to(np.zeros((), metadata.dtype), metadata.shape)


def _everywhere(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding:
  """Returns a sharding for the data of keys, which have one axis more than keys on `sharding`."""
  # Orbax must read them to a device to tell which generator they belong to.
  if isinstance(sharding, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _match(target: PyTree, expected: _Expected, restored: PyTree, cast: bool) -> dict[str, Leaf]:
  """Returns the leaves of `restored` by path, or raises if they are not those of `target`."""
  leaves: dict[str, Leaf] = {}
  for name, leaf in leaves_by_path(restored, _WHERE).items():
    path, x = _resolve(name, leaf, expected)
    if path in leaves:
      raise same_path(_WHERE, path)
    leaves[path] = x
  _refuse_other_configuration(target, leaves)
  problems = [f"nothing at {path or 'the root'}" for path in expected if path not in leaves]
  problems += [f"an extra leaf at {path or 'the root'}" for path in leaves if path not in expected]
  if problems:
    raise MpjaxValueError(
      _WHERE,
      expected="the leaves of target and no others",
      got=listed(problems),
      fix="Build target as the state was when it was saved, or read the checkpoint first, "
      "StandardCheckpointer().restore(path): then pass a part of it, restored['params'], or add "
      "what is missing.",
    )
  misfits = {path: misfit(leaves[path], want, cast=cast) for path, want in expected.items()}
  wrong = [path for path, text in misfits.items() if text]
  if wrong:
    raise MpjaxValueError(
      _WHERE,
      expected="leaves of the dtype and shape of target",
      got=listed([f"{misfits[path]} at {path or 'the root'}" for path in wrong]),
      fix=_advice([(leaves[path], expected[path]) for path in wrong]),
    )
  return leaves


def _resolve(name: str, x: Leaf, expected: _Expected) -> tuple[str, Leaf]:
  """Returns the path and the leaf that `x`, saved as `name`, represents."""
  path, x = (name, x) if name in expected else decode(name, x)
  return path, as_array(x, expected[path]) if path in expected else x


def _advice(pairs: list[tuple[Leaf, jax.ShapeDtypeStruct]]) -> str:
  if all(is_floating(x) and is_floating(want) and x.shape == want.shape for x, want in pairs):
    return (
      "Pass cast=True to convert them, or restore into a target with the dtypes of what was saved."
    )
  if any(getattr(x, "dtype", np.dtype(bool)).type is np.void for x, _ in pairs):
    return (
      "NumPy's files forget the name of bfloat16 (void): save what mpjax.checkpoints.to_arrays "
      "gives, and .view(jnp.bfloat16) what was saved without it."
    )
  return (
    "Build target as the state was when it was saved: cast=True is for floating dtypes alone, "
    "shapes, integers, booleans and keys never change."
  )


def _refuse_other_configuration(target: PyTree, leaves: Mapping[str, Leaf]) -> None:
  """Raises if a loss scale was saved under another configuration: its name is part of the path."""
  for path, _, state in scaling_states(target):
    place = path_text(path)
    inside = _below(place, leaves)
    saved = {path.split("/")[0] for path in _below("loss_scale", inside)}
    configured = {label for label, value in state.loss_scale.items() if value != ()}
    if not inside or saved == configured:
      continue
    raise MpjaxValueError(
      _WHERE,
      expected=f"a loss scale of the configuration {_names(configured)} at {place or 'the root'}",
      got=_names(saved),
      fix="Restore into a state of the configuration that was saved; then give its inner_state "
      "to the new state (_replace), and the scale (mpjax.states.set_loss_scale). What was saved "
      "without a loss scale is restored into target.inner_state.",
    )


def _below(place: str, paths: Iterable[str]) -> list[str]:
  """Returns those of some paths that are below `place`, as they go on from there."""
  prefix = f"{place}/" if place else ""
  return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]


def _names(labels: set[str]) -> str:
  return " and ".join(map(repr, sorted(labels))) or "none (no loss scale, or NoLossScale)"
