"""Rounding of half parameters: from a master, to nearest, stochastically, and how fair that is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.programs import assert_bit_equal, bits

HALF = ["float16", "bfloat16"]
BOTH = pytest.mark.parametrize("half", HALF)
STOCHASTIC = functools.partial(mpjax.apply_updates, rounding="stochastic")
COMPILED = jax.jit(STOCHASTIC)
KEY = jax.random.key(3)


def every_number(half):
  # All numbers of a half type but those that XLA for CPU flushes: bfloat16's subnormals.
  found = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(half))
  wide = found.astype(np.float32)
  return found[~(np.abs(wide) < 2.0**-126) | (wide == 0)]


def same(found, expected):
  """Bit-equal, but for the payload of a NaN."""
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.dtype == expected.dtype
  nan = np.isnan(expected.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
  assert found[~nan].tobytes() == expected[~nan].tobytes()


def nearest(exact, half):
  """Rounded by NumPy, to nearest with ties to even."""
  with np.errstate(over="ignore"):
    return exact.astype(half)


def neighbours(exact, half):
  """The largest number of a half type below or at each float32, and the smallest above or at it."""
  # Those of one format are in the order of their bits, with the sign taken off.
  below = nearest(exact, half)
  step = np.where(np.signbit(below), 1, -1).astype(np.int32)
  code = below.view(np.uint16).astype(np.int32)
  too_high = below.astype(np.float64) > exact
  # Below +0 stands the smallest negative number.
  code = np.where(too_high, np.where(code == 0, 0x8001, code + step), code)
  low = code.astype(np.uint16).view(jnp.dtype(half))
  up = np.where(np.signbit(low), -1, 1).astype(np.int32)
  above = np.where(code == 0x8000, 1, code + up).astype(np.uint16).view(jnp.dtype(half))
  return low, np.where(low.astype(np.float64) == exact, low, above)


def samples(half):
  """Float32 numbers over the whole range of a half type, its smallest and largest included."""
  rng = np.random.default_rng(0)
  low, high = (-26, 16) if half == "float16" else (-126, 128)
  exponents = rng.uniform(low, high, 20_000)
  found = rng.choice([-1.0, 1.0], 20_000) * 2.0**exponents
  largest = float(jnp.finfo(half).max)
  ends = [largest, largest * (1 + 2.0**-14), 65519.0 if half == "float16" else 3.3961e38]
  ends += [2.0**-14, 2.0**-14 - 2.0**-30, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 1e-30]
  found = np.concatenate([found, ends, [-x for x in ends]])
  return found[np.abs(found) < 3.4028e38].astype(np.float32)


def zeros(like, half):
  return np.zeros(like.shape, jnp.dtype(half))


def rounded_by_hand(exact, half, key, leaf=0):
  """Stochastic rounding once more, in float64."""
  # What half cannot hold, in units of the distance between neighbours, and a random number below 1
  # are added; from 1 on the result is the neighbour away from zero. Float16's subnormal numbers go
  # up where the random number is below what stands over the lower neighbour. An inf comes only
  # where rounding to nearest has one.
  random = np.asarray(jax.random.bits(jax.random.fold_in(key, leaf), exact.shape, jnp.uint32))
  low, high = (x.astype(np.float64) for x in neighbours(exact, half))
  wide = exact.astype(np.float64)
  toward, away = np.where(wide < 0, high, low), np.where(wide < 0, low, high)
  info = jnp.finfo(half)
  # Beyond the largest number too the next one would stand at this distance.
  apart = np.where(np.isinf(away), 2.0 ** (info.maxexp - 1) * float(info.eps), 1.0)
  between = np.isfinite(away) & (away != toward)
  np.subtract(np.abs(away), np.abs(toward), out=apart, where=between)
  dropped = np.zeros_like(wide)
  np.divide(np.abs(wide) - np.abs(toward), apart, out=dropped, where=np.isfinite(toward))
  number_of_bits = 13 if half == "float16" else 16
  noise = (random >> np.uint32(32 - number_of_bits)) / 2.0**number_of_bits
  found = np.where(noise + dropped >= 1, away, toward)
  found = np.where(np.isfinite(found), found, nearest(exact, half).astype(np.float64))
  if half == "float16":
    units = wide * 2.0**24
    share = (units - np.floor(units)).astype(np.float32)
    up = (random >> np.uint32(8)) / 2.0**24 < share
    found = np.where(np.abs(wide) < 2.0**-14, (np.floor(units) + up) * 2.0**-24, found)
  return found


@BOTH
def test_nearest_rounds_the_float32_sum_once(half):
  exact = samples(half)
  params = np.random.default_rng(1).normal(size=2000).astype(half)
  updates = (np.random.default_rng(2).normal(size=2000) * 1e-2).astype(np.float32)
  for apply in (jax.jit(mpjax.apply_updates), mpjax.apply_updates):
    same(apply(zeros(exact, half), exact), nearest(exact, half))
    same(apply(params, updates), (params.astype(np.float32) + updates).astype(half))


def test_weakly_typed_updates_are_not_added_in_half():
  # Rounded to half before the sum, the update is exactly half a step, and a tie that goes down.
  step = float(jnp.finfo(jnp.bfloat16).eps)
  update = jnp.full(4, step / 2 * (1 + 2.0**-12))
  assert update.weak_type
  params = jnp.ones(4, jnp.bfloat16)
  assert optax.apply_updates(params, update).tolist() == [1.0] * 4, "as optax alone would have it"
  assert mpjax.apply_updates(params, update).tolist() == [1.0 + step] * 4
  # Rounded in half the sum would be 1 exactly, and no key could move it.
  small = jnp.full(4000, step / 8)
  moved = COMPILED(jnp.ones(4000, jnp.bfloat16), small, key=KEY)
  assert 300 < int(jnp.sum(moved > 1)) < 700


@BOTH
def test_what_half_can_hold_stays(half):
  # So a skipped step changes nothing: -0.0 stays where the update is -0.0, and inf and NaN too.
  numbers = every_number(half)
  found = COMPILED(numbers, np.full(numbers.shape, -0.0, np.float32), key=KEY)
  same(found, numbers)
  # And exact sums: half a number and half a number.
  wide = numbers.astype(np.float32)
  normal = numbers[np.isfinite(wide) & (np.abs(wide) > 1e-3)]
  halves = (normal.astype(np.float32) / 2).astype(half)
  same(COMPILED(halves, halves.astype(np.float32), key=KEY), normal)
  # A NaN of all ones too, of which a carry would make -0.0.
  nan = np.uint32([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]).view(np.float32)
  assert np.all(np.isnan(np.float32(COMPILED(zeros(nan, half), nan, key=KEY))))


def test_the_smallest_random_number_moves_nothing_that_half_can_hold():
  # With this key the random number of one float16 subnormal number is exactly 0.
  key, position = jax.random.key(593), 3571
  random = jax.random.bits(jax.random.fold_in(key, 0), (2**16,), jnp.uint32)
  assert random[position] >> 8 == 0
  subnormal = np.full(2**16, 3 * 2.0**-24, np.float16)
  found = COMPILED(subnormal, np.full(2**16, -0.0, np.float32), key=key)
  assert bits(found) == bits(subnormal)


EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e3m4"]


def codes_of(dtype):
  """Returns the finite numbers of an 8-bit dtype in order, in float64."""
  numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
  return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_float8_parameters_are_rounded_to_a_neighbour_and_right_on_average(dtype):
  numbers = codes_of(dtype)
  # A quarter of the way from each number to the next one, subnormal numbers included.
  exact = (0.75 * numbers[:-1] + 0.25 * numbers[1:]).astype(np.float32)
  updates = np.tile(exact, (4000, 1))
  found = np.asarray(COMPILED(zeros(updates, dtype), updates, key=KEY)).astype(np.float64)
  assert np.all((found == numbers[:-1]) | (found == numbers[1:]))
  # The share that goes up has a standard deviation of 0.007.
  went_up = np.mean(found == numbers[1:], axis=0)
  np.testing.assert_allclose(went_up, 0.25, atol=0.035)
  # What it can hold stays.
  stays = numbers.astype(np.float32)
  found = COMPILED(zeros(stays, dtype), stays, key=KEY)
  np.testing.assert_array_equal(np.asarray(found).astype(np.float32), stays)


@pytest.mark.slow
def test_stochastic_rounding_on_the_same_random_bits():
  # To the bit, so that the result is ever one of the two neighbours. Each leaf has bits of its own,
  # by its number in the tree; keys may be typed or raw.
  exact = samples("float16")
  params = {name: zeros(exact, half) for name, half in zip("abc", [*HALF, "float16"], strict=True)}
  updates = dict.fromkeys(params, exact)
  for key in (KEY, jax.random.fold_in(KEY, 1)):
    expected = [rounded_by_hand(exact, p.dtype, key, i) for i, p in enumerate(params.values())]
    for found in (COMPILED(params, updates, key=key), STOCHASTIC(params, updates, key=key)):
      np.testing.assert_array_equal([np.float64(x) for x in found.values()], expected)
      assert all(np.mean(x != nearest(exact, x.dtype)) > 0.1 for x in found.values())
    assert bits(COMPILED(params, updates, key=jax.random.key_data(key))) == bits(found)


@BOTH
def test_the_compiler_does_not_fold_it_away(half):
  # The bits are those of the uncompiled rounding, whatever is before and after it.
  #
  # A compiler that sees a cast to half and back may drop both, but it cannot see through an
  # addition of integers to the bits of a number.
  rng = np.random.default_rng(4)
  params = rng.normal(size=4096).astype(half)
  updates = (rng.normal(size=4096) * 1e-3).astype(np.float32)
  total = params.astype(np.float32) + updates
  exact = rounded_by_hand(total, half, KEY).astype(half)
  assert np.mean(exact != nearest(total, half)) > 0.01

  def surrounded(params, updates, key):
    rounded = STOCHASTIC(params, updates * 2 * 0.5, key=key)
    wide = rounded.astype(jnp.float32)
    return rounded, wide, wide * 4 - wide * 3

  rounded, wide, same_again = jax.jit(surrounded)(params, updates, KEY)
  same(rounded, exact)
  same(wide, exact.astype(np.float32))
  same(same_again, exact.astype(np.float32))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_not_half_is_added_to_as_by_optax(rounding):
  rng = np.random.default_rng(5)
  params = {"w": jnp.asarray(rng.normal(size=100), jnp.float32), "none": None}
  params |= {"z": jnp.asarray(rng.normal(size=3) * (1 + 2j), jnp.complex64), "n": jnp.arange(3)}
  updates = {"w": jnp.full(100, 1e-7), "none": None, "z": params["z"] / 3, "n": jnp.ones(3, int)}
  key = KEY if rounding == "stochastic" else None
  found = mpjax.apply_updates(params, updates, rounding=rounding, key=key)
  expected = optax.apply_updates(params, updates)
  assert_bit_equal(found, expected)


def with_masters(master):
  """Returns an optimizer state with these masters."""
  return mpjax.states.MasterWeightsState(master, ())


@BOTH
def test_from_a_master_is_its_rounding_whatever_the_update(half):
  def from_master(params, updates, master):
    return mpjax.apply_updates(params, updates, with_masters(master))

  master = np.concatenate([samples(half), np.asarray([0.0, -0.0, 1e-30, -1e-30], np.float32)])
  largest = np.float32(jnp.finfo(half).max)
  assert np.any(np.isinf(nearest(master, half))), "beyond the range it is the largest number"
  expected = nearest(np.clip(master, -largest, largest), half)
  for update in (np.nan, 0.0, 1e30):
    updates = np.full(master.shape, update, np.float32)
    for apply in (jax.jit(from_master), from_master):
      same(apply(zeros(master, half) + 7, updates, master), expected)


def test_from_a_master_half_way_between_two_bfloat16_it_is_the_larger_one():
  # As split masters need it; float16 has ties to even.
  master = jnp.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
  found = mpjax.apply_updates(jnp.zeros(3, jnp.bfloat16), master, with_masters(master))
  assert found.tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7]
  master = jnp.asarray([1 + 2.0**-11])
  found = mpjax.apply_updates(jnp.zeros(1, jnp.float16), master, with_masters(master))
  assert found.tolist() == [1]


@BOTH
def test_stochastic_rounding_has_the_derivative_of_a_sum(half):
  params = jnp.ones(3, half)
  total = lambda rate: jnp.sum(STOCHASTIC(params, -rate * jnp.ones(3), key=KEY).astype(jnp.float32))  # noqa: E731
  assert jax.grad(total)(0.1) == -3


def test_from_a_master_with_holes():
  # A leaf without a master is added to, also where one None stands for a subtree.
  params = {"w": jnp.ones(2, "bfloat16"), "rest": {"b": jnp.ones(2), "h": jnp.ones(2, "float16")}}
  updates = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)
  for rest in (None, {"b": None, "h": None}):
    master = {"w": jnp.full(2, 3.001), "rest": rest}
    found = mpjax.apply_updates(params, updates, with_masters(master))
    assert found["w"].tolist() == [3.0, 3.0]
    same(found["rest"]["b"], np.float32([1 + 1e-3] * 2))
    same(found["rest"]["h"], np.asarray([1 + 1e-3] * 2, np.float16))


def test_a_float32_copy_of_a_parameter_becomes_its_master():
  tx = mpjax.master_weights(optax.sgd(2.0**-12))
  params = jnp.ones(2, "bfloat16")
  updates, state = tx.update(jnp.ones(2), tx.init(params), params)
  masters = mpjax.states.master_params(state)
  assert masters.tolist() == [1 - 2.0**-12] * 2  # between two numbers in bfloat16
  for copy in (params.astype("float32"), masters):
    assert mpjax.apply_updates(copy, updates, state).tolist() == masters.tolist()


PARAMS = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(3)}


def test_updates_and_masters_of_another_tree():
  for options in (
    {},
    {"rounding": "stochastic", "key": KEY},
    {"opt_state": with_masters({"w": jnp.ones(2), "b": None})},
  ):
    for updates, got in (
      ({"w": jnp.ones(2)}, "nothing at ['b']"),
      ({"w": jnp.ones(3), "b": jnp.ones(3)}, "shape [3] for shape [2] at ['w']"),
    ):
      where, fix = "mpjax.apply_updates(updates)", "what tx.update returned"
      with refused(ValueError, where, "updates like the parameters", got, fix):
        mpjax.apply_updates(PARAMS, updates, **options)
  for master, got in (
    ({"w": jnp.ones(3), "b": None}, "shape [3] for shape [2] at ['w']"),
    ({"w": jnp.ones(2), "v": None}, "v"),
  ):
    where, fix = "mpjax.apply_updates(opt_state)", "the state that update returned"
    with refused(ValueError, where, "the state of these parameters", got, fix):
      mpjax.apply_updates(PARAMS, {"w": jnp.ones(2), "b": jnp.ones(3)}, with_masters(master))


def test_masters_are_found_in_mappings_and_variables():
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  optimizer = nnx.Optimizer(model, mpjax.master_weights(optax.sgd(0.1)), wrt=nnx.Param)
  params = nnx.as_pure(nnx.state(model, nnx.Param))
  updates = jax.tree.map(lambda p: jnp.full(p.shape, 5.0), params)
  for state in (optimizer, nnx.state(optimizer), nnx.as_pure(optimizer.opt_state)):
    assert_bit_equal(mpjax.apply_updates(params, updates, state), params)


def test_a_key_in_the_place_of_the_state_is_refused():
  where, fix = "mpjax.apply_updates(opt_state)", "Write rounding= and key= with their names."
  with refused(TypeError, where, "the state of an optimizer", "an array key<fry>[]", fix):
    mpjax.apply_updates(PARAMS, PARAMS, KEY)


def test_arguments_that_contradict_each_other():
  stochastic, named = {"rounding": "stochastic"}, "'nearest' or 'stochastic'"
  fold, wants_key = "fold_in(key, step)", "a key for 'stochastic', and none for 'nearest'"
  masters = with_masters({"w": jnp.ones(2), "b": None})
  for options, where, expected, got, fix in (
    ({"rounding": "stochastik", "key": KEY}, "(rounding)", named, "'stochastik'", "'stochastic'"),
    ({"rounding": None}, "(rounding)", named, "None", "Did you mean"),
    (stochastic, "(rounding='stochastic', key)", wants_key, "None", fold),
    ({"key": KEY}, "(rounding='nearest', key)", wants_key, "an array key<fry>[]", fold),
    (
      {"key": KEY, "opt_state": masters, **stochastic},
      *("(opt_state, rounding='stochastic')", "a state without mpjax.master_weights"),
      *("a state with masters", "one of the two"),
    ),
  ):
    call = functools.partial(mpjax.apply_updates, **options)
    for apply in (call, jax.jit(call)):
      with refused(ValueError, f"mpjax.apply_updates{where}", expected, got, fix):
        apply(PARAMS, PARAMS)


@BOTH
def test_a_nan_of_any_payload_stays_one(half):
  # Of all ones a carry would make -0.0.
  updates = np.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001] * 100, np.uint32).view(np.float32)
  found = COMPILED(zeros(updates, half), updates, key=KEY)
  assert np.all(np.isnan(np.asarray(found, np.float32)))


def smallest(dtype):
  """Returns zeros of both signs, subnormal numbers of both signs, and others."""
  low = float(jnp.finfo(dtype).smallest_subnormal)
  return jnp.asarray(np.asarray([-0.0, 0.0, low, -low, 1.5, -2.0]).astype(dtype))


def window(tx):
  return mpjax.accumulate_gradients(tx, 2)


def split(tx):
  return mpjax.master_weights(tx, storage="split")


SKIPPING = {
  "loss_scaling": mpjax.loss_scaling,
  "check_updates": functools.partial(mpjax.loss_scaling, check_updates=True),
  "masters inside": lambda tx: mpjax.loss_scaling(mpjax.master_weights(tx)),
  "masters around": lambda tx: mpjax.master_weights(mpjax.loss_scaling(tx)),
  "split inside": lambda tx: mpjax.loss_scaling(split(tx)),
  "split around": lambda tx: split(mpjax.loss_scaling(tx)),
  "monitor": lambda tx: mpjax.monitor(mpjax.loss_scaling(tx)),
  "window": lambda tx: mpjax.loss_scaling(window(tx)),
  "window of masters": lambda tx: mpjax.loss_scaling(window(mpjax.master_weights(tx))),
  "masters of a window": lambda tx: mpjax.master_weights(mpjax.loss_scaling(window(tx))),
  "state_dtype": lambda tx: mpjax.loss_scaling(mpjax.state_dtype(tx, mu="bfloat16")),
}
FORMATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.standard_promotion("dtypes")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("wrap", SKIPPING.values(), ids=SKIPPING)
def test_a_skipped_step_keeps_the_bits_of_zeros_and_subnormal_numbers(wrap, dtype):
  tx, params = wrap(optax.adamw(0.1)), {"w": smallest(jnp.dtype(dtype))}
  state, grads = tx.init(params), {"w": jnp.full(6, jnp.nan)}
  updates, new = tx.update(grads, state, params)
  assert bits(mpjax.apply_updates(params, updates, new)) == bits(params)
  # Masters around the scale are updated by themselves.
  assert bits(mpjax.states.inner_state(new)) == bits(mpjax.states.inner_state(state))
  if isinstance(state, mpjax.states.MasterWeightsState):
    assert bits(new.master) == bits(state.master)


@pytest.mark.standard_promotion("dtypes")
def test_a_skipped_step_of_optax_keeps_the_signs_of_zeros():
  params = optax.LookaheadParams.init_synced(jnp.asarray([-0.0, 0.0, 1.0]))
  tx = mpjax.loss_scaling(optax.lookahead(optax.sgd(0.1), 2, 0.5))
  updates, _ = tx.update(jnp.full(3, jnp.nan), tx.init(params), params)
  assert bits(optax.apply_updates(params, updates)) == bits(params)


def test_an_update_of_negative_zero_has_the_derivative_of_a_sum():
  nothing = jnp.full(2, -0.0)
  one = jax.grad(lambda u: jnp.sum(mpjax.apply_updates(jnp.ones(2), u)))(nothing)
  assert one.tolist() == [1, 1]
