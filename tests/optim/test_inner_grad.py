"""Gradients inside of a loss: their scale, their dtype, and what the outer gradients lose."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import refused

CALL = "mpjax.inner_grad(fun)"
X = jax.random.normal(jax.random.key(0), (8, 6))


class Critic(nn.Module):
  """A critic whose results, and gradients, have a size."""

  size: float = 1.0

  @nn.compact
  def __call__(self, x):
    h = nn.tanh(nn.Dense(32)(x))
    h = nn.tanh(nn.Dense(32)(h))
    return nn.Dense(1)(h)[..., 0] * self.size


def penalty(model, params, size, grad):
  """Returns the gradient penalty of WGAN-GP, relative to the size."""
  grads = grad(lambda x: model.apply({"params": params}, x).sum())(X)
  norms = jnp.sqrt(jnp.sum((grads / size) ** 2, -1) + 1e-12)
  return jnp.mean((norms - 1) ** 2)


@jax.jit
def outer_errors():
  """Returns errors of a penalty's gradients under mixed_float16, relative to float32, by size."""
  errors, params = {}, Critic().init(jax.random.key(1), X)["params"]
  outer = jax.grad(lambda params, *args: penalty(args[0], params, *args[1:]))
  flat = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
  scaled = mpjax.inner_grad
  for size, grad in {1.0: jax.grad, 1e-5: jax.grad, 1e-8: scaled, 1e3: scaled}.items():
    low = mpjax.with_policy(Critic(size), "mixed_float16")
    exact = flat(outer(params, Critic(size), size, jax.grad))
    errors[size] = jnp.linalg.norm(flat(outer(params, low, size, grad)) - exact)
    errors[size] /= jnp.linalg.norm(exact)
  return errors


def test_outer_gradients_of_a_penalty_are_as_exact_as_those_of_a_large_critic():
  errors = outer_errors()
  assert max(errors[1e-8], errors[1e3]) < errors[1.0] + 1e-3
  assert errors[1e-5] > 20 * errors[1.0], "it needs a scale"


def small(x):
  # The gradient is 2^-26. The smallest number of float16 is 2^-24.
  return jnp.sum(x.astype(jnp.float16) * jnp.float16(2.0**-13) * jnp.float16(2.0**-13))


def test_a_small_gradient_does_not_underflow():
  x = jnp.ones(3)
  assert jax.grad(small)(x).tolist() == [0.0] * 3
  for scale in (None, 2.0**10):
    assert mpjax.inner_grad(small, scale=scale)(x).tolist() == [2.0**-26] * 3


def test_a_fixed_scale_is_right_where_xla_joins_literal_factors():
  # With a measured scale their product underflows, as it does in the function itself.
  found = jax.jit(mpjax.inner_grad(small, scale=2.0**15))(jnp.ones(3))
  assert found.tolist() == [2.0**-26] * 3


def test_a_gradient_that_overflows_at_the_first_scale_is_not_scaled():
  def large(x):
    return jnp.sum(x.astype(jnp.float16) * jnp.float16(128)).astype(jnp.float32)

  x = jnp.ones(3)
  assert np.isinf(mpjax.inner_grad(large, scale=2.0**15)(x)).all()
  assert mpjax.inner_grad(large)(x).tolist() == [128.0] * 3


def test_a_gradient_of_zero_stays_zero():
  assert mpjax.inner_grad(lambda x: jnp.sum(x * 0))(jnp.ones(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [None, 2.0**15, 2.0**-3])
def test_in_float32_the_scale_is_invisible(scale):
  def energy(x, y):
    return jnp.sum(jnp.tanh(x) * jnp.exp(y))

  y = jax.random.normal(jax.random.key(1), X.shape)
  # Not compiled: XLA fuses the two in other ways.
  found = mpjax.inner_grad(energy, (0, 1), scale=scale)(X, y)
  expected = jax.grad(energy, (0, 1))(X, y)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)


def test_results_beside_the_scalar_come_back():
  grads, aux = mpjax.inner_grad(lambda x: (jnp.sum(x**2), {"x": x}), has_aux=True)(X)
  np.testing.assert_array_equal(grads, 2 * X)
  np.testing.assert_array_equal(aux["x"], X)


