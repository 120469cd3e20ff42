"""The precision that equations name, and `jax_default_matmul_precision`."""

import contextlib
import inspect
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpjax
from mpjax._autocast.precision import Asked, asked_precision, with_precision
from mpjax._jaxpr.reader import hides_matmul, walk
from tests import programs

HIGHEST = lax.Precision.HIGHEST
X = jnp.ones((8, 8))


@pytest.mark.parametrize(
  ("precision", "want"),
  [
    (None, False),
    (lax.Precision.DEFAULT, False),
    ((lax.Precision.DEFAULT, None), False),
    (HIGHEST, True),
    ((HIGHEST, lax.Precision.DEFAULT), True),
    ((None, lax.Precision.HIGH), True),
    (lax.DotAlgorithmPreset.F32_F32_F32, True),
  ],
)
def test_precisions_that_ask_for_more_than_the_default(precision, want):
  assert (asked_precision(precision) != "") == want, precision


MATMULS = {
  "dot_general": lambda x: x @ x,
  "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.asarray([8])),
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
    assert (dtype, asked_precision(asked) != "") == ("float32", True)
    assert matmuls(mpjax.autocast(fun), X) == [("bfloat16", None)]
    # A float32 matmul has the precision that it has without autocast.
    assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), X) == [("float32", asked)]
    ops = mpjax.OpLists().replace(float32=[name])
    assert matmuls(mpjax.autocast(fun, ops=ops), X) == [("float32", asked)]
  assert matmuls(mpjax.autocast(fun), X) == [("bfloat16", None)]
  assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), X) == [("float32", (HIGHEST, HIGHEST))]


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
def test_jaxprs_that_are_not_entered_have_the_setting_for_the_whole_process(name):
  def gradient(fun):
    return lambda a, b: jax.grad(lambda b: fun(a, b).sum())(b)

  fun, args = SOLVERS[name], (X, X[0])
  warned = pytest.warns(UserWarning, match="takes the result of low-precision matmuls")
  for wrapped in (lambda f: f, gradient):
    with jax.default_matmul_precision("high"):
      plain = matmuls(wrapped(fun), *args)
      with warned if name == "custom_linear_solve" else contextlib.nullcontext():
        found = matmuls(wrapped(mpjax.autocast(fun)), *args)
      left = matmuls(wrapped(mpjax.autocast(mpjax.full_precision(fun))), *args)
    assert ("float32", (lax.Precision.HIGH,) * 2) in plain
    assert plain == left
    assert {each for each in found if each[0] == "float32"} == set(plain)
    assert (("bfloat16", None) in found) == (name == "custom_linear_solve")
  # Without a setting they are float32 as everything that a policy keeps in it.
  kept = [(dtype, (HIGHEST, HIGHEST)) for dtype, _ in matmuls(fun, *args)]
  assert matmuls(mpjax.autocast(mpjax.full_precision(fun)), *args) == kept


def root(a, b):
  def solve(f, x):
    return x - f(x)

  return lax.custom_root(lambda x: a @ x - b, b, solve, lambda g, y: y / g(jnp.ones_like(y)))


def lowered_matmuls(fun, *args):
  # A CPU multiplies float32 operands if the result is float32.
  lines = jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text().splitlines()
  return [("bf16" in line, "HIGHEST" in line) for line in lines if "dot_general" in line]


def test_a_root_that_is_not_entered_has_the_setting_for_the_whole_process():
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


def test_a_precision_at_the_call_counts_under_a_setting_for_the_whole_process():
  # Derivative rules run in low precision too.
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

    return lax.scan(jax.checkpoint(step, prevent_cse=False), jnp.zeros(8), x)[0].sum()

  grad = jax.grad(mpjax.autocast(fun, "c=bf16"))
  with jax.default_matmul_precision("highest"):
    found = matmuls(grad, X, X)
  # In the forward pass, and in the backward pass, where it is computed again.
  assert {asked for dtype, asked in found if dtype == "float32"} == {(HIGHEST, HIGHEST)}
  kept = {asked for dtype, asked in matmuls(grad, X, X) if dtype == "float32"}
  assert kept == {(HIGHEST, HIGHEST)}


# Matmuls that a policy keeps in float32.

