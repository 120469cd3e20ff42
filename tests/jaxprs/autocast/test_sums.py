"""What is added up in a derivative is added up in float32, and nothing more is saved for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import mpjax
from mpjax._jaxprs.count import residual_bytes
from tests import programs
from tests.jaxprs.autocast import checks

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
ROWS = 4096
EYE = jnp.eye(3)
ONES = jnp.ones((ROWS, 3))


def added_in_half(fun, *args):
  """Returns the sums of low-precision numbers in a jaxpr: what JAX refuses, and other sums."""
  with jax.allow_f16_reductions(False):
    return checks.sums(jax.make_jaxpr(fun)(*args))


def check_gradient(fun, half, *args):
  """Compares a gradient with that in float32, where every term and every partial sum is exact."""
  found = jax.grad(mpjax.autocast(fun, half))
  assert added_in_half(found, *args) == []
  np.testing.assert_allclose(
    programs.run(found, *args), programs.run(jax.grad(fun), *args), rtol=float(jnp.finfo(half).eps)
  )


# What is broadcast.

ADD = {
  "bias": lambda y, b: y + b[None],
  "repeated": lambda y, b: y - jnp.broadcast_to(b, y.shape),
  "row of a matmul": lambda y, b: y + (jnp.ones((1, 3)) @ jnp.diag(b)),
  "activation": lambda y, b: y + jnp.tanh(jnp.ones((1, 3)) @ jnp.diag(b))[:, None][0],
  "tile": lambda y, b: y + jnp.tile(jnp.ones((1, 3)) @ jnp.diag(b), (ROWS, 1)),
}
MULTIPLY = {
  "scale": lambda y, b: y * b[None],
  "divisor": lambda y, b: y / b[None],
  "number": lambda y, b: y * b[0],
  "row of a matmul": lambda y, b: y * (jnp.ones((1, 3)) @ jnp.diag(b)),
  "outer product": lambda y, b: y[:, :1] * b[None],
  "maximum": lambda y, b: jnp.maximum(y - 1, b[None]),
}
BROADCAST = {**{f"add {k}": v for k, v in ADD.items()}, **MULTIPLY}


@BOTH
@pytest.mark.parametrize("name", BROADCAST)
def test_the_gradient_of_what_every_row_reads_is_a_float32_sum(name, half):
  def fun(b, x):
    return jnp.sum((BROADCAST[name](x @ EYE, b) @ EYE) * 2.0**-8)

  check_gradient(fun, half, jnp.full(3, 0.5), ONES)


@BOTH
@pytest.mark.parametrize(
  ("fun", "oracle"),
  [
    (lambda y, b: y * b[None], np.multiply),
    (lambda y, b: y / b[None], np.divide),
    (lambda y, b: jnp.maximum(y, b[None]), np.maximum),
  ],
  ids=["scale", "divisor", "maximum"],
)
def test_a_factor_is_rounded_before_and_its_result_once(fun, oracle, half):
  b = np.linspace(0.1, 0.7, 3, dtype=np.float32)
  x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
  exact = oracle(*(np.asarray(jnp.asarray(a, half), np.float64) for a in (x, b)))
  found = mpjax.autocast(lambda b, x: fun(x @ EYE, b), half)(b, x)
  np.testing.assert_array_equal(found, np.asarray(jnp.asarray(exact, half), np.float32))


def saved(fun, half):
  """Returns the bytes saved for the backward pass under autocast, and by hand: arguments cast."""
  b, x = jnp.ones(64), jnp.ones((1024, 64))
  low = [a.astype(half) for a in (b, x)]
  return residual_bytes(mpjax.autocast(fun, half), b, x), residual_bytes(fun, *low)


@BOTH
@pytest.mark.parametrize("name", ["scale", "divisor", "maximum"])
def test_a_factor_is_saved_as_small_as_it_is(name, half):
  """Broadcast beforehand it would be as large as what it multiplies."""

  def fun(b, x):
    eye = jnp.eye(64).astype(x.dtype)
    return MULTIPLY[name](x @ eye, b) @ eye

  ours, by_hand = saved(fun, half)
  assert ours <= by_hand + 8192, "another kernel of 64 x 64 in low precision"


def test_what_reads_a_factor_can_be_differentiated_in_any_mode():
  def fun(b, x):
    return jnp.sum(((x @ EYE) * b[None]) ** 2)

  b, x = jnp.full(3, 0.5), ONES[:4]
  cast = mpjax.autocast(fun)
  np.testing.assert_array_equal(jax.hessian(cast)(b, x), 8 * np.eye(3))
  np.testing.assert_array_equal(jax.vmap(jax.jacfwd(cast), (0, None))(b[None], x), [[4.0] * 3])
  np.testing.assert_array_equal(jax.vmap(jax.grad(cast), (None, 0))(b, x[:, None]), np.ones((4, 3)))


@BOTH
@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["bias", "scale", "divisor"])
def test_over_devices_these_sums_are_in_float32_too(name, axes, half):
  """The gradient of a replicated parameter is added up over the devices in the dtype of the sum."""
  mesh = jax.make_mesh((4, 2), ("data", "model"), (axes,) * 2, devices=jax.devices("cpu")[:8])

  def fun(b, x):
    return jnp.sum(({**ADD, **MULTIPLY}[name](x @ jnp.eye(4), b) @ jnp.eye(4)) * 2.0**-8)

  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((64, 4)), jax.P("data", None))
    for spec in [jax.P(None), jax.P("model")] if axes == AxisType.Explicit else [jax.P(None)]:
      b = jax.device_put(jnp.full(4, 0.5), spec)
      found = jax.grad(mpjax.autocast(fun, half))
      assert added_in_half(found, b, x) == []
      ours, plain = jax.jit(found)(b, x), jax.jit(jax.grad(fun))(b, x)
      np.testing.assert_array_equal(ours, plain)
      assert ours.sharding == plain.sharding


# What is chosen and gathered.


@BOTH
def test_the_maximum_of_an_axis_counts_its_places_in_float32(half):
  def fun(w, x):
    return jnp.exp((x @ w).max(0) * 1.0).sum()

  gradient = jax.grad(mpjax.autocast(fun, half), argnums=1)
  x = jnp.ones((1001, 3))
  assert added_in_half(gradient, EYE, x) == []
  found = programs.run(gradient, EYE, x)
  np.testing.assert_allclose(found, np.full((1001, 3), np.e / 1001), rtol=2 * jnp.finfo(half).eps)


@BOTH
@pytest.mark.parametrize("sign", [1, -1])
def test_a_maximum_that_a_matmul_reads_counts_its_places_in_float32(half, sign):
  def fun(x):
    return ((sign * (sign * (x @ EYE)).max(0, keepdims=True)) @ EYE).sum()

  gradient = jax.grad(mpjax.autocast(fun, half))
  x = jnp.ones((1001, 3))
  assert added_in_half(gradient, x) == []
  found = programs.run(gradient, x)
  np.testing.assert_allclose(found, np.full((1001, 3), 1 / 1001), rtol=2 * jnp.finfo(half).eps)


@BOTH
def test_a_maximum_saves_no_more_than_in_low_precision(half):
  def fun(b, x):
    eye = jnp.eye(64).astype(x.dtype)
    return jnp.max(x @ eye, -1, keepdims=True) @ b[None]

  ours, by_hand = saved(fun, half)
  assert ours <= by_hand + 8192


@BOTH
@pytest.mark.parametrize("name", ["plain", "two axes", "take", "take_along_axis"])
def test_the_gradient_of_rows_that_are_read_often_is_a_float32_sum(name, half):
  """A graph network reads each node for all of its edges."""
  ids = jnp.zeros(ROWS, int)
  read = {
    "plain": lambda y: y[ids],
    "two axes": lambda y: y[ids, ids][:, None],
    "take": lambda y: jnp.take(y, ids, axis=0),
    "take_along_axis": lambda y: jnp.take_along_axis(y, ids[:, None], 0),
  }[name]

  def fun(x):
    rows = read(x @ EYE)
    return jnp.sum((rows @ jnp.ones((rows.shape[-1], 3))) * 2.0**-8)

  check_gradient(fun, half, jnp.ones((3, 3)))


@BOTH
def test_rows_that_are_read_are_saved_in_low_precision(half):
  def fun(b, x):
    eye = jnp.eye(64).astype(x.dtype)
    return jnp.tanh((x @ eye)[jnp.arange(1024) // 2]) @ eye + b[None]

  ours, by_hand = saved(fun, half)
  assert ours <= by_hand + 8192


# What every step of a loop reads.


@BOTH
def test_the_gradient_of_an_activation_that_every_step_reads_is_a_float32_sum(half):
  """A decoder that looks at the encoder's outputs once per token."""

  def fun(x):
    keys = jnp.tanh(x @ EYE) + 1

    def step(state, query):
      return state, query @ keys

    return jnp.sum(lax.scan(step, 0.0, jnp.ones((ROWS, 1, 3)))[1] * 2.0**-8)

  check_gradient(fun, half, jnp.zeros((3, 3)))


@BOTH
def test_an_activation_that_every_step_reads_is_saved_in_low_precision(half):
  def fun(b, x):
    eye = jnp.eye(64).astype(x.dtype)
    keys = jnp.tanh(x @ eye)

    def step(state, row):
      return state, row @ keys.T

    return lax.scan(step, 0.0, b[None, None])[1]

  ours, by_hand = saved(fun, half)
  assert ours <= by_hand + 8192
