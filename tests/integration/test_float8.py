"""`mixed_float8` in Linen, NNX and autocast: layers, training, and what a GPU would run."""

import collections
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding

import mpjax
from tests.errors import refused
from tests.models import parts
from tests.models.parts import Part, module
from tests.models.values import filled, shapes
from tests.programs import bits, products
from tests.scripts import benchmark

pytestmark = pytest.mark.standard_promotion("dtypes")

POLICY = mpjax.Policy(
  compute_dtype="bfloat16", output_dtype="float32", matmul=mpjax.Float8(skip=())
)
EXACT = dataclasses.replace(POLICY, matmul=mpjax.Float8(skip=(), power_of_two=True))
FORWARD = ("float8_e4m3fn", "float8_e4m3fn")
BACKWARD = ("float8_e5m2", "float8_e4m3fn")
HALF = ("bfloat16", "bfloat16")


def _logits(m, ids):
  x = m.embed(ids)
  h = m.norm(x)
  x = x + m.attention(h, h)
  x = x + m.einsum(m.general(jax.nn.gelu(m.up(m.last(x)))))
  x = m.conv(x)
  return m.head(x) + m.embed.attend(x)


MODEL = module(
  _logits,
  embed=Part(lambda _: nn.Embed(64, 32), lambda _, rngs: nnx.Embed(64, 32, rngs=rngs)),
  norm=parts.norm("LayerNorm", 32),
  attention=Part(
    lambda _: nn.MultiHeadDotProductAttention(2),
    lambda _, rngs: nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs),
  ),
  last=parts.norm("LayerNorm", 32),
  up=parts.dense(32, 64, bias=True),
  general=Part(
    lambda _: nn.DenseGeneral((2, 32)), lambda _, rngs: nnx.LinearGeneral(64, (2, 32), rngs=rngs)
  ),
  einsum=Part(
    lambda _: nn.Einsum((2, 32, 32), "bthd,hde->bte"),
    lambda _, rngs: nnx.Einsum("bthd,hde->bte", (2, 32, 32), (32,), rngs=rngs),
  ),
  conv=Part(lambda _: nn.Conv(32, (3,)), lambda _, rngs: nnx.Conv(32, 32, (3,), rngs=rngs)),
  head=parts.dense(32, 64, bias=True),
)
"""Every layer that is in float8, and those that are not."""

IDS = np.arange(16, dtype=np.int32).reshape(2, 8) % 11


@functools.cache
def linen_variables():
  return MODEL.linen(None).init(jax.random.key(0), IDS)


split_of_nnx = functools.cache(lambda: nnx.split(MODEL.nnx(None, nnx.Rngs(0))))


def of_first_token(logits):
  return jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def of_linen(policy):
  """A loss of parameters, and the parameters."""
  model = mpjax.linen.with_policy(MODEL.linen(None), policy)
  return lambda v: of_first_token(model.apply(v, IDS)), linen_variables()


def of_nnx(policy):
  graphdef, state = split_of_nnx()

  def loss(state):
    model = mpjax.nnx.with_policy(nnx.merge(graphdef, state), policy)
    return of_first_token(model(IDS))

  return loss, state


def in_scope(policy):
  def loss(v):
    with mpjax.linen.policy_scope(policy):
      return of_first_token(MODEL.linen(None).apply(v, IDS))

  return loss, linen_variables()


FACES = {"linen": of_linen, "nnx": of_nnx, "scope": in_scope}
faces = pytest.mark.parametrize("face", FACES.values(), ids=FACES)


def counted(loss, params):
  return collections.Counter(p.dtypes for p in products(jax.make_jaxpr(jax.grad(loss))(params)))


@pytest.mark.slow
@faces
def test_dense_layers_and_projections_are_in_float8_forward_and_backward(face):
  # Four projections and four layers. Attention's own two matmuls, the convolution and `attend`
  # are not, nor are their gradients.
  assert counted(*face(POLICY)) == {FORWARD: 8, BACKWARD: 16, HALF: 3 * (2 + 1 + 1)}


