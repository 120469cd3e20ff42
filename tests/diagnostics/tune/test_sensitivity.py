import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnostics.arguments import Call, gradient_of
from mpjax._diagnostics.tune.modules import modules_of
from mpjax._diagnostics.tune.sensitivity import overflows_of, projections_of
from mpjax._jaxprs.steps import body_of

BF16 = jnp.dtype(jnp.bfloat16)


def prepared(loss, *args):
  call = Call(args, {})
  program, _ = call.traced(gradient_of(loss))
  body = body_of(program)
  return body, call.operands, modules_of(body)


def alone(loss, *args):
  body, operands, modules = prepared(loss, *args)
  projections = projections_of(body, operands, slice(1, None), modules, BF16)
  return dict(zip(modules.paths, np.sqrt(np.mean(projections**2, axis=0)), strict=True))


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
        x, w = (a.astype(BF16).astype(jnp.float32) for a in (x, w))
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


def test_overflows_of_matmuls_and_of_other_operations():
  def loss(w, x):
    with jax.named_scope("hot"):
      y = (x * 1e4) @ w
    with jax.named_scope("warm"):
      y = y / 1e4 * 1e6 / 1e6
    with jax.named_scope("cold"):
      return jnp.mean(y @ w)

  body, operands, modules = prepared(loss, jnp.eye(4), jnp.full((2, 4), 30.0))
  (value, *grads), overflows = overflows_of(body, operands, modules, jnp.dtype("float16"))
  flags = dict(zip(modules.paths, overflows.tolist(), strict=True))
  assert (flags["hot"], flags["warm"], flags["cold"]) == (2, 1, 0)
  assert not overflows_of(body, operands, modules, BF16)[1].any()
  expected = jax.value_and_grad(loss)(*operands)
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  np.testing.assert_allclose(grads[0], expected[1], rtol=1e-5)


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
  with pytest.warns(UserWarning, match=r"tried in the order of their FLOPs"):
    errors = alone(loss, w, jnp.ones((2, 4)))
  modules = prepared(loss, w, jnp.ones((2, 4)))[-1]
  assert max(errors, key=errors.get) == modules.paths[np.argmax(modules.flops)]
