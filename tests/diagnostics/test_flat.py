import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._diagnostics.flat import Call, gradient_of
from tests.errors import check_error


def test_a_call_with_what_is_no_array():
  def fn(tree, n, *, name):
    assert (n, name) == (3, "a")
    return {"out": tree["x"] * n, "text": name}

  call = Call(({"x": jnp.ones(2), "flag": True}, 3), {"name": "a"}, "f")
  program, outputs = call.traced(fn)
  assert outputs == [("out",)]
  (out,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, *call.operands)
  np.testing.assert_array_equal(out, [3, 3])


def test_traced_arguments_are_refused():
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    jax.jit(lambda x: Call((x,), {}, "f"))(jnp.ones(2))
  fix = "Call it on the host"
  check_error(excinfo, where="f(*args)", expected="concrete", got="a traced one", fix=fix)


def test_the_gradient_of_a_loss_with_aux_and_integers():
  def loss(tree, x):
    return jnp.sum(tree["w"] * x), "text"

  tree = {"n": jnp.arange(2), "w": jnp.ones(2), "flag": None}
  (value, aux), grads = gradient_of(loss, 4.0)(tree, jnp.asarray([1.0, 2.0]))
  assert value == 12
  assert aux == []
  np.testing.assert_array_equal(jax.tree.leaves(grads)[0], [4, 8])
