"""When two functions are the same."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._functions import identity


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


def test_adapters_made_anew_at_each_call_are_one_class_of_views():
  def view(factor):
    outputs = lambda module, method, call, out, cast: cast(out * factor)  # noqa: E731
    adapters = {nnx.Linear: mpjax.nnx.Adapter(outputs=outputs)}
    return mpjax.nnx.with_policy(model, "bfloat16", adapters=adapters)

  model, x, traces = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), []

  @nnx.jit
  def apply(view, x):
    traces.append(None)
    return view(x)

  outs = [apply(view(factor), x) for factor in (2, 2, 3, 2)]
  assert len(traces) == 2
  assert type(view(2)) is type(view(2))
  assert (outs[0] * 3 == outs[2] * 2).all()