def test_a_matmul_of_an_embedding_that_is_jitted_is_one():
  matmul = jax.jit(jnp.matmul)  # Traced once, for the head and for the embedding.

  class Jitted(nn.Embed):
    def attend(self, query):
      return matmul(query, self.embedding.T)

  class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids):
      embed = Jitted(64, 32)
      head = self.param("head", nn.initializers.ones, (32, 64))
      return matmul(embed(ids), head) + embed.attend(embed(ids))

  model = mpjax.linen.with_policy(Tied(), POLICY)
  variables = jax.eval_shape(model.init, jax.random.key(0), IDS)
  reasons = [x.reason for x in mpjax.audit(model.apply)(variables, IDS).formats]
  assert reasons == ["", "it is an embedding"]


@pytest.mark.slow
def test_the_preset_leaves_out_what_is_too_small():
  both = (of_linen(policy) for policy in ("mixed_float8", "mixed_bfloat16"))
  found, wanted = (jax.make_jaxpr(jax.grad(loss))(params) for loss, params in both)
  assert str(found) == str(wanted)


@pytest.mark.slow
def test_parameters_stored_in_bfloat16():
  policy = dataclasses.replace(POLICY, param_dtype="bfloat16")
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
  # Their module is traced in bfloat16, and its layers cast their parameters themselves.
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 32)), jnp.float32)
  model = TakesHalfAlone()
  variables = shapes(model, x)

  def loss(variables):
    return jnp.sum(mpjax.linen.with_policy(model, POLICY).apply(variables, x) ** 2)

  assert counted(loss, variables) == {FORWARD: 4, BACKWARD: 4 + 1, HALF: 6}
  found = jax.make_jaxpr(jax.grad(loss))(variables)
  weights = [p.result for p in products(found) if p.dtypes == BACKWARD]
  assert sum(result.startswith("float32") for result in weights) == 4


# A step with an inf.


MLP = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(16)])
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_with_an_inf_is_skipped(bad):
  model, params = mpjax.linen.with_policy(MLP, EXACT), filled(shapes(MLP, X))
  tx = mpjax.loss_scaling(optax.adam(1e-2), mpjax.StaticLossScale(2**10))
  state = tx.init(params)

  @jax.jit
  def step(params, state, x):
    loss_fn = lambda params: jnp.mean((model.apply(params, x) - x) ** 2)  # noqa: E731
    _, grads = jax.value_and_grad(mpjax.scaled(loss_fn, state))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, state = step(params, state, X)
  spoiled = X.copy()
  spoiled[3, 4] = bad
  after, new = step(params, state, spoiled)
  assert int(mpjax.loss_scaling_metrics(new)["skipped"]) == 1
  assert bits((after, new.inner_state)) == bits((params, state.inner_state))


# What a GPU would run. These are skipped where JAX's plugin for CUDA is not installed.

gpu_hlo = benchmark("gpu_hlo")
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
FLOAT8 = {E4M3, f"{E4M3} x {E5M2}", f"{E5M2} x {E4M3}"}


@pytest.fixture(params=[False, True], ids=["cublas", "triton"])
def matmuls(gpu_hlo, h200, request):
  """Counts the matmuls of a compiled function by the dtypes of their operands."""

  def count(fn, *args):
    args = gpu_hlo.aot.placed(args, SingleDeviceSharding(h200))
    options = {**gpu_hlo.OPTIONS, "xla_gpu_enable_triton_gemm": request.param}
    compiled = jax.jit(fn).lower(*args).compile(compiler_options=options)
    return gpu_hlo.hlo.parse(compiled.as_text()).products()

  return count


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_gpu_multiplies_in_float8(matmuls, scaling):
  policy = dataclasses.replace(POLICY, matmul=mpjax.Float8(skip=(), scaling=scaling))
  loss, params = of_linen(policy)
  found = matmuls(jax.grad(loss), params)
  # XLA joins the projections of one input, of which there are three, in one matmul or not.
  assert 8 - 2 <= found[E4M3] <= 8  # forward
  assert 24 - 4 <= sum(n for kind, n in found.items() if kind in FLOAT8) <= 24
  # Attention's own two, `attend` and the convolution, with their gradients.
  assert sum(n for kind, n in found.items() if kind not in FLOAT8) == found["bf16"] == 12


