"""Counting what a TPU would run, the scripts that compile for one, and what they have recorded."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

import mpjax
from tests.programs import mesh_of
from tests.scripts import benchmark

pytestmark = pytest.mark.standard_promotion("dtypes")

# As XLA writes it for a TPU, shortened. S(1) is memory of the chip.
TEXT = r"""HloModule jit_g, is_scheduled=true
ENTRY %main (x: bf16[16]) -> bf16[64] {
  %x = bf16[16]{0:T(256)} parameter(0)
  %copy = (bf16[16]{0:T(256)S(1)}, bf16[16]{0:T(256)}, u32[]{:S(2)}) copy-start(%x)
  %near = bf16[16]{0:T(256)S(1)} copy-done(%copy)
  %start = (bf16[16]{0:T(256)}, bf16[64]{0:T(256)}) all-gather-start(%near), dimensions={0}
  ROOT %all = bf16[64]{0:T(256)} all-gather-done(%start)
}
"""

# What a loop counts to is in its condition, and what is sent is in a fusion. A start has operands
# before results.
LOOP = r"""HloModule jit_g, is_scheduled=true
%condition (state: (s32[], bf16[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(24)
  ROOT %less = pred[]{:T(128)} compare(%count, %limit), direction=LT
}
%inside (x: bf16[8]) -> bf16[16] {
  %start = (bf16[8]{0:T(256)}, bf16[16]{0:T(256)}) all-gather-start(%x)
  ROOT %all = bf16[16]{0:T(256)} all-gather-done(%start)
}
%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %fusion = bf16[16]{0:T(256)} fusion(%x), kind=kCustom, calls=%inside
  ROOT %next = (s32[], bf16[8]) tuple(%count, %x)
}
ENTRY %main (x: bf16[8]) -> bf16[8] {
  %both = (f8e4m3fn[4,2]{1,0}, f32[3]{0}, f32[]) all-reduce(%a, %b, %c), to_apply=%add
  ROOT %loop = (s32[], bf16[8]) while(%tuple), condition=%condition, body=%body
}
"""

hlo, tpu_hlo, tpu_report = benchmark("hlo"), benchmark("tpu_hlo"), benchmark("tpu_report")
tpu_formats = benchmark("tpu_formats")

RAGGED = r"""HloModule jit_g, is_scheduled=true
ENTRY %main (x: s8[16,32], w: s8[2,32,8], n: s32[2]) -> s32[16,8] {
  %x = s8[16,32]{1,0} parameter(0)
  %w = s8[2,32,8]{2,1,0} parameter(1)
  %n = s32[2]{0} parameter(2)
  %ragged-dot-metadata = (s32[3]{0}, s32[1]{0}) custom-call(%n)
  %tiles = s32[1]{0} get-tuple-element(%ragged-dot-metadata), index=1
  ROOT %ragged-dot-none.1 = s32[16,8]{1,0} custom-call(%tiles, /*index=1*/%x, %w)
}
"""


def test_memory_of_the_chip_is_told_apart(hlo):
  # The copy reads, and what is gathered is written.
  assert hlo.parse(TEXT).traffic() == 32 + 128


def test_a_loop_counts_as_often_as_it_repeats_and_reads_slices(hlo):
  def looped(layers):
    step = jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws))
    args = jnp.zeros((32, 32)), jnp.zeros((layers, 32, 32))
    return hlo.parse(step.lower(*args).compile().as_text())

  one, two, three = (looped(layers) for layers in (8, 16, 24))
  assert max(two.repeats().values()) == 16
  # With whole stacks, read or written in each iteration, it would grow faster.
  assert three.traffic() - two.traffic() == two.traffic() - one.traffic() > 8 * 4 * 4096
  # A list of kernels has those of one iteration.
  assert len(list(one.kernels())) == len(list(two.kernels()))
  assert (two.count("while"), two.count("conditional")) == (1, 0)


def test_collectives_are_counted_as_often_as_they_run(hlo):
  assert hlo.parse(LOOP).collectives() == {
    "all-reduce float8_e4m3fn": (1, 8),
    "all-reduce float32": (1, 16),
    "all-gather bfloat16": (24, 24 * 32),
  }


def test_bytes_of_collectives_are_those_of_one_device(hlo, devices):
  def fn(x):
    add = lambda total, row: (total + jax.lax.psum(row, "data"), None)  # noqa: E731
    return jax.lax.scan(add, jnp.zeros(5), x)[0]

  spec = PartitionSpec(None, "data")
  mapped = jax.shard_map(
    fn, mesh=mesh_of(devices), in_specs=spec, out_specs=PartitionSpec(), check_vma=False
  )
  text = jax.jit(mapped).lower(jnp.ones((3, 20))).compile().as_text()
  assert hlo.parse(text).collectives() == {"all-reduce float32": (3, 3 * 5 * 4)}


def test_a_kernel_for_groups_is_a_product(hlo):
  program = hlo.parse(RAGGED)
  assert program.products() == {"s8": 1}
  assert program.results_of_products() == {"s32": 1}


def test_int8_is_multiplied_in_int8_with_sums_in_int32(tpu_formats):
  recorded = json.loads(tpu_formats.OUT.read_text(encoding="utf-8"))["chips"]
  assert recorded.keys() == {"v5e", "v6e"}
  for models in recorded.values():
    assert models.keys() == tpu_formats.MODELS.keys()
    for rows in models.values():
      for name in ("int8", "int8, per tensor"):
        assert rows[name]["operands"] == {"s8": 2, "bf16": 3}
        assert rows[name]["results"]["s32"] == 2
      both = rows["int8, gradients too"]
      assert (both["operands"], both["results"]) == ({"s8": 5}, {"s32": 5})


def test_a_policy_is_by_hand_on_a_v5e(tpu_hlo, no_cache):
  try:
    device = tpu_hlo.devices("v5e:2x2")[0]
  except RuntimeError as error:
    pytest.skip(str(error))
  case, compiled = tpu_hlo.SIZES["cpu"]["mlp"], tpu_hlo.aot.compiled_versions
  both = compiled(tpu_hlo.steps(case), ("by hand", "policy"), case, device, {})
  (by_hand, _), (policy, _) = both
  assert by_hand["products"] == policy["products"] == {"bf16": 11}
  assert policy["traffic_bytes"] <= 1.01 * by_hand["traffic_bytes"]


def test_float32_matmuls_of_a_policy_are_float32_on_a_v5e(tpu_hlo, hlo, no_cache):
  try:
    device = tpu_hlo.devices("v5e:2x2")[0]
  except RuntimeError as error:
    pytest.skip(str(error))

  @functools.partial(mpjax.autocast, data_argnums=1)
  def loss(w, x):
    kept = mpjax.full_precision(lambda h: h @ h.T)(x @ w)
    return jnp.sum(jnp.sin(x[:, :3] @ w[:3]) @ w) + jnp.sum(kept)

  args = tpu_hlo.aot.placed((jnp.ones((128, 128)),) * 2, SingleDeviceSharding(device))
  program = hlo.parse(jax.jit(jax.grad(loss)).lower(*args).compile().as_text())
  every, exact = program.products(), program.products(highest=True)
  assert exact["f32"] == every["f32"] > 0
  # Fusions of a TPU multiply a float32 gradient by a low-precision operand.
  assert {*every} - {*exact} <= {"bf16", "f32 x bf16", "bf16 x f32"}


HEAD = (4 - 2) * 1024 * 32_000
"""What a head of the GPT in float32 sends besides: its gradient is in float32, not in bfloat16."""

OVER = {
  **{("gpt", "policy"): 1.14, ("encoder", "policy"): 1.13, ("moe", "policy"): 1.18},
  **{("mlp", "policy"): 1.06, ("mlp", "dynamic scale"): 1.11, ("gpt", "dynamic scale"): 1.24},
  **{("embedded", "policy"): 1.07, ("resnet", "dynamic scale"): 1.16},
}
"""Ratios above their bounds, with a limit. docs/tpu_programs.md has the causes."""


def test_recorded_figures_are_in_the_page_and_within_their_bounds(tpu_hlo, tpu_report):
  # Else run `python benchmarks/tpu_report.py`.
  page, results = tpu_report.PAGE.read_text(encoding="utf-8"), tpu_report.recorded()
  assert tpu_report.updated(page, results) == page
  for chip in results.keys() - {"pods", "h200"}:
    assert results[chip]["models"].keys() <= tpu_report.MODELS.keys() == tpu_hlo.SIZES["tpu"].keys()
    for (model, name, figure), ratio in tpu_report.exceeded(results[chip]).items():
      assert ratio <= OVER[model, name], (chip, model, name, figure)
  for each in (*results["pods"]["models"].values(), *results["h200"]["models"].values()):
    for name, one in each["versions"].items():
      # The gradients of biases and places are float32 sums.
      base = tpu_report.base_of(each["versions"], name) or one
      more = HEAD if "head" in name else 0
      assert tpu_report.total(one) - more <= 1.01 * tpu_report.total(base)
      # What says whether to skip is one value, and compilers choose its dtype.
      reduced = (one["collectives"].get(f"all-reduce {d}", [0])[0] for d in ("bool", "uint32"))
      assert sum(reduced) <= 1
      assert "masters" not in name or one["collectives"].get("all-gather float32", [0, 0])[1] < 1e6
