"""`value_and_grad` for a state and for an `nnx.Optimizer`: the gradients are the scaled ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))


def loss_fn(model, x):
  return jnp.sum(model(x) ** 2)


def test_an_nnx_optimizer_and_a_state_give_the_same_scaled_gradients():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  mpjax.value_and_grad(loss_fn, opt_state=optimizer)(model, X)  # As the signature calls it.
  loss, grads = mpjax.value_and_grad(loss_fn, optimizer)(model, X)
  graphdef, params = nnx.split(model, nnx.Param)
  plain, expected = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X))(params)
  of_state = mpjax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X), TX.init(params))
  for found, tree in ((loss, grads), of_state(params)):
    assert float(found) == float(plain)
    jax.tree.map(lambda g, e: np.testing.assert_array_equal(g, 8 * e), tree, expected)


def test_options_are_passed_on():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  both = mpjax.value_and_grad(lambda x, m: (loss_fn(m, x), "aux"), optimizer, 1, has_aux=True)
  (loss, aux), grads = both(X, model)
  assert aux == "aux"
  assert loss.shape == ()
  assert set(grads) == {"kernel", "bias"}
