import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.flat import Call, gradient_of


def test_a_call_with_what_is_no_array():
  def fn(tree, n, *, name):
    assert (n, name) == (3, "a")
    return {"out": tree["x"] * n, "text": name}

  call = Call(({"x": jnp.ones(2), "flag": True}, 3), {"name": "a"}, "f")
  program, outputs = call.traced(fn)
  assert outputs == [("out",)]
  (out,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, *call.operands)
  np.testing.assert_array_equal(out, [3, 3])


def test_the_gradient_of_a_loss_with_aux_and_integers():
  def loss(tree, x):
    return jnp.sum(tree["w"] * x), "text"

  tree = {"n": jnp.arange(2), "w": jnp.ones(2), "flag": None}
  (value, aux), grads = gradient_of(loss, 4.0)(tree, jnp.asarray([1.0, 2.0]))
  assert value == 12
  assert aux == []
  np.testing.assert_array_equal(jax.tree.leaves(grads)[0], [4, 8])
