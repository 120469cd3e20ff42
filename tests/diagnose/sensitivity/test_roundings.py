import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax._diagnose.call import Call
from mpjax._diagnose.relative_errors import relative_error
from mpjax._diagnose.sensitivity.roundings import before_nonfinite, errors_of
from mpjax._matmul.format_rounding import roundoff
from mpjax._optim.scaled import scaled
from tests.models.values import normal

MANY = 4096
"""Projections, with which a contribution is known within 2 %."""


def errors(fn, *args, **options):
  program, outputs = Call(args, {}).traced(fn)
  operands = [*map(jnp.asarray, jax.tree.leaves(args))]
  return errors_of(program, operands, dict.fromkeys(range(len(outputs))), **options)


def low(x, dtype=jnp.bfloat16):
  return x.astype(dtype)


def rounded(x, dtype=jnp.bfloat16):
  return np.asarray(np.asarray(x).astype(dtype).astype(np.float64))


def by_name(found, name):
  (one,) = [each for each in found.roundings if each.step.eqn.primitive.name == name]
  return one.contribution


X = np.asarray(normal(16), np.float32)


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


def masked_log(y):
  return jnp.where(y > 0, jnp.log(y), 0)


SLOPES = {"sqrt": (jnp.sqrt, lambda x: 0.5 / np.sqrt(x)), "log": (masked_log, lambda x: 1 / x)}


@pytest.mark.parametrize(("fn", "slope"), SLOPES.values(), ids=SLOPES)
def test_infinite_derivatives_count_as_zero(fn, slope):
  # Half of the numbers are 0, where the derivative of the function is infinite.
  x = np.abs(X) * (np.arange(X.size) % 2)
  found = errors(lambda x: fn(low(x).astype(jnp.float32)), x, projections=MANY)
  positive = x[x > 0]
  change = slope(positive) * (rounded(positive) - positive)
  want = np.linalg.norm(change) / np.linalg.norm(fn(positive))
  assert found.predicted == pytest.approx(want, rel=0.05)


def test_one_value_that_is_cast_twice_is_one_rounding():
  def fn(x):
    return low(x).astype(jnp.float32) - low(x).astype(jnp.float32) + x

  found = errors(fn, X)
  assert [each.contribution for each in found.roundings] == [0.0]


def test_results_of_operations_round_and_moves_and_casts_up_do_not():
  def fn(x):
    y = low(x).reshape(4, 4).T
    return jnp.where(y > 0, -y, y) * y

  found = errors(fn, X)
  assert [each.step.eqn.primitive.name for each in found.roundings] == [
    "convert_element_type",
    "mul",
  ]


def test_iterations_of_a_scan_add_as_squares():
  xs = np.asarray(normal(64, 8), np.float32)

  def fn(xs):
    return jax.lax.scan(lambda carry, x: (carry + low(x).astype(jnp.float32), None), xs[0], xs)[0]

  found = errors(fn, xs, projections=MANY)
  want = np.linalg.norm(rounded(xs) - xs) / np.linalg.norm(xs[0] + xs.sum(0))
  assert found.predicted == pytest.approx(want, rel=0.05)


def loop_of(times):
  def fn(x):
    def body(carry):
      i, y = carry
      return i + 1, jnp.sin(low(y).astype(jnp.float32) * 1.5)

    return jax.lax.while_loop(lambda carry: carry[0] < times, body, (0, x))[1]

  return fn


def unrolled_of(times):
  def fn(x):
    for _ in range(times):
      x = jnp.sin(low(x).astype(jnp.float32) * 1.5)
    return x

  return fn


def scan(body, x):
  return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=6)[0]


def scan_of_scans(body, x):
  return jax.lax.scan(lambda c, _: (scan_of_3(body, c), None), x, None, length=2)[0]


def scan_of_3(body, x):
  return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0]


def while_loop(body, x):
  return jax.lax.fori_loop(0, 6, lambda _, c: body(c), x)


