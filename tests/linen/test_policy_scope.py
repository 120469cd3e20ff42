"""`policy_scope`: what runs under it, and what it says when nothing does."""

import concurrent.futures
import functools
import re
import threading
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._policy.active import ACTIVE
from tests.errors import refused
from tests.linen.probes import KEY, X, note
from tests.programs import bits

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")

NOTHING_RAN = "got none: nothing ran under the policy"


class Net(nn.Module):
  """Calls two layers by name."""

  def setup(self):
    self.encoder = nn.Dense(8)
    self.decoder = nn.Dense(8)

  def encode(self, x):
    return self.encoder(x)

  def __call__(self, x):
    return self.decoder(self.encode(x))


@functools.cache
def plain_variables():
  return Net().init(KEY, X)


def apply():
  return Net().apply(plain_variables(), X)


def every():
  """Returns a rule for every module that is equal to no other: no scope before had it."""
  return Rule("float32", where=lambda module: True)


def other(path):
  """Returns rules that no scope before had: one for every module, one for a path."""
  return [every(), Rule("float16", path=path)]


@pytest.mark.slow
def test_a_scope_serves_code_that_never_shows_its_apply():
  def fun(module, x):
    note(module, module.encode(x))
    return module(x)

  with scope("mixed_bfloat16"):
    out = nn.apply(fun, Net())(plain_variables(), X)
    made = nn.init(fun, Net())(KEY, X)
    also, again = nn.init_with_output(fun, Net())(KEY, X)
  assert out.dtype == also.dtype == F32
  assert bits(made) == bits(again) == bits(plain_variables())
  model, variables = Net(), plain_variables()

  def generate(x, steps):
    for _ in range(steps):
      x = model.apply(variables, x)
    return x

  assert generate(X, 2).dtype == F32
  with scope("c=bf16"):
    assert generate(X, 2).dtype == BF16
    assert jax.jit(generate, static_argnums=1)(X, 2).dtype == BF16
  assert generate(X, 2).dtype == F32


def test_a_scope_can_be_entered_again_and_is_a_decorator():
  model, entered = nn.Dense(2), scope("bfloat16")
  variables = {"params": {"kernel": jnp.ones((8, 2)), "bias": jnp.ones(2)}}
  dtype = lambda: model.apply(variables, X).dtype  # noqa: E731
  for _ in range(2):
    with entered:
      assert dtype() == BF16
      with entered:
        assert dtype() == BF16
      assert dtype() == BF16
    assert dtype() == F32
    assert entered(dtype)() == BF16
    assert dtype() == F32


# A rule that picks out no module


