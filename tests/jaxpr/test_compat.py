"""What depends on the version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._jaxpr import compat


def test_is_in_program():
  def seen(under, x):
    found = []
    under(lambda x: (found.append(compat.is_in_program(x)), jnp.sum(x))[1])(x)
    return found

  for under, expected in ((jax.make_jaxpr, True), (jax.jit, True), (jax.vmap, False)):
    assert seen(under, jnp.ones(2)) == [expected]
  assert seen(jax.grad, jnp.ones(())) == [False]
  for concrete in (1.0, np.ones(2), jnp.ones(2)):
    assert not compat.is_in_program(concrete)
    assert not compat.comes_from_program(concrete)


def _jvp(fn):
  return lambda x: jax.jvp(fn, (x,), (x,))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("around", [jax.grad, _jvp, jax.hessian, lambda f: jax.vmap(jax.grad(f))])
def test_what_is_differentiated_comes_from_a_program_or_does_not(around, inside):
  seen = []

  def fn(x):
    seen.append(compat.comes_from_program(x))
    return jnp.sum(x * x)

  fun = around(fn)
  (jax.jit(fun) if inside else fun)(jnp.ones((2, 2)))
  assert seen == [inside]


def test_context_of_has_the_mesh_of_the_equation(devices):
  mesh = jax.sharding.Mesh(np.asarray(devices), ("d",))
  with jax.set_mesh(mesh):
    program = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(2))
  assert jax.sharding.get_abstract_mesh().empty
  with compat.context_of(program.eqns[-1]):
    assert jax.sharding.get_abstract_mesh().axis_names == ("d",)
  with compat.context_of(object()):
    assert jax.sharding.get_abstract_mesh().empty


def test_a_jaxpr_with_an_object_is_high(set_flag):
  set_flag("jax_remat3", True)
  jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jax.checkpoint(jnp.cos)(x)))(jnp.ones(2)).jaxpr
  assert jaxpr.is_high
  without = compat.with_equations(jaxpr, jaxpr.eqns[1:], invars=jaxpr.eqns[1].invars)
  assert not without.is_high
  assert compat.with_equations(without, jaxpr.eqns, invars=jaxpr.invars).is_high
