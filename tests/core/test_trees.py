"""Which leaves are cast; whether all is finite; selection; how trees differ; containers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from mpjax._core import trees
from mpjax._core.trees import cast_leaf, content_of, is_floating, mapped, round_to, tree_differences
from tests.core.test_fused_leaves import oracle

# A new format is in `ml_dtypes` before JAX has arrays of it.
FLOATING = [
  name for name in dir(ml_dtypes) if name.startswith(("float", "bfloat")) and hasattr(jnp, name)
]
SMALL = ("int1", "int2", "int4", "uint1", "uint2", "uint4")
INTEGER = [name for name in SMALL if hasattr(ml_dtypes, name)]
PLAIN_FLOATING = ["float16", "float32", "float64"]
BF16 = jnp.dtype("bfloat16")
HALVES = [jnp.dtype("float16"), BF16]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["kind"])
@dataclasses.dataclass
class OnlyAux:
  """Two of a kind differ in what is no leaf."""

  x: float
  kind: int


CAST = [
  *(np.ones(2, np.float32), np.float32(1.5), np.float64(1.5)),
  *(jnp.ones(2), jnp.ones(2, jnp.float16), jnp.asarray(1.5), jnp.ones((0, 3))),
  jax.ShapeDtypeStruct((2,), jnp.float32),
]
NOT_CAST = [
  *(1.5, 3, True, 1j, "relu", object()),
  *(np.ones(2, np.int32), np.ones(2, bool), np.asarray(["a"]), np.asarray([None])),
  *(jnp.arange(3), jnp.arange(3, dtype=jnp.uint8), jnp.asarray([True])),
  *(jnp.ones(2, jnp.complex64), jax.random.key(0), jax.random.PRNGKey(0)),
  *(np.zeros(3, jax.dtypes.float0), jax.ShapeDtypeStruct((2,), jnp.int32)),
]


def test_which_leaves_are_cast():
  for leaf in (*CAST, *(np.ones(2, jnp.dtype(name)) for name in (*FLOATING, *PLAIN_FLOATING))):
    assert is_floating(leaf), leaf
    found = cast_leaf(leaf, BF16)
    assert (found.dtype, found.shape) == (BF16, leaf.shape)
    assert not isinstance(found, np.ndarray) or (found == leaf).all()
  integer = (*INTEGER, "int8", "int16", "int32", "uint8", "uint32", "bool")
  for leaf in (*NOT_CAST, *(np.zeros(2, jnp.dtype(name)) for name in integer)):
    assert not is_floating(leaf), leaf
    assert cast_leaf(leaf, BF16) is leaf


def test_cast_leaves_numpy_numpy():
  assert isinstance(cast_leaf(np.ones(2, np.float32), BF16), np.ndarray)
  # What has the dtype already is the leaf itself.
  array = jnp.ones(2)
  assert cast_leaf(array, np.dtype("float32")) is array
  # Without 64-bit, JAX reads a double as float32 first; float16 of it may differ by that.
  value = np.float64(1 + 2.0**-11 + 2.0**-30)
  rounded = cast_leaf(value, np.dtype("float16"))
  assert rounded == np.asarray(jnp.asarray(value).astype(jnp.float16))


# all_finite


def around_every_number(half):
  """Every finite number of a half type, halfway to the next, and float32 just beside each."""
  # Left out is what XLA for CPU takes for 0: float32's own subnormal numbers.
  numbers = np.arange(2**16, dtype=np.uint16).view(half).astype(np.float32)
  numbers = np.sort(numbers[np.isfinite(numbers)])
  found = np.concatenate([numbers, numbers[:-1] + np.diff(numbers / 2)])
  found = np.concatenate([found, np.nextafter(found, np.inf), np.nextafter(found, -np.inf)])
  found = found[np.isfinite(found)]
  return found[(np.abs(found) >= 2.0**-126) | (found == 0)].astype(np.float32)


@pytest.mark.parametrize("half", HALVES)
def test_round_to_is_numpys_rounding_everywhere(half):
  exact = around_every_number(half)
  assert len(exact) > 300_000
  rounding = functools.partial(round_to, dtype=half)
  with np.errstate(over="ignore"):
    expected = exact.astype(half)
  for round_all in (rounding, jax.jit(rounding)):
    found = np.asarray(round_all(exact))
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def rounded_and_back(x, half):
  return round_to(x, half).astype(jnp.float32)


def test_round_to_puts_a_barrier_between_the_casts():
  # What a compiler may not look through: without it, a cast and the cast back may both go.
  rounding = functools.partial(rounded_and_back, half=BF16)
  names = [eqn.primitive.name for eqn in jax.make_jaxpr(rounding)(jnp.ones(3)).eqns]
  assert names == ["convert_element_type", "optimization_barrier", "convert_element_type"]
  assert "stablehlo.optimization_barrier" in jax.jit(rounding).lower(jnp.ones(3)).as_text()
  # What has the dtype is returned as it is.
  x = jnp.ones(3, BF16)
  assert round_to(x, BF16) is x


@pytest.mark.gpu
@pytest.mark.parametrize("half", HALVES)
def test_round_to_survives_on_a_gpu(half):
  exact = around_every_number(half)
  with np.errstate(over="ignore"):
    expected = exact.astype(half).astype(np.float32)

  def surrounded(x):
    rounded = rounded_and_back(x, half)
    return rounded, rounded - x

  rounded, _ = jax.jit(surrounded)(exact)
  np.testing.assert_array_equal(rounded, expected)


def plant(rng, leaf):
  """Puts one of inf, -inf and NaN somewhere into `leaf`, in the real or the imaginary part."""
  if leaf.size:
    with np.errstate(invalid="ignore", over="ignore"):
      bad = rng.choice([np.inf, -np.inf, np.nan])
      if leaf.dtype.kind == "c" and rng.random() < 0.5:
        bad = complex(1.0, bad)
      leaf.reshape(-1)[rng.integers(leaf.size)] = np.asarray(bad).astype(leaf.dtype)


def test_all_finite_equals_numpy_on_random_trees():
  rng = np.random.default_rng(7)
  sizes = [0, 1, 2, 3, 31, 128, 257]
  kinds = ["float16", "bfloat16", "float32", "complex64", "int32", "bool"]
  kinds += ["float8_e4m3fn", "float8_e5m2", "int4"]
  structures, expected = [], []
  for _ in range(15):
    # A structure is filled a hundred times.
    shape = [(rng.choice(kinds), int(rng.choice(sizes))) for _ in range(rng.integers(0, 7))]
    filled = []
    for _ in range(100):
      # Within -8 and 7, which are the limits of int4.
      numbers = [np.clip(rng.normal(size=n) * 4, -8, 7) for _, n in shape]
      leaves = [x.astype(jnp.dtype(kind)) for x, (kind, _) in zip(numbers, shape, strict=True)]
      floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
      for _ in range(rng.integers(0, 4) if floats else 0):
        plant(rng, floats[rng.integers(len(floats))])
      filled.append({"a": leaves[::2], "b": tuple(leaves[1::2]), "n": None})
    structures.append(jax.tree.map(lambda *xs: np.stack(xs), *filled))
    expected.append([oracle(leaves) == len(leaves) for leaves in map(jax.tree.leaves, filled)])

  def finite(filled):
    if jax.tree.leaves(filled):
      return jax.vmap(trees.all_finite)(filled)
    return jnp.full(100, trees.all_finite(filled))

  # All are compiled as one program.
  found = jax.jit(lambda structures: list(map(finite, structures)))(structures)
  assert np.asarray(found).tolist() == expected
  assert 0.2 < np.mean(expected) < 0.8, "a constant answer would not be noticed"


def test_nothing_to_be_non_finite():
  finite = [
    *(None, {}, [], (None, {"a": None}), [True, 7, "text", object()]),
    *(jnp.arange(3), jnp.zeros((0, 4)), jnp.asarray(1.0)),
    *(np.zeros(3, jax.dtypes.float0), np.asarray([None])),
    {"k": jax.random.key(0), "r": jax.random.PRNGKey(0)},
  ]
  for tree in finite:
    found = trees.all_finite(tree)
    assert (found.shape, found.dtype, bool(found)) == ((), jnp.bool_, True), tree


def test_elements_are_checked_and_not_their_sum():
  # A sum or a squared norm overflows; a maximum drops NaN.
  assert trees.all_finite(jnp.full(4, 3e38))
  assert trees.all_finite(jnp.full(1000, 65504.0, jnp.float16))
  assert not trees.all_finite(jnp.asarray([1.0, np.nan]))
  assert not trees.all_finite(jnp.asarray([np.inf, -np.inf]))
  # Numbers of Python and NumPy are elements too.
  of_python = [float("inf"), complex(0, float("nan"))]
  for leaf in [*of_python, np.float64("nan"), jnp.asarray(complex(1, -np.inf))]:
    assert not trees.all_finite({"a": jnp.ones(2), "b": leaf}), leaf


def test_every_value_of_the_small_formats():
  values = {}
  # XLA has no arrays of six-bit numbers.
  for dtype in (jnp.dtype(name) for name in FLOATING if not name.startswith("float6")):
    special = np.asarray([1, -0.0, np.inf, -np.inf, np.nan], dtype)
    small = dtype.itemsize == 1
    values[dtype.name] = np.arange(256, dtype=np.uint8).view(dtype) if small else special
  found = jax.jit(lambda tree: jax.tree.map(jax.vmap(trees.all_finite), tree))(values)
  for name, x in values.items():
    with np.errstate(invalid="ignore"):
      np.testing.assert_array_equal(found[name], np.isfinite(x.astype(np.float32)), name)


def test_differences_between_containers():
  assert tree_differences([1.0], [2.0], dtypes=True) == []
  assert tree_differences(jnp.ones(2), jnp.ones(2, jnp.int32), dtypes=False) == []
  shapes = tree_differences(jnp.ones(2), jnp.ones(3), dtypes=False)
  assert shapes == ["shape [3] for shape [2] at the root"]
  for wanted, given, text in [
    ((1.0, 2.0), [1.0, 2.0], "list for tuple at the root"),
    ({"a": 1.0, "b": (2.0,)}, {"a": 1.0, "b": [2.0]}, "list for tuple at ['b']"),
    ({"a": 1.0, "b": ()}, {"a": 1.0, "b": []}, "list for tuple at ['b']"),
    ((1.0, ()), (1.0,), "tuple of 1 for 2 at the root"),
  ]:
    assert tree_differences(wanted, given, dtypes=True) == [f"other containers: {text}"]
  (text,) = tree_differences([OnlyAux(1.0, 3)], [OnlyAux(1.0, 4)], dtypes=True)
  assert text == "other static parts of a OnlyAux at [0]"
  assert tree_differences([None], [1.0], dtypes=True) == ["float32[] for None at [0]"]
  # Of large trees too the path is named at which containers begin to differ.
  wanted, given = ({f"layer{i}": {"w": [1.0, 2.0]} for i in range(500)} for _ in range(2))
  given["layer7"]["w"] = (1.0, 2.0)
  found = tree_differences(wanted, given, dtypes=False)
  assert found == ["other containers: tuple for list at ['layer7']['w']"]


def test_what_does_not_change_is_itself():
  linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  tree = {"module": linear, "list": [jnp.arange(2)], "none": None}
  assert trees.map_arrays(lambda x: x, tree) is tree
  new = trees.map_arrays(lambda x: x + 1, tree)
  assert new["module"] is linear
  assert new["list"][0].tolist() == [1, 2]
  tree = {"z": [1], "a": (2, {"b": 2})}
  new = mapped(lambda x: x + (x == 1), tree)
  assert new["z"] == [2]
  assert new["a"] is tree["a"]
  # A container in two places is one.
  held = [1]
  first, second = mapped(str, (held, {"again": held}))
  assert first == ["1"]
  assert second["again"] is first


def test_what_is_a_leaf():
  for leaf in (1, "text", jnp.ones(2), object(), iter([1]), (x for x in [1])):
    assert content_of(leaf) is None
  doubled = mapped(lambda x: x * 2, ([1], {"a": 2}), lambda x: isinstance(x, list))
  assert doubled == ([1, 1], {"a": 4})
  assert mapped(str, None) is None
  assert mapped(str, FrozenDict(b=None, a=())) == FrozenDict(b=None, a=())
