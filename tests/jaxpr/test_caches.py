"""Caches of what is computed from jaxprs and from types."""

import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._jaxpr.caches import cached_per_jaxpr, remembered_off_mesh

X = jnp.ones(2)


@pytest.mark.slow
def test_a_result_is_kept_for_each_key_as_long_as_the_jaxpr_is(collect):
  calls = []

  @cached_per_jaxpr
  def count(jaxpr, *key):
    calls.append(key)
    return len(jaxpr.eqns)

  jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X).jaxpr
  assert [count(jaxpr, 1), count(jaxpr, 1), count(jaxpr, 2)] == [2, 2, 2]
  assert calls == [(1,), (2,)]
  alive = weakref.ref(jaxpr)
  del jaxpr
  jax.clear_caches()
  collect()
  assert alive() is None


def test_results_for_types_on_a_mesh_are_not_kept(devices):
  calls = []

  @remembered_off_mesh
  def note(aval):
    calls.append(aval)

  plain = jax.typeof(X)
  note(plain)
  note(plain)
  assert len(calls) == 1
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=devices[:2])
  on_mesh = jax.typeof(jax.device_put(X, NamedSharding(mesh, PartitionSpec("data"))))
  note(on_mesh)
  note(on_mesh)
  assert len(calls) == 3
