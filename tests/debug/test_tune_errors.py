import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._debug.arguments import Call
from mpjax._debug.ranges import gradient_of
from mpjax._debug.tune_errors import errors_alone, forward_errors, relative_error
from mpjax._debug.tune_modules import modules_of
from mpjax._jaxpr.runner import run_on_host
from mpjax._jaxpr.steps import body_of
from tests.models.values import normal


def block(w, x):
  with jax.named_scope("net"):
    with jax.named_scope("first"):
      y = x @ w
    with jax.named_scope("second"):
      z = jnp.tanh(y) @ w
    return jnp.sum(y + z)


def test_errors_by_module_are_those_of_numpy():
  w = jax.random.normal(jax.random.key(0), (8, 8))
  x = jax.random.normal(jax.random.key(1), (4, 8))
  call, low = Call((w, x), {}), mpjax.autocast(block, "mixed_bfloat16")
  errors = forward_errors(*(body_of(call.traced(f)[0]) for f in (block, low)), call.arrays)
  assert set(errors) == {"net/first", "net/second", "net"}
  with jax.default_matmul_precision("highest"):
    exact = np.asarray(x @ w, np.float64)
  rounded = np.asarray(x.astype("bfloat16") @ w.astype("bfloat16")).astype(np.float64)
  expected = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
  assert math.isclose(errors["net/first"], expected, rel_tol=1e-4)
  assert errors["net/second"] > errors["net/first"]
  assert 0 < errors["net"] < 0.02  # The sum of both.


def test_what_autocast_puts_into_calls_is_compared_with_what_it_was():
  def loss(w, x):
    with jax.named_scope("block"):
      return jnp.sum(jax.lax.scan(lambda h, _: (h + jax.nn.gelu(h @ w), None), x, None, 3)[0])

  call = Call((jnp.eye(8) / 2, jnp.linspace(0.1, 3, 32).reshape(4, 8)), {})
  low = mpjax.autocast(loss, "mixed_bfloat16")
  errors = forward_errors(*(body_of(call.traced(f)[0]) for f in (loss, low)), call.arrays)
  assert 1e-4 < errors["block"] < 0.02


def test_errors_of_nothing_and_of_what_is_not_finite():
  assert math.isnan(relative_error([]))
  assert relative_error([(np.ones(2), np.asarray([1, math.nan]))]) == math.inf
  assert relative_error([(np.asarray([3j, 4]), np.asarray([3j, 9]))]) == 1


def alone(loss, *args, dtype="bfloat16", float8=()):
  call = Call(args, {})
  body = body_of(call.traced(gradient_of(loss))[0])
  modules = [*modules_of(body)]

  def gradient(look):
    return run_on_host(body, call.arrays, look)[1:]

  modules_of_one = [[path] for path in modules]
  errors = errors_alone(gradient, modules_of_one, jnp.dtype(dtype), float8)
  return dict(zip(modules, errors.tolist(), strict=True))


def layers(w, x):
  with jax.named_scope("first"):
    y = x @ w[0]
  with jax.named_scope("second"):
    y = y @ w[1]
  return jnp.sum(y**2)


def test_the_error_of_each_module_alone():
  w = jax.random.normal(jax.random.key(0), (2, 16, 16))
  x = jax.random.normal(jax.random.key(1), (8, 16))
  errors = alone(layers, w, x)
  exact = jax.grad(layers)(w, x)

  def rounded(w, x, which):
    def matmul(x, w, low):
      if low:
        x, w = (a.astype("bfloat16").astype(jnp.float32) for a in (x, w))
      return x @ w

    y = matmul(x, w[0], which == 0)
    return jnp.sum(matmul(y, w[1], which == 1) ** 2)

  for which, path in enumerate(("first", "second")):
    error = jnp.linalg.norm(jax.grad(rounded)(w, x, which) - exact) / jnp.linalg.norm(exact)
    # The backward matmuls and the results are rounded too.
    assert 0.4 * error < errors[path] < 4 * error


def test_a_loop_of_which_jax_has_no_backward_pass():
  def loss(w, x):
    with jax.named_scope("in_loop"):
      scale = jax.lax.while_loop(lambda s: s < 4, lambda s: s + 1 + 0 * jnp.sum(x @ x.T), 0.0)
    with jax.named_scope("layer"):
      return jnp.sum((x @ w) ** 2) * jax.lax.stop_gradient(scale)

  assert alone(loss, jnp.full((4, 4), 1.234), jnp.full((2, 4), 0.777))["layer"] > 1e-4


def test_a_module_whose_matmul_overflows_has_an_infinite_error():
  def loss(w, x):
    with jax.named_scope("hot"):  # Its operand does.
      y = (x * 1e4) @ w
    with jax.named_scope("warm"):  # No matmul.
      y = y / 1e4 * 1e6 / 1e6
    with jax.named_scope("cold"):
      return jnp.mean(y @ w)

  args = jnp.eye(4), jnp.full((2, 4), 30.0)
  assert math.isinf(alone(loss, *args, dtype="float16")["hot"])
  assert alone(loss, *args, dtype="float16")["cold"] < 0.01
  assert alone(loss, *args)["hot"] < 0.1
  # The largest number is one, and so is its gradient; the sum of four of them is no matmul.
  largest = alone(
    lambda w, x: jnp.sum(x @ w), jnp.eye(4), jnp.full((1, 4), 65504.0), dtype="float16"
  )
  assert largest[""] == 0


def test_a_gradient_without_a_derivative_is_said_to_have_none():
  @jax.custom_vjp
  def measured(y):
    return y

  def backward(kept, bar):
    # The host computes it, and JAX knows no derivative of that.
    return (jax.pure_callback(np.sin, jax.ShapeDtypeStruct(bar.shape, bar.dtype), kept) * bar,)

  measured.defvjp(lambda y: (y, y), backward)

  def loss(w, x):
    return layers(w, measured(x @ w[0]))

  w = jax.random.normal(jax.random.key(0), (2, 4, 4))
  with pytest.warns(UserWarning, match=r"modules with few FLOPs are tried first"):
    errors = alone(loss, w, jnp.ones((2, 4)))
  assert set(errors.values()) == {1.0}


def test_the_forward_error_of_a_float8_matmul_is_that_of_its_rescaled_result():
  low = mpjax.autocast(block, "p=float32,c=bfloat16,o=float32,matmul=float8:skip=none")
  call = Call((normal(16, 16), 0.02 * normal(16, 16, seed=1)), {})
  errors = forward_errors(*(body_of(call.traced(f)[0]) for f in (block, low)), call.arrays)
  assert 0.01 < errors["net/first"] < 0.1
  assert 0.01 < errors["net/second"] < 0.1


def test_modules_in_float8_are_expected_to_have_larger_errors():
  w, x = jax.random.normal(jax.random.key(0), (2, 16, 16)), normal(8, 16)
  bfloat16, float8 = alone(layers, w, x), alone(layers, w, x, float8=["first"])
  assert float8["first"] > 4 * bfloat16["first"]
  assert float8["second"] == pytest.approx(bfloat16["second"])
