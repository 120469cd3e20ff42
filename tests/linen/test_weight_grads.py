"""Weight gradients in float32 under half compute: one product each, and nothing else changes.

The numbers are integers small enough that every value of a half program is exact, except for sums
over many rows: those are what float32 weight gradients are for.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.count import residual_bytes
from tests.linen.probes import HALF, KEY, dtypes, text
from tests.programs import bits, equations, products, run

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

with_policy = mpjax.linen.with_policy


def policy(half, weight_grad="float32", **dtypes):
  return mpjax.Policy(
    compute_dtype=half, output_dtype="float32", weight_grad_dtype=weight_grad, **dtypes
  )


def integers(seed, shape, largest):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(-largest, largest + 1, shape), jnp.float32)


def whole(tree):
  """Returns parameters of the shapes of a tree, with values -1, 0 and 1."""
  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(treedef, [integers(i, x.shape, 1) for i, x in enumerate(leaves)])


def setting(model, shape, largest=9):
  """Returns variables, inputs and the cotangent of the output, all of them whole numbers."""
  x = integers(7, shape, largest)
  variables = whole(jax.eval_shape(model.init, KEY, x))
  out = jax.eval_shape(model.apply, variables, x)
  return variables, x, integers(8, out.shape, largest) * 2 + 1


def with_gradients(apply, cotangent):
  """Returns a function of (variables, x): output, gradients of the variables, gradient of x."""

  def value_and_gradients(variables, x):
    y, pull = jax.vjp(apply, variables, x)
    return y, *pull(cotangent.astype(y.dtype))

  return value_and_gradients


def result_of(product):
  return product.result.partition("[")[0]


# Layers, and how they reach their product

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
  "Dense": (nn.Dense(5), (200, 3)),
  "Dense without bias": (nn.Dense(5, use_bias=False), (20, 10, 3)),
  "Dense of one row": (nn.Dense(5), (7,)),
  "DenseGeneral": (nn.DenseGeneral((2, 5), axis=(-1, 1)), (200, 3, 2, 4)),
  "DenseGeneral with batch axes": (
    nn.DenseGeneral((2, 5), axis=(-1,), batch_dims=(0, 1)),
    (2, 3, 200, 4),
  ),
  "DenseGeneral of batch axes alone": (nn.DenseGeneral(3, axis=(2, 1), batch_dims=(0,)), (4, 9, 5)),
  "Conv": (nn.Conv(4, (3,)), (20, 9, 3)),
  "Conv with strides and holes": (
    nn.Conv(4, (3, 2), strides=(2, 1), kernel_dilation=(1, 2)),
    (8, 7, 9, 3),
  ),
  "Conv of a dilated input": (
    nn.Conv(4, (2, 2), input_dilation=2, padding=((1, 2), (0, 1))),
    (8, 5, 4, 2),
  ),
  "Conv in three dimensions": (nn.Conv(2, (2, 3, 2), use_bias=False), (6, 4, 5, 4, 2)),
  "Conv in groups": (nn.Conv(6, (3,), feature_group_count=3), (20, 9, 3)),
  "Conv, circular": (nn.Conv(4, (3, 3), padding="CIRCULAR"), (8, 5, 6, 2)),
  "Conv, causal": (nn.Conv(4, (3,), padding="CAUSAL", kernel_dilation=2), (20, 9, 3)),
  "Conv of one example": (nn.Conv(4, 3), (200, 3)),
  "Conv with a mask": (nn.Conv(2, (3,), mask=jnp.tril(jnp.ones((3, 3, 2)))), (20, 9, 3)),
}

layers = pytest.mark.parametrize(("model", "shape"), LAYERS.values(), ids=LAYERS)


@layers
@pytest.mark.parametrize("half", HALF)
def test_one_product_of_half_numbers_into_float32(model, shape, half):
  variables, x, cotangent = setting(model, shape)

  def program(weight_grad):
    apply = with_policy(model, policy(half, weight_grad)).apply
    return jax.make_jaxpr(with_gradients(apply, cotangent))(variables, x)

  before, after = products(program(None)), products(program("float32"))
  assert {(p.dtypes, result_of(p)) for p in before} == {((half, half), half)}
  # Forward and the gradient of the input: the very same. The gradient of the kernel: one product of
  # the same size, whose result is never half.
  same = [p for p in after if result_of(p) == half]
  (wide,) = (p for p in after if result_of(p) == "float32")
  (old,) = set(before) - set(same)
  assert (len(before), len(after)) == (3, 3)
  assert set(same) < set(before)
  assert wide.dtypes == (half, half)
  assert wide.flops == old.flops
  size = variables["params"]["kernel"].size
  assert not [
    eqn
    for eqn, _ in equations(program("float32"))
    if eqn.primitive.name == "convert_element_type"
    and (eqn.invars[0].aval.dtype, eqn.invars[0].aval.size) == (half, size)
  ]


@layers
def test_whole_numbers_come_out_exact_and_the_rest_the_same(model, shape):
  variables, x, cotangent = setting(model, shape)
  exact = run(with_gradients(model.apply, cotangent), variables, x)
  y, weights, x_bar = run(
    with_gradients(with_policy(model, policy("bfloat16")).apply, cotangent), variables, x
  )
  old_y, old_weights, old_x_bar = run(
    with_gradients(with_policy(model, policy("bfloat16", None)).apply, cotangent), variables, x
  )
  assert bits((y, x_bar)) == bits((old_y, old_x_bar))
  assert bits(weights) == bits(exact[1])
  assert dtypes(weights) == dtypes(old_weights)
  rounded = jax.tree.map(lambda g: g.astype("bfloat16").astype("float32"), exact[1])
  # Rounding would have shown, but where there is one row and nothing to add up.
  rows = cotangent.size // variables["params"].get("bias", jnp.ones(())).size
  assert (bits(rounded) != bits(exact[1])) == (rows > 1)


def by_definition(model, variables, x, cotangent):
  """Returns the gradients of a linear model in float64: <cotangent, model of one unit vector>.

  Each element of a unit vector's output is one element of `x`, or zero: nothing is rounded. Next to
  them are the sums of the absolute values of what is added up.
  """
  flat, unravel = jax.flatten_util.ravel_pytree(variables)
  units = run(jax.vmap(lambda unit: model.apply(unravel(unit), x)), jnp.eye(flat.size))
  terms = np.asarray(units, np.float64) * np.asarray(cotangent, np.float64)
  axes = tuple(range(1, terms.ndim))
  return terms.sum(axes), np.abs(terms).sum(axes)


@pytest.mark.parametrize(
  ("model", "shape", "half", "gain"),
  [
    pytest.param(nn.Dense(4), (512, 3), "bfloat16", 10_000, id="Dense in bfloat16"),
    # Of fewer terms, so that the gain does not depend on the order in which a CPU adds them.
    pytest.param(nn.Dense(4), (32, 3), "float16", 1_000, id="Dense in float16"),
    pytest.param(nn.Dense(4), (512, 3), "float16", 500, id="Dense in float16, of 512 terms"),
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
  true, terms = by_definition(model, variables, x, cotangent)

  def errors(weight_grad):
    apply = with_policy(model, policy(half, weight_grad)).apply
    found = run(with_gradients(apply, cotangent), variables, x)[1]
    return np.abs(np.asarray(jax.flatten_util.ravel_pytree(found)[0], np.float64) - true)

  ours = errors("float32")
  # So many float32 additions, in any order.
  assert (ours <= math.prod(shape[:-1]) * 2.0**-24 * terms).all()
  # Biases have float32 sums without it too; the kernel comes last.
  kernel = slice(-variables["params"]["kernel"].size, None)
  assert errors(None)[kernel].mean() > gain * ours[kernel].mean()


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
  """Layers in a loop, each with weights of its own, or one set of weights used in each turn."""

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


class Calls(nn.Dense):
  """A subclass that does something around the layer's own method."""

  @nn.compact
  def __call__(self, inputs):
    return super().__call__(inputs) * 2


