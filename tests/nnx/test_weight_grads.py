"""Weight gradients in float32 under half compute: as in Linen, to the bit.

As there, the numbers are integers small enough that every value of a half program is exact, except
for sums over many rows.
"""

import functools
import pickle
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from tests.linen.test_weight_grads import integers, policy, result_of, whole
from tests.nnx import rig
from tests.programs import bits, products, run

pytestmark = pytest.mark.standard_promotion

with_policy = mpjax.nnx.with_policy


class Layer(NamedTuple):
  """One layer in both of Flax's libraries, and the shape of its inputs."""

  ours: Any
  theirs: nn.Module
  shape: tuple[int, ...]


LAYERS = {
  "Linear": Layer(lambda rngs: nnx.Linear(3, 5, rngs=rngs), nn.Dense(5), (200, 3)),
  "Linear without bias": Layer(
    lambda rngs: nnx.Linear(3, 5, use_bias=False, rngs=rngs),
    nn.Dense(5, use_bias=False),
    (20, 10, 3),
  ),
  "LinearGeneral": Layer(
    lambda rngs: nnx.LinearGeneral((3, 4), (2, 5), axis=(1, -1), rngs=rngs),
    nn.DenseGeneral((2, 5), axis=(1, -1)),
    (200, 3, 2, 4),
  ),
  "LinearGeneral with a batch axis": Layer(
    lambda rngs: nnx.LinearGeneral(4, (2, 5), batch_axis={0: 3}, rngs=rngs),
    nn.DenseGeneral((2, 5), batch_dims=(0,)),
    (3, 900, 4),
  ),
  "Conv with strides and holes": Layer(
    lambda rngs: nnx.Conv(3, 4, (3, 2), strides=(2, 1), kernel_dilation=(1, 2), rngs=rngs),
    nn.Conv(4, (3, 2), strides=(2, 1), kernel_dilation=(1, 2)),
    (8, 7, 9, 3),
  ),
  "Conv in groups": Layer(
    lambda rngs: nnx.Conv(3, 6, (3,), feature_group_count=3, rngs=rngs),
    nn.Conv(6, (3,), feature_group_count=3),
    (60, 9, 3),
  ),
  "Conv, causal": Layer(
    lambda rngs: nnx.Conv(3, 2, (3,), padding="CAUSAL", rngs=rngs),
    nn.Conv(2, (3,), padding="CAUSAL"),
    (20, 9, 3),
  ),
}


def with_gradients(call, cotangent):
  """Returns a function of (params, x): output, gradients of the parameters, gradient of x."""

  def value_and_gradients(params, x):
    y, pull = jax.vjp(call, params, x)
    return y, *pull(cotangent.astype(y.dtype))

  return value_and_gradients


def calls(make, chosen, **options):
  """Returns a function of (params, x), and parameters."""
  graphdef, params, rest = rig.split(make)

  def call(params, x):
    plain = nnx.merge(graphdef, params, rest, copy=True)
    return rig.under(plain, chosen, **options)(x)

  return call, params


def traced(make, shape, weight_grad="float32", half="bfloat16"):
  """Returns the products of output and gradients."""
  call, params = calls(make, policy(half, weight_grad))
  x = jax.ShapeDtypeStruct(shape, "float32")
  cotangent = jnp.ones(jax.eval_shape(call, params, x).shape)
  return products(jax.make_jaxpr(with_gradients(call, cotangent))(params, x))


