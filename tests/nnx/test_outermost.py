"""A view's modules and their links, and its outermost call: variables, arguments, transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax import Rule
from tests.models.values import normal
from tests.nnx.rig import HALF, Does, Metric
from tests.programs import bits, run

pytestmark = pytest.mark.standard_promotion

with_policy = mpjax.nnx.with_policy


# What a call does


def by_itself(layer, x):
  """Returns what a layer of a model computes under the policy of these tests."""
  return with_policy(layer, "c=bf16")(x)


class Busy(nnx.Module):
  """Reads, writes, makes and takes away variables; without a product nothing is rounded."""

  def __init__(self, rngs):
    self.layer = nnx.PReLU()
    self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    self.first, self.largest = Metric(jnp.zeros(())), Metric(jnp.zeros(()))
    self.plain = jnp.zeros(())
    self.held = nnx.data({"cache": [nnx.Cache(jnp.zeros((2, 8)))]})
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
  "the view itself": lambda model, under: call_busy(under(model), X8),
  "nnx.jit of the model": lambda model, under: nnx.jit(lambda m, x: call_busy(under(m), x)[0])(
    model, X8
  ),
  "nnx.jit of the view": lambda model, under: nnx.jit(lambda v, x: call_busy(v, x)[0])(
    under(model), X8
  ),
  "nnx.remat and nnx.grad": lambda model, under: nnx.grad(
    nnx.remat(lambda m, x: call_busy(under(m), x)[0].sum())
  )(model, X8),
}
X8 = jnp.asarray(normal(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_a_call_does_to_variables_is_what_it_does_without(name):
  models = [Busy(nnx.Rngs(0)) for _ in range(2)]
  # The norm rounds its result, unless a rule says otherwise.
  exact = [Rule("c=f32", module=nnx.BatchNorm)]
  policies = ("c=f16", "c=f32")
  unders = [functools.partial(with_policy, policy=policy, rules=exact) for policy in policies]
  ours, plain = (AROUND[name](m, under) for m, under in zip(models, unders, strict=True))
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


def test_modules_and_variables_among_the_arguments():
  def body(module, x, layer, variable, rngs, act):
    variable[...] = layer(x).sum()
    return act(layer(x)) + rngs.normal(x.shape), layer

  layer, variable, rngs = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), Metric(jnp.zeros(())), nnx.Rngs(1)
  out, same = with_policy(Does(body), "c=bf16")(X8, layer, variable, rngs=rngs, act=jnp.exp)
  assert same is layer
  # The layer is none of the view's, and its product is one of the view's operations.
  half = np.asarray(by_itself(layer, X8), np.float64)
  np.testing.assert_allclose(variable[...], half.sum(), rtol=0.02)
  assert variable[...].dtype == jnp.float32
  assert int(rngs.default.count[...]) == 1
  assert out.dtype == jnp.float32  # exp is.


def test_an_argument_that_nnx_holds_may_be_changed_in_place():
  def body(module, x, taps, layers, state):
    taps.append(nnx.Cache(x))
    layers[0].kernel[...] += 1
    return layers[0](x) * state["scale"]

  taps, layers = nnx.List([]), [nnx.Linear(8, 8, rngs=nnx.Rngs(0))]
  before = layers[0].kernel[...]
  with_policy(Does(body), "c=bf16")(X8, taps, layers, {"scale": X8})
  assert bits(taps[0][...]) == bits(X8)
  assert bits(layers[0].kernel[...]) == bits(before + 1)


def test_who_only_reads_may_be_closed_over():
  gate = Does(lambda m, x: m.layer(jnp.log1p(jnp.exp(m.layer(x))) * jnp.cumsum(x, -1)))
  view = with_policy(gate, "mixed_bfloat16")
  assert bits(run(lambda x: view(x), X8)) == bits(run(jax.vmap(view), X8))
  assert jax.eval_shape(jax.grad(lambda x: view(x).sum()), X8).dtype == jnp.float32


def remembers(module, x):
  module.last = module.layer(x)
  return module.last


@pytest.mark.parametrize("inside", [False, True])
def test_an_array_that_is_a_new_attribute_is_that_of_the_view_and_of_the_model(inside):
  # NNX takes it to be static, and `nnx.jit` leaves a tracer in the model: it needs Python.
  model = nnx.Sequential(Does(remembers)) if inside else Does(remembers)
  view = with_policy(model, "c=bf16")
  with pytest.warns(UserWarning, match="got one that sets an array as a new attribute"):
    out = view(X8)
  of_view, of_model = (m.layers[0] if inside else m for m in (view, model))
  assert of_model.last is of_view.last
  assert bits(of_model.last) == bits(out)
  assert out.dtype == jnp.bfloat16


def test_an_attribute_from_the_start_may_be_set_and_what_is_kept_in_a_dict_is_an_array():
  def logs(module, x):
    module.log["hidden"] = x = module.layer(x)
    return x

  model = Does(remembers, last=jnp.zeros((2, 8)))
  view = with_policy(model, "c=bf16")
  out = view(X8)
  assert model.last is view.last
  assert bits(model.last) == bits(out)
  model = Does(logs, log=nnx.static({}))  # Which NNX takes to be static.
  view = with_policy(model, "c=bfloat16")
  out = view(X8)
  assert model.log is view.log
  np.testing.assert_array_equal(model.log["hidden"], out)


def test_arrays_of_numpy_are_given_to_a_body_as_they_are():
  # A shape: no tracer can be one.
  model = Does(lambda module, x, keep: module.layer(x[: int(keep.sum())]))
  out = with_policy(model, "c=bf16")(X8, np.array([True, False]))
  assert bits(out) == bits(by_itself(model.layer, X8[:1]))


@pytest.mark.parametrize(
  "transform",
  [jax.jit, jax.vmap, lambda fun: jax.grad(lambda x: fun(x).astype("float32").sum())],
  ids=["jit", "vmap", "grad"],
)
def test_random_numbers_made_inside_of_a_transform_that_closes_over_the_model(transform):
  # Only what a call writes is written: the parameters belong to a function further out.
  # It counts the random numbers of an argument, and nothing else.
  model = Does(lambda m, x, rngs: m.drop(m.layer(x), rngs=rngs), drop=nnx.Dropout(0.5))
  view = with_policy(model, "mixed_bfloat16")
  ours, plain = (transform(lambda x, m=m: m(x, rngs=nnx.Rngs(3)))(X8) for m in (view, model))
  np.testing.assert_array_equal(ours == 0, plain == 0)
  np.testing.assert_allclose(ours, plain, rtol=0.02, atol=0.02)
  rngs = nnx.Rngs(3)
  view(X8, rngs=rngs)
  assert int(rngs.default.count[...]) == 1


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_variable_that_a_call_writes_keeps_its_dtype(stored):
  def body(module, x):
    y = module.layer(x)
    module.last[...] = y
    return y + module.last

  model = Does(body, last=nnx.Cache(jnp.zeros((2, 8), stored)))
  out = with_policy(model, "c=bfloat16")(X8)
  assert model.last.dtype == stored
  # A matmul returns its float32 sum to a float32 variable, and to all other consumers.
  assert out.dtype == (jnp.float32 if stored == "float32" else jnp.bfloat16)
  np.testing.assert_array_equal((model.last[...] * 2).astype(out.dtype), out)


def test_a_call_that_changes_a_variable_that_is_not_its_own_runs_as_python():
  layer, norm = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
  view = with_policy(nnx.Sequential(layer, lambda x: norm(x)), "c=bfloat16")
  with pytest.warns(UserWarning, match="changes a module or variable .*: .*test_outermost.py"):
    out = view(X8)
  np.testing.assert_array_equal(out, norm(by_itself(layer, X8)))
  assert not np.array_equal(norm.mean[...], np.zeros(8))


def test_what_nnx_sets_inside_of_autocast_is_dropped_with_the_copy():
  model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))

  def loss_fn(model, x):
    model.eval()
    return model(x).sum()

  assert jnp.isfinite(nnx.value_and_grad(mpjax.autocast(loss_fn))(model, X8)[0])
  assert not model.layers[1].use_running_average


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_view_of_variables_of_a_trace_further_out_is_left_whole():
  # NNX takes objects apart before it refuses to write: a new attribute beside parameters.
  def sows(module, x):
    module.last = nnx.Cache(module.layer(x))
    return module.last[...]

  view = with_policy(Does(sows), "c=bf16")
  graphdef, params, rest = nnx.split(view, nnx.Param, ...)
  with pytest.warns(
    UserWarning, match="got one that changes a module or variable that is not among"
  ):
    found = jax.grad(lambda rest: nnx.merge(graphdef, params, rest)(X8).sum().astype("float32"))(
      rest
    )
  assert jax.tree.structure(found) == jax.tree.structure(rest)
  assert sorted(vars(view)) == sorted(vars(with_policy(Does(sows), "c=bf16")))
  assert view(X8).shape == (2, 8)


def test_a_rule_that_closes_over_a_value_is_traced_again_where_the_call_is_over():
  def body(module, x, mask):
    scale = mask * 1.5

    @jax.custom_vjp
    def times(tree):
      return tree["z"] @ scale * tree["a"]

    def backward(tree, g):
      return ({"z": (g * tree["a"]) @ scale.T, "a": ((tree["z"] @ scale) * g).sum()},)

    times.defvjp(lambda tree: (times(tree), tree), backward)
    return times({"z": module.layer(x), "a": x.sum()})

  model, mask = Does(body), jnp.eye(8) * 2
  ours, plain = (
    nnx.grad(lambda m, under=under: under(m)(X8, mask).sum().astype("float32"))(model)
    for under in (lambda m: with_policy(m, "c=bf16"), lambda m: m)
  )
  for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


# Tree mode, split and merge, caches.


class Normalized(nnx.Module):
  def __init__(self, rngs):
    self.layer, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

  def __call__(self, x):
    return self.norm(self.layer(x))


TREE_MODES = ({"graph": False}, {"graph_updates": False}, {"graph": False, "graph_updates": False})


@pytest.mark.parametrize("mode", TREE_MODES, ids=str)
def test_a_view_in_tree_mode_writes_its_statistics(mode):
  def after_a_call(**options):
    model = Normalized(nnx.Rngs(0))
    y = nnx.jit(lambda view, x: view(x), **options)(with_policy(model, HALF), X8)
    assert (model.norm.mean[...] != 0).all()
    return y, nnx.state(model)

  assert bits(after_a_call(**mode)) == bits(after_a_call())


def test_a_view_that_is_split_and_merged_in_jit():
  view = with_policy(Normalized(nnx.Rngs(0)), HALF)
  graphdef, state = nnx.split(view)

  @jax.jit
  def call(state, x):
    merged = nnx.merge(graphdef, state)
    return merged(x), nnx.state(merged)

  found, new = call(state, X8)
  assert bits(found) == bits(view(X8))
  assert bits(new) == bits(nnx.state(view))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_cache_in_a_loop_keeps_the_dtype_that_it_came_in(stored):
  attention = nnx.MultiHeadAttention(2, 8, 8, decode=True, rngs=nnx.Rngs(0))
  attention.init_cache((1, 4, 8), dtype=stored)
  graphdef, state = nnx.split(with_policy(attention, HALF))

  def step(carry):
    count, state, x = carry
    merged = nnx.merge(graphdef, state)
    y = merged(x).astype(jnp.float32)
    return count + 1, nnx.state(merged), y

  _, new, _ = jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, state, jnp.ones((1, 1, 8))))
  assert new["cached_key"][...].dtype == new["cached_value"][...].dtype == stored
  assert new["cache_index"][...] == 3
