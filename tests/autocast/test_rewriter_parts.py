"""Parts of the rewriter: parameters of equations that name a dtype, and what reads a value."""

import contextlib
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpjax
from mpjax._autocast.rewriter import By, in_default, readers_of, wants_precision
from mpjax._autocast.values import Settings
from mpjax._jaxpr.reader import hides_matmul, walk
from tests import programs

HIGHEST = lax.Precision.HIGHEST
X = jnp.ones((3, 3))


def test_a_wish_for_precision():
  for precision, want in (
    (None, False),
    (lax.Precision.DEFAULT, False),
    ((lax.Precision.DEFAULT, None), False),
    (HIGHEST, True),
    ((HIGHEST, lax.Precision.DEFAULT), True),
    ((None, lax.Precision.HIGH), True),
    (lax.DotAlgorithmPreset.F32_F32_F32, True),
  ):
    assert wants_precision({"precision": precision}) == want, precision
  assert not wants_precision({})


MATMULS = {
  "dot_general": lambda x: x @ x,
  "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.asarray([3])),
}


def matmuls(fun, *args):
  """The dtype and the precision of each matmul, also of programs for derivatives."""
  every = (e for e, _ in programs.equations(jax.make_jaxpr(fun)(*args)))
  eqns = [e for e in every if "preferred_element_type" in e.params]
  return [(str(e.invars[0].aval.dtype), e.params["precision"]) for e in eqns]


@pytest.mark.parametrize("setting", ["high", "tensorfloat32", "highest", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("name", MATMULS)
def test_a_setting_for_the_whole_process_does_not_switch_autocast_off(name, setting):
  fun = MATMULS[name]
  with jax.default_matmul_precision(setting):
    ((dtype, asked),) = matmuls(fun, X)
    assert (dtype, wants_precision({"precision": asked})) == ("float32", True)
    assert matmuls(mpjax.autocast(fun), X) == [("bfloat16", None)]
    # What is left in float32 has the precision that it has without autocast.
    assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), X) == [("float32", asked)]
    ops = mpjax.OpLists().replace(float32=[name])
    assert matmuls(mpjax.autocast(fun, ops=ops), X) == [("float32", asked)]
  assert matmuls(mpjax.autocast(fun), X) == [("bfloat16", None)]
  assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), X) == [("float32", None)]


def linear_call(a, b):
  return jax.custom_derivatives.linear_call(lambda a, b: 2 * a @ b, lambda a, b: b @ a, a, b)


def linear_solve(a, b):
  back = jnp.exp(lax.cond(b[0] > 0, lambda b: b @ a @ a, lambda b: a @ b, b))
  return lax.custom_linear_solve(lambda x: a @ x, back, lambda _, b: b @ a, lambda _, b: b @ a.T)


SOLVERS = {
  "linear_call": linear_call,
  "custom_linear_solve": linear_solve,
  "cg": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: jax.jit(jnp.dot)(a, x), b, maxiter=2)[0],
}


@pytest.mark.parametrize("name", SOLVERS)
def test_programs_that_are_left_alone_have_the_setting_for_the_whole_process(name):
  def gradient(fun):
    return lambda a, b: jax.grad(lambda b: fun(a, b).sum())(b)

  fun, args = SOLVERS[name], (X, X[0])
  for wrapped in (lambda f: f, gradient):
    with jax.default_matmul_precision("high"):
      plain = matmuls(wrapped(fun), *args)
      found = matmuls(wrapped(mpjax.autocast(fun)), *args)
      left = matmuls(wrapped(mpjax.autocast(mpjax.full_precision(fun))), *args)
    assert ("float32", (lax.Precision.HIGH,) * 2) in plain
    assert plain == left
    assert {each for each in found if each[0] == "float32"} == set(plain)
    assert (("bfloat16", None) in found) == (name == "custom_linear_solve")
  # Without a setting nothing is written anew.
  assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), *args) == matmuls(fun, *args)


def root(a, b):
  def solve(f, x):
    return x - f(x)

  return lax.custom_root(lambda x: a @ x - b, b, solve, lambda g, y: y / g(jnp.ones_like(y)))


def lowered_matmuls(fun, *args):
  lines = jax.jit(fun).lower(*args).as_text().splitlines()
  return [("bf16" in line, "HIGHEST" in line) for line in lines if "dot_general" in line]


