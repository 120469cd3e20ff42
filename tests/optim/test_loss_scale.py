"""The scale against the oracle; configurations and their labels."""

import dataclasses
import fractions
import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._optim import loss_scale
from mpjax._optim.find_scale import scales_in
from mpjax._optim.states import LossScaleState
from tests.errors import refused
from tests.loss_scale_oracle import LIMIT, Oracle
from tests.optim.scales import PARAMS, SCALED
from tests.programs import assert_bit_equal

DTYPES = dict.fromkeys(LossScaleState._fields, jnp.int32) | {
  "scale": jnp.float32,
  "finite": jnp.bool_,
}


@functools.partial(jax.jit, static_argnums=0)
def run(config, finite, state, applied=None):
  """Returns the final state, and that after each step; without `applied`, all finite ones are."""

  def step(state, both):
    finite, applied = both
    flags = {"own_finite": finite, "all_finite": finite, "applied": applied}
    state = loss_scale.adjust(config, state, first_bad=jnp.int32(finite), **flags)
    return state, state

  return jax.lax.scan(step, state, (finite, finite if applied is None else applied))


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


@pytest.mark.filterwarnings("ignore:.*power of two")
def test_static_scale_is_constant():
  config = mpjax.StaticLossScale(3)
  flags = np.random.default_rng(0).random(10_000) < 0.5
  final, states = run(config, flags, loss_scale.init_scale(config))
  assert np.unique(states.scale).tolist() == [3.0]
  assert (final.total, final.skipped) == (10_000, np.sum(~flags))
  assert final.floor_hits == 0


@pytest.mark.parametrize("flags", [[1], [1, 1], [1, 0], [0, 1, 1], []])
def test_updates_that_are_taken_back_have_each_number_of_skipped_ones(flags):
  # Each field, so that a new counter of skipped steps fails here until `as_skipped` has it too.
  config = mpjax.DynamicLossScale(growth_interval=2, hysteresis=2)

  def adjusted(state, finite, applied):
    given = {"own_finite": finite, "applied": applied, "all_finite": finite & applied}
    given = {name: jnp.asarray(x) for name, x in given.items()}
    return loss_scale.adjust(config, state, first_bad=jnp.int32(0), **given)

  for before in ([], [0], [0, 0, 1], [1, 0, 0]):
    old = loss_scale.init_scale(config)
    for x in before:
      old = adjusted(old, bool(x), bool(x))
    new = skipped = old
    for x in flags:
      new, skipped = adjusted(new, bool(x), bool(x)), adjusted(skipped, bool(x), False)
    assert loss_scale.as_skipped(old, new)._asdict() == skipped._asdict()


def test_counts_of_updates_that_are_taken_back_saturate():
  old = loss_scale.init_scale(mpjax.DynamicLossScale())
  old = old._replace(skipped=jnp.int32(LIMIT - 1), consecutive_skips=jnp.int32(LIMIT))
  skipped = loss_scale.as_skipped(old, old._replace(total=jnp.int32(2)))
  assert (skipped.skipped, skipped.consecutive_skips) == (LIMIT, LIMIT)
  assert not skipped.applied


def test_an_update_that_no_count_shows_is_taken_back():
  old = loss_scale.init_scale(mpjax.DynamicLossScale())._replace(total=jnp.int32(LIMIT))
  skipped = loss_scale.as_skipped(old, old)
  assert (skipped.skipped, skipped.consecutive_skips, skipped.applied) == (1, 1, False)


