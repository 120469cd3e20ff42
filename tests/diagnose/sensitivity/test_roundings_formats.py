"""The errors of products in a format: quantising an operand is one rounding."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

import mpjax
from tests.matmul.test_recipes import BLOCKS, INT8

FORMATS = {
  "float8": mpjax.Float8(skip=()),
  "float8 row": mpjax.Float8(skip=(), scaling="row"),
  "mxfp8": mpjax.MXFP8(),
  "nvfp4": mpjax.NVFP4(),
  "int8": mpjax.Int8(),
  "int8 gradients": mpjax.Int8(input_grad="int8", weight_grad="int8"),
  "own": INT8,
  "own blocks": BLOCKS,
}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
kinds = pytest.mark.parametrize("kind", ["model", "layers"])
X = jax.random.normal(jax.random.key(0), (64, 64))


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(64)(nn.relu(nn.Dense(64)(x)))


PARAMS = Model().init(jax.random.key(1), X)


def loss_of(model):
  return lambda params, x: jnp.mean(model.apply(params, x) ** 2)


def relative_error(found, exact):
  one, other = (ravel_pytree(tree)[0] for tree in (found, exact))
  return float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))


def layers(w, x):
  carry, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
  return jnp.mean(carry**2)


def in_format(kind, format):
  """Returns a loss in float32 and in a format, and its arguments."""
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=format)
  if kind == "model":
    return loss_of(Model()), loss_of(mpjax.with_policy(Model(), policy)), (PARAMS, X)
  w = jax.random.normal(jax.random.key(3), (3, 64, 64)) / 8
  return layers, mpjax.autocast(layers, policy, data_argnums=1), (w, X)


@functools.cache
def report_of(kind, format):
  _, loss, args = in_format(kind, format)
  return mpjax.sensitivity(loss)(*args)


@pytest.mark.slow
@kinds
@formats
def test_the_prediction_is_within_a_factor_of_2(kind, format):
  report = report_of(kind, format)
  assert report.measured / 2 < report.predicted < 2 * report.measured


@pytest.mark.slow
@kinds
@formats
def test_the_measured_error_is_that_of_the_policy(kind, format):
  exact, loss, args = in_format(kind, format)
  error = relative_error(jax.grad(loss)(*args), jax.grad(exact)(*args))
  assert report_of(kind, format).measured == pytest.approx(error, rel=0.05)


@pytest.mark.slow
@kinds
@formats
def test_the_steps_of_a_recipe_are_neither_decisions_nor_left_out(kind, format):
  report = report_of(kind, format)
  assert report.not_followed == ()
  assert {row.operation for row in report.decisions} <= {"gt"}  # The ReLU of the model.


@pytest.mark.slow
@kinds
@formats
def test_a_healthy_model_needs_no_cure(kind, format):
  report = report_of(kind, format)
  assert report.cures == ()
  assert max(row.amplification for row in report.roundings) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "wanted"),
  {
    "float8": {"float8_e4m3fn", "float8_e5m2"},
    "mxfp8": {"mxfp8"},
    "nvfp4": {"nvfp4"},
    "int8": {"int8"},
    "own blocks": {"int4"},
  }.items(),
)
def test_a_rounding_has_the_name_of_its_format(name, wanted):
  rows = report_of("layers", FORMATS[name]).roundings
  assert {row.dtype for row in rows if row.operation == "format_rounding"} == wanted


@pytest.mark.slow
def test_a_module_in_float32_rounds_no_operand():
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.MXFP8())
  model = mpjax.with_policy(Model(), policy, rules=[mpjax.Rule("float32", path="Dense_0")])
  rows = mpjax.sensitivity(loss_of(model))(PARAMS, X).roundings
  assert {row.path for row in rows if row.operation == "format_rounding"} == {"Model/Dense_1"}
