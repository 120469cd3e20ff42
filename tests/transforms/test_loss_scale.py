"""The scale and its counters against the oracle, and gradients against NumPy."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import stateful

import mpjax
from mpjax.transforms._loss_scale import LossScaleState, adjust, init_scale, unscale_tree
from tests.loss_scale_oracle import LIMIT, Oracle

pytestmark = pytest.mark.filterwarnings("ignore:.*power of two")

DTYPES = dict.fromkeys(LossScaleState._fields, jnp.int32) | {
  "scale": jnp.float32,
  "finite": jnp.bool_,
}


@functools.partial(jax.jit, static_argnums=0)
def run(config, flags, state):
  """Returns the final state, and the state after each step, for steps that are all applied."""

  def step(state, finite):
    first_bad = jnp.where(finite, jnp.int32(1), jnp.int32(0))
    state = adjust(config, state, finite=finite, applied=finite, first_bad=first_bad)
    return state, state

  return jax.lax.scan(step, state, flags)


def numbers(states):
  columns = [np.asarray(getattr(states, key)).tolist() for key in Oracle().numbers()]
  return [dict(zip(Oracle().numbers(), row, strict=True)) for row in zip(*columns, strict=True)]


def with_traced_fields(fields):
  """A configuration whose numbers are traced, so that one compilation serves all of them."""
  config = object.__new__(mpjax.DynamicLossScale)
  for name, value in fields.items():
    object.__setattr__(config, name, value)
  return config


def typed(fields):
  return {
    key: jnp.asarray(value, jnp.int32 if key in ("growth_interval", "hysteresis") else jnp.float32)
    for key, value in fields.items()
  }


@jax.jit
def run_any(fields, flags, state):
  return run.__wrapped__(with_traced_fields(fields), flags, state)[1]


def check(flags, **config):
  """Runs `flags` (1 for a finite step), compares with the oracle, and returns all numbers."""
  dynamic = mpjax.DynamicLossScale(**config)
  # Of one length, so that all of them are one program.
  padded = np.zeros(256, bool)
  padded[: len(flags)] = flags
  states = run_any(typed(dataclasses.asdict(dynamic)), padded, init_scale(dynamic))
  found = numbers(states)[: len(flags)]
  assert found == Oracle(**config).run(flags)
  return found


def scales(found):
  return [step["scale"] for step in found]


def scenario(flags, expected, **config):
  """Runs `flags`; the scales after all steps, or after the last ones, are `expected`."""
  found = check(flags, **config)
  assert [step["scale"] for step in found][-len(expected) :] == expected
  return {key: [step[key] for step in found] for key in found[0]}


@pytest.mark.case("A01", "A06", "A07", "A14", "A17", "A20", "A22", "B020")
def test_growth():
  """Of an interval, in the tests of other libraries."""
  found = scenario([1, 1, 0], [4, 8, 2], init_scale=4, backoff_factor=0.25, growth_interval=2)
  assert found["good_steps"] == [1, 0, 0], "it comes on the last step of the interval"
  doubled = [2.0 ** (8 + n // 2) for n in range(1, 11)]
  scenario([1] * 10, doubled, init_scale=2.0**8, growth_interval=2)
  # Every overflow restarts the window.
  flags, scales = [1, 1, 0, 1, 1, 1], [4, 4, 4, 4, 4, 8]
  found = scenario(flags, scales, init_scale=4, growth_interval=3, hysteresis=9)
  assert found["good_steps"] == [1, 2, 0, 1, 2, 0]
  for period, factor in itertools.product([20, 30], [2, 3]):
    scales = [10] * (period - 1) + [10 * factor] * period + [10 * factor**2]
    config = {"growth_factor": factor, "growth_interval": period}
    found = scenario([1] * (2 * period), scales, init_scale=10, **config)
    assert found["good_steps"] == [*range(1, period), 0] * 2
  flags, scales = [0, 0, 1, 1, 1, 0], [2.0**7, 2.0**6, 2.0**6, 2.0**7, 2.0**7, 2.0**6]
  scenario(flags, scales, init_scale=2.0**8, growth_interval=2)
  scenario([1] * 8, [32], init_scale=2, growth_interval=2)
  scenario([1, 0], [4, 2], init_scale=2, growth_interval=1)


@pytest.mark.case("A02", "A03", "A05", "A08", "A16", "A18", "A19", "B023", "B030")
def test_limits():
  """Growth ends at the maximum, and halving at the minimum, where overflows are counted."""
  found = scenario([0] * 6, [32, 16, 8, 8, 8, 8], init_scale=64, min_scale=8)
  assert found["floor_hits"][-1] == 3
  assert scenario([0, 1, 0, 0], [1], init_scale=2)["floor_hits"] == [0, 0, 1, 2]
  scales = [8, 4, 2, 1, 0.5, 0.25, 0.25, 0.25]
  scenario([0] * 8, scales, init_scale=2.0**4, min_scale=0.25)
  scenario([0] * 4, [25], init_scale=400)
  for factor in (2, 3):
    scales = [2.0**15]
    for _ in range(100):
      scales.append(max(1.0, float(np.float32(scales[-1] * float(np.float32(1 / factor))))))
    found = scenario([0] * 100, scales[1:], init_scale=2.0**15, backoff_factor=1 / factor)
    assert set(found["good_steps"]) == {0}
  growing = {"growth_interval": 1, "init_scale": 1}
  scenario([1] * 200, [2.0**100], growth_factor=8, max_scale=2.0**100, **growing)
  found = scenario([1] * 50, [2.0**24] * 50, **growing | {"init_scale": 2.0**24})
  assert found["good_steps"] == [0] * 50
  hard = {"init_scale": 2.0**125, "max_scale": 2.0**126, "growth_factor": 16}
  scenario([1] * 40, [2.0**126] * 40, **growing | hard)
  assert float(jnp.float32(1) / jnp.float32(2.0**126)) > 0


@pytest.mark.case("A04", "A05")
def test_only_growth_refills_the_hysteresis():
  """The finite step in between does not, as it would by Apex's rule: the second overflow halves."""
  flags, scales = [0, 1, 0, 1, 1, 1, 0, 0], [64, 64, 32, 32, 32, 64, 64, 32]
  found = scenario(flags, scales, init_scale=64, growth_interval=3, hysteresis=2)
  assert found["hysteresis"] == [1, 1, 0, 0, 0, 2, 1, 0]


