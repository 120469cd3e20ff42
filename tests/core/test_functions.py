"""When two functions are the same."""

import functools
import gc
import pickle
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.functions import identity, rebound


def equals(wanted):
  return lambda name: name == wanted


def defaulted(wanted):
  return lambda name, wanted=wanted: name == wanted


def named(wanted):
  return lambda name, *, wanted=wanted: name == wanted


@pytest.mark.parametrize("make", [equals, defaulted, named])
def test_functions_are_equal_by_code_and_by_the_values_they_were_made_with(make):
  assert make("a") != make("a")
  assert identity(make("a")) == identity(make("a"))
  assert hash(identity(make("a"))) == hash(identity(make("a")))
  assert identity(make("a")) != identity(make("b"))
  assert identity(make(1)) != identity(make(True))  # Equal numbers, of other types.
  for odd in ([1], jnp.ones(2)):
    function = make(odd)
    assert identity(function) is function


def test_a_name_without_a_value_yet_makes_a_function_itself():
  def made():
    function = lambda: later  # noqa: E731
    found = identity(function) is function
    later = 1
    return found, identity(function) is function, later

  assert made()[:2] == (True, False)


def test_what_is_no_plain_function_is_itself():
  for function in (len, functools.partial(len), "a".join, nn.Dense, None):
    assert identity(function) is function
  assert identity(equals("a")) != identity(defaulted("a"))


TARGET, TARGETS = "a", ["a"]


def is_target(module):
  return module.name == TARGET


@pytest.mark.parametrize(
  "make",
  [
    lambda: lambda m: m.name == TARGET,
    lambda: lambda m: any(m.name == wanted for wanted in (TARGET,)),
    lambda: lambda m: is_target(m),
    lambda: is_target,
  ],
  ids=["global", "nested", "helper", "function"],
)
def test_a_predicate_that_reads_a_global_runs_with_its_new_value(make, monkeypatch):
  model, x = Pair(), jnp.ones((2, 4))
  variables = model.init(jax.random.key(0), x)
  step = jax.jit(lambda model, variables: model.apply(variables, x), static_argnums=0)

  def dtype():
    rules = [mpjax.Rule("float32", where=make())]
    return str(step(mpjax.linen.with_policy(model, "c=bf16", rules), variables).dtype)

  assert dtype() == "bfloat16"
  assert mpjax.Rule(None, where=make()) == mpjax.Rule(None, where=make())
  monkeypatch.setitem(globals(), "TARGET", "b")
  assert dtype() == "float32"
  monkeypatch.setitem(globals(), "TARGET", "a")
  assert dtype() == "bfloat16"


def test_a_global_without_a_hash_is_compared_as_the_object_it_is(monkeypatch):
  def reads(m):
    return m.name in TARGETS

  before = mpjax.Rule(None, where=reads)
  assert before == mpjax.Rule(None, where=reads)
  assert hash(before) == hash(mpjax.Rule(None, where=reads))
  monkeypatch.setitem(globals(), "TARGETS", ["b"])
  assert before != mpjax.Rule(None, where=reads)


def test_a_rule_with_a_predicate_is_pickled_by_its_name():
  rule = mpjax.Rule("float32", where=is_target)
  assert hash(rule) is not None
  assert pickle.loads(pickle.dumps(rule)) == rule


def test_other_code_in_one_place_is_another_function():
  one, two = (lambda m: m.name == "a"), (lambda m: m.name == "b")
  assert identity(one) != identity(two)


class Pair(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="b")(nn.Dense(4, name="a")(x))


def test_rules_made_anew_at_each_call_are_traced_once():
  model, x, traces = Pair(), jnp.ones((2, 4)), []
  variables = model.init(jax.random.key(0), x)

  @jax.jit
  def apply(variables, x):
    traces.append(None)
    return model.apply(variables, x)

  def step(wanted):
    rules = [mpjax.Rule("float32", where=lambda m: m.name == wanted)]
    with mpjax.linen.policy_scope("params=float32,compute=bfloat16", rules):
      return apply(variables, x)

  outs = [step(wanted).dtype for wanted in ("b", "b", "b", "a", "b", "a")]
  assert [str(dtype) for dtype in outs] == ["float32"] * 3 + ["bfloat16", "float32", "bfloat16"]
  assert len(traces) == 2


def test_an_attribute_is_no_global_of_its_name():
  read = "name"
  scope = {read: jnp.ones(2)}
  exec("def make(): return lambda module: module.name == 'head'", scope)
  before = identity(scope["make"]())
  kept = weakref.ref(scope[read])
  scope[read] = jnp.zeros(2)
  assert identity(scope["make"]()) == before
  gc.collect()
  assert kept() is None


def test_methods_of_one_object_as_those_of_another():
  class Counter:
    def __init__(self, start):
      self.start = start

    def add(self, x, by=None):
      return self.start + x + (0 if by is None else by.start)

  old, new = Counter(1), Counter(10)
  counterparts = {id(old): new}
  assert rebound(old.add, counterparts)(1) == 11
  partial = rebound(functools.partial(functools.partial(old.add, 1), by=old), counterparts)
  assert partial() == 21
  other = Counter(3)
  assert rebound(other.add, counterparts)(0) == 3
  assert rebound(functools.partial(other.add, 2), counterparts)() == 5