class Inherits(nn.Dense):
  """A subclass with nothing of its own."""


def mapped(axis):
  split = {"params": axis is not None}
  return nn.vmap(nn.Dense, variable_axes={"params": axis}, split_rngs=split)(3)


def turned(tree):
  return jax.tree.map(jnp.transpose, tree)


BUILT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
  "a layer used twice": (Shared(), (100, 3)),
  "scan": (Scanned(), (100, 3)),
  "scan over shared weights": (Scanned(shared=True), (100, 3)),
  "scan of remat": (Scanned(remat=True), (100, 3)),
  "nn.remat": (nn.remat(nn.Dense)(3), (100, 3)),
  "nn.jit": (nn.jit(nn.Dense)(3), (100, 3)),
  "nn.vmap": (mapped(0), (2, 100, 3)),
  "nn.vmap over shared weights": (mapped(None), (2, 100, 3)),
  "nn.map_variables": (
    nn.map_variables(nn.Dense, "params", turned, turned, mutable=True)(3),
    (100, 3),
  ),
  "a subclass that calls the layer": (Calls(3), (100, 3)),
  "a subclass that inherits": (Inherits(3), (100, 3)),
}


@pytest.mark.parametrize(("model", "shape"), BUILT.values(), ids=BUILT)
def test_what_is_built_of_layers(model, shape):
  variables, x, cotangent = setting(model, shape, 1)
  exact = run(with_gradients(model.apply, cotangent), variables, x)

  def found(weight_grad):
    apply = with_policy(model, policy("bfloat16", weight_grad)).apply
    program = jax.make_jaxpr(with_gradients(apply, cotangent))(variables, x)
    wide = [p for p in products(program) if result_of(p) == "float32"]
    return wide, run(with_gradients(apply, cotangent), variables, x)

  wide, (y, weights, x_bar) = found("float32")
  assert wide
  assert {p.dtypes for p in wide} == {("bfloat16", "bfloat16")}
  assert bits((y, weights, x_bar)) == bits(exact)
  none, old = found(None)
  assert not none
  assert bits((y, x_bar)) == bits((old[0], old[2]))