@pytest.mark.parametrize("finite", [True, False])
def test_counters_saturate(finite):
  config = mpjax.DynamicLossScale(growth_interval=LIMIT, init_scale=1)
  near = {key: jnp.int32(LIMIT - 1) for key in DTYPES if DTYPES[key] == jnp.int32}
  state = loss_scale.init_scale(config)._replace(**near | {"hysteresis": jnp.int32(1)})
  _, states = run(config, jnp.full(4, finite), state)
  stopped = ["total"] if finite else ["total", "skipped", "consecutive_skips", "floor_hits"]
  assert all(getattr(states, field).tolist() == [LIMIT] * 4 for field in stopped)
  if finite:
    # The window is complete on the first step, and a new one starts.
    assert states.good_steps.tolist() == [0, 1, 2, 3]
  static = mpjax.StaticLossScale(1)
  start = loss_scale.init_scale(static)._replace(good_steps=near["total"])
  _, states = run(static, jnp.full(4, True), start)
  assert states.good_steps.tolist() == [LIMIT] * 4
  yes, flags = jnp.asarray(True), {"applied": jnp.asarray(False), "first_bad": jnp.int32(0)}
  for _ in range(3):
    state = loss_scale.adjust(config, state, own_finite=yes, all_finite=yes, **flags)
    assert state.bad_updates == LIMIT


@pytest.mark.parametrize(
  ("restored", "expected"),
  [
    ({"good_steps": 7}, {"scale": 8, "good_steps": 0}),  # A window of a longer interval.
    ({"scale": 1.0}, {"scale": 2}),
    ({"scale": 64.0}, {"scale": 8}),
  ],
  ids=str,
)
def test_a_state_restored_from_another_configuration(restored, expected):
  config = mpjax.DynamicLossScale(init_scale=4, growth_interval=2, min_scale=2, max_scale=8)
  restored = {field: jnp.asarray(value, DTYPES[field]) for field, value in restored.items()}
  final, _ = run(config, jnp.asarray([True]), loss_scale.init_scale(config)._replace(**restored))
  assert {field: getattr(final, field) for field in expected} == expected


def test_the_oracle_on_steps_with_known_scales():
  every_3, limits = {"growth_interval": 3}, {"min_scale": 20, "max_scale": 200}
  factors = {"growth_factor": 3, "growth_interval": 1, "backoff_factor": 0.1}
  for flags, scales, config in (
    ([1, 1, 0, 1, 1, 1], [4, 4, 4, 4, 4, 8], every_3 | {"init_scale": 4, "hysteresis": 9}),
    # Growth refills the hysteresis, and a finite step alone does not.
    (
      [0, 1, 0, 1, 1, 1, 0, 0],
      [8, 8, 4, 4, 4, 8, 8, 4],
      every_3 | {"init_scale": 8, "hysteresis": 2},
    ),
    ([1, 0, 0], [192, 20, 20], factors | limits | {"init_scale": 64}),
  ):
    assert [numbers["scale"] for numbers in Oracle(**config).run(flags)] == scales


def random_configs(rng, n):
  low = 2.0 ** np.maximum(rng.integers(-140, 10, n), -126)
  init = low * 2.0 ** rng.integers(0, 20, n)
  power = rng.random(n) < 0.5
  return {
    "init_scale": init,
    "growth_factor": np.where(power, 2.0 ** rng.integers(1, 5, n), rng.uniform(1.001, 9, n)),
    "backoff_factor": np.where(power, 0.5 ** rng.integers(1, 5, n), rng.uniform(0.1, 0.99, n)),
    "growth_interval": rng.integers(1, 30, n),
    "min_scale": low,
    "max_scale": np.minimum(init * 2.0 ** rng.integers(0, 150, n), 2.0**126),
    "hysteresis": rng.integers(1, 5, n),
  }


@pytest.mark.slow
def test_scale_and_counters_equal_the_oracle_on_random_sequences():
  # The limits of a fifth of them are the smallest and the largest scale that there are.
  n, steps = 2_000, 200
  rng = np.random.default_rng(2)
  configs = random_configs(rng, n)
  share = rng.choice([0, 0.01, 0.2, 0.9, 1], (n, 1))
  finite = rng.random((n, steps)) >= share
  updates = rng.random((n, steps)) >= 0.05

  @jax.jit
  @jax.vmap
  def program(fields, finite, applied):
    config = with_traced_fields(fields)
    state, states = run.__wrapped__(config, finite, loss_scale.init_scale(config), applied)
    return state, states.scale

  state, history = jax.device_get(program(typed(configs), finite, finite & updates))
  for i in range(n):
    oracle = Oracle(**{key: value[i].item() for key, value in configs.items()})
    flags = zip(finite[i].tolist(), updates[i].tolist(), strict=True)
    assert history[i].tolist() == [oracle.step(*both).scale for both in flags]
    assert {key: getattr(state, key)[i].item() for key in oracle.numbers()} == oracle.numbers()


