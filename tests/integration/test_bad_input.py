"""What bad input gets: an error that says where, what was expected, what came, what to do."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._policy.active import ACTIVE
from tests.errors import refused
from tests.linen.probes import KEY, Does, X
from tests.nnx.rig import HALF, linear

Rule, with_policy = mpjax.Rule, mpjax.with_policy


def enter(policy, *args, **kwargs):
  with mpjax.policy_scope(policy, *args, **kwargs):
    raise AssertionError("it was entered")


WAYS = {
  # What is called, and the name of it in errors.
  "linen": (functools.partial(with_policy, nn.Dense(2)), "mpjax.with_policy"),
  "nnx": (functools.partial(with_policy, linear()), "mpjax.with_policy"),
  "scope": (enter, "mpjax.policy_scope"),
}


@pytest.mark.parametrize("way", WAYS)
def test_policies_rules_and_options(way):
  # For all that is no policy and no rule see the tests of these.
  call, name = WAYS[way]
  with refused(ValueError, f"{name}(policy)", "a preset", "'mixed_bf16'", "'mixed_bfloat16'"):
    call("mixed_bf16")
  for rules, expected, got, fix in (
    (3, "a sequence of mpjax.Rule", "3", "Write [mpjax.Rule("),
    (["x"], "mpjax.Rule", "'x'", "Write ["),
  ):
    with refused(TypeError, f"{name}(rules=...)", expected, got, fix):
      call("bfloat16", rules)
  assert ACTIVE.value is None  # A scope that is refused is not entered.
  # What to do about rules that match nothing is one of three.
  where, expected = f"{name}(unmatched=...)", "'raise' or 'warn' or 'ignore'"
  for value in ("error", None, True):
    with refused(ValueError, where, expected, repr(value), "Did you mean"):
      call("bfloat16", unmatched=value)


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


WRAPPED, VIEW = with_policy(nn.Dense(2), "bfloat16"), with_policy(linear(), HALF)
BOUND = Parent().bind({"params": {}})
LINEN, NNX = "an unbound flax.linen.Module", "a flax.nnx.Module"
ONCE = ("PolicyModule, which is under a policy already", "Wrap the plain model once")
READY = (
  "a view already (Linear under 'params=float32,compute=bfloat16')",
  "Call it as it is. For another policy make a view of the plain model.",
)
MODELS = [
  # What is given, what was expected, what the error calls it, what to do.
  (nn.Dense, LINEN, "class Dense", "mpjax.with_policy("),
  (WRAPPED, LINEN, *ONCE),
  (WRAPPED.bind({"params": {}}), LINEN, *ONCE),
  (BOUND, LINEN, "one that is bound at ''", "Wrap the root model and then bind"),
  (BOUND.child, LINEN, "one that is bound at 'child'", "Wrap the root model and then bind"),
  (nnx.Linear, NNX, "the class Linear", "Pass an instance: mpjax.with_policy(Linear(...)"),
  (None, NNX, "None", "mpjax.with_policy(fn"),
  (VIEW, NNX, *READY),
  (mpjax.nnx.convert(VIEW, jnp.ones((1, 8))), NNX, *READY),
  (
    *(nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)), NNX),
    *("a Linen module (Dense) inside nnx.bridge.ToNNX", "mpjax.policy_scope"),
  ),
]


def test_d18_what_is_put_under_a_policy_is_an_unbound_model_without_one():
  for model, expected, got, fix in MODELS:
    of = mpjax.linen.with_policy if expected == LINEN else mpjax.nnx.with_policy
    with refused(TypeError, "mpjax.with_policy(model)", expected, got, fix):
      of(model, HALF)
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
  where, expected = "Dense under mpjax.with_policy: __call__(...)", "a call of apply, init or bind"
  with refused(TypeError, where, expected, "a wrapped model used as a submodule", "Wrap the root"):
    CALLS[name]()


def test_errors_of_flax_come_through_as_they_are():
  kernel = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
  for variables, x, name in ((kernel, jnp.ones((2, 4)), "kernel"), ({}, X, "params")):
    with pytest.raises(Exception, match=name) as excinfo:
      WRAPPED.apply(variables, x)
    assert not isinstance(excinfo.value, mpjax.MpjaxError)
  assert ACTIVE.value is None
