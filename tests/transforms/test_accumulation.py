"""Windows of micro-batches: when they end, what the mean is, that nothing moves inside of one."""

import jax.numpy as jnp
import optax
import pytest

import mpjax
from tests.errors import check_error

PARAMS = {"w": jnp.asarray([1.0, -0.0, 3.0]), "b": jnp.asarray(-0.0)}


@pytest.mark.parametrize(
  ("grads", "got"),
  [
    ({"w": jnp.ones(3)}, "nothing at ['b']"),
    ({"w": jnp.ones(4), "b": jnp.ones(())}, "shape [4] for shape [3] at ['w']"),
    ({"w": jnp.arange(3), "b": jnp.ones(())}, "int32 for float32 at ['w']"),
    ([jnp.ones(3), jnp.ones(())], "nothing at ['b']"),
    (None, "nothing at ['b']"),
  ],
)
@pytest.mark.parametrize("with_params", [True, False])
def test_gradients_of_another_tree(grads, got, with_params):
  tx = mpjax.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError) as error:
    tx.update(grads, tx.init(PARAMS), PARAMS if with_params else None)
  check_error(
    error,
    where="mpjax.accumulate(inner).update(updates)",
    expected="the leaves of params",
    got=got,
    fix="the very tree that is passed as params",
    builtin=ValueError,
  )
