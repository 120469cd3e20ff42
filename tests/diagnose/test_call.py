"""What the arguments of a function are called, and how it is traced and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._diagnose.call import Call, compiled_as_written, positional_names
from tests.errors import refused
from tests.models.values import normal

X = jnp.ones((2, 2))


def names(fn, *args, **kwargs):
  return [(each.name, each.is_parameter) for each in Call(args, kwargs).arguments(fn)]


def test_arguments_have_the_names_of_the_signature_and_their_paths():
  def fn(params, batch, *rest):
    return params, batch, rest

  found = names(fn, {"w": X, "b": [X]}, {"x": X}, X, X)
  assert found == [
    ("params/b/0", True),
    ("params/w", True),
    ("batch/x", False),
    ("rest[0]", False),
    ("rest[1]", False),
  ]


def test_variables_of_linen_and_keyword_arguments():
  assert names(lambda params, x: x, X, X) == [("params", True), ("x", False)]
  tree = {"params": {"value": {"kernel": X}}, "batch_stats": {"mean": X}}
  found = names(lambda variables, **kwargs: variables, tree, z=X, y=X)
  assert found == [
    ("variables/batch_stats/mean", False),
    ("variables/params/value/kernel", True),
    ("y", False),
    ("z", False),
  ]


def test_variables_of_nnx_are_known_by_their_class():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  found = dict(names(lambda model, x: model(x), model, X))
  assert found["model/scale"]
  assert not found["model/mean"]
  assert not found["x"]


def test_a_function_without_a_signature():
  assert (positional_names(print, 1), positional_names(lambda *a: a, 1)) == (["args[0]"], ["a[0]"])


def test_static_arguments_are_none_and_numbers_of_numpy_are_arrays():
  fn = jax.jit(lambda x, axis: x.sum(axis), static_argnames="axis")
  assert mpjax.audit(fn)(X, 1).modules == ()
  taken = []
  mpjax.audit(lambda *args: taken.extend(args))(X, np.float32(2), 3)
  assert [isinstance(x, jax.core.Tracer) for x in taken] == [True, True, False]


def test_a_model_of_nnx_that_is_written_to_has_to_be_an_argument():
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  fix = "Pass the model as an argument: fn = lambda model, x"
  tune = functools.partial(mpjax.tune, tolerance=0.1)
  for tool in (mpjax.audit, mpjax.ranges, mpjax.find_nonfinite, tune):
    with refused(TypeError, "mpjax.", "nothing but its arguments", "BatchStat", fix):
      tool(lambda x: jnp.sum(model(x)))(X)
  call = Call(([model, model], X), {})  # What is shared is one.
  assert len(call.traced(lambda models, x: models[1](models[0](x))).program.in_avals) == 5


class Counted(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.down = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, x):
    return self.loss(x)

  def loss(self, x, *, is_train=True):
    self.norm.set_attributes(use_running_average=not is_train)
    return jnp.mean(jnp.log(self.down(self.norm(self.up(x))) ** 2))

  @nnx.jit
  def compiled_loss(self, x):
    return self.loss(x)


def counts(report):
  return [(row.kind, row.path, row.total) for row in report.groups]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["", "mixed_bfloat16"])
def test_a_model_of_nnx_that_is_called_is_the_first_argument(policy):
  model, x = Counted(nnx.Rngs(0)), normal(4, 8)
  called = mpjax.with_policy(model, policy) if policy else model
  before = jax.tree.map(jnp.array, nnx.state(model))

  def loss(self, x):
    return self.loss(x)

  expected = counts(mpjax.ranges(loss)(called, x))
  assert ("gradients", "up") in {row[:2] for row in expected}
  partial = functools.partial(called.loss, is_train=True)
  for callee in (called, called.loss, called.compiled_loss, partial):
    assert counts(mpjax.ranges(callee)(x)) == expected
    found = mpjax.find_nonfinite(callee)(0 * x)
    assert (found.operation, found.direction) == ("log", "forward")
  # The state of a model that is called stays as it is.
  jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


@pytest.mark.slow
def test_tune_takes_the_gradient_by_a_model_whose_loss_it_is_given():
  model, x = Counted(nnx.Rngs(0)), normal(4, 8)
  tune = functools.partial(mpjax.tune, tolerance=1.0)
  expected = tune(lambda model, x: model.loss(x))(model, x).modules
  assert {row.path for row in expected if row.error > 0} >= {"up", "down"}
  for callee in (model, model.loss, model.compiled_loss):
    assert tune(callee)(x).modules == expected


def rows_of(report):
  """Returns the modules of a comparison, and whether their outputs and gradients differ."""
  return [(row.path, row.output > 0, row.gradient > 0) for row in report.rows[:3]]


@pytest.mark.slow
def test_each_of_two_models_of_nnx_that_are_compared_is_an_argument_of_its_own_call(tmp_path):
  model, x = Counted(nnx.Rngs(0)), normal(4, 8)
  view = mpjax.with_policy(model, "mixed_bfloat16")
  before = jax.tree.map(jnp.array, nnx.state(model))
  expected = mpjax.compare(lambda model, x: model.loss(x), policy="mixed_bfloat16")(model, x)
  rows = rows_of(expected)
  assert rows == [("up", True, True), ("norm", True, True), ("down", True, True)]
  for f, g in ((view, model), (model, view), (view.loss, model.loss), (view, model.compiled_loss)):
    report = mpjax.compare(f, g)(x)
    assert rows_of(report) == rows
    assert report.notes == ()
  for callee in (model, model.loss):
    report = mpjax.compare(callee, policy="mixed_bfloat16")(x)
    assert rows_of(report) == rows
  # A plain function of the same arguments, and a file.
  same = mpjax.compare(model, lambda x: nnx.clone(model).loss(x))(x)
  assert same.results["result"] == 0
  mpjax.compare(model)(x).save(tmp_path / "run.npz")
  assert not mpjax.compare(model, tmp_path / "run.npz")(x).arguments
  jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_a_call_with_what_is_no_array():
  def fn(tree, n, *, name):
    assert (n, name) == (3, "a")
    tree["y"] = jnp.log(tree["x"])  # What is written to an argument is a result.
    return {"out": tree["x"] * n, "text": name}

  call = Call(({"x": np.ones(2, np.float32), "y": X}, 3), {"name": "a"})
  program, outputs, *_ = call.traced(fn)
  assert outputs == [("out",), ("y",)]
  out, _ = jax.core.eval_jaxpr(program.jaxpr, program.consts, *call.arrays)
  np.testing.assert_array_equal(out, [3, 3])


@pytest.mark.parametrize("names", [np.asarray(["a", "b"]), np.asarray([None, "b"])])
def test_arrays_of_text_and_objects_are_passed_as_they_are(names):
  def fn(x, names):
    assert names[1] == "b"
    return jnp.sum(jnp.log(x))

  assert mpjax.find_nonfinite(fn)(0 * X, names).operation == "log"
  assert mpjax.ranges(fn)(X, names)


def test_in_a_compiled_program_a_cast_and_back_rounds():
  def fn(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32) - x

  x = np.asarray([1 + 2**-9, 3.0], np.float32)
  error = compiled_as_written(fn)(x)
  assert error.tolist() == [-(2.0**-9), 0.0]


def test_in_a_compiled_program_an_overflow_is_not_left_out():
  run = compiled_as_written(lambda x: x.astype(jnp.float16).astype(jnp.float32))
  assert run(np.float32(1e5)) == np.inf
