"""One of two branches: which one runs, that it is traced once, and what stands for nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.transforms._skip import compiled_for_cpu, nothing, nothing_like, step_or_skip
from tests.programs import bits

OLD = {"x": jnp.asarray([1.0, -0.0]), "n": jnp.asarray(3, jnp.int32), "key": jax.random.key(0)}
KINDS = {
  "float32": jnp.ones(2),
  "float16": jnp.ones(2, jnp.float16),
  "bfloat16": jnp.ones((), jnp.bfloat16),
  "complex64": jnp.ones(2, jnp.complex64),
  "int32": jnp.ones(2, jnp.int32),
}


class Counted:
  """A step that counts how often Python goes through it."""

  calls = 0

  def __call__(self, old):
    self.calls += 1
    new = {"x": jnp.exp(old["x"]), "n": old["n"] + 1, "key": jax.random.fold_in(old["key"], 1)}
    return KINDS, new


def data(state):
  return bits(state | {"key": jax.random.key_data(state["key"])})


def run(how, condition, step):
  if how == "eager":
    return step_or_skip(jnp.asarray(condition), step, OLD)
  if how == "jit":
    return jax.jit(lambda c, old: step_or_skip(c, step, old))(condition, OLD)
  return jax.tree.map(
    lambda x: x[0],
    jax.jit(jax.vmap(lambda c: step_or_skip(c, step, OLD)))(jnp.asarray([condition])),
  )


@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_the_step_or_nothing(how):
  for condition in (True, False):
    step = Counted()
    updates, state = run(how, condition, step)
    assert step.calls == 1, "the shapes of the branch that skips are those of the same trace"
    assert jax.tree.map(lambda x: x.dtype.name, updates) == {name: name for name in KINDS}
    if condition:
      assert bits(updates) == bits(KINDS)
      assert (int(state["n"]), float(state["x"][1])) == (4, 1)
    else:
      assert bits(updates) == bits(nothing_like(KINDS))
      assert data(state) == data(OLD)


def test_outside_of_jit_what_is_skipped_does_not_run():
  seen = []

  def step(old):
    seen.append(isinstance(old["x"], jax.core.Tracer))
    return Counted()(old)

  run("eager", False, step)
  assert seen == [True], "only looked at for its shapes"
  _, state = run("eager", False, step)
  assert state is OLD


def test_under_jit_only_one_branch_is_in_the_way():
  program = jax.make_jaxpr(lambda c, old: step_or_skip(c, Counted(), old))(True, OLD)
  names = [eqn.primitive.name for eqn in program.eqns]
  assert "cond" in names
  assert "exp" not in names
  # Of several members of an ensemble some may step: there both are computed, and selected from.
  several = jax.make_jaxpr(jax.vmap(lambda c: step_or_skip(c, Counted(), OLD)))(jnp.ones(2, bool))
  assert "exp" in str(several)
  assert "cond" not in [eqn.primitive.name for eqn in several.eqns]


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_where_the_new_state_varies(devices, check_vma):
  """One branch returns what differs by device, the other the old state, which does not."""
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

  def step(old, shard):
    return shard * 2, {"x": old["x"] + shard, "n": old["n"]}

  def one_device(condition, shard):
    old = {"x": jnp.ones(2), "n": jnp.asarray(0)}
    updates, state = step_or_skip(condition, lambda old: step(old, shard), old)
    return updates, state["x"]

  specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
  mapped = jax.jit(jax.shard_map(one_device, mesh=mesh, check_vma=check_vma, **specs))
  shards = jnp.arange(8.0)
  updates, x = mapped(True, shards)
  np.testing.assert_array_equal(updates, shards * 2)
  np.testing.assert_array_equal(x, shards + 1)
  updates, x = mapped(False, shards)
  assert np.all(np.signbit(updates))
  assert not np.any(updates)
  np.testing.assert_array_equal(x, np.ones(8))


@pytest.mark.parametrize("name", KINDS)
def test_nothing_changes_no_bits(name):
  """-0.0 and not 0.0, which makes +0.0 of a -0.0; of a complex number in both parts."""
  values = [1.5, -2.0, 0.0, -0.0, np.inf]
  if name == "complex64":
    values = [complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)]
  if name == "int32":
    values = [0, -1, 7]
  x = jnp.asarray(np.asarray(values), name)
  zero = nothing_like({"a": x, "b": jax.ShapeDtypeStruct(x.shape, x.dtype)})
  assert bits(zero["a"]) == bits(zero["b"])
  assert zero["a"].dtype == x.dtype
  assert not zero["a"].weak_type
  assert bits(x + zero["a"]) == bits(x)
  assert nothing(x.dtype) == 0


def test_whether_the_program_is_for_a_cpu_is_known_when_it_is_compiled():
  on_cpu = jax.default_backend() == "cpu"
  assert bool(compiled_for_cpu()) == on_cpu
  choose = jax.jit(lambda x: jax.lax.cond(compiled_for_cpu(), jnp.sin, jnp.cos, x))
  text = choose.lower(jnp.ones(3)).compile().as_text()
  assert (" sine(" in text, " cosine(" in text) == (on_cpu, not on_cpu), "the other branch is gone"
