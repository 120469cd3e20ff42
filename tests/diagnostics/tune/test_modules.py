import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._diagnostics.arguments import Call
from mpjax._diagnostics.ranges.measure import gradient_of
from mpjax._diagnostics.tune.modules import (
  errors_alone,
  forward_errors,
  is_inside,
  modules_of,
  relative_error,
  rules_for,
  scopes_of,
  selector,
)
from mpjax._jaxprs.steps import body_of
from tests import programs

HALF, DOT = mpjax.Policy.parse("mixed_bfloat16"), "dot_general"


def test_modules_with_their_flops_forward_and_backward():
  def loss(w, x):
    with jax.named_scope("outer"):
      y = x @ w
      with jax.named_scope("inner"):
        y = jnp.einsum("ij,jk->ik", y, w)
      y = jax.lax.scan(lambda c, _: (c @ w, None), y, None, 3)[0]
    return jnp.sum(y)

  args = jnp.ones((4, 4)), jnp.ones((2, 4))
  flops = modules_of(body_of(jax.make_jaxpr(jax.value_and_grad(loss))(*args)))
  one = 2 * 2 * 4 * 4
  # The gradient by `x` is not needed.
  assert flops["outer/inner"] == 3 * one
  assert flops["outer"] == 2 * one + 3 * 3 * one
  assert set(flops) == {"outer", "outer/inner", ""}
  assert flops[""] == 0


SCOPES = (
  *("", "Net", "Net/a", "Net/a/b", "Net/b", "Net/c(1)", "head"),
  *("Net/rnn", "Net/rnn/cell", "Net/rnn/cell/hi"),
)


