import dataclasses
import fractions
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.transforms._loss_scale_config import parse_label, write_label
from tests.errors import refused

ALL = (mpjax.NoLossScale(), mpjax.StaticLossScale(8), mpjax.DynamicLossScale())


@pytest.mark.case("A21", "A23", "B023")
def test_defaults():
  assert dataclasses.asdict(mpjax.DynamicLossScale()) == {
    "init_scale": 2.0**15,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
    "hysteresis": 1,
  }


@pytest.mark.case("A11")
@pytest.mark.parametrize("config", ALL)
def test_configuration_is_a_static_value(config):
  same = dataclasses.replace(config)
  assert same == config is not same
  assert hash(same) == hash(config)
  assert jax.tree.leaves(config) == [config], "a pytree would be traced"
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.scale = 1.0
  assert jax.jit(lambda c: len(repr(c)), static_argnums=0)(config) == len(repr(config))


def test_only_the_static_scale_is_positional():
  assert mpjax.StaticLossScale(4) == mpjax.StaticLossScale(scale=4)
  with pytest.raises(TypeError):
    mpjax.DynamicLossScale(4.0)  # type: ignore[misc]


@pytest.mark.case("A10")
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
  with pytest.warns(UserWarning, match="power of two"):
    assert mpjax.StaticLossScale(0.1).scale == float(np.float32(0.1)), "rounded to float32"


NUMBERS = ("init_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor")
COUNTS = ("growth_interval", "hysteresis")
WRONG = {
  "number": [True, "8", None, [8], np.ones(2), jnp.ones(1), 1j, np.bool_(1)],
  "integer": [True, 2.0, "2", None, jnp.asarray(2), np.ones((), int)],
  "infinite": [math.nan, math.inf, -math.inf, 1e300, np.float32("nan")],
  "limits": [0, -1.0, 0.0, 2.0**-127, 2.0**127, 1e-300],
  "count": [0, -1, 2**31],
  "growth": [1.0, 0.5, 0.0, -2.0, 1 + 1e-12, 2.0**127],
  "backoff": [1.0, 2.0, 0.0, -0.5, 1 - 1e-12, 2.0**-127],
}
"""Values of one kind, each wrong for the fields that are tested with it."""


def make(field, value):
  if field == "scale":
    return mpjax.StaticLossScale(value)
  return mpjax.DynamicLossScale(**{field: value})


@pytest.mark.case("A10", "A25", "A57", "B032")
def test_what_is_no_plain_number_is_a_type_error():
  for field, value in itertools.product([*NUMBERS, "scale"], WRONG["number"]):
    got, fix = "of type ", "pass any number here"
    with refused(TypeError, f"LossScale({field})", "a plain number", got, fix):
      make(field, value)
  for field in (*NUMBERS, "scale"):
    fix = "mpjax.set_loss_scale(opt_state, scale) in the step"
    with refused(TypeError, f"LossScale({field})", "known before tracing", "Tracer", fix):
      jax.eval_shape(lambda x, field=field: make(field, x) and x, 1.0)
  for field, value in itertools.product(COUNTS, WRONG["integer"]):
    got = f"of type {type(value).__name__}"
    with refused(TypeError, f"mpjax.DynamicLossScale({field})", "an integer", got, "int"):
      make(field, value)


@pytest.mark.case("A09", "A10", "A25", "B022", "B024", "B025", "B032", "A57")
def test_scales_outside_the_hard_limits():
  fields = ["init_scale", "min_scale", "max_scale", "scale"]
  for field, value in itertools.product(fields, WRONG["limits"]):
    expected = "positive number in [2^-126, 2^126]"
    with refused(ValueError, f"LossScale({field})", expected, repr(value), "power of two"):
      make(field, value)
  for field, value in itertools.product([*NUMBERS, "scale"], WRONG["infinite"]):
    with refused(ValueError, f"LossScale({field})", "finite", repr(value), "power of two"):
      make(field, value)


@pytest.mark.case("A25", "A57")
def test_values_out_of_range():
  call = "mpjax.DynamicLossScale"
  for field, value in itertools.product(COUNTS, WRONG["count"]):
    with refused(ValueError, f"{call}({field})", "from 1 to 2^31 - 1", str(value), "Use 1"):
      make(field, value)
  for name, expected, fix in (("growth", "above 1", "Use 2"), ("backoff", "below 1", "0.5")):
    for value in WRONG[name]:
      got = repr(float(np.float32(value)))
      with refused(ValueError, f"{call}({name}_factor)", expected, got, fix):
        make(f"{name}_factor", value)
  with refused(ValueError, f"{call}(min_scale)", "at most max_scale=8", "16", "Swap"):
    mpjax.DynamicLossScale(min_scale=16, max_scale=8)
  mpjax.DynamicLossScale(init_scale=8, min_scale=8, max_scale=8)
  for init_scale in (1, 16):
    where, got = f"{call}(init_scale)", str(init_scale)
    with refused(ValueError, where, "in [2, 8]", got, "Move init_scale"):
      mpjax.DynamicLossScale(init_scale=init_scale, min_scale=2, max_scale=8)


@pytest.mark.case("B031")
def test_other_than_powers_of_two_warn_once():
  dynamic, several = mpjax.DynamicLossScale, {"backoff_factor": 0.25, "min_scale": 0.37}
  for make, fields, *named in (
    (mpjax.StaticLossScale, {"scale": 400}, "scale=400"),
    (dynamic, {"init_scale": 1e5}, "init_scale=100000"),
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


# Labels: what is written there is read again.

DYNAMIC, OFF = mpjax.DynamicLossScale(), mpjax.NoLossScale()


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
    assert write_label(config) == written
    for name in (None, "generator", "a=1,b"):
      label = parse_label(write_label(config, name))
      assert (label.name, label.config, label.limits) == (name, written, limits)
      assert [label.dynamic, label.largest, label.fields.get("backoff_factor", 0.5)] == expected


@pytest.mark.filterwarnings("ignore:.*power of two")
def test_label_keeps_the_limits_exactly():
  for low, high in np.exp(np.random.default_rng(0).uniform(-80, 80, (300, 2))):
    low, high = sorted((low, high))
    config = mpjax.DynamicLossScale(init_scale=low, min_scale=low, max_scale=high)
    assert parse_label(write_label(config)).limits == (config.min_scale, config.max_scale)
