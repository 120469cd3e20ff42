"""The benchmarks run, compare like with like, and say what was recorded."""

import collections
import functools
import io
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import mpjax
from tests import programs
from tests.scripts import BENCHMARKS, benchmark

RECORDED = sorted((BENCHMARKS / "results").glob("*.json"))
MODELS = ("mlp", "resnet", "gpt")
HALVES = ("bfloat16", "float16")


bench = benchmark("run", name="bench")
measure = benchmark("measure")
report = benchmark("report")


def gradient(bench, case, apply):
  """The function that is differentiated in every step, with abstract arguments for it."""
  labels = jax.ShapeDtypeStruct(case.outputs, jnp.int32)
  rest = jax.eval_shape(case.make().init, jax.random.key(0), case.inputs)
  params = rest.pop("params")
  fun = jax.value_and_grad(functools.partial(bench.loss_fn, apply), has_aux=True)
  return fun, (params, rest, case.inputs, labels)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("model", MODELS)
def test_by_hand_and_by_policy_have_the_same_products_and_no_more_casts(bench, model, half):
  """But for a GELU, whose cube is float32: one cast into it, and two out, value and slope."""
  case = bench.SIZES["tiny"][model]
  applies = bench.variants(case, half)
  traced = {}
  for name in ("by hand", "policy"):
    fun, args = gradient(bench, case, applies[name])
    traced[name] = jax.make_jaxpr(fun)(*args)
  found = {name: collections.Counter(programs.products(x)) for name, x in traced.items()}
  assert found["by hand"] == found["policy"]
  assert programs.half_share(traced["by hand"]) == 1
  casts = {name: programs.converts(program) for name, program in traced.items()}
  gelu = {f"{half}->float32": 1, f"float32->{half}": 2} if model == "gpt" else {}
  assert casts["policy"] <= casts["by hand"] + collections.Counter(gelu)


def test_gradients_by_policy_err_no_more_than_by_hand(bench):
  case = bench.SIZES["tiny"]["mlp"]
  applies = bench.variants(case, "float16")
  values = {}
  for name in ("float32", "by hand", "policy"):
    fun, _ = gradient(bench, case, applies[name])
    params, rest, _ = bench.first_state(case, bench.optimizer())
    values[name] = jax.jit(fun)(params, rest, *case.data())
    assert {str(x.dtype) for x in jax.tree.leaves(values[name])} == {"float32"}
  errors = {name: programs.error(x, values["float32"]) for name, x in values.items()}
  assert 0 < errors["policy"] <= 1.1 * errors["by hand"] < 2e-3


@pytest.mark.parametrize(
  ("model", "parameters"),
  [
    # 25,557,032: what the paper's network has, with a bias in the last layer alone.
    ("resnet", 25_557_032),
    # Of each layer 12 width^2 + 13 width; tokens in and out, places, the last norm.
    ("gpt", 24 * (12 * 1024**2 + 13 * 1024) + 2 * 50304 * 1024 + 1024**2 + 2 * 1024),
  ],
)
def test_sizes_for_a_gpu_trace(bench, model, parameters):
  """Nothing of that size is computed here: shapes and dtypes only, forward and backward."""
  case = bench.SIZES["gpu"][model]
  fun, args = gradient(bench, case, bench.variants(case, "bfloat16")["policy"])
  assert sum(x.size for x in jax.tree.leaves(args[0])) == parameters
  program, ((loss, _), grads) = jax.make_jaxpr(fun, return_shape=True)(*args)
  assert programs.half_share(program) == 1
  assert (loss.shape, loss.dtype) == ((), jnp.float32)
  for x, param in zip(*map(jax.tree.leaves, (grads, args[0])), strict=True):
    assert (x.shape, x.dtype) == (param.shape, jnp.float32)


def test_flax_step_skips_like_ours(bench):
  """The rival is used right: it skips the step that overflows, and its scale comes down."""
  case = bench.SIZES["tiny"]["mlp"]
  apply = bench.variants(case, "float16")["policy"]
  tx = bench.mpjax.loss_scaling(bench.optimizer(), mpjax.DynamicLossScale())
  scale = bench.dynamic_scale.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**15))
  plain, ours = bench.first_state(case, bench.optimizer()), bench.first_state(case, tx)
  inputs, labels = case.data()
  steps = {
    "flax": (jax.jit(functools.partial(bench.flax_step, apply)), (plain, scale)),
    "mpjax": (jax.jit(functools.partial(bench.mpjax_step, tx, apply)), ours),
  }
  for name, (step, state) in steps.items():
    new, _ = step(state, jnp.full_like(inputs, 1e6), labels)
    before, after = (s[0] if name == "flax" else s for s in (state, new))
    assert jax.tree.all(jax.tree.map(np.array_equal, after[0], before[0]))
    found = new[1].scale if name == "flax" else mpjax.loss_scaling_metrics(new[2])["loss_scale"]
    assert found == 2**14
    further, _ = step(new, inputs, labels)
    assert not jax.tree.all(jax.tree.map(np.array_equal, further[0], new[0]))


