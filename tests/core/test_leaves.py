"""One leaf: does it fit, what is it cast to, where does it go."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax._core import leaves
from tests.errors import refused


def struct(dtype, *shape):
  return jax.ShapeDtypeStruct(shape, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))
RBG = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))


NUMBERS = [
  *((True, want, "bool") for want in ("bool", "int32")),
  *((3, want, want) for want in ("int32", "uint8")),
  *(
    (300, "uint8", "int64"),
    (-1, "uint8", "int64"),
    (0, "uint8", "uint8"),
    (255, "uint8", "uint8"),
  ),
  *((2**40, "int32", "int64"), (3, "float32", "int64"), (0.1, "int32", "float32")),
  *((0.1, want, "float32") for want in ("float32", "bfloat16")),
  *((0.1, "float64", "float64"), (1e300, "float32", "float64")),
  *((float("inf"), "float32", "float32"), (float("nan"), "float16", "float32")),
  *((0.1j, "complex64", "complex64"), (0.1j, "complex128", "complex128")),
  *((1e300j, "complex64", "complex128"), (np.float64(0.1), "float32", "float64")),
  (np.int64(3), "int32", "int64"),
]


def test_a_python_number_is_what_jax_makes_of_it():
  for x, want, dtype in NUMBERS:
    found = leaves.as_array(x, np.dtype(want))
    assert (type(found), found.dtype, found.shape) == (np.ndarray, np.dtype(dtype), ()), (x, want)
    np.testing.assert_array_equal(found, np.asarray(x, dtype))
  for x in ("text", None, np.ones(2), jnp.ones(2)):
    assert leaves.as_array(x, np.dtype("float32")) is x


ONES = {name: np.ones(2, name) for name in ("float32", "float64", "int32", "int64", "bool", "V2")}
ONES["complex64"] = np.ones(2, "complex64")
FITTING = [
  # What there is, what is wanted, whether it may be cast, what does not fit.
  (ONES["float32"], struct("float32", 2), False, None),
  (ONES["float32"], struct("bfloat16", 2), False, "float32[2] for bfloat16[2]"),
  (ONES["float32"], struct("bfloat16", 2), True, None),
  (ONES["float64"], struct("float32", 2), True, None),
  (np.ones((), "float32"), struct("float32", 1), True, "float32[] for float32[1]"),
  (np.ones((2, 1), "float32"), struct("float32", 2), True, "float32[2, 1] for float32[2]"),
  *(
    (ONES[have], struct(want, 2), True, f"{have}[2] for {want}[2]")
    for have, want in [
      *(("int32", "float32"), ("float32", "int32"), ("int64", "int32")),
      *(("bool", "int32"), ("complex64", "float32")),
    ]
  ),
  (ONES["V2"], struct("bfloat16", 2), True, "|V2[2] for bfloat16[2]"),
  ("adam", struct("float32"), True, "'adam' for float32[]"),
  (struct("float32"), struct("float32"), True, "a ShapeDtypeStruct float32[] for float32[]"),
  (np.zeros(2, "uint32"), KEY, False, None),
  (np.zeros(3, "uint32"), KEY, True, "uint32[3] for key<fry>[]"),
  (np.zeros(2, "int32"), KEY, True, "int32[2] for key<fry>[]"),
  (np.zeros(4, "uint32"), RBG, False, None),
  (jax.random.key(0), KEY, False, None),
  (jax.random.key(0), RBG, True, "key<fry>[] for key<rbg>[]"),
  (jax.random.key(0), struct("uint32", 2), True, "key<fry>[] for uint32[2]"),
]


def test_misfit():
  for x, want, cast, text in FITTING:
    assert leaves.misfit(x, want, cast=cast) == text, (x, want, cast)
  traced = []
  jax.eval_shape(lambda x: traced.append(leaves.misfit(x, struct("float32"), cast=True)), 1.0)
  assert traced == ["a traced array float32[] for float32[]"]


def nearest_bfloat16(x):
  """Rounds float32 to 8 bits of mantissa, ties to even, with integers alone."""
  bits = x.view(np.uint32)
  rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
  return rounded.astype(np.uint16)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_floating_leaves_are_rounded_once_to_nearest(kind):
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  ties = np.asarray([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
  x = np.concatenate([x, ties])
  found = leaves.convert(kind(x), np.dtype("bfloat16"))
  np.testing.assert_array_equal(np.asarray(found).view(np.uint16), nearest_bfloat16(x))
  assert leaves.convert(found, np.dtype("bfloat16")) is found


OVERFLOWS = [
  ([65504.0, np.inf, np.nan], "float16", False),
  ([1.0, 65520.0], "float16", True),
  ([-1e5], "float16", True),
  ([1e5], "bfloat16", False),
  ([448.0], "float8_e4m3fn", False),
  ([1000.0], "float8_e4m3fn", True),
  ([1e-20], "float16", False),
]


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_finite_number_that_becomes_infinite_is_seen(kind):
  for values, dtype, found in OVERFLOWS:
    x = kind(np.asarray(values, np.float32))
    cast = leaves.convert(x, np.dtype(dtype))
    with pytest.raises(ValueError, match="f: expected") if found else contextlib.nullcontext():
      leaves.refuse_overflow({"": (x, cast)}, "f")
  x = kind(np.asarray([1e5], np.float32))
  casts = {
    "": (x, leaves.convert(x, np.dtype("float16"))),
    "a": (x, x),
    "b": (x, struct("float16", 1)),
  }
  expected, got = "values that the new dtype can hold", "float32 beyond float16 at the root. "
  with refused(ValueError, "f", expected, got, "keep these leaves in float32"):
    leaves.refuse_overflow(casts, "f")
  leaves.refuse_overflow({"a": (x, x)}, "f")


def test_places(devices):
  mesh = jax.sharding.Mesh(np.asarray(devices), ("d",))
  sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
  one = jax.sharding.SingleDeviceSharding(devices[1])
  host = np.arange(8, dtype=np.float32)
  for x in (host, jnp.asarray(host), jax.device_put(host, one), jax.device_put(host, sharded)):
    for where in (sharded, one, None):
      found = leaves.put(x, where, alias=False)
      np.testing.assert_array_equal(found, host)
      assert found.committed is (where is not None)
      assert found.sharding == (where or jnp.ones(1).sharding)
  keys = jax.random.split(jax.random.key(0), 4)
  for x in (keys, jax.device_put(keys, one)):
    for where in (sharded, one, None):
      found = leaves.put(x, where, alias=False)
      np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
      assert found.committed is (where is not None)


def numbers(dtype):
  special = [0.0, -0.0, 1.0, -1.0, np.inf, np.nan, 0.1]
  tiny = float(jnp.finfo(dtype).smallest_subnormal)
  return np.asarray([*special, tiny, 2 * tiny, -tiny], dtype)


@pytest.mark.parametrize(
  "dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
)
def test_comparisons_are_those_of_numpy(dtype):
  dtype = jnp.dtype(dtype)
  a, b = (x.reshape(-1) for x in np.meshgrid(numbers(dtype), numbers(dtype)))
  same = jax.jit(leaves.same_numbers)(jnp.asarray(a), jnp.asarray(b))
  np.testing.assert_array_equal(same, a == b)
  np.testing.assert_array_equal(jax.jit(leaves.is_nonzero)(jnp.asarray(a)), a != 0)


def test_an_update_that_rounds_away_is_seen_although_xla_adds_in_float32():
  p = jax.random.normal(jax.random.key(0), (1000,), jnp.bfloat16)
  u = jax.random.normal(jax.random.key(1), (1000,), jnp.bfloat16) * 0.01
  lost = jax.jit(lambda p, u: leaves.changes_nothing(p, p + u, u))(p, u)
  p, u = np.asarray(p), np.asarray(u)
  expected = (p + u == p) & (u != 0)
  assert 0 < expected.sum() < 1000
  np.testing.assert_array_equal(lost, expected)


def test_complex():
  p, u = jnp.asarray([1 + 1j, 1 + 1j, 1 + 0j]), jnp.asarray([1e-9 + 1j, 1 + 1j, 1 + 0j])
  np.testing.assert_array_equal(leaves.changes_nothing(p, p + u, u), [True, False, False])


HOOKS = {"on_get_value": lambda _, x: x * 2, "on_set_value": lambda _, x: x + 1}


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_value_is_read_and_written_without_hooks(hook):
  variable = nnx.Variable(jnp.ones(()), **{hook: HOOKS[hook]})
  assert leaves.raw_value(variable) == 1
  leaves.set_raw_value(variable, jnp.full((), 3.0))
  assert variable.get_raw_value() == 3


def test_a_value_is_any_tree_and_that_of_an_array_is_the_array():
  for value in ({"a": 1}, (1, 2), [1], (), None, "text"):
    variable = nnx.Variable(0)
    leaves.set_raw_value(variable, value)
    assert leaves.raw_value(variable) is value
  for x in (jnp.ones(2), 3, None, {"a": 1}):
    assert leaves.raw_value(x) is x


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_reference_stays_and_its_array_is_read_and_written(wrap):
  variable = nnx.Variable(jnp.ones(2), ref=True)
  reference = variable.get_raw_value()
  wrap(lambda v: leaves.set_raw_value(v, leaves.raw_value(v) + 1))(variable)
  assert variable.get_raw_value() is reference
  np.testing.assert_array_equal(leaves.raw_value(variable), [2, 2])
