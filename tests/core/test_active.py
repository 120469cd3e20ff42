"""The state in force inside a call."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
import mpjax.linen._context
from mpjax._core.active import ACTIVE, Active, activate_scope, in_region, leave_scope
from mpjax.nnx._spec import current
from tests.programs import products

X = jnp.ones((2, 4))


def test_equal_states_are_one_key():
  policy = mpjax.Policy(compute_dtype="f16")
  # Which class raised is what a call tells the one around it, and no part of the key.
  states = [Active(policy=policy, region="float16", failed=failed) for failed in ([], [nnx.Linear])]
  assert states[0] == states[1]
  assert hash(states[0]) == hash(states[1])
  assert states[0] != Active(policy=policy, region="float16", casting=frozenset({nnx.Linear}))


def test_outside_of_policies_inside_of_it_is_the_same_state_and_linens_is_another():
  outside = Active().outside()
  assert (Active().on, outside.on, outside.in_region) == (True, False, True)
  assert outside.outside() is outside
  assert not in_region()
  with ACTIVE(outside):
    assert in_region()
  linen = mpjax.linen._context.Active()
  assert linen != Active()
  assert isinstance(linen.outside(), type(linen))
  assert linen.outside() != outside
  # Current is what is active here, and nothing elsewhere.
  assert current() is None
  with ACTIVE(Active()):
    assert current() == Active()
  with mpjax.linen.policy_scope("float16"):
    assert current() is None


def test_a_linen_model_in_a_view_and_a_view_in_a_linen_scope_have_policies_of_their_own():
  linen = mpjax.linen.with_policy(nn.Dense(3), "c=f16")
  params = nn.Dense(3).init(nnx.Rngs(0).params(), X)

  class Bridge(nnx.Module):
    def __call__(self, x):
      return linen.apply(params, x)

  for policy in (None, "c=bf16", "float32"):
    program = jax.make_jaxpr(mpjax.nnx.with_policy(Bridge(), policy))(X)
    (product,) = products(program)
    assert product.dtypes == ("float16", "float16"), policy
  view = mpjax.nnx.with_policy(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "c=bf16")
  with mpjax.linen.policy_scope("float16"):
    assert view(X).dtype == jnp.bfloat16


def test_scopes_are_left_in_any_order():
  closed = []

  def enter(policy):
    opened = contextlib.ExitStack()
    opened.callback(closed.append, policy)
    return activate_scope(Active(region=policy), opened)

  one, two, three = enter("one"), enter("two"), enter("three")
  leave_scope(one)
  assert (ACTIVE.value.region, closed) == ("three", [])
  leave_scope(three)
  assert (ACTIVE.value.region, closed) == ("two", ["three"])
  leave_scope(two)
  assert (ACTIVE.value, closed) == (None, ["three", "two", "one"])