KEPT = {
  # name: a function of a parameter and an input
  "of inputs": lambda w, x: x @ x.T,
  "few products of an input": lambda w, x: x[:, :3] @ w[:3],
  "small matrices": lambda w, x: (w @ w)[:4, :4] @ (w @ w)[:4, :4],
  "without a free axis": lambda w, x: jnp.vdot(x @ w, x @ w),
  "full_precision": mpjax.full_precision(lambda w, x: x @ w),
  "convolution": mpjax.full_precision(
    lambda w, x: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")
  ),
  "linear solve": lambda w, x: jax.scipy.sparse.linalg.cg(lambda y: w @ y, x[0], maxiter=2)[0],
  "jit inside": mpjax.full_precision(jax.jit(lambda w, x: x @ w)),
  "outer product": lambda w, x: jnp.exp(jnp.einsum("i,j->ij", x[0], w[0])),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_matmul_has_the_highest_precision_forward_and_backward(name):
  def loss(w, x):
    return jnp.sum(KEPT[name](w, x))

  cast = mpjax.autocast(loss, data_argnums=1)
  found = matmuls(jax.grad(cast, (0, 1)), X, X)
  assert {asked for dtype, asked in found if dtype == "float32"} == {(HIGHEST, HIGHEST)}
  assert {asked for dtype, asked in found if dtype != "float32"} <= {None}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_rewritten_twice_is_rewritten_once(name):
  once = mpjax.autocast(KEPT[name], data_argnums=1)
  twice = mpjax.autocast(once, data_argnums=1)
  assert str(jax.make_jaxpr(twice)(X, X)) == str(jax.make_jaxpr(once)(X, X))


def test_a_precision_that_code_or_policy_names_is_kept():
  default = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)

  def in_code(w, x):
    return jnp.dot(x, x, precision="default")

  assert matmuls(mpjax.autocast(in_code, data_argnums=1), X, X) == [("float32", default)]
  policy = mpjax.Policy(compute_dtype="bfloat16", precision="default")
  for name in ("of inputs", "full_precision"):
    cast = mpjax.autocast(KEPT[name], policy, data_argnums=1)
    assert matmuls(cast, X, X) == [("float32", default)]


def test_an_algorithm_of_a_low_precision_policy_is_not_for_the_matmuls_that_it_keeps():
  policy = mpjax.Policy(compute_dtype="bfloat16", precision="BF16_BF16_F32")
  cast = mpjax.autocast(lambda w, x: (x @ x) @ w, policy, data_argnums=1)
  (kept, *_), (low, algorithm) = (each for each in matmuls(cast, X, X))
  assert (kept, low, algorithm.name) == ("float32", "bfloat16", "BF16_BF16_F32")
  assert matmuls(cast, X, X)[0][1] == (HIGHEST, HIGHEST)


def test_a_float32_policy_or_rule_is_the_float32_of_jax():
  def fun(w, x):
    with jax.named_scope("head"):
      return x @ w

  rule = mpjax.Rule("float32", path="head")
  assert matmuls(mpjax.autocast(fun, rules=[rule]), X, X) == [("float32", None)]
  assert matmuls(mpjax.autocast(fun, "float32"), X, X) == [("float32", None)]
  exact = mpjax.Rule("float32_highest", path="head")
  assert matmuls(mpjax.autocast(fun, rules=[exact]), X, X) == [("float32", (HIGHEST, HIGHEST))]


def test_a_multiplication_that_names_its_dtype_is_the_users_choice():
  if "out_dtype" not in inspect.signature(lax.mul).parameters:
    pytest.skip("jax.lax.mul has no out_dtype before jax 0.12")

  def fun(x, y):
    return lax.mul(x @ y, x @ y, out_dtype=jnp.float32)

  program = jax.make_jaxpr(mpjax.autocast(fun))(X, X)
  (eqn,) = (e for e in program.eqns if e.primitive.name == "mul")
  assert [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)] == ["float32"] * 3


def test_a_jaxpr_in_which_a_precision_changes_nothing_is_not_kept(collect):
  # What is kept for a program is kept as long as the program is: it may not be the program.
  jaxpr = jax.make_jaxpr(jax.jit(lambda x: x + 1.0))(1.0).jaxpr
  inner = weakref.ref(jaxpr.eqns[0].params["jaxpr"])
  assert with_precision(jaxpr, Asked(exact=True)) is None
  del jaxpr
  jax.clear_caches()
  collect()
  assert inner() is None


@pytest.mark.parametrize("part", ["half", "promote", "keep", "float32"])
def test_a_precision_of_the_code_counts_in_every_part(part):
  def fun(x, w):
    rounded = lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]
    return jnp.dot(rounded, w, precision="highest").astype(jnp.bfloat16)

  ops = mpjax.OpLists().replace(**{part: ["dot_general"]})
  program = jax.make_jaxpr(mpjax.autocast(fun, ops=ops))(X, X)
  (eqn,) = (e for e in program.eqns if e.primitive.name == "dot_general")
  assert [str(v.aval.dtype) for v in eqn.invars] == ["float32"] * 2