DYNAMIC, OFF, SKIP = mpjax.DynamicLossScale(), mpjax.NoLossScale(), mpjax.SkipNonfinite()


def test_defaults():
  defaults = "init_scale=32768.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
  defaults += "min_scale=1.0, max_scale=16777216.0, hysteresis=1"
  assert repr(mpjax.DynamicLossScale()) == f"DynamicLossScale({defaults})"


@pytest.mark.parametrize("config", [OFF, SKIP, mpjax.StaticLossScale(8), DYNAMIC])
def test_configuration_is_a_static_value(config):
  same = dataclasses.replace(config)
  assert same == config is not same
  assert hash(same) == hash(config)
  assert jax.tree.leaves(config) == [config], "a pytree would be traced"
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.scale = 1.0
  assert jax.jit(lambda c: len(repr(c)), static_argnums=0)(config) == len(repr(config))


@pytest.mark.parametrize(
  "value", [8, 8.0, np.float32(8), np.float64(8), np.int64(8), fractions.Fraction(8)]
)
def test_any_plain_number_is_stored_as_the_same_float(value):
  for scale in (
    mpjax.StaticLossScale(value).scale,
    mpjax.DynamicLossScale(init_scale=value).init_scale,
    mpjax.DynamicLossScale(max_scale=value, init_scale=1).max_scale,
  ):
    assert scale == 8.0
    assert type(scale) is float
  assert mpjax.DynamicLossScale(init_scale=value) == mpjax.DynamicLossScale(init_scale=8)
  assert type(mpjax.DynamicLossScale(growth_interval=np.int64(3)).growth_interval) is int
  with pytest.warns(UserWarning, match="not a power of two"):
    assert mpjax.StaticLossScale(scale=0.1).scale == float(np.float32(0.1)), "rounded to float32"


def test_a_keyword_too_many_or_none_is_refused_with_those_that_there_are():
  where, expected = "mpjax.DynamicLossScale", "arguments init_scale"
  for args, kwargs, got in (((), {"init": 4}, "'init'"), ((4,), {}, "positional")):
    with refused(TypeError, where, expected, got, "init_scale=2**15"):
      mpjax.DynamicLossScale(*args, **kwargs)


def test_other_than_powers_of_two_warn_once():
  dynamic, several = mpjax.DynamicLossScale, {"backoff_factor": 0.25, "min_scale": 0.37}
  state = SCALED.init(PARAMS)
  for make, fields, *named in (
    (mpjax.StaticLossScale, {"scale": 400}, "scale=400"),
    (dynamic, {"init_scale": 1e5}, "init_scale=100000"),
    (functools.partial(mpjax.states.set_loss_scale, state), {"value": 1000}, "value=1000"),
    (dynamic, several | {"growth_factor": 1.5}, "min_scale=0.370000005", "growth_factor=1.5"),
  ):
    with pytest.warns(UserWarning, match="not a power of two") as caught:
      make(**fields)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert all(field in str(caught[0].message) for field in named)
  # A warning would be an error here.
  mpjax.DynamicLossScale(init_scale=2.0**-126, min_scale=2.0**-126, backoff_factor=0.125)
  mpjax.StaticLossScale(2**126)


