"""Kernels in the text of a compiled function; the lines are those that XLA wrote for an H200."""

from mpjax._diagnostics.audit.compiled_text import kernels

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


def test_nothing_of_nothing():
  assert kernels("") == ()
