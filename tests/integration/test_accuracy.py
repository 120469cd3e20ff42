"""How far each of Flax's layers is from float32 under a policy: invariant I15, over five seeds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.models.layers import EXEMPT, LAYERS
from tests.models.situations import RNGS
from tests.models.values import filled, shapes

BOUNDS = {"bfloat16": 1.6e-2, "float16": 2e-3}
SEEDS = 5
EVERY = {**LAYERS, **EXEMPT}


def drawn(tree: Any, seed: int, largest: float) -> Any:
  """Returns normal values in place of the floating inputs of a layer, none above `largest`.

  They are multiples of 1/16, which both half types hold: what is measured is the layer, and a
  maximum is where it is in float32.
  """
  rng = np.random.default_rng(seed)

  def leaf(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    values = np.clip(rng.normal(size=x.shape), -largest, largest)
    return (values * 16).round().astype(np.float32) / 16 if is_float else x

  return jax.tree.map(leaf, tree)


@functools.cache
def measured(name: str) -> dict[str, tuple[Any, Any]]:
  """Returns outputs and gradients of one layer for each policy, a row for each seed."""
  layer = EVERY[name]
  module = layer.make()
  models = {half: mpjax.linen.with_policy(module, f"mixed_{half}") for half in BOUNDS}
  variables = shapes(module, *layer.inputs, **layer.kwargs)
  largest = 1.0 if name.endswith("_cell") else 4.0  # A carry is a mean of tanh.
  rows = [
    (filled(variables, seed), drawn(layer.inputs, 10 + seed, largest)) for seed in range(SEEDS)
  ]
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

  def one(model, variables, inputs):
    params = variables.get("params", {})
    state = {k: tree for k, tree in variables.items() if k != "params"}
    ints = not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(inputs))

    def loss(params, floats):
      args = inputs if ints else floats
      out, _ = model.apply(
        {"params": params, **state}, *args, **layer.kwargs, rngs=RNGS, mutable=list(state)
      )
      weights = drawn(out, 3, 4.0)
      return sum(jax.tree.leaves(jax.tree.map(lambda x, w: jnp.sum(x * w), out, weights))), out

    grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, () if ints else inputs)
    return out, grads

  def all_of_them(variables, inputs):
    every = {"float32": module, **models}
    return {half: one(model, variables, inputs) for half, model in every.items()}

  return programs.run(jax.vmap(all_of_them), *stacked)


def errors(name: str, half: str) -> tuple[float, float]:
  """Returns the largest error of any seed: forward, and of the gradients."""
  found = jax.device_get(measured(name))
  rows = [jax.tree.map(lambda x, seed=seed: x[seed], found) for seed in range(SEEDS)]
  forward = [programs.error(row[half][0], row["float32"][0]) for row in rows]
  backward = [programs.error(row[half][1], row["float32"][1]) for row in rows]
  return np.max(forward), np.max(backward)


@pytest.mark.case("I15")
@pytest.mark.parametrize("half", BOUNDS)
@pytest.mark.parametrize("name", EVERY)
def test_layers_are_as_near_to_float32_as_their_type_allows(name, half):
  forward, backward = errors(name, half)
  assert forward <= BOUNDS[half]
  assert backward <= BOUNDS[half] * (2 if name.startswith("attention") else 1)
