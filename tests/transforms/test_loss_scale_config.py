import dataclasses
import fractions
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.errors import check_error

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
  assert same == config
  assert hash(same) == hash(config)
  assert same is not config
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


@pytest.mark.filterwarnings("ignore:.*power of two")
def test_numbers_are_rounded_to_float32():
  assert mpjax.StaticLossScale(0.1).scale == float(np.float32(0.1))


def traced(make):
  """Calls `make` on a traced scalar."""
  return jax.jit(lambda x: make(x) and x)(1.0)


NUMBERS = ("init_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor")
COUNTS = ("growth_interval", "hysteresis")


@pytest.mark.case("A10", "A25", "A57", "B032")
@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(
  "value", [True, "8", None, [8], np.ones(()), jnp.ones(()), 1j, np.bool_(1)]
)
def test_what_is_no_plain_number_is_a_type_error(field, value):
  with pytest.raises(TypeError) as error:
    mpjax.DynamicLossScale(**{field: value})
  got, fix = f"of type {type(value).__name__}", "Pass a Python number"
  where = f"mpjax.DynamicLossScale({field})"
  check_error(error, where=where, expected="a plain number", got=got, fix=fix, builtin=TypeError)


@pytest.mark.case("A10", "A25", "A57", "B032")
@pytest.mark.parametrize("value", [True, np.ones(()), jnp.ones(()), "8", None])
def test_static_scale_must_be_a_plain_number(value):
  with pytest.raises(TypeError) as error:
    mpjax.StaticLossScale(value)
  check_error(
    error,
    where="mpjax.StaticLossScale(scale)",
    expected="a plain number",
    got=type(value).__name__,
    fix="set_loss_scale",
    builtin=TypeError,
  )


@pytest.mark.case("A10", "A25", "B032")
@pytest.mark.parametrize("field", NUMBERS)
def test_traced_numbers_are_refused(field):
  with pytest.raises(TypeError) as error:
    traced(lambda x: mpjax.DynamicLossScale(**{field: x}))
  where = f"mpjax.DynamicLossScale({field})"
  check_error(error, where=where, expected="known before tracing", got="Tracer", fix="number")
  with pytest.raises(TypeError):
    traced(mpjax.StaticLossScale)


@pytest.mark.case("A25", "A57")
@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [True, 2.0, "2", None, jnp.asarray(2), np.ones((), int)])
def test_what_is_no_integer_is_a_type_error(field, value):
  with pytest.raises(TypeError) as error:
    mpjax.DynamicLossScale(**{field: value})
  where = f"mpjax.DynamicLossScale({field})"
  got = f"of type {type(value).__name__}"
  check_error(error, where=where, expected="an integer", got=got, fix="int", builtin=TypeError)


@pytest.mark.case("A25", "A57")
@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_counts_out_of_range(field, value):
  with pytest.raises(ValueError) as error:
    mpjax.DynamicLossScale(**{field: value})
  where = f"mpjax.DynamicLossScale({field})"
  expected = "from 1 to 2^31 - 1"
  check_error(
    error, where=where, expected=expected, got=str(value), fix="Use 1", builtin=ValueError
  )


@pytest.mark.case("A09", "A10", "A25", "B022", "B024", "B025", "B032")
@pytest.mark.parametrize("field", ["init_scale", "min_scale", "max_scale", "scale"])
@pytest.mark.parametrize("value", [0, -1.0, 0.0, 2.0**-127, 2.0**127, 1e-300])
def test_scales_outside_the_hard_limits(field, value):
  with pytest.raises(ValueError) as error:
    mpjax.StaticLossScale(value) if field == "scale" else mpjax.DynamicLossScale(**{field: value})
  check_error(
    error,
    where=f"LossScale({field})",
    expected="positive number in [2^-126, 2^126]",
    got=repr(value),
    fix="power of two",
    builtin=ValueError,
  )


@pytest.mark.case("A10", "A25", "B032")
@pytest.mark.parametrize("field", [*NUMBERS, "scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, np.float32("nan")])
def test_numbers_that_are_not_finite_in_float32(field, value):
  with pytest.raises(ValueError) as error:
    mpjax.StaticLossScale(value) if field == "scale" else mpjax.DynamicLossScale(**{field: value})
  where = f"LossScale({field})"
  fix = "power of two"
  check_error(error, where=where, expected="finite", got=repr(value), fix=fix, builtin=ValueError)


@pytest.mark.case("A25", "A57")
@pytest.mark.parametrize("value", [1.0, 0.5, 0.0, -2.0, 1 + 1e-12, 2.0**127])
def test_growth_factor_must_grow(value):
  with pytest.raises(ValueError) as error:
    mpjax.DynamicLossScale(growth_factor=value)
  where = "mpjax.DynamicLossScale(growth_factor)"
  got = repr(float(np.float32(value)))
  check_error(error, where=where, expected="above 1", got=got, fix="Use 2", builtin=ValueError)


@pytest.mark.case("A25", "A57")
@pytest.mark.parametrize("value", [1.0, 2.0, 0.0, -0.5, 1 - 1e-12, 2.0**-127])
def test_backoff_factor_must_shrink(value):
  with pytest.raises(ValueError) as error:
    mpjax.DynamicLossScale(backoff_factor=value)
  where = "mpjax.DynamicLossScale(backoff_factor)"
  check_error(
    error,
    where=where,
    expected="below 1",
    got=repr(float(np.float32(value))),
    fix="0.5",
    builtin=ValueError,
  )


@pytest.mark.case("A25", "A57")
def test_limits_must_be_in_order():
  with pytest.raises(ValueError) as error:
    mpjax.DynamicLossScale(min_scale=16, max_scale=8)
  check_error(
    error,
    where="mpjax.DynamicLossScale(min_scale)",
    expected="at most max_scale=8",
    got="16",
    fix="Swap",
    builtin=ValueError,
  )


@pytest.mark.case("A25", "A57")
@pytest.mark.parametrize("init_scale", [1, 16])
def test_init_must_lie_between_the_limits(init_scale):
  with pytest.raises(ValueError) as error:
    mpjax.DynamicLossScale(init_scale=init_scale, min_scale=2, max_scale=8)
  check_error(
    error,
    where="mpjax.DynamicLossScale(init_scale)",
    expected="in [2, 8]",
    got=str(init_scale),
    fix="Move init_scale",
    builtin=ValueError,
  )


@pytest.mark.case("B031")
@pytest.mark.parametrize(
  ("make", "named"),
  [
    (lambda: mpjax.StaticLossScale(400), ["scale=400"]),
    (lambda: mpjax.DynamicLossScale(init_scale=1e5), ["init_scale=100000"]),
    (lambda: mpjax.DynamicLossScale(growth_factor=3), ["growth_factor=3"]),
    (
      lambda: mpjax.DynamicLossScale(backoff_factor=0.25, min_scale=0.37, growth_factor=1.5),
      ["min_scale=0.370000005", "growth_factor=1.5"],
    ),
  ],
)
def test_other_than_powers_of_two_warn_once(make, named):
  with pytest.warns(UserWarning, match="not a power of two") as caught:
    make()
  assert len(caught) == 1
  assert caught[0].filename == __file__, "the warning points at the caller"
  for field in named:
    assert field in str(caught[0].message)


def test_powers_of_two_do_not_warn():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    mpjax.DynamicLossScale(init_scale=2.0**-126, min_scale=2.0**-126, backoff_factor=0.125)
    mpjax.StaticLossScale(2**126)


def test_a_dynamic_scale_is_allowed_silently_outside_of_float16():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    mpjax.DynamicLossScale()
