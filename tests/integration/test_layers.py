"""The layers of Linen and of NNX under a policy, one by one."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.linen.probes import KEY, X, dtypes
from tests.models import layers
from tests.models.catalogue import LAYERS, applied, linen, nnx_
from tests.models.values import normal
from tests.programs import bits, dtypes_of, products, run

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

HALF = ["bfloat16", "float16"]
FRAMEWORKS = pytest.mark.parametrize("framework", ["linen", "nnx"])
F32 = jnp.dtype("float32")


def under(layer, policy):
  """Returns a function of parameters, other variables and inputs; None is no policy at all."""
  return layer.call("plain" if policy is None else "with_policy", policy)


def traced(layer, policy, inputs):
  """Returns the jaxpr of a layer's call, and the shape of its output."""
  params, rest, _ = layer.arguments()
  program, (out, _) = jax.make_jaxpr(under(layer, policy), return_shape=True)(params, rest, inputs)
  return program, out


def operands(program):
  return [p.dtypes for p in products(program)]


# Tables


@pytest.mark.parametrize("half", HALF)
@FRAMEWORKS
def test_embed_gathers_what_is_stored_and_casts_the_rows(framework, half):
  layer, policy = LAYERS[f"{framework}/embed"], f"c={half},o={half}"
  stored, rest, ids = layer.arguments()
  (table,) = jax.tree.leaves(stored)
  program, out = traced(layer, policy, ids)
  assert dtypes_of(program, "gather") == {"float32"}
  assert out.dtype == half

  # The cotangents of one token add up in float32: 300 times 1 + 2^-7 is not rounded on the way.
  def loss(params):
    rows, _ = under(layer, policy)(params, rest, (np.ones(300, np.int32),))
    return jnp.sum(rows.astype("float32") * (1 + 2.0**-7))

  rows, gradient = run(lambda p: (under(layer, policy)(p, rest, ids)[0], jax.grad(loss)(p)), stored)
  np.testing.assert_array_equal(rows, np.asarray(table)[ids].astype(half))
  np.testing.assert_array_equal(jax.tree.leaves(gradient)[0][1], np.full(8, 300 * (1 + 2.0**-7)))


# Norms


class MyNorm(nn.LayerNorm):
  """Somebody's own version."""


NORMS = {name: layer for name, layer in LAYERS.items() if layer.norm}
NORMS["somebody's own"] = linen(MyNorm, LAYERS["linen/layer_norm"].arguments()[2], applied())


def finely(tree):
  """Returns a state of values that float32 has, and half rounds: of 2^12 scales, 2^8 means."""
  sizes = {"scale": 2.0**12, "mean": 2.0**8, "var": 2.0**14}

  def leaf(path, x):
    names = jax.tree_util.keystr(path)
    size = next((size for name, size in sizes.items() if name in names), 1.0)
    return np.full(x.shape, size * (1 + 2.0**-12), x.dtype)

  return jax.tree_util.tree_map_with_path(leaf, tree)


@pytest.mark.slow
def test_norms_reduce_in_float32_and_use_what_they_store_unrounded():
  states, ways = {}, {}
  for name, layer in NORMS.items():
    params, rest, (x,) = layer.arguments()
    states[name] = finely(params), finely(rest)
    x = jnp.linspace(200.0, 400.0, x.size).reshape(x.shape)  # 300² is more than float16 holds.
    ways[name] = {half: (f"c={half},o={half}", (x.astype(half),)) for half in HALF}
    # Both compute in float32, from the same low-precision input, and ours rounds once.
    for half in HALF:
      ways[name][f"plain {half}"] = None, (x.astype(half).astype("float32"),)

  def every(states):
    return {
      name: {way: under(layer, policy)(*states[name], x) for way, (policy, x) in ways[name].items()}
      for name, layer in NORMS.items()
    }

  found, violations = run(every, states), []
  for (name, layer), half in itertools.product(NORMS.items(), HALF):
    (ours, state), (plain, wanted) = found[name][half], found[name][f"plain {half}"]
    program, _ = traced(layer, *ways[name][half])
    if dtypes_of(program, "reduce_sum", "rsqrt") != {"float32"}:
      violations.append(f"{name}, {half}: reduces in half")
    if bits(ours) != bits(plain.astype(half)) or not np.isfinite(plain).all():
      violations.append(f"{name}, {half}: is not the float32 norm of what is stored, rounded once")
    if bits(state) != bits(wanted):
      violations.append(f"{name}, {half}: other statistics than in float32")
  assert violations == []


# Cells


