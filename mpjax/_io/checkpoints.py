"""Checkpoints: the leaves of a tree as arrays by path, and back into a tree like a target.

The target says which dtype, shape and sharding each leaf has, and how masters are stored.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.frameworks import is_nnx_variable
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
from mpjax._core.trees import is_floating
from mpjax._core.types import Array, DType, KeyPath, Leaf, NumpyArray, PyTree, unsigned_like
from mpjax._io.master_storage import convert_masters, masters_to_convert
from mpjax._optim.find_scale import is_damaged, scales_in, scaling_states, states_by_path
from mpjax._optim.optimizer_trees import nodes_of
from mpjax._optim.states import LossScaleState

_KEY = "key:"


def to_arrays(tree: PyTree) -> dict[str, NumpyArray]:
  """Convert the leaves of `tree` to NumPy arrays by path, which any file format can hold.

  NumPy's files cannot hold bfloat16, float8, 4-bit integers or typed keys, and msgpack no typed
  keys. Such leaves are stored as unsigned integers. A tag behind an "@" in the name gives the type:
  `"params/w@bfloat16"`, `"rng@key:threefry2x32"`. `mpjax.checkpoints.restore_like` reads the tags.

  Args:
    tree: any tree of arrays, keys and Python numbers. This process must hold all of each array.

  Returns:
    A dict with one array per leaf. The parts of a path are joined by "/". None and empty states
    have no leaves, and no entry.

  Raises:
    MpjaxValueError: two leaves have the same path as text, or JAX cannot hold a Python number.
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
    name, array = _encode(path, x if hasattr(x, "dtype") else _number(path, x, where))
    if name in arrays:
      raise same_path(where, name)
    arrays[name] = array
  return arrays


def _number(path: str, x: Leaf, where: str) -> NumpyArray:
  """Returns a Python number in the dtype that JAX would give it, or raises if it does not fit."""
  # `np.asarray` alone would take 64 bits.
  dtype = jnp.result_type(x)
  number = as_array(x, dtype)
  if number.dtype != dtype:
    raise MpjaxValueError(
      where,
      expected=f"Python numbers that {dtype} can hold, since jit gives them this dtype",
      got=f"{x} at {path or 'the root'}",
      fix="Choose a wider dtype: np.int64(x) or np.float64(x).",
    )
  return number


def _encode(path: str, x: Array | NumpyArray) -> tuple[str, NumpyArray]:
  """Returns the name and the array that store a leaf, see `decode`."""
  if is_key(x.dtype):
    return f"{path}@{_KEY}{jax.random.key_impl(x)}", np.asarray(jax.random.key_data(x))
  # NumPy files store the dtypes of `ml_dtypes` as void, which cannot be read back.
  array = np.asarray(x)
  if _is_registered(array.dtype):
    return f"{path}@{array.dtype.name}", array.view(unsigned_like(array.dtype))
  return path, array


def leaves_by_path(tree: PyTree, where: str) -> dict[str, Leaf]:
  """Returns the leaves of `tree` by path, in the order of the tree.

  A checkpoint turns fields of classes and positions in tuples into keys of dicts, so that they look
  alike in a path. Two leaves with the same path are an error.
  """
  if isinstance(tree, Mapping) and jax.tree_util.all_leaves([tree]):
    tree = dict(tree)  # A mapping that JAX does not know, such as numpy.load of an npz file.
  leaves: dict[str, Leaf] = {}
  # JAX tells `a["b"]` and `a.b` apart. As text, both paths are "a/b".
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    text = path_text(path)
    if text in leaves:
      raise same_path(where, text)
    leaves[text] = x
  return leaves


def same_path(where: str, name: str) -> MpjaxValueError:
  """Returns the error for two leaves with the same name."""
  return MpjaxValueError(
    where,
    expected="leaves with different paths",
    got=f"two at {name!r}",
    fix="Rename a key that contains '/' or '@'.",
  )


def _is_registered(dtype: DType) -> bool:
  """Whether another package has added `dtype` to NumPy, as ml_dtypes has added bfloat16."""
  return dtype.isbuiltin == 2


