"""Weight gradients in float32 under half compute: one product each, and nothing else changes.

Layers of Linen and of NNX, read in their jaxprs. That a matmul is exact on whole numbers, other
matmuls, derivatives of all orders, meshes and inner jaxprs are in
tests/matmul/test_matmul.py.
"""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.linen.probes import KEY, text
from tests.models import parts
from tests.nnx import rig
from tests.programs import products, run, with_gradients

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, with_policy = mpjax.Rule, mpjax.linen.with_policy


def policy(half, weight_grad="float32", **dtypes):
  """One whose results are in low precision, so that a float32 matmul is that of a gradient."""
  return mpjax.Policy(compute_dtype=half, weight_grad_dtype=weight_grad, **dtypes)


class Model(NamedTuple):
  """A model as a function of its parameters.

  Fields:
    under: returns `(params, x) -> out` under a policy, or without one for None.
    params: shapes and dtypes.
    shape: that of its input.
  """

  under: Callable[..., Callable[..., Any]]
  params: Any
  shape: tuple[int, ...]


def linen(module, shape):
  def under(chosen, rules=()):
    return module.apply if chosen is None else with_policy(module, chosen, rules).apply

  x = jax.ShapeDtypeStruct(shape, "float32")
  return Model(under, jax.eval_shape(module.init, KEY, x), shape)


def of_nnx(make, shape):
  graphdef, params, rest = rig.split(make)

  def under(chosen, rules=()):
    def call(params, x):
      plain = nnx.merge(graphdef, params, rest, copy=True)
      return rig.under(plain, chosen, **({} if chosen is None else {"rules": rules}))(x)

    return call

  return Model(under, nnx.to_pure_dict(params), shape)


def setting(model):
  """Returns parameters and inputs, as shapes, and the cotangent of the output."""
  x = jax.ShapeDtypeStruct(model.shape, "float32")
  return model.params, x, jnp.ones(jax.eval_shape(model.under(None), model.params, x).shape)


def result_of(product):
  return product.result.partition("[")[0]


def made(layer, *args, **options):
  """Returns what makes a layer of NNX."""
  return lambda rngs: layer(*args, **options, rngs=rngs)


def masked(rngs):
  mask = jnp.tril(jnp.ones((3, 8, 2)))
  return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Conv(8, 2, (3,), mask=mask, rngs=rngs))


