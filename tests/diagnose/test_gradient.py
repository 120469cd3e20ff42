import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnose.gradient import gradient_of


def test_the_gradient_of_a_loss_with_aux_and_integers():
  def loss(tree, x):
    return jnp.sum(tree["w"] * x), "text"

  tree = {"n": jnp.arange(2), "w": jnp.ones(2), "flag": None}
  (value, aux), grads = gradient_of(loss, 4.0)(tree, jnp.asarray([1.0, 2.0]))
  assert value == 12
  assert aux == []
  np.testing.assert_array_equal(jax.tree.leaves(grads)[0], [4, 8])
