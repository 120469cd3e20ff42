"""Models with a kernel that takes nothing but low precision, in Linen and in NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.models import catalogue
from tests.models.kernels import (
  any_attention,
  attention_block,
  cudnn_attention,
  half_attention,
  pretend_cudnn,
)
from tests.models.values import normal

pytestmark = pytest.mark.standard_promotion("dtypes")

X = normal(2, 64, 16)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def entry(framework, part):
  if framework == "linen":
    return catalogue.linen(lambda: part.linen(None), (X,), catalogue.applied())
  return catalogue.nnx_(lambda rngs: part.nnx(None, rngs), (X,))


def call_of(framework, part, half=None):
  """Returns a model as a function of its parameters, under a policy or not."""
  call = entry(framework, part).call("with_policy" if half else "plain", f"mixed_{half}")
  rest = {} if framework == "linen" else entry(framework, part).arguments()[1]
  return lambda params: call(params, rest, (X,))[0]


@pytest.mark.parametrize("half", EPS)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("kernel", [half_attention, cudnn_attention])
def test_a_kernel_gets_low_precision_as_by_hand(kernel, framework, half, monkeypatch):
  # For CUDA as far as one comes without it: traced and lowered, as the model by hand is.
  pretend_cudnn(monkeypatch)
  params = entry(framework, attention_block(any_attention)).arguments()[0]
  ours = call_of(framework, attention_block(kernel), half)
  by_hand = call_of(framework, attention_block(kernel, half))
  with pytest.raises(NotImplementedError, match="must be fp16/bf16"):
    jax.make_jaxpr(call_of(framework, attention_block(kernel)))(params)
  traced = [
    jax.jit(jax.value_and_grad(lambda p, call=call: jnp.sum(call(p)))).trace(params)
    for call in (ours, by_hand)
  ]
  assert all(product.is_low_precision for product in programs.products(traced[0].jaxpr))
  calls = [
    each.lower(lowering_platforms=("cuda",)).as_text().count("@__cudnn$fmha") for each in traced
  ]
  assert calls == [2, 2] if kernel is cudnn_attention else [0, 0]
  if kernel is half_attention:
    exact = call_of(framework, attention_block(any_attention))
    want, got = programs.run(lambda params: (exact(params), ours(params)), params)
    assert programs.relative_error(got, np.asarray(want)) < 4 * EPS[half]


@pytest.mark.parametrize("kernel", [half_attention, cudnn_attention])
def test_init_of_linen_calls_a_kernel_in_low_precision(kernel, monkeypatch):
  # Abstractly, because cuDNN runs on GPUs alone.
  pretend_cudnn(monkeypatch)
  models = {
    "own": (attention_block(kernel).linen(None), attention_block(any_attention).linen(None)),
    "flax": [
      nn.MultiHeadDotProductAttention(2, attention_fn=lambda q, k, v, fn=fn, **_: fn(q, k, v))
      for fn in (kernel, any_attention)
    ],
  }
  for model, exact in models.values():
    shapes = jax.eval_shape(exact.init, jax.random.key(0), X)
    with pytest.raises(NotImplementedError, match="must be fp16/bf16"):
      jax.eval_shape(model.init, jax.random.key(0), X)
    init = mpjax.with_policy(model, "mixed_bfloat16").init
    assert jax.eval_shape(init, jax.random.key(0), X) == shapes
