"""What bad input gets: an error that says where, what was expected, what came, what to do."""

import functools

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
MODEL, UNBOUND, INSTANCE = (
  "with_policy(model)",
  "an unbound flax.linen.Module",
  "mpjax.with_policy(",
)
AGAIN = "PolicyModule, which is under a policy already"
ONCE, SUBMODULE = "Wrap the plain model once", "a wrapped model used as a submodule"
CALLED = ("Dense under mpjax.with_policy: __call__(...)", "a call of apply, init or bind")
PARENT = ("Dense under mpjax.with_policy: clone(parent=...)", CALLED[1])
UNMATCHED = ("with_policy(unmatched=...)", "'raise', 'warn' or 'ignore'")
WHAT = "what to do about a rule that picks out no module"
ROOT = "Wrap the root"
MISTAKES = {
  # What is wrapped: what the error calls it, and what to do.
  **{
    name: (functools.partial(with_policy, model, "bfloat16"), MODEL, UNBOUND, got, fix)
    for name, model, got, fix in (
      ("a class", nn.Dense, "class Dense", INSTANCE),
      ("wrapped", WRAPPED, AGAIN, ONCE),
      ("wrapped and bound", bound(WRAPPED), AGAIN, ONCE),
      ("bound", bound(), "one that is bound at ''", "Wrap the root model"),
      ("a bound child", bound().child, "one that is bound at 'child'", "Wrap the root model"),
    )
  },
  # Where a wrapped model is called as a submodule.
  **{
    name: (call, *CALLED, SUBMODULE, ROOT)
    for name, call in {
      "called": lambda: WRAPPED(X),
      "held": lambda: Calls(WRAPPED).init(KEY, X),
      "held, in jit": lambda: jax.jit(Calls(WRAPPED).init)(KEY, X),
      "closed over": lambda: Does(lambda module, x: WRAPPED(x)).init(KEY, X),
      "in a layer of Flax": lambda: nn.Sequential([nn.Dense(3), WRAPPED]).init(KEY, X),
    }.items()
  },
  "given a parent": (lambda: WRAPPED.clone(parent=Parent()), *PARENT, SUBMODULE, ROOT),
  **{
    f"unmatched={value!r}": (
      functools.partial(wrap, unmatched=value),
      *UNMATCHED,
      repr(value),
      WHAT,
    )
    for value in ("error", None, True)
  },
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
  call, where, expected, got, fix = MISTAKES[name]
  builtin = ValueError if "unmatched" in name else TypeError
  where = f"mpjax.{where}" if where.startswith("with_policy") else where
  with refused(builtin, where, expected, got, fix):
    call()
  assert WRAPPED.clone(parent=None) == WRAPPED


def test_errors_of_flax_come_through_as_they_are():
  kernel = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
  for variables, x, name in ((kernel, jnp.ones((2, 4)), "kernel"), ({}, X, "params")):
    with pytest.raises(Exception, match=name) as excinfo:
      wrap().apply(variables, x)
    assert not isinstance(excinfo.value, mpjax.MpjaxError)
  assert ACTIVE.value is None
