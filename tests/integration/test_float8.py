"""`mixed_float8` in Linen, NNX and autocast: layers, training, and what a GPU would run."""

import collections
import functools
import pathlib
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import mpjax
from tests.models.values import filled, shapes
from tests.programs import bits, products

ALL = mpjax.Float8(skip=())
POLICY = mpjax.Policy(compute_dtype="bfloat16", output_dtype="float32", matmul=ALL)
EXACT = mpjax.Policy(
  compute_dtype="bfloat16",
  output_dtype="float32",
  matmul=mpjax.Float8(skip=(), power_of_two=True),
)
FORWARD = ("float8_e4m3fn", "float8_e4m3fn")
BACKWARD = ("float8_e5m2", "float8_e4m3fn")
HALF = ("bfloat16", "bfloat16")


class Linen(nn.Module):
  """Every layer that is in float8, and those that are not."""

  size: int = 32

  @nn.compact
  def __call__(self, ids):
    n = self.size
    embed = nn.Embed(2 * n, n, name="embed")
    x = embed(ids)
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(h, h)
    h = nn.gelu(nn.Dense(2 * n, name="up")(nn.LayerNorm()(x)))
    h = nn.DenseGeneral((2, n), name="general")(h)
    x = x + nn.Einsum((2, n, n), "bthd,hde->bte", name="einsum")(h)
    x = nn.Conv(n, (3,), name="conv")(x)
    return nn.Dense(2 * n, name="head")(x) + embed.attend(x)


class OfNnx(nnx.Module):
  def __init__(self, n=32):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(2 * n, n, rngs=rngs)
    self.norm, self.last = nnx.LayerNorm(n, rngs=rngs), nnx.LayerNorm(n, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, n, decode=False, rngs=rngs)
    self.up, self.head = nnx.Linear(n, 2 * n, rngs=rngs), nnx.Linear(n, 2 * n, rngs=rngs)
    self.general = nnx.LinearGeneral(2 * n, (2, n), rngs=rngs)
    self.einsum = nnx.Einsum("bthd,hde->bte", (2, n, n), (n,), rngs=rngs)
    self.conv = nnx.Conv(n, n, (3,), rngs=rngs)

  def __call__(self, ids):
    x = self.embed(ids)
    x = x + self.attention(self.norm(x))
    x = x + self.einsum(self.general(nnx.gelu(self.up(self.last(x)))))
    x = self.conv(x)
    return self.head(x) + self.embed.attend(x)


IDS = np.arange(16, dtype=np.int32).reshape(2, 8) % 11


@functools.cache
def linen_variables():
  return Linen().init(jax.random.key(0), IDS)


split_of_nnx = functools.cache(lambda: nnx.split(OfNnx()))


def of_first_token(logits):
  return jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def of_linen(policy, rules=()):
  """A loss of parameters, and the parameters."""
  model = mpjax.linen.with_policy(Linen(), policy, rules)
  return lambda v: of_first_token(model.apply(v, IDS)), linen_variables()


def of_nnx(policy, rules=()):
  graphdef, state = split_of_nnx()

  def loss(state):
    model = mpjax.nnx.with_policy(nnx.merge(graphdef, state), policy, rules)
    return of_first_token(model(IDS))

  return loss, state


def in_scope(policy, rules=()):
  def loss(v):
    with mpjax.linen.policy_scope(policy, rules):
      return of_first_token(Linen().apply(v, IDS))

  return loss, linen_variables()


FACES = {"linen": of_linen, "nnx": of_nnx, "scope": in_scope}
faces = pytest.mark.parametrize("face", FACES.values(), ids=FACES)


def counted(loss, params):
  return collections.Counter(p.dtypes for p in products(jax.make_jaxpr(jax.grad(loss))(params)))


@faces
def test_dense_layers_and_projections_are_in_float8_forward_and_backward(face):
  """Four projections and four layers. Attention's own two matmuls, the convolution and `attend`
  are not, nor are their gradients."""
  assert counted(*face(POLICY)) == {FORWARD: 8, BACKWARD: 16, HALF: 3 * (2 + 1 + 1)}


def test_a_matmul_of_an_embedding_that_is_jitted_is_one():
  class Jitted(nn.Embed):
    def attend(self, query):
      return jax.jit(jnp.matmul)(query, self.embedding.T)

  class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids):
      embed = Jitted(64, 32)
      return embed.attend(embed(ids))

  model = mpjax.linen.with_policy(Tied(), POLICY)
  variables = jax.eval_shape(model.init, jax.random.key(0), IDS)
  assert [x.reason for x in mpjax.audit(model.apply)(variables, IDS).float8] == [
    "it is an embedding"
  ]