CELLS = {
  "LSTMCell": (nn.RNN(nn.LSTMCell(3)), 8),
  "GRUCell": (nn.RNN(nn.GRUCell(3)), 6),
  "MGUCell": (nn.RNN(nn.MGUCell(3)), 4),
  "SimpleCell": (nn.RNN(nn.SimpleCell(3)), 2),
  "ConvLSTMCell": (nn.RNN(nn.ConvLSTMCell(3, (1,))), 2),
  "attention": (nn.MultiHeadDotProductAttention(2, qkv_features=4), 4),
  # Joins the kernels of its four gates and multiplies by itself.
  "OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(3)), 2),
}


def gradients_of(model, weight_grad, shape, half="bfloat16"):
  """Returns what a policied model computes, as a function of abstract variables and inputs."""
  x = jax.ShapeDtypeStruct(shape, "float32")
  variables = jax.eval_shape(model.init, KEY, x)
  apply = with_policy(model, policy(half, weight_grad)).apply
  cotangent = jnp.ones(jax.eval_shape(apply, variables, x).shape)
  return with_gradients(apply, cotangent), variables, x


@pytest.mark.parametrize(("model", "kernels"), CELLS.values(), ids=CELLS)
def test_layers_inside_of_layers(model, kernels):
  shape = (2, 4, 1, 3) if "ConvLSTM" in str(model) else (2, 4, 3)
  fun, *args = gradients_of(model, "float32", shape)
  program = products(jax.make_jaxpr(fun)(*args))
  assert len([p for p in program if result_of(p) == "float32"]) == kernels
  assert all(p.is_low_precision for p in program)


@pytest.mark.parametrize("name", ["SimpleCell", "attention"])
def test_layers_inside_of_layers_compute_the_same(name):
  model = CELLS[name][0]

  def found(weight_grad):
    fun, variables, x = gradients_of(model, weight_grad, (2, 4, 3), "float16")
    args = jax.tree.map(lambda v: jax.random.normal(KEY, v.shape), (variables, x))
    return run(fun, *args)

  (y, weights, x_bar), (old_y, old_weights, old_x_bar) = found("float32"), found(None)
  assert bits((y, x_bar)) == bits((old_y, old_x_bar))
  assert bits(weights) != bits(old_weights)


