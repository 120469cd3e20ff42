"""Functions with derivative rules of their own, ours and users': the rule is the one that is used.

Most rules here are wrong by a known factor, so that the gradient says which one was called.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import mpjax
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])

W = jnp.asarray([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
X = jnp.asarray([[1.0, 2.0, 3.0], [-1.0, 0.0, 2.0]])


def product_by_vjp(factor=1.0):
  """Returns `x @ w` whose gradients are `factor` times what they should be."""

  @jax.custom_vjp
  def product(x, w):
    return x @ w

  def forward(x, w):
    return x @ w, (x, w)

  def backward(kept, g):
    x, w = kept
    return factor * (g @ w.T), factor * (x.T @ g)

  product.defvjp(forward, backward)
  return product


def product_by_jvp(factor=1.0):
  @jax.custom_jvp
  def product(x, w):
    return x @ w

  @product.defjvp
  def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, factor * (dx @ w + x @ dw)

  return product


RULES = {"vjp": product_by_vjp, "jvp": product_by_jvp}
EITHER = pytest.mark.parametrize("rule", RULES)


def of_sum(fun):
  return lambda *args: fun(*args).sum()


def gradients(fun, *args, half="bfloat16"):
  """Returns value and gradients of the sum of `fun` under autocast."""
  numbers = tuple(range(len(args)))
  return programs.run(jax.value_and_grad(of_sum(mpjax.autocast(fun, half)), numbers), *args)


def types(fun, *args):
  """Returns the dtypes of all products of the gradient, operands and results."""
  numbers = tuple(range(len(args)))
  program = jax.make_jaxpr(jax.grad(of_sum(fun), numbers))(*args)
  found = programs.products(program)
  return len(found), {t for p in found for t in (*p.dtypes, p.result.partition("[")[0])}


X_GRAD = np.ones((2, 3)) @ np.asarray(W).T
W_GRAD = np.asarray(X).T @ np.ones((2, 3))


# Rules of JAX.


@pytest.mark.case("B074")
@BOTH
def test_relu_keeps_its_rule(half):
  """The slope at 0 is 0, where max(x, 0) has a half."""

  def fun(w, x):
    return jax.nn.relu(x @ w)

  zeros = jnp.zeros((2, 3))
  _, (dw, dx) = gradients(fun, W, zeros, half=half)
  assert not dw.any()
  assert not dx.any()
  program = jax.make_jaxpr(mpjax.autocast(fun, half))(W, X)
  assert programs.dtypes_of(program, "max") == {half}, "it follows its input"


@pytest.mark.case("B074")
@BOTH
@pytest.mark.parametrize("name", ["softmax", "logsumexp", "log_softmax", "silu", "gelu"])
def test_functions_of_jax_keep_their_rules(name, half):
  f = getattr(jax.nn, name)

  def fun(w, x):
    # Not a sum, of which the gradient would be 0.
    return f(x @ w) * jnp.arange(1.0, 3.0).reshape((2,) + (1,) * (f(x @ w).ndim - 1)) ** f(x @ w)

  cast = jax.value_and_grad(of_sum(mpjax.autocast(fun, half)), (0, 1))
  got, want = programs.run(cast, W, X), programs.run(jax.value_and_grad(of_sum(fun), (0, 1)), W, X)
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  assert programs.error(got, want) < bound
  forward = jax.make_jaxpr(mpjax.autocast(fun, half))(W, X)
  assert programs.dtypes_of(forward, "exp", "log", "reduce_sum") <= {"float32"}
  # The rule has no gradient through the maximum: nothing is selected by equality with it.
  plain = jax.value_and_grad(of_sum(fun), (0, 1))
  names = [
    [e.primitive.name for e, _ in programs.equations(jax.make_jaxpr(f)(W, X))]
    for f in (plain, cast)
  ]
  assert names[0].count("eq") == names[1].count("eq")


@pytest.mark.case("B074")
def test_logsumexp_of_infinities_has_the_gradient_of_its_rule():
  """-inf minus -inf is NaN; JAX takes care of it in logsumexp."""

  def fun(x):
    return jax.nn.logsumexp(x * jnp.ones((2, 3)), axis=1)

  x = jnp.asarray([[-jnp.inf] * 3, [0.0, -jnp.inf, 0.0]])
  value, (grad,) = gradients(fun, x)
  plain, (want,) = programs.run(jax.value_and_grad(of_sum(fun), (0,)), x)
  np.testing.assert_array_equal(value, plain)
  np.testing.assert_array_equal(grad, want)


# Rules of users.


@BOTH
@EITHER
def test_the_rule_of_the_user_is_the_one_that_is_called(rule, half):
  """Twice and -3 times the right gradient, exactly."""
  for factor in (2.0, -3.0):
    product = RULES[rule](factor)
    value, (dx, dw) = gradients(product, X, W, half=half)
    assert value == (np.asarray(X) @ np.asarray(W)).sum()
    np.testing.assert_array_equal(dx, factor * X_GRAD)
    np.testing.assert_array_equal(dw, factor * W_GRAD)
    assert {str(g.dtype) for g in (dx, dw)} == {"float32"}


@BOTH
@EITHER
def test_forward_and_backward_are_in_half(rule, half):
  cast = mpjax.autocast(RULES[rule](), half)
  assert types(cast, X, W) == (3, {half})


@EITHER
def test_autocast_of_a_gradient_is_in_half_too(rule):
  def both(x, w):
    return jax.grad(of_sum(RULES[rule](2.0)), (0, 1))(x, w)

  program = jax.make_jaxpr(mpjax.autocast(both))(X, W)
  assert {t for p in programs.products(program) for t in p.dtypes} == {"bfloat16"}
  dx, dw = programs.run(mpjax.autocast(both), X, W)
  np.testing.assert_array_equal(dx, 2 * X_GRAD)
  np.testing.assert_array_equal(dw, 2 * W_GRAD)


def row_by_row(fun):
  return lambda x, w: jax.vmap(lambda row: fun(row[None], w)[0])(x)


def in_a_scan(fun):
  return lambda x, w: lax.scan(lambda c, row: (c, fun(row[None], w)[0]), 0, x)[1]


AROUND = {
  "jit": jax.jit,
  "vmap": row_by_row,
  "scan": in_a_scan,
  "remat": jax.checkpoint,
  "cond": lambda fun: lambda x, w: lax.cond(x[0, 0] > 0, fun, lambda x, w: x, x, w),
  "jit(remat(vmap))": lambda fun: jax.jit(jax.checkpoint(row_by_row(fun))),
}


@EITHER
@pytest.mark.parametrize("around", AROUND)
def test_inside_and_outside_of_transformations(rule, around):
  product = RULES[rule](2.0)
  for fun in (mpjax.autocast(AROUND[around](product)), AROUND[around](mpjax.autocast(product))):
    # The gradient of a scan has its transpose too: of the parameter by the row.
    dx, dw = programs.run(jax.grad(of_sum(fun), (0, 1)), X, W)
    np.testing.assert_array_equal(dx, 2 * X_GRAD)
    np.testing.assert_array_equal(dw, 2 * W_GRAD)
    assert types(fun, X, W)[1] == {"bfloat16"}


def test_what_the_forward_rule_keeps_is_in_half():
  @jax.custom_vjp
  def act(y):
    return jnp.tanh(y)

  act.defvjp(lambda y: (jnp.tanh(y), (jnp.tanh(y), y)), lambda kept, g: (g * kept[0] * kept[1],))

  def fun(x, w):
    return act(x @ w) @ w

  _, kept = jax.vjp(mpjax.autocast(fun), X, W)
  big = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape == X.shape]
  assert {str(leaf.dtype) for leaf in big} == {"bfloat16"}
  assert len({leaf.unsafe_buffer_pointer() for leaf in big}) <= 4


def test_integers_flags_and_several_results():
  """Cotangents of what has none are None, and residuals may be of any type."""

  @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
  def fun(x, index, pair, name, scale):
    assert name == "name"
    y = x @ pair["w"]
    return {"y": scale * y, "row": y[index], "index": index + 1}

  def forward(x, index, pair, name, scale):
    return fun(x, index, pair, name, scale), (x, index, pair["w"], x > 0)

  def backward(name, scale, kept, g):
    assert name == "name"
    x, index, w, positive = kept
    g = scale * g["y"].at[index].add(g["row"])
    return jnp.where(positive, g @ w.T, 0.0), None, {"w": x.T @ g, "unused": None}

  fun.defvjp(forward, backward)

  def whole(x, index, w):
    out = fun(x, index, {"w": w, "unused": jnp.zeros(2)}, "name", 2.0)
    return out["y"].sum() + 3 * out["row"].sum(), out

  def both(f):
    return lambda *args: jax.value_and_grad(f, (0, 2), has_aux=True)(*args)

  index = jnp.int32(1)
  got = programs.run(both(mpjax.autocast(whole)), X, index, W)
  want = programs.run(both(whole), X, index, W)
  assert programs.bits(got) == programs.bits(want)
  program = jax.make_jaxpr(both(mpjax.autocast(whole)))(X, index, W)
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
    zero = np.zeros((), jax.dtypes.float0)
    return fun(x, count, f), (5.0 * change, zero)

  def whole(x, count):
    value, doubled = fun(x, count, jnp.abs)
    return value.sum(), doubled

  value, grad = programs.run(
    jax.value_and_grad(mpjax.autocast(whole), has_aux=True), X, jnp.int32(3)
  )
  y = np.asarray(X) @ np.asarray(W)
  assert value == (3 * np.abs(y).sum(), 6)
  np.testing.assert_array_equal(grad, 5 * np.sign(y) @ np.asarray(W).T)


@EITHER
def test_only_some_arguments_are_differentiated(rule):
  product = mpjax.autocast(RULES[rule](2.0))
  for number, want in ((0, X_GRAD), (1, W_GRAD)):
    got = programs.run(jax.grad(of_sum(product), number), X, W)
    np.testing.assert_array_equal(got, 2 * want)


@EITHER
def test_an_operand_may_come_twice_or_be_a_literal(rule):
  product = RULES[rule](2.0)
  dw = programs.run(jax.grad(of_sum(mpjax.autocast(lambda w: product(w, w)))), W)
  w, ones = np.asarray(W), np.ones((3, 3))
  np.testing.assert_array_equal(dw, 2 * (ones @ w.T + w.T @ ones))

  @jax.custom_jvp
  def scaled(x, s):
    return x * s

  scaled.defjvp(lambda p, t: (p[0] * p[1], 7 * t[0] * p[1]))
  dx = programs.run(jax.grad(of_sum(mpjax.autocast(lambda x: scaled(x @ W, 0.5)))), X)
  np.testing.assert_array_equal(dx, 3.5 * X_GRAD)


@EITHER
def test_closed_over_tracers_are_arguments_too(rule):
  """A function that closes over a tracer of the program that calls it."""
  product = RULES[rule](2.0)

  def outer(x, w):
    def inner(x):
      return product(x, w * 1.0)

    return mpjax.autocast(inner)(x)

  dx, dw = programs.run(jax.grad(of_sum(outer), (0, 1)), X, W)
  np.testing.assert_array_equal(dx, 2 * X_GRAD)
  np.testing.assert_array_equal(dw, 2 * W_GRAD)


def test_a_rule_that_closes_over_a_tracer():
  """Under `jit` and `checkpoint` such a rule can be used only where the tracer is."""

  def fun(x, w):
    w = w * 1.0

    @jax.custom_jvp
    def product(x):
      return x @ w

    product.defjvp(lambda primals, tangents: (primals[0] @ w, 2.0 * (tangents[0] @ w)))
    return product(x).sum()

  assert mpjax.autocast(fun)(X, W) == (np.asarray(X) @ np.asarray(W)).sum()
  dx = programs.run(mpjax.autocast(jax.grad(fun)), X, W)
  np.testing.assert_array_equal(dx, 2 * X_GRAD)
  with pytest.raises(jax.errors.UnexpectedTracerError):
    jax.grad(jax.checkpoint(fun))(X, W)
  np.testing.assert_array_equal(jax.grad(mpjax.autocast(fun))(X, W), 2 * X_GRAD)


def test_a_float32_rule_stays_in_float32():
  """What a user casts inside of a rule is theirs."""

  @jax.custom_vjp
  def product(x, w):
    return jnp.dot(x, w, precision="highest")

  product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda kept, g: (
      jnp.dot(g, kept[1].T, precision="highest"),
      jnp.dot(kept[0].T, g, precision="highest"),
    ),
  )
  assert types(mpjax.autocast(product), X, W) == (3, {"float32"})


def test_a_rule_inside_of_full_rules_is_left():
  rules = [mpjax.Rule(None, path="exact")]

  def fun(x, w):
    with jax.named_scope("exact"):
      y = product_by_vjp(2.0)(x, w)
    return y @ w

  # The one product outside, and its two gradients.
  program = jax.make_jaxpr(jax.grad(of_sum(mpjax.autocast(fun, rules=rules)), (0, 1)))(X, W)
  halves = [p.is_low_precision for p in programs.products(program)]
  assert (halves.count(True), halves.count(False)) == (3, 3)


def sum_over_devices_by_vjp(varying):
  """Returns `psum(x @ w)`, whose gradients are twice what they should be."""

  @jax.custom_vjp
  def total(x, w):
    return lax.psum(x @ w, "d")

  def backward(kept, g):
    (x, w), g = kept, varying(g)
    return 2 * (g @ w.T), 2 * lax.psum(x.T @ g, "d")

  total.defvjp(lambda x, w: (total(x, w), (x, w)), backward)
  return total


def sum_over_devices_by_jvp(varying):
  del varying

  @jax.custom_jvp
  def total(x, w):
    return lax.psum(x @ w, "d")

  @total.defjvp
  def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return total(x, w), 2 * lax.psum(dx @ w + x @ dw, "d")

  return total


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("make", [sum_over_devices_by_vjp, sum_over_devices_by_jvp])
def test_a_rule_inside_of_shard_map(make, check_vma, devices):
  mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=devices)
  total = make(lambda g: lax.pcast(g, "d", to="varying") if check_vma else g)

  def fun(x, w):
    return jax.shard_map(
      total, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P(), check_vma=check_vma
    )(x, w)

  x = jnp.arange(24.0).reshape(8, 3) % 5

  def both(f):
    return lambda *args: jax.value_and_grad(of_sum(f), (0, 1))(*args)

  got = programs.run(both(mpjax.autocast(fun)), x, W)
  want = programs.run(both(fun), x, W)
  assert programs.bits(got) == programs.bits(want)
  assert types(mpjax.autocast(fun), x, W)[1] == {"bfloat16"}
  program = jax.make_jaxpr(both(mpjax.autocast(fun)))(x, W)
  assert programs.dtypes_of(program, "psum", "psum_invariant") == {"float32"}


# Other derivatives.


def test_forward_derivatives_and_second_ones():
  product = product_by_jvp(2.0)

  def fun(x):
    return (product(x, W) ** 2).sum()

  cast = mpjax.autocast(fun)
  direction = jnp.ones((2, 3))
  cases = [
    lambda f: lambda x: jax.jvp(f, (x,), (direction,)),
    lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (direction,)),
    lambda f: lambda x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    lambda f: lambda x: jax.hessian(f)(x),
    lambda f: lambda x: jax.linearize(f, x)[1](direction),
  ]
  for case in cases:
    got, want = programs.run(case(cast), X), programs.run(case(fun), X)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(ours, theirs)


def test_second_derivatives_of_a_custom_vjp():
  def fun(x):
    return (product_by_vjp(2.0)(x, W) ** 2).sum()

  def second(f):
    return lambda x: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x)

  got, want = programs.run(second(mpjax.autocast(fun)), X), programs.run(second(fun), X)
  assert np.abs(want).max() > 1
  assert programs.error(got, want) < 1.6e-2


def test_a_custom_vjp_has_no_forward_derivative_with_or_without():
  product = product_by_vjp()
  for fun in (product, mpjax.autocast(product)):
    with pytest.raises(TypeError, match="can't apply forward-mode auto"):
      jax.jvp(fun, (X, W), (X, W))


def test_an_error_in_a_rule_is_the_users():
  @jax.custom_vjp
  def fun(x):
    return x @ W

  def backward(kept, g):
    raise RuntimeError("mine")

  fun.defvjp(lambda x: (x @ W, None), backward)
  cast = mpjax.autocast(fun)
  assert cast(X).shape == (2, 3)
  with pytest.raises(RuntimeError, match="mine"):
    jax.grad(of_sum(cast))(X)


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


def test_the_results_that_are_no_numbers():
  """Keys among the operands and the results."""

  @jax.custom_vjp
  def noisy(x, key):
    key, used = jax.random.split(key)
    return x @ W + jax.random.normal(used, x.shape), key

  noisy.defvjp(lambda x, key: (noisy(x, key), None), lambda kept, g: (3.0 * (g[0] @ W.T), None))
  key = jax.random.key(1)
  grad, used = (
    programs.run(
      jax.grad(lambda x: (mpjax.autocast(noisy)(x, key)[0].sum(), 1.0)[0], has_aux=False), X
    ),
    programs.run(lambda x: mpjax.autocast(noisy)(x, key)[1], X),
  )
  np.testing.assert_array_equal(grad, 3 * X_GRAD)
  want = jax.random.split(key)[0]
  np.testing.assert_array_equal(jax.random.key_data(used), jax.random.key_data(want))
