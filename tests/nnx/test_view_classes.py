"""What the modules of a view do: at each call, and with what is written during one."""

import abc
import pickle
import types
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.nnx._graph import is_tree
from tests.errors import refused
from tests.models.values import normal
from tests.nnx import rig
from tests.nnx.rig import BF16, HALF, Does, Metric, X, linear
from tests.programs import bits, half_share, run

Rule, with_policy = mpjax.Rule, mpjax.nnx.with_policy


def dtypes(tree):
  return [str(x.dtype) for x in jax.tree.leaves(tree)]


# Arguments and outputs


class Echo(nnx.Module):
  def __call__(self, *args, **kwargs):
    return args, kwargs

  def named(self, x):
    return x

  @staticmethod
  def static(x):
    return x

  @classmethod
  def of_class(cls, x):
    return x

  @property
  def value(self):
    return X

  @jax.jit
  def jitted(self, x):
    return self.named(x)

  @nnx.jit
  def nnx_jitted(self, x):
    return self.named(x)


def test_only_floating_arrays_get_the_output_dtype_and_only_where_a_policy_names_one():
  echo = with_policy(Echo(), "bfloat16")
  module, variable, flags = linear(), nnx.Param(X), (True, 3, "s", None)
  given = (X, jnp.arange(2), jax.random.key(0), X > 0, X.astype(jnp.complex64), 1.5, flags)
  out, kwargs = echo(*given, {"a": [X]}, module=module, variable=variable)
  assert dtypes(out[:5]) == ["bfloat16", "int32", "key<fry>", "bool", "complex64"]
  assert out[5:7] == (1.5, flags)
  assert out[7]["a"][0].dtype == BF16
  assert kwargs["module"] is module
  assert kwargs["variable"] is variable
  (out, numbers), kwargs = with_policy(Echo(), HALF)(X, np.ones(2, "f4"), x=X.astype(BF16))
  assert dtypes([out, numbers, kwargs]) == ["float32", "float32", "bfloat16"]
  assert isinstance(numbers, np.ndarray)
  # Every method runs under the policy.
  assert echo.named(X).dtype == echo.jitted(X).dtype == echo.nnx_jitted(X).dtype == BF16
  assert echo.static(X).dtype == echo.of_class(X).dtype == echo.value.dtype == jnp.float32


# Python 3.13 says it of the plain model as well.
@pytest.mark.filterwarnings("ignore:functools.partial will be a method:FutureWarning")
def test_a_class_attribute_that_can_be_called_is_no_method():
  class Made(nnx.Module):
    make = nnx.Linear
    act = jax.tree_util.Partial(jnp.tanh)

    def __call__(self, x):
      assert self.make is nnx.Linear
      return self.act(x)

  assert with_policy(Made(), "bfloat16")(X).dtype == BF16