SCALES = ("init_scale", "min_scale", "max_scale", "scale")
NUMBERS = (*SCALES, "growth_factor", "backoff_factor")
COUNTS = ("growth_interval", "hysteresis")
IN_RANGE = "positive number in [2^-126, 2^126]"
ARRAY = jnp.ones(1)
WRONG = [
  *(
    (field, x, TypeError, "a plain number", "pass any") for field in NUMBERS for x in (True, ARRAY)
  ),
  *((field, x, TypeError, "an integer", "int") for field in COUNTS for x in (True, 2.0)),
  *((field, x, ValueError, IN_RANGE, "power") for field in SCALES for x in (0.0, 2.0**127)),
  *((field, x, ValueError, "finite", "power") for field in NUMBERS for x in (math.nan, 1e300)),
  *((field, x, ValueError, "from 1 to 2^31 - 1", "Use 1") for field in COUNTS for x in (0, 2**31)),
  *(("growth_factor", x, ValueError, "above 1", "Take 2") for x in (1.0, 2.0**127)),
  *(("backoff_factor", x, ValueError, "below 1", "0.5") for x in (1.0, 2.0**-127)),
]
"""A field, a value that is wrong for it, and the error: its type, what it expects, and the fix."""


def make(field, value):
  kind = mpjax.StaticLossScale if field == "scale" else mpjax.DynamicLossScale
  return kind(**{field: value})


def test_numbers_that_are_refused():
  for field, value, builtin, expected, fix in WRONG:
    got = f"of type {type(value).__name__}" if builtin is TypeError else f"{value}"
    with refused(builtin, f"LossScale({field})", expected, got, fix):
      make(field, value)
  for field in NUMBERS:
    fix = "mpjax.states.set_loss_scale(opt_state, scale) in the step"
    with refused(TypeError, f"LossScale({field})", "known before tracing", "Tracer", fix):
      jax.eval_shape(lambda x, field=field: make(field, x) and x, 1.0)
  limits, call = {"min_scale": 2, "max_scale": 8}, "mpjax.DynamicLossScale"
  mpjax.DynamicLossScale(init_scale=8, **limits | {"min_scale": 8})
  with refused(ValueError, f"{call}(min_scale)", "at most max_scale=8", "16", "limits around"):
    mpjax.DynamicLossScale(**limits | {"min_scale": 16})
  for scale in (1, 16):
    fix = "limits around init_scale"
    with refused(ValueError, f"{call}(init_scale)", "in [2, 8]", str(scale), fix):
      mpjax.DynamicLossScale(init_scale=scale, **limits)


# Labels: what is written there is read again.


def test_a_label_names_what_differs_from_the_defaults_and_says_what_its_configuration_is():
  hard = (2.0**-126, 2.0**126)
  wide = mpjax.DynamicLossScale(min_scale=hard[0], max_scale=hard[1], hysteresis=2)
  text = "dynamic(min_scale=1.17549435e-38,max_scale=8.50705917e+37,hysteresis=2)"
  other = mpjax.DynamicLossScale(max_scale=2.0**20, backoff_factor=0.25)
  backoff = "dynamic(backoff_factor=0.25,max_scale=1048576)"
  for config, written, limits, *expected in (
    (OFF, "none", hard, False, 2.0**126, 0.5),
    (mpjax.StaticLossScale(0.125), "static(scale=0.125)", hard, False, 0.125, 0.5),
    (DYNAMIC, "dynamic", (1.0, 2.0**24), True, 2.0**24, 0.5),
    (mpjax.DynamicLossScale(init_scale=4), "dynamic", (1.0, 2.0**24), True, 2.0**24, 0.5),
    (wide, text, hard, True, 2.0**126, 0.5),
    (other, backoff, (1.0, 2.0**20), True, 2.0**20, 0.25),
  ):
    for name in (None, "generator", "a=1,b"):
      (scale,) = scales_in(mpjax.loss_scaling(optax.sgd(0.1), config, name=name).init(jnp.ones(1)))
      assert scale.label == (written if name is None else f"{name}:{written}")
      assert (scale.name, scale.limits) == (name, limits)
      assert [scale.dynamic, scale.largest, scale.fields.get("backoff_factor", 0.5)] == expected