def test_a_root_that_is_left_alone_has_the_setting_for_the_whole_process():
  def fun(a, b):
    return root(a, a @ b)

  warned = (
    pytest.warns(UserWarning, match="jax_default_matmul_precision is set.*custom_root")
    if any(map(hides_matmul, walk(jax.make_jaxpr(root)(X, X[0]))))
    else contextlib.nullcontext()
  )
  with jax.default_matmul_precision("highest"), warned:
    found = lowered_matmuls(mpjax.autocast(fun), X, X[0])
  assert found
  assert all(highest or half for half, highest in found)
  with jax.default_matmul_precision("bfloat16"):  # As fast as can be: nothing to give back.
    assert (True, False) in lowered_matmuls(mpjax.autocast(fun), X, X[0])


def test_what_counts_under_a_setting_for_the_whole_process():
  # A precision at the call does; and derivative rules run in half too.
  @jax.custom_vjp
  def product(x):
    return x @ x

  def at_the_call(x):
    return jnp.dot(x, x, precision="highest"), x @ x

  product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x,))
  for setting in ("high", "highest"):
    with jax.default_matmul_precision(setting):
      found = matmuls(mpjax.autocast(at_the_call), X)
      of_rule = matmuls(jax.grad(lambda x: mpjax.autocast(product)(x).sum()), X)
    assert found == [("float32", (HIGHEST, HIGHEST)), ("bfloat16", None)]
    assert of_rule == [("bfloat16", None)] * 2


def test_a_setting_for_the_whole_process_is_not_for_float8():
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=()))
  w = jnp.eye(16)
  with jax.default_matmul_precision("highest"):
    found = matmuls(mpjax.autocast(lambda w, x: x @ w, policy), w, w)
  assert found == [("float8_e4m3fn", None)]


def test_a_remat_that_saves_low_precision_has_the_setting_for_the_whole_process():
  def fun(w, x):
    def step(c, row):
      return c + (c + mpjax.full_precision(jnp.dot)(row, w)) @ (0.1 * w), None

    return lax.scan(jax.checkpoint(step, prevent_cse=False), jnp.zeros(3), x)[0].sum()

  grad = jax.grad(mpjax.autocast(fun, "c=bf16"))
  with jax.default_matmul_precision("highest"):
    found = matmuls(grad, X, X)
  # In the forward pass, and in the backward pass, where it is computed again.
  assert {asked for dtype, asked in found if dtype == "float32"} == {(HIGHEST, HIGHEST)}
  assert {asked for _, asked in matmuls(grad, X, X)} == {None}


def test_a_multiplication_that_names_its_dtype_is_the_users_choice():
  if "out_dtype" not in inspect.signature(lax.mul).parameters:
    pytest.skip("jax.lax.mul has no out_dtype before jax 0.12")

  def fun(x, y):
    return lax.mul(x @ y, x @ y, out_dtype=jnp.float32)

  program = jax.make_jaxpr(mpjax.autocast(fun))(X, X)
  (eqn,) = (e for e in program.eqns if e.primitive.name == "mul")
  assert [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)] == ["float32"] * 3


def test_a_program_in_which_a_precision_changes_nothing_is_not_kept():
  # What is kept for a program is kept as long as the program is: it may not be the program.
  jaxpr = jax.make_jaxpr(jax.jit(lambda x: x + 1.0))(1.0).jaxpr
  inner = weakref.ref(jaxpr.eqns[0].params["jaxpr"])
  with jax.default_matmul_precision("highest"):
    assert in_default(jaxpr) is jaxpr
  del jaxpr
  jax.clear_caches()
  gc.collect()
  assert inner() is None


# What reads a value, found backwards.

SETTINGS = Settings(policy=mpjax.Policy(compute_dtype="float16"), ops=mpjax.OpLists())
LIST = By.FULL | By.EXACT
PLACE = By.INDEX | By.ROUNDED
"""What an operation of the float32 list is."""


def readers(fun, *args, results=None, ops=None):
  """Returns what reads each argument of `fun`."""
  jaxpr = jax.make_jaxpr(fun)(*(args or (X,))).jaxpr
  given = SETTINGS if ops is None else Settings(policy=SETTINGS.policy, ops=ops)
  readers, _ = readers_of(jaxpr, tuple(results or (0,) * len(jaxpr.outvars)), given, ())
  return tuple(readers.get(v, 0) for v in jaxpr.invars)


