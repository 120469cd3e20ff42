"""LeNet-5 at levels: each layer runs in the dtype that its level and its rules say."""

import collections
import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import mpjax

HALF, FULL = jnp.dtype("float16"), jnp.dtype("float32")

LAYERS = {
  "O0": dict.fromkeys(("conv1", "conv2", "fc1", "fc2", "fc3"), FULL),
  "O2": dict.fromkeys(("conv1", "conv2", "fc1", "fc2", "fc3"), HALF),
  "O3": dict.fromkeys(("conv1", "conv2", "fc1", "fc2", "fc3"), HALF),
  "O2, fc3 float32": {**dict.fromkeys(("conv1", "conv2", "fc1", "fc2"), HALF), "fc3": FULL},
  "O2, Conv float32": {
    **dict.fromkeys(("conv1", "conv2"), FULL),
    **dict.fromkeys(("fc1", "fc2", "fc3"), HALF),
  },
}

MIXED = "O2, fc3 float32"

STORED_IN_HALF = pytest.mark.filterwarnings("ignore:.*stored in low precision")
"""What O3 is warned of."""


@pytest.fixture
def lenet(example) -> Any:
  return example("lenet_per_module")


@pytest.mark.convergence
def test_half_with_one_float32_layer_learns_like_float32(lenet, tmp_path):
  runs = trained(lenet, 60, tmp_path)
  for run in runs.values():
    assert run.losses[-10:].mean() < 0.2 * run.losses[0]
    assert run.state.accuracy > 0.9
  # Seeds 0 to 5 of the float32 run lie between 0.920 and 0.945.
  assert abs(runs["O0"].state.accuracy - runs[MIXED].state.accuracy) < 0.025


def test_half_with_one_float32_layer_is_stored_and_shown_as_that(lenet, tmp_path):
  trained(lenet, 2, tmp_path)


def trained(lenet, steps, tmp_path):
  """Runs the example, and checks what has nothing to do with how well it has learned."""
  text = io.StringIO()
  runs = lenet.main(steps, tmp_path / "plot.png", ("O0", MIXED), Console(file=text, width=100))
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

  for run in runs.values():
    assert f"{run.state.accuracy:.2%}" in text.getvalue()
  for run, counted in ((runs["O0"], 0), (runs[MIXED], steps)):
    # Without a loss scale nothing is counted.
    assert (run.state.metrics["total"], len(run.losses)) == (counted, steps)
  state = runs[MIXED].state.state
  master = mpjax.master_params(state.opt_state)
  for layer, dtype in LAYERS[MIXED].items():
    assert {p.dtype for p in jax.tree.leaves(state.params[layer])} == {dtype}
    if dtype == HALF:
      jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, m.astype(HALF)),
        state.params[layer],
        master[layer],
      )
    else:
      assert jax.tree.leaves(master[layer]) == []  # In float32: its own master.
  for name, run in runs.items():
    dtypes = ("f32" if dtype == FULL else "f16" for dtype in LAYERS[name].values())
    assert [run.figures[layer] for layer in LAYERS[name]] == [f"{one} / {one}" for one in dtypes]
  assert re.search(r"fc3 +│ +f32 / f32 │ +f32 / f32 │", text.getvalue())
  return runs


@STORED_IN_HALF
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_in_the_dtype_that_the_table_says(lenet, name):
  model, state, train_step = lenet.prepare(lenet.LEVELS[name], 1, 0)
  rng = np.random.default_rng(0)
  batch = {
    "images": rng.normal(size=(4, 32, 32, 1)).astype(np.float32),
    "labels": np.arange(4, dtype=np.int32),
  }
  traced = train_step.trace(state, batch)
  found = lenet.product_dtypes(traced.jaxpr)
  for layer, dtype in LAYERS[name].items():
    # Forward, and for weights and inputs backward; nobody wants the gradient of the images.
    assert found[layer] == [dtype.name] * (2 if layer == "conv1" else 3)
    assert {p.dtype for p in jax.tree.leaves(state.params[layer])} == {dtype}

  # What the compiler is given, read by its text.
  program = traced.lower().as_text()
  pattern = r"stablehlo\.(?:dot_general|convolution).*: \(tensor<\S*?(f\d+)>, tensor<\S*?(f\d+)>\)"
  operands = collections.Counter(re.findall(pattern, program))
  wanted = collections.Counter(
    (d.replace("float", "f"),) * 2 for dtypes in found.values() for d in dtypes
  )
  assert operands == wanted

  # What the last layer hands on is a float16 number, unless it computed in float32.
  logits = model.apply({"params": state.params}, batch["images"])
  assert logits.dtype == FULL
  representable = (logits == logits.astype(HALF).astype(FULL)).all()
  assert bool(representable) == (LAYERS[name]["fc3"] == HALF)


def test_names_of_policies_store_float32(lenet):
  for name, half in (("mixed_float16", HALF), ("mixed_bfloat16", jnp.dtype("bfloat16"))):
    level = lenet.POLICIES[name]
    assert (level.policy.compute_dtype, level.policy.param_dtype) == (half, FULL)
    assert level.policy == mpjax.Policy.parse(name)
