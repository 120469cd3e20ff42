"""Operations in no named scope have the path of the module whose parameter they take."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax


class Net(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
    self.head = nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x):
    x = nnx.relu(self.blocks[0](x))
    x = nnx.relu(self.blocks[1](x))
    return self.head(x)


X = jax.ShapeDtypeStruct((16, 8), "float32")
FLOPS = {"blocks/0": 2 * 16 * 8 * 8, "blocks/1": 2 * 16 * 8 * 8, "head": 2 * 16 * 8 * 4}


def flops(fn, *args):
  return {row.path: sum(row.flops.values()) for row in mpjax.audit(fn)(*args).modules}


def test_modules_of_nnx_without_a_policy():
  assert flops(lambda model, x: model(x), Net(nnx.Rngs(0)), X) == {
    "blocks/*": FLOPS["blocks/0"] + FLOPS["blocks/1"],
    "head": FLOPS["head"],
  }


def test_the_backward_pass_has_the_paths_of_the_lines_of_the_forward_pass():
  def loss(model, x):
    return (model(x) ** 2).sum()

  # What is written to a model is a result: a step of NNX returns no parameters.
  found = flops(lambda model, x: nnx.update(model, nnx.grad(loss)(model, x)), Net(nnx.Rngs(0)), X)
  # The first layer has no gradient of its input; both others have two products each.
  assert found["head"] == 3 * FLOPS["head"]
  assert sum(found.values()) == 2 * FLOPS["blocks/0"] + 3 * FLOPS["blocks/1"] + 3 * FLOPS["head"]


def test_trees_of_parameters_in_plain_functions():
  def fn(params, x):
    for name in ("first", "second"):
      x = jnp.tanh(x @ params[name]["w"])
    return x

  w = jax.ShapeDtypeStruct((8, 8), "float32")
  found = mpjax.audit(fn)({"first": {"w": w}, "second": {"w": w}}, X)
  assert [row.path for row in found.modules] == ["first", "second"]


def test_a_scope_and_a_policy_say_it_better():
  def fn(params, x):
    with jax.named_scope("scope"):
      return x @ params["layer"]["w"]

  w = jax.ShapeDtypeStruct((8, 8), "float32")
  assert [row.path for row in mpjax.audit(fn)({"layer": {"w": w}}, X).modules] == ["scope"]

  def policied(model, x):
    return mpjax.nnx.with_policy(model, "mixed_bfloat16")(x)

  assert set(flops(policied, Net(nnx.Rngs(0)), X)) == {"blocks/*", "head"}


@pytest.mark.standard_promotion
def test_a_leak_is_in_the_module_whose_parameter_it_takes():
  def fn(params, x):
    h = x @ params["up"]["w"]
    h = h + params["up"]["b"]
    return h @ params["down"]["w"]

  half = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  wide = jax.ShapeDtypeStruct((8,), "float32")
  params = {"up": {"w": half, "b": wide}, "down": {"w": half}}
  (leak,) = mpjax.audit(fn)(params, jax.ShapeDtypeStruct((16, 8), "bfloat16")).leaks
  assert (leak.path, leak.operation, leak.cause.name) == ("up", "add", "params/up/b")
