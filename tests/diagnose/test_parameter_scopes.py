"""Modules for functions that name none: those of the parameters that operations take."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._diagnose.call import Call
from mpjax._diagnose.parameter_scopes import (
  name_by_parameters,
  parameter_trees,
  with_parameter_scopes,
)
from mpjax._diagnose.ranges.ranges import gradient_of
from mpjax._jaxpr.graph import Graph
from tests.models.values import normal

ROWS = np.linspace(0.1, 1.0, 8, dtype=np.float32).reshape(2, 4)


def matmuls(loss, *args):
  """Returns the modules with matmuls in the gradient of a loss, in order, and their FLOPs."""
  program = Call(args, {}).traced(gradient_of(with_parameter_scopes(loss))).program
  flops = collections.Counter()
  for matmul, _, each in Graph(program).matmuls():
    flops[matmul.where.path] += each
  return dict(flops)


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(8, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.down = nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x):
    x = x + self.attn(self.norm(x))
    return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
  def __init__(self, rngs, blocks=2):
    self.embed = nnx.Embed(10, 8, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

  def __call__(self, ids):
    x = self.embed(ids)
    for block in self.blocks:
      x = block(x)
    return self.embed.attend(x)


IDS = np.arange(16).reshape(2, 8) % 10
# Kernels of 8 by 8 for 16 rows, and twice the products of 2 heads of 8 queries and 8 keys.
LAYERS = dict.fromkeys(("attn/query", "attn/key", "attn/value"), 2 * 16 * 8 * 8)
LAYERS |= {"attn": 2 * 2 * 2 * 2 * 8 * 8 * 4, "attn/out": 2 * 16 * 8 * 8}
LAYERS |= dict.fromkeys(("up", "down"), 2 * 16 * 8 * 16)
FLOPS = {f"blocks/{i}/{layer}": flops for i in range(2) for layer, flops in LAYERS.items()}
FLOPS["embed"] = 2 * 16 * 8 * 10


def squares(model, ids):
  return jnp.sum(model(ids) ** 2)


def test_a_transformer_of_nnx():
  model = Transformer(nnx.Rngs(0))
  graph, state = nnx.split(model)
  found = matmuls(squares, model, IDS)
  # Forward, and by kernel and data.
  assert [*found.items()] == [(path, 3 * flops) for path, flops in FLOPS.items()]
  assert matmuls(lambda state, ids: squares(nnx.merge(graph, state), ids), state, IDS) == found


@pytest.mark.slow
def test_the_line_of_a_matmul_in_a_scope_names_the_backward_pass_too():
  report = mpjax.ranges(squares)(Transformer(nnx.Rngs(0), blocks=1), IDS)
  assert "embed" in {group.path for group in report.of("float32")}


def dense(p, x):
  return x @ p["w"] + p["b"][None]


def layer(seed, n=4):
  return {"w": normal(4, n, seed=seed), "b": np.ones(n, np.float32)}


def test_a_tree_of_parameters_through_jit_remat_and_scan():
  params = {
    "first": layer(0),
    "stack": {"mlp": jax.tree.map(lambda *xs: np.stack(xs), layer(1), layer(2))},
    "last": {"inner": layer(3)},
  }

  def loss(params, x):
    x = jax.jit(dense)(params["first"], x)
    x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(dense(p, x)), None), x, params["stack"]["mlp"])
    return jnp.sum(jax.checkpoint(dense)(params["last"]["inner"], x) ** 2)

  assert list(matmuls(loss, params, ROWS)) == ["first", "stack/mlp", "last/inner"]


def test_a_loop_whose_carry_starts_as_a_constant():
  def loss(params, x):
    def body(h, _):
      return jnp.tanh(dense(params["second"], jnp.tanh(dense(params["first"], h)))), None

    return jnp.sum(jax.lax.scan(body, jnp.zeros((2, 4)), None, 3)[0]) + jnp.sum(x)

  params = {"first": layer(0), "second": layer(1)}
  assert list(matmuls(loss, params, ROWS)) == ["first", "second"]


def test_what_is_computed_from_parameters_alone_is_in_their_module():
  params = {"hot": layer(0), "lora": {"a": {"w": jnp.ones((4, 2))}, "b": {"w": jnp.ones((2, 4))}}}

  def loss(params, x):
    x = (1e3 * x) @ (1e3 * (params["hot"]["w"] / jnp.max(jnp.abs(params["hot"]["w"]))))
    return jnp.sum(x @ (params["lora"]["a"]["w"] @ params["lora"]["b"]["w"]))

  assert list(matmuls(loss, params, ROWS)) == ["hot", "lora"]


def test_named_scopes_stay_and_a_path_of_parameters_is_without_their_collection():
  def loss(variables, x):
    with jax.named_scope("mine"):
      x = dense(variables["params"]["first"], x)
    return jnp.sum(dense(variables["params"]["up"], x)) + jnp.sum(variables["stats"]["mean"])

  variables = {"params": {"first": layer(0), "up": layer(1)}, "stats": {"mean": jnp.ones(3)}}
  assert list(matmuls(loss, variables, ROWS)) == ["mine", "up"]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
@pytest.mark.usefixtures("collect")  # It looks for garbage among all objects.
def test_the_same_numbers(wrap):
  params = {"first": layer(0), "second": layer(1)}

  def loss(params, x, *, name="a"):
    x = jax.nn.gelu(jax.nn.relu(dense(params["first"], x)))
    assert name == "b"  # What is no array is passed and returned as it is.
    return jnp.sum(jax.jit(dense)(params["second"], x)), {"name": name, "steps": 3}

  plain = lambda params: loss(params, ROWS, name="b")[0]  # noqa: E731

  def scoped(params):
    value, aux = with_parameter_scopes(loss)(params, ROWS, name="b")
    assert aux == {"name": "b", "steps": 3}
    return value

  with jax.checking_leaks():  # No tracer is kept beyond its trace.
    want, got = (jax.tree.leaves(wrap(f)(params)) for f in (plain, scoped))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


# Graphs in which nothing was named.


@pytest.mark.standard_promotion
def test_a_leak_is_in_the_module_whose_parameter_it_takes():
  def fn(params, x):
    h = x @ params["up"]["w"]
    h = h + params["up"]["b"]
    return h @ params["down"]["w"]

  half = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  wide = jax.ShapeDtypeStruct((8,), "float32")
  params = {"up": {"w": half, "b": wide}, "down": {"w": half}}
  found = mpjax.audit(fn)(params, jax.ShapeDtypeStruct((16, 8), "bfloat16"))
  assert [row.path for row in found.modules] == ["up", "down"]
  (leak,) = found.leaks
  assert (leak.path, leak.operation, leak.cause) == ("up", "add", "params/up/b")


def test_parameters_that_devices_gather_are_those_of_their_module():
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

  def local(params, x):
    for name in ("up", "down"):
      x = x @ jax.lax.all_gather(params[name]["w"], "i", tiled=True)
    return x

  specs = {"mesh": mesh, "in_specs": jax.P("i"), "out_specs": jax.P("i")}
  params = {name: {"w": jnp.ones((8, 8))} for name in ("up", "down")}
  x = normal(2, 8)
  fn = jax.shard_map(lambda *args: local(*args), **specs)
  rows = mpjax.audit(lambda params, x: fn(params, x))(params, x).modules
  assert [(row.path, row.params) for row in rows] == [("up", ("float32",)), ("down", ("float32",))]
  ranges = mpjax.ranges(lambda params, x: fn(params, x))(params, x)
  assert [(g.path, g.total) for g in ranges.of("activations")] == [("up", 16), ("down", 16)]


def test_casts_and_loops_are_in_the_module_whose_parameter_they_take():
  def fn(params, x):
    w = params["up"]["w"].astype(jnp.float16)
    return jax.lax.scan(lambda c, _: (c @ w, None), x, None, 3)[0]

  x = jnp.ones((2, 3), jnp.float16)
  graph = Graph(jax.make_jaxpr(fn)({"up": {"w": jnp.ones((3, 3))}}, x), ["tree/up/w", "x"])
  name_by_parameters(graph, [("up",), ()])
  named = {each.name: each.where.path for each in graph.computing()}
  assert named == {"convert_element_type": "up", "dot_general": "up"}
  assert {*parameter_trees(graph)} == {"tree/"}  # What is in it too, of any name, is a parameter.


GRADIENTS = {
  "gradient": nnx.grad(squares),
  "of remat": nnx.grad(nnx.remat(squares)),
  # What is written to a model is a result: a step of NNX returns no parameters.
  "step": lambda model, ids: nnx.update(model, nnx.grad(squares)(model, ids)),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_parameters_are_in_the_module_of_the_parameter(gradient):
  """All layers of a model of NNX are called by the same lines, and some have the same input."""
  rows = mpjax.audit(gradient)(Transformer(nnx.Rngs(0)), IDS).modules
  assert {row.path: row.flops for row in rows} == {path: 3 * n for path, n in FLOPS.items()}


def test_matmuls_under_a_policy_are_in_the_modules_of_those_without():
  def policied(model, ids):
    return mpjax.nnx.with_policy(model, "mixed_bfloat16")(ids)

  for fn in (policied, lambda model, ids: model(ids)):
    rows = mpjax.audit(fn)(Transformer(nnx.Rngs(0)), IDS).modules
    assert {row.path: row.flops for row in rows} == FLOPS


def test_a_product_of_a_value_with_itself_is_in_no_layer_that_uses_the_value():
  def loss(params, x):
    h = jnp.tanh(x @ params["up"]["w"])
    return jnp.sum(h @ h.T) + jnp.sum(h @ params["down"]["w"])

  params = {"up": {"w": jnp.ones((4, 8))}, "down": {"w": jnp.ones((8, 5))}}
  rows = mpjax.audit(jax.grad(loss))(params, ROWS).modules
  # The gradient of a sum needs no result of the forward pass.
  flops = {"up": 2 * (2 * 2 * 4 * 8), "": 2 * (2 * 2 * 2 * 8), "down": 2 * (2 * 2 * 8 * 5)}
  assert {row.path: row.flops for row in rows} == flops
