"""A primitive of another library that runs a jaxpr, before and after it is a row of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._autocast import rewrite
from mpjax._jaxpr import primitives, reader, runner
from mpjax._jaxpr.primitives import HIGHER_ORDER, Holds
from tests.autocast.rig import repeat_p
from tests.programs import dtypes_of

W, X = np.eye(8, dtype=np.float32), np.ones((2, 8), np.float32)


def grows(w, x):
  jaxpr = jax.make_jaxpr(lambda w, x: jnp.exp(x @ w))(w, x)
  return jnp.sum(repeat_p.bind(w, x, jaxpr=jaxpr, times=3)[0])


@pytest.fixture
def register(monkeypatch):
  """Adds the primitive to the table, and says how an equation of it runs its jaxpr."""

  def rows(holds, **runs):
    row = primitives.Row("repeat_times", holds=holds, jaxpr_params=("jaxpr",))
    monkeypatch.setattr(primitives, "FACTS", {**primitives.FACTS, "repeat_times": row})
    monkeypatch.setattr(primitives, "HIGHER_ORDER", HIGHER_ORDER | {"repeat_times"})
    inner = lambda eqn: (reader.Inner(eqn.params["jaxpr"], operands=(0, 1), **runs),)  # noqa: E731
    monkeypatch.setitem(reader._READERS, holds, inner)

  return rows


def test_a_loop_that_runs_as_another_does_is_a_row_and_how_its_parameters_are_read(register):
  register(Holds.SCAN, times=3, carry=range(1, 2))
  fast = mpjax.autocast(grows, "mixed_bfloat16")
  cast = jax.make_jaxpr(fast)(W, X)
  assert [dtypes_of(cast, name) for name in ("dot_general", "exp")] == [{"bfloat16"}, {"float32"}]
  assert mpjax.audit(fast)(W, X).flops == {("forward", "bfloat16"): 3 * 2 * 2 * 8 * 8}
  assert "iteration 1" in repr(mpjax.find_nonfinite(grows)(100 * W, X / 25))


@pytest.mark.parametrize("runs", [{"times": 3}, {"carry": range(1, 2)}], ids=str)
def test_a_kind_of_loop_that_nothing_runs_is_not_entered(register, runs):
  register("a new kind", **runs)
  with pytest.warns(UserWarning, match=r"autocast: the primitive 'repeat_times'"):
    cast = jax.make_jaxpr(mpjax.autocast(grows, "mixed_bfloat16"))(W, X)
  assert dtypes_of(cast, "dot_general") == {"float32"}
  with pytest.warns(UserWarning, match=r"audit: the primitive 'repeat_times'"):
    assert mpjax.audit(grows)(W, X).flops == {}
  assert "repeat_times" in repr(mpjax.find_nonfinite(grows)(100 * W, X / 25))


def test_autocast_warns_of_a_kind_without_a_rule(register):
  register("a new kind")  # As a call, which the diagnostics write out.
  with pytest.warns(UserWarning, match=r"autocast: the primitive 'repeat_times'"):
    jax.make_jaxpr(mpjax.autocast(grows, "mixed_bfloat16"))(W, X)


def test_each_kind_is_in_every_table():
  not_entered = {Holds.BINARY, Holds.KERNEL, Holds.PLATFORM}
  assert reader._READERS.keys() == {None, *Holds}
  assert runner._ENTER.keys() == primitives.NESTED
  assert rewrite._WRITERS.keys() == {*Holds} - not_entered
  assert {primitives.FACTS[name].holds for name in HIGHER_ORDER} == {*Holds} - not_entered
