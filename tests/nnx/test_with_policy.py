"""The view of a model: what it shares, which policy each module has, errors, and its conversion."""

import concurrent.futures
import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.linen.probes import noted_as, seen
from tests.models.values import normal
from tests.nnx import rig
from tests.nnx.rig import HALF, Does, X
from tests.programs import bits, products

pytestmark = pytest.mark.not_with("FLAX_HIJAX_VARIABLE", "with_policy refuses such variables")

Rule, convert, with_policy = mpjax.Rule, mpjax.nnx.convert, mpjax.nnx.with_policy


class Probe(nnx.Module):
  """Returns what it is given, times one, and shows in which dtype its products are."""

  def __init__(self, name):
    self.scale = nnx.Param(jnp.ones(()))
    self.name = name

  def __call__(self, x):
    return noted_as(self.name, x) * self.scale


class Net(nnx.Module):
  """Leaves in a list, in a plain dict, and as an attribute."""

  def __init__(self):
    self.listed = nnx.List([Probe("listed/0"), Probe("listed/1")])
    self.between = Probe("between")
    self.plain = nnx.data({"leaf": Probe("plain/leaf")})

  def __call__(self, x):
    return self.plain["leaf"](self.listed[1](self.between(self.listed[0](x))))


PATHS = ("listed/0", "between", "listed/1", "plain/leaf")


def shown(view):
  """Returns the dtype of the product of each probe in the program of a view, and of the result."""
  return seen(view, X), str(jax.eval_shape(view, X).dtype)


# What is shared


def test_a_view_holds_the_very_variables_and_leaves_the_model_alone():
  model = Net()
  before = nnx.graphdef(model)
  attributes = [dict(vars(m)) for _, m in nnx.iter_modules(model)]
  view = with_policy(model, "mixed_bfloat16")
  view(X)
  assert view.listed[1].scale is model.listed[1].scale
  assert view.plain["leaf"].scale is model.plain["leaf"].scale
  assert isinstance(view, Net)
  assert type(view).__name__ == "Net"
  assert nnx.graphdef(model) == before
  for (_, module), old in zip(nnx.iter_modules(model), attributes, strict=True):
    assert vars(module).keys() == old.keys()
    assert all(vars(module)[name] is value for name, value in old.items())
  # Its state is that of the model.
  ours, plain = nnx.state(view), nnx.state(model)
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  assert all(x is y for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True))
  model.between.scale[...] = jnp.asarray(3.0)
  assert view.between.scale[...] == 3


# Which policy


def test_paths_lead_through_lists_and_dicts_and_a_submodule_called_by_itself_is_the_outermost():
  for path, picked in (
    ("listed/1", {"listed/1"}),
    ("listed", {"listed/0", "listed/1"}),
    ("plain/leaf", {"plain/leaf"}),
  ):
    found, _ = shown(with_policy(Net(), HALF, [Rule("float16", path=path)]))
    assert found == {name: "float16" if name in picked else "bfloat16" for name in PATHS}
  view = with_policy(Net(), "mixed_bfloat16")
  assert view.listed[0](X).dtype == view.plain["leaf"](X).dtype == jnp.float32
  assert shown(with_policy(Net(), "bfloat16").between) == ({"between": "bfloat16"}, "bfloat16")


def test_a_rule_that_picks_out_nothing():
  classes = "The model's classes: List, Net, Probe"
  for selector, fix in (({"path": "listed/2"}, "'listed/1'"), ({"module": nnx.Conv}, classes)):
    rule = Rule("float32", **selector)
    where, expected, got = f"rules: {rule}", "at least one module", "none of the 6 modules"
    with refused(mpjax.errors.UnmatchedRuleError, where, expected, got, fix):
      with_policy(Net(), HALF, [rule])
    with pytest.warns(UserWarning, match="none of the 6 modules"):
      with_policy(Net(), HALF, [rule], unmatched="warn")
    with_policy(Net(), HALF, [rule], unmatched="ignore")


# Models that are put together in unusual ways