@faces
def test_the_preset_leaves_out_what_is_too_small(face):
  both = (face(policy) for policy in ("mixed_float8", "mixed_bfloat16"))
  found, wanted = (jax.make_jaxpr(jax.grad(loss))(params) for loss, params in both)
  assert str(found) == str(wanted)


@faces
def test_rules_take_float8_away_and_give_it(face):
  without = [mpjax.Rule("mixed_bfloat16", path="head"), mpjax.Rule("float32", path="up")]
  float32 = ("float32", "float32")
  assert counted(*face(POLICY, without)) == {FORWARD: 6, BACKWARD: 12, HALF: 15, float32: 3}
  given = [mpjax.Rule(POLICY, path="head")]
  assert counted(*face("mixed_bfloat16", given)) == {FORWARD: 1, BACKWARD: 2, HALF: 33}


def test_gradients_are_near_those_of_float32():
  (loss, params), (plain, _) = mlp(POLICY), mlp("float32")
  wanted, float8 = (jax.jit(jax.grad(each))(params, X) for each in (plain, loss))
  # Two digits of e5m2 are an error of up to 1/8 for each number.
  error = optax.tree.norm(jax.tree.map(jnp.subtract, float8, wanted))
  assert 1e-3 < error / optax.tree.norm(wanted) < 0.2
  assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, float8))


def test_parameters_stored_in_bfloat16():
  policy = mpjax.Policy(
    param_dtype="bfloat16", compute_dtype="bfloat16", output_dtype="float32", matmul=ALL
  )
  loss, variables = of_linen(policy)
  stored = policy.cast_to_param(variables)
  assert counted(loss, stored) == {FORWARD: 8, BACKWARD: 16, HALF: 12}
  grads = jax.eval_shape(jax.grad(loss), stored)
  assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.bfloat16, grads))


class TakesHalfAlone(nn.Module):
  """An attention whose kernel, as cuDNN's, raises for float32."""

  @nn.compact
  def __call__(self, x):
    q, k, v = (nn.DenseGeneral((2, 16), dtype="bfloat16", name=name)(x) for name in ("q", "k", "v"))
    if q.dtype == jnp.float32:
      raise NotImplementedError("q must be fp16, bf16 or fp8")
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return nn.DenseGeneral(32, axis=(-2, -1), dtype="bfloat16", name="out")(y)


def test_projections_of_a_kernel_that_takes_low_precision_alone():
  """Their module is traced in bfloat16, and its layers cast their parameters themselves."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 32)), jnp.float32)
  model = TakesHalfAlone()
  variables = shapes(model, x)

  def loss(variables):
    return jnp.sum(mpjax.linen.with_policy(model, POLICY).apply(variables, x) ** 2)

  assert counted(loss, variables) == {FORWARD: 4, BACKWARD: 4 + 1, HALF: 6}
  found = jax.make_jaxpr(jax.grad(loss))(variables)
  weights = [p.result for p in products(found) if p.dtypes == BACKWARD]
  assert sum(result.startswith("float32") for result in weights) == 4


# Training.


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(16)(nn.tanh(nn.Dense(32)(x)))


X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def mlp(policy=EXACT):
  model = mpjax.linen.with_policy(MLP(), policy)

  def loss_fn(params, x):
    return jnp.mean((model.apply(params, x) - x) ** 2)

  return loss_fn, filled(shapes(MLP(), X))


def trained(tx, steps=4, spoil=None, policy=EXACT):
  loss_fn, params = mlp(policy)
  state = tx.init(params)

  @jax.jit
  def step(params, state, x):
    loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  for i in range(steps):
    x = X if spoil is None or i != spoil[0] else spoil[1]
    params, state, loss = step(params, state, x)
  return params, state, loss


@pytest.mark.case("I21")
@pytest.mark.parametrize("policy", [EXACT, POLICY], ids=["power of two", "any"])
def test_a_loss_scale_changes_no_bit(policy):
  """The scales of gradients follow it: what is float8 is the same."""
  plain = trained(mpjax.loss_scaling(optax.adam(1e-2), mpjax.StaticLossScale(1)), policy=policy)
  scaled = trained(
    mpjax.loss_scaling(optax.adam(1e-2), mpjax.StaticLossScale(2**12)), policy=policy
  )
  assert bits(plain[0]) == bits(scaled[0])


@pytest.mark.case("B156")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_with_an_inf_is_skipped(bad):
  spoiled = X.copy()
  spoiled[3, 4] = bad
  tx = mpjax.loss_scaling(optax.adam(1e-2), mpjax.StaticLossScale(2**10))
  params, state, _ = trained(tx, steps=4, spoil=(2, spoiled))
  metrics = mpjax.loss_scaling_metrics(state)
  assert int(metrics["skipped"]) == 1
  assert bits(params) == bits(trained(tx, steps=3)[0])


def test_it_trains_inside_of_wrappers():
  loss_fn, start = mlp()
  tx = mpjax.accumulate_gradients(mpjax.master_weights(optax.adam(1e-2)), 2)
  params, _, _ = trained(mpjax.loss_scaling(tx, mpjax.StaticLossScale(2**10)), steps=40)
  assert loss_fn(params, X) < 0.5 * loss_fn(start, X)


# What a GPU would run. These are skipped where JAX's plugin for CUDA is not installed.

TARGET = pathlib.Path(__file__).parents[2] / "benchmarks" / "targets" / "h200.txtpb"


@functools.cache
def h200():
  """A device that programs can be compiled for; None without JAX's plugin for CUDA."""
  try:
    return topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      topology="1x1x1",
      target_config=TARGET.read_text(encoding="utf-8"),
    ).devices[0]
  except Exception:
    return None


