"""A Linen model under a policy: what `convert` stores in half, and that it is a module of Flax."""

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import typing
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.errors import refused
from tests.linen.probes import Does
from tests.models.values import integers, normal
from tests.programs import bits, products

Rule, with_policy = mpjax.Rule, mpjax.linen.with_policy


class MyNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    g = self.param("g", nn.initializers.ones, (x.shape[-1],))
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g[None, None]


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.Dense(8)(MyNorm()(x)), None


class Tagger(nn.Module):
  """A table at both ends, stacked layers, a cell over time, statistics, a cache of its own."""

  @nn.compact
  def __call__(self, ids, train=False):
    embed = nn.Embed(11, 8)
    x = embed(ids)
    blocks = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)
    x, _ = blocks(name="blocks")(x, None)
    x = nn.RNN(nn.GRUCell(8), name="rnn")(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = x @ self.param("mix", nn.initializers.ones, (8, 8))
    return embed.attend(nn.LayerNorm()(x))


AS_TOLD = {"xla_allow_excess_precision": False}
"""XLA otherwise leaves out roundings of parameters that are stored in float32."""

IDS = integers(2, 5, below=11)


def stored(variables):
  leaves = flax.traverse_util.flatten_dict(flax.core.unfreeze(variables), sep="/")
  return {path: str(x.dtype) for path, x in leaves.items()}


@pytest.fixture(scope="module")
def variables():
  found = Tagger().init(jax.random.key(0), IDS)
  found["params"]["unused"] = jnp.ones(3)
  return found


@pytest.mark.slow
def test_what_only_half_is_made_of_is_stored_in_half(variables):
  half = "bfloat16"
  model = with_policy(Tagger(), f"mixed_{half}")
  found = model.convert(variables, IDS)
  dtypes = stored(found)
  in_float32 = {path for path, dtype in dtypes.items() if dtype == "float32"}
  norms = {path for path in dtypes if "Norm" in path}
  assert norms <= in_float32
  assert in_float32 - norms == {"params/unused"}
  assert set(dtypes.values()) == {"float32", half}
  assert set(stored(variables).values()) == {"float32"}
  assert jax.tree.structure(found) == jax.tree.structure(variables)
  apply = jax.jit(model.apply, compiler_options=AS_TOLD)
  assert bits(apply(found, IDS)) == bits(apply(variables, IDS))
  # Casts that only the sums of gradients need are left out where it is compiled.
  costs: list[Any] = [apply.lower(v, IDS).compile().cost_analysis() for v in (variables, found)]
  before, after = (cost["bytes accessed"] for cost in costs)
  assert after < before


@pytest.mark.slow
def test_a_float32_rule_counts_also_for_what_is_shared(variables):
  def found(*rules):
    model = with_policy(Tagger(), "mixed_bfloat16", rules)
    return {p for p, d in stored(model.convert(variables, IDS)).items() if d == "float32"}

  plain = found()
  # What the stacked layers carry is float32 then; the table that it begins with is rounded by Flax.
  assert found(Rule("float32", path="blocks/Dense_0")) - plain == {
    "params/blocks/Dense_0/kernel",
    "params/blocks/Dense_0/bias",
  }
  # The table is gathered from and multiplied by: one module, used in float32 at both ends.
  assert found(Rule("float32", module=nn.Embed)) - plain == {"params/Embed_0/embedding"}


def test_flags_methods_and_abstract_arguments(variables):
  model = with_policy(Tagger(), "mixed_bfloat16")
  wanted = stored(model.convert(variables, IDS))
  abstract = jax.ShapeDtypeStruct(IDS.shape, IDS.dtype)
  assert stored(model.convert(variables, abstract)) == wanted
  assert stored(model.convert(jax.eval_shape(lambda: variables), abstract)) == wanted
  frozen = model.convert(flax.core.freeze(variables), IDS, train=True, mutable=["batch_stats"])
  assert isinstance(frozen, flax.core.FrozenDict)
  assert stored(frozen) == wanted
  # A model without parameters, and a policy without low precision.
  assert with_policy(nn.Sequential([nn.relu]), "mixed_float16").convert({}, jnp.ones(2)) == {}
  same = with_policy(Tagger(), "float32").convert(variables, IDS)
  assert all(x is y for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(variables), strict=True))


