"""with_policy(ops="float32"): what a module's own code does in half though it should not.

The same two models are written in Linen and in NNX, and are the same operations under the lists.
What a call does to variables is the same with them and without them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import check_error
from tests.integration import test_ops_in_modules as in_linen
from tests.integration.test_ops_in_modules import FLOAT32_LIST, counts, dtypes_of
from tests.models.values import normal
from tests.nnx import rig
from tests.programs import bits, half_share, run

pytestmark = pytest.mark.standard_promotion

with_policy = mpjax.nnx.with_policy
BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
X = in_linen.X


class Attention(nnx.Module):
  """Attention whose author took the softmax by hand, in the dtype of the products."""

  def __init__(self, rngs):
    self.q, self.k, self.v, self.out = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))

  def __call__(self, x):
    q, k, v = self.q(x), self.k(x), self.v(x)
    scores = q @ k.mT * 1.0
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return self.out(weights / weights.sum(-1, keepdims=True) @ v)


class Gate(nnx.Module):
  """Logarithm, exponential and a sum, in an order of the author's own."""

  def __init__(self, rngs):
    self.into, self.out = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x):
    x = self.into(x)
    return self.out(jnp.log1p(jnp.exp(x)) * jnp.cumsum(x, -1))


MODELS = {"attention": (Attention, in_linen.Attention()), "gate": (Gate, in_linen.Gate())}


def traced(make, half, x=X, **options):
  """Returns the program of a model's call, and that of its gradients."""
  graphdef, params, rest = rig.split(make)
  run = lambda view, *inputs: view(*inputs)  # noqa: E731
  forward, both = rig.functions(graphdef, f"mixed_{half}", run, **options)
  return [jax.make_jaxpr(fun)(params, rest, (x,)) for fun in (forward, both)]


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_the_same_operations_as_in_linen(name, half):
  make, module = MODELS[name]
  for options in ({}, {"ops": "float32"}):
    model, variables = in_linen.wrapped(module, half, **options)
    theirs, ours = in_linen.traced(model, variables), traced(make, half, **options)[0]
    assert counts(ours) == counts(theirs)
  assert dtypes_of(ours, FLOAT32_LIST) == {"float32"}
  assert half_share(ours) == 1


@BOTH
def test_gradients_and_their_programs(half):
  _, plain = traced(Attention, half)
  _, both = traced(Attention, half, ops="float32")
  assert half in dtypes_of(plain, ("exp",))
  assert dtypes_of(both, ("exp",)) == {"float32"}
  assert both.out_avals == plain.out_avals
  assert half_share(both) == half_share(plain) == 1


def test_float16_does_not_overflow_where_the_author_forgot_it():
  """exp(12) is beyond float16; the sum of it is too, and float32 holds both."""

  class Loud(nnx.Module):
    def __call__(self, x):
      return jnp.log(jnp.sum(jnp.exp(x * 0 + 12)))

  assert np.isinf(with_policy(Loud(), "mixed_float16")(X))
  out = with_policy(Loud(), "mixed_float16", ops="float32")(X)
  np.testing.assert_allclose(out, 12 + np.log(X.size), rtol=1e-3)


def test_edited_lists_count_by_their_float32_part():
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.a, self.b = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
      return jnp.tanh(self.a(x)) + jnp.exp(self.b(x))

  ops = mpjax.OpLists().with_(float32=["tanh"], keep=["exp"])
  program, _ = traced(Model, "bfloat16", ops=ops)
  assert dtypes_of(program, ("tanh",)) == {"float32"}
  assert dtypes_of(program, ("exp", "dot_general")) == {"bfloat16"}


# What a call does


class Metric(nnx.Variable):
  """A kind of variable of the user's own."""


class Busy(nnx.Module):
  """Reads, writes, makes and takes away variables; nothing of it is on a list of operations."""

  def __init__(self, rngs):
    self.layer = nnx.Linear(4, 4, rngs=rngs)
    self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    self.first, self.largest = Metric(jnp.zeros(())), Metric(jnp.zeros(()))
    self.plain = jnp.zeros(())
    self.held = nnx.data({"cache": [nnx.Cache(jnp.zeros((2, 4)))]})
    self.calls, self.again = 0, self.layer

  def __call__(self, x, *, scale=1.0, word="loud"):
    assert (scale, word) == (2.0, "soft")
    x = self.drop(self.norm(self.again(x)))
    self.largest[...] = x.max().astype(jnp.float32)
    self.fresh = Metric(x[0])
    self.hidden = nnx.Intermediate(x)
    self.held["cache"][0][...] = x
    self.held["cache"].append(nnx.Cache(x))
    self.tied = self.fresh
    self.plain = x[0, 0]
    self.largest.set_metadata("unit", "volt")
    self.calls += 1
    if hasattr(self, "first"):
      del self.first
    return {"x": x, "metric": self.fresh, "word": word, "none": None}