@pytest.mark.parametrize("raises", [False, True])
def test_fields_are_set_in_calls_and_nowhere_else(raises):
  # The policy decides, not a field in low precision: it is float32 while a call is traced. A module
  # that raises in float32 is called once more, in its compute dtype, and its field says so.
  seen = []

  def body(module, x):
    seen.append(module.dtype)
    if raises and module.dtype is jnp.float32:
      raise NotImplementedError("low precision alone")
    return module.layer(x.astype(module.dtype))

  model = nnx.Sequential(Does(body, dtype=jnp.float16), nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
  view = with_policy(model, HALF)
  rounded = np.asarray(with_policy(model.layers[0].layer, HALF)(X), np.float32)
  np.testing.assert_allclose(np.asarray(view(X), np.float32), model.layers[1](rounded), atol=0.02)
  # What code compares by `is`.
  assert [each is jnp.float32 for each in seen] == [True, False][: 1 + raises]
  assert seen[-1] is (jnp.bfloat16 if raises else jnp.float32)
  assert view.layers[0](X).dtype == BF16
  assert view.layers[0].dtype is jnp.float16
  assert view.layers[0].layer.dtype is None


# Loops


START = jnp.zeros(8)
LOOPS = {
  # Loops and branches that start from a float32 literal, each around a function.
  "jax.lax.scan": lambda m, x: jax.lax.scan(lambda c, x: (m.layer(c + x), None), START, x)[0],
  "nnx.scan": lambda m, x: nnx.scan(
    lambda c, layer, x: layer(c + x), in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry
  )(START, m.layer, x),
  "nnx.cond": lambda m, x: nnx.cond(
    True, lambda layer, x: layer(x), lambda layer, x: START, m.layer, x[0]
  ),
  "nnx.while_loop": lambda m, x: nnx.while_loop(
    lambda both: both[1].sum() < -1, lambda both: (both[0], both[0](both[1])), (m.layer, START)
  )[1],
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_that_starts_from_a_float32_literal_just_works(kind):
  graphdef, state = nnx.split(nnx.Sequential(Does(LOOPS[kind])))

  def call(state, policy, rules=()):
    return rig.under(nnx.merge(graphdef, state, copy=True), policy, rules=rules)(X)

  def all_three(state):
    left = call(state, HALF, [Rule(None, path="layers/0")])
    return nnx.merge(graphdef, state, copy=True)(X), call(state, HALF), left

  assert half_share(jax.make_jaxpr(lambda state: call(state, HALF))(state)) == 1
  plain, ours, left = run(all_three, state)
  np.testing.assert_allclose(np.asarray(ours, np.float32), plain, atol=0.05)
  np.testing.assert_array_equal(left, plain)


# What is written


class Writes(nnx.Module):
  """Makes variables, arrays and attributes while it runs."""

  def __init__(self):
    self.stat = nnx.BatchStat(jnp.zeros(8))
    self.layer = linear()
    self.mode, self.loss = "train", jnp.zeros(())

  def __call__(self, x):
    x = self.layer(x)
    self.stat.set_value(x[0])
    self.fresh = nnx.BatchStat(x.mean(0))
    self.cached = nnx.Cache(self.layer(x))
    self.kl = nnx.Intermediate(x.sum())
    self.tied = self.layer.kernel
    self.loss = x.sum()
    return x


def test_variables_that_a_call_makes_or_changes_are_the_models():
  model = Writes()
  view = with_policy(model, HALF)
  view(X)
  assert model.stat[...].any()
  for name, dtype in {
    "stat": "float32",  # What was stored keeps its dtype.
    "fresh": "float32",  # What is new has that which it is computed in: sums are in float32.
    "cached": "bfloat16",
    "kl": "float32",
  }.items():
    assert getattr(model, name) is getattr(view, name)
    assert getattr(model, name)[...].dtype == dtype, name
  assert model.tied is model.layer.kernel
  assert model.loss is view.loss
  view.mode = "eval"
  assert model.mode == "train"


def test_what_is_taken_out_of_a_view_is_taken_out_of_the_model():
  model = Writes()
  view = with_policy(model, HALF)
  view(X)
  assert list(nnx.to_pure_dict(nnx.pop(view, nnx.Intermediate))) == ["kl"]
  assert not hasattr(model, "kl")
  del view.fresh
  assert not hasattr(model, "fresh")
  model.stat = nnx.BatchStat(jnp.ones(1))
  del view.stat  # another variable by now
  assert model.stat[...] == 1


def test_a_view_shows_its_policy():
  model = nnx.Sequential(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
  assert is_tree(model)
  view = with_policy(model, "c=bf16", [mpjax.Rule(None, path="layers/1")])
  policy = "'params=float32,compute=bfloat16'"
  for ours, theirs, shown in [
    (view, model, policy),
    (view.layers[0], model.layers[0], policy),
    (view.layers[1], model.layers[1], "None"),
  ]:
    text = repr(ours)
    assert text == str(ours)
    assert "mpjax" not in text
    inside = text.removeprefix("with_policy(").removesuffix(f", {shown})")
    # NNX clones attributes in alphabetical order.
    assert sorted(inside.replace(",", "").split()) == sorted(repr(theirs).replace(",", "").split())
  assert repr(pickle.loads(pickle.dumps(view))) == repr(view)


def sows(module, x):
  x = module.perturb("before", module.layer(x))
  module.sow(nnx.Intermediate, "hidden", x)
  return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sow_and_perturb():
  model = Does(sows)
  view = with_policy(model, HALF)
  for _ in range(2):
    view(X)
  # The first call creates the perturbation, in float32. It decides no dtype in the second call.
  assert dtypes(model.hidden.get_value()) == ["bfloat16", "bfloat16"]
  assert model.before.dtype == jnp.float32


class Sampler(nnx.Module):
  """Sows a kind of its own, and asks for a start, which is learned."""

  def __init__(self):
    self.w = nnx.Param(jnp.ones(8))

  def initialize_carry(self):
    return self.w[...]

  def start(self):
    return {"carry": self.initialize_carry(), "use": self.w[...], "variable": self.w}

  def __call__(self, x):
    self.sow(Metric, "largest", x.max())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_variables_are_seen_as_stored_and_of_their_type():
  model = Sampler()
  for policy, dtype in ((HALF, "float32"), ("bfloat16", "bfloat16")):
    view = with_policy(model, policy)
    start = view.start()
    assert start["variable"] is model.w
    assert start["carry"].dtype == start["use"].dtype == dtype
  for _ in range(2):
    view(X)
  assert len(view.largest.get_value()) == 2
  assert type(view.largest) is Metric


def test_capture():
  model = Does(sows)
  view = with_policy(model, HALF)
  out, seen = nnx.capture(view, nnx.Intermediate)(X)
  np.testing.assert_array_equal(out, seen["hidden"].get_value()[0])
  (out, outputs) = nnx.capture(view, nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
  assert outputs["layer"]["__call__"].get_value()[0].dtype == BF16
  out, perturbations = nnx.capture(view, nnx.Perturbation)(X)
  run = nnx.capture(view, nnx.Intermediate, init=perturbations)
  assert dtypes(run(X)) == ["bfloat16", "bfloat16"]


# What is set


class Lazy(nnx.Module):
  """Makes its layer when it is first called."""

  def __init__(self, ready=False):
    self.rngs = nnx.Rngs(0)
    if ready:
      self.layer = nnx.Linear(8, 8, rngs=self.rngs)

  def __call__(self, x):
    if not hasattr(self, "layer"):
      self.layer = nnx.Linear(8, 8, rngs=self.rngs)
    return self.layer(x)


SETS = {
  # What sets a new module, as which attribute, and of which class.
  "set": (lambda view: setattr(view, "head", linear()), "head", "a new Linear"),
  "list": (lambda view: setattr(view, "head", nnx.List([linear()])), "head", "a new List"),
  "in a call": (lambda view: view(X), "layer", "a new Linear"),
  "in nnx.jit": (lambda view: nnx.jit(lambda view: view(X))(view), "layer", "a new Linear"),
}


@pytest.mark.parametrize("case", SETS)
def test_a_new_module_with_parameters_cannot_be_set_on_a_view(case):
  do, name, got = SETS[case]
  model = Lazy()
  with refused(
    TypeError,
    f"Lazy.{name}, set on a view",
    "a module of the view",
    got,
    "with_policy(model, policy)",
  ):
    do(with_policy(model, "mixed_bfloat16"))
  assert not hasattr(model, name)


def test_what_a_view_may_be_set():
  model = Lazy(ready=True)
  view = with_policy(model, "mixed_bfloat16")
  view.again = view.layer
  view.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  view.shift = nnx.Param(jnp.ones(8))
  view.name = "a name"
  assert view.again(X).dtype == jnp.float32
  assert model.shift is view.shift


# Containers


def test_a_container_with_methods_of_its_own():
  class Stacked(nnx.List):
    def __call__(self, x):
      assert len(self) == 2
      for layer in self:
        x = layer(x)
      return x

    def mixes(self, x):
      return jax.lax.add(x, x.astype(jnp.float16))

  view = with_policy(Stacked([linear(), linear()]), HALF)
  assert view(X).dtype == BF16
  with pytest.raises(TypeError) as excinfo:
    view.mixes(X)
  assert any("'Stacked'" in note for note in excinfo.value.__notes__)


# Transforms, around a view and inside it


def test_a_float32_module_that_returns_its_output_and_a_loss_returns_float32():
  def with_loss(module, x):
    """Returns what looks like a carry: an output of its input's shape, and a loss."""
    y = module.layer(x)
    return y, jnp.mean(y)

  model = Does(lambda module, x: module.flow(module.layer(x)), flow=Does(with_loss))
  y, loss = with_policy(model, HALF, [Rule("float32", path="flow")])(X)
  assert (y.dtype, loss.dtype) == (np.dtype("float32"),) * 2
  # The layer's own float32 result, not one that was rounded on its way out.
  rounded = with_policy(model.layer, HALF)(X)
  exact = np.asarray(rounded, np.float32) @ np.asarray(model.flow.layer.kernel[...])
  np.testing.assert_allclose(y, exact, rtol=1e-6)


OF_T = Generic[TypeVar("T")]
listed = {}


class WithHook:
  """A mixin with a hook, which knows nothing of NNX."""

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    listed.setdefault(cls.__name__, cls)


class HookOfNnx(nnx.Module):
  """Takes an argument that each subclass must give, and sets a flag by it."""

  def __init_subclass__(cls, *, gain, **kwargs):
    super().__init_subclass__(**kwargs)
    cls.gain = gain
    listed.setdefault(cls.__name__, cls)


class Plain:
  pass


ORDERS = {
  "mixin first": (WithHook, nnx.Module),
  "after a plain mixin": (Plain, HookOfNnx),
  "before a plain mixin": (HookOfNnx, Plain),
  "abstract first": (abc.ABC, HookOfNnx),
  "generic last": (HookOfNnx, OF_T),
  "generic first": (OF_T, HookOfNnx),
}


@pytest.mark.parametrize("order", ORDERS)
def test_views_of_classes_with_a_hook_in_any_order_of_bases(order):
  def __init__(self):
    self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.layer(x) * getattr(self, "gain", 1.0)

  name = f"In{order.title().replace(' ', '')}"
  namespace = {"__init__": __init__, "__call__": __call__}
  arguments = {"gain": 2.0} if HookOfNnx in ORDERS[order] else {}
  cls = types.new_class(name, ORDERS[order], arguments, lambda ns: ns.update(namespace))
  assert listed.pop(name) is cls
  view = with_policy(cls(), "mixed_bfloat16")
  assert listed == {}
  assert isinstance(view, cls)
  x = jnp.ones((1, 3))
  np.testing.assert_allclose(view(x), cls()(x), atol=0.05)
  np.testing.assert_array_equal(nnx.jit(lambda view, x: view(x))(view, x), view(x))


def layer(rngs):
  parts = (nnx.BatchNorm, 8), (nnx.Linear, 8, 8), (nnx.Dropout, 0.2)
  return nnx.Sequential(*(cls(*sizes, rngs=rngs) for cls, *sizes in parts))


def scanned_then_mapped(m, x):
  """Runs stacked layers one after the other, then all of them on the last result."""

  def one(layer, x):
    return layer(x)

  x = nnx.scan(nnx.remat(one), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(m.layers, x)
  every = nnx.vmap(one, in_axes=(0, None))
  return nnx.cond(x[0, 0] < 99, every, lambda _, x: jnp.zeros((3, *x.shape)), m.layers, x)


@pytest.mark.slow
def test_gradients_and_state_through_scan_remat_cond_and_vmap():
  graphdef, *state = rig.split(
    lambda rngs: Does(scanned_then_mapped, layers=nnx.vmap(layer)(rngs.split(3)))
  )
  args = *state, (jnp.asarray(normal(16, 8)),)
  ours, plain = (
    rig.functions(graphdef, policy, lambda model, x: model(x))[1]
    for policy in ("mixed_bfloat16", None)
  )
  assert half_share(jax.make_jaxpr(ours)(*args)) == 1
  found, wanted = run(lambda *args: (ours(*args), plain(*args)), *args)
  assert dtypes(found) == dtypes(wanted)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    if rig.is_float(x):
      np.testing.assert_allclose(x, y, atol=0.05 * np.abs(y).max())
    else:
      assert bits(x) == bits(y)