def test_a_shared_module_stays_shared():
  a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  model = Does(lambda module, x: module.b(module.a(x)), a=a, b=a)
  view = with_policy(model, HALF, [Rule("float16", path="a")])
  assert view.a is view.b
  assert len(jax.tree.leaves(nnx.state(view))) == 4  # Two of each layer.
  with pytest.raises(mpjax.errors.UnmatchedRuleError):
    with_policy(model, HALF, [Rule("float16", path="b")])


def test_a_view_inside_a_model_keeps_its_policy():
  inner = with_policy(nnx.Sequential(Probe("inner")), "c=float16")
  model = nnx.Sequential(inner, Probe("outer"))
  assert shown(with_policy(model, "bfloat16")) == (
    {"inner": "float16", "outer": "bfloat16"},
    "bfloat16",
  )


class Raw(nnx.Pytree):
  """Not a module, but an object with parameters and a method."""

  def __init__(self):
    self.w = nnx.Param(jnp.ones((8, 8)))

  def apply(self, x):
    return x @ self.w


class NoTree(nnx.Module, pytree=False):
  def __init__(self):
    self.layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0))]

  def __call__(self, x):
    return self.layers[0](x)


@pytest.mark.parametrize(
  "model", [Does(lambda module, x: module.raw.apply(x), raw=Raw()), NoTree()]
)
def test_other_objects_than_modules(model):
  assert jax.eval_shape(with_policy(model, HALF), X).dtype == jnp.bfloat16


def test_copies_of_a_view_run_under_the_policy():
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Embed(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs))
  view = with_policy(model, HALF)
  ids = jnp.arange(3)
  for again in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), nnx.clone(view)):
    assert again.layers[1].kernel is not view.layers[1].kernel
    assert type(again) is type(view)
    assert all(type(a) is type(b) for a, b in zip(again.layers, view.layers, strict=True))
    assert again(ids).dtype == jnp.bfloat16
    np.testing.assert_array_equal(again(ids), view(ids))


# Programs and caches


def test_one_trace_for_views_that_are_made_anew_and_another_for_another_policy():
  model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
  traces = []

  @nnx.jit
  def forward(view, x):
    traces.append(1)
    return view(x)

  for _ in range(2):
    assert forward(with_policy(model, HALF), X).dtype == jnp.bfloat16
  assert len(traces) == 1
  assert forward(with_policy(model, "c=f16"), X).dtype == jnp.float16
  assert forward(model, X).dtype == jnp.float32
  assert forward(with_policy(model, HALF), X).dtype == jnp.bfloat16
  assert len(traces) == 3


class HoldsLinen(nnx.Module):
  def __init__(self, rngs):
    self.linen = nnx.bridge.ToNNX(nn.Dense(8), rngs=rngs).lazy_init(X)
    self.norm = nnx.bridge.ToNNX(nn.BatchNorm(False), rngs=rngs).lazy_init(X)
    self.after = nnx.Linear(8, 3, rngs=rngs)
    self.scope = None

  def __call__(self, x):
    if self.scope is None:
      return self.after(self.linen(self.norm(x, mutable=["batch_stats"])))
    with mpjax.linen.policy_scope(self.scope):
      return self.after(self.linen(x))


@pytest.mark.slow
def test_a_linen_module_inside_runs_under_the_policy_around_it_or_a_scope_inside():
  model = HoldsLinen(nnx.Rngs(0))
  with_policy(model, HALF)(X + 1)
  assert model.norm.mean[...].all()

  def inside():
    graphdef, state = nnx.split(model)
    program = jax.make_jaxpr(
      lambda state: with_policy(nnx.merge(graphdef, state, copy=True), HALF)(X)
    )(state)
    return [p.dtypes for p in products(program)]

  assert inside() == [("bfloat16", "bfloat16")] * 2
  for policy in ("float16", "float32"):
    model.scope = policy
    assert inside() == [(policy, policy), ("bfloat16", "bfloat16")]
  with mpjax.linen.policy_scope("bfloat16"):
    assert model.linen(X).dtype == jnp.bfloat16