def call_busy(model, x):
  out = model(x, scale=2.0, word="soft")
  return out["x"], out["word"], out["metric"] is model.fresh is model.tied


# Who is called, and by what: the model is an argument, or the view is.
AROUND = {
  "the view itself": lambda model, ops: call_busy(with_policy(model, "c=f16", ops=ops), X4),
  "nnx.jit of the model": lambda model, ops: nnx.jit(
    lambda m, x: call_busy(with_policy(m, "c=f16", ops=ops), x)[0]
  )(model, X4),
  "nnx.jit of the view": lambda model, ops: nnx.jit(lambda v, x: call_busy(v, x)[0])(
    with_policy(model, "c=f16", ops=ops), X4
  ),
  "nnx.remat and nnx.grad": lambda model, ops: nnx.grad(
    nnx.remat(lambda m, x: call_busy(with_policy(m, "c=f16", ops=ops), x)[0].sum())
  )(model, X4),
}
X4 = jnp.asarray(normal(2, 4))


@pytest.mark.parametrize("name", AROUND)
def test_what_a_call_does_to_variables_is_what_it_does_without(name):
  models = [Busy(nnx.Rngs(0)) for _ in range(2)]
  ours, plain = (
    AROUND[name](model, ops) for model, ops in zip(models, ["float32", None], strict=True)
  )
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  numbers = [
    [x for x in jax.tree.leaves(t) if not isinstance(x, (str, bool))] for t in (ours, plain)
  ]
  assert bits(numbers[0]) == bits(numbers[1])
  states = [nnx.to_flat_state(nnx.state(model)) for model in models]
  assert [path for path, _ in states[0]] == [path for path, _ in states[1]]
  for (path, ours), (_, plain) in zip(*states, strict=True):
    assert type(ours) is type(plain), path
    ours, plain = (x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in (ours, plain))
    if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
      ours, plain = jax.random.key_data(ours), jax.random.key_data(plain)
    assert bits(ours) == bits(plain), path
  assert models[0].layer is models[0].again
  assert models[0].largest.get_metadata() == models[1].largest.get_metadata()
  assert hasattr(models[0], "first") == hasattr(models[1], "first")


def test_statistics_and_counters_move_where_nothing_but_arrays_comes_out():
  models = [nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))]
  plain = [nnx.clone(model) for model in models]
  for ours, other in zip(models, plain, strict=True):
    out = with_policy(ours, "c=bf16", ops="float32")(X4)
    assert bits(out) == bits(with_policy(other, "c=bf16")(X4))
  assert bits(models[0].mean[...]) == bits(plain[0].mean[...]) != bits(jnp.zeros(4))
  assert int(models[1].rngs.count[...]) == 1


def test_modules_and_variables_among_the_arguments():
  class Takes(nnx.Module):
    def __call__(self, x, layer, variable, rngs, act):
      variable[...] = layer(x).astype(jnp.float32).sum()
      return act(layer(x)) + rngs.normal(x.shape).astype(x.dtype), layer

  layer, variable, rngs = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Metric(jnp.zeros(())), nnx.Rngs(1)
  view = with_policy(Takes(), "c=bf16", ops="float32")
  out, same = view(X4, layer, variable, rngs=rngs, act=jnp.exp)
  assert same is layer
  np.testing.assert_array_equal(variable[...], layer(X4.astype("bfloat16")).sum())
  assert int(rngs.default.count[...]) == 1
  assert out.dtype == jnp.float32  # the layer has no policy: it is not the view's


