"""Matmuls in a recipe whose roundings are operations."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import mpjax
from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditRecord
from tests.autocast.rig import under
from tests.errors import refused
from tests.format_oracle import normal
from tests.matmul.rig import FORMATS, layer
from tests.programs import equations

W, X = normal(1, (128, 256)), normal(0, (128, 128))


def loss_in(format):
  fun = under(layer, matmul=format)
  return lambda w, x: jnp.sum(jnp.tanh(fun(w, jnp.tanh(x))))


def shown(fun, *args):
  with AUDIT(AuditRecord(shows_roundings=True)):
    return jax.make_jaxpr(fun)(*args)


# The forward pass quantises two operands, and each of two gradients its cotangent. Scales that lie
# along the sums do not fit the sums of a gradient, so the other operand is quantised again.
ROUNDINGS = {
  "mxfp8": 6,
  "nvfp4": 6,
  "float8 block": 6,
  "float8 tensor": 4,
  "float8 tensor, half": 3,
  "float8 row": 6,
  "int8 row": 2,
  "int8 row, gradients": 6,
  "int8 tensor, gradients": 4,
}


@pytest.mark.parametrize(("name", "wanted"), ROUNDINGS.items())
def test_quantising_an_operand_is_one_operation(name, wanted):
  program = shown(jax.grad(loss_in(FORMATS[name]), (0, 1)), W, X)
  counts = collections.Counter(eqn.primitive.name for eqn, _ in equations(program))
  assert (counts["format_rounding"], counts["dot_general"]) == (wanted, 3)
  steps = {"clamp", "round", "bitcast_convert_type", "block_scaled_dot", "first_order"}
  assert not counts.keys() & steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDINGS)
def test_the_gradients_are_those_of_the_recipe(name):
  gradient = jax.grad(loss_in(FORMATS[name]), (0, 1))
  program = shown(gradient, W, X)
  found = jax.jit(jaxpr_as_fun(program))(W, X)
  for one, other in zip(found, jax.jit(gradient)(W, X), strict=True):
    # Float8 rounds a result before and after it is scaled, here once. The errors of the formats are
    # 0.01 to 0.2.
    assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)


@pytest.mark.parametrize("name", ["mxfp8", "float8 tensor"])
def test_each_index_of_a_vmap_has_its_own_scales(name):
  xs = np.stack([X, 100 * X])
  fun = under(layer, matmul=FORMATS[name])
  program = shown(jax.vmap(fun, (None, 0)), W, xs)
  found = jax.jit(jaxpr_as_fun(program))(W, xs)[0]
  for one, x in zip(found, xs, strict=True):
    wanted = jax.jit(fun)(W, x)
    assert np.linalg.norm(one - wanted) < 0.01 * np.linalg.norm(wanted)


def test_the_derivative_of_a_gradient_is_refused():
  again = jax.grad(lambda w: jnp.sum(jax.grad(loss_in(mpjax.MXFP8()))(w, X)))
  with refused(TypeError, "mxfp8", "first derivatives", "of its gradient", "mixed_bfloat16"):
    shown(again, W)
