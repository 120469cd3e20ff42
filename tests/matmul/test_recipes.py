"""Recipes: matmuls of groups in float8, and a format of a user's, all of which is in this file."""

import dataclasses
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import mpjax
from mpjax._matmul.protocol import Scaled
from tests.autocast.rig import matmuls, under
from tests.errors import refused
from tests.format_oracle import normal
from tests.matmul.rig import FLOAT8
from tests.programs import with_gradients

# A recipe for int8: forward only, with the gradient of the matmul in the compute dtype.


@dataclasses.dataclass(frozen=True)
class Int8:
  name = "int8"
  block = None

  def __str__(self):
    return f"{__name__}:{type(self).__name__.upper()}"

  def why_not(self, depth, columns):
    return "too short" if depth < 8 else None

  def why_not_gradient(self, depth, *, of_weight):
    return "straight-through"

  def quantise(self, x, operand):
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=operand.summed, keepdims=True) / 127, 1e-30)
    return Scaled(jnp.round(x / scale).astype(jnp.int8), scale)

  def dot(self, multiply, left, right, dtype):
    return multiply(left, right, jnp.dtype("int32")).astype(dtype)


INT8 = Int8()
POLICY = mpjax.Policy(compute_dtype="bfloat16", output_dtype="float32", matmul=INT8)


# A recipe for four bits, in blocks with float32 scales. No library multiplies the format.


@dataclasses.dataclass(frozen=True)
class Blocks:
  name = "int4"
  block = 32

  def __str__(self):
    return f"{__name__}:BLOCKS"

  def why_not(self, depth, columns):
    return None

  def why_not_gradient(self, depth, *, of_weight):
    return None

  def quantise(self, x, operand):
    blocks = x.astype(jnp.float32).reshape(*x.shape[:2], -1, self.block)
    scale = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1) / 7, 1e-30)
    return jnp.round(blocks / scale[..., None]).astype(jnp.int8).reshape(x.shape), scale

  def dot(self, multiply, left, right, dtype):
    return multiply(left, right, jnp.dtype("float32")).astype(dtype)


BLOCKS = Blocks()


def of_linen(policy, rules):
  model = nn.Sequential([nn.Dense(32), nn.Dense(16)])
  variables = model.init(jax.random.key(0), np.ones((4, 16), np.float32))
  return mpjax.linen.with_policy(model, policy, rules).apply, variables


def of_nnx(policy, rules):
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs))
  graphdef, state = nnx.split(model)
  return lambda s, x: mpjax.nnx.with_policy(nnx.merge(graphdef, s), policy, rules)(x), state


def of_function(policy, rules):
  def fun(w, x):
    with jax.named_scope("last"):
      return x @ w[:, :16] @ w[:, 16:]

  return mpjax.autocast(fun, policy, rules=rules, data_argnums=1), normal(1, (16, 32))