def test_reparametrized_weights():
  """The inner layer's kernel is computed in float32 with a norm, and is no parameter then."""
  fun, *args = gradients_of(nn.WeightNorm(nn.Dense(3)), "float32", (4, 3))
  program = products(jax.make_jaxpr(fun)(*args))
  assert [result_of(p) for p in program].count("float32") == 0
  assert all(p.is_low_precision for p in program)


# Under JAX's own transformations


@pytest.mark.parametrize("compiled", [True, False])
def test_vmap_over_examples(compiled):
  model = nn.Conv(2, (3,))
  variables, x, cotangent = setting(model, (4, 30, 2))
  grad = with_gradients(with_policy(model, policy("bfloat16")).apply, cotangent[:1])
  exact = jax.vmap(with_gradients(model.apply, cotangent[:1]), (None, 0))(variables, x[:, None])
  each = jax.vmap(grad, (None, 0))
  assert bits((jax.jit(each) if compiled else each)(variables, x[:, None])) == bits(exact)


@pytest.mark.parametrize("shape", [(100, 3), (10, 20, 3)])
@pytest.mark.parametrize("model", [nn.Dense(5), nn.DenseGeneral((2, 3))])
def test_vmap_over_weights(model, shape):
  """An ensemble: members share the inputs, and one of the two operands has one axis less."""
  variables, x, cotangent = setting(model, shape, 1)
  members = jax.tree.map(lambda v: jnp.stack([v, -v, 0 * v]), variables)
  apply = with_policy(model, policy("bfloat16")).apply
  found = run(jax.vmap(with_gradients(apply, cotangent), (0, None)), members, x)
  exact = run(jax.vmap(with_gradients(model.apply, cotangent), (0, None)), members, x)
  assert bits(found) == bits(exact)


@pytest.mark.parametrize(
  "second", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))], ids=["jacfwd", "jacrev"]
)
@pytest.mark.parametrize("model", [nn.Dense(2), nn.Conv(2, (1,))], ids=lambda m: type(m).__name__)
def test_second_derivatives(model, second):
  """In whole numbers they are those of the model in float32: the bias is seen by all orders."""
  variables, x, _ = setting(model, (3, 2, 2), 1)

  def loss(apply):
    return lambda variables: jnp.sum(apply(variables, x) ** 2)

  ours = run(second(loss(with_policy(model, policy("bfloat16")).apply)), variables)
  assert bits(ours) == bits(run(second(loss(model.apply)), variables))


def test_forward_mode():
  model = nn.Dense(2)
  variables, x, _ = setting(model, (3, 2))
  tangents = []
  for wide in ("float32", None):
    apply = with_policy(model, policy("bfloat16", wide)).apply
    tangents.append(jax.jvp(lambda v: apply(v, x), (variables,), (variables,)))  # noqa: B023
  assert bits(tangents[0]) == bits(tangents[1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(devices, check_vma):
  """Where JAX adds up over the mesh, by itself or by hand, it adds float32."""
  model = nn.Dense(5)
  variables, x, cotangent = setting(model, (200, 3))
  apply = with_policy(model, policy("bfloat16")).apply
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
    out_specs=jax.P(),
    check_vma=check_vma,
  )
  def gradients(variables, x, cotangent):
    grads = with_gradients(apply, cotangent)(variables, x)[1]
    return grads if check_vma else jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)

  exact = run(with_gradients(model.apply, cotangent), variables, x)[1]
  assert bits(gradients(variables, x, cotangent)) == bits(exact)
  program = jax.make_jaxpr(gradients)(variables, x, cotangent)
  sums = [eqn for eqn, _ in equations(program) if eqn.primitive.name.startswith("psum")]
  assert {str(v.aval.dtype) for eqn in sums for v in eqn.invars} == {"float32"}


# Dtypes


@pytest.mark.parametrize("stored", HALF)
def test_parameters_stored_in_half(stored):
  """Their gradient is rounded once, after all is added up."""
  model = nn.Dense(5)
  variables, x, cotangent = setting(model, (200, 3))
  exact = run(with_gradients(model.apply, cotangent), variables, x)[1]
  apply = with_policy(model, policy("bfloat16", param_dtype=stored)).apply
  found = run(
    with_gradients(apply, cotangent), jax.tree.map(lambda v: v.astype(stored), variables), x
  )[1]
  assert bits(found) == bits(jax.tree.map(lambda g: g.astype(stored), exact))


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