def decode(name: str, x: Leaf) -> tuple[str, Leaf]:
  """Returns the path and the leaf that a name and an array of `to_arrays` store.

  Without a valid tag they are returned as they are, because the key of a dict may hold an "@".
  """
  # The tag is behind the last "@", so a path may hold others.
  path, at, tag = name.rpartition("@")
  # A leaf may be called "bfloat16".
  if not at:
    return name, x
  try:
    if tag.startswith(_KEY):
      return path, jax.random.wrap_key_data(jnp.asarray(x), impl=tag.removeprefix(_KEY))
    dtype = jnp.dtype(tag)
  except (TypeError, ValueError):
    return name, x
  # A tag counts only if the array has the bits of its dtype.
  if _is_registered(dtype) and getattr(x, "dtype", None) == unsigned_like(dtype):
    return path, np.asarray(x).view(dtype)
  return name, x


_WHERE = "mpjax.checkpoints.restore_like(target, restored)"
_TARGET = "mpjax.checkpoints.restore_like(target)"

_MOST_PATHS = 4
"""How many paths that do not fit an error lists before its advice."""

_Expected: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""The leaves of a target by path. A sharding is None where the result may be on any device."""


def restore_like(target: PyTree, restored: PyTree, *, cast: bool = False) -> PyTree:
  """Restore a checkpoint into a tree like `target`, without a silent cast.

  An error names each leaf that differs in dtype or shape, is missing or is left over. Orbax and
  Flax would round such leaves, or return them as they were saved.

  Leaves are matched by path: names of fields, keys of dicts and positions, joined by "/". Classes
  do not matter. So `restored` may be:

  - a tree like `target`;
  - the result of Orbax's `StandardCheckpointer().restore(path)` without a target;
  - the result of `flax.serialization.msgpack_restore`;
  - the arrays of `mpjax.checkpoints.to_arrays`, such as `numpy.load` of an npz file;
  - the path of an Orbax checkpoint. Its metadata is compared with `target` before any array is
    read, and each array is read straight to its devices.

  Masters of `mpjax.master_weights` may have been saved in the other `storage`. They are converted,
  bit for bit, if their parameters are in the same tree. States that an older version of mpjax has
  saved may lack counters that were added since. These get the numbers that they start from.

  Save models and optimizers of Flax NNX as plain dicts, `nnx.to_pure_dict(nnx.state(model))`. Use
  the dict of new ones as the target, and store the result in them with `nnx.update`, as in the
  second example. An `nnx.State` may be saved too. Its paths end with "value", so that its target
  has to be an `nnx.State`.

  Args:
    target: the wanted tree, of arrays or of `jax.ShapeDtypeStruct` (`jax.eval_shape`).
    restored: the saved tree, or the path of an Orbax checkpoint, a str or an `os.PathLike`.
    cast: round floating leaves to the floating dtype of `target`. Integers, booleans, complex
      numbers and keys are never cast.

  Returns:
    A tree with the structure and the dtypes of `target`. Its leaves are strongly typed
    `jax.Array`s. They have the sharding or the committed devices of `target`, and are uncommitted
    elsewhere. A step that was compiled for `target` is therefore not traced again. Plain key data
    become typed keys where `target` has those.

  Raises:
    MpjaxValueError: leaves are missing, left over, or of another shape or dtype. Masters in another
      storage lack their parameters. Rounding makes a finite number infinite. The loss scale has
      another configuration, or is no positive finite number. There is no checkpoint at the path.
    MpjaxTypeError: a leaf of `target` is not an array.

  >>> import jax.numpy as jnp, mpjax
  >>> saved = {"w": jnp.ones(2, jnp.float32), "b": jnp.zeros(1, jnp.float32)}
  >>> target = {"w": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(1, jnp.float32)}
  >>> mpjax.checkpoints.restore_like(target, saved, cast=True)["w"]
  Array([1, 1], dtype=bfloat16)

  >>> import optax
  >>> from flax import nnx
  >>> def begin(seed):
  ...   model = nnx.Linear(2, 1, rngs=nnx.Rngs(seed))
  ...   return model, nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(1e-3)), wrt=nnx.Param)
  >>> saved = mpjax.checkpoints.to_arrays(nnx.to_pure_dict(nnx.state(begin(0))))
  >>> model, optimizer = begin(1)
  >>> target = nnx.to_pure_dict(nnx.state((model, optimizer)))
  >>> restored = mpjax.checkpoints.restore_like(target, saved)
  >>> nnx.update((model, optimizer), nnx.State(restored))
  >>> bool((model.kernel[...] == saved["0/kernel"]).all())
  True
  """
  # Compare everything before anything is read or cast, since a checkpoint may be large.
  expected = _expected_leaves(target)
  path, saved = None, restored
  if isinstance(restored, (str, os.PathLike)):
    path = os.fspath(restored)
    # Orbax refuses relative paths. A URL of a bucket is no path of this machine.
    path = path if "://" in path else os.path.abspath(path)
    saved = _metadata(path)
  saved_leaves = leaves_by_path(saved, _WHERE)
  # A master in the other storage has another dtype, which is no misfit.
  parameter_paths = masters_to_convert(target, expected, saved_leaves, _WHERE)
  as_saved = dict(expected)  # with masters in the storage of the checkpoint
  for master in parameter_paths:
    as_saved[master] = expected[master].update(dtype=saved_leaves[master].dtype)
  if path is not None:
    # A mismatch must not show after minutes of reading, so compare the metadata first.
    _match(target, as_saved, saved, cast)
    restored = _read(path, saved, as_saved)
  # Cast parameters first: masters are converted from the parameters that the target will hold.
  matched = _match(target, as_saved, restored, cast)
  leaves = {name: convert(matched[name], want.dtype) for name, want in as_saved.items()}
  casts = {name: (matched[name], x) for name, x in leaves.items()}
  refuse_overflow(casts, "mpjax.checkpoints.restore_like(cast=True)")
  leaves = convert_masters(leaves, parameter_paths, _WHERE)
  is_ours = path is not None  # The caller has no reference to an array that was read here.
  # The order of `expected` is that of the leaves of the target.
  placed = [put(leaves[name], want.sharding, alias=is_ours) for name, want in expected.items()]
  result = jax.tree.unflatten(jax.tree.structure(target), placed)
  _refuse_damaged_scale(result)
  return result


def _refuse_damaged_scale(result: PyTree) -> None:
  """Raises if a loss scale in `result` is no positive finite number."""
  # The numbers may be restored alone, or be in a dict, as `nnx.to_pure_dict` makes it.
  states = [*nodes_of(result, LossScaleState), *(each.state for each in scales_in(result))]
  for state in filter(None, states):
    # With a scale of NaN every step would be skipped.
    if is_damaged(state):
      raise MpjaxValueError(
        "mpjax.checkpoints.restore_like(restored)",
        expected="a positive finite loss scale",
        got=f"{np.asarray(raw_value(state.scale))}",
        fix="The file is damaged: restore another checkpoint, or replace the scale in the tree.",
      )


def _expected_leaves(target: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the leaves that a target asks for by path, see `_Expected`."""
  if isinstance(target, (str, os.PathLike)):
    fix = "Swap the two arguments: the path is the second."
    raise MpjaxTypeError(_TARGET, expected="a tree of arrays", got=f"a path ({target})", fix=fix)
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
  """Returns the sharding that a leaf of a target asks for; None if it may be on any device."""
  if isinstance(x, jax.Array):
    # An uncommitted array moves to where it is needed. The result must do so, or `jit` traces
    # again.
    return x.sharding if x.committed else None
  sharding = getattr(x, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  # A concrete mesh names its devices.
  if isinstance(sharding.mesh, jax.sharding.Mesh):
    return sharding
  # `jax.eval_shape` of arrays on a mesh with explicit axes gives its shape without its devices.
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
  """Returns the tree of the Orbax checkpoint at `path`, with stand-ins for its leaves."""
  # Orbax raises or returns no metadata, depending on what is at the path.
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      metadata = checkpointer.metadata(path).item_metadata
    except OSError:
      metadata = None
    if metadata is None:
      raise MpjaxValueError(
        "mpjax.checkpoints.restore_like(restored)",
        expected="the path of an Orbax checkpoint, a folder that holds _METADATA",
        got=f"{path}, which holds no checkpoint",
        fix="A CheckpointManager writes to directory/step/default. Read other files first: "
        "numpy.load(path), flax.serialization.msgpack_restore(bytes).",
      )

  def stand_in(stored: Any) -> Leaf:
    # A Python number is restored as one.
    if isinstance(stored, ocp.metadata.ScalarMetadata):
      return np.zeros((), stored.dtype).item()
    if isinstance(stored, ocp.metadata.StringMetadata):
      return ""
    # A broadcast view has the shape, and the memory of one element.
    return np.broadcast_to(np.zeros((), stored.dtype), stored.shape)

  return jax.tree.map(stand_in, metadata.tree)


def _read(path: str, saved: PyTree, expected: _Expected) -> PyTree:
  """Returns the Orbax checkpoint at `path`, in its own structure and dtypes.

  `saved` is its metadata. Arrays are read to the sharding that `expected` asks for, or to the host.
  """

  def placed(key_path: KeyPath, x: Leaf) -> Leaf:
    # The checkpoint may store encoded leaves, whose names have tags.
    path, _ = _resolve(path_text(key_path), x, expected)
    sharding = expected[path].sharding
    if is_key(expected[path].dtype):
      # The data have one axis more than the keys, so they are replicated on the devices of the
      # keys. Orbax has to read them to a device: in host memory it does not tell which generator
      # they belong to.
      if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
      sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    # Orbax reads such leaves to the host.
    if sharding is None or not isinstance(x, np.ndarray):
      return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, jax.tree_util.tree_map_with_path(placed, saved))


