"""Kernels: in which dtype they are traced, and how a user says so."""

import importlib
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas

import mpjax
from tests.errors import refused
from tests.programs import outermost, run

pytestmark = pytest.mark.standard_promotion

X = jax.random.normal(jax.random.key(0), (8, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3


def of_jax(name):
  # Importing some of these kernels warns that they may go.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def _multiply(x, w, out):
  out[...] = jnp.dot(x[...], w[...], preferred_element_type=out.dtype)


def product(x, w):
  shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
  return pallas.pallas_call(_multiply, out_shape=shape, interpret=True)(x, w)


differentiable = jax.custom_vjp(product)
differentiable.defvjp(
  lambda x, w: (product(x, w), (x, w)),
  lambda kept, g: (product(g, kept[1].T), product(kept[0].T, g)),
)


def attention(q, k, v):
  mha = of_jax("attention")
  sizes = {f"block_{name}": 16 for name in ("q", "k", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
  blocks = mha.BlockSizes(**sizes)
  return mha.mha(q, k, v, None, causal=True, interpret=True, block_sizes=blocks)


def kernel_dtypes(fn, *args):
  """Returns the dtypes of the floating operands of each kernel."""
  kernels = outermost(jax.make_jaxpr(fn)(*args), ["pallas_call"])
  avals = [[v.aval for v in eqn.invars] for eqn in kernels]
  return [{a.dtype.name for a in each if jnp.issubdtype(a.dtype, jnp.floating)} for each in avals]


# The own dtype of a module.


class Projected(nn.Module):
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    h = nn.Dense(8, dtype=self.dtype)(x)
    return differentiable(h, h.T)


class Nested(nn.Module):
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(4, dtype=self.dtype)(nn.jit(Projected)(self.dtype)(h))


class TwoKernels(nn.Module):
  dtype: object = None

  @nn.compact
  def __call__(self, x):
    return Projected(self.dtype, name="first")(x) + Projected(self.dtype, name="second")(x)


class ProjectedNNX(nnx.Module):
  def __init__(self, dtype, *, rngs):
    self.dtype = dtype
    self.dense = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    h = self.dense(x)
    return differentiable(h, h.T)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("cls", [Projected, Nested])
def test_the_dtype_of_a_module_reaches_its_kernel(cls, policy):
  model = cls(jnp.bfloat16)
  variables = model.init(jax.random.key(0), X)
  low = mpjax.with_policy(model, policy)
  assert kernel_dtypes(low.apply, variables, X) == [{"bfloat16"}]


def test_forward_and_backward_run_as_by_hand():
  model = Projected(jnp.bfloat16)
  variables = model.init(jax.random.key(0), X)
  low = mpjax.with_policy(model, "mixed_bfloat16")

  def gradient(apply):
    return jax.grad(lambda v: jnp.sum(apply(v, X).astype(jnp.float32) ** 2))

  by_hand, ours = gradient(model.apply), gradient(low.apply)
  assert kernel_dtypes(ours, variables) == [{"bfloat16"}] * 3
  found, expected = (run(g, variables) for g in (ours, by_hand))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05 * np.abs(b).max())


def test_the_dtype_of_an_nnx_module_reaches_its_kernel():
  model = ProjectedNNX(jnp.bfloat16, rngs=nnx.Rngs(0))
  low = mpjax.with_policy(model, "mixed_bfloat16")
  assert kernel_dtypes(low, X) == [{"bfloat16"}]


def test_a_float32_rule_runs_the_kernel_in_float32():
  model = TwoKernels(jnp.bfloat16)
  variables = model.init(jax.random.key(0), X)
  rule = mpjax.Rule("float32", path="second")
  low = mpjax.with_policy(model, "mixed_bfloat16", [rule])
  assert kernel_dtypes(low.apply, variables, X) == [{"bfloat16"}, {"float32"}]


class Unnamed(nn.Module):
  wrap: object = lambda cls: cls

  @nn.compact
  def __call__(self, x):
    return self.wrap(Projected)(jnp.bfloat16)(x)


@pytest.mark.parametrize("wrap", [lambda cls: cls, nn.remat], ids=["plain", "remat"])
def test_the_dtype_of_an_unnamed_module_in_a_scope(wrap):
  model = Unnamed(wrap)
  variables = model.init(jax.random.key(0), X)

  def call(variables):
    with mpjax.policy_scope("mixed_bfloat16"):
      return model.apply(variables, X)

  assert kernel_dtypes(call, variables) == [{"bfloat16"}]


# `low_precision`


KERNELS = {
  "product": lambda w, x: differentiable(x @ w, w),
  "attention": lambda w, x: attention(*[jnp.tile((x @ w)[None, :, None], (1, 4, 1, 4))] * 3),
  "softmax": lambda w, x: of_jax("softmax").softmax(x @ w, interpret=True),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision_in_an_autocast_function(name, policy):
  fn, half = KERNELS[name], policy.removeprefix("mixed_")
  low = mpjax.autocast(mpjax.low_precision(fn), policy)
  assert kernel_dtypes(low, W, X) == [{half}]
  np.testing.assert_allclose(run(low, W, X), run(fn, W, X), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients_through_low_precision(transform):
  def loss(cast):
    return lambda w, x: jnp.sum(cast(differentiable)(jnp.tanh(x @ w), w).astype(jnp.float32) ** 2)

  low = jax.grad(mpjax.autocast(transform(loss(mpjax.low_precision))), (0, 1))
  assert all(dtypes == {"bfloat16"} for dtypes in kernel_dtypes(low, W, X))
  found, expected = run(low, W, X), run(jax.grad(loss(lambda f: f), (0, 1)), W, X)
  for a, b in zip(found, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0.1, atol=0.1)


def test_low_precision_is_the_function_itself_where_no_policy_is():
  for cast in (lambda f: f, lambda f: mpjax.autocast(f, "float32"), mpjax.full_precision):
    assert kernel_dtypes(cast(mpjax.low_precision(product)), X, W) == [{"float32"}]
  in_region = mpjax.autocast(mpjax.full_precision(mpjax.low_precision(product)))
  assert kernel_dtypes(in_region, X, W) == [{"float32"}]
  # The dtype is that of the function, also where a rule for a scope gives another one.
  fn = mpjax.low_precision(lambda x, w: jnp.tanh(x @ w) @ w)
  rules = [mpjax.Rule("bfloat16", path="**")]
  programs = (mpjax.autocast(f, "float32", rules=rules) for f in (fn, fn.__wrapped__))
  one, other = (str(jax.make_jaxpr(program)(X, W)) for program in programs)
  assert "bf16" in one
  assert one == other


def test_low_precision_leaves_what_is_inside_as_it_is_written():
  def inside(x):
    return jnp.exp(x).sum()

  jaxpr = jax.make_jaxpr(mpjax.autocast(mpjax.low_precision(inside)))(X)
  expected = jax.make_jaxpr(inside)(X.astype(jnp.bfloat16))
  names = [eqn.primitive.name for eqn in expected.eqns]
  written = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in names]
  assert written[-len(names)].outvars[0].aval.dtype == jnp.bfloat16


class WithKernel(nn.Module):
  @nn.compact
  def __call__(self, x):
    h = nn.Dense(8)(x)
    return mpjax.low_precision(differentiable)(h, h.T)


def test_low_precision_in_modules_takes_the_dtype_of_their_policy():
  model = WithKernel()
  variables = model.init(jax.random.key(0), X)
  for policy, dtype in (("mixed_float16", "float16"), ("float32", "float32")):
    low = mpjax.with_policy(model, policy)
    assert kernel_dtypes(low.apply, variables, X) == [{dtype}]


def test_low_precision_in_a_module_takes_the_dtype_of_its_rule():
  model = nn.Sequential([WithKernel()])
  variables = model.init(jax.random.key(0), X)
  for policy, dtype in (("mixed_float16", "float16"), ("float32", "float32")):
    rules = [mpjax.Rule(policy, path="layers_0")]
    low = mpjax.with_policy(model, "mixed_bfloat16", rules)
    assert kernel_dtypes(low.apply, variables, X) == [{dtype}]


def noting(seen):
  # Returns a function with derivative rules that note in which dtype they compute.
  note = mpjax.low_precision(lambda x: (seen.append(x.dtype.name), x)[1])
  double = lambda x: note(x).astype(jnp.float32)  # noqa: E731
  fun = jax.custom_vjp(double)
  fun.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
  return fun


def test_low_precision_in_derivative_rules_of_a_function():
  fun = noting(seen := [])
  jax.grad(lambda x: mpjax.autocast(lambda x: fun(x).sum())(x))(X)
  assert seen == ["bfloat16"] * 3


@pytest.mark.parametrize("chosen", ["mixed_float16", "float32"])
def test_low_precision_in_derivative_rules_of_a_module(chosen):
  fun = noting(seen := [])

  class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
      return fun(x * self.param("scale", nn.initializers.ones, (8,)))

  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Inner(name="inner")(x)

  model = Outer()
  variables = model.init(jax.random.key(0), X)
  low = mpjax.with_policy(model, "mixed_bfloat16", [mpjax.Rule(chosen, path="inner")])
  seen.clear()
  jax.grad(lambda v: low.apply(v, X).sum())(variables)
  assert seen == [chosen.removeprefix("mixed_")] * 3


def test_full_precision_holds_inside_of_low_precision():
  seen = []
  exact = mpjax.full_precision(lambda x: (seen.append(x.dtype.name), x)[1])
  mpjax.autocast(mpjax.low_precision(lambda x: exact(x)))(X)
  assert seen == ["float32"]


# Rules.


def test_a_rule_runs_a_module_in_the_compute_dtype_as_a_whole():
  model = TwoKernels()
  variables = model.init(jax.random.key(0), X)
  rule = mpjax.Rule("mixed_bfloat16", path="second", rewrite=False)
  low = mpjax.with_policy(model, "mixed_bfloat16", [rule])
  assert kernel_dtypes(low.apply, variables, X) == [{"float32"}, {"bfloat16"}]


WHOLE = [mpjax.Rule("mixed_bfloat16", path="", rewrite=False)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_a_module_as_a_whole_passes_its_own_carry(cell):
  model, x = nn.RNN(cell(4)), jnp.ones((2, 3, 4))
  variables = model.init(jax.random.key(0), x)
  found = mpjax.with_policy(model, "mixed_bfloat16", WHOLE).apply(variables, x)
  np.testing.assert_allclose(found, model.apply(variables, x), atol=0.02)


def test_a_module_as_a_whole_draws_the_same_parameters():
  model = Nested()
  found = mpjax.with_policy(model, "mixed_bfloat16", WHOLE).init(jax.random.key(0), X)
  expected = model.init(jax.random.key(0), X)
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))


class RawWeight(nn.Module):
  @nn.compact
  def __call__(self, x):
    return product(x, self.param("w", nn.initializers.ones, (8, 8)))


def test_a_float32_parameter_in_a_module_as_a_whole_is_a_leak():
  model = RawWeight()
  variables = model.init(jax.random.key(0), X)
  low = mpjax.with_policy(model, "mixed_bfloat16", WHOLE)
  (leak,) = mpjax.audit(low.apply)(variables, X).leaks
  assert leak.kind == "kernel"


def test_what_is_refused():
  with refused(TypeError, "mpjax.low_precision(fn)", "a function", "3", "low_precision(kernel)(q"):
    mpjax.low_precision(3)
  where, fix = "mpjax.Rule(rewrite=...)", "Write rewrite=False"
  with refused(TypeError, where, "True or False", "'no'", fix):
    mpjax.Rule("mixed_bfloat16", path="a", rewrite="no")
  where, expected = "mpjax.Rule(rewrite=False)", "a policy that computes in float16 or bfloat16"
  with refused(ValueError, where, expected, "None", "Leave out rewrite="):
    mpjax.Rule(None, path="a", rewrite=False)
  rule, expected = WHOLE[0], "rules that rewrite operations"
  with refused(
    ValueError, "mpjax.autocast(rules=...)", expected, "rewrite=False", "Use mpjax.low_"
  ):
    mpjax.autocast(product, rules=[rule])


def test_each_trace_of_a_jitted_module_is_looked_at():
  jitted = nn.jit(Projected)
  model = Unnamed(lambda _: jitted)
  variables = model.init(jax.random.key(0), X)
  low = mpjax.with_policy(model, "mixed_bfloat16")
  for _ in range(3):
    assert kernel_dtypes(lambda v: low.apply(v, X), variables) == [{"bfloat16"}]