@pytest.mark.parametrize(
  "half", [None, "bfloat16"], ids=["without it", "with the compute dtype itself"]
)
def test_nothing_changes(half):
  model = nn.Sequential([nn.Conv(4, (3,)), nn.LayerNorm(), nn.Dense(3)])
  x = jnp.ones((2, 5, 3))
  variables = jax.eval_shape(model.init, KEY, x)

  def program(chosen):
    apply = with_policy(model, chosen).apply
    return text(jax.grad(lambda v, x: jnp.sum(apply(v, x))), variables, x)

  assert program(policy("bfloat16", half)) == program("mixed_bfloat16")
  assert program(policy("float32", "float32")) == program("float32")


def test_norms_and_embeddings_have_float32_gradients_anyway():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      x = nn.Embed(2, 1)(tokens)
      return nn.LayerNorm()(jax.lax.stop_gradient(x)) + x

  model, tokens = Model(), jnp.zeros((300,), jnp.int32)
  variables = model.init(KEY, tokens)
  apply = with_policy(model, policy("bfloat16", None)).apply
  found = run(jax.grad(lambda v: jnp.sum(apply(v, tokens))), variables)["params"]
  # Of 300 ones: in bfloat16 the sum would stop at 256.
  assert np.asarray(found["Embed_0"]["embedding"])[0, 0] == 300
  assert np.asarray(found["LayerNorm_0"]["bias"])[0] == 300


# What it costs


@pytest.mark.parametrize("use_bias", [True, False])
def test_the_kernel_is_cast_again_and_not_kept(use_bias):
  model = nn.Dense(7, use_bias=use_bias)

  def kept(weight_grad):
    x = jax.ShapeDtypeStruct((5, 3), "float32")
    variables = jax.eval_shape(model.init, KEY, x)
    return residual_bytes(with_policy(model, policy("bfloat16", weight_grad)).apply, variables, x)

  inputs, kernel = 2 * 5 * 3, 2 * 3 * 7
  assert kept("float32") == inputs
  assert kept(None) == inputs + kernel


def test_the_compiled_forward_pass_has_the_same_operations():
  model = nn.Dense(7)
  variables, x, _ = setting(model, (5, 3))

  def operations(weight_grad):
    apply = jax.jit(with_policy(model, policy("bfloat16", weight_grad)).apply)
    text = apply.lower(variables, x).compile().as_text()
    return collections.Counter(re.findall(r"= \S+ ([a-z-]+)\(", text))

  assert operations("float32") == operations(None)
  assert operations(None)["dot"] == 1


# Who is asked


def test_a_rule_may_ask_for_it():
  model = nn.Sequential([nn.Dense(3), nn.Dense(3)])
  variables, x, cotangent = setting(model, (20, 3), 1)
  rules = [mpjax.Rule(policy("bfloat16"), path="layers_1")]
  apply = with_policy(model, "mixed_bfloat16", rules).apply
  program = jax.make_jaxpr(with_gradients(apply, cotangent))(variables, x)
  assert [result_of(p) for p in products(program)].count("float32") == 1
  apply = with_policy(model, policy("bfloat16"), [mpjax.Rule("mixed_bfloat16", path="**")]).apply
  program = jax.make_jaxpr(with_gradients(apply, cotangent))(variables, x)
  assert {result_of(p) for p in products(program)} == {"bfloat16"}


def test_a_scope_asks_for_it_too():
  model = nn.Dense(3)
  variables, x, cotangent = setting(model, (20, 3), 1)
  with mpjax.linen.policy_scope(policy("bfloat16")):
    program = jax.make_jaxpr(with_gradients(model.apply, cotangent))(variables, x)
  assert [result_of(p) for p in products(program)].count("float32") == 1


def test_init_under_the_policy():
  model, x = nn.Dense(2), jnp.ones((2, 3))
  ours = with_policy(model, policy("bfloat16"))
  out, variables = ours.init_with_output(KEY, x)
  assert bits(variables) == bits(model.init(KEY, x))
  assert bits(out) == bits(model.apply(variables, x))


