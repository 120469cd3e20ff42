"""Rewriting a jaxpr: equations that run as they were traced, and jaxprs that are rewritten once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import mpjax
from tests import programs
from tests.autocast.rig import (
  BOTH,
  dtypes,
  find,
  jaxpr_under,
  matmuls,
  repeat_p,
  with_jvp,
  with_vjp,
)
from tests.programs import compilations

W = jnp.eye(8)
X = jnp.arange(16.0).reshape(2, 8)


# Primitives that run as they were traced.


def double(x_ref, y_ref):
  y_ref[...] = x_ref[...] + x_ref[...]


LEFT = {
  "composite": jax.lax.composite(lambda x, w: x @ w, "test.op"),
  "pallas_call": lambda x, w: pallas.pallas_call(
    double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
  )(x),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_kernel_and_a_composite_have_the_dtypes_that_they_were_traced_with(name):
  def around(x, w):
    return LEFT[name](x @ w, w) @ w

  ours = mpjax.autocast(around, "bfloat16")
  program = jax.make_jaxpr(ours)(X, W)
  (call,) = (eqn for eqn in program.eqns if eqn.primitive.name == name)
  assert {str(v.aval.dtype) for v in (*call.invars, *call.outvars)} == {"float32"}
  found = programs.products(program)
  assert {p.dtypes for p in found} == {("bfloat16", "bfloat16")}
  assert len(found) == (3 if name == "composite" else 2)
  assert programs.error(programs.run(ours, X, W), around(X, W)) <= 1.6e-2


@pytest.mark.parametrize("setting", [None, "highest"])
def test_an_unknown_primitive_runs_as_it_was_traced_and_is_reported(setting):
  def fn(x, w):
    jaxpr = jax.make_jaxpr(lambda w, x: x @ w)(w, x)
    return repeat_p.bind(w, x @ w, jaxpr=jaxpr, times=1)[0] @ w

  ours = mpjax.autocast(fn, "bfloat16")
  warned = pytest.warns(UserWarning, match="'repeat_times' holds a jaxpr in its .*'jaxpr'")
  with jax.default_matmul_precision(setting), warned:
    program = jax.make_jaxpr(ours)(X, W)
    found = jax.jit(ours)(X, W)  # JAX still has the program.
  np.testing.assert_allclose(found, X @ W @ W @ W, rtol=0.1, atol=0.1)
  first, call, last = (
    e for e in program.eqns if e.primitive.name in ("dot_general", repeat_p.name)
  )
  assert dtypes(call.invars) == ["float32"] * 2
  assert dtypes([*first.outvars, *last.outvars]) == ["bfloat16"] * 2
  # It has the setting for the entire process, which those in low precision have not.
  asked = setting and (jax.lax.Precision.HIGHEST,) * 2
  assert [e.params["precision"] for e in call.params["jaxpr"].eqns] == [asked]
  assert first.params["precision"] is last.params["precision"] is None


def test_checkpoint_of_a_later_jax_is_entered(set_flag):
  set_flag("jax_remat3", True)  # There it is an object.

  def fn(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x) @ w

  ours = mpjax.autocast(fn)
  np.testing.assert_allclose(ours(X, W), fn(X, W), rtol=0.05, atol=0.05)
  program = jax.make_jaxpr(ours)(X, W)
  assert [p.dtypes for p in programs.products(program)] == [("bfloat16", "bfloat16")] * 2


@pytest.mark.parametrize("precision", [None, "highest"])
def test_objects_of_a_later_jax_without_matmuls_are_not_reported(precision):
  def fn(x, w):  # A search and a count: each may be an object.
    y = jnp.ravel(x @ w)
    return y[jnp.searchsorted(jnp.sort(y), y[:3])], jnp.nonzero(y > 0, size=3)

  with jax.default_matmul_precision(precision):
    assert matmuls(mpjax.autocast(fn), X, W) == [("bfloat16", "bfloat16")]


# Once.


def test_the_same_function_is_rewritten_once():
  @jax.jit
  def layer(y, w):
    return jnp.tanh(y @ w)

  def fun(w, x):
    y = layer(layer(x @ w, w), w) @ w
    return lax.cond(x[0, 0] > 0, lambda y: layer(y, w) @ w, lambda y: y, y)

  calls = find(jaxpr_under(fun, W, X), "jit")
  assert len(calls) == 3
  assert len({id(eqn.params["jaxpr"]) for eqn in calls}) == 1
  lowered = jax.jit(mpjax.autocast(fun, "bfloat16")).lower(W, X).as_text()
  assert lowered.count("func.func private @layer") == 1

  # It is another program for an argument in another type.
  def mixed(w, x):
    return layer(layer(x, w), w)

  assert len({id(eqn.params["jaxpr"]) for eqn in find(jaxpr_under(mixed, W, X), "jit")}) == 2


@pytest.mark.parametrize("differentiated", [False, True])
def test_calling_again_without_jit_compiles_nothing(differentiated):
  @jax.jit
  def layer(w, x):
    y = jax.nn.softmax(jax.nn.relu(x @ w))
    return lax.scan(lambda y, _: (y @ w, None), y, None, length=2)[0]

  def fun(w, x):
    return layer(w, layer(w, x)).sum()

  ours = mpjax.autocast(fun)
  run = jax.grad(ours) if differentiated else ours
  found = []
  for _ in range(2):
    with compilations() as compiled:
      jax.block_until_ready(run(W, X))
    found.append(compiled.total())
  assert found[0] > found[1] == 0


# Results.


# Dtypes and weak types.


def types(fun, *args):
  return [(str(v.dtype), v.weak_type) for v in jax.make_jaxpr(fun)(*args).out_avals]


def test_weak_types_are_kept():
  def fun(x, s):
    weak = [jnp.asarray(number) for number in (1, 2.5, 1j)]
    made = [(each, each * 2, each + 1) for each in weak]
    carried = lax.scan(lambda c, _: (c * 2, None), 1.0, length=2)[0]
    strong = (s * s).astype("float32"), s.astype("float32")
    return made, x, (x @ x.T) * s, s, s * s, *strong, carried

  args = X, jnp.asarray(2.0)
  plain, ours = (jax.make_jaxpr(f)(*args) for f in (fun, mpjax.autocast(fun)))
  weak_types = [True] * 9 + [False, False, True, True, False, False, True]
  assert [v.weak_type for v in ours.out_avals] == weak_types
  assert [v.weak_type for v in plain.out_avals] == weak_types


def strong(w):
  return w.astype("float32")


WEAK = jnp.full((8, 8), 0.5)  # JAX gives it a weak type.

# Functions of an array with a weak type and of one without.
TYPED = {
  "a move": lambda w, x: jnp.flip(strong(w)),
  "arithmetic": lambda w, x: -strong(w),
  "arithmetic on a weak type": lambda w, x: -w,
  "the float32 list": lambda w, x: jnp.exp(strong(w)),
  "a sum": lambda w, x: jnp.sum(strong(w)),
  "a matmul": lambda w, x: strong(w) @ w,
  "a matmul of a weak type": lambda w, x: w @ w,
  "operations behind it": lambda w, x: jnp.exp(w @ w) * w,
  "an activation function": lambda w, x: (w @ w) + (w @ w) ** 3,
  "a strong operand": lambda w, x: jnp.tanh(x @ w),
  "concat": lambda w, x: jnp.concatenate([strong(w), strong(w) * 2]),
  "where": lambda w, x: jnp.where(x > 0, strong(w), 0.0),
  "where of a weak type": lambda w, x: jnp.where(x > 0, w @ w, 0.0),
  "a number": lambda w, x: -jnp.full(3, 1.5).astype("float32"),
  "a low-precision cast": lambda w, x: jnp.sin(w.astype("bfloat16")).astype("float32"),
  "jit": lambda w, x: jax.jit(jnp.flip)(strong(w)),
  "jit of a weak type": lambda w, x: jax.jit(lambda w: jnp.flip(strong(w)))(w),
  "checkpoint": lambda w, x: jax.checkpoint(lambda w: jnp.tanh(w @ strong(w)))(w),
  "scan": lambda w, x: lax.scan(lambda c, y: (jnp.flip(strong(w)), -strong(y)), x, w),
  "scan of a weak type": lambda w, x: lax.scan(lambda c, y: (c @ w, -y), w, w),
  "while": lambda w, x: lax.while_loop(lambda c: c[0, 0] > 9, lambda c: jnp.flip(strong(w)), x),
  "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: jnp.flip(strong(w)), lambda: x),
  "cond of a weak type": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w @ w, lambda: w),
  "custom_jvp": lambda w, x: with_jvp(lambda w: jnp.tanh(w @ strong(w)))(w),
  "custom_jvp of a weak type": lambda w, x: with_jvp(lambda w: jnp.tanh(w @ w))(w),
  "custom_vjp": lambda w, x: with_vjp(lambda w: jnp.tanh(w @ strong(w)))(w),
  "custom_vjp of a weak type": lambda w, x: with_vjp(lambda w: jnp.tanh(w @ w))(w),
}
AROUND = {
  "eager": lambda f: f,
  "jit": jax.jit,
  "vmap": jax.vmap,
  "scan": lambda f: lambda *args: lax.scan(lambda c, _: (c, f(*c)), args, length=2)[1],
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("fun", TYPED.values(), ids=TYPED)
def test_results_have_the_types_that_they_have_without(fun, around):
  args = (WEAK[None], W[None]) if around is jax.vmap else (WEAK, W)
  assert types(around(mpjax.autocast(fun)), *args) == types(around(fun), *args)


@pytest.mark.parametrize(
  "name",
  [
    *("a move", "arithmetic", "arithmetic on a weak type", "a matmul of a weak type", "concat"),
    *("operations behind it", "where of a weak type", "jit", "scan", "scan of a weak type", "cond"),
    *("custom_jvp of a weak type", "custom_vjp", "custom_vjp of a weak type"),
  ],
)
def test_gradients_have_the_types_that_they_have_without(name):
  def gradients(fun):
    return jax.grad(lambda *args: sum(map(jnp.sum, jax.tree.leaves(fun(*args)))), (0, 1))

  fun = TYPED[name]
  assert types(gradients(mpjax.autocast(fun)), WEAK, W) == types(gradients(fun), WEAK, W)


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_the_gradient_of_an_input_has_its_dtype(given):
  gradient = jax.grad(lambda x: mpjax.autocast(jnp.tanh)(x).astype("float32").sum())
  assert jax.eval_shape(gradient, jax.ShapeDtypeStruct((3, 4), given)).dtype == given


# Numbers.


@BOTH
def test_a_parameter_that_is_selected_into_a_float32_result_keeps_its_bits(half):
  # A skipped step by hand, a branch, a maximum: in low precision, 1.00123 is another number.
  def fun(ok, w, x):
    new = x @ w
    return jnp.where(ok, new, w), jax.lax.cond(ok, lambda: new, lambda: w), jnp.maximum(w, new)

  w = np.full((8, 8), 1.00123, np.float32)
  for kept in jax.jit(mpjax.autocast(fun, f"mixed_{half}"))(np.asarray(False), w, -W - 1):
    np.testing.assert_array_equal(kept, w)


@BOTH
def test_an_optimizer_step_inside_moves_the_parameters(half):
  # Each update is below half the distance of two numbers in half.
  x, y, w = np.ones((4, 1), np.float32), np.full((4, 1), 2.0, np.float32), np.ones((1, 1), "f")

  def step(w):
    return w - 1e-5 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)

  new = jax.jit(mpjax.autocast(step, half))(w)
  np.testing.assert_array_equal(new, w + np.float32(1e-5) * np.float32(2))


@BOTH
def test_masked_softmax_stays_finite(half):
  # Also of a row without any allowed key, except for -inf, where no number is right.
  numbers = [-1e9, -1e30, float(np.finfo(np.float32).min), -np.inf]
  mask = np.asarray([[True, False, True] + [False] * 5, [False] * 8])

  def where(w, x, mask, number):
    return jax.nn.softmax(jnp.where(mask, x @ w, number))

  def add(w, x, mask, number):
    return jax.nn.softmax(x @ w + jnp.where(mask, 0.0, number))

  cases = list(itertools.product(numbers, (where, add)))

  def each(w, x, mask):
    found = []
    for number, fun in cases:
      rows = 1 if number == -np.inf else 2
      plain = functools.partial(fun, number=number)
      cast, args = mpjax.autocast(plain, half), (w, x[:rows], mask[:rows])
      gradient = jax.grad(lambda w, x, mask, cast=cast: cast(w, x, mask).sum())(*args)
      found.append((cast(*args), plain(*args), gradient))
    return found

  e = np.where(mask[0], np.exp(X[0]), 0)
  for (number, fun), found in zip(cases, programs.run(each, W, X, mask), strict=True):
    weights, plain, gradient = found
    # The largest logit is not masked away where all are: they are equal beside -1e9.
    want = [e / e.sum(), plain[-1] if fun is add else np.full(8, 1 / 8)]
    np.testing.assert_allclose(weights, want[: len(weights)], 2e-7, 0, err_msg=f"{fun} {number}")
    assert np.isfinite(gradient).all()


def test_a_loss_that_is_unsafe_in_low_precision_is_finite():
  # PyTorch refuses binary cross entropy of probabilities: in bfloat16, 1 - p is 0 above 0.998.
  def loss(x):
    p = jax.nn.sigmoid(8 * (x @ x))
    return -jnp.mean(jnp.log(p) + jnp.log1p(-p))

  x = jnp.eye(8)
  np.testing.assert_allclose(mpjax.autocast(loss)(x), loss(x), rtol=1e-6)
