import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax._diagnose.call import Call
from mpjax._diagnose.relative_errors import relative_error
from mpjax._diagnose.sensitivity.errors import before_nonfinite
from mpjax._optim.scaled import scaled
from tests.diagnose.sensitivity.rig import MANY, X, errors, low, rounded
from tests.models.values import normal


def test_a_contribution_is_the_change_of_the_result_by_the_error_of_a_rounding():
  def fn(x):
    return jnp.sin(3 * low(x).astype(jnp.float32))

  found = errors(fn, X, projections=MANY)
  change = 3 * np.cos(3 * X) * (rounded(X) - X)
  want = np.linalg.norm(change) / np.linalg.norm(np.sin(3 * X))
  assert [each.contribution for each in found.roundings] == pytest.approx([want], rel=0.05)
  assert found.roundings[0].amplification == pytest.approx(want / 2**-9, rel=0.05)
  exact, real = np.sin(3 * X), np.sin(3 * rounded(X))
  assert found.measured == pytest.approx(relative_error([(real, exact)]), rel=1e-4)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_projections_are_added_where_the_first_ones_miss_the_only_direction(seed):
  # With the first four alone, the ratio is 0.42, 1.58 and 0.63.
  direction = normal(64, seed=seed)
  found = errors(lambda x: low(x).astype(jnp.float32) * direction, jnp.float32(1.003))
  assert 0.75 < found.predicted / found.measured < 1.33


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_results_may_have_any_size(scale):
  # Their squares are no float32 numbers.
  found, plain = (errors(lambda x, k=k: k * low(x).astype(jnp.float32), X) for k in (scale, 1))
  assert found.predicted == pytest.approx(plain.predicted, rel=1e-3)


def test_iterations_of_a_scan_add_as_squares():
  xs = np.asarray(normal(64, 8), np.float32)

  def fn(xs):
    return jax.lax.scan(lambda carry, x: (carry + low(x).astype(jnp.float32), None), xs[0], xs)[0]

  found = errors(fn, xs, projections=MANY)
  want = np.linalg.norm(rounded(xs) - xs) / np.linalg.norm(xs[0] + xs.sum(0))
  assert found.predicted == pytest.approx(want, rel=0.05)


@pytest.mark.slow
def test_what_remat_repeats_rounds_in_the_same_way():
  def loss(w, x):
    return jnp.sum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32) ** 2)

  args = normal(8, 8), normal(4, 8, seed=1)
  plain, again = (
    errors(jax.grad(fn), *args, projections=256) for fn in (loss, jax.checkpoint(loss))
  )
  assert again.measured == pytest.approx(plain.measured, rel=1e-3)
  assert again.predicted == pytest.approx(plain.predicted, rel=0.3)


@pytest.mark.slow
def test_a_scaled_loss_has_the_contributions_of_the_plain_one():
  def loss(w, x):
    return jnp.sum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32) ** 2)

  args = normal(8, 8), normal(4, 8, seed=1)
  plain, at_scale = (errors(jax.grad(fn), *args) for fn in (loss, scaled(loss, 2.0**10)))
  of_plain = [each.contribution for each in plain.roundings]
  assert [each.contribution for each in at_scale.roundings] == pytest.approx(of_plain, rel=1e-3)


def test_a_kernel_is_not_followed():
  def double(ref, out):
    out[...] = ref[...] * 2

  kernel = pl.pallas_call(
    double, out_shape=jax.ShapeDtypeStruct((16,), jnp.bfloat16), interpret=True
  )
  found = errors(lambda x: kernel(low(x)).astype(jnp.float32), X)
  assert [step.eqn.primitive.name for step in found.not_followed] == ["pallas_call"]
  # A kernel runs in its own dtypes in both runs, so nothing is known of what it is given.
  assert found.measured == 0


def test_what_cannot_be_differentiated_again_is_not_followed():
  def fn(x):
    y = low(x).astype(jnp.float32)
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jax.pure_callback(lambda y: np.asarray(y) * 2, shape, y) + low(3 * x).astype(jnp.float32)

  found = errors(fn, X)
  assert [step.eqn.primitive.name for step in found.not_followed] == ["pure_callback"]
  assert sorted(each.contribution > 0 for each in found.roundings) == [False, True]


def test_a_value_that_is_too_large_for_float16_overflows():
  found = errors(lambda x: low(x * 1e5, jnp.float16).astype(jnp.float32), X)
  (one,) = found.roundings
  assert one.overflows
  assert one.largest == pytest.approx(np.max(np.abs(X)) * 1e5)
  assert found.measured == np.inf


def test_roundings_before_the_first_value_that_is_not_finite():
  def fn(x):
    y = low(1 + 1e-4 * jnp.abs(x))
    return 1 / (y.astype(jnp.float32) - 1) + low(jnp.sin(x)).astype(jnp.float32)

  program = Call((X,), {}).traced(fn).program
  (step,) = before_nonfinite(program, [jnp.asarray(X)], lambda step: False)
  assert step.eqn.primitive.name == "convert_element_type"
  assert errors(fn, X).measured == np.inf
