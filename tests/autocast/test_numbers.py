"""Numbers that a low-precision dtype cannot hold, in whatever is computed from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._autocast.numbers import (
  MOST_NUMBERS,
  UNCOUNTED,
  UNKNOWN,
  numbers_of,
  numbers_of_carry,
  survives,
  united,
)
from mpjax._jaxpr.reader import LARGEST
from tests.autocast.rig import BODIES, dtypes, find

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype("float16")
LEAST = -LARGEST
W, MASK = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in ("float32", bool))


def numbers(*each: float | None) -> frozenset[float | None]:
  return frozenset(each)


class NotHere(np.ndarray):
  """A number on other processes' devices, as on several hosts: NumPy cannot read it."""

  is_fully_addressable = False


# One number, and several.


@pytest.mark.parametrize(
  ("number", "bfloat16", "float16"),
  [
    # IEEE half: largest 65504, smallest normal 2^-14. Bfloat16: (2 - 2^-7) 2^127 and 2^-126.
    (0.0, True, True),
    (-0.0, True, True),
    (1.0, True, True),
    (np.inf, True, True),
    (-np.inf, True, True),
    (np.nan, True, True),
    (65504.0, True, True),
    (65505.0, True, False),
    (-65520.0, True, False),
    (2.0**-14, True, True),
    (-(2.0**-14), True, True),
    (2.0**-14 * (1 - 2.0**-11), True, False),
    (1e-7, True, False),
    (-1e-9, True, False),
    ((2 - 2.0**-7) * 2.0**127, True, False),
    (float(np.finfo(np.float32).max), False, False),
    (float(np.finfo(np.float32).min), False, False),
    (2.0**-126, True, False),
    (2.0**-127, False, False),
  ],
)
def test_numbers_that_survive(number, bfloat16, float16):
  assert survives(number, BFLOAT16) == bfloat16
  assert survives(float(np.float32(number)), FLOAT16) == float16


def test_the_number_of_a_scalar_is_known():
  assert numbers_of(np.float32(0.1)) == numbers(float(np.float32(0.1)))
  # Not equal to itself, it would be another key each time. And -0.0 would be the key of 0.0.
  assert numbers_of(np.float32(np.nan)) == numbers_of(np.float32(-0.0)) == UNKNOWN
  assert numbers_of(NotHere((), np.float32)) == UNKNOWN


@pytest.mark.parametrize(
  ("each", "expected"),
  [
    ([numbers(1.0), numbers(0.0, 1.0)], numbers(0.0, 1.0)),
    ([numbers(-0.0), numbers(1.0)], numbers(0.0, 1.0)),
    ([numbers(0.0, -np.inf), numbers(-1e9)], numbers(0.0, -1e9, -np.inf)),
    # Beside an unknown number, only those matter that a dtype cannot hold.
    ([UNKNOWN, numbers(0.0, 1.0, -np.inf)], UNKNOWN),
    ([UNKNOWN, numbers(0.0, -1e9)], numbers(None, -1e9)),
    ([UNKNOWN, numbers(1e-9)], numbers(None, 1e-9)),
    # Of many the least and the largest are kept.
    ([numbers(*np.arange(1.0, 2.0 + MOST_NUMBERS))], numbers(0.0, 1.0 + MOST_NUMBERS)),
    ([UNKNOWN, numbers(*np.arange(-1e9, 9 - 1e9))], numbers(None, -1e9, 0.0)),
  ],
)
def test_numbers_are_united(each, expected):
  assert united(each) == expected


# What is computed from them.


def runs_in(fun, half, *masks):
  """Returns the dtype of the operation that computes the left operand of the last matmul."""

  def then_matmul(w, x, *masks):
    return fun(x @ w, w, *masks) @ w

  eqns = jax.make_jaxpr(mpjax.autocast(then_matmul, half))(W, W, *masks).eqns
  names = ("add", "mul", "div")
  (*_, eqn) = (eqn for eqn in eqns if eqn.primitive.name in names and eqn.outvars[0].aval.ndim > 1)
  (dtype,) = {*dtypes(eqn.invars)}
  return dtype


JOINED = {
  # name: a function of a mask, a parameter and a number; the sum with an activation is float32.
  "selected": lambda m, b, x: jnp.where(m, b, x),
  "added": lambda m, b, x: b + (1 - m.astype("float32")) * x,
  "subtracted": lambda m, b, x: b - jnp.where(m, 0.0, -x),
  "multiplied": lambda m, b, x: b * jnp.where(m, 0.5, x),
  "negated": lambda m, b, x: -jnp.where(m, b, -x),
  "absolute": lambda m, b, x: jnp.abs(jnp.where(m, b, x)),
  "divided": lambda m, b, x: jnp.where(m, b, x) / (b + 2),
  "maximum": lambda m, b, x: jnp.maximum(jnp.where(m, b, -jnp.inf), x),
  "clipped": lambda m, b, x: jnp.clip(b, x, 1.0),
  "moved": lambda m, b, x: jnp.concatenate([jnp.where(m, b, x).T[:4], b[4:]]),
  "padded": lambda m, b, x: lax.pad(b[1:], x, ((1, 0, 0), (0, 0, 0))),
  "written": lambda m, b, x: b.at[0].set(x),
  "sorted": lambda m, b, x: lax.sort((jnp.where(m, b, x), b))[0],
  "reduced": lambda m, b, x: jnp.where(m, b, x).min(0, keepdims=True),
  "summed": lambda m, b, x: jnp.where(m, b, x).sum(0, keepdims=True),
  "with noise": lambda m, b, x: jnp.where(m, jax.random.normal(jax.random.key(0), m.shape), x),
}


