"""One verb for Linen, NNX and functions: what it passes on, and what it refuses."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
W = jnp.linspace(0.0, 1.0, 6).reshape(3, 2)
VARIABLES = {"params": {"kernel": W, "bias": jnp.zeros(2)}}
EXACT = np.asarray(X.astype("bfloat16") @ W.astype("bfloat16"))


def linear():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
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


REFUSED = {
  "a class": (nn.Dense, {}, "a model", "the class Dense", "mpjax.with_policy(Dense(...)"),
  "a number": (3, {}, "a model", "3", "mpjax.with_policy(fn"),
  "ops of a model": (nn.Dense(2), {"ops": mpjax.OpLists()}, "no ops=", "them", "for functions"),
  "arguments of a model": (linear(), {"data_argnums": 0}, "data_argnums=", "them", "for functions"),
  "unmatched of a function": (jnp.sin, {"unmatched": "warn"}, "no unmatched=", "'warn'", "rule"),
  "an unknown option": (nn.Dense(2), {"rule": ()}, "arguments", "rule", "rules="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
  model, options, expected, got, fix = REFUSED[case]
  with refused(TypeError, "mpjax.with_policy(model)", expected, got, fix):
    mpjax.with_policy(model, "c=bf16", **options)


def test_a_model_that_is_wrapped_is_refused_without_its_whole_text():
  model = nn.Sequential([nn.Dense(i + 1) for i in range(500)])
  for wrapped in (mpjax.with_policy(model, "c=bf16"), mpjax.with_policy(linear(), "c=bf16")):
    with pytest.raises(TypeError, match=r"mpjax.with_policy\(model\).*already") as excinfo:
      mpjax.with_policy(wrapped, "c=bf16")
    assert len(str(excinfo.value)) < 300


def test_a_scope_is_that_of_linen():
  with mpjax.policy_scope("c=bf16", [mpjax.Rule("float32", path="out")]):
    assert nn.Dense(2).apply(VARIABLES, X).dtype == "bfloat16"
  assert mpjax.policy_scope("c=bf16")(nn.Dense(2).apply)(VARIABLES, X).dtype == "bfloat16"


def test_a_scope_that_is_never_entered_warns():
  with pytest.warns(UserWarning, match=r"never entered.*with mpjax.policy_scope"):
    mpjax.policy_scope("mixed_bfloat16")
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    mpjax.policy_scope("mixed_bfloat16")(nn.Dense(2).apply)(VARIABLES, X)


def loss_fn(model, x):
  return jnp.sum(model(x) ** 2)


def test_an_nnx_optimizer_and_a_state_give_the_same_scaled_gradients():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  mpjax.value_and_grad(loss_fn, opt_state=optimizer)(model, X)  # As the signature calls it.
  loss, grads = mpjax.value_and_grad(loss_fn, optimizer)(model, X)
  graphdef, params = nnx.split(model, nnx.Param)
  plain, expected = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X))(params)
  of_state = mpjax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X), TX.init(params))
  for found, tree in ((loss, grads), of_state(params)):
    assert float(found) == float(plain)
    jax.tree.map(lambda g, e: np.testing.assert_array_equal(g, 8 * e), tree, expected)


def test_options_are_passed_on():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  both = mpjax.value_and_grad(lambda x, m: (loss_fn(m, x), "aux"), optimizer, 1, has_aux=True)
  (loss, aux), grads = both(X, model)
  assert aux == "aux"
  assert loss.shape == ()
  assert set(grads) == {"kernel", "bias"}