@pytest.mark.gpu_compiler
def test_a_gpu_multiplies_groups_in_float8(matmuls):
  def loss(w, x, sizes):
    return jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2)

  gradient = jax.grad(mpjax.autocast(loss, POLICY, data_argnums=(1, 2)), (0, 1))
  args = ((4, 64, 128), "float32"), ((256, 64), "float32"), ((4,), "int32")
  found = matmuls(gradient, *(jax.ShapeDtypeStruct(*each) for each in args))
  assert sum(found[kind] for kind in FLOAT8) == sum(found.values()) == 3


IN_BLOCKS = {
  "mxfp8": (mpjax.MXFP8(), E4M3),
  "nvfp4": (mpjax.NVFP4(), "f4e2m1fn"),
  "float8": (mpjax.Float8(scaling="block", skip=()), E4M3),
}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("recipe", "dtype"), IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_a_gpu_multiplies_in_blocks(gpu_hlo, b200, h200, recipe, dtype):
  def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

  policy = dataclasses.replace(POLICY, matmul=recipe)
  gradient = jax.grad(mpjax.autocast(loss, policy, data_argnums=1), (0, 1))
  shapes = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((256, 384), (1000, 256)))

  def compiled(device):
    args = gpu_hlo.aot.placed(shapes, SingleDeviceSharding(device))
    return jax.jit(gradient).lower(*args).compile(compiler_options=gpu_hlo.OPTIONS)

  program = compiled(b200)
  assert gpu_hlo.hlo.parse(program.as_text()).products() == {dtype: 3}
  assert program.as_text().count('custom_call_target="__cudnn$blockScaledDot"') == 3
  # Hopper has no such units.
  assert dtype not in gpu_hlo.hlo.parse(compiled(h200).as_text()).products()


OWG = "_overwrite_with_gradient"
FP8 = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp, dtype=jnp.float16)
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float16)
WRAPPERS = {
  "loss_scaling": mpjax.loss_scaling,
  "master_weights": mpjax.master_weights,
  "accumulate": lambda inner: mpjax.accumulate_gradients(inner, 2),
}


def loss(variables, batch):
  return jnp.mean(jnp.square(FP8.apply(variables, batch).astype(jnp.float32)))


def variables():
  return FP8.init(jax.random.key(0), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_float8_statistics_are_not_given_to_the_optimizer(name):
  # Adam moved them by a learning rate, in place of taking them over.
  expected, fix = "parameters that follow their gradients", "mpjax.keep_if_skipped(opt_state, grads"
  with refused(ValueError, ".init(params)", expected, f"at ['{OWG}']", fix):
    WRAPPERS[name](optax.adam(0.1)).init(variables())


@pytest.mark.slow
def test_the_train_state_of_flax_keeps_them_apart_by_itself():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.StaticLossScale(2.0**10))
  state = TrainState.create(apply_fn=FP8.apply, params=variables(), tx=tx)
  grads = jax.value_and_grad(mpjax.scaled(loss, state.opt_state))(state.params, BATCH)[1]
  new = state.apply_gradients(grads=grads)
  assert bits(new.params[OWG]) == bits(grads[OWG])
  assert bits(new.params["params"]) != bits(state.params["params"])


def test_the_way_out_takes_them_over_and_a_skipped_step_does_not():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=2.0**10))
  start = variables()
  opt_state = tx.init(start["params"])

  @jax.jit
  def step(old, opt_state, batch):
    grads = jax.value_and_grad(mpjax.scaled(loss, opt_state))(old, batch)[1]
    updates, opt_state = tx.update(grads["params"], opt_state, old["params"])
    taken = mpjax.keep_if_skipped(opt_state, grads[OWG], old[OWG])
    return {"params": optax.apply_updates(old["params"], updates), OWG: taken}, opt_state, grads

  new, opt_state, grads = step(start, opt_state, BATCH)
  assert bits(new[OWG]) == bits(grads[OWG])
  assert bits(new[OWG]) != bits(start[OWG])
  again, opt_state, grads = step(new, opt_state, BATCH * jnp.float16(np.inf))
  assert not mpjax.loss_scaling_metrics(opt_state)["finite"]
  assert bits(again) == bits(new)
