"""Every product in half: for each of Flax's layers, and in each situation that models are run in.

Products are counted in the traced program of loss and gradients, by `tests.programs`.
"""

import contextlib
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.models.layers import EXEMPT, LAYERS
from tests.models.situations import RNGS, SITUATIONS
from tests.models.values import filled, normal, shapes

HALF = ["bfloat16", "float16"]
WAYS = ["with_policy", "policy_scope"]
BOTH = pytest.mark.parametrize("half", HALF)
BY = pytest.mark.parametrize("way", WAYS)


def policied(model: nn.Module, policy: Any, way: str) -> tuple[Any, Any]:
  """Returns the model, and the context to run it in, for one of the two ways in."""
  if way == "with_policy":
    return mpjax.linen.with_policy(model, policy), contextlib.nullcontext()
  return model, mpjax.linen.policy_scope(policy)


def is_float(x: Any) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.floating))


def total(tree: Any) -> Any:
  """Returns a float32 loss of all floating outputs; their dtypes stay visible beside it."""
  leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
  return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), tree


def layer_programs(name: str, policy: Any, way: str = "with_policy") -> tuple[Any, Any, Any]:
  """Returns forward program, program with gradients, and the shapes of (outputs, gradients)."""
  layer = {**LAYERS, **EXEMPT}[name]
  module = layer.make()
  variables = shapes(module, *layer.inputs, **layer.kwargs)
  params = variables.get("params", {})
  state = filled({k: tree for k, tree in variables.items() if k != "params"})
  model, scope = policied(module, policy, way)
  floats = tuple(x for x in layer.inputs if all(map(is_float, jax.tree.leaves(x))))

  def forward(params, inputs):
    inputs = inputs if floats else layer.inputs
    variables = {"params": params, **state}
    out, _ = model.apply(variables, *inputs, **layer.kwargs, rngs=RNGS, mutable=list(state))
    return out

  def backward(params, inputs):
    grads, out = jax.grad(lambda *args: total(forward(*args)), (0, 1), has_aux=True)(params, inputs)
    return out, grads

  with scope:
    return (
      jax.make_jaxpr(forward)(params, floats),
      *jax.make_jaxpr(backward, return_shape=True)(params, floats),
    )


@pytest.mark.case("B038", "B085", "B086", "B089")
@BY
@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, half, way):
  forward, both, (out, (grads, input_grads)) = layer_programs(name, f"mixed_{half}", way)
  if LAYERS[name].products:
    assert programs.half_share(forward) == 1
    assert programs.half_share(both) == 1
    assert {dtype for p in programs.products(both) for dtype in p.dtypes} == {half}
  else:
    assert programs.products(both) == []
  found = jax.tree.leaves((out, grads, input_grads))
  assert {x.dtype for x in found} == {np.dtype("float32")}


NORMS = [name for name in LAYERS if name.endswith("_norm") and name != "weight_norm"]
GATED = ("lstm", "optimized_lstm", "gru", "mgu", "conv_lstm")
FLOAT32_AT_THE_END = (
  *(*NORMS, "batch_norm_running", "embed", "dropout", "prelu", "pooling"),
  *(f"{gated}_{end}" for gated in GATED for end in ("cell", "rnn")),
  *("rnn_reversed", "bidirectional"),
)
"""Layers that end in an operation of the float32 list, without a product, or in a float32 carry."""


@pytest.mark.case("A80")
@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_layers_return_the_dtype_that_they_compute(name, half):
  _, _, (out, grads) = layer_programs(name, mpjax.Policy(compute_dtype=half))
  assert {str(x.dtype) for x in jax.tree.leaves(grads)} <= {"float32"}  # as what they belong to
  wanted = "float32" if name in FLOAT32_AT_THE_END else half
  assert {str(x.dtype) for x in jax.tree.leaves(out)} == {wanted}


CELLS = {
  "simple": (nn.SimpleCell, 1),
  "lstm": (nn.LSTMCell, 2),
  "optimized_lstm": (nn.OptimizedLSTMCell, 2),
  "gru": (nn.GRUCell, 1),
  "mgu": (nn.MGUCell, 1),
  "conv_lstm": (lambda features, **kwargs: nn.ConvLSTMCell(features, (3,), **kwargs), 2),
}


@pytest.mark.case("A74")
@BOTH
@pytest.mark.parametrize("name", CELLS)
def test_cells_agree_with_an_all_half_cell_for_eight_mixes_of_dtypes(name, half):
  cell, carries = CELLS[name]
  model = mpjax.linen.with_policy(cell(8), mpjax.Policy(compute_dtype=half))
  shape = (3, 4, 8) if name == "conv_lstm" else (3, 8)
  x, *carry = (np.tanh(normal(*shape, seed=seed)) for seed in range(1 + carries))
  carry = tuple(carry) if carries > 1 else carry[0]
  params = filled(shapes(cell(8), carry, x))["params"]

  def cast(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)

  def every_mix(params, carry, x):
    mixes = itertools.product(("float32", half), repeat=3)
    found = {
      mix: model.apply({"params": cast(params, mix[0])}, cast(carry, mix[1]), cast(x, mix[2]))
      for mix in mixes
    }
    # No param_dtype=half: it only says how to draw parameters, and jax 0.12 draws none in half.
    all_half = cell(8, dtype=jnp.dtype(half).type)
    control = all_half.apply({"params": cast(params, half)}, cast(carry, half), cast(x, half))
    return found, control

  found, (control_carry, control) = programs.run(every_mix, params, carry, x)
  assert len(found) == 8
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  for (_, carried, _), (new, out) in found.items():
    # The state decides; that of a simple cell is made anew of two products.
    wanted = half if name == "simple" else carried
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((new, out))} == {wanted}
    assert programs.error(out, control) <= bound
    assert programs.error(new, control_carry) <= bound


