"""What devices send to one another, as traced and as compiled; and the kernels of a program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax._diagnostics.audit.compiled import compiled_collectives, kernels
from mpjax._jaxprs.graph import Graph
from tests.programs import mesh_of


def test_what_is_traced_and_what_is_compiled_are_per_device(devices):
  def fn(x):
    def step(total, row):
      with jax.named_scope("sums"):
        return total + jax.lax.psum(row, "data"), None

    return jax.lax.scan(step, jnp.zeros(5), x)[0]

  spec = PartitionSpec(None, "data")
  mapped = jax.shard_map(
    fn, mesh=mesh_of(devices), in_specs=spec, out_specs=PartitionSpec(), check_vma=False
  )
  x = jnp.ones((3, 20))
  expected = ("sums", "float32", 3 * 5 * 4, 3)
  (traced,) = mpjax.audit(mapped)(x).collectives
  assert (traced.operation, (traced.path, *traced[2:])) == ("psum", expected)
  audit = mpjax.audit(mapped, compiled=jax.jit(mapped).lower(x).compile())(x)
  (compiled,) = audit.collectives
  assert (compiled.operation, (compiled.path, *compiled[2:])) == ("all-reduce", expected)
  assert "sums    all-reduce  float32   60 B      3" in str(audit)


def test_what_the_partitioner_wrote_is_named_by_module(devices):
  mesh = mesh_of(devices)
  model = nn.Sequential([nn.Dense(8, use_bias=False), nn.Dense(12, use_bias=False)])
  rows = NamedSharding(mesh, PartitionSpec("data"))
  x = jax.device_put(jnp.ones((8, 4)), rows)
  columns = NamedSharding(mesh, PartitionSpec(None, "data"))
  variables = jax.device_put(model.init(jax.random.key(0), x), columns)

  def loss(variables, x):
    out = model.apply(variables, x)
    return jnp.mean(jax.lax.with_sharding_constraint(out, rows) ** 2)

  compiled = jax.jit(loss).lower(variables, x).compile()
  audit = mpjax.audit(loss, compiled=compiled)(variables, x)
  found = {(row.path, row.operation): (row.nbytes, row.times) for row in audit.collectives}
  assert found == {
    ("Sequential/layers_0", "all-gather"): (4 * 8 * 4, 1),
    ("Sequential/layers_1", "all-gather"): (8 * 12 * 4, 1),
    ("", "all-reduce"): (4, 1),
  }
  assert "Compiled as" in str(audit)
  assert sum(kernel.times for kernel in audit.kernels) >= 2


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


# As XLA wrote it for a TPU: what it counts to is in the condition, results follow the operands.
LOOP = """
%condition (state: (s32[], bf16[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(24)
  ROOT %less = pred[]{:T(128)} compare(%count, %limit), direction=LT
}
%inside (x: bf16[8]) -> bf16[16] {
  %start = (bf16[8]{0:T(256)}, bf16[16]{0:T(256)}) all-gather-start(%x), metadata={op_name="jit(f)/jvp(Net)/while/body/closed_call/cell.step/up/dot_general"}
  ROOT %all = bf16[16]{0:T(256)} all-gather-done(%start)
}
%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %fusion = bf16[16]{0:T(256)} fusion(%x), kind=kCustom, calls=%inside
  ROOT %next = (s32[], bf16[8]) tuple(%count, %x)
}
ENTRY %main (x: bf16[8]) -> bf16[8] {
  %both = (f8e4m3fn[4,2]{1,0}, f32[3]{0}, f32[]) all-reduce(%a, %b, %c), to_apply=%add, metadata={op_name="jit(f)/transpose(jvp(Net))/up/mul"}
  ROOT %loop = (s32[], bf16[8]) while(%tuple), condition=%condition, body=%body
}
"""


def test_collectives_of_a_tpu_are_counted_as_often_as_they_run():
  def fn(x):
    for names in (("Net",), ("Net", "up"), ("Net", "cell", "up")):
      with jax.named_scope("/".join(names)):
        x = x + 1
    return x

  graph = Graph(jax.make_jaxpr(fn)(1.0), ["x"])
  assert {tuple(row) for row in compiled_collectives(LOOP, graph)} == {
    ("Net/cell/up", "all-gather", "bfloat16", 24 * 32, 24),
    ("Net/up", "all-reduce", "float8_e4m3fn", 8, 1),
    ("Net/up", "all-reduce", "float32", 16, 1),
  }
