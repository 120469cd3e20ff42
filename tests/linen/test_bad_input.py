"""What bad input gets: an error that says where, what was expected, what came, what to do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.active import ACTIVE
from tests.errors import refused
from tests.linen.probes import KEY, Does, X

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy


def wrap(policy="bfloat16", *args, **kwargs):
  return with_policy(nn.Dense(2), policy, *args, **kwargs)


def enter(policy="bfloat16", *args, **kwargs):
  with scope(policy, *args, **kwargs):
    return nn.Dense(2)


WAYS = {"mpjax.with_policy": wrap, "mpjax.policy_scope": enter}


@pytest.mark.case("A96", "B137", "B138", "B139", "I18")
@pytest.mark.parametrize("name", WAYS)
def test_policies_and_rules(name):
  # For all that is no policy and no rule see the tests of these.
  with refused(ValueError, f"{name}(policy)", "a preset", "'mixed_bf16'", "'mixed_bfloat16'"):
    WAYS[name]("mixed_bf16")
  assert ACTIVE.value is None  # A scope that is refused is not entered.
  where, expected = f"{name}(rules=...)", "a sequence of mpjax.Rule"
  with refused(TypeError, where, expected, "3", "Write [mpjax.Rule("):
    WAYS[name](rules=3)


class Parent(nn.Module):
  def setup(self):
    self.child = nn.Dense(2)

  def __call__(self, x):
    return self.child(x)


class Calls(nn.Module):
  """Calls what it holds as if it were a submodule."""

  held: object

  def __call__(self, x):
    return self.held(x)


def bound(module=None):
  return (module or Parent()).bind({"params": {}})


WRAPPED = wrap()
SUBMODULE = "a wrapped model used as a submodule"


def test_d18_what_is_wrapped_is_an_unbound_model():
  again, once = "PolicyModule, which is under a policy already", "Wrap the plain model once"
  for model, got, fix in (
    (nn.Dense, "class Dense", "mpjax.with_policy("),
    (WRAPPED, again, once),
    (bound(WRAPPED), again, once),
    (bound(), "one that is bound at ''", "Wrap the root model"),
    (bound().child, "one that is bound at 'child'", "Wrap the root model"),
  ):
    with refused(TypeError, "mpjax.with_policy(model)", "an unbound flax.linen.Module", got, fix):
      with_policy(model, "bfloat16")
  assert WRAPPED.clone(parent=None) == WRAPPED


CALLS = {
  "called": lambda: WRAPPED(X),
  "held": lambda: Calls(WRAPPED).init(KEY, X),
  "held, in jit": lambda: jax.jit(Calls(WRAPPED).init)(KEY, X),
  "closed over": lambda: Does(lambda module, x: WRAPPED(x)).init(KEY, X),
  "in a layer of Flax": lambda: nn.Sequential([nn.Dense(3), WRAPPED]).init(KEY, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrapped_model_is_no_submodule(name):
  where, expected = "Dense under mpjax.with_policy", "a call of apply, init or bind"
  with refused(TypeError, f"{where}: __call__(...)", expected, SUBMODULE, "Wrap the root"):
    CALLS[name]()


def test_what_to_do_about_rules_that_match_nothing_is_one_of_three():
  where, expected = "mpjax.with_policy(unmatched=...)", "'raise' or 'warn' or 'ignore'"
  fix = "Did you mean"
  for value in ("error", None, True):
    with refused(ValueError, where, expected, repr(value), fix):
      wrap(unmatched=value)


def test_errors_of_flax_come_through_as_they_are():
  kernel = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
  for variables, x, name in ((kernel, jnp.ones((2, 4)), "kernel"), ({}, X, "params")):
    with pytest.raises(Exception, match=name) as excinfo:
      wrap().apply(variables, x)
    assert not isinstance(excinfo.value, mpjax.MpjaxError)
  assert ACTIVE.value is None