def _match(target: PyTree, expected: _Expected, restored: PyTree, cast: bool) -> dict[str, Leaf]:
  """Returns the leaves of `restored` by path, or raises if they do not fit `target`."""
  leaves: dict[str, Leaf] = {}
  for name, leaf in leaves_by_path(restored, _WHERE).items():
    path, x = _resolve(name, leaf, expected)
    if path in leaves:
      raise same_path(_WHERE, path)
    leaves[path] = x
  # The label of a loss scale is part of its path, so another configuration misses paths too. Its
  # error says more.
  _refuse_other_configuration(target, leaves)
  leaves = {**_defaults(target, expected, leaves), **leaves}
  missing = [path for path in expected if path not in leaves]
  extra = [path for path in leaves if path not in expected]
  problems = [f"nothing at {path or 'the root'}" for path in missing]
  problems += [f"an extra leaf at {path or 'the root'}" for path in extra]
  if problems:
    got, fix = listed(problems, most=_MOST_PATHS), _advice_on_paths(target, missing, extra)
    raise MpjaxValueError(_WHERE, expected="the leaves of target and no others", got=got, fix=fix)
  misfits = {path: misfit(leaves[path], want, cast=cast) for path, want in expected.items()}
  wrong = [path for path, text in misfits.items() if text]
  if wrong:
    raise MpjaxValueError(
      _WHERE,
      expected="leaves of the dtype and shape of target",
      got=listed([f"{misfits[path]} at {path or 'the root'}" for path in wrong]),
      fix=_advice_on_leaves([(leaves[path], expected[path]) for path in wrong]),
    )
  return leaves