@pytest.mark.case("A03")
def test_hysteresis_interval_growth_and_floor():
  for choice in itertools.product([1, 2, 7], [1, 2, 3], [2.0, 4.0], [0.5, 0.25]):
    check_factors(*choice)


def check_factors(interval, hysteresis, growth_factor, backoff_factor):
  config = {
    "init_scale": 2.0**10,
    "growth_factor": growth_factor,
    "backoff_factor": backoff_factor,
    "growth_interval": interval,
    "hysteresis": hysteresis,
    "max_scale": 2.0**126,
  }
  absorbed, extra = hysteresis - 1, 3 * interval + interval // 2
  flags = [0] * absorbed + [1] * (interval - 1) + [0] * 3 + [1] * (interval + extra) + [0] * 200
  found = scales(check(flags, **config))
  bad = absorbed + interval - 1
  assert set(found[:bad]) <= {2.0**10}
  assert found[bad + 2] == max(2.0**10 * backoff_factor**3, 1)
  grown = found[bad + 2] * growth_factor ** (1 + extra // interval)
  assert found[bad + 2 + interval + extra] == grown
  assert found[-1] == 1.0


@pytest.mark.case("A09", "B021")
@pytest.mark.parametrize("floor", [0.3125, 0.37, 4.0])
def test_floor_survives_transformations_of_the_state(floor):
  config = mpjax.DynamicLossScale(init_scale=8, min_scale=floor)
  bad = jnp.zeros(10, bool)
  state = init_scale(config)
  for through in (
    jax.jit(lambda s: s),
    lambda s: jax.tree.map(lambda x: x + 0 if x.dtype != bool else x, s),
    lambda s: jax.tree.unflatten(jax.tree.structure(s), jax.tree.leaves(s)),
    lambda s: LossScaleState(*map(np.asarray, s)),
  ):
    final, _ = run(config, bad, through(state))
    assert final.scale == np.float32(floor)
    state = final._replace(scale=jnp.float32(8))


@pytest.mark.case("A24")
def test_what_nnabla_does_otherwise():
  """It grows when its counter *exceeds* the interval, and repeats a bad step at half the scale."""
  flags = [1, 1, 1, 0, 1, 1]
  theirs, scale, counter = [], 8.0, 0
  for flag in flags:
    if not flag:
      scale, counter = scale / 2, 0  # the repeated step is finite
    if counter > 2:
      scale, counter = scale * 2, 0
    counter += 1
    theirs.append(scale)
  ours = check(flags, init_scale=8, growth_interval=2)
  assert scales(ours) == [8, 16, 16, 8, 8, 16]
  assert theirs == [8, 8, 8, 4, 4, 4]
  assert ours[-1]["total"] == len(flags), "a bad step is one step, and is not repeated"


@pytest.mark.case("A26")
def test_static_scale_is_constant():
  config = mpjax.StaticLossScale(3)
  flags = np.random.default_rng(0).random(10_000) < 0.5
  final, states = run(config, flags, init_scale(config))
  assert np.unique(states.scale).tolist() == [3.0]
  assert (final.total, final.skipped) == (10_000, np.sum(~flags))
  assert final.floor_hits == 0


@pytest.mark.case("B022", "B034")
def test_no_number_of_overflows_makes_the_scale_zero():
  config = mpjax.DynamicLossScale(min_scale=2.0**-126)
  final, _ = run(config, jnp.zeros(100_000, bool), init_scale(config))
  assert final.scale == np.float32(2.0**-126)
  assert final.consecutive_skips == 100_000


@pytest.mark.case("B029")
@pytest.mark.parametrize("finite", [True, False])
def test_counters_saturate(finite):
  config = mpjax.DynamicLossScale(growth_interval=LIMIT, init_scale=1)
  near = {key: jnp.int32(LIMIT - 1) for key in DTYPES if DTYPES[key] == jnp.int32}
  state = init_scale(config)._replace(**near | {"hysteresis": jnp.int32(1)})
  _, states = run(config, jnp.full(4, finite), state)
  assert states.total.tolist() == [LIMIT] * 4
  if finite:
    # The window is complete on the first step, and a new one starts.
    assert states.good_steps.tolist() == [0, 1, 2, 3]
  else:
    for field in ("skipped", "consecutive_skips", "floor_hits"):
      assert getattr(states, field).tolist() == [LIMIT] * 4
  static = mpjax.StaticLossScale(1)
  _, states = run(static, jnp.full(4, True), init_scale(static)._replace(good_steps=near["total"]))
  assert states.good_steps.tolist() == [LIMIT] * 4


@pytest.mark.case("B029")
def test_bad_updates_saturate():
  config = mpjax.DynamicLossScale()
  state = init_scale(config)._replace(bad_updates=jnp.int32(LIMIT - 1))
  yes, no, where = jnp.asarray(True), jnp.asarray(False), jnp.int32(0)
  for _ in range(3):
    state = adjust(config, state, finite=yes, applied=no, first_bad=where)
    assert state.bad_updates == LIMIT


@pytest.mark.case("B035")
def test_bad_and_good_in_turn():
  config = mpjax.DynamicLossScale(init_scale=2.0**10, growth_interval=1)
  flags = np.asarray([False, True] * 5000)
  final, states = run(config, flags, init_scale(config))
  assert numbers(states) == Oracle(init_scale=2.0**10, growth_interval=1).run(flags)
  assert (final.scale, final.skipped) == (2.0**10, 5000)


def test_a_window_restored_into_a_shorter_interval_is_complete():
  config = mpjax.DynamicLossScale(init_scale=4, growth_interval=2)
  state = init_scale(config)._replace(good_steps=jnp.int32(7))
  final, _ = run(config, jnp.asarray([True]), state)
  assert (final.scale, final.good_steps) == (8, 0)


def test_a_scale_restored_from_outside_comes_back_in():
  config = mpjax.DynamicLossScale(init_scale=4, min_scale=2, max_scale=8)
  for scale, expected in ((1.0, 2.0), (64.0, 8.0)):
    state = init_scale(config)._replace(scale=jnp.float32(scale))
    assert run(config, jnp.asarray([True]), state)[0].scale == expected


@pytest.mark.case("A11", "B027", "I4")
@pytest.mark.parametrize("config", [mpjax.StaticLossScale(8), mpjax.DynamicLossScale()])
def test_golden_state(config):
  state = init_scale(config)
  fields = "scale good_steps hysteresis total skipped consecutive_skips floor_hits bad_updates"
  assert state._fields == (*fields.split(), "first_bad", "finite")
  stepped, _ = run(config, jnp.asarray([True, False]), state)
  for tree in (state, stepped, jax.tree.map(lambda x: x, state)):
    assert jax.tree.structure(tree) == jax.tree.structure(state)
    for field, leaf in zip(tree._fields, tree, strict=True):
      assert (leaf.shape, leaf.dtype, leaf.weak_type) == ((), DTYPES[field], False), field
  assert len({leaf.unsafe_buffer_pointer() for leaf in state}) == len(state), "donatable"


def random_configs(rng, n):
  """Returns `n` random configurations, as columns."""
  low = 2.0 ** rng.integers(-20, 10, n)
  init = low * 2.0 ** rng.integers(0, 20, n)
  power = rng.random(n) < 0.5
  return {
    "init_scale": init,
    "growth_factor": np.where(power, 2.0 ** rng.integers(1, 5, n), rng.uniform(1.001, 9, n)),
    "backoff_factor": np.where(power, 0.5 ** rng.integers(1, 5, n), rng.uniform(0.1, 0.99, n)),
    "growth_interval": rng.integers(1, 30, n),
    "min_scale": low,
    "max_scale": init * 2.0 ** rng.integers(0, 30, n),
    "hysteresis": rng.integers(1, 5, n),
  }


@pytest.mark.case("I3", "A03", "A05")
def test_scale_and_counters_equal_the_oracle_on_10_000_sequences():
  n, steps = 10_000, 200
  rng = np.random.default_rng(2)
  configs = random_configs(rng, n)
  share = rng.choice([0, 0.01, 0.2, 0.9, 1], (n, 1))
  finite = rng.random((n, steps)) >= share
  updates = rng.random((n, steps)) >= 0.05

  def sequence(fields, finite, updates):
    config = with_traced_fields(fields)

    def step(state, flags):
      finite, updates = flags
      where = jnp.int32(0)
      applied = finite & updates
      return adjust(config, state, finite=finite, applied=applied, first_bad=where), state.scale

    return jax.lax.scan(step, init_scale(config), (finite, updates))

  program = jax.jit(jax.vmap(sequence))
  state, history = jax.device_get(program(typed(configs), finite, updates))
  for i in range(n):
    oracle = Oracle(**{key: value[i].item() for key, value in configs.items()})
    expected = []
    for good, sound in zip(finite[i].tolist(), updates[i].tolist(), strict=True):
      expected.append(oracle.scale)
      oracle.step(good, sound)
    assert history[i].tolist() == expected
    assert {key: getattr(state, key)[i].item() for key in oracle.numbers()} == oracle.numbers()


class Scaler(stateful.RuleBasedStateMachine):
  """Steps, growth, saves and restores in any order, against the oracle."""

  @stateful.initialize(
    interval=st.integers(1, 4), hysteresis=st.integers(1, 3), low=st.sampled_from([0.25, 1.0])
  )
  def start(self, interval, hysteresis, low):
    fields = {"growth_interval": interval, "hysteresis": hysteresis, "min_scale": low}
    fields |= {"init_scale": 2.0, "max_scale": 16.0}
    config = mpjax.DynamicLossScale(**fields)
    self.fields = typed(dataclasses.asdict(config))
    self.oracle = Oracle(**fields)
    self.state = init_scale(config)

  @stateful.rule(finite=st.booleans(), updates=st.booleans())
  def step(self, finite, updates):
    self.state = _step(self.fields, self.state, finite, finite and updates)
    self.oracle.step(finite, updates)

  @stateful.rule()
  def save_and_restore(self):
    self.state = LossScaleState(*[jnp.asarray(np.asarray(leaf)) for leaf in self.state])

  @stateful.invariant()
  def equal(self):
    if hasattr(self, "state"):
      found = {key: getattr(self.state, key).item() for key in self.oracle.numbers()}
      assert found == self.oracle.numbers()


@jax.jit
def _step(fields, state, finite, applied):
  config = with_traced_fields(fields)
  return adjust(config, state, finite=finite, applied=applied, first_bad=jnp.int32(0))


TestScaler = Scaler.TestCase
TestScaler.settings = hypothesis.settings(stateful_step_count=30)


# Gradients.

HALF = (np.float16, ml_dtypes.bfloat16)


@pytest.mark.case("A13", "B017")
def test_unscaling_undoes_scaling():
  rng = np.random.default_rng(0)
  x = (rng.normal(size=4096) * 2.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
  x[:3] = [-0.0, 0.0, 1.0]
  for scale in (2.0, 4.0, 2.0**15, 2.0**-3, 3.0, 1e5, 0.7):
    scaled = jnp.asarray(x, jnp.float32) * jnp.float32(scale)
    found = np.asarray(unscale_tree(scaled, jnp.float32(scale)))
    if np.frexp(scale)[0] == 0.5:
      np.testing.assert_array_equal(found.view(np.uint32), x.view(np.uint32))
    else:
      assert np.all(np.abs(found - x) <= np.spacing(np.abs(x)))


@pytest.mark.case("A28", "A35", "B100")
@pytest.mark.parametrize("dtype", [*HALF, np.float32])
def test_the_cast_comes_before_the_division(dtype):
  x = np.asarray([1.0, 2.0**-10, -3.0], dtype)
  found = unscale_tree({"a": jnp.asarray(x), "none": None}, jnp.float32(2.0**24))
  assert found["none"] is None
  assert found["a"].dtype == jnp.float32
  np.testing.assert_array_equal(found["a"], x.astype(np.float32) / np.float32(2.0**24))


@pytest.mark.case("B024", "B025")
@pytest.mark.parametrize("exponent", [126, -126, 125, -125])
def test_unscaling_at_the_hard_limits(exponent):
  scale = np.float32(2.0) ** np.float32(exponent)
  x = np.asarray([1.5, -0.75], np.float32)
  found = unscale_tree(jnp.asarray(x * np.float32(1)), jnp.asarray(scale))
  # 0.75 at 2^126 is 1.5 * 2^-127: the one subnormal, which XLA flushes.
  expected = np.where(np.abs(x / scale) < np.finfo(np.float32).tiny, 0, x / scale)
  np.testing.assert_array_equal(found, expected)
  assert float(found[0]) == 1.5 * 2.0**-exponent


@pytest.mark.case("B017")
def test_extreme_values():
  largest = np.finfo(np.float32).max
  x = jnp.asarray([largest, -largest, -0.0, np.inf, -np.inf, np.nan], jnp.float32)
  found = np.asarray(unscale_tree(x, jnp.float32(4)))
  np.testing.assert_array_equal(found, [largest / 4, -largest / 4, -0.0, np.inf, -np.inf, np.nan])
  assert np.signbit(found[2])
  assert np.isinf(np.asarray(unscale_tree(x, jnp.float32(0.5)))[:2]).all()


@pytest.mark.case("A36", "B011", "B012", "B058")
def test_leaves_that_hold_no_gradient_stay():
  key = jax.random.key(1)
  grads = {
    "indices": jnp.asarray([3, 1]),
    "mask": jnp.asarray([True]),
    "key": key,
    "raw": jax.random.key_data(key),
    "nothing": np.zeros(3, jax.dtypes.float0),
    "values": jnp.asarray([8.0, 2.0]),
  }
  found = unscale_tree(grads, jnp.float32(4))
  for name in ("indices", "mask", "key", "raw", "nothing"):
    assert found[name] is grads[name]
  np.testing.assert_array_equal(found["values"], [2.0, 0.5])


@pytest.mark.case("B011", "B058")
@pytest.mark.parametrize("exponent", [15, 120, -120])
def test_complex_gradients_are_divided_part_by_part(exponent):
  scale = np.float32(2.0) ** np.float32(exponent)
  x = np.asarray([3 - 4j, -0.5 + 8j], np.complex64)
  found = unscale_tree(jnp.asarray(x), jnp.asarray(scale))
  assert found.dtype == jnp.complex64
  np.testing.assert_array_equal(found.real, x.real / scale)
  np.testing.assert_array_equal(found.imag, x.imag / scale)


def test_float64_gradients_stay_float64(set_flag):
  set_flag("jax_enable_x64", True)
  found = unscale_tree(
    {"d": jnp.asarray([1.0]), "c": jnp.asarray([2j]), "h": jnp.ones(1, jnp.float16)},
    jnp.float32(3),
  )
  assert {k: v.dtype.name for k, v in found.items()} == {
    "d": "float64",
    "c": "complex128",
    "h": "float32",
  }
  assert found["d"][0] == 1 / 3


def test_without_a_scale_gradients_are_only_cast():
  found = unscale_tree([jnp.ones(2, jnp.float16), jnp.ones(1, jnp.complex64)], None)
  assert [leaf.dtype.name for leaf in found] == ["float32", "complex64"]