@pytest.mark.parametrize(
  ("fun", "want"),
  [
    (lambda x: x, 0),
    (lambda x: jnp.ones(3), 0),
    (lambda x: x @ x, By.MATMUL),
    (jnp.exp, LIST),
    (lambda x: x.sum(), LIST),
    (lambda x: lax.reduce_precision(x, 5, 5), LIST | By.INDEX),
    (lambda x: (jnp.exp(x), x @ x), LIST | By.MATMUL),
    # Sums, comparisons, indices and integers take their operands as they are held; products too.
    (lambda x: x + 1, By.SUMMED),
    (lambda x: x > 0, By.EXACT | By.COMPARED),
    (lambda x: jnp.argmax(x), By.EXACT | By.INDEX),
    (lambda x: lax.top_k(x, 2)[1], By.EXACT | By.INDEX),
    (lambda x: x.astype(int), By.EXACT | PLACE),
    (lambda x: 2 * x, By.FACTOR),
    # Behind operations in neither list, of any number; a sum alone ends what a rounding harms.
    (lambda x: jnp.tanh(2 * x.T)[:2] @ X, By.MATMUL | By.FACTOR),
    (lambda x: jnp.exp(jnp.tanh(2 * x.T)[:2]), LIST | By.FACTOR),
    (lambda x: lax.concatenate([x, jnp.exp(x)], 0) @ X, LIST | By.MATMUL),
    (lambda x: (x + 1) @ X, By.SUMMED | By.MATMUL),
    # A cast of the user's rounds.
    (lambda x: jnp.exp(x.astype("bfloat16")), 0),
    (lambda x: x.astype("bfloat16") @ X.astype("bfloat16"), By.MATMUL),
    # What reads the result of an operation of a list does not read its operands.
    (lambda x: jnp.exp(x) @ X, LIST),
    (lambda x: jnp.exp(x @ x), By.MATMUL),
    # What is thrown away is read by nothing.
    (lambda x: (jnp.tanh(x), x)[1], 0),
    # Bodies.
    (jax.jit(lambda x: x @ x), By.MATMUL),
    (lambda x: jax.jit(lambda x: 2 * x)(x) @ x, By.MATMUL | By.FACTOR),
    (lambda x: lax.cond(True, lambda x: x @ x, lambda x: x, x), By.MATMUL),
    (lambda x: lax.cond(True, jnp.exp, lambda x: x, x) @ X, LIST | By.MATMUL),
    (jax.checkpoint(lambda x: jnp.exp(x) + x @ x), LIST | By.MATMUL),
    # Decisions are as sums.
    (lambda x: jnp.floor(2 * x) @ X, By.SUMMED | PLACE | By.FACTOR | By.MATMUL),
    (lambda x: jnp.exp(x - 1), LIST),
    # What says where something is, behind a matmul too.
    (lambda x: jnp.argmax(x @ X), By.MATMUL | By.INDEX),
    (lambda x: jnp.cos(2 * x.T), LIST | By.FACTOR | By.ANGLE | By.INDEX),
  ],
)
def test_of_an_argument(fun, want):
  assert readers(fun)[-1] == want


def test_of_a_caller():
  # One that asks for float32 is seen through sums and what moves elements, and nothing else.
  for fun, want in (
    (lambda x: x.T, By.CALLER),
    (lambda x: x + 1, By.CALLER | By.SUMMED),
    (lambda x: x + 1 + x.T, By.CALLER | By.SUMMED),
    (lambda x: (x + 1, -x), By.RETURNED | By.CALLER | By.SUMMED),
    (lambda x: 2 * x, By.RETURNED | By.FACTOR),
    (lambda x: (x + 1) @ X, By.SUMMED | By.MATMUL),
  ):
    outs = jax.tree.leaves(jax.eval_shape(fun, X))
    assert readers(fun, results=(By.CALLER,) * len(outs)) == (want,)
  assert readers(lambda x: x + 1, results=(By.RETURNED,)) == (By.RETURNED | By.SUMMED,)


def test_of_what_loops_and_solvers_take():
  def chain(x, y, z):  # What reads the first reads the last, two iterations later.
    turn = lambda c, _: ((jnp.exp(c[0]), -c[0], -c[1]), c[2])  # noqa: E731
    return lax.scan(turn, (x, y, z), None, length=3)

  def until(limit, w, y):
    return lax.while_loop(lambda y: y.sum() < jnp.exp(limit), lambda y: y @ w, y)

  def solved(a, b):
    return lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: b / jnp.diag(a))

  # All are carried: their consumers take them as they are held.
  held = (LIST | By.MATMUL, By.EXACT | By.MATMUL, By.MATMUL)
  assert readers(chain, X, X, X, results=(0, 0, 0, By.MATMUL)) == held
  assert readers(chain, X, X, X, results=(0, 0, 0, 0)) == (LIST, By.EXACT, 0)
  assert readers(until, 1.0, X, X) == (LIST, By.MATMUL, LIST | By.MATMUL)
  both = LIST | By.INDEX | By.ALGEBRA
  assert readers(solved, X, X[0]) == (both, both)
  # Not behind a matmul, whose operands are not rounded for it either.
  assert readers(lambda w, a, b: solved(a @ w, 2 * b), X, X, X[0]) == (
    By.MATMUL | By.EXACT | By.INDEX,
  ) * 2 + (both | By.FACTOR,)