@pytest.mark.slow
def test_a_decode_cache_is_left_alone():
  model = with_policy(nn.MultiHeadDotProductAttention(2, decode=True), "mixed_bfloat16")
  x = normal(1, 6, 8)
  found = model.init(jax.random.key(0), x)
  half = model.convert(found, x[:, :1], mutable=["cache"])
  # The bias of what is returned is added to a float32 sum.
  own = half["params"]["out"].pop("bias")
  assert own.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(half["params"])} == {np.dtype("bfloat16")}
  half["params"]["out"]["bias"] = own
  assert half["cache"] is found["cache"]
  step = jax.jit(lambda v: model.apply(v, x[:, :1], mutable=["cache"]), compiler_options=AS_TOLD)
  assert bits(step(half)) == bits(step(found))


MAPPING = ("a mapping with 'params' in it", 'Write model.convert({"params": params}, x).')
ERRORS = [
  # What is converted, what was expected, what came, what to do, which builtin.
  ({"kernel": 1}, MAPPING[0], "a dict with 'kernel'", MAPPING[1], TypeError),
  (jnp.ones(2), MAPPING[0], "an array float32[2]", MAPPING[1], TypeError),
]


def test_errors():
  model = with_policy(nn.Dense(1, use_bias=False), "mixed_float16")
  where = "mpjax.with_policy(model, policy).convert(variables)"
  for given, expected, got, fix, builtin in ERRORS:
    with refused(builtin, where, expected, got, fix):
      model.convert(given, jnp.ones((1, 8)))


class Parts(nn.Module):
  """A part without parameters, one that only training calls, one that another method calls."""

  def setup(self):
    self.body, self.auxiliary, self.other = nn.Dense(8), nn.Dense(8), nn.Dense(8)
    self.drop = nn.Dropout(0.5)

  def everything(self, x):
    return self.body(x) + self.auxiliary(x) + self.other(x)

  def decode(self, x):
    return self.other(x), {"name": "decoded"}  # And something that is no array.

  def __call__(self, x, train=False):
    x = self.drop(self.body(x), deterministic=not train)
    return self.auxiliary(x) if train else x


@functools.cache
def parts():
  x = jnp.ones((2, 8))
  return x, Parts().init(jax.random.key(0), x, method="everything")


def modules_in(variables, dtype):
  return {path.split("/")[1] for path, each in stored(variables).items() if each == dtype}


def test_rules_are_checked_where_the_whole_model_is_called():
  x, variables = parts()
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="boddy")])
  with pytest.warns(UserWarning, match="The nearest module paths: 'body', "):
    model.convert(variables, x)
  # A module that this call does not pass is there all the same.
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="auxiliary")])
  assert modules_in(model.convert(variables, x), "bfloat16") == {"body"}
  # Of one method nobody knows what is in the rest of the model.
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="body")])
  assert modules_in(model.convert(variables, x, method="decode"), "bfloat16") == {"other"}
  assert modules_in(model.convert(variables, x), "bfloat16") == set()


class Prediction:
  """No tree to JAX: a distribution, say."""

  def __init__(self, logits):
    self.logits = logits


def test_init_of_a_model_that_returns_a_plain_object():
  plain, x = Does(lambda module, x: (Prediction(nn.Dense(4)(x)), str, "text")), jnp.ones((2, 3))
  model, key = with_policy(plain, "bfloat16"), jax.random.key(0)
  wanted = jax.tree.map(lambda p: p.astype(jnp.bfloat16), plain.init(key, x))
  (prediction, *rest), made = model.init_with_output(key, x)
  for found in (made, model.init(key, x), jax.jit(model.init)(key, x)):
    assert bits(found) == bits(wanted)
  # It computes in float32, and nothing can be cast in an object that is no tree to JAX.
  assert (prediction.logits.dtype, rest) == (jnp.float32, [str, "text"])
  with pytest.raises(mpjax.errors.UnmatchedRuleError):
    with_policy(plain, "bfloat16", [Rule(None, path="typo")]).init(key, x)


