"""Activation functions with powers in them, and the bytes saved for the backward pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._jaxpr.reader import walk
from tests.autocast.rig import BODIES, BOTH
from tests.models.values import normal
from tests.programs import bits, equations, residual_bytes, run


def eye_like(x):
  return jnp.eye(64).astype(x.dtype)


def over_steps(b, x):
  keys = jnp.tanh(x @ eye_like(x))
  return lax.scan(lambda state, row: (state, row @ keys.T), 0.0, b[None, None])[1]


SAVED = {
  "maximum": lambda b, x: jnp.maximum(x @ eye_like(x) - 1, b[None]) @ eye_like(x),
  "rows": lambda b, x: jnp.tanh((x @ eye_like(x))[jnp.arange(1024) // 2]) @ eye_like(x) + b[None],
  "a constant of a scan": over_steps,
}


@pytest.mark.parametrize("name", SAVED)
def test_no_more_is_saved_than_in_low_precision(name):
  b, x = jnp.ones(64), jnp.ones((1024, 64))
  by_hand = residual_bytes(SAVED[name], b.astype("bfloat16"), x.astype("bfloat16"))
  # One more kernel of 64 x 64 in low precision.
  assert residual_bytes(mpjax.autocast(SAVED[name], "bfloat16"), b, x) <= by_hand + 8192


def test_a_float32_residual_is_not_saved_rounded_too():
  # The derivative of `exp` uses its result, which a softmax written by hand divides.
  def weights(y):
    shares = jnp.exp(y - lax.stop_gradient(y.max(-1, keepdims=True)))
    return shares / shares.sum(-1, keepdims=True)

  def fun(b, x):
    return weights(x @ b) @ b

  b, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
  ours = residual_bytes(mpjax.autocast(fun, "bfloat16"), b, x)
  assert ours == 2 * (2 * b.size) + (2 + 4 + 2) * x.size + 2 * 1024 * 4
  # Nor where no sum averages a rounding, as in the gradient of the scale of a BatchNorm.
  norm = lambda b: jnp.sum(between(lambda y: y + jnp.mean(y, 0, keepdims=True) / 3 * b)(W, W))  # noqa: E731
  gradient = run(jax.grad(mpjax.autocast(norm)), jnp.ones((1, 8)))
  np.testing.assert_array_equal(gradient, np.full((1, 8), 8 * (np.float32(1 / 8) / 3)))


def test_a_multiplication_by_a_repeated_factor_has_derivatives_in_all_modes():
  def fun(b, x):
    return jnp.sum(((x @ W) * b[None]) ** 2)

  def modes(b, x):
    cast = mpjax.autocast(fun)
    forward = jax.vmap(jax.jacfwd(cast), (0, None))(b[None], x)
    return jax.hessian(cast)(b, x), forward, jax.vmap(jax.grad(cast), (None, 0))(b, x[:, None])

  found = run(modes, jnp.full(8, 0.5), jnp.ones((4, 8)))
  for one, wanted in zip(found, (8 * np.eye(8), [[4.0] * 8], np.ones((4, 8))), strict=True):
    np.testing.assert_array_equal(one, wanted)


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
  "the fourth power, scaled": lambda x: x**4 * 1e-9,
  "a difference of squares": lambda x: (x - 1) * (x - 1) - x**2,
}


CANCELS = "squareplus"
"""Its slope is (1 + x / sqrt(x**2 + 4)) / 2: at -1000 float32 keeps one digit of it, which one
depends on how a CPU divides."""


def between(fun):
  """Returns a function of the result of a matmul, whose result another matmul uses."""
  return lambda w, x: fun(x @ w) @ w


def value_and_gradient(fun):
  def both(w, x):
    y, pull = jax.vjp(lambda x: fun(w, x), x)
    return y, pull(jnp.ones_like(y))[0]

  return both


@BOTH
def test_an_activation_is_that_of_float32_rounded_once(half):
  # Also at 1000, of which float16 holds neither the square nor the slope of the cube.
  def each(w, x):
    return {
      name: [
        value_and_gradient(f)(w, x) for f in (mpjax.autocast(between(fun), half), between(fun))
      ]
      for name, fun in ACTIVATIONS.items()
    }

  eps = float(jnp.finfo(half).eps)
  tiny = float(jnp.finfo(half).smallest_subnormal)
  for name, (found, wanted) in run(each, W, X).items():
    for one, other in zip(found, wanted, strict=True):
      assert one.dtype == jnp.float32
      least = tiny if name != CANCELS else float(jnp.finfo(jnp.float32).eps)
      np.testing.assert_allclose(one, other, rtol=eps, atol=least, err_msg=name)


def test_no_more_is_saved_of_an_activation_function_than_by_hand():
  half, x = "float16", jnp.ones((64, 8))
  for name, fun in ACTIVATIONS.items():

    def written(w, x, fun=fun):
      y = fun(x.astype(half) @ w.astype(half))
      return (y @ w.astype(half)).astype(jnp.float32)

    ours = residual_bytes(mpjax.autocast(between(fun), half), W, x)
    assert ours <= residual_bytes(written, W, x), name
  # The operands of the activation function and of the matmul after it; `W` and `x` are arguments.
  ours = residual_bytes(mpjax.autocast(between(by_hand), half), W, x)
  assert ours == 2 * (x.size + x.size)


@BOTH
def test_a_gate_keeps_its_two_values_in_low_precision(half):
  def gated(w, x):
    return (jax.nn.gelu(x @ w) * (x @ w.T)) @ w

  x = jnp.ones((64, 8))
  # Two values and an operand of a matmul. Parameters are kept rounded where their gradient is too,
  # which it is not in float16; else only the transpose of `w` is no argument.
  parameters = 2 * (2 * x.size + 3 * W.size) if half == "bfloat16" else 4 * W.size
  kept = 2 * (2 * x.size + x.size) + parameters
  assert residual_bytes(mpjax.autocast(gated, half), W, x) == kept


@BOTH
def test_a_gate_is_that_of_float32_rounded_once(half):
  def gated(w, x):
    return (jax.nn.gelu(x @ w) * (2 * x @ w)) @ w

  x = jnp.linspace(-2, 2, 8)[None]
  found, wanted = (value_and_gradient(f)(W, x) for f in (mpjax.autocast(gated, half), gated))
  for one, other in zip(found, wanted, strict=True):
    # The gradient adds two products, each of them rounded, as are their slopes.
    np.testing.assert_allclose(one, other, rtol=3 * float(jnp.finfo(half).eps), atol=1e-6)


@BOTH
def test_the_backward_pass_computes_slopes_from_values_in_low_precision(half):
  _, pull = jax.vjp(mpjax.autocast(between(by_hand), half), W, jnp.ones((64, 8)))
  operations = {eqn.primitive.name for eqn in walk(jax.make_jaxpr(pull)(jnp.ones((64, 8))))}
  # The factor is unknown to a compiler, which would rather keep the float32 tanh.
  assert {"tanh", "optimization_barrier"} <= operations


POWERS = {
  "x**3": lambda x: x**3,
  "x*x*x": lambda x: x * x * x,
  "relu**2": lambda x: jax.nn.relu(x) ** 2,
  "0.001 * x**4": lambda x: 0.001 * x**4,
}


def test_a_power_that_is_returned_in_float32_does_not_overflow():
  def each(w, x):
    found = {}
    for name, fun in POWERS.items():
      for cast in (lambda f: f, functools.partial(mpjax.autocast, policy="float16")):
        apply = cast(lambda w, x, fun=fun: fun(x @ w))
        # A loss that is averaged has a gradient that fits.
        gradient = jax.grad(lambda x, apply=apply: jnp.mean(apply(w, x)) * 1e-6)(x)
        found.setdefault(name, []).append((apply(w, x), gradient))
    return found

  for name, ((y, slope), (found, gradient)) in run(each, W, X).items():
    np.testing.assert_allclose(found, y, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(gradient, slope, rtol=2e-3, atol=6e-8, err_msg=name)


# Inside of JAX's transformations, with integers, so that all results are exact.


def cubes(w, x):
  y = x @ w
  return (y * y * y - y) @ w


def gated_cubes(w, x):
  y = x @ w
  return ((y * y * y - y) * (x @ (w + w))) @ w


SMALL = jnp.arange(-4.0, 4.0)[None] % 3 - 1


@pytest.mark.slow
@pytest.mark.parametrize("cubes", [cubes, gated_cubes])
def test_inside_of_transformations(cubes):
  inside = {
    name: lambda w, x, around=around: around(lambda x: cubes(w, x) % 3)(x)
    for name, around in BODIES.items()
    if name not in ("while", "custom_jvp", "custom_vjp")
  }
  inside["vmap"] = lambda w, x: jax.vmap(cubes, (None, 0))(w, x[None])[0]
  pairs = {name: (fun, mpjax.autocast(fun, "float16")) for name, fun in inside.items()}
  assert all(activation(cast, W, SMALL) for _, cast in pairs.values())
  made = {name: [value_and_gradient(f) for f in pair] for name, pair in pairs.items()}
  for inner, outer in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
    made[f"{outer.__name__} of {inner.__name__}"] = [
      lambda w, x, f=f, inner=inner, outer=outer: outer(inner(lambda x: f(w, x)))(x)
      for f in (cubes, mpjax.autocast(cubes, "float16"))
    ]
  # The cotangent of a sum is the same for all examples.
  made["vmap of grad"] = [
    lambda w, x, f=f: jax.vmap(jax.grad(lambda x: jnp.sum(f(w, x))))(x[None])
    for f in (cubes, mpjax.autocast(cubes, "float16"))
  ]
  found = run(lambda w, x: {name: [f(w, x) for f in pair] for name, pair in made.items()}, W, SMALL)
  for name, (one, other) in found.items():
    assert bits(one) == bits(other), name


ROWS = jnp.concatenate([SMALL, -SMALL, 0 * SMALL, SMALL])


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_devices(devices, check_vma):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:4])
  data = jax.P("data")
  how = {"mesh": mesh, "in_specs": (jax.P(), data), "out_specs": data, "check_vma": check_vma}
  cast = functools.partial(mpjax.autocast, policy="float16")
  wanted = bits(run(value_and_gradient(cubes), W, ROWS))
  for fun in (jax.shard_map(cast(cubes), **how), cast(jax.shard_map(cubes, **how))):
    assert bits(run(value_and_gradient(fun), W, ROWS)) == wanted
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,), devices=devices[:4])
  with jax.set_mesh(mesh):
    placed = jax.device_put(ROWS, jax.NamedSharding(mesh, data))
    assert bits(run(value_and_gradient(cast(cubes)), W, placed)) == wanted
    # The cotangent is the same for all examples, and `vmap` gives it their axis.
    each = jax.vmap(jax.grad(lambda x: cast(cubes)(W, x).sum()))
    assert jax.typeof(jax.jit(each)(placed)).sharding.spec[0] == "data"


# Which operations are grouped.


def grouped(fun, *args):
  """Returns the operations that a function groups in calls, and the equations of these calls."""
  calls = []
  for eqn in walk(jax.make_jaxpr(fun)(*args)):
    if eqn.primitive.name == "custom_jvp_call":
      names = [e.primitive.name for e, _ in equations(eqn.params["call_jaxpr"])]
      # The derivative rule of a matmul makes a call too.
      if "dot_general" not in names:
        calls.append((names, eqn))
  return calls


def activation(fun, *args, first="convert_element_type"):
  """Returns the operations of the activation function that is grouped in a function, if any."""
  return next((names for names, _ in grouped(fun, *args) if names[0] == first), [])


def test_equal_layers_share_one_activation():
  layers = lambda w, x: functools.reduce(lambda x, _: cubes(w, x), range(20), x)  # noqa: E731
  calls = [e.params["call_jaxpr"] for _, e in grouped(mpjax.autocast(layers, "float16"), W, SMALL)]
  # JAX traces the first as it is, and the last is returned.
  assert len({*map(id, calls[1:-1])}) == 1


def test_consumers_outside_of_an_activation_function_change_no_bit_of_it():
  powers = lambda y: (y * y) * (y * y * y)  # noqa: E731

  def fun(powers, w, x):
    y = 1.1 * (x @ w)
    return powers(y) @ w, jnp.exp(y).sum()

  w, x = normal(16, 16), normal(8, 16, seed=1)
  whole, called = (
    mpjax.autocast(functools.partial(fun, each), "bfloat16")(w, x)
    for each in (powers, jax.jit(powers))
  )
  np.testing.assert_array_equal(whole[0], called[0])


def test_other_consumers_use_parts_of_an_activation_function():
  def fun(w, x):
    y = x @ w
    doubled = 2 * y
    square = doubled * y
    scaled = jnp.tanh(square + doubled)
    return doubled @ w, square @ w, scaled @ w, scaled * y

  found = run(mpjax.autocast(fun, "float16"), W, SMALL)
  for one, other in zip(found, run(fun, W, SMALL), strict=True):
    np.testing.assert_allclose(one, other, rtol=2**-10)
  assert activation(mpjax.autocast(fun, "float16"), W, SMALL, first="mul") != []


@pytest.mark.parametrize("wide", [False, True])
def test_a_multiplication_uses_a_result_in_the_dtype_of_the_root(wide):
  def gate(w, x):
    y = jnp.exp(x @ w) if wide else x @ w
    y = jnp.tanh(y * y * y)
    return y @ w, (y * (x @ w)) @ w

  (_, first), *_ = grouped(mpjax.autocast(gate, "float16"), W, SMALL)
  assert first.outvars[0].aval.dtype == ("float32" if wide else "float16")


def in_a_scope(w, x):
  y = x @ w
  with jax.named_scope("powers"):
    y = y * y * y
  return (y - 1) @ w


def used_twice(w, x):
  power = (x @ w) ** 2
  return (power * (x @ w.T)) @ w, power @ w


NOT_GROUPED = {
  "no power": lambda w, x: jax.nn.silu(x @ w) @ w,
  "one power that a matmul uses": lambda w, x: (x @ w) ** 3 @ w,
  "a statistic": lambda w, x: jnp.mean(jnp.square(x @ w) + 1e-6) * w,
  "of a parameter": lambda w, x: x @ (w * w * 0.5),
  "a power times a broadcast": lambda w, x: ((x @ w) ** 2 * w[0]) @ w,
  "a power that a product and a matmul use": used_twice,
  "of two values": lambda w, x: jnp.tanh((x @ w) * (x @ w.T)) @ w,
  "float32": lambda w, x: jnp.tanh(jnp.exp(x @ w) ** 2 * 0.5) @ w,
  "traced in half": lambda w, x: jnp.tanh((x.astype("float16") @ w.astype("float16")) ** 3 / 2),
  "full_precision": mpjax.full_precision(cubes),
}


@pytest.mark.standard_promotion
def test_operations_that_are_not_grouped():
  for name, fun in NOT_GROUPED.items():
    assert activation(mpjax.autocast(fun, "float16"), W, X) == [], name
  # Operations that were moved to another list, and a part with a rule of its own.
  for moved in ({"half": ["mul"]}, {"opaque": ["mul"]}):
    ours = mpjax.autocast(cubes, "float16", ops=mpjax.OpLists().replace(**moved))
    assert activation(ours, W, SMALL) == []
  rules = [mpjax.Rule(None, path="powers")]
  assert activation(mpjax.autocast(in_a_scope, "float16", rules=rules), W, SMALL) == []
