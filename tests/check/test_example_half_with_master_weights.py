"""Half storage with masters, on two devices: what Apex's FP16_Optimizer promises, to the bit."""

import collections
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import mpjax
from tests import programs

STEPS = 30
DEVICES = 2

SPREAD = 0.024
"""The standard deviation of the test loss after STEPS steps in float32, over five seeds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Any:
  return tmp_path_factory.mktemp("half")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
  """What the one training of this file leaves, for all tests."""
  return {}


@pytest.fixture
def half(example) -> Any:
  return example("half_with_master_weights")


@pytest.fixture
def runs(half, folder, kept) -> Any:
  if not kept:
    text = io.StringIO()
    console = Console(file=text, width=100)
    path = folder / "new" / "plot.png"
    kept |= half.main(STEPS, path, ("float32", "float16"), console, devices=DEVICES)
    kept["text"], kept["path"] = text.getvalue(), path
  return kept


def bits(x):
  x = np.asarray(x)
  return x.dtype.name, x.shape, x.tobytes()


def is_norm(path):
  return path[0].key.startswith("BatchNorm")


def test_it_learns_as_well_as_in_float32(runs):
  for policy in ("float32", "float16"):
    run = runs[policy]
    assert len(run.losses) == STEPS
    assert np.mean(run.losses[-5:]) < 0.2 * run.losses[0]
    accuracy = float(run.figures["test accuracy"].removesuffix("%"))
    assert accuracy > 92
    assert run.figures["test accuracy"] in runs["text"]
  difference = runs["float16"].state["loss"] - runs["float32"].state["loss"]
  assert 0 < abs(difference) < SPREAD
  assert runs["path"].read_bytes().startswith(b"\x89PNG")


def test_parameters_are_rounded_masters_and_norms_are_float32(runs):
  state = runs["float16"].state["state"]
  masters = mpjax.master_params(state.opt_state)
  flat, treedef = jax.tree_util.tree_flatten_with_path(state.params)
  norms = 0
  for (path, param), master in zip(flat, treedef.flatten_up_to(masters), strict=True):
    if is_norm(path):
      assert master is None  # its own master
      assert param.dtype == jnp.float32
      norms += 1
    else:
      assert param.dtype == jnp.float16
      assert master.dtype == jnp.float32
      assert bits(param) == bits(np.asarray(master).astype(np.float16))
      # There is something to round: the master has more digits.
      assert bits(master) != bits(np.asarray(param).astype(np.float32))
  assert norms == 4
  assert {x.dtype for x in jax.tree.leaves(state.model_state)} == {jnp.dtype("float32")}


def test_replicas_agree(runs):
  for policy in ("float32", "float16"):
    for x in jax.tree.leaves(runs[policy].state["state"]):
      first, *others = (shard.data for shard in x.addressable_shards)
      assert len(others) == DEVICES - 1
      assert all(bits(other) == bits(first) for other in others)


def test_the_scale_is_static_and_then_dynamic(runs):
  """And the optimizer goes on where it was: its schedule has counted all steps."""
  found = runs["float16"].state
  scales = [int(x["loss_scale"]) for x in found["history"]]
  # It doubles in the tenth of its finite steps.
  assert scales == [128] * 15 + [2**15] * 9 + [2**16] * 6
  assert all(x["finite"] for x in found["history"])
  assert int(optax.tree_utils.tree_get(found["state"].opt_state, "count")) == STEPS
  assert {int(x["loss_scale"]) for x in runs["float32"].state["history"]} == {1}


def test_the_exported_checkpoint_is_the_masters(half, runs):
  """Read without mpjax, it is float32 throughout, and the plain network takes it as it is."""
  found = runs["float16"].state
  state = found["state"]
  wanted = {
    "params": mpjax.master_params(state.opt_state, state.params),
    "batch_stats": state.model_state,
  }
  with ocp.StandardCheckpointer() as checkpointer:
    raw = checkpointer.restore(found["checkpoint"])
  assert jax.tree.map(bits, raw) == jax.tree.map(bits, wanted)
  assert {x.dtype for x in jax.tree.leaves(raw)} == {jnp.dtype("float32")}
  loaded = half.load(found["checkpoint"])
  assert jax.tree.map(bits, loaded) == jax.tree.map(bits, wanted)
  # Evaluated in float32 it is nearly what it was in half, and not quite.
  assert 0 < abs(found["exported_loss"] - found["loss"]) < 1e-2
  reference = runs["float32"].state
  assert reference["exported_loss"] == pytest.approx(reference["loss"], rel=1e-6)


def test_what_is_computed_in_which_dtype(half):
  """Products take float16, weight gradients leave them in float32, statistics are in float32."""
  model = half.half_network("float16")
  images, labels = jnp.zeros((8, 8, 8, 1)), jnp.zeros(8, jnp.int32)

  def loss(params, batch_stats):
    variables = {"params": params, "batch_stats": batch_stats}
    return half.losses(model, variables, images, labels, train=True)[0].mean()

  variables = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))
  args = variables["params"], variables["batch_stats"]
  forward = jax.make_jaxpr(loss)(*args)
  sums = [
    e.invars[0].aval for e, _ in programs.equations(forward) if str(e.primitive) == "reduce_sum"
  ]
  assert {x.dtype for x in sums} == {jnp.dtype("float32")}
  assert len(sums) >= 2 * 2 + 2  # mean and variance of each norm, softmax, mean of the loss
  backward = jax.make_jaxpr(jax.grad(loss))(*args)
  products = programs.products(backward)
  assert programs.half_share(backward) == 1
  # Three layers forward, the inputs of two (nobody asks for the images'), three kernels.
  results = collections.Counter(x.result.partition("[")[0] for x in products)
  assert results == {"float16": 3 + 2, "float32": 3}
