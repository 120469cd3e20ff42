"""Activation functions with powers in them: float32 inside, half outside, and little is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._jaxprs.count import residual_bytes
from tests.programs import equations, inner_jaxprs, run

HALVES = ("float16", "bfloat16")
BOTH = pytest.mark.parametrize("half", HALVES)

W = jnp.eye(8)
X = jnp.asarray([[-1000.0, -40.0, -3.0, -0.5, 0.0, 0.5, 3.0, 1000.0]])


def by_hand(x):
  return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def with_pow(x):
  return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * jnp.power(x, 3))))


ACTIVATIONS = {
  "jax.nn.gelu": functools.partial(jax.nn.gelu, approximate=True),
  "gelu by hand": by_hand,
  "gelu with pow": with_pow,
  "squareplus": jax.nn.squareplus,
  "a cube that is scaled": lambda x: 1e-6 * x**3,
  "a cube by hand that is scaled": lambda x: x * x * x * 1e-6,
  "the fourth power, scaled": lambda x: x**4 * 1e-9,
  "a ratio of squares": lambda x: x * x / (1 + jnp.square(x)),
  "a difference of squares": lambda x: (x - 1) * (x - 1) - x**2,
}
activations = pytest.mark.parametrize("fun", ACTIVATIONS.values(), ids=ACTIVATIONS)


def between(fun):
  """Returns a function that reads the results of one matmul, and is read by another."""
  return lambda w, x: fun(x @ w) @ w


def value_and_gradient(fun):
  def both(w, x):
    y, pull = jax.vjp(lambda x: fun(w, x), x)
    return y, pull(jnp.ones_like(y))[0]

  return both


@BOTH
@activations
def test_an_activation_is_that_of_float32_rounded_once(fun, half):
  """Also at 1000, of which float16 holds neither the square nor the slope of the cube."""
  found = run(value_and_gradient(mpjax.autocast(between(fun), half)), W, X)
  wanted = run(value_and_gradient(between(fun)), W, X)
  eps = float(jnp.finfo(half).eps)
  tiny = float(jnp.finfo(half).smallest_subnormal)
  for one, other in zip(found, wanted, strict=True):
    assert one.dtype == jnp.float32
    np.testing.assert_allclose(one, other, rtol=eps, atol=tiny)


@BOTH
@activations
def test_no_more_is_kept_than_by_hand(fun, half):
  def written(w, x):
    y = fun(x.astype(half) @ w.astype(half))
    return (y @ w.astype(half)).astype(jnp.float32)

  x = jnp.ones((64, 8))
  assert residual_bytes(mpjax.autocast(between(fun), half), W, x) <= residual_bytes(written, W, x)


def test_of_an_activation_its_slope_is_kept():
  x = jnp.ones((64, 8))
  fun = mpjax.autocast(between(by_hand), "float16")
  # Operands of two matmuls, the weight twice, and one number for each result.
  assert residual_bytes(fun, W, x) == 2 * (2 * x.size + 2 * W.size + x.size)


@BOTH
def test_a_slope_is_finished_in_the_forward_pass(half):
  """A GPU compiler would rather keep the tanh of GELU, in float32, than compute it once more."""
  _, pull = jax.vjp(mpjax.autocast(between(by_hand), half), W, jnp.ones((64, 8)))
  forward = jax.make_jaxpr(lambda w, x: jax.vjp(mpjax.autocast(between(by_hand), half), w, x)[1])
  kept = [
    v.aval
    for eqn, _ in equations(forward(W, jnp.ones((64, 8))))
    if eqn.primitive.name == "optimization_barrier"
    for v in eqn.outvars
  ]
  assert [(str(x.dtype), x.shape) for x in kept] == [(half, (64, 8))]
  backward = jax.make_jaxpr(pull)(jnp.ones((64, 8)))
  assert not any(eqn.primitive.name == "tanh" for eqn, _ in equations(backward))


POWERS = {
  "x**3": lambda x: x**3,
  "x*x*x": lambda x: x * x * x,
  "relu**2": lambda x: jax.nn.relu(x) ** 2,
  "0.001 * x**4": lambda x: 0.001 * x**4,
}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_that_is_returned_in_float32_does_not_overflow(name):
  fun = POWERS[name]
  found = mpjax.autocast(lambda w, x: fun(x @ w), "float16")(W, X)
  np.testing.assert_allclose(found, fun(X), rtol=1e-6)
  # A loss that is averaged has a gradient that fits.
  loss = lambda apply: lambda x: jnp.mean(apply(W, x)) * 1e-6  # noqa: E731
  grad = run(jax.grad(loss(mpjax.autocast(lambda w, x: fun(x @ w), "float16"))), X)
  wanted = run(jax.grad(loss(lambda w, x: fun(x @ w))), X)
  np.testing.assert_allclose(grad, wanted, rtol=2e-3, atol=6e-8)


# Inside of JAX's transformations: whole numbers, of which all is exact


def cubes(w, x):
  y = x @ w
  return (y * y * y - y) @ w


SMALL = jnp.arange(-4.0, 4.0)[None] % 3 - 1
INSIDE = {
  "jit": jax.jit(cubes),
  "checkpoint": jax.checkpoint(cubes),
  "scan": lambda w, x: lax.scan(lambda x, _: (cubes(w, x) % 3, None), x, length=2)[0],
  "cond": lambda w, x: lax.cond(x[0, 0] < 9, lambda x: cubes(w, x), lambda x: x, x),
  "vmap": lambda w, x: jax.vmap(cubes, (None, 0))(w, x[None])[0],
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_of(name):
  ours = mpjax.autocast(INSIDE[name], "float16")
  for one, other in zip(
    run(value_and_gradient(ours), W, SMALL),
    run(value_and_gradient(INSIDE[name]), W, SMALL),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)
  assert activation(ours, W, SMALL)


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives(inner, outer):
  def second(fun):
    return outer(inner(lambda x: fun(W, x)))

  found = run(second(mpjax.autocast(cubes, "float16")), SMALL)
  np.testing.assert_array_equal(found, run(second(cubes), SMALL))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_shard_map(devices, check_vma, inside):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:4])
  mapped = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jax.P(), jax.P("data")),
    out_specs=jax.P("data"),
    check_vma=check_vma,
  )
  rows = jnp.concatenate([SMALL, -SMALL, 0 * SMALL, SMALL])
  ours = functools.partial(mpjax.autocast, policy="float16")
  fun = mapped(ours(cubes)) if inside else ours(mapped(cubes))
  for one, other in zip(
    run(value_and_gradient(fun), W, rows), run(value_and_gradient(cubes), W, rows), strict=True
  ):
    np.testing.assert_array_equal(one, other)


def test_an_explicit_mesh(devices):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,), devices=devices[:4])
  rows = jnp.concatenate([SMALL, -SMALL, 0 * SMALL, SMALL])
  wanted = run(value_and_gradient(cubes), W, rows)
  with jax.set_mesh(mesh):
    placed = jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data")))
    found = run(value_and_gradient(mpjax.autocast(cubes, "float16")), W, placed)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(one, other)


# What is computed so, and what is not


def activation(fun, *args):
  """Returns the operations of what is computed as a whole in a function, from half to half."""
  for eqn in nested(jax.make_jaxpr(fun)(*args).jaxpr):
    if eqn.primitive.name == "custom_jvp_call":
      names = [e.primitive.name for e, _ in equations(eqn.params["call_jaxpr"])]
      if names[0] == "convert_element_type":
        return names
  return []


def nested(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in inner_jaxprs(eqn.params):
      yield from nested(getattr(inner, "jaxpr", inner))


def test_what_else_reads_a_part_of_it_gets_it_rounded():
  def fun(w, x):
    y = x @ w
    doubled = 2 * y
    square = doubled * y
    scaled = jnp.tanh(square + doubled)
    return doubled @ w, square @ w, scaled @ w, jnp.sum(scaled)

  found = run(mpjax.autocast(fun, "float16"), W, SMALL)
  for one, other in zip(found, run(fun, W, SMALL), strict=True):
    np.testing.assert_allclose(one, other, rtol=2**-10)
  assert activation(mpjax.autocast(fun, "float16"), W, SMALL)[1:-2] == ["mul", "mul", "add", "tanh"]


LEFT_ALONE = {
  "no power": lambda w, x: jax.nn.silu(x @ w) @ w,
  "one power that half reads": lambda w, x: (x @ w) ** 3 @ w,
  "a statistic": lambda w, x: jnp.mean(jnp.square(x @ w) + 1e-6) * w,
  "of a parameter": lambda w, x: x @ (w * w * 0.5),
  "of two values": lambda w, x: jnp.tanh((x @ w) * (x @ w.T)) @ w,
  "float32": lambda w, x: jnp.tanh(jnp.exp(x @ w) ** 2 * 0.5) @ w,
  "traced in half": lambda w, x: jnp.tanh((x.astype("float16") @ w.astype("float16")) ** 3 / 2),
  "full_precision": mpjax.full_precision(cubes),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
@pytest.mark.standard_promotion
def test_what_is_left_alone(name):
  assert activation(mpjax.autocast(LEFT_ALONE[name], "float16"), W, X) == []


def test_operations_that_were_moved_are_left_alone():
  for moved in ({"half": ["mul"]}, {"opaque": ["mul"]}):
    ours = mpjax.autocast(cubes, "float16", ops=mpjax.OpLists().replace(**moved))
    assert activation(ours, W, SMALL) == []


def test_scopes_with_rules_of_their_own_are_not_joined():
  def fun(w, x):
    y = x @ w
    with jax.named_scope("powers"):
      y = y * y * y
    return (y - 1) @ w

  whole = mpjax.autocast(fun, "float16", rules=[mpjax.Rule(None, path="powers")])
  assert activation(whole, W, SMALL) == []
  np.testing.assert_array_equal(whole(W, SMALL), fun(W, SMALL))
