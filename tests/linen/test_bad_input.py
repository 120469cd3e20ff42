"""What bad input gets: an error that says where, what was expected, what came, what to do."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.active import ACTIVE
from tests.errors import check_error
from tests.linen.probes import KEY, X

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy


def wrap(policy="bfloat16", *args, **kwargs):
  return with_policy(nn.Dense(2), policy, *args, **kwargs)


def enter(policy="bfloat16", *args, **kwargs):
  with scope(policy, *args, **kwargs):
    return nn.Dense(2)


WAYS = {"mpjax.linen.with_policy": wrap, "mpjax.linen.policy_scope": enter}
both = pytest.mark.parametrize(("name", "way"), WAYS.items(), ids=["with_policy", "policy_scope"])


@both
@pytest.mark.case("A96", "B137", "B138", "B139", "I18")
@pytest.mark.parametrize(
  ("policy", "where", "expected", "got", "fix"),
  [
    ("mixed_bf16", "mpjax.Policy.parse", "a preset", "'mixed_bf16'", "'mixed_bfloat16'"),
    ("c=bf16,,", "mpjax.Policy.parse", "'params=...", "item 2", "key=dtype"),
    ("c=int32", "mpjax.Policy(compute_dtype", "a floating dtype", "int32", "never cast"),
    ("c=complex64", "mpjax.Policy(compute_dtype", "a floating dtype", "complex64", "never cast"),
    ("c=float64", "mpjax.Policy(compute_dtype", "a floating dtype", "float64", "jax_enable_x64"),
    (jnp.bfloat16, "mpjax.Policy.parse", "a preset", "bfloat16", "Pass a string"),
    (16, "mpjax.Policy.parse", "a preset", "16", "Pass a string"),
  ],
  ids=["name", "item", "integer", "complex", "float64", "type", "number"],
)
def test_policies(name, way, policy, where, expected, got, fix):
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    way(policy)
  check_error(excinfo, where=where, expected=expected, got=got, fix=fix)


@both
@pytest.mark.parametrize("option", ["rules", "defaults"])
@pytest.mark.parametrize(
  ("value", "got"),
  [
    (Rule(None, path="a"), "Rule(None, path='a')"),
    ([("head", "float32")], "('head', 'float32')"),
    (["float32"], "'float32'"),
    (3, "3"),
  ],
  ids=["one rule", "pair", "string", "number"],
)
def test_rules(name, way, option, value, got):
  with pytest.raises(TypeError) as excinfo:
    way(**{option: value})
  check_error(
    excinfo,
    where=f"{name}({option}=...)",
    expected="a sequence of mpjax.Rule",
    got=got,
    fix="Write [mpjax.Rule(",
    builtin=TypeError,
  )


@pytest.mark.parametrize("value", ["error", None, True], ids=str)
def test_unmatched(value):
  with pytest.raises(ValueError) as excinfo:
    wrap(unmatched=value)
  check_error(
    excinfo,
    where="mpjax.linen.with_policy(unmatched=...)",
    expected="'raise', 'warn' or 'ignore'",
    got=repr(value),
    fix="what to do about a rule that picks out no module",
    builtin=ValueError,
  )


def test_a_refused_scope_leaves_nothing_in_force():
  with pytest.raises(ValueError, match="mixed_bfloat16"):
    enter("mixed_bf16")
  assert ACTIVE.value is None


@pytest.mark.parametrize(
  ("model", "got"),
  [
    (nn.Dense, "the class Dense"),
    (None, "NoneType"),
    (lambda x: x, "function"),
    (jnp.ones(2), "Array"),
  ],
  ids=["class", "none", "function", "array"],
)
def test_what_is_no_model(model, got):
  with pytest.raises(TypeError) as excinfo:
    with_policy(model, "bfloat16")
  check_error(
    excinfo,
    where="mpjax.linen.with_policy(model)",
    expected="an unbound flax.linen.Module",
    got=got,
    fix="Pass an instance",
    builtin=TypeError,
  )


def test_a_model_that_is_wrapped_already():
  variables = nn.Dense(2).init(KEY, X)
  for model in (wrap(), wrap().bind(variables)):
    with pytest.raises(TypeError) as excinfo:
      with_policy(model, "float16")
    check_error(
      excinfo,
      where="mpjax.linen.with_policy(model)",
      expected="an unbound flax.linen.Module",
      got="a model that is wrapped already (with_policy(Dense(",
      fix="Wrap the plain model once",
      builtin=TypeError,
    )


class Parent(nn.Module):
  def setup(self):
    self.child = nn.Dense(2)

  def __call__(self, x):
    return self.child(x)


def test_a_bound_model():
  bound = Parent().bind(Parent().init(KEY, X))
  for module, path in ((bound, "''"), (bound.child, "'child'")):
    with pytest.raises(TypeError) as excinfo:
      with_policy(module, "bfloat16")
    check_error(
      excinfo,
      where="mpjax.linen.with_policy(model)",
      expected="an unbound flax.linen.Module",
      got=f"one that is bound at {path}",
      fix="Wrap the root model",
      builtin=TypeError,
    )


class Calls(nn.Module):
  """Calls what it holds as if it were a submodule."""

  held: object

  def __call__(self, x):
    return self.held(x)


SUBMODULE = {
  "where": "Dense under mpjax.linen.with_policy: __call__(...)",
  "expected": "a call of apply, init or bind",
  "got": "a wrapped model used as a submodule",
  "fix": "Wrap the root",
  "builtin": TypeError,
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_wrapper_used_as_a_submodule(jit):
  model = Calls(wrap())
  call = jax.jit(model.init) if jit else model.init
  with pytest.raises(TypeError) as excinfo:
    call(KEY, X)
  check_error(excinfo, **SUBMODULE)

  class InCompact(nn.Module):
    @nn.compact
    def __call__(self, x):
      return wrapped(x)

  wrapped = wrap()
  with pytest.raises(TypeError) as excinfo:
    InCompact().init(KEY, X)
  check_error(excinfo, **SUBMODULE)


def test_a_wrapper_called_without_variables():
  with pytest.raises(TypeError) as excinfo:
    wrap()(X)
  check_error(excinfo, **SUBMODULE)


def test_a_wrapper_inside_a_layer_of_flax():
  model = nn.Sequential([nn.Dense(3), wrap()])
  with pytest.raises(TypeError) as excinfo:
    model.init(KEY, X)
  check_error(excinfo, **SUBMODULE)


def test_a_wrapper_given_a_parent():
  with pytest.raises(TypeError) as excinfo:
    wrap().clone(parent=Parent())
  check_error(
    excinfo,
    where="Dense under mpjax.linen.with_policy: clone(parent=...)",
    expected="a call of apply, init or bind",
    got="a wrapped model used as a submodule",
    fix="Wrap the root",
    builtin=TypeError,
  )
  assert wrap().clone(parent=None) == wrap()


@pytest.mark.case("I18")
@pytest.mark.parametrize("transform", [jax.jit, jax.eval_shape, jax.grad, jax.vmap])
def test_data_are_no_reason_to_raise(transform):
  """NaN, infinity and what overflows float16 go through; only what is written can be wrong."""
  model = with_policy(nn.Dense(2), "mixed_float16")
  variables = nn.Dense(2).init(KEY, X)
  x = jnp.asarray([[jnp.nan, jnp.inf, 1e30], [-jnp.inf, 0.0, 1e-30]])

  def loss(x):
    return model.apply(variables, x).sum()

  run = functools.partial(jax.eval_shape, loss) if transform is jax.eval_shape else transform(loss)
  run(x)


def test_errors_of_flax_come_through_as_they_are():
  with pytest.raises(Exception, match="kernel") as excinfo:
    wrap().apply(nn.Dense(2).init(KEY, X), jnp.ones((2, 4)))
  assert not isinstance(excinfo.value, mpjax.MpjaxError)
  with pytest.raises(Exception, match="params") as excinfo:
    wrap().apply({}, X)
  assert not isinstance(excinfo.value, mpjax.MpjaxError)
  assert ACTIVE.value is None
