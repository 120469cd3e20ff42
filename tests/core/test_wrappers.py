"""Wrappers of functions look like these functions, to people, to JAX and to Flax."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._core.wrappers import name_of

CASES = {
  "autocast": functools.partial(mpjax.autocast, policy="mixed_float16"),
  "scaled": functools.partial(mpjax.scaled, opt_state=2.0**10),
  "full_precision": mpjax.full_precision,
  "low_precision": mpjax.low_precision,
}
CASES["both"] = lambda fn: CASES["scaled"](CASES["autocast"](fn))


def loss_fn(model, x, factor=1.0, *, power=1):
  return factor * jnp.mean(model(x) ** power)


@pytest.mark.parametrize("wrap", CASES.values(), ids=CASES)
@pytest.mark.parametrize("fixed", [{}, {"power": 2}, {"factor": 3.0}])
def test_a_partial_of_a_loss_can_be_differentiated_like_a_loss(wrap, fixed):
  # The trainer fixes arguments of the loss that it is given, or is given a loss with fixed ones.
  model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
  for fn in (wrap(functools.partial(loss_fn, **fixed)), functools.partial(wrap(loss_fn), **fixed)):
    assert inspect.signature(fn) == inspect.signature(functools.partial(loss_fn, **fixed))
    for differentiate in (jax.value_and_grad, nnx.value_and_grad):
      loss, _ = differentiate(fn)(model, x)
      assert jnp.allclose(loss, loss_fn(model, x, **fixed), rtol=0.01)


@pytest.mark.parametrize(
  ("fn", "name"),
  [(loss_fn, "loss_fn"), (functools.partial(loss_fn), "partial")],
  ids=["a function", "a partial"],
)
def test_a_function_without_a_name_has_that_of_its_class(fn, name):
  assert name_of(fn) == name