def _defaults(
  target: PyTree, expected: _Expected, leaves: Mapping[str, Leaf]
) -> dict[str, NumpyArray]:
  """Returns the defaults of fields that a later version has added to the states in `leaves`."""
  defaults: dict[str, NumpyArray] = {}
  for place, state in states_by_path(target).items():
    # A state of which nothing was saved is missing as a whole.
    added = state._field_defaults if _below(place, leaves) else {}
    for field, default in added.items():
      # The leaf itself, or where variables are saved its "value". None is the default of an
      # optional field, for whose leaves nothing stands.
      paths = [path for path in expected if f"{path}/".startswith(f"{place}/{field}/".lstrip("/"))]
      # The state may be vmapped, and have a shape.
      defaults |= {x: np.full(expected[x].shape, default) for x in paths if default is not None}
  return defaults


def _advice_on_paths(target: PyTree, missing: Sequence[str], extra: Sequence[str]) -> str:
  """Returns advice on paths that are missing, and on paths that the target lacks."""
  # A variable of NNX has its array at "value"; `nnx.to_pure_dict` has no variables.
  has_variables = any(map(is_nnx_variable, jax.tree.leaves(target, is_leaf=is_nnx_variable)))
  if has_variables and any(f"{path}/value" in missing for path in extra):
    return (
      "The checkpoint has no variables of Flax NNX: pass nnx.to_pure_dict(nnx.state(model)) as "
      "target, and write the result with nnx.update(model, nnx.State(result))."
    )
  if any(f"{path}/value" in extra for path in missing):
    return (
      "The checkpoint has variables of Flax NNX: pass nnx.state(model) as target, without "
      "nnx.to_pure_dict, and write the result with nnx.update(model, result)."
    )
  return (
    "Build target as the state was when it was saved. Or read the checkpoint first with "
    "StandardCheckpointer().restore(path). Then pass a part of it, restored['params'], or add "
    "the missing leaves."
  )


