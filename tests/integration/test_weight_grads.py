"""Weight gradients in float32 under half compute: one product each, and nothing else changes.

Layers of Linen and of NNX, alike to the bit. The numbers are integers small enough that every value
of a half program is exact, except for sums over many rows: those are what float32 weight gradients
are for. Other matmuls, derivatives of all orders, meshes and inner jaxprs are in
tests/jaxprs/autocast/test_matmuls.py.
"""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import mpjax
from tests.linen.probes import KEY, text
from tests.models.values import integral
from tests.nnx import rig
from tests.programs import bits, products, run

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


def setting(model, largest):
  """Returns parameters of -1, 0 and 1, inputs, and the cotangent of the output: whole numbers."""
  leaves, treedef = jax.tree.flatten(model.params)
  params = jax.tree.unflatten(treedef, [integral(i, p.shape, 1) for i, p in enumerate(leaves)])
  x = integral(7, model.shape, largest)
  out = jax.eval_shape(model.under(None), params, x)
  return params, x, integral(8, out.shape, largest) * 2 + 1


def with_gradients(call, cotangent):
  """Returns a function of (params, x): output, gradients of the parameters, gradient of x."""

  def value_and_gradients(params, x):
    y, pull = jax.vjp(call, params, x)
    return y, *pull(cotangent.astype(y.dtype))

  return value_and_gradients


def result_of(product):
  return product.result.partition("[")[0]


def made(layer, *args, **options):
  """Returns what makes a layer of NNX."""
  return lambda rngs: layer(*args, **options, rngs=rngs)


# Layers, and how they reach their product

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], Callable[..., nnx.Module]]] = {
  # The layer in Linen, its input, the layer in NNX.
  "Dense": (nn.Dense(5), (200, 3), made(nnx.Linear, 3, 5)),
  "DenseGeneral": (
    *(nn.DenseGeneral((2, 5), axis=(1, -1)), (200, 3, 2, 4)),
    made(nnx.LinearGeneral, (3, 4), (2, 5), axis=(1, -1)),
  ),
  "DenseGeneral with a batch axis": (
    *(nn.DenseGeneral((2, 5), batch_dims=(0,)), (3, 300, 4)),
    made(nnx.LinearGeneral, 4, (2, 5), batch_axis={0: 3}),
  ),
  "Conv with strides and holes": (
    *(nn.Conv(4, (3, 2), strides=(2, 1), kernel_dilation=(1, 2)), (8, 7, 9, 3)),
    made(nnx.Conv, 3, 4, (3, 2), strides=(2, 1), kernel_dilation=(1, 2)),
  ),
  "Conv in groups": (
    *(nn.Conv(6, (3,), feature_group_count=3), (20, 9, 3)),
    made(nnx.Conv, 3, 6, (3,), feature_group_count=3),
  ),
}
"""How matmuls are written, and of one row, is swept in tests/jaxprs/autocast/test_matmuls.py."""
# What is built of layers


class Shared(nn.Module):
  """One layer used twice."""

  @nn.compact
  def __call__(self, x):
    dense = nn.Dense(3)
    return dense(dense(x))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    return nn.Dense(3, name="dense")(x), None