R, S = (100, 8), (2, 8, 8)
STACK = parts.stack(parts.dense(8, 8, bias=True), 2, remat=True)
CONV = {"strides": (2, 1), "kernel_dilation": (1, 2)}
CASES: dict[str, tuple[Any, tuple[int, ...], int]] = {
  # A module of Linen or a function that makes one of NNX, an input, products into float32. How
  # matmuls are written, and of one row, is swept in tests/matmul/test_matmul.py.
  "DenseGeneral": (nn.DenseGeneral((2, 5), batch_dims=(0,)), (3, 300, 8), 1),
  "nnx: LinearGeneral": (made(nnx.LinearGeneral, 8, (2, 5), batch_axis={0: 3}), (3, 300, 8), 1),
  "Conv": (nn.Conv(4, (3, 2), **CONV), (8, 7, 9, 3), 1),
  "nnx: Conv": (made(nnx.Conv, 3, 4, (3, 2), **CONV), (8, 7, 9, 3), 1),
  "scan of remat": (STACK.linen(None), R, 1),
  "nnx: scan of remat": (functools.partial(STACK.nnx, None), R, 1),
  "LSTMCell": (nn.RNN(nn.LSTMCell(8)), S, 8),
  "attention": (nn.MultiHeadDotProductAttention(2, qkv_features=16), S, 4),
  # Joins the kernels of its four gates and multiplies by itself.
  "OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(8)), S, 2),
  # The kernel of the layer inside is computed in float32 with a norm, and is no parameter then.
  "WeightNorm": (nn.WeightNorm(nn.Dense(3)), (4, 8), 0),
  # Of an activation: the patches of an input are copied in float32.
  "ConvLocal": (nn.Sequential([nn.Dense(8), nn.ConvLocal(2, (3,))]), S, 2),
  # The second kernel is multiplied by a mask, which is an input, and is no parameter then.
  "nnx: Conv with a mask": (masked, S, 1),
  "nnx: LoRALinear": (made(nnx.LoRALinear, 8, 9, lora_rank=2), S, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_one_product_of_half_numbers_into_float32(name):
  what, shape, _ = CASES[name]
  model = linen(what, shape) if isinstance(what, nn.Module) else of_nnx(what, shape)
  params, x, cotangent = setting(model)
  before, after = (
    collections.Counter(
      products(jax.make_jaxpr(with_gradients(model.under(way)))(params, x, cotangent))
    )
    for way in (policy("bfloat16", None), policy("bfloat16"))
  )
  wide = collections.Counter({p: n for p, n in after.items() if result_of(p) == "float32"})
  assert wide.total() == CASES[name][2]
  assert all(p.is_low_precision for p in (*before, *after))
  # What is no product into float32 is what it was, and one replaces one of the same size.
  replaced = before - after
  assert "float32" not in map(result_of, before)
  assert after - before == wide
  assert sorted(p.flops for p in replaced.elements()) == sorted(p.flops for p in wide.elements())


ROWS = 64
PARAMETERS = {
  "kernel": ((8, 8), lambda w, x: x @ w),
  "kernels of experts": (
    (2, 8, 8),
    lambda w, x: jnp.einsum("nd,edf->enf", x, w),
  ),
  "kernels of a scan": (
    (2, 8, 8),
    lambda w, x: jax.lax.scan(jax.checkpoint(lambda x, w: (x @ w, None)), x, w)[0],
  ),
  "bias": ((8,), lambda b, x: jax.nn.relu(x @ jnp.eye(8) + b)),
  "scale": ((8,), lambda s, x: jax.nn.relu(x @ jnp.eye(8) * s)),
  "embedding": ((3, 8), lambda t, x: t[jnp.zeros(ROWS, int)] @ jnp.eye(8)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_float16_gradient_that_float16_could_not_hold(name):
  # Each row has a cotangent of 2048. Their sum of 2^17 is no float16 number.
  shape, fun = PARAMETERS[name]
  w = jnp.broadcast_to(jnp.eye(*shape[-2:]) if name.startswith("k") else jnp.ones(shape), shape)

  def loss(w, x):
    return jnp.sum(2048 * fun(w, x))

  args = w, jnp.ones((ROWS, 8))
  found, wanted = run(jax.grad(mpjax.autocast(loss, "mixed_float16")), *args), jax.grad(loss)(*args)
  np.testing.assert_array_equal(found, wanted)
  assert np.abs(wanted).max() == 2.0**17
  if name.startswith("kernel"):
    assert not np.isfinite(jax.grad(mpjax.autocast(loss, "p=f32,c=f16,o=f32,w=f16"))(*args)).all()


def test_float64(set_flag):
  set_flag("jax_enable_x64", True)
  model = nn.Dense(3)
  x, cotangent = jnp.asarray([[2.0**11], [1.0]]), jnp.asarray([[2.0**11] * 3, [2.0**-11] * 3])
  variables = {"params": {"kernel": jnp.ones((1, 3)), "bias": jnp.zeros(3)}}
  apply = with_policy(model, policy("float16", "float64")).apply
  found = run(with_gradients(apply), variables, x, cotangent)[1]["params"]
  assert found["kernel"].dtype == found["bias"].dtype == jnp.float64
  assert set(np.asarray(found["kernel"]).ravel()) == {2.0**22 + 2.0**-11}
  assert set(np.asarray(found["bias"])) == {2.0**11 + 2.0**-11}


def test_nothing_changes_where_it_is_not_asked_for_or_cannot_be():
  def program(module, chosen, shape=(2, 5, 3)):
    model = linen(module, shape) if isinstance(module, nn.Module) else of_nnx(module, shape)

    def loss(params, x):
      return jnp.sum(model.under(chosen)(params, x))

    return text(jax.grad(loss, allow_int=True), model.params, jnp.ones(shape))

  several = nn.Sequential([nn.Conv(4, (3,)), nn.LayerNorm(), nn.Dense(3)])
  for half in (None, "bfloat16"):  # Without it, and with the compute dtype itself.
    assert program(several, policy("bfloat16", half)) == program(several, "c=bf16")
  assert program(several, policy("float32", "float32")) == program(several, "float32")
  own_type = made(nnx.Linear, 3, 3, preferred_element_type=jnp.bfloat16)
  of_integers = nn.Dense(3, param_dtype=jnp.int8, kernel_init=nn.initializers.ones)
  for model in (own_type, of_integers):
    assert program(model, policy("bfloat16", "float32")) == program(model, policy("bfloat16", None))


ASKS = [
  # The policy, the rules, and how many of two layers have a product into float32.
  (policy("bfloat16"), [], 2),
  ("c=bf16", [Rule(policy("bfloat16"), path=re.compile("layers[_/]1"))], 1),
  (policy("bfloat16"), [Rule("c=bf16", path="**")], 0),
]


@pytest.mark.parametrize("framework", ["linen", "nnx", "scope"])
def test_the_policy_or_a_rule_asks_for_it(framework):
  def two(rngs):
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))

  linen_two = nn.Sequential([nn.Dense(8), nn.Dense(8)])
  model = of_nnx(two, (20, 8)) if framework == "nnx" else linen(linen_two, (20, 8))
  params, x, cotangent = setting(model)
  for chosen, rules, wanted in ASKS:
    if framework == "scope":
      with mpjax.linen.policy_scope(chosen, rules):
        program = jax.make_jaxpr(with_gradients(model.under(None)))(params, x, cotangent)
    else:
      program = jax.make_jaxpr(with_gradients(model.under(chosen, rules)))(params, x, cotangent)
    assert [result_of(p) for p in products(program)].count("float32") == wanted
