"""JAX's own kernels for TPUs: in which dtypes they are traced, and what they return on a CPU."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import mpjax
from tests.programs import assert_bit_equal, inner_jaxprs, run

pytestmark = pytest.mark.standard_promotion

LENGTH, WIDTH = 128, 8  # The kernels for attention take no shorter block.
KERNELS = ("pallas_call", "ffi_call", "custom_partitioning")
POLICY = "mixed_bfloat16"


def array(number, *shape):
  return jax.random.normal(jax.random.key(number), shape)


# Kernels.


def flash_attention(q, k, v):
  inputs = (x[None, None] for x in (q, k, v))
  segments = flash.SegmentIds(*[jnp.arange(LENGTH)[None] // 64] * 2)
  return flash.flash_attention(*inputs, segment_ids=segments, causal=True)[0, 0]


@functools.cache
def splash_kernel():
  sizes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
  blocks = splash.BlockSizes(**{f"block_{name}": LENGTH for name in sizes})
  mask = masks.MultiHeadMask([masks.LocalMask((LENGTH, LENGTH), (32, 32), 0)])
  return splash.make_splash_mha(
    mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=True
  )


def splash_attention(q, k, v):
  with jax.ensure_compile_time_eval():  # The arrays of the mask outlive this trace.
    kernel = splash_kernel()
  return kernel(q[None], k[None], v[None], splash.SegmentIds(*[jnp.arange(LENGTH) // 64] * 2))[0]


def experts(x, w, sizes):
  return megablox.gmm(x, w, sizes, x.dtype, (8, 8, 8), interpret=True)


# It is only traced: the interpreters of jax 0.10 and 0.12 cannot read reshaped references.
def paged_attention(q, pages, lengths):
  table, starts = jnp.zeros((2, 2), jnp.int32), jnp.array([0, 4, 4], jnp.int32)
  sizes = {"num_kv_pages_per_block": 1, "num_queries_per_block": 4, "vmem_limit_bytes": None}
  return ragged_paged_attention(q, pages, lengths, table, starts, jnp.array([1]), **sizes)


def foreign(x):
  return jax.ffi.ffi_call("of_no_library", jax.typeof(x))(x)


@custom_partitioning
def partitioned(x, w):  # It runs on one device, so nothing asks how it is divided.
  return x @ w


partitioned.def_partition(
  partition=lambda mesh, args, result: (mesh, jnp.matmul, result.sharding, args),
  sharding_rule="i j, j k -> i k",
)

ATTENTION = tuple(array(i, LENGTH, WIDTH) for i in range(3))
CALLS = {
  "flash": (flash_attention, ATTENTION),
  "splash": (splash_attention, ATTENTION),
  "experts": (experts, (array(0, 8, 8), array(1, 2, 8, 8), jnp.array([3, 5], jnp.int32))),
  # These have no derivative.
  "paged": (paged_attention, (array(0, 4, 2, 128), array(1, 4, 8, 2, 128), jnp.array([4, 0]))),
  "foreign": (foreign, (array(0, 4, 8),)),
  "partitioned": (partitioned, (array(0, 4, 8), array(1, 8, 8))),
}
SIZES = CALLS["experts"][1][2]
DIFFERENTIABLE = ("flash", "splash", "experts")


def on_a_cpu(name):
  # Flash attention has no argument `interpret`.
  return pltpu.force_tpu_interpret_mode() if name == "flash" else contextlib.nullcontext()


def operands(fn, *args):
  """Returns the types of the operands of each kernel."""
  found = []

  def visit(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
      if eqn.primitive.name in KERNELS:
        found.append([var.aval.str_short(short_dtypes=True) for var in eqn.invars])
        continue
      for inner in inner_jaxprs(eqn.params):
        visit(inner)

  visit(jax.make_jaxpr(fn)(*args))
  return found


def low(tree):
  def leaf(x):
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(leaf, tree)


def value_and_gradients(fn, floats):
  """Returns a function that returns the result of `fn` and gradients for its first arguments."""

  def loss(*args):
    result = fn(*args)
    return jnp.sum(jnp.sin(result.astype(jnp.float32))), result

  return jax.value_and_grad(loss, tuple(range(floats)), has_aux=True)


# `low_precision` in a function.


@pytest.mark.parametrize("name", CALLS)
def test_low_precision_casts_the_floats_of_a_kernel(name):
  kernel, args = CALLS[name]
  found = operands(mpjax.autocast(mpjax.low_precision(kernel)), *args)
  assert found == operands(kernel, *low(args))
  (types,) = found
  assert any("bf16" in each for each in types)
  assert not any(each.startswith("f32") for each in types)


@pytest.mark.parametrize("name", CALLS)
def test_a_float32_kernel_is_a_leak_with_a_cure(name):
  kernel, args = CALLS[name]
  call = mpjax.autocast(kernel)
  assert operands(call, *args) == operands(kernel, *args)
  audit = mpjax.audit(call)(*args)
  (leak,), (found,) = audit.leaks, audit.kernels
  assert (leak.kind, leak.dtype, found.dtype) == ("kernel", "float32", "float32")
  assert "mpjax.low_precision(kernel)" in leak.fix
  cured = mpjax.audit(mpjax.autocast(mpjax.low_precision(kernel)))(*args)
  assert [x.dtype for x in cured.kernels] == ["bfloat16"]
  cured.assert_no_leaks()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_kernel_of_a_derivative_is_a_leak(name):
  kernel, args = CALLS[name]
  gradient = value_and_gradients(mpjax.autocast(mpjax.low_precision(kernel)), 2)
  audit = mpjax.audit(gradient)(*args)
  # The statistics of a softmax are float32.
  assert [x.dtype for x in audit.kernels] == ["bfloat16"] * 3
  audit.assert_no_leaks()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_and_gradients_are_those_of_casts_by_hand(name):
  kernel, args = CALLS[name]
  floats = len(args) - (name == "experts")
  ours = value_and_gradients(mpjax.autocast(mpjax.low_precision(kernel)), floats)
  by_hand = value_and_gradients(lambda *args: kernel(*low(args)), floats)
  with on_a_cpu(name):
    (_, result), gradients = found = run(ours, *args)
    assert_bit_equal(found, run(by_hand, *args))
  assert result.dtype == jnp.bfloat16
  assert {x.dtype.name for x in gradients} == {"float32"}


# Modules.


class Heads(nn.Module):
  """Attention without biases and norms, which a policy runs in float32."""

  kernel: object
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    heads = nn.Dense(3 * WIDTH, use_bias=False, dtype=self.dtype)(x)
    return self.kernel(*jnp.split(heads, 3, axis=-1))


class Experts(nn.Module):
  """Experts. The rows are sorted by them."""

  kernel: object
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (2, WIDTH, WIDTH))
    h = nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(x)
    return self.kernel(h, w if self.dtype is None else w.astype(self.dtype), SIZES)


class HeadsNNX(nnx.Module):
  def __init__(self, kernel, dtype=None):
    self.kernel, self.dtype = kernel, dtype
    self.dense = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.kernel(*jnp.split(self.dense(x), 3, axis=-1))


MODULES = {
  "flash linen": (Heads, flash_attention),
  "splash nnx": (HeadsNNX, splash_attention),
  "experts linen": (Experts, experts),
}


def by_its_dtype(cls, kernel):
  return mpjax.with_policy(cls(kernel, jnp.bfloat16), POLICY)


def by_low_precision(cls, kernel):
  return mpjax.with_policy(cls(mpjax.low_precision(kernel)), POLICY)


def by_a_rule(cls, kernel):
  rule = mpjax.Rule(POLICY, path="", rewrite=False)
  return mpjax.with_policy(cls(kernel), POLICY, [rule])


def gradient(model, kernel):
  """Returns a function that returns the result and gradients of a model, and its parameters."""
  x = array(0, 8 if kernel is experts else LENGTH, WIDTH)
  if hasattr(model, "apply"):
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)  # Flash attention cannot run here.
    params = jax.tree.map(lambda x: array(0, *x.shape) / 3, shapes)
    return value_and_gradients(lambda params: model.apply(params, x), 1), params
  graph, params = nnx.split(model)
  return value_and_gradients(lambda params: nnx.merge(graph, params)(x), 1), params


@functools.cache
def by_hand(name):
  """Returns the gradient of a module with dtypes by hand, its parameters and its kernels."""
  cls, kernel = MODULES[name]
  fn, params = gradient(cls(kernel, jnp.bfloat16), kernel)
  return fn, params, operands(fn, params)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", [by_its_dtype, by_low_precision, by_a_rule])
def test_the_kernels_of_a_module_are_those_of_dtypes_by_hand(way, name):
  ours, params = gradient(way(*MODULES[name]), MODULES[name][1])
  found = operands(ours, params)
  assert found == by_hand(name)[2]
  assert len(found) == 3
  assert all(any("bf16" in each for each in types) for types in found)


@pytest.mark.parametrize("name", MODULES)
def test_the_float32_kernels_of_a_module_are_leaks(name):
  cls, kernel = MODULES[name]
  ours, params = gradient(mpjax.with_policy(cls(kernel), POLICY), kernel)
  as_it_is, _ = gradient(cls(kernel), kernel)
  assert operands(ours, params) == operands(as_it_is, params)
  audit = mpjax.audit(ours)(params)
  assert [x.dtype for x in audit.kernels] == ["float32"] * 3
  assert {x.direction for x in audit.leaks} == {"forward", "backward"}
  assert all("mpjax.low_precision(kernel)" in x.fix for x in audit.leaks)


@pytest.mark.parametrize(
  ("way", "name"),
  [(by_its_dtype, "splash nnx"), (by_a_rule, "splash nnx"), (by_low_precision, "experts linen")],
)
def test_a_module_computes_what_dtypes_by_hand_do(way, name):
  ours, params = gradient(way(*MODULES[name]), MODULES[name][1])
  (loss, result), gradients = run(ours, params)
  # The result of a policy is float32.
  found = (loss, result.astype(jnp.bfloat16)), gradients
  assert_bit_equal(found, run(by_hand(name)[0], params))
