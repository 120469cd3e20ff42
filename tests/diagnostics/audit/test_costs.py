"""Sizes that do not fit Tensor Cores, kernels, collectives, residuals."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas
from jax.sharding import PartitionSpec

import mpjax
from mpjax._diagnostics.audit.costs import dtypes_of, kernels
from mpjax._jaxprs.graph import Graph

BF16 = jnp.bfloat16


def s(*shape, dtype=BF16):
  return jax.ShapeDtypeStruct(shape, dtype)


def conv(x, kernel):
  return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID")


MISFITS = [
  (jnp.matmul, (s(16, 8), s(8, 10)), (16, 10, 8), (16, 16, 8)),
  (jnp.matmul, (s(16, 9), s(9, 8)), (16, 8, 9), (16, 8, 16)),
  (jnp.matmul, (s(3, 7, 8), s(3, 8, 8)), (7, 8, 8), (8, 8, 8)),
  (
    lambda a, b: jax.lax.dot(a, b, preferred_element_type=BF16),
    (s(16, 8, dtype="float8_e4m3fn"), s(8, 16, dtype="float8_e4m3fn")),
    *((16, 16, 8), (16, 16, 16)),
  ),
  # 2 images of 7 positions; 5 features of 3 inputs and 2 taps.
  (conv, (s(2, 3, 8), s(5, 3, 2)), (14, 5, 6), (16, 8, 8)),
]


def test_sizes_that_are_padded():
  for fn, args, sizes, padded in MISFITS:
    (found,) = mpjax.audit(fn)(*args).misfits
    assert (found.sizes, found.padded) == (sizes, padded)
  # What fits, or is float32, is not listed.
  assert mpjax.audit(jnp.matmul)(s(16, 8), s(8, 24)).misfits == ()
  assert mpjax.audit(jnp.matmul)(s(3, 3, dtype="float32"), s(3, 3, dtype="float32")).misfits == ()


def test_only_what_costs_something_is_shown():
  assert "padded" not in str(mpjax.audit(jnp.matmul)(s(16, 8), s(8, 10)))
  large = str(mpjax.audit(jnp.matmul)(s(4096, 4096), s(4096, 4001)))
  assert "M, N, K = 4096 x 4001 x 4096 padded to 4096 x 4008 x 4096" in large


def test_a_kernel_of_pallas_is_said_to_be_not_entered():
  def kernel(x, out):
    out[...] = x[...]

  def fn(x):
    with jax.named_scope("attention"):
      call = pallas.pallas_call(kernel, jax.typeof(x), name="copies", interpret=True)
      return call(x) + call(x)

  audit = mpjax.audit(fn)(s(8, 8, dtype="float32"))
  assert [each[1:] for each in audit.opaque] == [("pallas_call", ("float32",), 2)]
  assert "attention/copies: pallas_call is not entered; it gets float32" in str(audit)


def test_collectives_by_dtype():
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

  def fn(x):
    total = jax.lax.psum(x, "d")
    wide = jax.lax.psum(x.astype(jnp.float32), "d")
    return total + jax.lax.psum(total, "d"), wide

  spec = PartitionSpec("d")
  mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
  found = {
    (x.operation, x.dtype): (x.nbytes, x.times)
    for x in mpjax.audit(mapped)(jnp.ones(8, BF16)).collectives
  }
  # Each of the two devices sends its 4 elements.
  assert found == {("psum", "bfloat16"): (2 * 2 * 8, 4), ("psum", "float32"): (2 * 16, 2)}


def test_residuals_by_dtype():
  def loss(w, x):
    h = x.astype(BF16) @ w.astype(BF16)
    return jnp.sum(jnp.sin(h.astype(jnp.float32)))

  audit = mpjax.audit(jax.grad(loss))(s(8, 8, dtype="float32"), s(4, 8, dtype="float32"))
  # x in bfloat16 for the gradient of w, and the cosine of h.
  assert audit.residual_bytes == {"float32": 4 * 8 * 4, "bfloat16": 4 * 8 * 2}
  assert mpjax.audit(loss)(s(8, 8, dtype="float32"), s(4, 8, dtype="float32")).residual_bytes == {}


def test_dtypes_by_size():
  names = ["a", "b", "c"]
  types = (s(2), s(5, dtype=np.float32), s(9, dtype=np.int32))
  graph = Graph(jax.make_jaxpr(lambda *xs: xs)(*types), names)
  assert dtypes_of(graph.arguments) == ("float32", "bfloat16")


# As XLA wrote it for an H200.
# ruff: noqa: E501
TEXT = """
HloModule jit_step, is_scheduled=true
%fused (param_0: f32[8,16]) -> bf16[8,16] {
  %param_0 = f32[8,16]{1,0} parameter(0)
  ROOT %convert.1 = bf16[8,16]{1,0} convert(f32[8,16]{1,0} %param_0)
}
ENTRY %main {
  %cublas.1 = (bf16[4096,1024]{1,0}, s8[33554432]{0}) custom-call(bf16[4096,1024]{1,0} %a, bf16[1024,1024]{1,0} %b), custom_call_target="__cublas$lt$matmul"
  %cublas.2 = (bf16[64,32]{1,0}, s8[1024]{0}) custom-call(f8e4m3fn[64,64]{1,0} %a, f8e4m3fn[32,64]{1,0} %b), custom_call_target="__cublas$lt$matmul$f8"
  %conv = (f16[8,64,56,56]{3,2,1,0}, u8[0]{0}) custom-call(f16[8,3,224,224]{3,2,1,0} %x, f16[64,3,7,7]{3,2,1,0} %k), window={size=7x7}, custom_call_target="__cudnn$convForward"
  %dot.1 = f32[4,4]{1,0} dot(f32[4,8]{1,0} %c, f32[8,4]{1,0} %d), lhs_contracting_dims={1}
  %dot.2 = f32[4,4]{1,0} dot(f32[4,8]{1,0} %c, f32[8,4]{1,0} %d), lhs_contracting_dims={1}
  ROOT %add = f32[4,4]{1,0} add(f32[4,4]{1,0} %dot.1, f32[4,4]{1,0} %dot.2)
}
"""


def test_library_calls_matmuls_and_casts_are_counted():
  assert {(k.name, k.dtype): k.times for k in kernels(TEXT)} == {
    ("convert", "bf16"): 1,
    ("__cublas$lt$matmul", "bf16"): 1,
    ("__cublas$lt$matmul$f8", "bf16"): 1,
    ("__cudnn$convForward", "f16"): 1,
    ("dot", "f32"): 2,
  }
