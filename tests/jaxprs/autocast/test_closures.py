"""Derivative rules that close over arguments of the function that is autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero

import mpjax
from mpjax._jaxprs.autocast.closures import instantiated
from tests import programs
from tests.errors import check_error
from tests.jaxprs.autocast.test_custom_derivatives import X_GRAD, W, X

HALF = np.asarray([[1.5, -0.75, 0.25], [0.5, 1.0, -1.25]], np.float32)


def by_vjp(factor=1.0, computed=False):
  """Of `x @ w`, whose rule closes over `w` and gives `factor` times what it should."""

  def fun(x, w):
    w = w * 1.0 if computed else w

    @jax.custom_vjp
    def product(x):
      return x @ w

    product.defvjp(lambda x: (x @ w, None), lambda _, g: (factor * (g @ w.T),))
    return product(x)

  return fun


def by_jvp(factor=1.0):
  def fun(x, w):
    @jax.custom_jvp
    def product(x):
      return x @ w

    product.defjvp(lambda p, t: (p[0] @ w, factor * (t[0] @ w)))
    return product(x)

  return fun


RULES = {"vjp": by_vjp, "vjp, computed": lambda f: by_vjp(f, computed=True), "jvp": by_jvp}


def of_sum(fun):
  return lambda *args: fun(*args).sum()


@pytest.mark.parametrize("rule", RULES)
def test_gradient_of_a_rule_that_closes_over_an_argument(rule):
  """`jit(grad(autocast(f)))` is the order that the page recommends; numbers are exact in half."""
  grad = jax.grad(of_sum(mpjax.autocast(RULES[rule](2.0))))
  for outside in (lambda f: f, jax.jit):
    np.testing.assert_array_equal(outside(grad)(X, W), 2 * X_GRAD)
  found = programs.products(jax.make_jaxpr(grad)(X, W))
  assert {p.dtypes for p in found} == {("bfloat16", "bfloat16")}


def test_results_that_are_no_numbers_and_arguments_that_are_no_arrays():
  def fun(x, w, name):
    return by_vjp()(x, w).sum(), {"count": jnp.argmax(x), "name": name, "none": None}

  grad = jax.value_and_grad(mpjax.autocast(fun), has_aux=True)
  (loss, aux), dx = grad(X, W, "a")
  np.testing.assert_array_equal(loss, (np.asarray(X) @ np.asarray(W)).sum())
  np.testing.assert_array_equal(dx, X_GRAD)
  assert aux == {"count": 2, "name": "a", "none": None}


def test_both_kinds_of_rules_in_one_function_and_an_integer_beside_them():
  def fun(x, w, i):
    return (by_vjp(2.0)(x, w) + by_jvp(3.0)(x, w))[i].sum()

  found = jax.grad(mpjax.autocast(fun))(X, W, jnp.int32(1))
  np.testing.assert_array_equal(found, 5 * X_GRAD * np.asarray([[0.0], [1.0]]))
  _, change = jax.jvp(lambda x: mpjax.autocast(by_jvp(2.0))(x, W), (X,), (jnp.asarray(HALF),))
  np.testing.assert_array_equal(change, 2 * HALF @ np.asarray(W))


def test_a_constant_is_no_argument():
  """What is known before the call is there after it: nothing is computed twice."""

  def fun(x):
    return by_vjp(2.0)(x, W)

  program = jax.make_jaxpr(mpjax.autocast(fun, "bfloat16"))(X)
  assert [e.primitive.name for e in program.eqns].count("custom_vjp_call") == 1
  (eqn,) = (e for e in program.eqns if e.primitive.name == "custom_vjp_call")
  assert [str(v.aval.dtype) for v in eqn.outvars] == ["bfloat16"]  # It is the user's function.
  np.testing.assert_array_equal(jax.grad(of_sum(mpjax.autocast(fun)))(X), 2 * X_GRAD)


def test_a_value_that_only_the_rule_closes_over_is_named():
  """The function itself does not use it, so that nothing shows it before the rule is called."""

  def fun(x, w):
    @jax.custom_vjp
    def odd_product(x):
      return x * 2

    odd_product.defvjp(lambda x: (x * 2, None), lambda _, g: (g @ w.T,))
    return odd_product(x)

  with pytest.raises(mpjax.MpjaxError) as excinfo:
    jax.grad(of_sum(mpjax.autocast(fun)))(X, W)
  check_error(
    excinfo,
    where="mpjax.autocast(fn), the derivative rule of odd_product at",
    expected="its own arguments",
    got="closes over an array",
    fix="mpjax.autocast(jax.grad(fn))",
    builtin=TypeError,
  )
  np.testing.assert_array_equal(mpjax.autocast(jax.grad(of_sum(fun)))(X, W), X_GRAD)


@pytest.mark.parametrize("rule", RULES)
def test_arguments_that_are_data_are_so_in_the_derivative(rule):
  """The derivative is the fractional part of a position, which half does not hold at 4,096."""
  product = RULES[rule](1.0)

  def loss(x, w, grid):
    place = grid + product(x, w)
    rest = place - jax.lax.stop_gradient(jnp.floor(place))
    return 0.5 * (rest**2).sum() + 0.0 * (rest @ w).sum()

  w, grid = np.eye(3, dtype=np.float32), np.full((2, 3), 4096, np.float32)
  grad = jax.grad(mpjax.autocast(loss, data_argnums=2))(HALF, w, grid)
  np.testing.assert_array_equal(grad, HALF - np.floor(HALF))


@pytest.mark.parametrize("dtype", [np.dtype("float32"), jax.dtypes.float0], ids=str)
def test_symbolic_zeros_become_arrays(dtype):
  zeros = instantiated(SymbolicZero(ShapedArray((2, 3), dtype)))
  assert (zeros.shape, zeros.dtype) == ((2, 3), dtype)
  assert instantiated(X) is X
