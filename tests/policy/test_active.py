"""The state in force inside a call."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._policy import active
from mpjax._policy.rules import ModulePolicy, Rule
from mpjax.linen._active import LinenActive
from tests.nnx import rig
from tests.programs import products

X = jnp.ones((2, 8))


def test_equal_states_are_one_key_that_no_python_code_compares():
  # JAX compares keys in C++ without a lock: a thread that gets to run meanwhile ends the process.
  fields = {"around": ModulePolicy(mpjax.Policy(compute_dtype="f16")), "region": "float16"}
  # Which class raised is what a call tells the one around it, and no part of the key.
  states = [active.Active(**fields, failed=failed) for failed in ([], [nnx.Linear])]
  states += [active.Active(**fields, casting=frozenset({nnx.Linear})), LinenActive(**fields)]
  keys = []
  for state in states:
    with active.ACTIVE(state):
      keys.append(active.ACTIVE._number.value)
  assert [keys.index(key) for key in keys] == [0, 0, 2, 3]
  assert all(type(key).__eq__ is int.__eq__ and type(key).__hash__ is int.__hash__ for key in keys)


def test_a_linen_model_in_a_view_and_a_view_in_a_linen_scope_have_policies_of_their_own():
  model = nn.Sequential([nn.Dense(8), nn.Dense(3)])
  linen = mpjax.linen.with_policy(model, "c=f16")
  params = model.init(nnx.Rngs(0).params(), X)

  bridge = rig.Does(lambda module, x: linen.apply(params, x))
  for policy in (None, "c=bf16", "float32"):
    program = jax.make_jaxpr(mpjax.nnx.with_policy(bridge, policy))(X)
    # To the bridge the parameters are constants, and so the first matmul is one of inputs.
    assert products(program)[-1].dtypes == ("float16", "float16"), policy
  view = mpjax.nnx.with_policy(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "c=bf16")
  with mpjax.linen.policy_scope("float16", unmatched="ignore"):
    assert view(X).dtype == jnp.bfloat16


def test_a_predicate_may_have_no_hash():
  predicate = type("Predicate", (), {"__call__": lambda self, m: m.name == "a", "__hash__": None})
  model = mpjax.with_policy(nn.Dense(2), "bfloat16", [Rule("float32", where=predicate())])
  with pytest.raises(mpjax.errors.UnmatchedRuleError):
    model.init(jax.random.key(0), X)
  variables = nn.Dense(2).init(jax.random.key(0), X)
  assert model.apply(variables, X).dtype == jnp.bfloat16
