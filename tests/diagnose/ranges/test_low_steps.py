"""The low precision of the steps of a program is that of the rewritten program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.call import Call
from mpjax._diagnose.ranges.low_steps import programs_of, programs_of_gradient
from mpjax._jaxpr.reader import walk
from tests.models.values import filled, normal, shapes


def followed(w, x):
  return jnp.exp((x @ w) * 2 - 1.5).sum()


def computing(eqns):
  """Returns the names of the primitives that compute, in order."""
  passes_on = ("broadcast_in_dim", "convert_element_type", "custom_jvp_call", "transpose")
  return [eqn.primitive.name for eqn in eqns if eqn.primitive.name not in passes_on]


def of_call(call, fn):
  return programs_of(call.traced(fn), call.arguments(fn))


def low_in(programs):
  steps = (step for step in programs.body.every_step() if step.number in programs.low)
  return computing(step.eqn for step in steps)


@pytest.mark.parametrize(
  ("rows", "low"), [(16, ["dot_general"]), (4, [])], ids=["a matmul", "too few products"]
)
def test_steps_have_the_precision_that_autocast_gives_them(rows, low):
  args = normal(rows, 8), normal(4, rows, seed=1)
  assert low_in(of_call(Call(args, {}), followed)) == low
  run = mpjax.autocast(followed, "mixed_float16", data_argnums=1)
  written = walk(jax.make_jaxpr(run)(*args))
  assert computing(each for each in written if each.outvars[0].aval.dtype == jnp.float16) == low


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_a_policy_of_the_function_itself_decides(policy):
  args = normal(16, 8), normal(4, 16, seed=1)
  ruled = mpjax.autocast(
    followed, "mixed_bfloat16", rules=[mpjax.Rule(policy, path="**")], data_argnums=1
  )
  low = low_in(of_call(Call(args, {}), ruled))
  assert low == ([] if policy is None else ["dot_general"])


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_model_under_a_float32_policy_counts_as_one_without(differentiated):
  def low_of(model):
    def loss(variables, x):
      return jnp.mean(model.apply(variables, x) ** 2)

    if differentiated:
      return low_in(programs_of_gradient(call, loss))
    return low_in(of_call(call, loss))

  model = nn.Dense(8)
  call = Call((filled(shapes(model, normal(16, 8))), normal(16, 8)), {})
  assert low_of(mpjax.with_policy(model, "float32")) == low_of(model) != []


def test_the_policy_of_a_gradient_is_that_of_its_loss():
  def loss(w, x):
    return jnp.sum(x @ w)  # Its cotangent is a constant, and x an input.

  args = normal(16, 8), normal(4, 16, seed=1)
  assert low_in(programs_of_gradient(Call(args, {}), loss)) == ["dot_general"] * 2


def test_what_is_written_in_low_precision_is_in_low_precision():
  def step(w):
    return jax.grad(lambda w: jnp.sum(jax.nn.gelu(w).astype(jnp.float32)))(w)

  programs = of_call(Call((normal(8, 8).astype("bfloat16"),), {}), step)
  steps = [*programs.body.every_step()]
  written = {s.number for s in steps if s.eqn.outvars[0].aval.dtype == jnp.bfloat16}
  assert written <= programs.low
