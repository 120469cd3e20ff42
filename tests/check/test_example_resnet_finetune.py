"""The residual network of the examples is ResNet-50, and is fine-tuned from what was saved."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mpjax._jaxprs import count
from mpjax._jaxprs.walk import walk

HALF, FULL = jnp.dtype("float16"), jnp.dtype("float32")


@pytest.fixture
def resnet(example) -> Any:
  return example("resnet_finetune")


def as_bytes(tree):
  return [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.mark.convergence
def test_half_is_fine_tuned_like_float32(resnet, tmp_path):
  runs = fine_tuned(resnet, 50, tmp_path)
  plain, mixed = (run.state for run in runs.values())
  for run in runs.values():
    assert run.losses[-5:].mean() < 0.6 * run.losses[0]
    assert run.state.accuracy > 0.8
  # In float32 it ends between 0.90 and 0.93, from five initial weights.
  assert abs(plain.accuracy - mixed.accuracy) < 0.03


def test_half_is_fine_tuned_from_what_was_saved(resnet, tmp_path):
  fine_tuned(resnet, 2, tmp_path)


def fine_tuned(resnet, steps, tmp_path):
  """Runs the example, and checks what has nothing to do with how well it has learned."""
  text, path, policies = io.StringIO(), tmp_path / "plot.png", ("float32", "mixed_float16")
  network = resnet.ResNet(outputs=8, blocks=(1, 1, 1), width=8, small_images=True)
  runs = resnet.main(steps, path, policies, Console(file=text, width=100), network=network)
  assert path.read_bytes().startswith(b"\x89PNG")
  plain, mixed = (run.state for run in runs.values())
  for run in runs.values():
    assert f"{run.state.accuracy:.2%}" in text.getvalue()
  begins_with_what_was_saved(resnet, plain, mixed)
  is_half_where_it_should_be(resnet, mixed)
  skips_as_a_whole(resnet, mixed)
  keeps_the_outputs_of_convolutions(plain.kept, mixed.kept)
  return runs


def begins_with_what_was_saved(resnet, plain, mixed):
  params, batch_stats = plain.first
  assert as_bytes(plain.first) == as_bytes(mixed.first)
  assert {x.dtype for x in jax.tree.leaves((mixed.first, mixed.state.params))} == {FULL}
  new = resnet.initialise(mixed.training.network, jax.random.key(1))
  assert as_bytes(params["head"]) == as_bytes(new["params"]["head"])
  # All else was trained: no leaf is as it was initialised.
  before = resnet.initialise(plain.training.network, jax.random.key(0))
  untrained = as_bytes(before["params"]) + as_bytes(before["batch_stats"])
  saved = {name: x for name, x in params.items() if name != "head"}
  assert not set(untrained) & {*as_bytes(saved), *as_bytes(batch_stats)}


def is_half_where_it_should_be(resnet, mixed):
  data, _ = resnet.load_data(5)
  batch = resnet.Data(data.images[:32], data.labels[:32])
  program = jax.make_jaxpr(mixed.training.step)(mixed.state, batch)
  products = count.products(program)
  assert count.half_share(products) == 1
  eqns = [visit.eqn for visit in walk(program)]
  forward = [e for e in eqns if e.primitive.name == "conv_general_dilated"]
  for eqn in forward:
    numbers = eqn.params["dimension_numbers"]
    image, kernel = (x.aval for x in eqn.invars)
    # Channels in and out, and in the backward pass the batch, which is summed over.
    sizes = [image.shape[numbers.lhs_spec[1]], *(kernel.shape[i] for i in numbers.rhs_spec[:2])]
    assert all(size % 8 == 0 for size in sizes)
  # Of batch normalisation, and of the loss.
  sensitive = [e for e in eqns if e.primitive.name in ("rsqrt", "exp", "log")]
  assert {e.primitive.name for e in sensitive} == {"rsqrt", "exp", "log"}
  assert {x.aval.dtype for e in sensitive for x in e.invars} == {FULL}


def skips_as_a_whole(resnet, mixed):
  data, _ = resnet.load_data(5)
  images = data.images[:32].copy()
  images[0, 0, 0, 0] = 1e6  # float16 ends at 65504
  kept = ("step", "params", "model_state")
  before = as_bytes([getattr(mixed.state, name) for name in kept])
  after, metrics = mixed.training.step(mixed.state, resnet.Data(images, data.labels[:32]))
  assert not metrics["finite"]
  assert as_bytes([getattr(after, name) for name in kept]) == before


def keeps_the_outputs_of_convolutions(plain, mixed):
  """Counts them from the paper's table: 224 x 224, four stages, the stride in the 3x3 (1.5)."""
  outputs = 112**2 * 64
  for side, features, blocks in ((56, 64, 3), (28, 128, 4), (14, 256, 6), (7, 512, 3)):
    outputs += side**2 * blocks * (features + features + 4 * features)
    outputs += side**2 * 4 * features  # of the first block's shortcut
    if features > 64:
      outputs += ((2 * side) ** 2 - side**2) * features  # the stride comes after its first 1x1
  assert outputs == 11_113_984  # as published for ResNet-50
  assert plain == pytest.approx(64 * 4 * outputs, rel=1e-3)
  assert mixed == pytest.approx(64 * 2 * outputs, rel=1e-3)


def test_it_is_resnet_50(resnet):
  network = resnet.ResNet()
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), FULL)
  variables = jax.eval_shape(
    lambda key, images: network.init(key, images, train=False), jax.random.key(0), images
  )
  count = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in variables.items()}
  # As in torchvision: 25,557,032 parameters, and a mean and a variance of 26,560 channels.
  assert count == {"params": 25_557_032, "batch_stats": 2 * 26_560}