@pytest.mark.parametrize("loop", [scan, scan_of_scans, while_loop])
def test_a_constant_of_a_loop_rounds_once(loop):
  # Each iteration adds the same error, so the sum of all is 6 times as large.
  w = normal(16, seed=1)
  found = errors(lambda w: loop(lambda c: c + low(w).astype(jnp.float32), X), w, projections=MANY)
  want = np.linalg.norm(6 * (rounded(w) - w)) / np.linalg.norm(X + 6 * w)
  assert found.predicted == pytest.approx(want, rel=0.05)
  assert found.measured == pytest.approx(want, rel=0.01)


def test_a_while_is_followed_over_the_iterations_that_it_makes():
  found, want = (errors(fn(5), X, projections=MANY) for fn in (loop_of, unrolled_of))
  assert len(found.roundings) == 1 < len(want.roundings)
  assert found.predicted == pytest.approx(want.predicted, rel=0.05)
  assert found.measured == pytest.approx(want.measured, rel=1e-4)


def test_a_branch_counts_if_it_is_taken():
  def fn(x, is_low):
    return jax.lax.cond(is_low, lambda x: low(x).astype(jnp.float32), lambda x: x * 1.0, x)

  taken, other = (errors(fn, X, np.asarray(is_low)) for is_low in (True, False))
  assert 0 < taken.predicted == pytest.approx(taken.measured, rel=0.6)
  assert other.predicted == other.measured == 0


def test_what_remat_repeats_rounds_in_the_same_way():
  def loss(w, x):
    return jnp.sum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32) ** 2)

  args = normal(8, 8), normal(4, 8, seed=1)
  plain, again = (
    errors(jax.grad(fn), *args, projections=256) for fn in (loss, jax.checkpoint(loss))
  )
  assert again.measured == pytest.approx(plain.measured, rel=1e-3)
  assert again.predicted == pytest.approx(plain.predicted, rel=0.3)


def test_a_custom_rule_does_not_hide_what_a_function_computes():
  @jax.custom_vjp
  def constant(x):
    return x

  constant.defvjp(lambda x: (x, None), lambda _, g: (jnp.zeros_like(g),))

  def fn(x):
    return constant(low(x)).astype(jnp.float32)

  assert 0 < errors(fn, X).predicted == pytest.approx(errors(fn, X).measured, rel=0.6)
  stopped = errors(lambda x: jax.lax.stop_gradient(low(x)).astype(jnp.float32), X)
  assert stopped.predicted > 0


def test_a_scaled_loss_has_the_contributions_of_the_plain_one():
  def loss(w, x):
    return jnp.sum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32) ** 2)

  args = normal(8, 8), normal(4, 8, seed=1)
  plain, at_scale = (errors(jax.grad(fn), *args) for fn in (loss, scaled(loss, 2.0**10)))
  of_plain = [each.contribution for each in plain.roundings]
  assert [each.contribution for each in at_scale.roundings] == pytest.approx(of_plain, rel=1e-3)


def test_decisions_are_measured_and_their_effect_is_that_of_the_differing_ones():
  x = np.asarray([1.0, 1.001, 3.0, 0.5], np.float32)

  def fn(x):
    return jnp.argmax(low(x[:2])).astype(jnp.float32) + x

  found = errors(fn, x)
  # In bfloat16 both numbers are 1, and the first of equal ones counts.
  assert [(each.step.eqn.primitive.name, each.share) for each in found.decisions] == [
    ("argmax", 1.0)
  ]
  assert found.by_decisions == pytest.approx(2 / np.linalg.norm(1 + x), rel=1e-5)
  assert found.measured == pytest.approx(found.by_decisions, rel=1e-5)


def test_decisions_in_a_scan():
  xs = np.stack([X, 1 + 2**-12 * X])

  def fn(xs):
    return jax.lax.scan(lambda c, x: (c + (low(x) > 1).astype(jnp.float32), None), 0 * xs[0], xs)[0]

  found = errors(fn, xs)
  (one,) = found.decisions
  assert one.share == np.mean((xs > 1) != (rounded(xs) > 1))
  assert found.measured == pytest.approx(found.by_decisions)


