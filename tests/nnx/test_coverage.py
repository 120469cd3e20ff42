"""Every product in half: for each layer of NNX, and in each situation that models are run in.

Products are counted in the traced program of loss and gradients, by `tests.programs`.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.nnx.layers import EXEMPT, LAYERS
from tests.nnx.rig import functions, split

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
ATTENTION = [name for name in LAYERS if name.startswith("attention")]


def layer(name: str, policy: Any) -> tuple[Any, Any, Any]:
  """Returns the functions forward and with gradients of one layer, and what they are given."""
  layer = {**LAYERS, **EXEMPT}[name]
  graphdef, params, rest = split(layer.make)
  both = functions(graphdef, policy, lambda view, *args: view(*args, **layer.kwargs))
  return *both, (params, rest, layer.inputs)


@functools.cache
def with_gradients(name: str, policy: Any) -> tuple[Any, Any]:
  """Returns the program with gradients, and the shapes of what it returns."""
  _, both, inputs = layer(name, policy)
  return jax.make_jaxpr(both, return_shape=True)(*inputs)


def forward_program(name: str, policy: Any) -> Any:
  forward, _, inputs = layer(name, policy)
  return jax.make_jaxpr(forward)(*inputs)


@pytest.mark.case("B085", "B089")
@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, half):
  both, ((out, state), grads) = with_gradients(name, f"mixed_{half}")
  if LAYERS[name].products:
    assert programs.half_share(both) == 1
    assert {dtype for p in programs.products(both) for dtype in p.dtypes} == {half}
  else:
    assert programs.products(both) == []
  floats = [x for x in jax.tree.leaves((out, grads)) if x.dtype != jax.dtypes.float0]
  assert {x.dtype for x in floats} == {np.dtype("float32")}
  _, _, rest = split(LAYERS[name].make)
  assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(rest)]


NORMS = [name for name in LAYERS if name.endswith("_norm") and name != "weight_norm"]
GATED = ("lstm", "optimized_lstm", "gru")
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
  forward, _, inputs = layer(name, mpjax.Policy(compute_dtype=half))
  out, _ = jax.eval_shape(forward, *inputs)
  wanted = "float32" if name in FLOAT32_AT_THE_END else half
  assert {str(x.dtype) for x in jax.tree.leaves(out)} == {wanted}


@pytest.mark.case("B083", "B084")
@BOTH
@pytest.mark.parametrize("name", [*NORMS, "batch_norm_running"])
def test_norms_compute_their_statistics_in_float32_and_round_once(name, half):
  forward = forward_program(name, mpjax.Policy(compute_dtype=half, output_dtype=half))
  assert programs.dtypes_of(forward, "rsqrt") == {"float32"}
  if name != "batch_norm_running":
    assert programs.dtypes_of(forward, "reduce_sum") == {"float32"}
  assert programs.converts(forward) == {f"float32->{half}": 1}


@pytest.mark.case("B088")
@BOTH
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_takes_its_softmax_in_float32(name, half):
  both, _ = with_gradients(name, f"mixed_{half}")
  assert programs.dtypes_of(both, "exp") == {"float32"}


@pytest.mark.case("B094")
@BOTH
def test_spectral_norm_iterates_in_float32_and_multiplies_in_half(half):
  forward = forward_program("spectral_norm", f"mixed_{half}")
  both, ((_, state), _) = with_gradients("spectral_norm", f"mixed_{half}")
  for program, wanted in ((forward, 1), (both, 3)):
    # The layer's own product, and its two in the backward pass, are those of three examples.
    mine = [p for p in programs.products(program) if any("[3," in shape for shape in p.operands)]
    assert len(mine) == wanted
    assert all(p.is_low_precision for p in mine)
    rest = [p for p in programs.products(program) if p not in mine]
    assert {dtype for p in rest for dtype in p.dtypes} == {"float32"}
  assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32"}