@pytest.mark.parametrize(("half", "number"), [("float16", -1e9), ("bfloat16", LEAST)])
@pytest.mark.parametrize("joined", JOINED.values(), ids=JOINED)
def test_a_number_that_is_joined_with_a_parameter_is_not_rounded(joined, half, number):
  fun = lambda h, w, mask: h + joined(mask, w, np.float32(number))  # noqa: E731
  assert runs_in(fun, half, MASK) == "float32"


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_number_leaves_an_inner_jaxpr_with_a_parameter(body):
  masked = body(lambda b: jnp.where(b > 0, b, -1e9))
  assert runs_in(lambda h, w: h + masked(w), "float16") == "float32"


ENTERED = {
  # name: the sum of an activation and a parameter with a number, in an inner jaxpr.
  "jit": lambda h, b: jax.jit(jnp.add)(h, b),
  "constant": lambda h, b: lax.scan(lambda c, _: (jnp.tanh(c + b), None), h, length=2),
  "slices": lambda h, b: lax.map(lambda pair: pair[0] + pair[1], (h, b)),
  "carry": lambda h, b: lax.scan(lambda c, _: (c[::-1], h + c), b, length=2),
  "branches": lambda h, b: lax.cond(h[0, 0] > 0, lambda h, b: h + b, lambda h, b: h, h, b),
  "test": lambda h, b: lax.while_loop(lambda c: (h + b > c).all(), lambda c: c + 1, 0),
}


@pytest.mark.parametrize("entered", ENTERED.values(), ids=ENTERED)
def test_a_number_enters_an_inner_jaxpr_with_a_parameter(entered):
  def fun(w, x, mask):
    return entered(x @ w, jnp.where(mask, w, -1e9))

  program = jax.make_jaxpr(mpjax.autocast(fun, "float16"))(W, W, MASK)
  (added,) = (eqn for eqn in find(program, "add") if dtypes(eqn.outvars) != ["int32"])
  assert dtypes(added.invars) == ["float32", "float32"]


def test_a_branch_and_a_carry_that_return_a_number_with_a_parameter_are_float32():
  # The other branch, and the body, return an activation in the compute dtype.
  def branches(w, x, mask):
    masked = jnp.where(mask, w, -1e9)
    return lax.cond(mask[0, 0], lambda h, b: h, lambda h, b: b, x @ w, masked)

  def carry(w, x, mask):
    return lax.scan(lambda c, _: (x @ w, None), jnp.where(mask, w, -1e9), length=2)[0]

  for fun, name in (branches, "cond"), (carry, "scan"):
    (eqn,) = find(jax.make_jaxpr(mpjax.autocast(fun, "float16"))(W, W, MASK), name)
    assert dtypes(eqn.outvars) == ["float32"]


def test_a_mask_that_the_user_casts_from_low_precision_keeps_its_numbers():
  def fun(h, w, mask):
    return h + (mask.astype("bfloat16") * jnp.bfloat16(-1e9)).astype("float32")

  assert runs_in(fun, "float16", MASK) == "float32"


def test_a_parameter_and_numbers_in_range_decide_nothing():
  def fun(h, w, mask):
    return h + (jnp.where(mask, w, -1e4) * 2 + mask.astype("float32").sum(0, keepdims=True))

  assert runs_in(fun, "float16", MASK) == "float16"


# Sums.

MOST, MORE = 65504, 65505  # the largest number of float16, and one more


def ones(length):
  """Returns the type of a mask."""
  return jax.ShapeDtypeStruct((length,), bool)


def segments(m):
  return jax.ops.segment_sum(m, jnp.zeros(m.shape, "int32"), num_segments=2)