@pytest.mark.slow
def test_what_is_told_of_a_cell_over_time_before_it_runs():
  # To tell the dtypes of caches modules are called in half there, and a loop starts in float32.
  class Model(nn.Module):
    @nn.compact
    def __call__(self, xs):
      xs = self.perturb("bump", nn.Dense(3)(xs))
      return nn.RNN(nn.LSTMCell(3))(xs)

  model, xs = Model(), jnp.stack([X] * 4, axis=1)
  ours = mpjax.linen.with_policy(model, "mixed_bfloat16")
  wanted = dtypes(jax.eval_shape(model.init, KEY, xs))
  for way in (ours.init, ours.lazy_init):
    assert dtypes(jax.eval_shape(way, KEY, xs)) == wanted
  with mpjax.linen.policy_scope("mixed_bfloat16"):
    assert dtypes(jax.eval_shape(model.init, KEY, xs)) == wanted


# Attention


@pytest.mark.parametrize("half", HALF)
@FRAMEWORKS
def test_a_fully_masked_row_stays_finite(framework, half):
  attention, x = layers.LAYERS["attention"], normal(1, 8, 16)
  mask = np.tril(np.ones((1, 1, 8, 8), bool))
  mask[..., -1, :] = False
  layer = {
    "linen": linen(attention.linen, (x,), applied(mask=mask)),
    "nnx": nnx_(attention.nnx, (x,), lambda model, x: model(x, mask=mask)),
  }[framework]
  stored, rest, inputs = layer.arguments()

  def loss(params, policy=f"mixed_{half}"):
    return under(layer, policy)(params, rest, inputs)[0].mean()

  wanted, (out, grads) = run(lambda p: (loss(p, None), jax.value_and_grad(loss)(p)), stored)
  np.testing.assert_allclose(out, wanted, atol=0.002)
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


# Layers around layers


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@FRAMEWORKS
def test_a_computed_weight_is_computed_in_float32_and_used_in_low_precision(framework, name):
  layer = LAYERS[f"{framework}/{name}"]
  # Those of NumPy could not be written to while NNX is traced.
  params, start, inputs = jax.tree.map(jnp.asarray, layer.arguments())
  program, out = traced(layer, "mixed_bfloat16", inputs)
  assert out.dtype == F32
  # The layer itself is in low precision, and it comes last, as is the layer before a spectral
  # norm. The matmuls that compute the weight are between them.
  *others, last = operands(program)
  first = others[:1] if name == "spectral_norm" else []
  assert {last, *first} == {("bfloat16", "bfloat16")}
  assert set(others[len(first) :]) <= {("float32", "float32")}
  assert dtypes_of(program, "rsqrt", "sqrt", "reduce_sum") <= {"float32"}

  def steps(policy, rest):
    for _ in range(3):
      out, rest = under(layer, policy)(params, rest, inputs)
    return out, rest

  (ours, state), (plain, wanted) = run(
    lambda rest: (steps("mixed_bfloat16", rest), steps(None, rest)), start
  )
  # It never sees a rounded weight, so nothing drifts.
  assert bits(state) == bits(wanted)
  assert set(jax.tree.leaves(dtypes(state))) <= {"float32", "key<fry>", "uint32"}
  np.testing.assert_allclose(ours, plain, rtol=0.02, atol=0.02)
  gradient = jax.grad(lambda p: under(layer, "mixed_bfloat16")(p, start, inputs)[0].sum())
  assert dtypes(jax.eval_shape(gradient, params)) == dtypes(params)


# Dropout


@FRAMEWORKS
def test_a_dropout_mask_does_not_depend_on_the_policy_nor_on_the_kind_of_its_rate(framework):
  ones = np.ones((4, 8), np.float32)
  for rate in (0.5, np.float32(0.5), np.float64(0.5)):
    layer = {
      "linen": linen(functools.partial(nn.Dropout, rate, deterministic=False), (ones,), applied()),
      "nnx": nnx_(lambda rngs, rate=rate: nnx.Dropout(rate, rngs=rngs), (ones,)),
    }[framework]
    params, rest, _ = layer.arguments()

    def found(policy, dtype, layer=layer, state=(params, rest)):
      return under(layer, policy)(*state, (jnp.ones((4, 8), dtype),))[0]

    plain = found(None, "float32")
    assert 0 < np.count_nonzero(plain) < plain.size
    for half in HALF:
      assert bits(found(f"c={half}", "float32")) == bits(plain)
      low = found(f"c={half}", half)
      assert low.dtype == half
      assert bits(low.astype(F32)) == bits(plain)  # The same mask; 1 / 0.5 is exact.


@FRAMEWORKS
def test_a_dropout_is_not_widened_for_its_consumers(framework):
  x, add = np.ones((4, 8), np.float32), lambda h: 1 + h
  layer = {
    "linen": linen(
      lambda: nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False), add]),
      (x,),
      applied(),
    ),
    "nnx": nnx_(
      lambda rngs: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), add),
      (x,),
    ),
  }[framework]
  program, _ = traced(layer, "c=bf16", (x,))
  assert dtypes_of(program, "div") == {"bfloat16"}
