"""What the arguments of a function are called."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._diagnostics.arguments import Call, check_function, positional_names
from tests.errors import refused

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


def test_what_is_no_function():
  for fn, got in [
    (3, "3"),
    ("fn", "'fn'"),
    ({}, "dict"),
    (nn.Dense(2), "a model of Linen (Dense) without its variables"),
    (jax.jit(jnp.sin).lower(X).compile(), "a compiled one"),
  ]:
    with refused(TypeError, "mpjax.audit(fn)", "a function of arrays", got, "Pass"):
      check_function(fn, "mpjax.audit(fn)", "Pass it.")


def test_static_arguments_are_none_and_numbers_of_numpy_are_arrays():
  fn = jax.jit(lambda x, axis: x.sum(axis), static_argnames="axis")
  assert mpjax.audit(fn)(X, 1).modules == ()
  assert names(fn, X, 1) == [("x", False)]
  taken = []
  mpjax.audit(lambda *args: taken.extend(args))(X, np.float32(2), 3)
  assert [isinstance(x, jax.core.Tracer) for x in taken] == [True, True, False]


@pytest.mark.parametrize(
  "tool",
  [
    *(mpjax.audit, mpjax.ranges, mpjax.find_nonfinite),
    functools.partial(mpjax.tune, tolerance=0.1),
  ],
  ids=["audit", "ranges", "find_nonfinite", "tune"],
)
def test_a_model_of_nnx_that_is_written_to_has_to_be_an_argument(tool):
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  fix = "Pass the model as an argument: fn = lambda model, x"
  with refused(TypeError, "mpjax.", "nothing but its arguments", "BatchStat", fix):
    tool(lambda x: jnp.sum(model(x)))(X)
  program, _ = Call((model, X), {}).traced(lambda model, x: model(x))
  assert len(program.in_avals) == 5


def test_a_call_with_what_is_no_array():
  def fn(tree, n, *, name):
    assert (n, name) == (3, "a")
    tree["y"] = jnp.log(tree["x"])  # What is written to an argument is a result.
    return {"out": tree["x"] * n, "text": name}

  call = Call(({"x": np.ones(2, np.float32), "y": X}, 3), {"name": "a"})
  program, outputs = call.traced(fn)
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
