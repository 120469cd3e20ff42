"""What a recipe is told: the operands of the three matmuls of a layer."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._matmul.protocol import Operand
from tests.format_oracle import normal
from tests.matmul.test_recipes import BLOCKS, INT8, Blocks, Int8


@pytest.mark.parametrize(("recipe", "cls"), [(INT8, Int8), (BLOCKS, Blocks)], ids=["row", "block"])
def test_a_recipe_is_told_of_each_operand(monkeypatch, recipe, cls):
  told, quantise = [], cls.quantise

  def recording(self, x, operand):
    told.append((operand, x.shape))
    return quantise(self, x, operand)

  monkeypatch.setattr(cls, "quantise", recording)
  monkeypatch.setattr(cls, "why_not_gradient", lambda self, depth, *, of_weight: None)
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=recipe)
  fun = mpjax.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), policy, data_argnums=1)
  # In blocks of 32, 40 rows are padded to 64.
  jax.make_jaxpr(jax.grad(fun, (0, 1)))(normal(1, (64, 96)), normal(0, (40, 64)))
  shapes = {
    ("input", "forward"): ((1,), (40, 64), (1, 40, 64)),
    ("weight", "forward"): ((0,), (64, 96), (1, 96, 64)),
    ("weight", "input_grad"): ((1,), (64, 96), (1, 64, 96)),
    ("gradient", "input_grad"): ((1,), (40, 96), (1, 40, 96)),
    ("input", "weight_grad"): ((0,), (40, 64), (1, 64, 64)),
    ("gradient", "weight_grad"): ((0,), (40, 96), (1, 96, 64)),
  }
  wanted = {
    (Operand((2,) if recipe.block else summed, *key), stack if recipe.block else shape)
    for key, (summed, shape, stack) in shapes.items()
  }
  assert set(told) == wanted