def _resolve(name: str, x: Leaf, expected: _Expected) -> tuple[str, Leaf]:
  """Returns the path and the leaf that were saved as `name` and `x`."""
  # A path of the target that holds an "@" is taken as it is.
  path, x = (name, x) if name in expected else decode(name, x)
  return path, as_array(x, expected[path].dtype) if path in expected else x


def _advice_on_leaves(pairs: list[tuple[Leaf, jax.ShapeDtypeStruct]]) -> str:
  """Returns advice on leaves that do not fit, each beside the expected leaf."""
  # Only the rounding is refused, which `cast=True` allows.
  if all(is_floating(x) and is_floating(want) and x.shape == want.shape for x, want in pairs):
    return "Pass cast=True to convert them, or restore into a target with the saved dtypes."
  if any(getattr(x, "dtype", np.dtype(bool)).type is np.void for x, _ in pairs):
    return (
      "NumPy files store bfloat16 as void: save the arrays of mpjax.checkpoints.to_arrays, or call "
      ".view(jnp.bfloat16) on those that were saved without it."
    )
  return (
    "Build target as the state was when it was saved. cast=True changes floating dtypes only. "
    "Shapes, integers, booleans and keys never change."
  )


def _refuse_other_configuration(target: PyTree, leaves: Mapping[str, Leaf]) -> None:
  """Raises if a loss scale was saved under another configuration, whose label is in the path."""
  for key_path, _, state in scaling_states(target):
    place = path_text(key_path)
    # Labels are keys of a dict, and so the first part of the path below "loss_scale".
    inside = _below(place, leaves)
    saved = {path.partition("/")[0] for path in _below("loss_scale", inside)}
    configured = set(state.loss_scale)
    # Without any leaf at the place, the error about missing paths says more.
    if not inside or saved == configured:
      continue
    raise MpjaxValueError(
      _WHERE,
      expected=f"a loss scale of the configuration {_labels(configured)} at {place or 'the root'}",
      got=_labels(saved),
      fix="Restore into a state of the saved configuration. Then pass its inner_state to the new "
      "state (_replace), and its scale to mpjax.states.set_loss_scale. Restore a checkpoint "
      "without a loss scale into target.inner_state.",
    )


def _below(place: str, paths: Iterable[str]) -> list[str]:
  """Returns the rest of each path that is below `place`."""
  prefix = f"{place}/" if place else ""
  return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]


def _labels(labels: set[str]) -> str:
  return " and ".join(map(repr, sorted(labels))) or "none (no loss scale)"
