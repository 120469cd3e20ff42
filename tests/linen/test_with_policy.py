"""The wrapper and the scope: what users call, and what comes back."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import mpjax
from tests.errors import refused
from tests.linen.probes import HALF, KEY, Does, Probe, X, calling, dtypes
from tests.programs import assert_bit_equal, bits, compilations, products

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


class Net(nn.Module):
  """Parameters, statistics and dropout; several public methods."""

  features: int = 8

  def setup(self):
    self.encoder = nn.Dense(self.features)
    self.norm = nn.BatchNorm(use_running_average=True)
    self.dropout = nn.Dropout(0.5)
    self.decoder = nn.Dense(8)

  def encode(self, x):
    return self.norm(self.encoder(x))

  def decode(self, z):
    return self.decoder(z)

  def __call__(self, x, train=False):
    return self.decode(self.dropout(self.encode(x), deterministic=not train))

  @nn.nowrap
  def fresh(self):
    return jnp.zeros(self.features)


@functools.cache
def plain_variables():
  return Net().init(KEY, X)


def products_in(apply, *args):
  # Returns the dtypes that products return.
  program = str(jax.make_jaxpr(apply)(*args))
  return {half for half in ("bf16", "f16", "f32") if f":{half}[2,8] = dot_general" in program}


# init


@pytest.mark.slow
def test_every_way_to_initialise_agrees():
  plain, x = nn.Dense(2), jax.ShapeDtypeStruct(X.shape, X.dtype)
  model = with_policy(plain, "float16")
  wanted = model.init(KEY, X)
  out, variables = model.init_with_output(KEY, X)
  # It computes in float32, and returns that in the output dtype.
  assert bits(out) == bits(plain.init_with_output(KEY, X)[0].astype("float16"))
  for found in (variables, model.lazy_init(KEY, x), jax.jit(model.init)(KEY, X)):
    assert bits(found) == bits(wanted)
  assert dtypes(jax.eval_shape(model.init, KEY, X)) == dtypes(wanted)
  with scope("float16"):
    assert bits(plain.init(KEY, X)["params"]) == bits(wanted["params"])
  # Of another method.
  mixed = with_policy(Net(), "mixed_bfloat16")
  encode = dtypes(jax.eval_shape(lambda: Net().init(KEY, X, method="encode")))
  assert dtypes(jax.eval_shape(lambda: mixed.init(KEY, X, method="encode"))) == encode
  out, found = jax.eval_shape(lambda: mixed.init_with_output(KEY, X, method="encode"))
  assert (dtypes(found), out.dtype) == (encode, F32)
  # Of a model that looks at values while it is initialised.
  looks = Does(lambda module, x: nn.Dense(2 if float(x.sum()) >= 0 else 3)(x))
  variables = with_policy(looks, "bfloat16").init(KEY, X)
  assert bits(variables) == bits(jax.tree.map(lambda p: p.astype(BF16), looks.init(KEY, X)))


@pytest.mark.slow
def test_a_second_init_with_output_compiles_nothing():
  normed = Does(lambda module, x: nn.LayerNorm()(nn.Dense(4)(x)))
  model = with_policy(normed, "mixed_bfloat16", [Rule("float32", path="LayerNorm_0")])
  for is_first in (True, False):
    with compilations() as compiled:
      model.init_with_output(KEY, jnp.ones((11, 13)))  # A shape that no other test has compiled.
    assert bool(compiled) is is_first


# Calls


METHODS = {
  "string": "encode",
  "function": Net.encode,
  "bound": Net().encode,
  "lambda": lambda module, x: module.encode(x),
  "partial": functools.partial(Net.encode),
}


def test_public_methods_by_any_name_and_their_output_dtypes():
  policied = with_policy(Net(), "mixed_bfloat16")
  for name, method in METHODS.items():
    apply = functools.partial(policied.apply, method=method)
    assert jax.eval_shape(apply, plain_variables(), X).dtype == F32, name
    assert products_in(apply, plain_variables(), X) == {"bf16"}, name
  assert policied.fresh().dtype == F32  # `nn.nowrap` makes it the model's own.
  assert with_policy(Net(5), "bfloat16").fresh().shape == (5,)
  z = jnp.ones((2, 8))
  for policy, x, method, wanted in (
    ("mixed_float16", X, "encode", "float32"),
    ("mixed_float16", z, "decode", "float32"),
    # Without an output dtype it is that which was computed.
    ("c=f16", z, "decode", "float16"),
    ("c=f16", X, "encode", "float16"),
  ):
    apply = functools.partial(with_policy(Net(), policy).apply, method=method)
    assert jax.eval_shape(apply, plain_variables(), x).dtype == wanted


@pytest.mark.parametrize("kind", [dict, freeze], ids=["dict", "FrozenDict"])
def test_mutable_collections_and_the_container_that_goes_in(kind):
  variables, model = kind(plain_variables()), with_policy(Net(), "mixed_bfloat16")
  for mutable in (False, True, "batch_stats", ["params", "batch_stats"], ["intermediates"]):
    out = Net().apply(variables, X, mutable=mutable)
    ours = model.apply(variables, X, mutable=mutable)
    with scope("mixed_bfloat16"):
      in_scope = Net().apply(variables, X, mutable=mutable)
    for found in (ours, in_scope):
      assert jax.tree.structure(found) == jax.tree.structure(out)
      assert dtypes(found) == dtypes(out)
      if mutable is not False:
        assert type(found[1]) is type(out[1])
        # What is returned changed is what was stored, never what was read.
        assert bits(found[1]) == bits(out[1])
  grads = jax.eval_shape(jax.grad(lambda v: model.apply(v, X).sum()), variables)
  assert type(grads) is type(variables)
  assert jax.tree.structure(grads) == jax.tree.structure(variables)


def test_the_model_is_not_changed():
  model, variables = Net(), jax.tree.map(jnp.copy, plain_variables())
  fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
  before, leaves = bits(variables), jax.tree.leaves(variables)
  with_policy(model, "float16").apply(variables, X, mutable=True)
  assert {name: getattr(model, name) for name in model.__dataclass_fields__} == fields
  assert jax.eval_shape(model.apply, variables, X).dtype == F32
  # Nor are its variables.
  assert bits(variables) == before
  assert all(a is b for a, b in zip(jax.tree.leaves(variables), leaves, strict=True))


STREAMS = dict.fromkeys(("params", "dropout", "shuffle"), True)
OWN = {"variable_axes": {"params": 0}, "split_rngs": STREAMS}
LIFTS = {
  "scan": functools.partial(nn.scan, **OWN, length=3),
  "remat": nn.remat,
  "vmap": functools.partial(nn.vmap, **OWN),
}


@pytest.mark.slow
@pytest.mark.not_with("JAX_SCAN3", "JAX does not differentiate such a scan")
@pytest.mark.parametrize("lift", LIFTS)
def test_randomness_under_lifted_transforms(lift):
  def layer(module, x):
    x = nn.Dropout(0.2, deterministic=False)(nn.Dense(4)(x))
    return jax.random.permutation(module.make_rng("shuffle"), x, axis=-1), None

  model = Does(lambda module, x: LIFTS[lift](calling(layer))()(x)[0])
  mixed, half = (with_policy(model, policy) for policy in ("mixed_bfloat16", "bfloat16"))
  x = jnp.linspace(0.5, 1.5, 12).reshape(3, 4)
  rngs = {name: jax.random.key(i) for i, name in enumerate(STREAMS)}

  @jax.jit  # One compilation for everything that draws.
  def run():
    variables = [each.init(rngs, x) for each in (model, mixed, half)]
    return variables, [each.apply(variables[0], x, rngs=rngs) == 0 for each in (model, mixed)]

  (plain, in_float32, in_half), (dropped, ours) = run()
  assert bits(in_float32) == bits(plain)
  assert bits(in_half) == bits(jax.tree.map(lambda w: w.astype(BF16), plain))
  assert bits(ours) == bits(dropped)
  assert 0 < dropped.sum() < dropped.size


# The wrapper as an object


def test_a_wrapper_is_a_value():
  one, two = (with_policy(Net(), p) for p in ("mixed_bfloat16", "p=f32,c=bf16,o=f32"))
  assert one == two
  assert hash(one) == hash(two)
  assert one is not two
  others = {
    one,
    with_policy(Net(5), "mixed_bfloat16"),
    with_policy(Net(), "mixed_float16"),
    with_policy(Net(), "mixed_bfloat16", [Rule(None, path="decoder")]),
    with_policy(Net(), "mixed_bfloat16", unmatched="warn"),
  }
  assert len(others) == 5
  assert copy.deepcopy(one) == one
  plain = with_policy(Probe(), "float16")
  assert pickle.loads(pickle.dumps(plain)) == plain
  assert one.clone(features=7) == with_policy(Net(7), "mixed_bfloat16")
  assert one.copy(features=7).features == 7
  # Everything else is the model's own.
  assert one.name is None
  assert one.parent is Net().parent
  assert callable(one.encode)
  for name in ("__wrapped__", "no_such_thing"):
    with pytest.raises(AttributeError):
      getattr(one, name)


def test_the_text_of_a_wrapper_shows_all_that_was_given():
  assert "None)" in repr(with_policy(nn.Dense(2), None))
  model = with_policy(nn.Dense(2), "bfloat16", [Rule(None, path="a")])
  assert repr(model).startswith("with_policy(Dense(")
  end = ', rules=[mpjax.Rule(None, path="a")])'
  assert repr(model).endswith(f"'params=bfloat16,compute=bfloat16,output=bfloat16'{end}")


# bind


def test_bind_puts_methods_submodules_and_attributes_under_the_policy():
  model = with_policy(Net(), "mixed_bfloat16")
  bound, plain = model.bind(plain_variables()), Net().bind(plain_variables())
  assert bits(bound(X)) == bits(model.apply(plain_variables(), X))
  assert bits(bound.encode(X)) == bits(model.apply(plain_variables(), X, method="encode"))
  # A submodule returns what it computes: the policy began at the root that was bound.
  assert bound.encoder(X).dtype == F32
  assert products_in(bound.encoder, X) == {"f32"}  # It is the outermost, and returns the sums.
  assert bound.features == 8
  assert (bound.encoder.features, bound.encoder.param_dtype) == (8, jnp.float32)
  assert_bit_equal(bound.variables, plain.variables)
  assert bits(bound.encoder.variables) == bits(plain.encoder.variables)
  assert bound.fresh().shape == (8,)
  with pytest.raises(AttributeError):
    bound.no_such_thing


def test_bind_obeys_rules_and_unbind_returns_them():
  model = with_policy(Net(), "mixed_bfloat16", [Rule("float16", path="encoder")])
  bound = model.bind(plain_variables())
  assert bound.encoder(X).dtype == jnp.float16
  assert products_in(bound.encode, X) == {"f16"}
  assert products_in(bound.decode, jnp.ones((2, 8))) == {"f32"}
  again, variables = bound.unbind()
  assert again == model
  assert bits(variables) == bits(plain_variables())
  encoder, variables = bound.encoder.unbind()
  assert bits(variables["params"]) == bits(plain_variables()["params"]["encoder"])
  assert isinstance(encoder, (nn.Dense, mpjax.linen.PolicyModule))
  # Flax forgets where it was: it is a root of its own now, under the policy of the root.
  assert encoder.apply(variables, X).dtype == F32


def test_submodules_in_containers_of_a_bound_model_run_under_the_policy():
  class Heads(nn.Module):
    def setup(self):
      self.layers = [nn.Dense(8), nn.Dense(8)]
      self.heads = {"b": [nn.Dense(8)], "a": nn.Dense(8)}

    def __call__(self, x):
      for layer in (*self.layers, self.heads["a"], *self.heads["b"]):
        x = layer(x)
      return x

  variables = Heads().init(KEY, X)
  bound = with_policy(Heads(), "bfloat16").bind(variables)
  assert len(bound.layers) == 2
  for layer in (*bound.layers, bound.heads["a"], *bound.heads["b"]):
    assert layer(X).dtype == BF16
  assert list(bound.heads) == ["b", "a"]


# Unmatched rules

TYPO = Rule("float32", path="encodr")
UNMATCHED = [
  # The rule, and what its error proposes.
  (TYPO, "The nearest module paths: 'encoder', 'decoder', "),
  (Rule(None, path="encoder/Dense_0"), "'encoder'"),
  (Rule(None, module=nn.Conv), "The model's classes: BatchNorm, Dense, Dropout, Net"),
  (Rule(None, where=lambda module: False), "The nearest module paths: '', "),
]


@pytest.mark.parametrize(("rule", "near"), UNMATCHED)
def test_a_rule_that_matches_nothing_is_an_error_where_all_modules_are_passed(rule, near):
  model = with_policy(Net(), "mixed_bfloat16", [Rule("float16", path="decoder"), rule])
  abstract = (model.init, model.init_with_output, model.lazy_init)
  ways = [functools.partial(jax.eval_shape, way) for way in abstract]
  for way in [*ways, model.init] if rule is TYPO else ways[:1]:
    expected, got = "a rule that picks out at least one", "none of the 5 modules that init passed"
    with refused(mpjax.errors.UnmatchedRuleError, f"rules: {rule}", expected, got, near):
      way(KEY, X)


def test_unmatched_rules_can_warn_or_be_ignored():
  model = with_policy(Net(), "mixed_bfloat16", [TYPO], unmatched="warn")
  with pytest.warns(UserWarning, match="The nearest module paths: 'encoder'") as record:
    variables = model.init(KEY, X)
  (warning,) = record
  assert warning.filename == __file__
  assert bits(variables) == bits(plain_variables())
  model = with_policy(Net(), "mixed_bfloat16", [TYPO], unmatched="ignore")
  assert dtypes(jax.eval_shape(model.init, KEY, X)) == dtypes(plain_variables())
  # A rule has matched although an earlier one wins.
  rules = [Rule("float16", module=nn.Dense), Rule("float32", path="encoder")]
  jax.eval_shape(with_policy(Net(), "mixed_bfloat16", rules).init, KEY, X)


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_modules_inside_transforms_are_seen_the_second_time_too(lift):
  # A cached trace must not hide the modules that a rule looks for.
  lifts = Does(lambda module, x: lift(Net)(name="lifted")(x))
  model = with_policy(lifts, "mixed_bfloat16", [Rule("float16", path="lifted/encoder")])
  wrong = with_policy(lifts, "mixed_bfloat16", [TYPO])
  for _ in range(2):
    jax.eval_shape(model.init, KEY, X)
    with pytest.raises(mpjax.errors.UnmatchedRuleError, match="'lifted/encoder'"):
      jax.eval_shape(wrong.init, KEY, X)


# Transforms


@pytest.mark.parametrize("half", HALF)
def test_gradients_are_those_of_the_float32_parameters(half):
  model = with_policy(Net(), f"mixed_{half}")
  variables = plain_variables()
  grads = jax.grad(lambda v: model.apply(v, X).sum() * 1e-9)(variables)
  assert set(jax.tree.leaves(dtypes(grads))) == {"float32"}
  # The loss is scaled outside, in float32, and its cotangent enters the last matmul in half: what
  # bfloat16 holds of 1e-9 arrives, and float16, whose smallest number is 6e-8, needs loss scaling.
  # The bias after that is added in float32, since the model returns it.
  decoder = grads["params"]["decoder"]
  np.testing.assert_array_equal(decoder["bias"], np.full(8, 2 * np.float32(1e-9)))
  assert np.any(np.asarray(decoder["kernel"]) != 0) == (half == "bfloat16")


def test_second_derivatives_and_those_with_respect_to_the_input_under_vmap():
  model, variables = with_policy(Net(), "mixed_bfloat16"), plain_variables()

  def energy(x):
    return jnp.sum(jnp.square(model.apply(variables, x[None])))

  hessian = jax.eval_shape(jax.hessian(energy), X[0])
  assert (hessian.dtype, hessian.shape) == (F32, (8, 8))
  forces = jax.vmap(jax.grad(energy))
  for dtype in ("float32", "bfloat16"):
    found = jax.eval_shape(forces, X.astype(dtype))
    assert (found.dtype, found.shape) == (jnp.dtype(dtype), X.shape)
  assert {p.dtypes for p in products(jax.make_jaxpr(forces)(X))} == {("bfloat16", "bfloat16")}


def test_small_steps_move_float32_parameters_under_half_compute():
  scale = Does(lambda module, x: x @ module.param("w", nn.initializers.ones, (8, 1)))
  model = with_policy(scale, "mixed_float16")
  params = model.init(KEY, jnp.ones(8))
  # Half of float16's epsilon: the compute copy of 1 + 2^-12 is 1, the parameter is not.
  moved = jax.tree.map(lambda w: w + jnp.float32(2**-12), params)
  assert float(moved["params"]["w"][0, 0]) == 1 + 2**-12
  assert float(model.apply(moved, jnp.ones(8))[0]) == 8.0
  # A learning rate of 2^-14 with a gradient of 1.
  grads = jax.grad(lambda p: model.apply(p, jnp.ones(8))[0])(params)
  stepped = jax.tree.map(lambda w, g: w - jnp.float32(2**-14) * g, params, grads)
  assert stepped["params"]["w"].dtype == F32
  assert float(stepped["params"]["w"][0, 0]) == 1 - 2**-14


def test_dtypes_under_transforms():
  def of_each_transform(apply, x):
    return {
      "jit": jax.jit(apply)(x),
      "checkpoint": jax.checkpoint(apply)(x),
      "linearize": jax.linearize(apply, x)[0],
      "jvp": jax.jvp(apply, (x,), (x,))[1],
      "vjp": jax.vjp(apply, x)[0],
      "vmap": jax.vmap(apply)(x[None]),
    }

  policies = {"mixed_bfloat16": "float32", "bfloat16": "bfloat16", "c=f16": "float16"}
  for policy, dtype in policies.items():
    apply = functools.partial(with_policy(Net(), policy).apply, plain_variables())
    found = dtypes(jax.eval_shape(functools.partial(of_each_transform, apply), X))
    assert found == dict.fromkeys(found, dtype), policy