def kept_steps(found):
  return {(each.step.eqn.primitive.name, each.operand) for each in found.roundings}


def test_an_operation_that_is_kept_in_float32_leaves_the_rounding_to_the_next_matmul():
  def fn(x, w):
    y = jnp.exp(low(x))
    return (y + low(x)) @ low(w)

  args = X[None], normal(16, 4, seed=1)
  casts = ("convert_element_type", -1)
  assert kept_steps(errors(fn, *args)) == {
    casts,
    ("exp", -1),
    ("add", -1),
    ("dot_general", -1),
  }
  found = errors(fn, *args, kept=lambda step: step.eqn.primitive.name == "exp")
  assert kept_steps(found) == {casts, ("dot_general", 0), ("dot_general", -1)}


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


def in_while(x):
  return jax.lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, 10 * s[1]), (0, x))[1]


def in_branch(x):
  return jax.lax.cond(x[0] > 0, lambda x: 1e4 * x, lambda x: x, x)


def on_devices(x):
  mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(lambda x: 1e4 * x, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(x)


@pytest.mark.parametrize("fn", [in_while, in_branch, on_devices])
def test_a_value_overflows_wherever_it_is(fn):
  found = errors(fn, np.full(16, 7, np.float16))
  assert [each.step.eqn.primitive.name for each in found.roundings if each.overflows] == ["mul"]
  assert max(each.largest for each in found.roundings) == 7e4


def test_roundings_before_the_first_value_that_is_not_finite():
  def fn(x):
    y = low(1 + 1e-4 * jnp.abs(x))
    return 1 / (y.astype(jnp.float32) - 1) + low(jnp.sin(x)).astype(jnp.float32)

  program, _ = Call((X,), {}).traced(fn)
  (step,) = before_nonfinite(program, [jnp.asarray(X)], lambda step: False)
  assert step.eqn.primitive.name == "convert_element_type"
  assert errors(fn, X).measured == np.inf


def test_devices_of_a_shard_map_round_as_one():
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

  def fn(x, w):
    return jax.lax.psum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32), "d")

  sharded = jax.shard_map(fn, mesh=mesh, in_specs=(jax.P(None, "d"), jax.P("d")), out_specs=jax.P())

  def by_hand(x, w):
    halves = zip(jnp.split(x, 2, axis=1), jnp.split(w, 2), strict=True)
    return sum(jnp.tanh(low(x) @ low(w)).astype(jnp.float32) for x, w in halves)

  args = normal(4, 16), normal(16, 8, seed=1)
  found, want = (errors(fn, *args, projections=256) for fn in (sharded, by_hand))
  assert found.measured == pytest.approx(want.measured, rel=1e-3)
  assert found.predicted == pytest.approx(want.predicted, rel=0.4)


def test_devices_with_explicit_axes():
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
  over_devices = jax.NamedSharding(mesh, jax.P("d"))

  def fn(x):
    return low(jnp.sin(x)).astype(jnp.float32)

  sharded = jax.shard_map(fn, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  found, want = errors(sharded, jax.device_put(X, over_devices)), errors(fn, X)
  assert found.predicted == pytest.approx(want.predicted, rel=1e-3)
  assert found.measured == pytest.approx(want.measured, rel=1e-3)


@pytest.mark.parametrize("fn", [in_while, in_branch])
def test_float64_in_the_program(set_flag, fn):
  want = errors(fn, jnp.float16(X))
  set_flag("jax_enable_x64", True)
  found = errors(fn, jnp.float16(X))
  assert found.predicted == pytest.approx(want.predicted, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_the_roundoff_is_near_the_mean_error_of_a_rounding(dtype):
  x = np.random.default_rng(0).uniform(1, 2, 10_000).astype(np.float32)
  relative = np.linalg.norm(rounded(x, dtype) - x) / np.linalg.norm(x)
  assert relative == pytest.approx(roundoff(jnp.dtype(dtype)), rel=0.3)
