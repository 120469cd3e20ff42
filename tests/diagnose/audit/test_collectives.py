"""The collectives of a compiled program, by module."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax._diagnose.audit.collectives import compiled_collectives
from mpjax._jaxpr.graph import Graph
from tests.programs import mesh_of


def sent(row):
  return row.path, row.operation, row.dtype, row.nbytes, row.times


def test_what_is_compiled_is_per_device(devices):
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
  assert mpjax.audit(mapped)(x).collectives == ()
  audit = mpjax.audit(mapped, compiled=jax.jit(mapped).lower(x).compile())(x)
  (compiled,) = audit.collectives
  assert sent(compiled) == ("sums", "all-reduce", "float32", 3 * 5 * 4, 3)
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


# ruff: noqa: E501
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
  assert {sent(row) for row in compiled_collectives(LOOP, graph)} == {
    ("Net/cell/up", "all-gather", "bfloat16", 24 * 32, 24),
    ("Net/up", "all-reduce", "float8_e4m3fn", 8, 1),
    ("Net/up", "all-reduce", "float32", 16, 1),
  }