def test_modules_inside_of_a_chosen_one_keep_the_policy():
  rules = rules_for(["Net/a"], ["Net/a/b", "Net/b"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/a", "**/a/b"]
  assert rules[1].policy == HALF
  rules = rules_for(["Net/a", "Net/a/b"], ["Net/b"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/a"]
  rules = rules_for(["Net", "Net/a/b"], ["Net/a"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/Net", "**/a/b", "**/a"]
  assert is_inside("a/b", "a")
  assert not is_inside("ab", "a")
  assert is_inside("a", "")


def test_rules_for_methods_select_the_same_in_linen_and_in_autocast():
  class Net(nn.Module):
    def setup(self):
      self.emb, self.enc = nn.Embed(5, 4), nn.Dense(4)

    def encode(self, x):
      return self.enc(self.emb(x))

    @nn.compact
    def __call__(self, x):
      return self.emb.attend(nn.RNN(nn.LSTMCell(4), name="rnn")(self.encode(x)))

  x = jnp.ones((1, 2), int)
  variables = jax.eval_shape(Net().init, jax.random.key(0), x)
  loss = jax.value_and_grad(lambda v: jnp.sum(Net().apply(v, x)))
  body = body_of(jax.make_jaxpr(loss)(variables))
  chosen = ["Net/emb", "Net/enc", "Net/rnn/LSTMCell_0/hi"]
  others = [path for path in modules_of(body) if path not in chosen]
  rules = rules_for(chosen, others, scopes_of(body), HALF)
  for apply in (
    mpjax.with_policy(Net(), HALF, rules=rules, unmatched="raise").apply,
    mpjax.autocast(Net().apply, HALF, rules=rules),
  ):
    equations = programs.equations(jax.make_jaxpr(apply)(variables, x))
    matmuls = [eqn.outvars[0].aval.dtype for eqn, _ in equations if eqn.primitive.name == DOT]
    assert (matmuls.count("float32"), matmuls.count("bfloat16")) == (3, 7)


def block(w, x):
  with jax.named_scope("net"):
    with jax.named_scope("first"):
      y = x @ w
    with jax.named_scope("second"):
      z = jnp.tanh(y) @ w
    return jnp.sum(y + z)


def test_errors_by_module_are_those_of_numpy():
  w = jax.random.normal(jax.random.key(0), (8, 8))
  x = jax.random.normal(jax.random.key(1), (4, 8))
  call, low = Call((w, x), {}), mpjax.autocast(block, "mixed_bfloat16")
  errors = forward_errors(*(body_of(call.traced(f)[0]) for f in (block, low)), call.arrays)
  assert set(errors) == {"net/first", "net/second", "net"}
  with jax.default_matmul_precision("highest"):
    exact = np.asarray(x @ w, np.float64)
  rounded = np.asarray(x.astype("bfloat16") @ w.astype("bfloat16")).astype(np.float64)
  expected = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
  assert math.isclose(errors["net/first"], expected, rel_tol=1e-4)
  assert errors["net/second"] > errors["net/first"]
  assert 0 < errors["net"] < 0.02  # The sum of both.


def test_what_autocast_puts_into_calls_is_compared_with_what_it_was():
  def loss(w, x):
    with jax.named_scope("block"):
      return jnp.sum(jax.lax.scan(lambda h, _: (h + jax.nn.gelu(h @ w), None), x, None, 3)[0])

  call = Call((jnp.eye(8) / 2, jnp.linspace(0.1, 3, 32).reshape(4, 8)), {})
  low = mpjax.autocast(loss, "mixed_bfloat16")
  errors = forward_errors(*(body_of(call.traced(f)[0]) for f in (loss, low)), call.arrays)
  assert 1e-4 < errors["block"] < 0.02


def test_errors_of_nothing_and_of_what_is_not_finite():
  one, bad = np.ones(2), np.asarray([1, math.nan])
  assert math.isnan(relative_error([]))
  assert relative_error([(one, bad)]) == math.inf
  assert relative_error([(np.asarray([3j, 4]), np.asarray([3j, 9]))]) == 1


def prepared(loss, *args):
  call = Call(args, {})
  program, _ = call.traced(gradient_of(loss))
  body = body_of(program)
  return body, call.arrays


def alone(loss, *args, dtype="bfloat16"):
  body, operands = prepared(loss, *args)
  return errors_alone(body, operands, slice(1, None), modules_of(body), jnp.dtype(dtype))


def layers(w, x):
  with jax.named_scope("first"):
    y = x @ w[0]
  with jax.named_scope("second"):
    y = y @ w[1]
  return jnp.sum(y**2)


def test_the_error_of_each_module_alone():
  w = jax.random.normal(jax.random.key(0), (2, 16, 16))
  x = jax.random.normal(jax.random.key(1), (8, 16))
  errors = alone(layers, w, x)
  exact = jax.grad(layers)(w, x)

  def rounded(w, x, which):
    def matmul(x, w, low):
      if low:
        x, w = (a.astype("bfloat16").astype(jnp.float32) for a in (x, w))
      return x @ w

    y = matmul(x, w[0], which == 0)
    return jnp.sum(matmul(y, w[1], which == 1) ** 2)

  for which, path in enumerate(("first", "second")):
    error = jnp.linalg.norm(jax.grad(rounded)(w, x, which) - exact) / jnp.linalg.norm(exact)
    # The backward matmuls and the results are rounded too.
    assert 0.4 * error < errors[path] < 4 * error


def test_a_loop_of_which_jax_has_no_backward_pass():
  def loss(w, x):
    with jax.named_scope("in_loop"):
      scale = jax.lax.while_loop(lambda s: s < 4, lambda s: s + 1 + 0 * jnp.sum(x @ x.T), 0.0)
    with jax.named_scope("layer"):
      return jnp.sum((x @ w) ** 2) * jax.lax.stop_gradient(scale)

  assert alone(loss, jnp.full((4, 4), 1.234), jnp.full((2, 4), 0.777))["layer"] > 1e-4


def test_a_module_whose_matmul_overflows_has_an_infinite_error():
  def loss(w, x):
    with jax.named_scope("hot"):  # Its operand does.
      y = (x * 1e4) @ w
    with jax.named_scope("warm"):  # No matmul.
      y = y / 1e4 * 1e6 / 1e6
    with jax.named_scope("cold"):
      return jnp.mean(y @ w)

  args = jnp.eye(4), jnp.full((2, 4), 30.0)
  assert math.isinf(alone(loss, *args, dtype="float16")["hot"])
  assert alone(loss, *args, dtype="float16")["cold"] < 0.01
  assert alone(loss, *args)["hot"] < 0.1
  # The largest number is one, and so is its gradient; the sum of four of them is no matmul.
  largest = alone(
    lambda w, x: jnp.sum(x @ w), jnp.eye(4), jnp.full((1, 4), 65504.0), dtype="float16"
  )
  assert largest[""] == 0


def test_a_gradient_without_a_derivative_is_said_to_have_none():
  @jax.custom_vjp
  def measured(y):
    return y

  def backward(kept, bar):
    # The host computes it, and JAX knows no derivative of that.
    return (jax.pure_callback(np.sin, jax.ShapeDtypeStruct(bar.shape, bar.dtype), kept) * bar,)

  measured.defvjp(lambda y: (y, y), backward)

  def loss(w, x):
    return layers(w, measured(x @ w[0]))

  w = jax.random.normal(jax.random.key(0), (2, 4, 4))
  with pytest.warns(UserWarning, match=r"modules with few FLOPs are tried first"):
    errors = alone(loss, w, jnp.ones((2, 4)))
  assert set(errors.values()) == {1.0}


@pytest.mark.parametrize(
  ("path", "expected"),
  [
    ("head", "**/head"),
    ("Net/a", "**/a"),
    ("Net/a/b", "**/a/b"),
    ("Net/b", "**/Net/b"),
    ("Net/c(1)", re.compile(re.escape("Net/c(1)"))),
    ("", ""),
    ("Net/rnn/cell/hi", "**/hi"),
  ],
)
def test_a_selector_selects_one_path(path, expected):
  found = selector(path, SCOPES)
  assert found == expected
  rule = mpjax.Rule("float32", path=found)
  assert [scope for scope in SCOPES if rule.matches(None, scope)] == [path]