COUNTS = {
  # name: a function of a mask that is cast to float32, whose result may be its length.
  "sum": lambda m: m.sum(),
  "ones": lambda m: jnp.ones_like(m).sum(),
  "cumsum": lambda m: jnp.cumsum(m)[-1],
  "dot": lambda m: m @ m,
  "matmul": lambda m: (m[None] @ m[:, None])[0, 0],
  "convolution": lambda m: jnp.convolve(m, jnp.ones_like(m), "valid")[0],
  "window": lambda m: lax.reduce_window(m, 0.0, lax.add, m.shape, (1,), "VALID")[0],
  "scatter-add": lambda m: segments(m)[0],
  "jit": lambda m: jax.jit(jnp.sum)(m),
  "scan": lambda m: lax.scan(lambda c, x: (c + x, None), 0.0, m)[0],
  "fori": lambda m: lax.fori_loop(0, len(m), lambda i, c: c + m[i], 0.0),
  "at most": lambda m: jnp.clip(m.sum(), 1.0),
  "minus": lambda m: -(0.0 - m.sum()),
  "half of two": lambda m: 0.5 * (m.sum() + m.sum()),
  "square": lambda m: jnp.square(m).sum(),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_count_of_a_mask_is_not_rounded_to_infinity(count):
  fun = lambda h, w, mask: h / count(mask.astype("float32"))  # noqa: E731
  assert runs_in(fun, "float16", ones(MOST // 2)) == "float16"
  assert runs_in(fun, "float16", ones(MORE)) == "float32"
  assert runs_in(fun, "bfloat16", ones(MORE)) == "bfloat16"


def test_the_largest_count_of_float16():
  fun = lambda h, w, mask: h / mask.astype("float32").sum()  # noqa: E731
  assert runs_in(fun, "float16", ones(MOST)) == "float16"
  assert runs_in(fun, "float16", ones(MORE)) == "float32"


UNCOUNTABLE = {
  # name: a count whose size is not known.
  "while": lambda m: lax.while_loop(lambda c: c < m.sum(), lambda c: c + 1, 0.0),
  "devices": lambda m: jax.shard_map(
    lambda m: lax.psum(m.sum(), "i"),
    mesh=jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,)),
    in_specs=jax.P("i"),
    out_specs=jax.P(),
  )(m),
}


@pytest.mark.parametrize("count", UNCOUNTABLE.values(), ids=UNCOUNTABLE)
def test_a_count_of_unknown_size_may_be_large(count):
  fun = lambda h, w, mask: h / count(mask.astype("float32"))  # noqa: E731
  assert runs_in(fun, "float16", ones(4)) == "float32"
  assert runs_in(fun, "bfloat16", ones(4)) == "bfloat16"


def test_a_sum_over_a_symbolic_size_may_be_large():
  fun = lambda h, w, mask: h / mask.astype("float32").sum()  # noqa: E731
  assert runs_in(fun, "float16", ones(*jax.export.symbolic_shape("n"))) == "float32"


def test_the_carry_of_a_loop_over_a_symbolic_size_may_be_large():
  fun = lambda h, w, m: h / lax.scan(lambda count, _: (count + 1, None), 0.0, m)[0]  # noqa: E731
  assert runs_in(fun, "float16", ones(*jax.export.symbolic_shape("n"))) == "float32"


def test_a_mean_of_a_mask_and_a_sum_of_parameters_decide_nothing():
  def fun(h, w, mask):
    return h * (mask.astype("float32").mean() + jnp.broadcast_to(w[0, 0], mask.shape).sum())

  assert runs_in(fun, "float16", ones(2 * MORE)) == "float16"


# Carries.

STEPS = {
  # name: one iteration, and the numbers of a carry that starts from 1 and enters 10 iterations.
  "kept": (lambda x: x, {1}),
  "replaced": (lambda x: 0.5, {0.5, 1}),
  "negated": (lambda x: -x, {1, -1}),
  "damped": (lambda x: 0.5 * x, {0.5, 1}),
  "counted": (lambda x: x + 1, {0, 1, 2, 12}),
  "counted down": (lambda x: x - 1, {0, 1, -10}),
}


def settled(step, start, times=10):
  """Returns the numbers of a carry, by the numbers with which one iteration returns it."""
  state = start
  for turn in range(9):
    state = numbers_of_carry(start, state, numbers(*map(step, state)), times, turn)
  assert state == numbers_of_carry(start, state, numbers(*map(step, state)), times, 9)
  return state


@pytest.mark.parametrize(("step", "expected"), STEPS.values(), ids=STEPS)
def test_the_numbers_of_a_carry(step, expected):
  assert settled(step, numbers(1.0)) == expected


@pytest.mark.parametrize("start", [0.0, -np.inf, np.inf])
@pytest.mark.parametrize("factor", [1.001, 2.0])
def test_a_carry_that_grows_faster_than_a_sum_has_no_limit(start, factor):
  assert {-LARGEST, LARGEST} <= settled(lambda x: factor * x, numbers(start, 1.0), 10_000)


def test_a_carry_of_an_unknown_number_of_iterations_counts_far():
  assert max(settled(lambda x: x + 1, numbers(0.0), None)) == UNCOUNTED


def test_a_carry_with_unknown_numbers_keeps_large_ones():
  start = numbers(None, -1e9)
  assert settled(lambda x: x, start) == start
  assert {None, -1e9, LEAST} <= settled(lambda x: x and 2 * x, start)
  assert numbers_of_carry(UNKNOWN, UNKNOWN, numbers(None, -np.inf), 10, 0) == UNKNOWN