@functools.cache
def measured():
  """Returns output and gradients of all layers, each in five ways, out of one program."""
  programs, inputs = {}, {}
  for name, layer in LAYERS.items():
    plain, shapes = calls(layer.ours, None)
    params, x = nnx.to_pure_dict(whole(shapes)), integers(7, layer.shape, 1)
    cotangent = integers(8, jax.eval_shape(plain, params, x).shape, 9) * 2 + 1
    theirs = mpjax.linen.with_policy(layer.theirs, policy("bfloat16"))
    ways = {
      "exact": plain,
      **{str(w): calls(layer.ours, policy("bfloat16", w))[0] for w in ("float32", None)},
      "linen": lambda params, x, theirs=theirs: theirs.apply({"params": params}, x),
    }
    programs[name] = {way: with_gradients(call, cotangent) for way, call in ways.items()}
    inputs[name] = params, x

  def every(inputs):
    return {
      name: {way: fun(*inputs[name]) for way, fun in ways.items()}
      for name, ways in programs.items()
    }

  return run(every, inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_do_as_those_of_linen_bit_for_bit_and_sums_are_exact(name):
  found = measured()[name]
  (y, weights, x_bar), (old_y, old_weights, old_x_bar) = found["float32"], found["None"]
  assert bits((y, weights, x_bar)) == bits(found["linen"])
  assert bits((y, x_bar)) == bits((old_y, old_x_bar))
  assert bits(weights) == bits(found["exact"][1])
  assert bits(weights) != bits(old_weights)  # there is something to round


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_one_product_of_half_numbers_into_float32(name, half):
  layer = LAYERS[name]
  before, after = (traced(layer.ours, layer.shape, w, half) for w in (None, "float32"))
  assert {(p.dtypes, result_of(p)) for p in before} == {((half, half), half)}
  assert sorted(result_of(p) for p in after) == sorted([half, half, "float32"])
  assert {p.dtypes for p in after} == {(half, half)}
  assert sorted(p.flops for p in before) == sorted(p.flops for p in after)


# What is built of layers


class Block(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Linear(3, 3, rngs=rngs)

  def __call__(self, x):
    return self.layer(x)


class Scanned(nnx.Module):
  """Blocks in a loop, under remat."""

  def __init__(self, rngs):
    self.blocks = nnx.vmap(lambda rngs: Block(rngs))(rngs.split(2))

  def __call__(self, x):
    step = nnx.remat(lambda x, block: block(x), prevent_cse=False)
    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class Jitted(Block):
  @nnx.jit
  def __call__(self, x):
    return self.layer(self.layer(x))


class Inherits(nnx.Linear):
  """A subclass with nothing of its own but another method."""

  def project(self, x):
    return x @ self.kernel


def rnn(cell):
  return lambda rngs: nnx.RNN(cell(3, 3, rngs=rngs))


BUILT = {
  "scan of remat": (Scanned, 1),
  "jit, a layer used twice": (Jitted, 2),
  "a subclass that inherits": (lambda rngs: Inherits(3, 3, rngs=rngs), 1),
  "LSTMCell": (rnn(nnx.LSTMCell), 8),
  # One kernel for its inputs and one for its state.
  "OptimizedLSTMCell": (rnn(nnx.OptimizedLSTMCell), 2),
  "attention": (lambda rngs: nnx.MultiHeadAttention(1, 3, decode=False, rngs=rngs), 4),
  "Conv with a mask": (
    # Its kernel is multiplied by an array that decides, in float32, and is no parameter then.
    lambda rngs: nnx.Conv(3, 2, (3,), mask=jnp.tril(jnp.ones((3, 3, 2))), rngs=rngs),
    0,
  ),
  "LoRALinear": (lambda rngs: nnx.LoRALinear(3, 3, lora_rank=2, rngs=rngs), 3),
  # Its kernel is computed in float32 with a norm, and is no parameter then.
  "WeightNorm": (
    lambda rngs: nnx.WeightNorm(nnx.Linear(3, 3, rngs=rngs), use_scale=False, rngs=rngs),
    0,
  ),
}


@pytest.mark.parametrize(("make", "kernels"), BUILT.values(), ids=BUILT)
def test_what_is_built_of_layers(make, kernels):
  found = traced(make, (2, 4, 3), half="float16")
  assert [result_of(p) for p in found].count("float32") == kernels
  assert all(p.is_low_precision for p in found)
  assert "float32" not in {result_of(p) for p in traced(make, (2, 4, 3), None, half="float16")}


def test_a_loop_adds_up_in_float32():
  call, shapes = calls(Scanned, policy("bfloat16"))
  plain, _ = calls(Scanned, None)
  params, x = whole(shapes), integers(7, (100, 3), 1)
  cotangent = integers(8, (100, 3), 1) * 2 + 1
  found, exact = run(
    lambda *args: [with_gradients(c, cotangent)(*args) for c in (call, plain)], params, x
  )
  assert bits(found) == bits(exact)


def test_only_the_layers_own_call_sees_parameters_as_they_are_stored():
  view = with_policy(Inherits(3, 3, rngs=nnx.Rngs(0)), policy("bfloat16"))
  plain = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
  (product,) = products(jax.make_jaxpr(view.project)(jnp.ones((2, 3))))
  assert product.dtypes == ("bfloat16", "bfloat16")
  assert view.dot_general is plain.dot_general
  assert view.promote_dtype is plain.promote_dtype


# Who is asked


@pytest.mark.parametrize("rule", [mpjax.Rule(policy("bfloat16"), path="layers/1"), None])
def test_a_rule_or_the_policy_asks_for_it(rule):
  def make(rngs):
    return nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs))

  given = ("mixed_bfloat16", [rule]) if rule else (policy("bfloat16"), ())
  call, params = calls(make, given[0], rules=given[1])
  fun = with_gradients(call, jnp.ones((2, 3)))
  found = products(jax.make_jaxpr(fun)(params, jnp.ones((2, 3))))
  assert [result_of(p) for p in found].count("float32") == (1 if rule else 2)


