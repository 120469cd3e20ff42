"""`with_policy` of Linen and NNX models, and of functions."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._policy.active import ACTIVE
from tests.errors import refused
from tests.programs import bits

KEY = jax.random.key(0)
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


@pytest.mark.slow
@pytest.mark.standard_promotion("dtypes")
def test_without_a_policy_and_rules_a_model_computes_as_it_is_written():
  x = jnp.ones((4, 8))
  # A hard-coded dtype, which every policy would replace.
  module = nn.Sequential([nn.Dense(32, dtype=jnp.bfloat16), nn.Dense(2)])
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
    nnx.Linear(8, 32, dtype=jnp.bfloat16, rngs=rngs), nnx.Linear(32, 2, rngs=rngs)
  )
  plain, off = (each.init(KEY, x) for each in (module, mpjax.with_policy(module, None)))
  assert bits(off) == bits(plain)

  def jaxprs(wrapped, wrapped_model):
    return str(jax.make_jaxpr(wrapped.apply)(plain, x)), str(jax.make_jaxpr(wrapped_model)(x))

  written = jaxprs(module, model)
  assert jaxprs(mpjax.with_policy(module, None), mpjax.with_policy(model, None)) == written
  with mpjax.policy_scope(None):
    assert jaxprs(module, model) == written
  for each in written:
    assert "bf16" in each


class Pretrained:
  """Holds a Linen module and its parameters, as the Flax models of Hugging Face do."""

  def __init__(self):
    self.module, self.params = nn.Dense(2), VARIABLES["params"]

  def __call__(self, x):
    return self.module.apply({"params": self.params}, x)


OF_LINEN, OF_NNX = mpjax.linen.with_policy, mpjax.nnx.with_policy
WRAPPED, VIEW = OF_LINEN(nn.Dense(2), "c=bf16"), OF_NNX(linear(), "c=bf16")
LINEN, NNX = "a flax.linen.Module", "a flax.nnx.Module"
ONCE = "Dense, which is under a policy already", "Wrap the plain model once"
READY = "a view already (Linear under ", "For another policy make a view of the plain model."
OF_EACH, FUNCTION = mpjax.with_policy, "a function of arrays"
REFUSED = [
  # The function, what is given, options, what was expected, what came, what to do.
  (OF_EACH, Pretrained(), {}, FUNCTION, "around a Linen module", "mpjax.policy_scope"),
  (OF_EACH, nn.Dense, {}, FUNCTION, "the class Dense", "mpjax.with_policy(Dense(...)"),
  (OF_EACH, 3, {}, FUNCTION, "3", "mpjax.with_policy(fn"),
  (OF_EACH, nn.Dense(2), {"ops": mpjax.OpLists()}, "no ops=", "ops=OpLists", "for functions"),
  (OF_EACH, linear(), {"data_argnums": 0}, "data_argnums=", "data_argnums=0", "for functions"),
  (OF_EACH, jnp.sin, {"unmatched": "warn"}, "no unmatched=", "'warn'", "rule"),
  (OF_EACH, nn.Dense(2), {"rule": ()}, "arguments", "rule", "rules="),
  (OF_LINEN, WRAPPED, {}, LINEN, *ONCE),
  (OF_LINEN, WRAPPED.bind({"params": {}}), {}, LINEN, *ONCE),
  (OF_NNX, None, {}, NNX, "None", "mpjax.with_policy(fn"),
  (OF_NNX, VIEW, {}, NNX, *READY),
  (OF_NNX, mpjax.nnx.convert(VIEW, X), {}, NNX, *READY),
  (
    *(OF_NNX, nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)), {}, NNX),
    *("a Linen module (Dense) inside nnx.bridge.ToNNX", "mpjax.policy_scope"),
  ),
]


@pytest.mark.parametrize(("with_policy", "model", "options", "expected", "got", "fix"), REFUSED)
def test_what_is_no_model_and_options_that_a_model_has_not(
  with_policy, model, options, expected, got, fix
):
  with refused(TypeError, "mpjax.with_policy(model)", expected, got, fix):
    with_policy(model, "c=bf16", **options)


def enter(*args, **options):
  with mpjax.policy_scope(*args, **options):
    raise AssertionError("it was entered")


WAYS = {
  "linen": (functools.partial(OF_LINEN, nn.Dense(2)), "mpjax.with_policy"),
  "nnx": (functools.partial(OF_NNX, linear()), "mpjax.with_policy"),
  "scope": (enter, "mpjax.policy_scope"),
}


@pytest.mark.parametrize("way", WAYS)
def test_policies_rules_and_options_are_checked(way):
  # For all that is no policy and no rule see the tests of these.
  call, name = WAYS[way]
  with refused(ValueError, f"{name}(policy)", "a preset", "'mixed_bf16'", "'mixed_bfloat16'"):
    call("mixed_bf16")
  with refused(TypeError, f"{name}(rules=...)", "a sequence of mpjax.Rule", "3", "Write ["):
    call("bfloat16", 3)
  expected = "'raise' or 'warn' or 'ignore'"
  with refused(ValueError, f"{name}(unmatched=...)", expected, "'error'", "Did you mean"):
    call("bfloat16", unmatched="error")
  assert ACTIVE.value is None  # A scope that is refused is not entered.


def test_errors_of_flax_come_through_as_they_are():
  other = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
  for variables, name in ((other, "kernel"), ({}, "params")):
    with pytest.raises(Exception, match=name) as excinfo:
      WRAPPED.apply(variables, X)
    assert not isinstance(excinfo.value, mpjax.MpjaxError)
  assert ACTIVE.value is None


def test_a_scope_is_that_of_linen():
  rules = [mpjax.Rule("float32", path="out")]
  with mpjax.policy_scope("c=bf16", rules, unmatched="ignore"):
    assert nn.Dense(2).apply(VARIABLES, X).dtype == "bfloat16"
  # A scope that is used warns of nothing: warnings are errors.
  assert mpjax.policy_scope("c=bf16")(nn.Dense(2).apply)(VARIABLES, X).dtype == "bfloat16"
  with pytest.warns(UserWarning, match=r"never entered.*with mpjax.policy_scope"):
    mpjax.policy_scope("mixed_bfloat16")
