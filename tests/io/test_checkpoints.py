"""Leaves by path, and as arrays that files can hold."""

from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._io.checkpoints import decode, leaves_by_path
from tests.errors import refused

PLAIN = ("float16", "float32", "int8", "int32", "uint32", "bool", "complex64")
TAGGED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")


def through_npz(arrays, tmp_path):
  np.savez(tmp_path / "x.npz", **arrays)
  with np.load(tmp_path / "x.npz") as file:
    return dict(file)


def through_msgpack(arrays, tmp_path):
  return flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(arrays))


@pytest.mark.parametrize("through", [through_npz, through_msgpack])
def test_every_dtype_survives_files(through, tmp_path):
  shapes = [(), (0,), (3, 2)]
  bits = [np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2 for shape in shapes]
  tree = {dtype: [jnp.asarray(x, dtype) for x in bits] for dtype in PLAIN + TAGGED}
  arrays = through(mpjax.checkpoints.to_arrays(tree), tmp_path)
  assert len(arrays) == len(shapes) * len(tree)
  for dtype in tree:
    for i, x in enumerate(bits):
      name = f"{dtype}/{i}" if dtype in PLAIN else f"{dtype}/{i}@{dtype}"
      path, back = decode(name, arrays[name])
      assert (path, back.dtype, back.shape) == (f"{dtype}/{i}", jnp.dtype(dtype), x.shape)
      np.testing.assert_array_equal(back.astype(np.complex64), x.astype(np.complex64))


def test_python_numbers_have_the_dtypes_of_jit():
  arrays = mpjax.checkpoints.to_arrays([True, 3, 0.5, np.float64(0.1)])
  assert [x.dtype.name for x in arrays.values()] == ["bool", "int32", "float32", "float64"]
  assert [x.item() for x in arrays.values()] == [True, 3, 0.5, 0.1]


@pytest.mark.parametrize(
  ("number", "dtype"),
  [(2**31, "int32"), (-(2**70), "int32"), (1e300, "float32"), (complex(0, -1e300), "complex64")],
)
def test_a_python_number_that_jit_cannot_hold_is_an_error(number, dtype):
  with refused(
    ValueError,
    "mpjax.checkpoints.to_arrays(tree)",
    expected=f"Python numbers that {dtype} can hold",
    got=f"{number} at steps",
    fix="np.int64(x)",
  ):
    mpjax.checkpoints.to_arrays({"steps": number})


def test_what_is_no_tag_of_ours_is_left_alone():
  uint16, uint32 = np.zeros(2, np.uint16), np.zeros(2, np.uint32)
  for name, x in (
    *(("w", uint16), ("w@home", uint16), ("w@", uint16), ("w@float32", uint32)),
    *(("bfloat16", uint16), ("key:threefry2x32", uint32)),
    *(("w@bfloat16", np.zeros(2, np.float16)), ("w@bfloat16", np.zeros(2, np.uint8))),
    *(("w@bfloat16", "text"), ("w@key:dice", uint32)),
    ("w@key:threefry2x32", np.zeros(3, np.uint32)),
  ):
    path, back = decode(name, x)
    assert path == name
    assert back is x


WHERE = "mpjax.checkpoints.to_arrays(tree)"


def test_two_leaves_at_one_path_are_an_error():
  tagged = {"w": jnp.ones(1, jnp.bfloat16), "w@bfloat16": jnp.ones(1)}
  for tree, path in (({"a": {"b": 1}, "a/b": 2}, "'a/b'"), (tagged, "'w@bfloat16'")):
    with refused(ValueError, WHERE, "different paths", f"two at {path}", "Rename a key"):
      mpjax.checkpoints.to_arrays(tree)


def test_leaves_that_hold_no_numbers_are_an_error():
  def trace(x):
    abstract = jax.ShapeDtypeStruct((), jnp.float32)
    mpjax.checkpoints.to_arrays({"t": x, "s": "adam", "a": abstract, "ok": 1})

  got = "a ShapeDtypeStruct float32[] at a; 'adam' at s; a traced array float32[] at t"
  with refused(TypeError, WHERE, "arrays as leaves", got, "outside of jit"):
    jax.eval_shape(trace, 1.0)


class Pair(NamedTuple):
  left: object
  right: object


def test_paths_do_not_tell_classes_apart():
  tree = {"a": Pair([1, (2,)], {"x": 3, "none": None}), "b": ()}
  plain = {"a": {"left": {"0": 1, "1": [2]}, "right": {"x": 3}}}
  paths = {"a/left/0": 1, "a/left/1/0": 2, "a/right/x": 3}
  assert leaves_by_path(tree, "f") == leaves_by_path(plain, "f") == paths
  assert leaves_by_path(paths, "f") == paths
  assert leaves_by_path(7, "f") == {"": 7}