UNMATCHED = mpjax.errors.UnmatchedRuleError
USELESS = {
  # name: rules, what runs, the error, and its parts
  "rule": (
    lambda: other("encodr"),
    *(apply, UNMATCHED, "rules: mpjax.Rule(", "a rule that picks out at least one module"),
    *("none of the 3 modules that ran in the scope", "The nearest module paths: 'encoder', 'dec"),
  ),
  "policy": (
    lambda: [every()],
    *(lambda: jnp.sin(X), mpjax.errors.MpjaxValueError, "mpjax.policy_scope(policy)"),
    *("Linen modules that are called inside", "none: nothing ran under the policy"),
    "Plain functions need mpjax.autocast(fn, policy)",
  ),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_rule_or_a_policy_that_is_for_no_module_warns_raises_or_is_ignored(name):
  rules, run, error, *parts = USELESS[name]
  with pytest.warns(UserWarning, match=re.escape(parts[0])) as record, scope("c=bf16", rules()):
    run()
  (warning,) = record
  assert warning.filename == __file__
  assert all(part in str(warning.message) for part in parts)
  with refused(error, *parts), scope("c=bf16", rules(), unmatched="raise"):
    run()
  assert ACTIVE.value is None
  with scope("c=bf16", rules(), unmatched="ignore"):
    run()


def test_a_rule_may_be_for_the_second_model():
  with scope("c=bf16", other("layers_1")):
    apply()
    jax.eval_shape(nn.Sequential([nn.Dense(2), nn.Dense(2)]).init, KEY, X)


def test_a_rule_that_matched_in_an_equal_scope_before_has_matched():
  rules = other("encoder")
  with scope("c=bf16", rules):
    apply()
  with scope("c=bf16", rules):
    nn.Dense(8).apply({"params": plain_variables()["params"]["decoder"]}, X)


def test_a_function_that_jax_finds_in_its_cache_has_called_its_modules():
  rules, traces = other("encoder"), []

  @jax.jit
  def forward(x):
    traces.append(x)
    return Net().apply(plain_variables(), x)

  for _ in range(2):
    with scope("c=bf16", rules):
      forward(X)
  assert len(traces) == 1


def test_a_wrapped_model_of_equal_rules_hides_no_module():
  # JAX must not find the body of `nn.jit` in its cache.
  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.jit(Net)(name="inner")(x)

  rules = other("inner/encoder")
  variables = Outer().init(KEY, X)
  with_policy(Outer(), "c=bf16", rules, unmatched="warn").apply(variables, X)
  with scope("c=bf16", rules):
    Outer().apply(variables, X)


def test_a_predicate_without_a_hash_is_a_rule_of_a_scope():
  predicate = type("Predicate", (), {"__call__": lambda self, module: True, "__hash__": None})
  with scope("c=bf16", [Rule("float32", where=predicate())]):
    assert apply().dtype == F32


# A scope under which nothing ran


def in_another_thread(variables, x):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(Net().apply, variables, x).result()


def compiled_before():
  compiled = jax.jit(Net().apply).lower(plain_variables(), X).compile()
  return functools.partial(compiled, plain_variables())


NOT_REACHED = {
  # name: what makes a function before the scope, and the dtype that it returns inside
  "nnx": (lambda: nnx.Linear(8, 3, rngs=nnx.Rngs(0)), "float32"),
  "autocast": (lambda: mpjax.autocast(lambda x: x @ x.T, "c=f16"), "float32"),
  "wrapped": (lambda: with_policy(Net(), "c=f16").bind(plain_variables()), "float16"),
  "compiled": (compiled_before, "float32"),
  "another thread": (lambda: functools.partial(in_another_thread, plain_variables()), "float32"),
}


@pytest.mark.parametrize(("make", "dtype"), NOT_REACHED.values(), ids=NOT_REACHED)
def test_what_a_scope_does_not_reach(make, dtype):
  fun = make()
  with pytest.warns(UserWarning, match=NOTHING_RAN), scope("c=bf16", [every()]):
    assert fun(X).dtype == dtype


def test_a_wrapped_model_of_an_equal_policy_does_not_count():
  rules = [every()]
  with_policy(Net(), "c=bf16", rules, unmatched="warn").apply(plain_variables(), X)
  with pytest.warns(UserWarning, match=NOTHING_RAN), scope("c=bf16", rules):
    jnp.sin(X)


def test_a_scope_of_no_policy_and_no_rules_asks_for_nothing():
  with scope(None):
    jnp.sin(X)


def test_a_scope_inside_of_full_precision_asks_for_nothing():
  @mpjax.full_precision
  def fun(x):
    with scope("bfloat16", other("encodr")):
      return Net().apply(plain_variables(), x)

  assert fun(X).dtype == F32


# Where scopes are entered and left


def test_a_decorated_function_warns_in_each_call_until_modules_have_run():
  entered = scope("c=bf16", other("encoder"))
  empty, full = entered(lambda: None), entered(apply)
  assert full.__name__ == "apply"
  for _ in range(2):
    with pytest.warns(UserWarning, match=NOTHING_RAN) as record:
      empty()
    assert record[0].filename == __file__
  full()
  empty()


def _generator():
  yield


async def _coroutine():
  pass


@pytest.mark.parametrize("later", [_generator, _coroutine])
def test_a_function_whose_body_runs_later_cannot_be_decorated(later):
  expected, fix = "a function that has run when it returns", "with mpjax.policy_scope(policy)"
  with refused(TypeError, "@mpjax.policy_scope(policy)", expected, later.__name__, fix):
    scope("c=bf16")(later)


def test_what_is_raised_inside_is_the_only_error():
  @scope("c=bf16", other("encodr"), unmatched="raise")
  def fails():
    apply()
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError) as caught:
    fails()
  assert caught.value.__context__ is None


def test_a_scope_around_another_may_run_nothing():
  with scope("c=bf16", [every()]), scope("c=f16"):
    assert apply().dtype == jnp.float16


def test_a_scope_around_another_says_that_its_rule_picked_out_none_of_its_modules():
  @scope("c=bf16", other("encodr"))
  def fun():
    apply()
    with scope("c=f16"):
      apply()

  with pytest.warns(UserWarning, match="encodr.*none of the 3 modules that ran") as record:
    fun()
  assert len(record) == 1


def test_a_scope_inside_another_says_that_nothing_ran():
  with scope("c=bf16"):
    apply()
    with pytest.warns(UserWarning, match=NOTHING_RAN), scope("c=f16", [every()]):
      jnp.sin(X)


def test_a_scope_that_is_entered_twice_at_once_warns_of_the_inner_one_alone():
  entered = scope("c=bf16", [every()])
  with entered, pytest.warns(UserWarning, match=NOTHING_RAN), entered:
    jnp.sin(X)


def test_generators_that_end_in_the_order_in_which_they_began_say_what_each_ran():
  def held(policy, rules):
    with scope(policy, rules):
      yield
      apply()
      yield

  first, second = held("c=bf16", other("encodr")), held("c=f16", other("decodr"))
  for generator in (first, second, second):
    next(generator)  # The second one is the innermost, and all modules run under it.
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    assert next(first, None) is None
    assert next(first, None) is None
  assert record == []
  with pytest.warns(UserWarning, match="decodr"):
    assert next(second, None) is None
  assert ACTIVE.value is None


def test_a_generator_that_is_closed_says_nothing():
  def held():
    with scope("c=bf16", [every()]):
      yield

  generator = held()
  next(generator)
  generator.close()


@pytest.mark.usefixtures("no_cache")
def test_threads_that_enter_equal_scopes_at_once_share_what_ran():
  count, rules = 8, other("encoder")
  barrier = threading.Barrier(count)

  @jax.jit
  def forward(x):
    return Net().apply(plain_variables(), x)

  def work(_):
    plain_variables()
    barrier.wait()
    with scope("c=bf16", rules):
      return forward(X).dtype

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    assert set(pool.map(work, range(count))) == {jnp.dtype("float32")}
