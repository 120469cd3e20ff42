"""Variables as a module uses them, and as they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._full_precision import ACTIVE
from mpjax.nnx._active import Active
from mpjax.nnx._variables import in_use, like_stored, map_leaves, stored, strip

BF16 = np.dtype("bfloat16")
USING = Active(policy=mpjax.Policy(compute_dtype="bf16"), use_dtype=BF16)
VALUES = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def param(cls=nnx.Param, **metadata):
  return cls(jnp.asarray(VALUES), **metadata)


def test_what_is_read_is_cast_and_what_is_stored_is_not():
  variable = param()
  used = in_use(variable)
  with ACTIVE(USING):
    for read in (used[...], used[0], used.get_value(), used.T, used + 1, jnp.asarray(used), -used):
      assert read.dtype == BF16
    assert used.dtype == BF16
    assert variable[...].dtype == jnp.float32
  assert used[...].dtype == used.dtype == jnp.float32
  np.testing.assert_array_equal(used[1], VALUES[1])


def test_it_is_a_variable_of_its_own_type():
  class Mine(nnx.Param):
    pass

  variable = param(Mine, note=3)
  used = in_use(variable)
  assert isinstance(used, Mine)
  assert used.var_type is used.type is Mine
  assert type(used).__name__ == "Mine"
  assert used.note == 3
  assert in_use(used) is used
  assert stored(used) is variable
  assert stored(variable) is variable


@pytest.mark.parametrize("name", ["shape", "ndim", "size", "dtype"])
def test_asking_for_its_shape_casts_nothing(name):
  variable = param()
  expected = {"shape": (2, 3), "ndim": 2, "size": 6, "dtype": BF16}[name]

  def ask():
    with ACTIVE(USING):
      assert getattr(in_use(variable), name) == expected

  assert jax.make_jaxpr(ask)().eqns == []


@pytest.mark.parametrize("cls", [nnx.Param, nnx.Cache, nnx.LoRAParam])
def test_parameters_and_caches_are_cast(cls):
  with ACTIVE(USING):
    assert in_use(param(cls))[...].dtype == BF16


@pytest.mark.case("A71")
@pytest.mark.parametrize("cls", [nnx.BatchStat, nnx.Variable, nnx.Intermediate, nnx.RngState])
def test_all_other_variables_are_not(cls):
  with ACTIVE(USING):
    assert in_use(param(cls))[...].dtype == jnp.float32


@pytest.mark.case("A71")
@pytest.mark.parametrize(
  "value",
  [jnp.arange(3), jnp.ones(2, bool), jnp.ones(2, jnp.complex64), jax.random.key(0), None],
  ids=["integers", "booleans", "complex", "key", "none"],
)
def test_what_is_not_floating_is_never_cast(value):
  with ACTIVE(USING):
    read = in_use(nnx.Param(value)).get_value()
  assert getattr(read, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.case("A61")
def test_what_is_written_has_the_stored_dtype():
  for cls in (nnx.Param, nnx.Cache, nnx.BatchStat):
    variable = param(cls)
    used = in_use(variable)
    with ACTIVE(USING):
      used[...] = jnp.full((2, 3), 2, BF16)
      assert float(used[0, 0]) == 2  # what was written is read
      used[0, 1] = jnp.asarray(3, BF16)
      assert variable[...].dtype == jnp.float32
      used.set_value(jnp.full((2, 3), 5, BF16))
    assert variable[...].dtype == jnp.float32
    np.testing.assert_array_equal(variable[...], np.full((2, 3), 5))
    used.set_value(jnp.ones(4, BF16))  # another shape is another thing, which its author chose
    assert variable[...].dtype == jnp.float32
  half = nnx.Cache(jnp.ones(2, BF16))
  with ACTIVE(USING):
    in_use(half)[...] = jnp.ones(2)
  assert half[...].dtype == BF16


def test_updates_and_metadata_go_to_the_variable():
  variable = param()
  used = in_use(variable)
  used.set_metadata("note", 1)
  assert variable.note == 1
  used.update_from_state(param().replace(jnp.zeros((2, 3))))
  assert not variable[...].any()
  used.set_raw_value(jnp.ones((2, 3)))
  assert variable[...].all()
  used.copy_from(param())
  np.testing.assert_array_equal(variable[...], VALUES)
  assert type(used.copy()) is nnx.Param


def test_a_gradient_adds_up_in_the_stored_dtype():
  def loss(value):
    used = in_use(nnx.Param(value))
    with ACTIVE(USING):
      return sum((used[...] * i).astype(jnp.float32).sum() for i in (256.0, 1.0, 1.0))

  gradient = jax.grad(loss)(jnp.ones(()))
  assert gradient.dtype == jnp.float32
  assert gradient == 258  # 256 + 1 is 256 in bfloat16


def test_a_gathered_table_adds_up_its_gradient_in_the_stored_dtype():
  def loss(table):
    used = in_use(nnx.Param(table))
    with ACTIVE(USING):
      return used[np.zeros(300, np.int32)].sum().astype(jnp.float32)

  np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(2)), [300, 0])  # in bfloat16 it is 256


def test_trees_see_the_stored_array():
  variable = param()
  used = in_use(variable)
  with ACTIVE(USING):
    (leaf,) = jax.tree.leaves(used)
    assert leaf is variable.get_raw_value()
    assert nnx.jit(lambda w: (type(w) is nnx.Param, w[...]))(used)[0]
    # What went through a transform is one by itself: it is cast where it is read.
    out = jax.jit(lambda w: (w @ w.T, w))(used)
    assert out[0].dtype == BF16
    again = jax.tree.map(lambda x: x, used)
    assert again[...].dtype == BF16
    again[...] = jnp.zeros((2, 3), BF16)
    assert not again[...].any()
  assert variable[...].any()


def test_strip_gives_the_variables_back():
  variable, x = param(), jnp.ones(2)
  tree = {"a": [in_use(variable), x], "b": None}
  assert strip(tree)["a"][0] is variable
  plain = (variable, x)
  assert strip(plain) is plain
  odd = {1: x, "a": x}
  assert strip(odd) is odd  # keys that do not sort


def test_map_leaves_takes_modules_and_variables_whole():
  module, variable = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), param()
  seen = []
  map_leaves(seen.append, [module, variable, 3])
  assert seen[0] is module
  assert seen[1] is variable
  assert seen[2] == 3


def test_like_stored_casts_what_fits():
  old = {"a": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}
  new = like_stored({"a": jnp.ones(2, BF16), "n": jnp.ones(2, BF16)}, old)
  assert [x.dtype for x in new.values()] == [jnp.float32, BF16]
  other = (jnp.ones(2, BF16),)
  assert like_stored(other, old) is other
