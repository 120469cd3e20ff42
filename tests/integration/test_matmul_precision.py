"""`Policy(precision=...)`: what matmuls and convolutions say in the jaxprs of all three faces."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.lax import DotAlgorithmPreset, Precision

import mpjax
from mpjax._jaxpr.reader import walk
from tests.models import parts
from tests.models.parts import module
from tests.models.values import filled, shapes

X = jnp.linspace(-1.0, 1.0, 2 * 4 * 4 * 8).reshape(2, 4, 4, 8)
HIGHEST, PRESET = (Precision.HIGHEST,) * 2, DotAlgorithmPreset.BF16_BF16_F32
HIGH = (Precision.HIGH,) * 2
FLOAT32 = mpjax.Policy(precision="highest")
HALF = mpjax.Policy(compute_dtype="bfloat16", precision="BF16_BF16_F32", output_dtype="float32")


NET = module(
  lambda m, x: m.head(m.precise(m.body(jnp.mean(m.conv(x), (1, 2))))),
  conv=parts.conv(8, 8, 3),
  body=parts.dense(8, 8),
  precise=parts.dense(8, 8, precision="high"),
  head=parts.dense(8, 8),
)
MODEL = NET.linen(None)
VARIABLES = filled(shapes(MODEL, X))


def linen(policy, rules):
  return functools.partial(mpjax.linen.with_policy(MODEL, policy, rules).apply, VARIABLES)


def of_nnx(policy, rules):
  return mpjax.nnx.with_policy(NET.nnx(None, nnx.Rngs(0)), policy, rules)


def autocast(policy, rules):
  rules = [mpjax.Rule(rule.policy, path=f"**/{rule.path}") for rule in rules]
  return mpjax.autocast(functools.partial(MODEL.apply, VARIABLES), policy, rules=rules)


FACES = {"linen": linen, "nnx": of_nnx, "autocast": autocast}


def asked(fn, *args):
  """Returns the dtype of the operands and the precision of each matmul and convolution."""
  eqns = walk(jax.make_jaxpr(fn)(*args))
  products = (eqn for eqn in eqns if "precision" in eqn.params)
  return [(str(eqn.invars[0].aval.dtype), eqn.params["precision"]) for eqn in products]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
  ("policy", "head", "wanted"),
  [
    ("mixed_bfloat16", FLOAT32, [("bfloat16", None)] * 2 + [("float32", HIGHEST)]),
    ("float32", FLOAT32, [("float32", None)] * 2 + [("float32", HIGHEST)]),
    (FLOAT32, "float32", [("float32", HIGHEST)] * 2 + [("float32", None)]),
    (FLOAT32, "mixed_bfloat16", [("float32", HIGHEST)] * 2 + [("bfloat16", None)]),
    (FLOAT32, None, [("float32", HIGHEST)] * 2 + [("float32", None)]),
    # A preset is for matmuls: the convolution has none.
    (HALF, "float32", [("bfloat16", None), ("bfloat16", PRESET), ("float32", None)]),
    ("mixed_bfloat16", HALF, [("bfloat16", None)] * 2 + [("bfloat16", PRESET)]),
  ],
)
def test_a_policy_says_how_its_matmuls_multiply(face, policy, head, wanted):
  fn = FACES[face](policy, [mpjax.Rule(head, path="head")])
  conv, body, own, last = asked(fn, X)
  assert [conv, body, last] == wanted
  assert own == ("float32", HIGH), "what the model says itself stays"


@pytest.mark.parametrize("face", FACES)
def test_gradients_multiply_as_the_forward_pass(face):
  fn = FACES[face]("mixed_bfloat16", [mpjax.Rule(FLOAT32, path="head")])
  found = asked(jax.grad(lambda x: fn(x).sum()), X)
  # One forward, and one for the gradient of the activations.
  assert found.count(("float32", HIGHEST)) == 2
  assert found.count(("float32", HIGH)) == 2
  assert found.count(("bfloat16", None)) == 4


def test_autocast_of_a_gradient():
  def loss(w):
    with jax.named_scope("head"):
      return jnp.sum(X[:, 0, 0] @ w)

  rule = mpjax.Rule(FLOAT32, path="head")
  grad = mpjax.autocast(jax.grad(loss), "mixed_bfloat16", rules=[rule])
  assert set(asked(grad, jnp.ones((8, 2)))) == {("float32", HIGHEST)}


def test_wide_weight_gradients_multiply_by_the_algorithm():
  policy = mpjax.Policy(
    compute_dtype="bfloat16", weight_grad_dtype="float32", precision="BF16_BF16_F32"
  )
  model = mpjax.linen.with_policy(nn.Dense(4), policy)
  x = jnp.ones((2, 8))
  variables = shapes(model, x)
  loss = lambda v: jnp.sum(model.apply(v, x).astype(jnp.float32))  # noqa: E731
  assert asked(jax.grad(loss), variables) == [("bfloat16", PRESET)] * 2


INSIDE = {
  "jit": jax.jit(lambda x: x @ x),
  "scan": lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, length=2)[0],
  "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ x, x),
  "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ x, lambda y: y, x),
  "remat": jax.checkpoint(lambda x: x @ x),
  "vmap": jax.vmap(lambda x: x @ x.T @ x, in_axes=0, out_axes=0),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_matmuls_in_inner_jaxprs(name, policy):
  x = jnp.eye(3) if name != "vmap" else jnp.ones((2, 3, 3))
  rules = [mpjax.Rule(FLOAT32, path="exact")]
  fn = mpjax.autocast(jax.named_scope("exact")(INSIDE[name]), policy, rules=rules)
  assert set(asked(fn, x)) == {("float32", HIGHEST)}


def test_a_setting_for_the_whole_process_counts_in_full_precision_alone():
  x, matmul = jnp.eye(3), INSIDE["scan"]
  fn = mpjax.autocast(matmul, FLOAT32)
  exact = mpjax.autocast(mpjax.full_precision(matmul), FLOAT32)
  with jax.default_matmul_precision("high"):
    assert set(asked(fn, x)) == {("float32", HIGHEST)}
    assert set(asked(exact, x)) == {("float32", HIGH)}
  assert set(asked(exact, x)) == {("float32", None)}


def test_a_function_that_is_jitted_once_multiplies_as_each_policy_says():
  dot = jax.jit(lambda x: x @ x)

  class Net(nn.Module):
    def __call__(self, x):
      return dot(x)

  for precision, wanted in (
    ("highest", HIGHEST),
    ("high", HIGH),
    (None, None),
    ("highest", HIGHEST),
  ):
    model = mpjax.linen.with_policy(Net(), mpjax.Policy(precision=precision))
    assert asked(jax.jit(functools.partial(model.apply, {})), jnp.eye(3)) == [("float32", wanted)]


def test_integers_and_other_dtypes_than_those_of_the_algorithm_have_none():
  def both(x):
    return x.astype(jnp.float16) @ x.T.astype(jnp.float16), x.astype(jnp.int32) @ x.T.astype(
      "int32"
    )

  fn = mpjax.autocast(both, HALF)
  assert asked(fn, jnp.eye(8)) == [("float16", None), ("int32", None)]


@pytest.mark.parametrize(
  "call", [lambda f, x: f(x), lambda f, x: jax.grad(f)(x)], ids=["eager", "grad"]
)
def test_the_error_of_a_device_that_refuses_a_precision_says_what_to_write(call):
  # CPUs have no TF32. The class of JAX's error and its text stay.
  fun = mpjax.autocast(lambda x: jnp.sum(x @ x), mpjax.Policy(precision="TF32_TF32_F32"))
  with pytest.raises(ValueError, match="is not supported by dot_general") as raised:
    call(fun, jnp.eye(8))
  assert raised.value.fix == "Write precision='highest', which every device supports."


def test_another_error_while_a_function_runs_stays_as_it_is():
  def fails(x):
    raise ValueError("no precision, by DEFAULT")

  fun = mpjax.autocast(lambda x: jax.pure_callback(fails, x, x), "mixed_bfloat16")
  with pytest.raises(Exception, match="no precision") as raised:
    jax.block_until_ready(fun(jnp.eye(8)))
  assert not isinstance(raised.value, mpjax.MpjaxError)
