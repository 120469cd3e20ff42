"""Functions with a rule of their own for derivatives or batches: that rule is called.

Most rules here are wrong by a known factor, so that the gradient says which one was called.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import mpjax
from tests import programs
from tests.autocast.rig import matmuls
from tests.errors import refused
from tests.models.values import normal

W = jnp.eye(8).at[0, :2].set([2.0, 1.0])
X = 2 - jnp.arange(32.0).reshape(4, 8) % 5


def product_by_vjp(factor=1.0):
  # Returns `x @ w` whose gradients are `factor` times what they should be.
  product = jax.custom_vjp(lambda x, w: x @ w)
  product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (factor * (g @ kept[1].T), factor * (kept[0].T @ g)),
  )
  return product


def product_by_jvp(factor=1.0):
  product = jax.custom_jvp(lambda x, w: x @ w)
  product.defjvp(lambda p, t: (p[0] @ p[1], factor * (t[0] @ p[1] + p[0] @ t[1])))
  return product


RULES = {"vjp": product_by_vjp, "jvp": product_by_jvp}
EITHER = pytest.mark.parametrize("rule", RULES)


def of_sum(fun):
  return lambda *args: fun(*args).sum()


def gradients(fun, *args):
  # Returns value and gradients of the sum of `fun` under autocast.
  numbers = tuple(range(len(args)))
  return programs.run(jax.value_and_grad(of_sum(mpjax.autocast(fun)), numbers), *args)


def types(fun, *args):
  # Returns how many matmuls the gradient has, and the dtypes of their operands.
  numbers = tuple(range(len(args)))
  program = jax.make_jaxpr(jax.grad(of_sum(fun), numbers))(*args)
  found = programs.products(program)
  return len(found), {t for p in found for t in p.dtypes}


X_GRAD = np.ones((4, 8)) @ np.asarray(W).T
W_GRAD = np.asarray(X).T @ np.ones((4, 8))


# Rules of JAX.


# Rules of users.


@EITHER
@pytest.mark.parametrize("factor", [2.0, -3.0])
def test_the_rule_of_the_user_is_the_one_that_is_called(factor, rule):
  # Twice and -3 times the right gradient, exactly.
  product = RULES[rule](factor)
  value, (dx, dw) = gradients(product, X, W)
  assert value == (np.asarray(X) @ np.asarray(W)).sum()
  np.testing.assert_array_equal(dx, factor * X_GRAD)
  np.testing.assert_array_equal(dw, factor * W_GRAD)
  assert {str(g.dtype) for g in (dx, dw)} == {"float32"}
  assert types(mpjax.autocast(product), X, W) == (3, {"bfloat16"})


@EITHER
def test_a_derivative_changes_no_bit_of_the_value(rule):
  x, w = jnp.asarray(normal(4, 16)), jnp.asarray(normal(16, 8, seed=1))
  product = mpjax.autocast(RULES[rule](2.0), "mixed_bfloat16")  # It returns its float32 sum.
  value, _ = jax.vjp(product, x, w)
  np.testing.assert_array_equal(value, product(x, w))


# Of two rows each: the gradient of a weight by one row multiplies a column by a row, and sums
# nothing.


def mapped(fun):
  return lambda x, w: jax.vmap(fun, (0, None))(x.reshape(2, 2, 8), w).reshape(4, 8)


def in_a_scan(fun):
  def both(x, w):
    return lax.scan(lambda c, rows: (c, fun(rows, w)), 0, x.reshape(2, 2, 8))[1].reshape(4, 8)

  return both


AROUND = {
  "jit": jax.jit,
  "vmap": mapped,
  "scan": in_a_scan,
  "remat": jax.checkpoint,
  "cond": lambda fun: lambda x, w: lax.cond(x[0, 0] > 0, fun, lambda x, w: x, x, w),
  "jit(remat(vmap))": lambda fun: jax.jit(jax.checkpoint(mapped(fun))),
}


@pytest.mark.not_with("JAX_SCAN3", "JAX does not differentiate such a scan")
@EITHER
def test_inside_and_outside_of_transformations(rule):
  product = RULES[rule](2.0)
  gradients = {
    "autocast of a gradient": mpjax.autocast(jax.grad(of_sum(product), (0, 1))),
    "of one argument": lambda x, w: tuple(
      jax.grad(of_sum(mpjax.autocast(product)), number)(x, w) for number in (0, 1)
    ),
  }
  for name, around in AROUND.items():
    for fun in (mpjax.autocast(around(product)), around(mpjax.autocast(product))):
      gradients[f"{name} {len(gradients)}"] = jax.grad(of_sum(fun), (0, 1))
  for name, gradient in gradients.items():
    program = jax.make_jaxpr(gradient)(X, W)
    assert {t for p in programs.products(program) for t in p.dtypes} == {"bfloat16"}, name
  found = programs.run(lambda x, w: {name: f(x, w) for name, f in gradients.items()}, X, W)
  for name, (dx, dw) in found.items():
    np.testing.assert_array_equal(dx, 2 * X_GRAD, err_msg=name)
    np.testing.assert_array_equal(dw, 2 * W_GRAD, err_msg=name)


def test_integers_flags_keys_and_several_results():
  # Cotangents of what has none are None, and residuals may be of any type.
  @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
  def fun(x, index, key, pair, name, scale):
    assert name == "name"
    y = x @ pair["w"]
    rest = {"index": index + 1, "key": jax.random.split(key)[0]}
    return {"y": scale * y, "row": y[index], **rest}

  def forward(x, index, key, pair, name, scale):
    return fun(x, index, key, pair, name, scale), (x, index, pair["w"], x > 0)

  def backward(name, scale, kept, g):
    assert name == "name"
    x, index, w, positive = kept
    g = scale * g["y"].at[index].add(g["row"])
    return jnp.where(positive, g @ w.T, 0.0), None, None, {"w": x.T @ g, "unused": None}

  fun.defvjp(forward, backward)

  def whole(x, index, w):
    out = fun(x, index, jax.random.key(1), {"w": w, "unused": jnp.zeros(2)}, "name", 2.0)
    return out["y"].sum() + 3 * out["row"].sum(), out

  same_gradients(whole, (0, 2), X, jnp.int32(1), W)


def same_gradients(fun, numbers, *args):
  # Asserts the bits of value, results and gradients without autocast, and low precision.
  both = [jax.value_and_grad(f, numbers, has_aux=True) for f in (mpjax.autocast(fun), fun)]
  got, want = (programs.run(each, *args) for each in both)
  assert programs.bits(got) == programs.bits(want)
  program = jax.make_jaxpr(both[0])(*args)
  assert {t for p in programs.products(program) for t in p.dtypes} == {"bfloat16"}


def test_a_rule_for_integers_by_jvp():
  @functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
  def fun(x, count, f):
    return f(x @ W) * count.astype("float32"), count * 2

  @fun.defjvp
  def _(f, primals, tangents):
    x, count = primals
    assert tangents[1].dtype == jax.dtypes.float0
    _, change = jax.jvp(f, (x @ W,), (tangents[0] @ W,))
    return fun(x, count, f), (5.0 * change, np.zeros((), jax.dtypes.float0))

  def whole(x, count):
    value, doubled = fun(x, count, jnp.abs)
    return value.sum(), doubled

  same_gradients(whole, 0, X, jnp.int32(3))


def test_a_rule_knows_which_operands_do_not_move():
  # Else the derivative by the exponent, 0 times the logarithm of 0, is NaN.
  def rule(primals, tangents):
    (a, b), (da, db) = primals, tangents
    by_exponent = 0 if isinstance(db, SymbolicZero) else db * a**b * jnp.log(a)
    return a**b, da * b * a ** (b - 1) + by_exponent

  power = jax.custom_jvp(lambda a, b: a**b)
  power.defjvp(rule, symbolic_zeros=True)
  layer = lambda x: power(jax.nn.relu(x @ W), jnp.float32(2))  # noqa: E731
  plain, cast = (programs.run(jax.jacfwd(f), X) for f in (layer, mpjax.autocast(layer)))
  np.testing.assert_array_equal(cast, plain)


@EITHER
def test_an_operand_may_come_twice_or_be_a_literal(rule):
  product = RULES[rule](2.0)
  dw = programs.run(jax.grad(of_sum(mpjax.autocast(lambda w: product(w, w)))), W)
  w, ones = np.asarray(W), np.ones((8, 8))
  np.testing.assert_array_equal(dw, 2 * (ones @ w.T + w.T @ ones))

  @jax.custom_jvp
  def scaled(x, s):
    return x * s

  scaled.defjvp(lambda p, t: (p[0] * p[1], 7 * t[0] * p[1]))
  dx = programs.run(jax.grad(of_sum(mpjax.autocast(lambda x: scaled(x @ W, 0.5)))), X)
  np.testing.assert_array_equal(dx, 3.5 * X_GRAD)


def test_a_number_that_a_rule_closes_over_decides_nothing():
  # As in the function itself: 0.5 is exact in low precision, written as an array or not.
  for number in (0.5, jnp.float32(0.5)):
    ruled = jax.custom_jvp(lambda y: y)
    ruled.defjvp(lambda ys, dys: (ys[0], jnp.abs(ys[0] + number) * dys[0]))  # noqa: B023
    cast = mpjax.autocast(lambda x, w: ruled(x @ w) @ w)  # noqa: B023
    program = jax.make_jaxpr(lambda *args: jax.jvp(cast, args, args))(X, W)  # noqa: B023
    assert programs.dtypes_of(program, "abs") == {"bfloat16"}


# Other derivatives.


def test_a_cotangent_is_not_taken_for_the_number_of_its_value():
  @jax.custom_vjp
  def fun(h):
    return 2 * h, jnp.float32(1.5)

  def backward(h, cotangents):
    return (h @ jnp.broadcast_to(cotangents[1], h.shape),)

  fun.defvjp(lambda h: (fun(h), h), backward)

  def loss(w, x):
    return 3 * fun(x @ w)[1]

  w = jnp.eye(8)
  np.testing.assert_array_equal(jax.grad(mpjax.autocast(loss))(w, w), jax.grad(loss)(w, w))


def test_derivatives_of_each_order_and_mode():
  direction = jnp.ones((4, 8))
  second = lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())  # noqa: E731
  cases = {
    "jvp": [
      lambda f: lambda x: jax.jvp(f, (x,), (direction,)),
      lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (direction,)),
      lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
      jax.hessian,
      lambda f: lambda x: jax.linearize(f, x)[1](direction),
    ],
    "vjp": [lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()), second],
  }
  for rule, derivatives in cases.items():
    product = RULES[rule](2.0)
    fun = lambda x, product=product: (product(x, W) ** 2).sum()  # noqa: E731
    for derivative in derivatives:
      got, want = (programs.run(derivative(f), X) for f in (mpjax.autocast(fun), fun))
      assert np.abs(jax.tree.leaves(want)[0]).max() > 1
      # The last squares what is rounded.
      assert programs.error(got, want) <= (1.6e-2 if derivative is second else 0)


def test_a_rule_is_traced_only_when_it_is_needed():
  calls = []

  @jax.custom_vjp
  def fun(x):
    return x @ W

  def forward(x):
    calls.append("forward")
    return x @ W, None

  def backward(kept, g):
    calls.append("backward")
    return (g @ W.T,)

  fun.defvjp(forward, backward)
  jax.make_jaxpr(mpjax.autocast(fun))(X)
  assert calls == []
  jax.make_jaxpr(jax.grad(of_sum(mpjax.autocast(fun))))(X)
  assert calls == ["forward", "backward"]


# Rules that close over arguments of the function that is autocast.

CHANGE = np.arange(-8, 8, dtype=np.float32).reshape(2, 8) / 4


def by_vjp(factor=1.0, computed=False):
  # Of `x @ w`, whose rule closes over `w` and gives `factor` times what it should.

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


CLOSING = {"vjp": by_vjp, "vjp, computed": lambda f: by_vjp(f, computed=True), "jvp": by_jvp}


@pytest.mark.parametrize("rule", CLOSING)
def test_gradient_of_a_rule_that_closes_over_an_argument(rule):
  # `jit(grad(autocast(f)))` is the order that the page recommends; numbers are exact in half.
  grad = jax.grad(of_sum(mpjax.autocast(CLOSING[rule](2.0))))
  for outside in (lambda f: f, jax.jit):
    np.testing.assert_array_equal(outside(grad)(X, W), 2 * X_GRAD)
  found = programs.products(jax.make_jaxpr(grad)(X, W))
  assert {p.dtypes for p in found} == {("bfloat16", "bfloat16")}


def test_a_value_that_only_the_rule_closes_over_is_named():
  # The function itself does not use it, so that nothing shows it before the rule is called.
  def fun(x, w):
    @jax.custom_vjp
    def odd_product(x):
      return x * 2

    odd_product.defvjp(lambda x: (x * 2, None), lambda _, g: (g @ w.T,))
    return odd_product(x)

  where = "mpjax.autocast(fn), the derivative rule of odd_product at"
  got, fix = "closes over an array", "mpjax.autocast(jax.grad(fn))"
  with refused(TypeError, where, "its own arguments", got, fix):
    jax.grad(of_sum(mpjax.autocast(fun)))(X, W)
  np.testing.assert_array_equal(mpjax.autocast(jax.grad(of_sum(fun)))(X, W), X_GRAD)


@pytest.mark.parametrize("rule", CLOSING)
def test_data_arguments_are_inputs_in_the_derivative_too(rule):
  # The derivative is the fractional part of a position, which half does not hold at 4,096.
  product = CLOSING[rule](1.0)

  def loss(x, w, grid):
    place = grid + product(x, w)
    rest = place - jax.lax.stop_gradient(jnp.floor(place))
    return 0.5 * (rest**2).sum() + 0.0 * (rest @ w).sum()

  w, grid = np.eye(8, dtype=np.float32), np.full((2, 8), 4096, np.float32)
  grad = jax.grad(mpjax.autocast(loss, data_argnums=2))(CHANGE, w, grid)
  np.testing.assert_array_equal(grad, CHANGE - np.floor(CHANGE))


# References.


def gradient_with_reference(cast, transform=lambda f: f, *, keeps_arrays=False):
  # Returns a gradient, and what the backward rule has written into a reference.
  tap = jax.custom_vjp(lambda ref, x: x)

  def forward(ref, x):
    return x, (x, ref, jnp.sin(x)) if keeps_arrays else ref

  def backward(kept, g):
    ref = kept[1] if keeps_arrays else kept
    ref[...] = g * kept[0] + kept[2] if keeps_arrays else g
    return None, g

  tap.defvjp(forward, backward)
  loss = cast(lambda w, x, ref: jnp.sum(tap(ref, jnp.tanh(x @ w)) ** 2))
  ref = jax.new_ref(jnp.zeros((4, 8)))
  return transform(jax.grad(loss))(W / 7, X / 7, ref), ref[...]


@pytest.mark.parametrize("keeps_arrays", [False, True])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_backward_rule_writes_into_a_reference(transform, keeps_arrays):
  expected = gradient_with_reference(lambda f: f, keeps_arrays=keeps_arrays)
  found = gradient_with_reference(mpjax.autocast, transform, keeps_arrays=keeps_arrays)
  for a, b in zip(found, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.02)
    assert (a != b).any()  # The matmul was in low precision.


def test_a_reference_that_is_created_inside():
  tap = jax.custom_vjp(lambda ref, x: x)

  def backward(ref, g):
    ref[...] = g
    return None, g

  tap.defvjp(lambda ref, x: (x, ref), backward)

  @mpjax.autocast
  def inside(w, x):
    ref = jax.new_ref(jnp.zeros((4, 8)))
    grad = jax.grad(lambda w: jnp.sum(tap(ref, x @ w) ** 2))(w)
    return grad, ref[...]

  grad, kept = jax.jit(inside)(W, X)
  np.testing.assert_array_equal(kept, 2 * X @ W)
  np.testing.assert_array_equal(grad, X.T @ (2 * X @ W))


# Rules for batches.


def test_custom_vmap_keeps_its_rule():
  batches, xs = [], jnp.stack([X] * 5)

  @jax.custom_batching.custom_vmap
  def layer(x, w):
    return jnp.tanh(x @ w)

  @layer.def_vmap
  def _(size, batched, x, w):
    batches.append((size, batched))
    return jnp.tanh(x.reshape(-1, 8) @ w).reshape(x.shape), True

  fn = mpjax.autocast(lambda x, w: 2 * layer(x, w), "bfloat16")
  mapped = jax.vmap(fn, (0, None))
  products = xs.astype("bfloat16") @ W.astype("bfloat16")
  wanted = 2 * jnp.tanh(products.astype("float32"))  # The result is float32.
  np.testing.assert_array_equal(mapped(xs, W), wanted)
  assert set(map(str, batches)) == {str((5, [True, False]))}
  assert matmuls(mapped, xs, W) == [("bfloat16", "bfloat16")]
  assert all(
    d == ("bfloat16", "bfloat16") for d in matmuls(jax.grad(lambda w: mapped(xs, w).sum()), W)
  )
