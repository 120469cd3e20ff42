"""JAX's own kernels for TPUs: in which dtypes they are traced, and what they return on a CPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import mpjax
from tests.programs import assert_bit_equal, cast, outermost, run

pytestmark = pytest.mark.standard_promotion

LENGTH, WIDTH = 128, 8  # The kernels for attention take no shorter block.
KERNELS = ("pallas_call", "ffi_call", "custom_partitioning")


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
  return [
    [var.aval.str_short(short_dtypes=True) for var in eqn.invars]
    for eqn in outermost(jax.make_jaxpr(fn)(*args), KERNELS)
  ]


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
  assert found == operands(kernel, *cast(args, "bfloat16"))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_and_gradients_are_those_of_casts_by_hand(name):
  kernel, args = CALLS[name]
  floats = len(args) - (name == "experts")
  ours = value_and_gradients(mpjax.autocast(mpjax.low_precision(kernel)), floats)
  by_hand = value_and_gradients(lambda *args: kernel(*cast(args, "bfloat16")), floats)
  audit = mpjax.audit(ours)(*args)
  # The statistics of a softmax are float32.
  assert [x.dtype for x in audit.kernels] == ["bfloat16"] * 3
  audit.assert_no_leaks()
  with on_a_cpu(name):
    (_, result), gradients = found = run(ours, *args)
    assert_bit_equal(found, run(by_hand, *args))
  assert result.dtype == jnp.bfloat16
  assert {x.dtype.name for x in gradients} == {"float32"}