FACES = {
  "linen": (of_linen, "layers_1"),
  "nnx": (of_nnx, "layers/1"),
  "autocast": (of_function, "last"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("face", "last"), FACES.values(), ids=FACES)
@pytest.mark.parametrize("given", [POLICY, str(POLICY)], ids=["policy", "text"])
def test_a_recipe_of_a_users_runs_and_is_audited(face, last, given):
  every = 2 if face is of_function else 1
  for policy, rules, int8 in (
    (given, (), 2),
    (given, [mpjax.Rule("mixed_bfloat16", path=f"**/{last}")], 2 - every),
    ("mixed_bfloat16", [mpjax.Rule(given, path=f"**/{last}")], every),
  ):
    fun, params = face(policy, rules)
    grad = jax.value_and_grad(lambda p, x, fun=fun: jnp.sum(fun(p, x) ** 2))
    x = normal(0, (4, 16))
    audit = mpjax.audit(grad)(params, x)
    flops = 2 * 4 * 16 * (16 if face is of_function else 32)
    assert audit.flops.get(("forward", "int8"), 0) == flops * int8
    assert any("int8" in row.dtype for row in audit.modules) is bool(int8)
    assert (audit.half_share, audit.format_share, audit.leaks) == (1.0, int8 / 5, ())
    assert matmuls(grad, params, x) == [("bfloat16", "bfloat16")] * (5 - int8)
    assert str(jax.make_jaxpr(grad)(params, x)).count("preferred_element_type=int32") == int8


@pytest.mark.slow
def test_what_int8_computes():
  # Small integers are exact, but for the largest number of an operand, which says the scale.
  x, w = (
    np.rint(127 * np.clip(normal(i, shape), -1, 1)) for i, shape in enumerate(((4, 16), (16, 32)))
  )
  x[:, 0] = w[0] = 127
  fun = mpjax.autocast(lambda w, x: (x @ w).astype(jnp.float32), POLICY, data_argnums=1)
  found, pull = jax.vjp(fun, w.astype(np.float32), x.astype(np.float32))
  np.testing.assert_array_equal(found, (x @ w).astype(ml_dtypes.bfloat16))
  half = mpjax.autocast(lambda w, x: (x @ w).astype(jnp.float32), "mixed_bfloat16", data_argnums=1)
  _, wanted = jax.vjp(half, w.astype(np.float32), x.astype(np.float32))
  for one, other in zip(pull(jnp.ones((4, 32))), wanted(jnp.ones((4, 32))), strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_what_blocks_of_a_users_compute():
  # Whole numbers, of which each block has the largest: all are exact.
  x, w = (np.rint(2 * normal(i, shape)).clip(-7, 7) for i, shape in enumerate(((40, 64), (64, 48))))
  x[:, ::32] = w[::32] = x[::32] = w[:, ::32] = 7
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=BLOCKS)
  fun = mpjax.autocast(lambda w, x: (x @ w).astype(jnp.float32), policy, data_argnums=1)
  found, pull = jax.vjp(fun, w, x)
  np.testing.assert_array_equal(found, (x @ w).astype(ml_dtypes.bfloat16))
  of_w, of_x = pull(7 * jnp.ones((40, 48)))
  np.testing.assert_allclose(of_w, x.T @ (7 * np.ones((40, 48))), rtol=2**-22)
  np.testing.assert_allclose(of_x, 7 * np.ones((40, 48)) @ w.T, rtol=2**-8)
  audit = mpjax.audit(fun)(w, x)
  assert [row.dtype for row in audit.formats] == ["int4, emulated"]


@pytest.mark.parametrize("of", [0, 1], ids=["weight", "input"])
@pytest.mark.parametrize("matmul", ["float8:skip=none", "mxfp8", "nvfp4", "int8", str(INT8)])
def test_a_tangent_has_no_derivative(matmul, of):
  # Of one operand alone: what is kept of the other one does not change with it.
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=matmul)
  layer = mpjax.autocast(lambda w, x: jnp.sum(jnp.sin(x @ w)), policy, data_argnums=1)
  operands = [normal(1, (32, 32)), normal(2, (4, 32))]

  def fun(operand):
    return layer(*operands[:of], operand, *operands[of + 1 :])

  def tangent(operand):
    return jax.jvp(fun, (operand,), (operand,))[1]

  for again in (jax.grad(tangent), lambda x: jax.jvp(tangent, (x,), (x,))):
    with refused(TypeError, "a matmul in", "first derivatives", "its tangent", "mixed_bfloat16"):
      jax.make_jaxpr(again)(operands[of])


def test_a_recipe_has_to_be_found_by_its_text():
  assert mpjax.Policy.parse(str(POLICY)) == pickle.loads(pickle.dumps(POLICY)) == POLICY
  other = dataclasses.make_dataclass("Other", [], bases=(Int8,), frozen=True, eq=True)()
  where, expected = "mpjax.Policy(matmul=...)", "a recipe 'package.module:NAME'"
  for matmul, builtin in (
    (other, TypeError),
    (f"{__name__}:NONE", ValueError),
    ("no:X", ValueError),
  ):
    with refused(builtin, where, expected, repr(matmul), "matmul=" if matmul is other else "str("):
      mpjax.Policy(compute_dtype="bfloat16", matmul=matmul)


class Uncast(Int8):
  def dot(self, multiply, left, right, dtype):
    return multiply(left, right, jnp.dtype("int32"))


class Unscaled(Int8):
  def quantise(self, x, operand):
    return x.astype(jnp.int8)


class Reshaped(Int8):
  def quantise(self, x, operand):
    return x.reshape(-1).astype(jnp.int8), None


UNCAST, UNSCALED, RESHAPED = Uncast(), Unscaled(), Reshaped()


