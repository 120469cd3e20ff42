"""What would go wrong without a word: no error, no NaN, only other numbers."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


@BOTH
def test_a_loop_that_waits_for_convergence_ends(half):
  """Newton's square root; in half y * y never comes within 1e-5 of some numbers."""

  def turns(a, one):
    a = (a @ one)[0, 0]

    def turn(carry):
      y, _, n = carry
      new = 0.5 * (y + a / y)
      return new, jnp.abs(new * new - a), n + 1

    goes_on = lambda carry: (carry[1] > 1e-5) & (carry[2] < 1000)  # noqa: E731
    return jax.lax.while_loop(goes_on, turn, (a, jnp.float32(1), 0))[2]

  one = np.ones((1, 1), np.float32)
  fun = jax.jit(mpjax.autocast(turns, half))
  assert max(int(fun(np.full((1, 1), a, np.float32), one)) for a in np.linspace(2, 9, 30)) < 10


@BOTH
def test_an_argument_that_is_kept_keeps_its_bits(half):
  """A hand-written skip, a branch, a maximum: in half, 1.00123 would be another number."""

  def fun(ok, w, x):
    new = x @ w
    return jnp.where(ok, new, w), jax.lax.cond(ok, lambda: new, lambda: w), jnp.maximum(w, new)

  w = np.full((3, 3), 1.00123, np.float32)
  for kept in jax.jit(mpjax.autocast(fun, half))(np.asarray(False), w, -np.ones((3, 3), "f")):
    np.testing.assert_array_equal(kept, w)


@BOTH
def test_an_optimizer_step_inside_moves_the_parameters(half):
  """Each update is below half the distance of two numbers in half."""
  x, y, w = np.ones((4, 1), np.float32), np.full((4, 1), 2.0, np.float32), np.ones((1, 1), "f")

  def step(w):
    return w - 1e-5 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)

  new = jax.jit(mpjax.autocast(step, half))(w)
  np.testing.assert_array_equal(new, w + np.float32(1e-5) * np.float32(2))


@BOTH
def test_numbers_next_to_one_do_not_become_one(half):
  x, w = normal(64, 8), normal(8, 1) * 100

  def loss(w, x):
    p = jnp.clip(jax.nn.sigmoid(x @ w), 1e-6, 1 - 1e-6)
    a = jnp.clip(jnp.tanh(x @ w), -0.9999, 0.9999)
    log = jnp.log(p).mean() + jnp.log(1 - p).mean() + jnp.log(1 - a**2).mean()
    return log + (p @ w[:1]).mean() + (a @ w[:1]).mean()

  value, grads = jax.value_and_grad(mpjax.autocast(loss, half))(w, x)
  assert np.isfinite(value)
  assert np.isfinite(grads).all()


@pytest.mark.parametrize("result", ["bfloat16", "float64"])
def test_a_product_of_a_chosen_type_keeps_it(result):
  def fun(a, b):
    return jax.lax.dot(a, b, preferred_element_type=result)

  with jax.enable_x64(True):
    a = jnp.full((2, 2), 2.0**40, jnp.float32)
    found = mpjax.autocast(fun, "mixed_float16")(a, a)
    assert found.dtype == result
    np.testing.assert_array_equal(found, fun(a, a))


def test_what_a_function_closes_over_is_not_kept():
  references = []

  def trace():
    table = jnp.arange(8.0)
    references.append(weakref.ref(table))
    inner = jax.jit(lambda x: x @ x.T @ x + table.sum())
    fun = mpjax.autocast(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, 2)[0])
    jax.make_jaxpr(fun)(np.ones((3, 3), np.float32))

  trace()
  gc.collect()
  jax.clear_caches()
  gc.collect()
  assert references[0]() is None


def test_brackets_in_the_name_of_a_scope():
  def fun(x):
    with jax.named_scope("block(1)"):
      return jnp.sum(x @ x)

  rules = [mpjax.Rule(None, path=re.compile(r"block\(1\)"))]
  cast = mpjax.autocast(fun, rules=rules)
  x = np.ones((2, 2), np.float32)
  backward = mpjax.autocast(jax.grad(fun), rules=rules)
  for program in (jax.make_jaxpr(cast)(x), jax.make_jaxpr(backward)(x)):
    assert {p.dtypes for p in programs.products(program)} == {("float32", "float32")}


def test_flags_and_sizes_of_numpy_are_no_arrays():
  def fun(x, flag, size):
    return jnp.ones(size) @ x if flag else x

  x = np.ones((3, 2), np.float32)
  np.testing.assert_array_equal(mpjax.autocast(fun)(x, np.bool_(True), np.int64(3)), [3, 3])