ATTENTION = [name for name in LAYERS if name.startswith("attention")]


@pytest.mark.case("B083", "B084")
@BOTH
@pytest.mark.parametrize("name", [*NORMS, "batch_norm_running"])
def test_norms_compute_their_statistics_in_float32(name, half):
  forward, _, _ = layer_programs(name, "bfloat16" if half == "bfloat16" else "float16")
  assert programs.dtypes_of(forward, "rsqrt") == {"float32"}
  if name != "batch_norm_running":
    assert programs.dtypes_of(forward, "reduce_sum") == {"float32"}
  assert programs.converts(forward)[f"float32->{half}"] == 1  # rounded once, at the end


@pytest.mark.case("B088")
@BOTH
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_takes_its_softmax_in_float32(name, half):
  _, both, _ = layer_programs(name, f"mixed_{half}")
  assert programs.dtypes_of(both, "exp") == {"float32"}


def situation_program(name: str, policy: Any, way: str) -> tuple[Any, Any]:
  """Returns the program with gradients, and the shapes of (outputs, gradients)."""
  situation = SITUATIONS[name]
  variables = shapes(situation.make(), *situation.inputs)
  params = variables["params"]
  state = filled({k: tree for k, tree in variables.items() if k != "params"})
  model, scope = policied(situation.make(), policy, way)

  def forward(params, *inputs):
    return total(situation.run(model, {"params": params, **state}, *inputs))

  def both(params, *inputs):
    if not situation.backward:
      return forward(params, *inputs)[1], (params, inputs)
    grads, out = jax.grad(forward, (0, 1), has_aux=True)(params, *inputs)
    return out, grads

  with scope:
    return jax.make_jaxpr(both, return_shape=True)(params, *situation.inputs)


@pytest.mark.standard_promotion
@pytest.mark.case("B038", "B073", "B082", "B087", "B092")
@BY
@BOTH
@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name, half, way):
  program, (out, grads) = situation_program(name, f"mixed_{half}", way)
  assert programs.half_share(program) == 1
  assert {dtype for p in programs.products(program) for dtype in p.dtypes} == {half}
  assert {str(x.dtype) for x in jax.tree.leaves(grads)} == {"float32"}
  assert {str(x.dtype) for x in jax.tree.leaves(out)} == {"float32"}


# What is exempt, and is what the issue says it is.


@pytest.mark.case("B094")
@BOTH
def test_spectral_norm_iterates_in_float32_and_multiplies_in_half(half):
  forward, both, _ = layer_programs("spectral_norm", f"mixed_{half}")
  for program, wanted in ((forward, 1), (both, 3)):
    # The layer's own product, and its two in the backward pass, are those of three examples.
    mine = [p for p in programs.products(program) if any("[3," in shape for shape in p.operands)]
    assert len(mine) == wanted
    assert all(p.is_low_precision for p in mine)
    rest = [p for p in programs.products(program) if p not in mine]
    assert {dtype for p in rest for dtype in p.dtypes} == {"float32"}


@BOTH
def test_a_precision_that_the_user_set_is_kept(half):
  class Exact(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(8, precision="highest")(x)
      return nn.MultiHeadDotProductAttention(2, precision="highest")(x)

  x = normal(2, 6, 8)
  variables = shapes(Exact(), x)
  model = mpjax.linen.with_policy(Exact(), f"mixed_{half}")
  program = jax.make_jaxpr(model.apply)(variables, x)
  found = programs.products(program)
  assert len(found) == 7
  assert all("HIGHEST" in product.layout for product in found)
  assert {dtype for product in found for dtype in product.dtypes} == {"float32"}
  assert programs.dtypes_of(program, "exp") == {"float32"}


@BOTH
def test_a_float32_product_takes_more_than_to_ask_for_a_float32_result(half):
  class Products(nn.Module):
    @nn.compact
    def __call__(self, x):
      kernel = self.param("kernel", nn.initializers.ones, (8, 4))

      def product(x):
        # In the float32 that the body is traced in, this says nothing.
        return jnp.einsum("bd,df->bf", x, kernel, preferred_element_type=jnp.float32)

      half, full = product(x), mpjax.full_precision(product)(x)
      return half, full, jnp.einsum("bd,df->bf", x, kernel, precision="highest")

  x = normal(3, 8)
  variables = shapes(Products(), x)
  model = mpjax.linen.with_policy(Products(), f"mixed_{half}")
  found = programs.products(jax.make_jaxpr(model.apply)(variables, x))
  assert [p.dtypes for p in found] == [(half, half), *[("float32", "float32")] * 2]
  assert [p.result for p in found] == [f"{half}[3,4]", "float32[3,4]", "float32[3,4]"]
