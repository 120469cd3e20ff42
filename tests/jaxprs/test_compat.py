"""What depends on the version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._jaxprs import compat


@pytest.mark.parametrize(
  ("under", "expected"),
  [(jax.make_jaxpr, True), (jax.jit, True), (jax.vmap, False), (jax.grad, False)],
  ids=["make_jaxpr", "jit", "vmap", "grad"],
)
def test_is_in_program(under, expected):
  seen = []

  def fn(x):
    seen.append(compat.is_in_program(x))
    return jnp.sum(x)

  under(fn)(jnp.ones(()) if under is jax.grad else jnp.ones(2))
  assert seen == [expected]


def _jvp(fn):
  return lambda x: jax.jvp(fn, (x,), (x,))


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


@pytest.mark.parametrize("x", [1.0, np.ones(2), jnp.ones(2)], ids=["number", "numpy", "jax"])
def test_a_concrete_value_is_in_no_program(x):
  assert not compat.is_in_program(x)
  assert not compat.comes_from_program(x)


def test_context_of_has_the_mesh_of_the_equation(devices):
  mesh = jax.sharding.Mesh(np.asarray(devices), ("d",))
  with jax.set_mesh(mesh):
    program = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(2))
  assert jax.sharding.get_abstract_mesh().empty
  with compat.context_of(program.eqns[-1]):
    assert jax.sharding.get_abstract_mesh().axis_names == ("d",)
  with compat.context_of(object()):
    assert jax.sharding.get_abstract_mesh().empty
