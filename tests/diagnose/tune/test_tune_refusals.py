import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import mpjax
from tests.diagnose.losses_to_tune import KERNELS, X, stack
from tests.errors import refused
from tests.models.values import normal

CALL = "mpjax.tune(loss_fn, policy)(*args)"


LOW = {
  "a policy": (lambda: mpjax.with_policy(nn.Dense(4), "mixed_bfloat16"), "bfloat16 in Dense"),
  "a dtype": (lambda: nn.Dense(4, dtype=jnp.float16), "float16 in Dense"),
  "parameters": (lambda: nn.Dense(4, param_dtype=jnp.float16), "float16 in its arguments"),
}


@pytest.mark.parametrize(("build", "got"), LOW.values(), ids=LOW)
@pytest.mark.standard_promotion
def test_what_is_low_already_is_refused(build, got):
  model, x = build(), jnp.ones((2, 8))
  tune = mpjax.tune(lambda v, x: jnp.mean(model.apply(v, x) ** 2), tolerance=0.1)
  with refused(ValueError, CALL, "a loss in float32", got, "the plain model"):
    tune(model.init(jax.random.key(0), x), x)


@jax.custom_vjp
def frugal(x, w):
  return x @ w


frugal.defvjp(
  lambda x, w: (x @ w, (x.astype("bfloat16"), w)),
  lambda kept, g: (g @ kept[1].T, kept[0].astype("float32").T @ g),
)


@pytest.mark.slow
def test_a_loss_in_float32_may_keep_low_precision_for_its_backward_pass():
  w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
  report = mpjax.tune(lambda w, x: jnp.sum(frugal(x, w) ** 2), tolerance=0.1)(w, x)
  assert 0 < report.error < 0.02


@pytest.mark.slow
def test_more_headroom_lowers_the_loss_scale():
  def scale(headroom):
    tune = mpjax.tune(
      lambda k: jnp.sum(stack(k, X)), "mixed_float16", tolerance=1, headroom=headroom
    )
    return tune(KERNELS).loss_scale

  assert scale(32) == scale(8) / 4


def kernel_of(x, w):
  """Returns a product by a kernel, whose derivatives are kernels too."""

  def product(x, w):
    def body(x, w, out):
      out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x, w)

  @jax.custom_vjp
  def multiply(x, w):
    return product(x, w)

  multiply.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda kept, bar: (product(bar, kept[1].T), product(kept[0].T, bar)),
  )
  return multiply(x, w)


def untouched(w, x):
  return mpjax.full_precision(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)


def of_complex(w, x):
  return jnp.mean(jnp.abs(jax.lax.complex(x, x) @ w.astype(complex)) ** 2)


UNMEASURABLE = {
  "no matmul": (lambda w, x: jnp.mean(jnp.tanh(w) * w), "computes in bfloat16", "without such"),
  "full precision": (untouched, "computes in bfloat16", "without such"),
  "complex": (of_complex, "computes in bfloat16", "without such"),
  "a kernel": (lambda w, x: jnp.mean(kernel_of(x, w) ** 2), "computes in bfloat16", "pallas_call"),
  "constant": (lambda w, x: jnp.sum(jnp.sign(x @ w)), "not zero", "norm 0.0"),
  "not finite": (lambda w, x: jnp.sum(jnp.log(-jnp.abs(x @ w))), "a finite loss", "of nan"),
}


def test_a_loss_of_no_floating_parameter():
  with refused(ValueError, CALL, "not zero", "no floating", "mpjax.ranges"):
    mpjax.tune(lambda w: jnp.sum(w.astype(jnp.float32)), tolerance=0.1)(jnp.arange(3))


@pytest.mark.parametrize(("loss", "expected", "got"), UNMEASURABLE.values(), ids=UNMEASURABLE)
def test_a_loss_of_which_nothing_can_be_measured(loss, expected, got):
  with refused(ValueError, CALL, expected, got, "mpjax."):
    mpjax.tune(loss, tolerance=0.1)(normal(8, 8), normal(4, 8, seed=1))


def test_a_loss_that_differs_from_call_to_call():
  random = np.random.default_rng(0)

  def of_trace(w, x):
    return jnp.mean((x @ w + random.normal(size=(4, 8)).astype("float32")) ** 2)

  def of_run(w, x):
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    noise = io_callback(lambda: random.normal(size=(4, 8)).astype("float32"), shape)
    return jnp.mean((x @ w + noise) ** 2)

  for loss in (of_trace, of_run):
    with refused(ValueError, CALL, "the same gradient", "differ by", "as an argument"):
      mpjax.tune(loss, tolerance=0.1)(normal(8, 8), normal(4, 8, seed=1))


@pytest.mark.slow
def test_random_numbers_of_a_key_or_of_a_model_are_the_same_in_each_call():
  key = jax.random.key(0)
  model = nnx.Sequential(
    nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
    nnx.BatchNorm(8, rngs=nnx.Rngs(2)),
  )
  x = normal(4, 8)
  noisy = mpjax.tune(
    lambda w: jnp.mean((x @ w + jax.random.normal(key, (4, 8))) ** 2), tolerance=1.0
  )
  assert 0 < noisy(normal(8, 8)).error < 0.02
  assert 0 < mpjax.tune(lambda m: jnp.mean((m(x) - x) ** 2), tolerance=1.0)(model).error < 0.05


@pytest.mark.slow
def test_kernels_beside_matmuls_are_named():
  report = mpjax.tune(lambda w, x: jnp.mean(kernel_of(x @ w, w) ** 2), tolerance=0.1)(
    normal(8, 8), normal(4, 8, seed=1)
  )
  assert report.kernels == ("",)
  assert "Kernels of (root) ran in float32" in " ".join(str(report).split())


def test_a_loss_that_is_no_scalar_or_has_no_argument_by_position():
  tune = mpjax.tune(lambda *w, x: jnp.sum(x) if not w else x @ w[0], tolerance=0.1)
  where, fix = "mpjax.tune(loss_fn)", "take the mean"
  for args, got in (((), "no argument by position"), ((jnp.ones((3, 2)),), "float32[4, 2]")):
    with refused(TypeError, where, "a floating scalar", got, fix):
      tune(*args, x=jnp.ones((4, 3)))
