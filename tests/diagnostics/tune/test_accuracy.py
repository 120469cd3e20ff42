import math

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax._diagnostics.arguments import Call
from mpjax._diagnostics.tune.accuracy import accuracy_of, relative_error
from mpjax._jaxprs.steps import body_of


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
  programs = body_of(call.traced(block)[0]), body_of(call.traced(low)[0])
  gradients = {"net/second": [(w, 1.01 * w)], "net/third": [(w, w)], "net": []}
  errors = accuracy_of(programs, call.operands, gradients)
  assert list(errors) == ["net/first", "net/second", "net", "net/third"]
  with jax.default_matmul_precision("highest"):
    exact = np.asarray(x @ w, np.float64)
  rounded = np.asarray(x.astype("bfloat16") @ w.astype("bfloat16")).astype(np.float64)
  expected = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
  assert math.isclose(errors["net/first"].forward, expected, rel_tol=1e-4)
  assert errors["net/second"].forward > errors["net/first"].forward
  assert 0 < errors["net"].forward < 0.02  # The sum of both.
  assert math.isclose(errors["net/second"].gradient, 0.01, rel_tol=1e-4)
  assert math.isclose(errors["net"].gradient, 0.01 / math.sqrt(2), rel_tol=1e-4)
  assert (errors["net/third"].gradient, math.isnan(errors["net/third"].forward)) == (0, True)


def test_what_autocast_puts_into_calls_is_compared_with_what_it_was():
  def loss(w, x):
    with jax.named_scope("block"):
      return jnp.sum(jax.lax.scan(lambda h, _: (h + jax.nn.gelu(h @ w), None), x, None, 3)[0])

  call = Call((jnp.eye(8) / 2, jnp.linspace(0.1, 3, 32).reshape(4, 8)), {})
  programs = [body_of(call.traced(fn)[0]) for fn in (loss, mpjax.autocast(loss, "mixed_bfloat16"))]
  assert 1e-4 < accuracy_of((programs[0], programs[1]), call.operands, {})["block"].forward < 0.02


def test_errors_of_nothing_and_of_what_is_not_finite():
  one, bad = np.ones(2), np.asarray([1, math.nan])
  assert math.isnan(relative_error([]))
  assert relative_error([(one, bad)]) == math.inf
  assert relative_error([(np.asarray([3j, 4]), np.asarray([3j, 9]))]) == 1
