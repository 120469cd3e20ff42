"""Weight gradients in float32 under half compute: one matmul each, and nothing else changes.

The numbers are integers small enough that every value of a half program is exact, except for sums
over many rows: those are what float32 weight gradients are for.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests.autocast.rig import BOTH, under, with_vjp
from tests.models.values import integral
from tests.programs import bits, equations, mesh_of, products, residual_bytes, run, with_gradients

FLOAT32 = np.dtype("float32")

with_float32_grads = functools.partial(under, weight_grad_dtype=FLOAT32)


def of_weighted_sum(fun):
  """Returns a function of (w, x): the result of `fun`, and the gradients of its weighted sum."""

  def call(w, x):
    y = jax.eval_shape(fun, w, x)
    return with_gradients(fun)(w, x, (2 * integral(8, y.shape, 9) + 1).astype(y.dtype))

  return call


def wide_products(program):
  return [p for p in products(program) if p.result.startswith("float32")]


def conv(w, x, **options):
  return lax.conv_general_dilated(x, w, (1,), "SAME", **options)


def grouped(w, x):
  return lax.ragged_dot(x, w, jnp.asarray([60, 0, 140], jnp.int32))


MATMULS = {
  "x @ w": (lambda w, x: x @ w, (8, 5), (200, 8)),
  "w @ x": (lambda w, x: w @ x, (5, 8), (8, 200)),
  "x @ w.T": (lambda w, x: x @ w.T, (5, 8), (200, 8)),
  "one row": (lambda w, x: x @ w, (8, 5), (8,)),
  "einsum": (lambda w, x: jnp.einsum("bic,hcd->bhid", x, w), (2, 8, 4), (5, 40, 8)),
  "einsum of batches": (lambda w, x: jnp.einsum("hbc,hcd->bdh", x, w), (2, 8, 4), (2, 200, 8)),
  "einsum of two axes": (lambda w, x: jnp.einsum("dbc,ecd->be", x, w), (5, 4, 2), (2, 200, 4)),
  "convolution": (conv, (4, 2, 3), (9, 2, 40)),
  "convolution in groups": (
    functools.partial(conv, feature_group_count=2, rhs_dilation=(2,)),
    (4, 1, 3),
    (9, 2, 40),
  ),
  "ragged_dot": (grouped, (3, 4, 5), (200, 4)),
}


@pytest.mark.parametrize(("fun", "w", "x"), MATMULS.values(), ids=MATMULS)
def test_the_gradient_of_a_weight_is_one_low_precision_matmul_into_float32(fun, w, x):
  w, x = integral(0, w, 1), integral(7, x, 9)

  def found(wide):
    return products(jax.make_jaxpr(of_weighted_sum(under(fun, weight_grad_dtype=wide)))(w, x))

  before, after = found(None), found(FLOAT32)
  assert {p.result.partition("[")[0] for p in before} == {"bfloat16"}
  wide = [p for p in after if p.result.startswith("float32")]
  assert [p.dtypes for p in wide] == [("bfloat16",) * 2]
  # The others are the very same, and none was added.
  (replaced,) = set(before) - set(after)
  assert set(after) - set(before) == set(wide)
  assert len(after) == len(before) == 3
  assert wide[0].flops == replaced.flops


@BOTH
def test_whole_numbers_come_out_exact_and_the_rest_the_same(half):
  def each(operands):
    return {
      name: [
        of_weighted_sum(f)(*operands[name])
        for f in (fun, with_float32_grads(fun, half), under(fun, half))
      ]
      for name, (fun, *_) in MATMULS.items()
    }

  given = {name: (integral(0, w, 1), integral(7, x, 9)) for name, (_, w, x) in MATMULS.items()}
  for name, (exact, found, old) in run(each, given).items():
    assert bits(found[::2]) == bits(old[::2]), name
    assert bits(found[1]) == bits(exact[1]), name
    # Rounding would have shown, but where there is one row and nothing to add up.
    if half == "bfloat16":
      assert (bits(old[1]) != bits(exact[1])) == (given[name][1].ndim > 1), name


# Derivatives of every order and mode


W, X = integral(0, (8, 2), 1), integral(1, (4, 8), 1)
CONV_W, CONV_X = integral(0, (2, 3, 2), 1), integral(1, (2, 3, 4), 1)
EITHER = pytest.mark.parametrize(
  ("fun", "w", "x"),
  [(lambda w, x: x @ w, W, X), (conv, CONV_W, CONV_X)],
  ids=["matmul", "convolution"],
)


def squared(fun):
  return lambda w, x: jnp.sum(fun(w, x) ** 2)


@pytest.mark.slow
@EITHER
def test_derivatives_of_each_order_and_mode(fun, w, x):
  # Second and third ones, and those of each example.
  derivatives = {
    f"{outer.__name__} of {inner.__name__}": (
      lambda f, outer=outer, inner=inner: outer(inner(squared(f), (0, 1)), (0, 1))
    )
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2)
  }

  def third(fun):
    def along(w, x):
      return jax.jvp(lambda w: squared(fun)(w, x), (w,), (jnp.ones_like(w),))[1]

    return jax.grad(lambda w, x: jnp.sum(jax.grad(along)(w, x) ** 2), (0, 1))

  def of_examples(derivative):
    def each(fun):
      mapped = jax.vmap(derivative(fun), (None, 0))
      return lambda w, x: (
        mapped(w, jnp.stack([x, 2 * x, -x])),
        jax.vmap(mapped, (0, None))(jnp.stack([w, -w, w]), jnp.stack([x, 2 * x])),
      )

    return each

  derivatives["third"] = third
  derivatives["jacfwd of examples"] = of_examples(jax.jacfwd)
  derivatives["jacrev of examples"] = of_examples(jax.jacrev)
  derivatives["grad of examples"] = lambda f: of_examples(jax.grad)(squared(f))

  def all_of(fun):
    return lambda w, x: {name: derivative(fun)(w, x) for name, derivative in derivatives.items()}

  found, wanted = run(all_of(with_float32_grads(fun)), w, x), run(all_of(fun), w, x)
  for name in derivatives:
    assert bits(found[name]) == bits(wanted[name]), name
  for each in (fun, with_float32_grads(fun)):
    out, change = jax.jvp(each, (w, x), (w + 1, x - 1))
    np.testing.assert_array_equal(out, fun(w, x))
    np.testing.assert_array_equal(change, fun(w + 1, x) + fun(w, x - 1))


def test_a_loss_over_mapped_examples_has_one_matmul_over_all_of_them():
  w, x = integral(0, (8, 5), 1), integral(7, (40, 5, 8), 9)

  def mapped(w, x):
    return jax.vmap(with_float32_grads(lambda w, x: x @ w), (None, 0))(w, x)

  _, w_bar, _ = run(of_weighted_sum(mapped), w, x)
  assert bits(w_bar) == bits(run(of_weighted_sum(lambda w, x: x @ w), w, x)[1])
  program = jax.make_jaxpr(of_weighted_sum(mapped))(w, x)
  (wide,) = wide_products(program)
  assert wide.flops == 2 * w.size * 40 * 5
  assert len(products(program)) == 3


# On a CPU


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("axes", ["km,npk->mnp", "km,knp->mnp", "bkm,nbk->bmn"])
def test_a_cpu_computes_a_float32_sum_over_any_axes(axes, around):
  # In bfloat16, XLA gives these matmuls to a library that then refuses them.
  left, right, _ = re.split(",|->", axes)
  x, w = (
    integral(i, (8,) * (len(each) + (around is jax.vmap)), 9)
    for i, each in enumerate((left, right))
  )
  fun = functools.partial(jnp.einsum, axes)
  np.testing.assert_array_equal(around(mpjax.autocast(fun))(x, w), around(fun)(x, w))


# Inner jaxprs


def scanned(w, x):
  return lax.scan(lambda x, _: ((x @ w) % 3, None), x, length=3)[0]


def stacked(w, x):
  both = jnp.stack([w, w.T])
  return lax.scan(lambda x, w: (jax.checkpoint(lambda x, w: (x @ w) % 3)(x, w), None), x, both)[0]


INSIDE = {
  "jit": lambda w, x: jax.jit(lambda w, x: x @ w)(w, x) @ w,
  "scan over shared weights": scanned,
  "scan of checkpoint": stacked,
  "checkpoint that saves matmuls": jax.checkpoint(
    lambda w, x: (x @ w) % 3 @ w, policy=jax.checkpoint_policies.dots_saveable
  ),
  "cond": lambda w, x: lax.cond(x[0, 0] > 99, lambda: x, lambda: x @ w),
  "custom_vjp": with_vjp(lambda w, x: x @ w),
  "custom_jvp": lambda w, x: jax.nn.relu(x @ w) @ w,
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_of(name):
  # With three numbers in a row and a column, so that gradients of `x` are exact in bfloat16.
  w, x = np.pad(integral(0, (3, 3), 1), ((0, 5), (0, 5))), integral(7, (200, 8), 1)
  exact = run(of_weighted_sum(INSIDE[name]), w, x)
  assert bits(run(of_weighted_sum(with_float32_grads(INSIDE[name])), w, x)) == bits(exact)
  program = jax.make_jaxpr(of_weighted_sum(with_float32_grads(INSIDE[name])))(w, x)
  assert all(p.is_low_precision for p in products(program))
  # The derivative rule of the user's has a matmul of its own for the weight.
  assert bool(wide_products(program)) == (name != "custom_vjp")


def test_checkpoint_policies_see_the_matmul():
  w, x = jnp.ones((8, 8)), jnp.ones((5, 8))

  def kept(policy, wide):
    fun = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), policy=policy)
    return residual_bytes(under(fun, weight_grad_dtype=wide), w, x)

  policies = jax.checkpoint_policies
  for wide in (None, FLOAT32):
    assert kept(policies.dots_saveable, wide) == 2 * x.size * 2
    assert kept(policies.nothing_saveable, wide) == 0


# Meshes


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_shard_map_adds_float32_over_devices(devices, check_vma, inside):
  w, x = integral(0, (8, 5), 1), integral(7, (200, 8), 9)
  matmul = lambda w, x: x @ w  # noqa: E731
  mapped = functools.partial(
    jax.shard_map, mesh=mesh_of(devices[:4]), check_vma=check_vma, out_specs=jax.P("data")
  )

  def gradients(w, x):
    fun = mapped(
      with_float32_grads(matmul) if inside else matmul, in_specs=(jax.P(), jax.P("data"))
    )
    return of_weighted_sum(fun if inside else with_float32_grads(fun))(w, x)

  assert bits(run(gradients, w, x)[1:]) == bits(run(of_weighted_sum(matmul), w, x)[1:])
  program = jax.make_jaxpr(gradients)(w, x)
  sums = [eqn for eqn, _ in equations(program) if eqn.primitive.name.startswith("psum")]
  assert {str(v.aval.dtype) for eqn in sums for v in eqn.invars} <= {"float32"}
  assert len(wide_products(program)) == 1


# What it costs, and who asks for it


def test_the_low_precision_copy_of_a_weight_is_no_residual():
  w, x = jnp.ones((8, 5)), jnp.ones((7, 8))

  def kept(wide):
    return residual_bytes(under(lambda w, x: x @ w, weight_grad_dtype=wide), w, x)

  assert kept(FLOAT32) == 2 * x.size
  assert kept(None) == 2 * (x.size + w.size)


@BOTH
def test_a_weight_that_is_stored_in_low_precision(half):
  # Its gradient is rounded once, after all is added up.
  w, x = integral(0, (8, 5), 1), integral(7, (200, 8), 9)
  fun = lambda w, x: x @ w.astype(jnp.float32)  # noqa: E731
  exact = run(of_weighted_sum(fun), w, x)[1]
  assert bits(run(of_weighted_sum(with_float32_grads(fun)), w.astype(half), x)[1]) == bits(
    exact.astype(half)
  )


LEFT_ALONE = {
  "two activations": lambda w, x: jnp.sin(x) @ jnp.cos(x).T,
  "a weight that was cast": lambda w, x: x.astype("float16") @ w.astype("float16"),
  "precision": lambda w, x: jnp.matmul(x, w, precision="highest"),
  "full_precision": lambda w, x: mpjax.full_precision(jnp.matmul)(x, w),
  "no matmul": lambda w, x: x + w[0, 0],
}


def test_matmuls_without_a_float32_weight_are_unchanged():
  def program(fun, wide):
    return str(jax.make_jaxpr(of_weighted_sum(under(fun, weight_grad_dtype=wide)))(W, X))

  for name, fun in LEFT_ALONE.items():
    assert program(fun, FLOAT32) == program(fun, None), name
  # One that is not wider asks for nothing.
  matmul, *_ = MATMULS["x @ w"]
  assert program(matmul, "bfloat16") == program(matmul, None) != program(matmul, FLOAT32)


def test_a_derivative_that_is_autocast_once_more():
  # Its matmuls are in half already, and stay what they are.
  def derivative(w, x):
    return jax.jvp(lambda w: with_float32_grads(lambda w, x: x @ w)(w, x), (w,), (w + 1,))

  assert bits(with_float32_grads(derivative)(W, X)) == bits((X @ W, X @ (W + 1)))
