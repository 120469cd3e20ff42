"""`with_policy` of Linen and NNX models, and of functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused

X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
W = jnp.linspace(0.0, 1.0, 16).reshape(8, 2)
VARIABLES = {"params": {"kernel": W, "bias": jnp.zeros(2)}}
EXACT = np.asarray(X.astype("bfloat16") @ W.astype("bfloat16"))


def linear():
  model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
  nnx.update(model, VARIABLES["params"])
  return model


def test_a_model_and_a_function_run_under_the_policy():
  module = mpjax.with_policy(nn.Dense(2), "c=bf16")
  assert isinstance(module, mpjax.linen.PolicyModule)
  assert module == mpjax.linen.with_policy(nn.Dense(2), "c=bf16")
  model = linear()
  view = mpjax.with_policy(model, "c=bf16")
  assert view.kernel is model.kernel
  for out in (module.apply(VARIABLES, X), view(X)):
    assert out.dtype == "bfloat16"
    np.testing.assert_array_equal(out, EXACT)
  fun = mpjax.with_policy(lambda w, x: x @ w, "mixed_bfloat16", data_argnums=1)
  assert "bf16" in str(jax.make_jaxpr(fun)(W, X))


def test_rules_and_options_are_passed_on():
  rules = [mpjax.Rule("float32", path="**")]
  assert mpjax.with_policy(nn.Dense(2), "c=bf16", rules).apply(VARIABLES, X).dtype == "float32"
  assert mpjax.with_policy(linear(), "c=bf16", rules)(X).dtype == "float32"
  absent = [mpjax.Rule("bf16", path="absent")]
  with pytest.warns(UserWarning, match="absent"):
    mpjax.with_policy(linear(), None, absent, unmatched="warn")
  fun = jax.named_scope("head")(lambda w, x: jnp.exp(x @ w))
  half = mpjax.with_policy(fun, None, [mpjax.Rule("c=bf16", path="head")])
  assert "bf16" in str(jax.make_jaxpr(half)(W, X))
  assert mpjax.with_policy(fun, None) is fun
  low_exp = mpjax.with_policy(fun, "c=bf16", ops=mpjax.OpLists().replace(half=["exp"]))
  assert "bf16[2,2] = exp" in str(jax.make_jaxpr(low_exp)(W, X))


class Pretrained:
  """Holds a Linen module and its parameters, as the Flax models of Hugging Face do."""

  def __init__(self):
    self.module, self.params = nn.Dense(2), VARIABLES["params"]

  def __call__(self, x):
    return self.module.apply({"params": self.params}, x)


REFUSED = {
  "around a module": (
    Pretrained(),
    {},
    "a function of arrays",
    "around a Linen module",
    "mpjax.policy_scope",
  ),
  "a class": (
    nn.Dense,
    {},
    "a function of arrays",
    "the class Dense",
    "mpjax.with_policy(Dense(...)",
  ),
  "a number": (3, {}, "a function of arrays", "3", "mpjax.with_policy(fn"),
  "ops of a model": (
    nn.Dense(2),
    {"ops": mpjax.OpLists()},
    "no ops=",
    "ops=OpLists",
    "for functions",
  ),
  "arguments of a model": (
    linear(),
    {"data_argnums": 0},
    "data_argnums=",
    "data_argnums=0",
    "for functions",
  ),
  "unmatched of a function": (jnp.sin, {"unmatched": "warn"}, "no unmatched=", "'warn'", "rule"),
  "an unknown option": (nn.Dense(2), {"rule": ()}, "arguments", "rule", "rules="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
  model, options, expected, got, fix = REFUSED[case]
  with refused(TypeError, "mpjax.with_policy(model)", expected, got, fix):
    mpjax.with_policy(model, "c=bf16", **options)


def test_a_scope_is_that_of_linen():
  rules = [mpjax.Rule("float32", path="out")]
  with mpjax.policy_scope("c=bf16", rules, unmatched="ignore"):
    assert nn.Dense(2).apply(VARIABLES, X).dtype == "bfloat16"
  # A scope that is used warns of nothing: warnings are errors.
  assert mpjax.policy_scope("c=bf16")(nn.Dense(2).apply)(VARIABLES, X).dtype == "bfloat16"
  with pytest.warns(UserWarning, match=r"never entered.*with mpjax.policy_scope"):
    mpjax.policy_scope("mixed_bfloat16")