def test_a_misspelt_rule_is_warned_of_where_only_apply_is_called():
  x, variables = parts()
  rules = [Rule("float32", path="boddy"), Rule("float32", path="body")]
  for jitted in (False, True):
    model = with_policy(Parts(), "mixed_bfloat16", rules)
    apply = jax.jit(model.apply) if jitted else model.apply
    with pytest.warns(UserWarning, match="boddy") as caught:
      apply(variables, x)
    (warning,) = caught
    text = str(warning.message)
    for part in ('path="boddy"', "that this call met or that have variables", "'body'", "ignore"):
      assert part in text
    assert jitted or warning.filename == __file__


MAY_MATCH = [
  # Rules that may pick out a module, since no call meets all: nothing is said of them.
  *(Rule(None, path=path) for path in ("drop", "auxiliary", "other", re.compile("(body|typo)"))),
  *(Rule("float32", path="**"), Rule("float32", module=nn.Conv)),
  Rule("float32", where=lambda m: False),
]


@pytest.mark.slow
def test_no_rule_is_warned_of_that_may_pick_out_a_module():
  x, variables = parts()
  typo = Rule(None, path="typo")
  cases = [*((rule, {}, {}) for rule in MAY_MATCH)]
  cases += [(typo, {"unmatched": "ignore"}, {}), (typo, {}, {"method": "decode"})]
  for rule, options, call in cases:
    model = with_policy(Parts(), "mixed_bfloat16", [rule], **options)
    for given in (variables, flax.core.freeze(variables)):
      model.apply(given, x, **call)
    assert model == with_policy(Parts(), "mixed_bfloat16", [rule], **options)


# A module of Flax


def doubled(x):
  return 2 * x


class Keyed(nn.Module):
  """A model whose fields name its inputs, as in Kauldron."""

  image: str = "batch.image"
  activation: typing.Callable[..., jax.Array] = doubled
  width: int = dataclasses.field(default=8, kw_only=True)

  @nn.compact
  def __call__(self, image: jax.Array, *, train: bool = False) -> jax.Array:
    """Returns features."""
    return self.activation(nn.Dense(self.width, name="head")(image))


X = normal(2, 32)


def low(model=None, **options):
  return with_policy(Keyed() if model is None else model, "mixed_bfloat16", **options)


def test_a_model_is_an_instance_of_its_class_with_its_fields_and_signature():
  plain, model = Keyed(), low()
  assert isinstance(model, Keyed)
  assert isinstance(model, nn.Module)
  assert type(model).__name__ == "Keyed"
  assert typing.get_type_hints(type(model)) == typing.get_type_hints(Keyed)
  assert dataclasses.fields(model) == dataclasses.fields(plain)
  assert inspect.signature(model.__call__) == inspect.signature(plain.__call__)
  assert inspect.signature(type(model)) == inspect.signature(Keyed)
  assert model.__call__.__doc__ == plain.__call__.__doc__
  assert dataclasses.asdict(model) == dataclasses.asdict(plain)
  assert type(model).activation is doubled


@pytest.mark.parametrize(
  "changed",
  [
    lambda model: model.clone(width=5),
    lambda model: model.copy(width=5),
    lambda model: dataclasses.replace(model, width=5),
    lambda model: (
      copy.replace(model, width=5) if hasattr(copy, "replace") else model.clone(width=5)
    ),
  ],
)
def test_a_model_with_other_fields_is_under_the_same_policy(changed):
  assert changed(low()) == low(Keyed(width=5))


