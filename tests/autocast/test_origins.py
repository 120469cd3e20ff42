"""Sums of an array and one product, and the values that a product is computed from."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import mpjax
from mpjax._autocast.origins import Origin, has_one_product, origins_inside, origins_of
from mpjax._autocast.scopes import ScopedSettings, Settings
from mpjax._jaxpr.reader import inner_jaxprs
from mpjax._policy.active import Region
from tests.autocast.rig import find

X = jnp.ones((8, 8))
W = jnp.ones((8, 8))
POLICY = mpjax.Policy(compute_dtype="bfloat16")
SCOPED = ScopedSettings(Settings(region=Region(POLICY), ops=mpjax.OpLists()))


def sum_dtype(fun, *args, wrap=mpjax.autocast):
  """Returns the dtype of the first sum of two arrays."""
  program = jax.make_jaxpr(wrap(fun))(*args)
  sums = [e for e in find(program, "add") if all(v.aval.ndim == 2 for v in e.invars)]
  return str(sums[0].outvars[0].aval.dtype)


def activations(fun):
  """Returns a function of the results of two matmuls, whose result a matmul and a norm use."""

  def of_matmuls(w, x):
    h = fun(x @ w, x @ w.T, (x @ w) @ w)
    return h @ w, h.mean()

  return of_matmuls


SUMS = {
  # name: the sum of three activations, and its dtype
  "gate": (lambda x, g, y: x + g * y, "bfloat16"),
  "gate on the left": (lambda x, g, y: g * y + x, "bfloat16"),
  "scaled residual": (lambda x, g, y: x + 0.5 * y, "bfloat16"),
  "moved product": (lambda x, g, y: x + (g * y).T, "bfloat16"),
  "jitted product": (lambda x, g, y: x + jax.jit(jnp.multiply)(g, y), "bfloat16"),
  "activation function": (lambda x, g, y: x + jax.nn.silu(y), "bfloat16"),
  "two products": (lambda x, g, y: x * g + g * y, "float32"),
  "product of the other operand": (lambda x, g, y: x + g * x, "float32"),
  "function of the other operand": (lambda x, g, y: x + 0.1 * x**3, "float32"),
  "interpolation": (lambda x, g, y: x + g * (y - x), "float32"),
}


@pytest.mark.parametrize(("fun", "dtype"), SUMS.values(), ids=SUMS)
def test_a_sum_with_one_product_is_low_precision(fun, dtype):
  assert sum_dtype(activations(fun), W, X) == dtype


def test_a_product_that_is_added_to_a_float32_array_is_not_rounded():
  def fun(w, x):
    return (x + 0.5 * (x @ w)) @ w

  program = jax.make_jaxpr(mpjax.autocast(fun, data_argnums=1))(W, X)
  (product,) = find(program, "mul")
  assert str(product.outvars[0].aval.dtype) == "float32"
  inlined = jax.make_jaxpr(mpjax.autocast(jax.jit(fun, inline=False), data_argnums=1))(W, X)
  (product,) = find(inlined, "mul")
  assert str(product.outvars[0].aval.dtype) == "float32"


ORDERS = {
  # name: a function of a product, an activation and an input, and the dtype of the product
  "input before": (lambda product, h, x: jnp.sin(x) + product(), "float32"),
  "input after": (lambda product, h, x: product() + jnp.sin(x), "float32"),
  "sum of inputs after": (lambda product, h, x: product() + (x + x.T), "float32"),
  "inputs inside of a call": (
    lambda p, h, x: jax.jit(lambda y, x: y + jnp.sin(x))(p(), x),
    "float32",
  ),
  "constant inside of a call": (lambda p, h, x: jax.jit(lambda y: y + INPUT)(p()), "float32"),
  "matmul after": (lambda product, h, x: product() + h @ h, "bfloat16"),
  "sum of matmuls after": (lambda product, h, x: product() + (h @ h + h), "bfloat16"),
  "matmul inside of a call": (lambda p, h, x: jax.jit(lambda y, h: y + h @ h)(p(), h), "bfloat16"),
}
INPUT = jnp.arange(64.0).reshape(8, 8)


@pytest.mark.parametrize(("fun", "dtype"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_operations_does_not_decide_the_dtype_of_a_product(fun, dtype):
  class Model(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(W)

    def __call__(self, x):
      h = x @ self.w[...]
      return fun(lambda: 0.37 * h, h, x) @ self.w[...]

  model = mpjax.with_policy(Model(), "mixed_bfloat16")
  (product,) = find(jax.make_jaxpr(model)(X), "mul")
  assert str(product.outvars[0].aval.dtype) == dtype


TABLE = jnp.ones((3, 1, 8))
SHARED = {
  "gate": lambda g, i: jax.nn.sigmoid(g),
  "gate of each block": lambda g, i: g + TABLE[i],
  "scale": lambda g, i: 1 + g,
}


@pytest.mark.parametrize("of_block", SHARED.values(), ids=SHARED)
def test_a_gate_that_several_blocks_share_leaves_the_stream_in_low_precision(of_block):
  def fun(w, x):
    h, g = x @ w, x @ w + w[:1]
    for i in range(3):
      h = h + of_block(g, i) * jnp.tanh(h @ w)
    return h @ w

  program = jax.make_jaxpr(mpjax.autocast(fun))(W, X)
  sums = [e for e in find(program, "add") if all(v.aval.ndim == 2 for v in e.invars)]
  assert {str(eqn.outvars[0].aval.dtype) for eqn in sums} == {"bfloat16"}


def test_a_product_that_is_added_at_the_end_does_not_widen_the_stream_before():
  def fun(w, x, t):
    late, h = 2.0 * t, x @ w
    for _ in range(3):
      h = h + jnp.tanh(h @ w) * (h @ w.T)
    return (h + late) @ w

  program = jax.make_jaxpr(mpjax.autocast(fun, data_argnums=2))(W, X, INPUT)
  dtypes = [str(eqn.outvars[0].aval.dtype) for eqn in find(program, "add")]
  assert dtypes == ["bfloat16"] * 3 + ["float32"]


@pytest.mark.parametrize("inside", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", SUMS)
def test_a_call_does_not_change_the_sum_inside(name, inside):
  fun, dtype = SUMS[name]
  assert sum_dtype(activations(inside(fun)), W, X) == dtype


def test_a_product_that_contains_the_carry_of_a_scan_stays_in_float32():
  def recurrence(w, x):
    return lax.scan(lambda h, _: ((h @ w) + 0.9 * h, None), x @ w, length=2)[0] @ w

  assert sum_dtype(recurrence, W, X) == "float32"


def test_a_stream_that_a_scan_carries_is_low_precision():
  def stream(w, x):
    return lax.scan(lambda h, _: (h + jnp.tanh(h @ w) * (h @ w.T), None), x @ w, length=2)[0] @ w

  assert sum_dtype(stream, W, X) == "bfloat16"


def test_one_product_that_shares_no_source():
  product, other = Origin(product=True, sources=(1, 2)), Origin(sources=(3,))
  assert has_one_product([product, other])
  assert not has_one_product([product, product])
  assert not has_one_product([other, other])
  assert not has_one_product([product, Origin(sources=(2,))])
  assert not has_one_product([Origin(product=True, sources=("carry",)), other])


def test_matmuls_and_low_precision_casts_begin_new_sources():
  def fun(x):
    return jnp.tanh(2 * x.T), x @ x, x.astype("bfloat16"), x + X, x + 1

  jaxpr = jax.make_jaxpr(fun)(X).jaxpr
  found = origins_of(jaxpr, (), SCOPED).of
  arithmetic, *new, bias = (found[v] for v in jaxpr.outvars)
  x = jaxpr.invars[0]
  assert arithmetic == Origin(product=True, sources=(x,))
  assert [each.sources for each in new] == [(v,) for v in jaxpr.outvars[1:4]]
  assert bias == Origin(sources=(x,))


def test_origins_of_a_call_are_numbered():
  (eqn,) = jax.make_jaxpr(jax.jit(lambda x, y: x + y))(X, X).eqns
  inner = next(iter(inner_jaxprs(eqn) or ()))
  one, other = Origin(sources=("a",)), Origin(product=True, sources=("b", "a"))
  found = origins_inside([one, other], inner, SCOPED)
  assert found == (Origin(False, (1,)), Origin(True, (2, 1)))
  # Independent arguments share one key, and so do arguments that no sum inside depends on.
  assert origins_inside([one, Origin(sources=("b", "c"))], inner, SCOPED) == ()
  (eqn,) = jax.make_jaxpr(jax.jit(lambda x, y: x @ y))(X, X).eqns
  inner = next(iter(inner_jaxprs(eqn) or ()))
  assert origins_inside([one, other], inner, SCOPED) == ()
