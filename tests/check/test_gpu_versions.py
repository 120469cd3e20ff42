"""The versions of a step that a GPU is measured with, and the process of JAX that runs them.

They compute the same, whatever runs them; a GPU, or its compiler, is for the last two tests.
"""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.models import kernels
from tests.scripts import BENCHMARKS, benchmark

pytestmark = pytest.mark.standard_promotion("dtypes")

gpu_hlo, gpu_versions = benchmark("gpu_hlo"), benchmark("gpu_versions")
jax_worker, draws = benchmark("jax_worker"), benchmark("draws")


@pytest.mark.standard_promotion  # As norms are written in models: `y * scale`.
@pytest.mark.parametrize("model", ["mlp", "gpt", "lstm", "after", "experts"])
def test_versions_compute_the_same_update(gpu_versions, draws, model):
  # But for roundings: the first loss, and the parameters after a step.
  case = gpu_versions.SIZES["tiny"][model]
  described = json.loads(json.dumps(gpu_versions.described(model, "tiny", "bfloat16")))
  variables = gpu_versions.tree(draws.parameters(described["shapes"]))
  batch = draws.batch(**described["batch"])
  found = gpu_versions.versions(case, "bfloat16")
  assert tuple(found) == gpu_versions.NAMES
  names = {
    "mlp": ("by hand", "dynamic", "flax DynamicScale"), "gpt": ("policy", "autocast"),
    "lstm": ("policy",), "after": ("by hand", "policy"), "experts": ("by hand",),
  }  # fmt: skip
  values = {}
  for name in ("float32 highest", *names[model]):
    state, loss = jax.jit(found[name].step)(found[name].begin(*variables), *batch)
    values[name] = (loss, (state[0] if name == "flax DynamicScale" else state)[0])
  loss, params = values["float32 highest"]
  for name, (other, moved) in values.items():
    assert abs(other - loss) <= 0.01 * loss, name
    for x, y, first in zip(*map(jax.tree.leaves, (moved, params, variables[0])), strict=True):
      assert x.dtype == y.dtype == np.float32
      # The first step of Adam is a sign: where a gradient is rounded to zero it may differ.
      steps = np.sign(np.round((x - first) * 1e5)), np.sign(np.round((y - first) * 1e5))
      assert np.mean(steps[0] == steps[1]) > 0.8 or x.size < 100, name


def test_precision_of_float32_is_in_the_step(gpu_versions):
  case = gpu_versions.SIZES["tiny"]["mlp"]
  found = gpu_versions.versions(case, "bfloat16")
  shapes = dict(gpu_versions.shapes(case))
  labels = jax.ShapeDtypeStruct(case.outputs, np.int32)

  def precisions(name):
    version = found[name]
    state = jax.eval_shape(version.begin, shapes["params"], {})
    with version.context():
      jaxpr = jax.make_jaxpr(version.step)(state, case.inputs, labels)
    return str(jaxpr).count("HIGHEST")

  assert precisions("float32 highest") > 0
  assert precisions("TF32") == precisions("policy") == 0


def test_what_is_drawn_is_what_flax_draws(gpu_hlo, gpu_versions, draws, monkeypatch):
  # The same variances, so that a model trains; and the same numbers in any process.
  sizes = gpu_versions.SIZES["cpu"]
  small = {n: gpu_hlo.aot.shallower(sizes[n], 1) for n in ("gpt", "resnet", "experts")}
  monkeypatch.setattr(gpu_versions, "SIZES", {"small": small})
  for model, case in small.items():
    shapes = gpu_versions.described(model, "small", "bfloat16")["shapes"]
    drawn = draws.parameters(shapes)
    variables = jax.jit(case.make().init)(jax.random.key(0), case.data()[0])
    ours = jax.tree.leaves(gpu_versions.tree(drawn)[0])
    for x, y in zip(ours, jax.tree.leaves(variables["params"]), strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)
      if x.size > 10_000:
        assert np.std(x) == pytest.approx(float(np.std(y)), rel=0.05)
  again = draws.parameters({"a/kernel": (3, 4)})["a/kernel"]
  assert np.array_equal(again, draws.parameters({"b/kernel": (2,), "a/kernel": (3, 4)})["a/kernel"])


def test_process_of_jax_checks_and_measures(jax_worker):
  # In this process, without the lines between.
  session = jax_worker.Session()
  assert session.hello()["environment"]["backend"] == "cpu"
  loaded = session.load("mlp", "tiny", "bfloat16", "xla")
  assert loaded == {"parameters": 8 * 16 + 16 + 2 * 16 + 16 * 3 + 3}
  failed = session.trace(["policy", "float8"])
  assert failed == {"failed_versions": {"float8": "no matmul qualifies"}}
  compiled = session.compile()
  assert list(compiled) == ["policy"]
  assert compiled["policy"]["temp_bytes"] > 0
  losses = session.check("policy")["losses"]
  assert losses[-1] < losses[0]
  found = session.measure("policy", 2)
  assert found["seconds"] > 0
  assert found["finite"]
  assert session.check("policy")["losses"] == losses  # Every time from the same parameters.


# With a GPU, or its compiler


@pytest.mark.gpu
def test_on_a_gpu_everything_runs(tmp_path):
  # The smallest size: what is compiled and measured, not how fast it is.
  out = tmp_path / "figures.json"
  command = [sys.executable, str(BENCHMARKS / "gpu_bench.py"), "--size", "tiny", "--models", "gpt"]
  options = ["--rounds", "2", "--seconds", "0", "--out", str(out), "--torch-compile", "none"]
  environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
  subprocess.run([*command, *options], env=environment, check=True, timeout=500)
  versions = json.loads(out.read_text())["models"]["gpt"]["parts"]["jax"]["versions"]
  assert versions.pop("float8")["failed"] == "no matmul qualifies"
  assert not {name: one for name, one in versions.items() if "failed" in one}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_attention_is_one_kernel_of_cudnn_on_an_h200(
  gpu_hlo, h200, gpu_versions, half, monkeypatch
):
  # Two calls a layer, forward and backward, by hand, under a policy and with autocast.
  kernels.pretend_cudnn(monkeypatch)
  gpt = gpu_hlo.SIZES["gpu"]["gpt"]
  figures = {name: [] for name in ("TF32", "by hand", "policy", "autocast")}

  class Gpt(type(gpt.make())):
    def through_layers(self, x, mask):
      # As the positions, a parameter, make it under a policy.
      return super().through_layers(x.astype(np.float32), mask)

  for layers in (1, 2):
    case = dataclasses.replace(gpt, make=lambda dtype=None, n=layers: Gpt(n, 1024, 16, 512, dtype))
    variables = dict(gpu_versions.shapes(case))
    params, versions = variables.pop("params"), gpu_versions.versions(case, half, "cudnn")
    for name in figures:
      state = jax.eval_shape(versions[name].begin, params, variables)
      args = gpu_hlo.aot.arguments_of(case, h200, state)
      figure, text = gpu_hlo.aot.compiled_step(versions[name].step, args, gpu_hlo.OPTIONS)
      assert text.count('custom_call_target="__cudnn$fmha') == 2 * layers * (name != "TF32")
      figures[name].append(figure)
  # Of a layer: the second one.
  layer = {k: [b[x] - a[x] for x in ("bytes", "temp_bytes")] for k, (a, b) in figures.items()}
  assert max(layer["policy"][0], layer["autocast"][0]) <= layer["by hand"][0]
  assert max(layer["policy"][1], layer["autocast"][1]) < 0.7 * layer["TF32"][1]
