"""Matmuls whose result leaves in float32 return the sum of their low-precision operands."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests import programs
from tests.models.values import normal

HALF = "bfloat16"
X = np.random.default_rng(0).integers(-128, 129, (4, 64)).astype(np.float32)
"""Of integers, which bfloat16 has, and the sums of whose products it has not."""
W = np.random.default_rng(1).integers(-128, 129, (64, 3)).astype(np.float32)
BIAS = np.asarray([1 / 3, 1e-3, 300.5], np.float32)


def of_linen(rule):
  """Returns a function of kernel, bias and input, under a policy of the root or by a rule."""
  policy, rules = (
    ("c=bf16", [mpjax.Rule("mixed_bfloat16", path="layers_0")]) if rule else ("mixed_bfloat16", ())
  )
  model = mpjax.linen.with_policy(nn.Sequential([nn.Dense(3)]), policy, rules)
  return lambda w, b, x: model.apply({"params": {"layers_0": {"kernel": w, "bias": b}}}, x)


def of_nnx(w, b, x):
  model = nnx.Linear(64, 3, rngs=nnx.Rngs(0))
  model.kernel.set_raw_value(w)
  model.bias.set_raw_value(b)
  return mpjax.nnx.with_policy(model, "mixed_bfloat16")(x)


WAYS = {
  "linen": of_linen(False),
  "a rule": of_linen(True),
  "nnx": of_nnx,
  "autocast": mpjax.autocast(lambda w, b, x: x @ w + b[None], "mixed_bfloat16"),
  "convolution": mpjax.autocast(
    lambda w, b, x: jax.lax.conv(x[:, :, None], w.T[:, :, None], (1,), "VALID")[..., 0] + b[None],
    "mixed_bfloat16",
  ),
}
WANTED = X.astype(np.float64) @ W + BIAS


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_not_rounded_and_gradients_multiply_in_low_precision(way):
  def loss(w, b, x):
    out = WAYS[way](w, b, x)
    return jnp.sum(out * normal(4, 3)), out

  program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2), has_aux=True))(W, BIAS, X)
  found = programs.products(program)
  assert [p.dtypes for p in found] == [(HALF, HALF)] * 3
  assert sorted(p.result.partition("[")[0] for p in found) == [HALF, HALF, "float32"]
  grads, out = programs.run(jax.grad(loss, (0, 1, 2), has_aux=True), W, BIAS, X)
  np.testing.assert_array_equal(out, WANTED.astype(np.float32))
  np.testing.assert_allclose(grads[1], np.asarray(normal(4, 3)).sum(0), rtol=1e-6)


def test_all_readers_of_a_result_read_what_is_returned():
  # A prediction, a probability, what is sown for debugging: none of them rounds the logits.
  class Model(nn.Module):
    read: bool = True

    @nn.compact
    def __call__(self, x):
      y = nn.Dense(3)(x)
      if not self.read:
        return y
      self.sow("intermediates", "y", y)
      return y, y.argmax(-1), nn.softmax(y), nn.Dense(2)(y)

  x, kernel = np.asarray([[1.0, 1.0]], np.float32), np.asarray([[256.0, 256, 1], [0, 1, 1]])
  dense = {"kernel": kernel.astype(np.float32), "bias": np.zeros(3, np.float32)}
  other = {"kernel": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.float32)}

  def returned(read):
    model = mpjax.linen.with_policy(Model(read), "mixed_bfloat16")
    params = {"Dense_0": dense, **({"Dense_1": other} if read else {})}
    return programs.run(lambda p: model.apply({"params": p}, x), params)

  logits, best, probabilities, _ = returned(True)
  np.testing.assert_array_equal(logits, [[256, 257, 2]])
  np.testing.assert_array_equal(logits, returned(False))
  np.testing.assert_array_equal(best, [1])
  np.testing.assert_allclose(probabilities[0, 1], 1 / (1 + np.exp(-1)), rtol=1e-6)


def test_a_rounding_that_somebody_asked_for_stays():
  # An `output_dtype` in low precision, a layer before another one, a state that is kept.
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      y, z = nn.Dense(3)(x), nn.Dense(3)(x)
      kept = self.variable("cache", "z", jnp.zeros_like, z)
      kept.value = z
      return y, nn.Dense(3)(nn.Dense(8)(x))

  x = jnp.ones((2, 8))
  kernel = nn.Dense(3).init(jax.random.key(0), x)
  low = mpjax.linen.with_policy(nn.Dense(3), "bfloat16")
  assert low.apply(kernel, x).dtype == HALF
  assert [p.result for p in programs.products(jax.make_jaxpr(low.apply)(kernel, x))] == [
    f"{HALF}[2,3]"
  ]
  variables = {"params": Model().init(jax.random.key(0), x)["params"]}
  apply = mpjax.linen.with_policy(Model(), "mixed_bfloat16").apply
  apply = functools.partial(apply, mutable=["cache"])
  program, (_, state) = jax.make_jaxpr(apply, return_shape=True)(variables, x)
  results = [p.result for p in programs.products(program)]
  assert results == ["float32[2,3]", f"{HALF}[2,3]", f"{HALF}[2,8]", "float32[2,3]"]
  assert state["cache"]["z"].dtype == HALF  # As the model gives it by hand.


class Routed(nnx.Module):
  """A router that asks for float32 itself, before a layer that does not."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.router = nnx.Linear(8, 8, preferred_element_type=jnp.float32, rngs=rngs)
    self.down = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.softmax(self.router(x)))


def test_the_preferred_element_type_of_the_user_is_kept():
  view = mpjax.nnx.with_policy(Routed(), "c=bf16")
  found = programs.products(jax.make_jaxpr(view)(normal(5, 8)))
  assert [(p.dtypes, p.result) for p in found] == [
    ((HALF, HALF), "float32[5,8]"),
    ((HALF, HALF), f"{HALF}[5,2]"),
  ]


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "f32"), ("cuda", "bf16"), ("tpu", "bf16")])
def test_only_a_cpu_multiplies_float32_operands(platform, dtype):
  # Traced on a CPU, which fails where the result is transposed into a matmul of bfloat16.
  fun = jax.jit(lambda w, b, x: WAYS["autocast"](w, b, x).T)
  np.testing.assert_array_equal(fun(W, BIAS, X), WANTED.T.astype(np.float32))
  text = fun.trace(W, BIAS, X).lower(lowering_platforms=(platform,)).as_text()
  assert re.findall(r"dot_general.*<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", text) == [(dtype, dtype)]