@pytest.mark.parametrize(
  ("recipe", "parts"),
  [
    (UNCAST, ("dot(", "bfloat16", "float32[4, 32]", "multiply(left, right, dtype).astype(dtype)")),
    (UNSCALED, ("quantise(", "a tuple", "int8[4, 16]", "Return values, scale")),
    (RESHAPED, ("quantise(", "(4, 16)", "int8[64]", "Return values, scale")),
  ],
)
def test_what_a_recipe_returns_is_checked(recipe, parts):
  policy = dataclasses.replace(POLICY, matmul=recipe)
  layer = mpjax.autocast(lambda w, x: jnp.sum(x @ w), policy, data_argnums=1)
  with refused(TypeError, *parts):
    layer(normal(1, (16, 32)), normal(0, (4, 16)))


# Matmuls of groups in float8.

SIZES = np.array([5, 0, 7, 1], np.int32)  # Of 16 rows, of which three are in no group.


def grouped(w, x, sizes):
  return lax.ragged_dot(x.astype(jnp.float32), w, sizes)


def of_groups(recipe):
  """Returns what puts the matmuls of a function of (w, x, sizes) into a format."""
  return functools.partial(under, data=(1, 2), matmul=recipe)


def operands():
  experts = np.exp2(np.arange(4)).astype(np.float32)[:, None, None]
  x, g = normal(0, (16, 32)), normal(2, (16, 48), 1e-3)
  return normal(1, (4, 32, 48), 0.03) * experts, *(a.astype(ml_dtypes.bfloat16) for a in (x, g))


@pytest.mark.slow
def test_groups_under_transformations():
  (w, x, g), in_float8 = operands(), of_groups(FLOAT8["float8 row"])
  fun, remat = (with_gradients(f(in_float8(grouped))) for f in (jax.jit, jax.checkpoint))
  args = [
    np.stack([w, 2 * w]),
    np.stack([x, 2 * x]),
    np.stack([SIZES, SIZES[::-1]]),
    np.stack([g] * 2),
  ]
  mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")
  on_shards = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)

  def one(fun):  # Of the one example that a device has.
    return on_shards(lambda *args: jax.tree.map(lambda a: a[None], fun(*(a[0] for a in args))))

  ways = {
    "loop": lambda *args: jax.tree.map(lambda *a: jnp.stack(a), *map(fun, *args)),
    "vmap": jax.vmap(fun),
    "vmap of remat": jax.vmap(remat),
    "scan": lambda *args: lax.scan(lambda _, each: (None, fun(*each)), None, args)[1],
    "shard_map": one(fun),
    "shard_map inside": with_gradients(in_float8(one(grouped))),
  }
  made = jax.jit(lambda *args: {name: way(*args) for name, way in ways.items()})(*args)
  wanted = made.pop("loop")
  for name, results in made.items():
    for found, right in zip(results, wanted, strict=True):
      # The compiler may leave out a rounding to bfloat16 in one of them.
      found, right = (np.asarray(a, np.float32) for a in (found, right))
      np.testing.assert_allclose(found, right, rtol=2**-7, atol=1e-6, err_msg=name)
  # The result is linear in the weights: its tangent along them is itself, but for e4m3.
  layer = jax.jit(lambda w: jax.jvp(lambda w: in_float8(grouped)(w, x, SIZES), (w,), (w,)))
  y, change = layer(w)
  assert np.linalg.norm(change - y) < 0.1 * np.linalg.norm(y)


def test_which_groups_qualify():
  (w, x, _), in_float8 = operands(), of_groups(FLOAT8["float8 tensor"])

  def of_experts(w, x, sizes):
    return jax.nn.relu(grouped(w["up"], x, sizes)) @ w["down"]

  w = {"up": w, "down": normal(3, (48, 16))}
  grad = jax.grad(lambda w, x: jnp.sum(in_float8(of_experts)(w, x, SIZES) ** 2))
  audit = mpjax.audit(grad)(w, x)
  assert (audit.format_share, audit.leaks) == (1.0, ())
  assert {each.reason for each in audit.formats} == {""}

  def reasons(fun, w):
    return [each.reason for each in mpjax.audit(in_float8(fun))(w, x, SIZES).formats]

  def by_batch(w, x, sizes):
    return jax.vmap(grouped)(*(jnp.stack([a, a]) for a in (w, x, sizes)))

  assert reasons(grouped, normal(1, (4, 32, 20))) == ["N=20 is no multiple of 16"]
  assert reasons(by_batch, w["up"]) == ["its groups are others than those of lax.ragged_dot"]