def product_of_the_user(*args, **kwargs):
  return jax.lax.dot_general(*args, **kwargs)


def promotion_of_the_user(*args, dtype=None, **kwargs):
  return [None if x is None else jnp.asarray(x, dtype) for x in args]


class Own(nn.Dense):
  """A subclass whose `__call__` is its own: the same fields, other arithmetic."""

  @nn.compact
  def __call__(self, inputs):
    kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features))
    bias = self.param("bias", self.bias_init, (self.features,))
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return jax.lax.dot_general(inputs, kernel, (((1,), (0,)), ((), ()))) * 2 + bias


class OtherPromotion(nn.Dense):
  """A subclass that has another default."""

  promote_dtype: Any = promotion_of_the_user


OTHERS = {
  "dot_general of the user": nn.Dense(3, dot_general=product_of_the_user),
  "dot_general_cls of the user": nn.Dense(3, dot_general_cls=lambda: product_of_the_user),
  "promote_dtype of the user": nn.DenseGeneral(3, promote_dtype=promotion_of_the_user),
  "promote_dtype of a subclass": OtherPromotion(3),
  "a layer's own method": Own(3),
  "conv_general_dilated of the user": nn.Conv(
    3, (1,), conv_general_dilated=jax.lax.conv_general_dilated
  ),
  "Einsum": nn.Einsum((3, 4), "abc,cd->abd"),
  "ConvTranspose": nn.ConvTranspose(2, (3,)),
  "ConvLocal": nn.ConvLocal(2, (3,)),
}


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_every_matmul_of_a_parameter_is_reached(model):
  x = jnp.ones((4, 3)) if isinstance(model, Own) else jnp.ones((2, 4, 3))
  variables = jax.eval_shape(model.init, KEY, x)

  def results(weight_grad):
    apply = with_policy(model, policy("bfloat16", weight_grad)).apply
    loss = lambda v, x: jnp.sum(apply(v, x))  # noqa: E731
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(variables, x)
    return sorted(map(result_of, products(program)))

  before, after = results(None), results("float32")
  assert "float32" not in before
  assert after.count("float32") == 1
  assert len(after) == len(before)


def test_an_integer_kernel_is_left_alone():
  model = nn.Dense(3, param_dtype=jnp.int8, kernel_init=nn.initializers.ones)
  x = jnp.ones((4, 3)) if isinstance(model, Own) else jnp.ones((2, 4, 3))
  variables = jax.eval_shape(model.init, KEY, x)

  def program(weight_grad):
    apply = with_policy(model, policy("bfloat16", weight_grad)).apply
    loss = lambda v, x: jnp.sum(apply(v, x))  # noqa: E731
    return text(jax.grad(loss, (0, 1), allow_int=True), variables, x)

  assert program("float32") == program(None)


def test_kernels_of_whole_numbers():
  """A kernel that is stored in integers has no gradient; the layer works as it does without."""
  model = nn.Dense(3)
  variables, x, cotangent = setting(model, (4, 3))
  variables = jax.tree.map(lambda v: v.astype(jnp.int8), variables)

  def found(weight_grad):
    apply = with_policy(model, policy("bfloat16", weight_grad)).apply
    return run(lambda x: jax.vjp(lambda x: apply(variables, x), x)[1](cotangent), x)

  assert bits(found("float32")) == bits(found(None))


def test_precision_is_handed_on():
  model = nn.Dense(3, precision="highest")
  variables, x, cotangent = setting(model, (4, 3))
  apply = with_policy(model, policy("bfloat16")).apply
  program = jax.make_jaxpr(with_gradients(apply, cotangent))(variables, x)
  found = products(program)
  assert len(found) == 3
  assert all("HIGHEST" in p.layout for p in found)


def test_fields_are_restored():
  model = nn.Dense(3).bind(setting(nn.Dense(3), (4, 3))[0])
  before = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
  with mpjax.linen.policy_scope(policy("bfloat16")):
    model(jnp.ones((4, 3)))
  assert all(getattr(model, name) is value for name, value in before.items())
