"""What the devices add up and gather: read in the partitioned program, and seen in its numbers."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from tests.partitioned import collectives
from tests.programs import bits, mesh_of

pytestmark = pytest.mark.standard_promotion("dtypes")

with_policy = mpjax.linen.with_policy
BATCH = 8


def policy(half, weight_grad, **dtypes):
  return mpjax.Policy(
    compute_dtype=half, output_dtype="float32", weight_grad_dtype=weight_grad, **dtypes
  )


def placed(mesh, tree, spec=lambda x: ()):
  return jax.tree.map(
    lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec(x)))), tree
  )


def gradients(model, policy):
  """Returns a function of (params, x) for the gradients of a mean over the whole batch."""
  apply = with_policy(model, policy).apply
  return jax.grad(lambda params, x: jnp.mean(apply({"params": params}, x) ** 2))


def params_of(model, x):
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
  leaves, treedef = jax.tree.flatten(shapes)
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(
    treedef, [jnp.asarray(rng.integers(-1, 2, leaf.shape), jnp.float32) for leaf in leaves]
  )


def sizes(found):
  return collections.Counter(int(np.prod(shape)) for _, _, shape in found)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_gradients_are_added_up_in_float32(devices, kind):
  # Layers that both kinds of meshes take.
  model = nn.Sequential([nn.Conv(8, (3,)), nn.LayerNorm(), nn.Dense(5)])
  mesh = mesh_of(devices, kind)
  x = jnp.ones((BATCH, 6, 2))
  params = params_of(model, x)
  args = placed(mesh, params), placed(mesh, x, lambda x: ("data",))

  def found(weight_grad):
    reduced = collectives(gradients(model, policy("bfloat16", weight_grad)), *args)
    assert {op for op, _, _ in reduced} == {"all-reduce"}
    return [c for c in reduced if c.dtype == "bf16"], [c for c in reduced if c.dtype == "f32"]

  in_half, in_float32 = found("float32")
  assert not in_half
  assert sizes(in_float32) == sizes((0, 0, x.shape) for x in jax.tree.leaves(params))
  # Without it, kernels are added up in half; biases and the norm's parameters never are.
  in_half, in_float32 = found(None)
  kernels = [params["layers_0"]["kernel"], params["layers_2"]["kernel"]]
  assert sizes(in_half) == sizes((0, 0, x.shape) for x in kernels)
  assert sizes(in_float32) == {8: 3, 5: 1}


@pytest.mark.parametrize(
  ("stored", "compute", "asked", "reduced"),
  [
    ("float32", "float32", None, "f32"),
    ("float32", "bfloat16", None, "bf16"),
    ("float32", "float16", None, "f32"),
    ("float32", "bfloat16", "bfloat16", "bf16"),
    ("float32", "float16", "float16", "f16"),
    ("float32", "float16", "float32", "f32"),
    ("bfloat16", "bfloat16", "float32", "f32"),
  ],
)
def test_the_dtype_asked_for(devices, stored, compute, asked, reduced):
  # The bias has a float32 sum in any case.
  model, mesh = nn.Dense(5), mesh_of(devices)
  x = jnp.ones((BATCH, 8))
  params = placed(mesh, jax.tree.map(lambda p: p.astype(stored), params_of(model, x)))
  gradient = gradients(model, policy(compute, asked, param_dtype=stored))
  found = collectives(gradient, params, placed(mesh, x, lambda x: ("data",)))
  seen = {(op, dtype, int(np.prod(shape))) for op, dtype, shape in found}
  assert seen == {("all-reduce", reduced, 40), ("all-reduce", "f32", 5)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_what_is_gathered_of_sharded_parameters_is_half(devices, kind):
  # Parameters in float32, a part on each device: each is cast to half before it travels. A CPU
  # would multiply into a float32 result with float32 operands, so `tanh` computes the result here.
  model, mesh = nn.Sequential([nn.Dense(8), nn.Dense(8), nn.tanh]), mesh_of(devices, kind)
  x = jnp.ones((BATCH, 8))
  params = params_of(model, x)
  args = (
    placed(mesh, params, lambda p: ("data",) if p.ndim > 1 else ()),
    placed(mesh, x, lambda x: ("data",)),
  )
  for weight_grad, reduced in [(None, "bf16"), ("float32", "f32")]:
    found = collectives(gradients(model, policy("bfloat16", weight_grad)), *args)
    gathered = [c for c in found if c.op == "all-gather"]
    assert {c.dtype for c in gathered} == {"bf16"}
    assert {64} == set(sizes(gathered)), "both kernels, whole"
    sums = [c for c in found if c.op in ("all-reduce", "reduce-scatter")]
    biases = {params["layers_0"]["bias"].size, params["layers_1"]["bias"].size}
    assert {c.dtype for c in sums if np.prod(c.shape) not in biases} == {reduced}
    assert {c.dtype for c in sums if np.prod(c.shape) in biases} == {"f32"}


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_what_is_gathered_of_sharded_parameters_is_float8(devices, scaling):
  # Each part is quantised where it is, with the scale of all parts, and travels in 8 bits.
  model, mesh = nn.Sequential([nn.Dense(32), nn.Dense(16)]), mesh_of(devices)
  rng = np.random.default_rng(2)
  x = jnp.asarray(rng.integers(-7, 8, (BATCH, 16)), jnp.float32)
  params = jax.tree.map(lambda p: p * rng.integers(1, 8, p.shape), params_of(model, x))
  float8 = mpjax.Float8(scaling=scaling, power_of_two=True, skip=())
  apply = jax.jit(with_policy(model, policy("bfloat16", None, matmul=float8)).apply)
  args = (
    {"params": placed(mesh, params, lambda p: ("data",) if p.ndim > 1 else ())},
    placed(mesh, x, lambda x: ("data",)),
  )
  found = collectives(apply, *args)
  gathered = [c for c in found if c.op == "all-gather" and len(c.shape) > 1]
  kernels = {c.shape for c in gathered if c.dtype == "f8e4m3fn"}
  assert kernels == {(16, 32), (32, 16)}
  assert sum(int(np.prod(c.shape)) for c in gathered if c.dtype != "f8e4m3fn") <= 48, "scales"
  # The largest element of all devices is a maximum over them, of one number each.
  largest = {c.shape for c in found if c.op == "all-reduce" and c.dtype in ("f32", "bf16")}
  assert (largest == {()}) == (scaling == "tensor")
  # The bits are those of quantising what was gathered.
  assert bits(apply(*args)) == bits(apply({"params": params}, x))