class Scanned(nn.Module):
  """Layers in a loop, each with weights of its own, or one set for all iterations."""

  shared: bool = False
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block) if self.remat else Block
    how: dict[str, Any] = (
      {"variable_broadcast": "params", "split_rngs": {"params": False}}
      if self.shared
      else {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    )
    return nn.scan(block, length=2, **how)()(x, None)[0]


class ScannedOfNnx(nnx.Module):
  """Layers in a loop, under remat."""

  def __init__(self, rngs):
    self.layers = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(rngs.split(2))

  def __call__(self, x):
    step = nnx.remat(lambda x, layer: layer(x), prevent_cse=False)
    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


R, S = (100, 3), (2, 4, 3)
BUILT: dict[str, tuple[Any, tuple[int, ...], int]] = {
  # A module of Linen or a function that makes one of NNX, an input, products into float32.
  "a layer used twice": (Shared(), R, 2),
  "scan over shared weights": (Scanned(shared=True), R, 1),
  "scan of remat": (Scanned(remat=True), R, 1),
  "nnx: scan of remat": (ScannedOfNnx, R, 1),
  "LSTMCell": (nn.RNN(nn.LSTMCell(3)), S, 8),
  "attention": (nn.MultiHeadDotProductAttention(2, qkv_features=4), S, 4),
  # Joins the kernels of its four gates and multiplies by itself.
  "OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(3)), S, 2),
  # The kernel of the layer inside is computed in float32 with a norm, and is no parameter then.
  "WeightNorm": (nn.WeightNorm(nn.Dense(3)), (4, 3), 0),
  "ConvLocal": (nn.ConvLocal(2, (3,)), S, 1),
  # Its kernel is multiplied by an array that decides, in float32, and is no parameter then.
  "nnx: Conv with a mask": (made(nnx.Conv, 3, 2, (3,), mask=jnp.tril(jnp.ones((3, 3, 2)))), S, 0),
  "nnx: LoRALinear": (made(nnx.LoRALinear, 3, 3, lora_rank=2), S, 3),
}
ALONE = [*LAYERS, *(f"nnx: {name}" for name in LAYERS)]
CASES = {
  **{name: (module, shape, 1) for name, (module, shape, _) in LAYERS.items()},
  **{f"nnx: {name}": (make, shape, 1) for name, (_, shape, make) in LAYERS.items()},
  **BUILT,
}
EXACT = [name for name, (_, shape, _) in BUILT.items() if 100 in shape]
"""Those of 100 rows: the numbers that they compute are whole, and compared."""


@functools.cache
def traced(name, **dtypes):
  """Returns the jaxprs of output and gradients: plain, in half, and with wide gradients."""
  what, shape, _ = CASES[name]
  model = linen(what, shape) if isinstance(what, nn.Module) else of_nnx(what, shape)
  params, x, cotangent = setting(model, 9 if name in ALONE else 1)
  ways = (None, *(policy("bfloat16", wide, **dtypes) for wide in (None, "float32")))
  return [
    jax.make_jaxpr(with_gradients(model.under(way), cotangent))(params, x) for way in ways
  ], jax.tree.leaves((params, x))


@pytest.mark.parametrize("name", CASES)
def test_one_product_of_half_numbers_into_float32(name):
  (_, before, after), _ = traced(name)
  before, after = (collections.Counter(products(program)) for program in (before, after))
  wide = collections.Counter({p: n for p, n in after.items() if result_of(p) == "float32"})
  assert wide.total() == CASES[name][2]
  assert all(p.is_low_precision for p in (*before, *after))
  # What is no product into float32 is what it was, and one replaces one of the same size.
  replaced = before - after
  assert "float32" not in map(result_of, before)
  assert after - before == wide
  assert sorted(p.flops for p in replaced.elements()) == sorted(p.flops for p in wide.elements())


def test_whole_numbers_come_out_exact_and_the_rest_the_same():
  # Out of one compiled function.
  cases = {name: traced(name, output_dtype="float32") for name in (*ALONE, *EXACT)}

  def every(inputs):
    return {
      name: [jaxpr_as_fun(jaxpr)(*inputs[name]) for jaxpr in jaxprs]
      for name, (jaxprs, _) in cases.items()
    }

  found = run(every, {name: inputs for name, (_, inputs) in cases.items()})
  for name, (exact, old, new) in found.items():
    assert bits((new[0], new[-1])) == bits((old[0], old[-1])), name
    assert bits(new[1:-1]) == bits(exact[1:-1]), name
    if name in EXACT:
      assert bits((new[0], new[-1])) == bits((exact[0], exact[-1])), name
    else:  # There is something to round.
      rounded = [g.astype("bfloat16").astype("float32") for g in exact[1:-1]]
      assert bits(rounded) != bits(exact[1:-1]), name
  for name in LAYERS:
    assert bits(found[name][2]) == bits(found[f"nnx: {name}"][2]), name


def by_definition(apply, variables, x, cotangent):
  """Returns the gradients of a linear model in float64: <cotangent, model of one unit vector>.

  Each element of a unit vector's output is one element of `x`, or zero: nothing is rounded. Next to
  them are the sums of the absolute values of what is added up.
  """
  flat, unravel = jax.flatten_util.ravel_pytree(variables)
  units = run(jax.vmap(lambda unit: apply(unravel(unit), x)), jnp.eye(flat.size))
  terms = np.asarray(units, np.float64) * np.asarray(cotangent, np.float64)
  axes = tuple(range(1, terms.ndim))
  return terms.sum(axes), np.abs(terms).sum(axes)


@pytest.mark.parametrize(
  ("model", "shape", "half", "gain"),
  [
    pytest.param(nn.Dense(4), (512, 3), "bfloat16", 10_000, id="Dense in bfloat16"),
    # Of fewer terms, so that the gain does not depend on the order in which a CPU adds them.
    pytest.param(nn.Dense(4), (32, 3), "float16", 1_000, id="Dense in float16"),
    pytest.param(nn.Conv(3, (3,)), (8, 64, 2), "bfloat16", 10_000, id="Conv in bfloat16"),
  ],
)
def test_error_against_float64(model, shape, half, gain):
  rng = np.random.default_rng(0)

  def normal(like):
    return jnp.asarray(rng.normal(size=like.shape).astype(half), jnp.float32)

  x = normal(jax.ShapeDtypeStruct(shape, "float32"))
  variables = jax.tree.map(normal, jax.eval_shape(model.init, KEY, x))
  cotangent = normal(jax.eval_shape(model.apply, variables, x))
  true, terms = by_definition(model.apply, variables, x, cotangent)
  ways = [with_policy(model, policy(half, wide)).apply for wide in ("float32", None)]
  both = run(
    lambda *args: [with_gradients(apply, cotangent)(*args)[1] for apply in ways], variables, x
  )
  ours, old = (
    np.abs(np.asarray(jax.flatten_util.ravel_pytree(found)[0], np.float64) - true) for found in both
  )
  # So many float32 additions, in any order.
  assert (ours <= math.prod(shape[:-1]) * 2.0**-24 * terms).all()
  # Biases have float32 sums without it too; the kernel comes last.
  kernel = slice(-variables["params"]["kernel"].size, None)
  assert old[kernel].mean() > gain * ours[kernel].mean()


# Dtypes, costs, and who asks for it


def test_float64(set_flag):
  set_flag("jax_enable_x64", True)
  model = nn.Dense(3)
  x, cotangent = jnp.asarray([[2.0**11], [1.0]]), jnp.asarray([[2.0**11] * 3, [2.0**-11] * 3])
  variables = {"params": {"kernel": jnp.ones((1, 3)), "bias": jnp.zeros(3)}}
  apply = with_policy(model, policy("float16", "float64", param_dtype="float64")).apply
  found = run(with_gradients(apply, cotangent), variables, x)[1]["params"]
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
    return nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs))

  linen_two = nn.Sequential([nn.Dense(3), nn.Dense(3)])
  model = of_nnx(two, (20, 3)) if framework == "nnx" else linen(linen_two, (20, 3))
  params, x, cotangent = setting(model, 1)
  for chosen, rules, wanted in ASKS:
    if framework == "scope":
      with mpjax.linen.policy_scope(chosen, rules):
        program = jax.make_jaxpr(with_gradients(model.under(None), cotangent))(params, x)
    else:
      program = jax.make_jaxpr(with_gradients(model.under(chosen, rules), cotangent))(params, x)
    assert [result_of(p) for p in products(program)].count("float32") == wanted