@pytest.mark.filterwarnings("ignore:.*power of two")
def test_label_keeps_the_limits_exactly():
  for low, high in np.exp(np.random.default_rng(0).uniform(-80, 80, (300, 2))):
    low, high = sorted((low, high))
    config = mpjax.DynamicLossScale(init_scale=low, min_scale=low, max_scale=high)
    fields = loss_scale.read_label(loss_scale.write_label(config))
    assert (fields["min_scale"], fields["max_scale"]) == (config.min_scale, config.max_scale)


def test_the_values_that_a_label_leaves_out_are_those_of_the_first_version():
  # These may not change: labels in checkpoints stand for them.
  assert loss_scale.read_label("skip") == {"scale": 1}
  assert loss_scale.read_label("dynamic") == {
    **{"growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1},
    **{"min_scale": 1, "max_scale": 2**24},
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherDefault(mpjax.DynamicLossScale):
  """The configuration of a version with another default."""

  growth_interval: int = 1000


def test_a_state_keeps_its_meaning_when_a_default_changes():
  saved = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale()).init(PARAMS)
  later = mpjax.loss_scaling(optax.sgd(0.1), OtherDefault())
  (label,) = later.init(PARAMS).loss_scale
  assert label == "dynamic(growth_interval=1000)"
  where = "mpjax.loss_scaling(inner).update(state)"
  with refused(ValueError, where, label, "'dynamic'", "set_loss_scale"):
    later.update(PARAMS, saved, PARAMS)
  # With the old value, the configuration is that of the saved state.
  same = mpjax.loss_scaling(optax.sgd(0.1), OtherDefault(growth_interval=2000))
  same.update(PARAMS, saved, PARAMS)


def test_skip_nonfinite_takes_the_steps_of_a_scale_of_1():
  skip, one = (
    mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9), config)
    for config in (SKIP, mpjax.StaticLossScale(1))
  )
  ours, theirs = skip.init(PARAMS), one.init(PARAMS)
  for gradient in (1e-30, np.nan, 1e30, np.inf, -2.0):
    grads = jax.tree.map(lambda p, g=gradient: jnp.full_like(p, g), PARAMS)
    found, ours = skip.update(grads, ours, PARAMS)
    expected, theirs = one.update(grads, theirs, PARAMS)
    assert_bit_equal(found, expected)
    assert_bit_equal(ours.inner_state, theirs.inner_state)
    assert_bit_equal(ours.loss_scale["skip"], theirs.loss_scale["static(scale=1)"])
  assert mpjax.loss_scaling_metrics(ours)["skipped"] == 2


def test_golden_tree():
  tx = mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9), name="all")
  state = tx.init({"w": jnp.ones(3)})
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  label = ".loss_scale['all:dynamic']"
  # Checkpoints have these fields. Each later one stands behind them, and has a default.
  fields = "scale good_steps hysteresis total skipped consecutive_skips floor_hits bad_updates"
  fields = [*fields.split(), "first_bad", "finite"]
  later = [*loss_scale.LossScaleState._field_defaults]
  assert paths == [
    *(f"{label}.{field}" for field in [*fields, *later]),
    ".inner_state[0].trace['w']",
  ]
  leaves = jax.tree.leaves(state)
  assert not any(x.weak_type for x in leaves)
  dtypes = ["float32", *["int32"] * 8, "bool"]
  assert [x.dtype.name for x in leaves[: len(fields)]] == dtypes
  for field, default in loss_scale.LossScaleState._field_defaults.items():
    start = getattr(state.loss_scale["all:dynamic"], field)
    assert isinstance(default, np.generic), field
    assert (start, start.dtype) == (default, default.dtype), field
  assert jax.tree.structure(pickle.loads(pickle.dumps(state))) == jax.tree.structure(state)
  off = mpjax.loss_scaling(optax.sgd(0.1), mpjax.NoLossScale()).init({"w": jnp.ones(3)})
  assert off.loss_scale["none"]._asdict() == {"total": 0}
  assert len(jax.tree.leaves(off)) == 1