@pytest.mark.parametrize(
  "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_is_equal(copied):
  model = low(rules=[Rule("float16", path="head")])
  again = copied(model)
  assert again == model
  assert hash(again) == hash(model)
  assert type(again) is type(model)


PER_ROW = {"in_axes": 0, "variable_axes": {"params": 0}, "split_rngs": {"params": True}}


@pytest.mark.parametrize("method", ["init", "init_with_output", "lazy_init", "apply"])
@pytest.mark.parametrize(
  "derive", [nn.remat, lambda cls: nn.vmap(cls, **PER_ROW), lambda cls: type("Sub", (cls,), {})]
)
def test_a_root_of_a_class_derived_from_that_of_a_model_is_an_error(derive, method):
  # The user's class, which a root runs, has no part of the transform.
  cls = derive(type(with_policy(nn.Dense(4), "mixed_float16")))
  key = jax.random.key(0)
  with pytest.raises(
    mpjax.errors.MpjaxTypeError, match=rf"got one of {cls.__name__}, .*nn.remat\("
  ):
    getattr(cls(4), method)({"params": {}} if method == "apply" else key, jnp.ones((3, 4)))


def test_a_submodule_of_a_derived_class_keeps_the_transform():
  model = nn.vmap(type(with_policy(nn.Dense(4), "mixed_float16")), **PER_ROW)(4)
  outer = nn.Sequential([copy.deepcopy(model)])
  params = outer.init(jax.random.key(0), jnp.ones((3, 16)))["params"]["layers_0"]
  assert params["kernel"].shape == (3, 16, 4)


def test_equal_models_share_what_jit_compiled():
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def apply(model, variables, x):
    traces.append(model)
    return model.apply(variables, x)

  variables = Keyed().init(jax.random.key(0), X)
  for _ in range(2):
    apply(low(), variables, X)
  apply(with_policy(Keyed(), "mixed_float16"), variables, X)
  assert len(traces) == 2


class Listed(nn.Module):
  """Puts each subclass into a table, and asks for a keyword."""

  subclasses: typing.ClassVar[list[type]] = []

  def __init_subclass__(cls, *, key, **kwargs):
    super().__init_subclass__(**kwargs)
    Listed.subclasses.append(cls)


class One(Listed, key="one", kw_only=True):
  width: int = 4
  depth: int

  @nn.compact
  def __call__(self, x):
    return nn.Dense(self.width)(x)


def test_hooks_of_the_user_do_not_see_the_class():
  model = low(One(depth=2))
  assert Listed.subclasses == [One]
  assert (model.width, model.depth) == (4, 2)
  assert model.apply(model.init(jax.random.key(0), X), X).shape == (2, 4)


def test_a_table_of_a_model_shows_what_the_plain_one_shows():
  def lines(model):
    return re.sub(r"b?float(16|32)", "float", model.tabulate(jax.random.key(0), X))

  assert lines(low()) == lines(Keyed())


# A submodule


class Outer(nn.Module):
  """Holds a model, makes one, and calls one in a lifted transform."""

  held: nn.Module
  lift: str = ""

  @nn.compact
  def __call__(self, x):
    def call(module, x):
      return module(x)

    if self.lift == "scan":
      lifted = nn.scan(
        lambda module, x, _: (module(x), None), {"params": 0}, split_rngs={"params": True}, length=2
      )
      return lifted(self.held, x, None)[0]
    if self.lift == "vmap":
      return nn.vmap(call, {"params": None}, split_rngs={"params": False})(self.held, x)
    return (getattr(nn, self.lift)(call) if self.lift else call)(self.held, x)


def dots(fn, *args):
  """Returns the dtypes of the operands of all matmuls."""
  return [each.dtypes[0] for each in products(jax.make_jaxpr(fn)(*args))]


class Two(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(32, name="second")(nn.Dense(32, name="first")(x))


class Encoder(nn.Module):
  def setup(self):
    self.first, self.second = nn.Dense(32), nn.Dense(32)

  def __call__(self, x):
    return self.second(self.encode(x))

  def encode(self, x):
    if self.is_initializing():
      self.second(x)
    return self.first(x)


@pytest.mark.slow
@pytest.mark.parametrize("lift", ["", "remat", "jit", "vmap", "scan"])
def test_a_submodule_runs_under_its_policy_with_paths_of_its_own(lift):
  inner = low(Two(), rules=[Rule("float16", path="first")])
  model, plain = Outer(inner, lift), Outer(Two(), lift)
  variables = model.init(jax.random.key(0), X)
  assert stored(variables).keys() == stored(plain.init(jax.random.key(0), X)).keys()
  assert variables["params"]["held"]["first"]["kernel"].dtype == jnp.float16
  assert dots(model.apply, variables, X) == ["float16", "bfloat16"]
  assert set(dots(jax.grad(lambda v: jnp.sum(model.apply(v, X))), variables)) == {
    "float16",
    "bfloat16",
  }


def test_the_policy_of_a_submodule_counts_inside_of_another_policy():
  inner = with_policy(Two(), "mixed_float16")
  model = with_policy(nn.Sequential([nn.Dense(32), inner]), "mixed_bfloat16")
  variables = model.init(jax.random.key(0), X)
  assert dots(model.apply, variables, X) == ["bfloat16", "float16", "float16"]
  bound = model.bind(variables)
  assert dots(bound, X) == ["bfloat16", "float16", "float16"]
  assert dots(bound.layers[0], X) == ["bfloat16"]
  assert dots(bound.layers[1], X) == ["float16", "float16"]


class Compact(nn.Module):
  """Gives a policy to submodules where it makes them."""

  given: Any

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(32, name="dense")(x)
    two = self.given(Two(name="two"))
    return self.given(Encoder(name="encoder")).encode(two(two(x)))


@pytest.mark.slow
def test_a_submodule_gets_a_policy_in_a_compact_method():
  rules = [Rule("mixed_float16", path="first")]
  model = Compact(lambda module: low(module, rules=rules))
  variables = model.init(jax.random.key(0), X)
  plain = Compact(lambda module: module).init(jax.random.key(0), X)
  assert stored(variables) == stored(plain)
  low_twice = ["float16", "bfloat16"] * 2
  assert dots(model.apply, variables, X) == ["float32", *low_twice, "float16"]


def test_a_bound_model_gets_a_policy():
  plain = Outer(Two()).bind(Outer(Two()).init(jax.random.key(0), X))
  assert dots(low(plain), X) == dots(low(plain.held), X) == ["bfloat16", "bfloat16"]
  assert dots(plain, X) == ["float32", "float32"]


@pytest.mark.slow
def test_an_equal_policy_inside_of_another_has_paths_of_its_own():
  rules = [Rule("float16", path="layers_1")]
  inner = low(nn.Sequential([nn.Dense(8), nn.Dense(8)]), rules=rules)
  model = low(nn.Sequential([inner, nn.Dense(8)]), rules=rules)
  params = model.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
  dtypes = jax.tree.map(lambda x: x.dtype.name, [params["layers_0"], params["layers_1"]])
  wide, half = ({"bias": name, "kernel": name} for name in ("float32", "float16"))
  assert dtypes == [{"layers_0": wide, "layers_1": half}, half]


def test_code_around_a_submodule_is_under_no_policy():
  model = nn.Sequential([low(Two()), nn.Dense(32)])
  variables = Two().init(jax.random.key(0), X)["params"]
  variables = {"params": {"layers_0": variables, "layers_1": variables["first"]}}
  assert dots(model.apply, variables, X) == ["bfloat16", "bfloat16", "float32"]


def test_a_misspelt_rule_of_a_submodule_is_an_error_in_init():
  inner = low(Two(), rules=[Rule("float16", path="frist")])
  with pytest.raises(mpjax.errors.UnmatchedRuleError, match="frist"):
    Outer(inner).init(jax.random.key(0), X)


def test_a_model_is_called_in_a_function_of_flax():
  model = low(Two())
  variables = nn.init(lambda module, x: module(x), model)(jax.random.key(0), X)
  assert stored(variables) == stored(Two().init(jax.random.key(0), X))
  assert dots(nn.apply(lambda module, x: module(x), model), variables, X) == [
    "bfloat16",
    "bfloat16",
  ]


@pytest.mark.slow
def test_the_cache_of_a_submodule_is_in_low_precision():
  attention = nn.MultiHeadDotProductAttention(2, decode=True)
  found = [
    stored({"cache": model.init(jax.random.key(0), normal(1, 6, 8))["cache"]})
    for model in (low(attention), Outer(low(attention)))
  ]
  assert [*found[0].values()] == [*found[1].values()]
  assert "bfloat16" in found[0].values()


class Described(nn.Module):
  """A property and a method that use submodules."""

  def setup(self):
    self.table = nn.Dense(32)

  @property
  def features(self):
    return self.table(X)

  def __call__(self, x):
    return self.table(x)

  def twice(self, x):
    return self(self(x))

  @nn.nowrap
  def parts(self):
    return {"table": self.table}


def test_properties_and_methods_of_a_bound_model_keep_the_policy():
  model = low(Described())
  bound = model.bind(Described().init(jax.random.key(0), X))
  assert isinstance(bound, Described)
  assert dots(lambda: bound.features) == ["bfloat16"]
  assert dots(bound.twice, X) == ["bfloat16", "bfloat16"]
  assert dots(bound.table, X) == ["bfloat16"]
  assert dots(bound.parts()["table"], X) == ["bfloat16"]
  assert dots(mpjax.full_precision(bound.twice), X) == ["float32", "float32"]
  # A method of the wrapped model runs under its policy too.
  variables = {"params": bound.variables["params"]}
  apply = functools.partial(model.apply, method=model.twice)
  assert dots(apply, variables, X) == ["bfloat16", "bfloat16"]


class Helpers(nn.Module):
  """Private methods, whose names are those of functions of the library."""

  def setup(self):
    self.table = nn.Dense(32)

  def _apply(self, x):
    return self.table(x)

  _initialized = _plain = _under_policy = _config_of = _apply

  def __call__(self, x):
    return self._plain(self._config_of(self._under_policy(self._initialized(self._apply(x)))))


def test_private_methods_of_a_model_are_its_own():
  model = low(Helpers())
  variables = model.init(jax.random.key(0), X)
  assert dots(model.apply, variables, X) == ["bfloat16"] * 5
  assert dots(model.bind(variables), X) == ["bfloat16"] * 5
  assert dots(model.bind(variables).table, X) == ["bfloat16"]


class Private(nn.Module):
  """Has submodules for itself."""

  _held: nn.Module

  def setup(self):
    self._table = nn.Dense(32)

  @property
  def _features(self):
    return self._held(X)

  def __call__(self, x):
    return self._table(self._held(x))


def test_private_attributes_of_a_bound_model_keep_the_policy():
  model = low(Private(nn.Dense(32)))
  bound = model.bind(model.init(jax.random.key(0), X))
  for _ in range(2):  # The first use runs `setup`.
    assert dots(bound._table, X) == ["bfloat16"]
  assert dots(bound._held, X) == ["bfloat16"]
  assert dots(lambda: bound._features) == ["bfloat16"]


def test_the_parent_of_a_submodule_is_under_no_policy():
  class Parent(nn.Module):
    held: nn.Module

    def __call__(self, x):
      assert self.held.parent is self
      return self.held(x)

  Parent(low(Two())).init(jax.random.key(0), X)


class Doubled(nn.Module):
  """Computes a field from itself, and sets another attribute."""

  width: int

  def __post_init__(self):
    self.given = self.width
    self.width = 2 * self.width
    super().__post_init__()

  @nn.compact
  def __call__(self, x):
    return nn.Dense(self.width)(x)


def test_the_constructor_of_the_user_runs_as_often_as_without_a_policy():
  plain, model, key = Doubled(2), low(Doubled(2)), jax.random.key(0)
  assert (model.width, model.given) == (plain.width, plain.given)
  assert jax.eval_shape(model.init, key, X) == jax.eval_shape(plain.init, key, X)
  again = pickle.loads(pickle.dumps(model))
  assert jax.eval_shape(again.init, key, X) == jax.eval_shape(plain.init, key, X)


@pytest.mark.slow
def test_a_bound_model_is_copied_and_initialised():
  model = low(Outer(Two()), rules=[Rule("float16", path="held/first")])
  variables = model.init(jax.random.key(0), X)
  bound = model.bind(variables)
  for each in (copy.copy(bound), copy.deepcopy(bound)):
    assert dots(each, X) == ["float16", "bfloat16"]
  assert stored(bound.init(jax.random.key(0), X)) == stored(variables)


class Sized(nn.Module):
  """Is equal to what has as many widths."""

  widths: list[int]

  def __eq__(self, other):
    return isinstance(other, Sized) and len(self.widths) == len(other.widths)

  def __hash__(self):
    return len(self.widths)


def test_equality_of_the_user_counts_under_one_policy():
  model = low(Sized([1]))
  assert model == low(Sized([2]))
  assert hash(model) == hash(Sized([2]))
  for other in (Sized([1]), with_policy(Sized([1]), "mixed_float16")):
    assert model != other
    assert other != model


def test_a_part_of_a_submodule_keeps_its_path_in_a_lifted_transform():
  class Lifting(nn.Module):
    held: nn.Module
    lift: typing.Any

    def __call__(self, x):
      return self.lift(lambda module, x: module(x))(self.held.held, x)

  model = low(Outer(Two()), rules=[Rule("float16", path="held/first")])
  variables = {"params": {"held": model.init(jax.random.key(0), X)["params"]}}
  for lift in (nn.remat, nn.jit):
    assert dots(Lifting(model, lift).apply, variables, X) == ["float16", "bfloat16"]


def test_rules_of_a_bound_model_are_not_checked_where_parameters_may_be_written():
  x, variables = parts()
  model = low(Parts(), rules=[Rule("float16", path="auxiliary")])
  assert dots(model.bind(variables, mutable=True), x) == ["bfloat16"]
  held = {"params": {"held": variables["params"]}}
  assert dots(functools.partial(Outer(model).apply, mutable=["params"]), held, x) == ["bfloat16"]


class Decoder(nn.Module):
  """Uses a table that another module may have, too."""

  table: nn.Module

  def setup(self):
    self.body = nn.Dense(8)

  def __call__(self, x):
    return self.table.attend(self.body(x))


def test_a_submodule_uses_a_table_of_the_model_around():
  class Tied(nn.Module):
    wrap: typing.Any

    def setup(self):
      self.table = nn.Embed(11, 8)
      self.decoder = self.wrap(Decoder(self.table))

    def __call__(self, ids):
      return self.decoder(self.table(ids))

  model, plain = Tied(low), Tied(lambda model: model)
  variables = model.init(jax.random.key(0), IDS)
  assert bits(variables) == bits(plain.init(jax.random.key(0), IDS))
  assert dots(model.apply, variables, IDS) == ["bfloat16", "bfloat16"]


def test_a_submodule_is_set_up_once():
  x = jnp.ones((2, 8))
  model = low(nn.Sequential([Decoder(nn.Embed(11, 8))]))
  bound = model.bind(model.init(jax.random.key(0), x))
  first, second = bound.layers[0], bound.layers[0]
  for part in (first, second, bound.layers[0]):
    assert dots(part.body, x) == ["bfloat16"]
    assert isinstance(part.body.parent, Decoder)
    assert dots(part, x) == ["bfloat16", "bfloat16"]
