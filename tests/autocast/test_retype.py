"""Parameters of equations that name a dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mpjax._autocast._retype import retype, wants_precision

HIGHEST = lax.Precision.HIGHEST
X = jnp.ones((3, 3))
HALVES = [np.dtype(jnp.bfloat16), np.dtype("float16")]


def params_of(fun, *args):
  (eqn,) = [
    e for e in jax.make_jaxpr(fun)(*args).eqns if "update_jaxpr" in e.params or is_product(e)
  ]
  return eqn.primitive.name, eqn.params


def is_product(eqn):
  return "preferred_element_type" in eqn.params


@pytest.mark.parametrize(
  ("precision", "want"),
  [
    (None, False),
    (lax.Precision.DEFAULT, False),
    ((lax.Precision.DEFAULT, None), False),
    (HIGHEST, True),
    ((HIGHEST, lax.Precision.DEFAULT), True),
    ((None, lax.Precision.HIGH), True),
    (lax.DotAlgorithmPreset.F32_F32_F32, True),
  ],
  ids=str,
)
def test_a_wish_for_precision(precision, want):
  assert wants_precision({"precision": precision}) == want


def test_what_has_no_precision():
  assert not wants_precision({})


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products(dtype):
  for fun, args in (
    (lambda x: x @ x, (X,)),
    (
      lambda x: lax.conv(
        x[None, None], x[None, None], (1, 1), "SAME", preferred_element_type=jnp.float32
      ),
      (X,),
    ),
    (
      lambda x: lax.ragged_dot(x, x[None], jnp.asarray([3]), preferred_element_type=jnp.float32),
      (X,),
    ),
  ):
    name, params = params_of(fun, *args)
    made = retype(name, params, dtype)
    assert made["preferred_element_type"] == dtype
    assert {k: v for k, v in made.items() if k != "preferred_element_type"} == {
      k: v for k, v in params.items() if k != "preferred_element_type"
    }
    assert params["preferred_element_type"] == np.float32, "what was traced is left"


def test_a_product_that_says_nothing_goes_on_saying_nothing():
  name, params = params_of(lambda x: lax.dot(x, x), X)
  assert params["preferred_element_type"] is None
  assert retype(name, params, HALVES[0])["preferred_element_type"] is None


SCATTERS = {
  "scatter-add": (lambda x, u: x.at[0].add(u), 5.0),
  "scatter-mul": (lambda x, u: x.at[0].multiply(u), 6.0),
  "scatter-min": (lambda x, u: x.at[0].min(u), 2.0),
  "scatter-max": (lambda x, u: x.at[0].max(u), 3.0),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_combine_in_the_new_type(name, dtype):
  fun, combined = SCATTERS[name]
  found, params = params_of(fun, X, X[0])
  assert found == name
  made = retype(name, params, dtype)
  jaxpr = made["update_jaxpr"]
  assert {v.aval.dtype for v in (*jaxpr.invars, *jaxpr.outvars)} == {dtype}
  combine = jaxpr_as_fun(ClosedJaxpr(jaxpr, made["update_consts"]))
  (value,) = combine(jnp.asarray(2.0, dtype), jnp.asarray(3.0, dtype))
  assert value.dtype == dtype
  assert value == combined
  assert made["dimension_numbers"] == params["dimension_numbers"]


def test_scatter_without_a_program_is_left():
  name, params = params_of(lambda x, u: x.at[0].set(u), X, X[0])
  assert name == "scatter"
  assert retype(name, params, HALVES[0]) == params


def test_the_parameters_of_everything_else_are_left():
  params = {"axes": (0,)}
  assert retype("reduce_max", params, HALVES[0]) is params