def test_everything_is_measured_and_written(bench, report, tmp_path):
  text = io.StringIO()
  out = tmp_path / "new" / "figures.json"
  console = Console(file=text, width=80)
  results = bench.main("tiny", "float16", 2, ["mlp"], out, console)
  assert json.loads(out.read_text()) == results
  figures = results["precision"]["mlp"]
  assert list(figures) == ["float32", "by hand", "policy"]
  for one in figures.values():
    for key in ("seconds", "cold_trace_seconds", "warm_trace_seconds"):
      assert len(one[key]) == 2
      assert min(one[key]) > 0
    assert one["compiled"]["dot"] + one["compiled"]["custom_call"] > 0
    assert one["compiled"]["argument_bytes"] > one["compiled"]["temp_bytes"] / 1000 > 0
  # A layer of 16 and one of 3; a batch of 4 of 8 features; no gradient for the first input.
  assert figures["float32"]["traced"]["flops"] == 2 * 4 * (2 * 8 * 16 + 3 * 16 * 3)
  for of, exact in (("traced", ("products", "half_share", "flops")), ("compiled", ("dot",))):
    ours, theirs = figures["policy"][of], figures["by hand"][of]
    assert {key: ours[key] for key in exact} == {key: theirs[key] for key in exact}
    assert all(ours[key] <= 1.02 * theirs[key] for key in theirs)
  assert list(results["scaling"]["mlp"]) == ["none", "static", "dynamic", "flax"]
  shown = text.getvalue()
  assert "step / hand" in shown
  assert "step / none" in shown
  assert "…" not in shown
  lines = shown.splitlines()
  assert max(map(len, lines)) <= 80
  # No figure is broken over two lines.
  assert all(line.count("(") == line.count(")") for line in lines if "/" in line)


def test_turns_are_taken_in_turn(measure):
  order = []

  def run(name):
    order.append(name)
    return np.zeros(())

  runs = {name: functools.partial(run, name) for name in "abc"}
  times = measure.take_turns(runs, rounds=4, seconds=0)
  assert "".join(order[-12:]) == "abc" + "bca" + "cab" + "abc"
  assert {name: len(x) for name, x in times.items()} == dict.fromkeys("abc", 4)


def test_a_ratio_is_taken_round_by_round(measure):
  """The machine was ten times slower in the second round: that is no difference of the two."""
  found = measure.ratio([2.0, 20.0, 2.2, 3.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0])
  assert (found.low, found.median, found.high) == (2.0, 2.0, 2.2)
  assert str(found) == "2.00 (2.00-2.20)"


def test_operations_of_compiled_programs_are_counted(measure):
  text = """HloModule jit_f
%fused (p: f32[4]) -> (f32[4], bf16[4]) {
  %p = f32[4]{0} parameter(0)
  %add.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(f)/convert(x)"}
  ROOT %convert.2 = bf16[4]{0} convert(%add.1)
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %fusion = (f32[4]{0}, bf16[4]{0}) fusion(%p), kind=kLoop, calls=%fused
  ROOT %call = f32[4]{0} custom-call(%fusion), custom_call_target="dot"
}
"""
  assert measure.count_hlo(text) == {
    "parameter": 1,
    "add": 1,
    "convert": 1,
    "fusion": 1,
    "custom-call": 1,
  }


def test_operations_are_counted_in_what_xla_compiled(measure):
  compiled = jax.jit(lambda x: (x @ x).astype(jnp.int32)).lower(jnp.ones((4, 4))).compile()
  found = measure.count_compiled(compiled)
  assert found["dot"] + found["custom_call"] == 1
  assert found["convert"] == 1
  assert found["argument_bytes"] == found["output_bytes"] == 64


def test_machine_is_not_named(measure):
  text = json.dumps(measure.environment())
  assert platform.node() not in text
  assert "CPU" in measure.hardware()


def test_figures_are_recorded():
  assert RECORDED
  for file in RECORDED:
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["environment"]["versions"].keys() > {"mpjax", "jax", "flax", "optax"}
    assert results["precision"].keys() == results["scaling"].keys() == set(MODELS)
    assert results["settings"]["rounds"] >= 10


def test_readme_shows_what_is_recorded(report):
  """Else run `python benchmarks/report.py`."""
  readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
  assert report.updated(readme) == readme
  assert report.markdown(json.loads(RECORDED[0].read_text(encoding="utf-8"))) in readme