def compiled_for_h200(fn, *args, triton):
  if h200() is None:
    pytest.skip("needs jax-cuda12-plugin and jax-cuda12-pjrt: see `make gpu-hlo`")
  placed = SingleDeviceSharding(h200())
  given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
  options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": triton}
  lowered = jax.jit(fn).lower(*given)
  with warnings.catch_warnings():
    # What JAX kept of such a program can be loaded by a GPU alone; it is compiled again.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
    return lowered.compile(compiler_options=options).as_text()


def library_calls(text):
  """The calls of cuBLAS and cuDNN by name."""
  return collections.Counter(re.findall(r'custom_call_target="(__cu[^"]+)"', text))


def dots_in_fusions(text):
  """The dtypes of the operands of each matmul that Triton takes."""
  found = collections.Counter()
  for computation in re.split(r"\n\n", text):
    types = dict(re.findall(r"(%[\w.\-]+)(?: =|:) (\w+)\[", computation))
    for operands in re.findall(r" dot\((%[\w.\-]+), (%[\w.\-]+)\)", computation):
      found[tuple(types[name] for name in operands)] += 1
  return found


E4M3, E5M2 = "f8e4m3fn", "f8e5m2"


def of_every_size(scaling):
  """`"mixed_float8"` that leaves out no matmul for its size."""
  matmul = mpjax.Float8(skip=(), scaling=scaling)
  return mpjax.Policy(compute_dtype="bfloat16", output_dtype="float32", matmul=matmul)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_cublas_gets_float8(scaling):
  policy = of_every_size(scaling)
  found, half = (
    library_calls(compiled_for_h200(jax.grad(loss), params, triton=False))
    for loss, params in (of_linen(policy), of_linen("mixed_bfloat16"))
  )
  # XLA joins the projections of one input, of which there are three, in one matmul or not.
  float8 = found["__cublas$lt$matmul$f8"]
  assert 24 - 4 <= float8 <= 24
  # Attention's own matmuls and `attend` with their gradients.
  assert found["__cublas$lt$matmul"] + found["__cublas$gemm"] == 9
  assert sum(found.values()) <= sum(half.values()) + 4


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_triton_gets_float8(scaling):
  policy = of_every_size(scaling)
  found = dots_in_fusions(
    compiled_for_h200(jax.grad(of_linen(policy)[0]), of_linen(policy)[1], triton=True)
  )
  assert set(found) == {(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), ("bf16", "bf16")} & set(found)
  forward = found[E4M3, E4M3]
  backward = found[E5M2, E4M3] + found[E4M3, E5M2]
  assert 8 - 2 <= forward <= 8
  assert 16 - 2 <= backward <= 16
  assert found["bf16", "bf16"] == 9


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("triton", [False, True])
def test_the_traps_that_are_avoided(triton):
  """e5m2 by e5m2 and e4m3 by bfloat16 become matmuls of float16 and float32; and so may operands
  that are scaled on their way, which XLA is to find."""
  dn = (((1,), (0,)), ((), ()))

  def calls(a, b):
    def fn(x, w):
      return jax.lax.dot_general(x, w, dn, preferred_element_type=jnp.bfloat16)

    shapes = (jax.ShapeDtypeStruct((64, 64), d) for d in (a, b))
    text = compiled_for_h200(fn, *shapes, triton=triton)
    return library_calls(text)["__cublas$lt$matmul$f8"] + sum(
      n for pair, n in dots_in_fusions(text).items() if all(d.startswith("f8") for d in pair)
    )

  assert calls(jnp.float8_e4m3fn, jnp.float8_e4m3fn) == 1
  assert calls(jnp.float8_e5m2, jnp.float8_e4m3fn) == 1
  assert calls(jnp.float8_e4m3fn, jnp.bfloat16) == 0
