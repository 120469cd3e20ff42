"""One of two branches: which one is in the program, how often the step is traced, on what devices.

That a skipped step changes no bit, however it is skipped, is in test_loss_scaling.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.transforms._skip import compiled_for_cpu, step_or_skip

OLD = {"x": jnp.asarray([1.0, -0.0]), "n": jnp.asarray(3, jnp.int32)}


def step(old):
  return {"x": old["x"] * 2}, {"x": jnp.exp(old["x"]), "n": old["n"] + 1}


def test_outside_of_jit_what_is_skipped_does_not_run():
  seen = []

  def spy(old):
    seen.append(isinstance(old["x"], jax.core.Tracer))
    return step(old)

  _, state = step_or_skip(jnp.asarray(False), spy, OLD)
  assert seen == [True], "only looked at for its shapes"
  assert state is OLD


def test_under_jit_only_one_branch_is_in_the_way():
  calls = []

  def counted(old):
    calls.append(1)
    return step(old)

  program = jax.make_jaxpr(lambda c, old: step_or_skip(c, counted, old))(True, OLD)
  names = [eqn.primitive.name for eqn in program.eqns]
  assert "cond" in names
  assert "exp" not in names
  assert len(calls) == 1, "the shapes of the branch that skips are those of the same trace"
  # Of several members of an ensemble some may step: there both are computed, and selected from.
  several = jax.make_jaxpr(jax.vmap(lambda c: step_or_skip(c, step, OLD)))(jnp.ones(2, bool))
  assert "exp" in str(several)
  assert "cond" not in [eqn.primitive.name for eqn in several.eqns]


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_where_the_new_state_varies(devices, check_vma):
  # One branch returns what differs by device, the other the old state, which does not.
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

  def one_device(condition, shard):
    step = lambda old: (shard * 2, {"x": old["x"] + shard})  # noqa: E731
    updates, state = step_or_skip(condition, step, {"x": jnp.ones(2)})
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


def test_whether_the_program_is_for_a_cpu_is_known_when_it_is_compiled():
  on_cpu = jax.default_backend() == "cpu"
  assert bool(compiled_for_cpu()) == on_cpu
  choose = jax.jit(lambda x: jax.lax.cond(compiled_for_cpu(), jnp.sin, jnp.cos, x))
  text = choose.lower(jnp.ones(3)).compile().as_text()
  assert (" sine(" in text, " cosine(" in text) == (on_cpu, not on_cpu), "the other branch is gone"