def test_gradients_of_float16_arguments_are_in_float32():
  x = jnp.ones(3, jnp.float16)
  grads = mpjax.inner_grad(lambda x: jnp.sum(x * jnp.float16(2.0**-20)))(x)
  assert grads.dtype == jnp.float32
  assert grads.tolist() == [2.0**-20] * 3


def test_under_vmap_each_example_has_a_scale_of_its_own():
  sizes = jnp.asarray([1.0, 2.0**-30])

  def energy(x, size):
    return jnp.sum((x * size).astype(jnp.float16).astype(jnp.float32) * 2.0**-10)

  found = jax.vmap(mpjax.inner_grad(energy))(jnp.ones((2, 3)), sizes)
  expected = np.outer([2.0**-10, 2.0**-40], np.ones(3))
  np.testing.assert_array_equal(found, expected)


def test_inside_of_an_autocast_loss_it_divides_in_float32():
  w = jnp.full((8, 8), 2.0**-14)

  def loss(w, x):
    return jnp.sum(mpjax.inner_grad(lambda x: jnp.sum(x @ w * 2.0**-14))(x))

  x = jnp.ones((4, 8))
  assert float(mpjax.autocast(loss, "mixed_float16")(w, x)) == 4 * 8 * 8 * 2.0**-28


def test_a_power_of_two_reaches_parameters_through_two_inner_steps():
  # MAML: parameters after two inner steps, as a function of the parameters before.
  def adapted(w, grad):
    for _ in range(2):
      w = w - 0.1 * grad(lambda w: jnp.sum((w.astype(jnp.float16) * jnp.float16(2.0**-12)) ** 2))(w)
    return jnp.sum(w)

  w = jnp.asarray([1.0, 2.0])
  factor = (1 - 0.2 * 2.0**-24) ** 2
  np.testing.assert_allclose(jax.grad(adapted)(w, mpjax.inner_grad), factor, rtol=1e-7)


class CountingCritic(nnx.Module):
  """Its float16 gradients overflow at a scale of 2^15."""

  def __init__(self, rngs):
    self.a, self.b = nnx.Linear(6, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
    self.b.kernel[...] *= 64
    self.calls = nnx.BatchStat(jnp.zeros(()))

  def __call__(self, x):
    self.calls[...] += 1
    return self.b(nnx.relu(self.a(x)))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_the_scale_is_measured_for_nnx_modules_which_are_written_to_once(wrap):
  view = mpjax.with_policy(CountingCritic(nnx.Rngs(0)), "mixed_float16")
  gradient = wrap(lambda view, x: mpjax.inner_grad(lambda x, view: view(x).sum())(x, view))
  found = gradient(view, X)
  expected = jax.grad(lambda x: CountingCritic(nnx.Rngs(0))(x).sum())(X)
  assert np.max(np.abs(expected)) > 1
  np.testing.assert_allclose(found, expected, rtol=2e-2, atol=1e-2)
  assert view.calls[...] == 1


def test_gradients_of_a_module_are_a_state():
  model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
  grads = mpjax.inner_grad(lambda model: model(X).sum())(model)
  assert isinstance(grads, nnx.State)
  np.testing.assert_allclose(grads["kernel"][...][:, 0], X.sum(0), rtol=1e-6)


def test_errors_of_inner_grad():
  with refused(TypeError, CALL, "a function that returns a scalar", "3", "second call"):
    mpjax.inner_grad(3)
  with refused(ValueError, "mpjax.inner_grad(scale)", "a positive number", "0", "power of two"):
    mpjax.inner_grad(jnp.sum, scale=0)
  with refused(ValueError, CALL, "a floating scalar", "(8, 6)", "Return one number"):
    mpjax.inner_grad(lambda x: x)(X)


def test_a_function_of_nnx_modules_writes_once():
  norm = nnx.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))
  grads = mpjax.inner_grad(lambda x, norm: norm(x)[0].sum())(X, norm)
  expected = nnx.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(grads, nnx.grad(lambda x, n: n(x)[0].sum())(X, expected))
  np.testing.assert_array_equal(norm.mean[...], expected.mean[...])