@pytest.mark.parametrize("change", ["append", "none", "rename", "replace"])
def test_an_argument_that_is_changed_in_place_is_refused(change):
  class Taps(nnx.Module):
    def __call__(self, x, taps, *, named):
      changes = {
        "append": lambda: taps.append(x),
        "none": lambda: taps.append(None),
        "rename": lambda: named.update(b=named.pop("a")),
        "replace": lambda: named.update(a=x),
      }
      changes[change]()
      return x

  view = with_policy(Taps(), "c=bf16", ops="float32")
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    view(X4, [], named={"a": 1})
  check_error(
    excinfo,
    where="mpjax.nnx.with_policy(ops=...)",
    expected="'__call__' to return what it computes",
    got="a list, a dict or another tree that it changed in place, which would be lost",
    fix="Return the new values",
    builtin=TypeError,
  )


def test_an_argument_that_nnx_holds_may_be_changed_in_place():
  class Taps(nnx.Module):
    def __call__(self, x, taps, layers, state):
      taps.append(nnx.Cache(x))
      layers[0].kernel[...] += 1
      return x * state["scale"]

  taps, layers = nnx.List([]), [nnx.Linear(4, 4, rngs=nnx.Rngs(0))]
  before = layers[0].kernel[...]
  with_policy(Taps(), "c=bf16", ops="float32")(X4, taps, layers, {"scale": X4})
  assert bits(taps[0][...]) == bits(X4.astype("bfloat16"))
  assert bits(layers[0].kernel[...]) == bits(before + 1)


def test_who_only_reads_may_be_closed_over():
  view = with_policy(rig.model(Attention), "mixed_bfloat16", ops="float32")
  assert bits(run(lambda x: view(x), X)) == bits(run(jax.vmap(view), X))
  assert jax.eval_shape(jax.grad(lambda x: view(x).sum()), X).dtype == jnp.float32


class Stacked(nnx.Module):
  """Layers in a loop; a cell over time; experts."""

  def __init__(self, rngs):
    self.blocks = nnx.vmap(lambda rngs: Attention(rngs))(rngs.split(2))
    self.rnn = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))

  def __call__(self, x):
    step = nnx.remat(lambda x, block: block(x), prevent_cse=False)
    x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
    x = nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.blocks, x).sum(0)
    return self.rnn(x)


def test_transforms_inside():
  _, plain = traced(Stacked, "float16")
  _, both = traced(Stacked, "float16", ops="float32")
  assert both.out_avals == plain.out_avals
  assert half_share(both) == 1
  assert dtypes_of(both, ("exp",)) == {"float32"}


def test_every_method_and_every_module_of_a_view_may_be_the_outermost():
  class Outer(nnx.Module):
    def __init__(self, rngs):
      self.inner = Gate(rngs)

    def encode(self, x):
      return jnp.exp(self.inner.into(x))

  view = with_policy(rig.model(Outer), "c=bf16", ops="float32")
  for call in (view.inner, view.encode):
    program = jax.make_jaxpr(call)(X)
    assert dtypes_of(program, ("exp",)) == {"float32"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_capture_and_conversion():
  class Sows(Gate):
    def __call__(self, x):
      self.sow(nnx.Intermediate, "hidden", self.into(x))
      return super().__call__(x)

  view = with_policy(rig.model(Sows), "mixed_bfloat16", ops="float32")
  out, seen = nnx.capture(view, nnx.Intermediate)(X)
  assert seen["hidden"].get_value()[0].dtype == jnp.bfloat16
  small = mpjax.nnx.convert(view, X)
  assert small.into.kernel.dtype == jnp.bfloat16
  assert bits(small(X)) == bits(out)


def test_a_second_call_traces_nothing():
  calls = []

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.layer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
      calls.append(1)
      return jnp.exp(self.layer(x))

  model = rig.model(Model)
  step = nnx.jit(lambda view, x: view(x))
  for _ in range(2):
    step(with_policy(model, "mixed_float16", ops="float32"), X)
  assert calls == [1]
  step(with_policy(model, "mixed_float16"), X)
  assert calls == [1, 1]


def test_an_error_names_the_method_and_the_module():
  class Mixes(nnx.Module):
    def __call__(self, x):
      return jax.lax.add(x, jnp.ones((2, 4)))

  with pytest.raises(TypeError) as excinfo:
    with_policy(nnx.Sequential(Mixes()), "c=bf16", ops="float32")(X4)
  assert any("'layers/0' (Mixes)" in note for note in excinfo.value.__notes__)
