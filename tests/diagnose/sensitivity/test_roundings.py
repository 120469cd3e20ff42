import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._matmul.format_rounding import roundoff
from tests.diagnose.sensitivity.rig import MANY, X, errors, low, rounded
from tests.models.values import normal


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


def kept_steps(found):
  return {(each.step.eqn.primitive.name, each.operand) for each in found.roundings}


@pytest.mark.slow
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


def unrolled(body, x):
  for _ in range(6):
    x = body(x)
  return x


W = normal(16, 16, seed=1) / 4


@pytest.mark.slow
@pytest.mark.parametrize("loop", [scan, scan_of_scans, while_loop])
@pytest.mark.parametrize(
  ("start", "body"),
  [(low, lambda c: jnp.tanh(c @ low(W))), (lambda x: jnp.tanh(low(x)), lambda c: (c * c) @ low(W))],
  ids=["an iteration returns it in float32", "it starts in float32"],
)
def test_a_carry_is_in_float32_if_it_is_in_one_iteration(loop, start, body):
  # Where it is in low precision as well, the next matmul rounds it again, which changes nothing.
  looped, want = (
    errors(
      lambda x, loop=each: loop(body, start(x)),
      X[None],
      kept=lambda step: step.eqn.primitive.name == "tanh",
      projections=1,
    )
    for each in (loop, unrolled)
  )
  assert ("dot_general", 0) in kept_steps(looped)
  assert looped.measured == pytest.approx(want.measured, rel=1e-6)
  assert looped.measured > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_the_roundoff_is_near_the_mean_error_of_a_rounding(dtype):
  x = np.random.default_rng(0).uniform(1, 2, 10_000).astype(np.float32)
  relative = np.linalg.norm(rounded(x, dtype) - x) / np.linalg.norm(x)
  assert relative == pytest.approx(roundoff(jnp.dtype(dtype)), rel=0.3)
