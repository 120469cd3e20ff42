"""What an audit lists: modules, float8, risks, and what devices send to one another."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax._debug.findings import Finding, compiled_collectives
from mpjax._jaxpr.graph import Graph
from tests.programs import mesh_of

HALF = jax.ShapeDtypeStruct((8, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((8, 8), "float32")


def stack(w, x):
  for number in range(3):
    with jax.named_scope(f"layer_{number}"):
      x = jnp.tanh(x @ w)
  with jax.named_scope("head"):
    return x @ w


def test_modules_that_differ_in_their_number_are_one_row_of_the_page():
  audit = mpjax.audit(stack)(HALF, HALF)
  assert [row.path for row in audit.modules] == ["layer_0", "layer_1", "layer_2", "head"]
  assert {(row.dtype, row.flops) for row in audit.modules} == {("bfloat16", 2 * 8**3)}
  assert {row.activations for row in audit.modules} == {("bfloat16",)}
  assert {row.params for row in audit.modules} == {("bfloat16",)}
  text = str(audit)
  assert "layer_* (3)" in text
  assert "75.0 %" in text


def test_one_that_has_another_dtype_is_not():
  def fn(w, x):
    with jax.named_scope("layer_3"):
      x = jnp.matmul(x.astype("float32"), w.astype("float32"), precision="highest").astype(x.dtype)
    return stack(w, x)

  audit = mpjax.audit(fn)(HALF, HALF)
  (row,) = [row for row in audit.modules if row.path == "layer_3"]
  assert (row.dtype, row.flops) == ("float32", 2 * 8**3)
  text = str(audit)
  assert "layer_* (3)" in text
  assert "layer_3" in text


def test_an_input_is_no_parameter_and_what_has_no_matmul_is_no_row():
  def fn(params, x):
    with jax.named_scope("norm"):
      x = x * 2
    with jax.named_scope("dense"):
      return jnp.exp((x @ params["kernel"].astype(x.dtype)).astype("float32"))

  (row,) = mpjax.audit(fn)({"kernel": WIDE}, HALF).modules
  assert (row.path, row.params) == ("dense", ("float32",))
  assert set(row.activations) == {"bfloat16", "float32"}


def test_gradients_are_of_the_backward_pass():
  def loss(w, x):
    return stack(w, x).astype("float32").sum()

  rows = {row.path: row for row in mpjax.audit(jax.value_and_grad(loss))(HALF, HALF).modules}
  assert rows["head"].gradients[0] == "bfloat16"
  assert sum(row.flops for row in rows.values()) == (4 + 4 + 3) * 2 * 8**3


ALL = mpjax.Policy(
  compute_dtype="bfloat16", output_dtype="float32", matmul=mpjax.Float8(skip=((16, 32),))
)
IDS = jax.ShapeDtypeStruct((2, 16), "int32")


class Model(nn.Module):
  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(64, 32, name="embed")
    x = embed(ids)
    for i in range(2):
      x = x + nn.MultiHeadDotProductAttention(num_heads=2, name=f"attention_{i}")(x, x)
    x = nn.Dense(16, name="small")(nn.Dense(16, name="narrow")(x))
    x = nn.Dense(20, name="odd")(nn.Dense(32, name="wide")(x))
    x = nn.Dense(32, name="head")(nn.Conv(32, (3,), name="conv")(x))
    return embed.attend(x)


@functools.cache
def audited(policy=ALL, rules=(), fn=jnp.sum):
  model = mpjax.linen.with_policy(Model(), policy, rules)
  variables = jax.eval_shape(Model().init, jax.random.key(0), IDS)
  return mpjax.audit(jax.value_and_grad(lambda v, ids: fn(model.apply(v, ids))))(variables, IDS)


HEAD = mpjax.Rule("mixed_bfloat16", path="head")


def test_d7_d17_each_module_is_listed_with_its_reason():
  found = {x.path.removeprefix("Model/"): x for x in audited(rules=(HEAD,)).float8}
  attention = "no operand is a parameter"
  wanted = {
    **{f"attention_{i}/{name}": "" for i in (0, 1) for name in ("query", "key", "value", "out")},
    **{f"attention_{i}": attention for i in (0, 1)},
    "narrow": "",
    "small": "too small to gain: K=16, N=16",
    "wide": "too small to gain: K=16, N=32",
    "odd": "N=20 is no multiple of 16",
    "conv": "it is no dot_general",
    "head": "its policy has no float8",
    "embed": "it is an embedding",
  }
  assert {path: x.reason for path, x in found.items()} == wanted
  assert found["narrow"] == Finding("Model/narrow", flops=3 * 2 * 32 * 16 * 32)
  audit = audited(rules=(HEAD,))
  assert f"{100 * audit.float8_share:.1f} % of the matmuls' FLOPs in float8" in str(audit)
  assert "it is an embedding" in str(audit)
  rows = json.loads(audit.to_json())["float8"]
  assert [(row["path"], row["flops"]) for row in rows] == [(x.path, x.flops) for x in audit.float8]
  assert rows[0]["flops"] == max(x.flops for x in audit.float8)


def test_float32_and_weight_gradients_in_half_are_reasons():
  rules = mpjax.Rule("float32", path="wide"), mpjax.Rule(None, path="head")
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=(), weight_grad="half"))
  found = {(x.path.removeprefix("Model/"), x.reason): x for x in audited(policy, rules).float8}
  assert ("wide", "it is in float32") in found
  assert ("head", "it is in float32") in found
  half = found["narrow", 'weight_grad="half"']
  assert half.flops == 2 * 32 * 16 * 32
  assert found["narrow", ""].flops == 2 * half.flops


def test_leaks_and_risks_are_those_without_float8():
  """Neither the scaling, in float32, nor what is too small is where low precision was lost."""

  def loss(x):
    return jnp.mean(jax.nn.log_softmax(x))

  float8, half = audited(fn=loss), audited("mixed_bfloat16", fn=loss)
  assert (float8.leaks, float8.lossy, float8.on_purpose) == ((), (), half.on_purpose)
  assert half.float8 == ()
  assert "in float8\n" not in str(half)
  assert float8.half_share == half.half_share == 1.0
  assert float8.float8_share > half.float8_share == 0
  assert sum(float8.flops.values()) == sum(half.flops.values())


def test_what_is_kept_is_float8():
  kept = audited().residual_bytes
  assert kept["float8_e4m3fn"] > 0
  assert kept["bfloat16"] < audited("mixed_bfloat16").residual_bytes["bfloat16"]


BF16 = jnp.bfloat16


def s(*shape, dtype=BF16):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_residuals_by_dtype():
  def loss(w, x):
    h = x.astype(BF16) @ w.astype(BF16)
    return jnp.sum(jnp.sin(h.astype(jnp.float32)))

  audit = mpjax.audit(jax.grad(loss))(s(8, 8, dtype="float32"), s(4, 8, dtype="float32"))
  # x in bfloat16 for the gradient of w, and the cosine of h.
  assert audit.residual_bytes == {"float32": 4 * 8 * 4, "bfloat16": 4 * 8 * 2}
  assert mpjax.audit(loss)(s(8, 8, dtype="float32"), s(4, 8, dtype="float32")).residual_bytes == {}


# Risks.

SIXTEEN = jax.ShapeDtypeStruct((256, 8), "float16")


def lossy(fn, *args):
  return [(x.operation, x.dtype, x.reason) for x in mpjax.audit(fn)(*(args or (SIXTEEN,))).lossy]


def test_exponentials_and_logarithms():
  assert lossy(jnp.exp) == [("exp", "float16", "less exact than in float32")]
  assert lossy(lambda x: jnp.exp(x.astype("float32"))) == []


def test_long_sums_and_no_short_ones():
  half = jnp.float16

  def sums(x, axis):
    return jax.lax.reduce_sum_p.bind(x, axes=(axis,), out_sharding=None)

  assert lossy(lambda x: sums(x, 0)) == [
    ("reduce_sum", "float16", "256 terms are added in low precision")
  ]
  assert lossy(lambda x: sums(x, 1)) == []
  assert lossy(lambda x: jnp.sum(x, axis=0, dtype="float32").astype(half)) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_integers_that_become_low_precision(dtype, most):
  ids = jax.ShapeDtypeStruct((4,), "int32")
  found = lossy(lambda x: x.astype(dtype), ids)
  assert found == [("convert_element_type", dtype, f"integers above {most} are rounded")]
  assert lossy(lambda x: x.astype(dtype), jax.ShapeDtypeStruct((4,), "bool")) == []
  # Ids that come as floats, and are used as integers.
  found = lossy(lambda x: x.astype("int32"), jax.ShapeDtypeStruct((4,), dtype))
  reason = f"integers above {most} were rounded before this cast"
  assert found == [("convert_element_type", dtype, reason)]
  assert lossy(lambda x: x.astype("int8"), jax.ShapeDtypeStruct((4,), dtype)) == []
  assert lossy(lambda x: x.astype("int32"), jax.ShapeDtypeStruct((4,), "float32")) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_positions_that_are_counted_in_low_precision(dtype, most):
  found = lossy(lambda x: x + jnp.arange(most + 2, dtype=dtype), jnp.ones((1,), dtype))
  assert found == [("iota", dtype, f"integers above {most} are rounded")]
  assert lossy(lambda x: x + jnp.arange(most + 1, dtype=dtype), jnp.ones((1,), dtype)) == []


def test_numbers_that_low_precision_does_not_hold():
  assert lossy(lambda x: x / (x + jnp.float16(1e-8))) == [
    ("add", "float16", "a number may have become 0 in low precision")
  ]
  masked = lossy(
    lambda x, keep: x + keep.astype("float16") * jnp.float16(-jnp.inf), SIXTEEN, SIXTEEN
  )
  assert masked == [("mul", "float16", "a number became inf in low precision")]
  assert lossy(lambda x: jnp.where(x > 0, x, -jnp.inf)) == []
  assert lossy(lambda x: x == jnp.inf) == []
  # Nothing else is the neutral element of a maximum, of which each softmax has one.
  assert lossy(lambda x: jnp.max(x, initial=-jnp.inf) + jnp.min(x, initial=jnp.inf)) == []
  assert lossy(lambda x: jnp.maximum(x, jnp.float16(jnp.inf))) == [("max", *masked[0][1:])]


def test_an_epsilon_that_becomes_zero():
  add = ("add", "float16", "a number may have become 0 in low precision")
  assert lossy(lambda x: x / (x + 1e-8)) == [add]
  assert lossy(lambda x: x / jnp.maximum(x, 1e-8)) == [("max", *add[1:])]
  clip = ("convert_element_type", "float16", "1e-08 becomes 0")
  assert lossy(lambda x: x / jnp.clip(x, 1e-8)) == [clip]
  assert lossy(lambda x: x / (x + 1e-8), jax.ShapeDtypeStruct((8,), "bfloat16")) == []
  assert lossy(lambda x: jax.nn.relu(x) + jnp.maximum(x, 0) / 2) == []


MASK = np.where(np.tri(256, 8) > 0, 0, -1e9).astype(np.float32)
MASKS = {
  "where": lambda x, keep: jnp.where(keep, x, -1e9),
  "lowest of float32": lambda x, keep: jnp.where(keep, x, float(jnp.finfo("float32").min)),
  "added": lambda x, keep: x + jnp.where(keep, 0.0, -1e9).astype(x.dtype),
  "captured": lambda x, keep: x + jnp.asarray(MASK).astype(x.dtype),
  "transposed": lambda x, keep: x + jnp.full((8, 256), -1e9).T.astype(x.dtype),
  "joined": lambda x, keep: (
    x + jnp.concatenate([x.astype("float32")[8:], jnp.full((8, 8), -1e9)]).astype(x.dtype)
  ),
}


def test_a_mask_that_becomes_infinite():
  keep = jax.ShapeDtypeStruct((256, 8), "bool")
  for name, mask in MASKS.items():
    (risk,) = mpjax.audit(jax.named_scope("cell")(mask))(SIXTEEN, keep).lossy
    assert risk.reason in ("-1e+09 becomes -inf", "-3.403e+38 becomes -inf"), name
    where = risk.operation, risk.dtype, risk.path, risk.direction
    assert where == ("convert_element_type", "float16", "cell", "forward")
    assert risk.source is not None
    assert risk.source.file.endswith("test_findings.py")
  wide = jax.ShapeDtypeStruct((256, 8), "float32")
  assert lossy(mpjax.autocast(MASKS["where"], "mixed_float16"), wide, keep) == []
  assert lossy(lambda x, keep: jnp.where(keep, x, jnp.finfo(x.dtype).min), SIXTEEN, keep) == []


def test_of_a_constant_the_largest_number_counts_and_of_arithmetic_none():
  table = np.array([1e-9, 2.0, -7e4] + [0.0] * 5, np.float32)
  for columns, lost in ((8, "-7e+04 becomes -inf"), (2, None), (1, "1e-09 becomes 0")):

    def fn(x, columns=columns):
      return x[0, :columns] + jnp.asarray(table[:columns]).astype(x.dtype)

    assert [reason for _, _, reason in lossy(fn)] == ([lost] if lost else [])
  assert lossy(lambda x: (x.astype("float32") * 1e9).astype(x.dtype)) == []


def test_what_bfloat16_holds_of_a_mask():
  keep, x = jax.ShapeDtypeStruct((256, 8), "bool"), jax.ShapeDtypeStruct((256, 8), "bfloat16")
  assert lossy(MASKS["where"], x, keep) == []
  (found,) = lossy(MASKS["lowest of float32"], x, keep)  # It rounds to the next power of two.
  assert found[2] == "-3.403e+38 becomes -inf"


# Collectives.


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