def product_of_the_user(*args, **options):
  return jax.lax.dot_general(*args, **options)


def promotion_of_the_user(args, *, dtype=None, **options):
  return tuple(None if x is None else jnp.asarray(x, dtype) for x in args)


class Own(nnx.Linear):
  """A subclass with a `__call__` of its own."""

  def __call__(self, inputs):
    inputs, kernel, bias = self.promote_dtype((inputs, self.kernel, self.bias), dtype=self.dtype)
    return self.dot_general(inputs, kernel * 2, (((2,), (0,)), ((), ()))) + bias


def linear(**fields):
  return lambda rngs: nnx.Linear(3, 3, rngs=rngs, **fields)


OTHERS = {
  "dot_general of the user": linear(dot_general=product_of_the_user),
  "promote_dtype of the user": linear(promote_dtype=promotion_of_the_user),
  "dot_general_cls of the user": lambda rngs: nnx.LinearGeneral(
    3, 3, dot_general_cls=lambda: product_of_the_user, rngs=rngs
  ),
  "a call of its own": lambda rngs: Own(3, 3, rngs=rngs),
  "Einsum": lambda rngs: nnx.Einsum("abc,cd->abd", (3, 4), rngs=rngs),
  "ConvTranspose": lambda rngs: nnx.ConvTranspose(3, 2, (3,), rngs=rngs),
}


def test_a_type_of_its_own_is_left_alone():
  make = linear(preferred_element_type=jnp.bfloat16)
  assert traced(make, (2, 4, 3)) == traced(make, (2, 4, 3), None)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_every_matmul_of_a_parameter_is_reached(make):
  before, after = traced(make, (2, 4, 3), None), traced(make, (2, 4, 3))
  assert "float32" not in map(result_of, before)
  assert [result_of(p) for p in after].count("float32") == 1
  assert len(after) == len(before)


def test_a_complex_argument_is_computed_in_complex():
  view = with_policy(linear()(nnx.Rngs(0)), policy("bfloat16"))
  assert view(jnp.ones((2, 3), jnp.complex64)).dtype == jnp.complex64


def test_views_that_are_made_anew_are_one_program_and_can_be_pickled():
  model, traces = linear()(nnx.Rngs(0)), []

  @nnx.jit
  def forward(view, x):
    traces.append(1)
    return view(x)

  view = with_policy(model, policy("bfloat16"))
  out = forward(view, jnp.ones((2, 3)))
  forward(with_policy(model, policy("bfloat16")), jnp.ones((2, 3)))
  assert len(traces) == 1
  again = pickle.loads(pickle.dumps(view))
  assert type(again) is type(view)
  assert bits(forward(again, jnp.ones((2, 3)))) == bits(out)