# Conversion for inference: what is stored in half, and that nothing else changes


def stored(view):
  flat = nnx.to_flat_state(nnx.state(view, nnx.Not(nnx.RngState)))
  return {"/".join(map(str, path)): str(x.dtype) for path, x in flat}


class Normed(nnx.Module):
  """A norm between two layers, a parameter that is never used, and a counter."""

  def __init__(self, rngs):
    self.first, self.last = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
    self.norm, self.unused = nnx.LayerNorm(8, rngs=rngs), nnx.Param(jnp.ones(2))
    self.counter = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    return self.last(self.norm(self.first(x)))


def test_a_view_of_other_variables_that_stores_in_half_what_it_only_uses_so():
  # What is rounded, and that nothing else changes, is a matter of the jaxpr: `store_as_used`.
  view, x = with_policy(rig.model(Normed), "c=bf16"), normal(3, 8)
  before = stored(view)
  inference = convert(view, x)
  assert stored(view) == before
  layers = {f"{name}/{each}" for name in ("first", "last") for each in ("kernel", "bias")}
  narrowed = {path: dtype for path, dtype in stored(inference).items() if dtype != before[path]}
  assert narrowed == dict.fromkeys(layers, "bfloat16")
  assert type(inference) is type(view)


def test_what_a_float32_operation_uses_too_stays_also_when_it_is_shared():
  class Shared(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(8, 8, rngs=rngs)
      self.b = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
      self.b.kernel = self.a.kernel

    def __call__(self, x):
      return self.b(self.a(x))

  model = rig.model(Shared)
  half, mixed = (
    convert(with_policy(model, "mixed_bfloat16", rules), normal(3, 8))
    for rules in ([], [Rule("float32", path="b")])
  )
  assert stored(half) == {"a/kernel": "bfloat16", "a/bias": "bfloat16"}
  assert stored(mixed) == {"a/kernel": "float32", "a/bias": "bfloat16"}
  assert half.a.kernel is half.b.kernel
  assert half.a.kernel is not model.a.kernel


def test_convert_takes_a_method_and_outputs_without_arrays():
  class Coder(nnx.Module):
    def __init__(self, rngs):
      self.encoder, self.decoder = nnx.Linear(8, 2, rngs=rngs), nnx.Linear(2, 8, rngs=rngs)

    def encode(self, x):
      return self.encoder(x), {"name": "coder"}

  found = stored(convert(with_policy(rig.model(Coder), "c=bf16"), normal(1, 8), method="encode"))
  assert {path.split("/")[0] for path, dtype in found.items() if dtype == "bfloat16"} == {"encoder"}


def test_under_float32_nothing_is_narrowed_and_only_a_view_is_converted():
  model = rig.model(Normed)
  found = convert(with_policy(model, "float32"), normal(3, 8))
  assert stored(found) == stored(model)
  assert bits(nnx.state(found, nnx.Param)) == bits(nnx.state(model, nnx.Param))
  where, fix = "mpjax.nnx.convert(view)", "Write convert(with_policy(model, policy), *inputs)"
  with refused(TypeError, where, "a view", "a Normed", fix):
    convert(model, normal(3, 8))


@pytest.mark.parametrize("mode", ["ref", "hijax"])
def test_variables_that_hold_no_arrays_are_refused(mode):
  with nnx.var_defaults(**{mode: True}):
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
  where, arrays = "mpjax.with_policy(model)", "variables that hold arrays"
  got, fix = f"a variable with {mode}=True", f"without nnx.var_defaults({mode}=True)"
  with refused(ValueError, where, arrays, got, fix):
    with_policy(model, "mixed_bfloat16")


def test_threads_do_not_meet():
  model = Net()
  views = {dtype: with_policy(model, dtype) for dtype in ("float16", "bfloat16")}

  def work(dtype):
    for _ in range(5):
      assert shown(views[dtype]) == (dict.fromkeys(PATHS, dtype), dtype)

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    list(pool.map(work, views))
