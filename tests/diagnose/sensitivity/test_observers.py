import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.diagnose.sensitivity.rig import MANY, X, errors, low, rounded
from tests.models.values import normal


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("fn", [in_while, in_branch])
def test_float64_in_the_program(set_flag, fn):
  want = errors(fn, jnp.float16(X))
  set_flag("jax_enable_x64", True)
  found = errors(fn, jnp.float16(X))
  assert found.predicted == pytest.approx(want.predicted, rel=1e-3)
