"""Attention with masks and biases is finite under a policy wherever it is without one.

Masks are booleans or floats, or made of numbers that float16 or bfloat16 cannot hold. If a row is
masked entirely, its softmax is uniform for a finite number, and NaN for -inf.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

import mpjax

pytestmark = pytest.mark.standard_promotion

Arrays = Mapping[str, Any]

LEAST = np.finfo(np.float32).min
PARAMS = {
  "w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 3, "float32"),
  "bias": jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)) / 3, "float32"),
}
X = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
SEEN = np.stack([np.tri(4, dtype=bool), np.eye(4, dtype=bool)])
IS_HIDDEN = np.arange(4)[:, None] == 2

# What is added to the scores.


def filled(seen: Any, bias: Any, number: Any) -> Any:
  return jnp.where(seen, bias, number)


def in_a_loop(seen: Any, bias: Any, number: Any) -> Any:
  body = lambda carry, _: (jnp.where(seen, carry, number), None)  # noqa: E731
  return lax.scan(body, jnp.broadcast_to(bias, seen.shape), length=2)[0]


def in_a_branch(seen: Any, bias: Any, number: Any) -> Any:
  bias = jnp.broadcast_to(bias, seen.shape)
  return lax.cond(seen[0, 0, 0], lambda: jnp.where(seen, bias, number), lambda: bias)


MASKS: dict[str, Callable[[Arrays, Any, Any], Any]] = {
  # name: a function of the inputs, a bias and a number.
  "selected": lambda i, b, x: filled(i["seen"], b, x),
  "added": lambda i, b, x: b + filled(i["seen"], 0.0, x),
  "subtracted": lambda i, b, x: b - filled(i["seen"], 0.0, -x),
  "multiplied": lambda i, b, x: b + (1 - i["seen"].astype("float32")) * x,
  "multiplied floats": lambda i, b, x: b + (1 - i["weights"]) * x,
  "divided": lambda i, b, x: filled(i["seen"], b, x) / (b + 2),
  "logarithm": lambda i, b, x: b + jnp.maximum(jnp.log(i["weights"]), x),
  "clipped": lambda i, b, x: jnp.clip(filled(i["seen"], b, -jnp.inf), x),
  "negated": lambda i, b, x: -filled(i["seen"], -b, -x),
  "scaled": lambda i, b, x: filled(i["seen"], b, x) * (0.5 + b[0, 0] ** 2) / 3.0,
  "moved": lambda i, b, x: jnp.concatenate(
    [filled(i["seen"], b, x)[:, :2], b[None, 2:] + X[:, 2:, :4]], 1
  ),
  "written": lambda i, b, x: filled(i["seen"], b.at[1].set(x), x),
  "with noise": lambda i, b, x: (
    b + filled(i["seen"], jax.random.normal(jax.random.key(0), (4, 4)), x)
  ),
  "in a loop": lambda i, b, x: in_a_loop(i["seen"], b, x),
  "in a branch": lambda i, b, x: in_a_branch(i["seen"], b, x),
  "an input": lambda i, b, x: b + i["mask"],
}

ORDERS: dict[str, Callable[[Any, Any, Any], Any]] = {
  # name: a function of scores, a mask with a bias, and another bias.
  "mask": lambda s, m, b: s + m,
  "mask in front": lambda s, m, b: m + s,
  "mask, bias": lambda s, m, b: (s + m) + b,
  "bias, mask": lambda s, m, b: (s + b) + m,
  "both at once": lambda s, m, b: s + (b + m),
  "minus": lambda s, m, b: (0.5 * s + b) - (-m),
  "scaled": lambda s, m, b: (s + m + b) / 2.0,
}


def in_branch(fun: Any) -> Any:
  return lambda s, m, b: lax.cond(s[0, 0, 0] < 99, fun, lambda s, m, b: s, s, m, b)


def with_constants(fun: Any) -> Any:
  return lambda s, m, b: lax.scan(lambda c, _: (c, fun(s, m, b)), 0, length=1)[1][0]


def with_carry(fun: Any) -> Any:
  return lambda s, m, b: lax.scan(lambda m, _: (m, fun(s, m, b)), m, length=2)[1][1]


def with_slices(fun: Any) -> Any:
  return lambda s, m, b: lax.map(lambda each: fun(*each, b), (s, jnp.broadcast_to(m, s.shape)))


AROUND: dict[str, Callable[[Any], Any]] = {
  "nothing": lambda fun: fun,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "cond": in_branch,
  "scan, constants": with_constants,
  "scan, carry": with_carry,
  "scan, slices": with_slices,
}


@dataclasses.dataclass(frozen=True)
class Attention:
  """One attention; `mask`, `order` and `around` are names in the tables above."""

  mask: str
  number: float
  order: str
  around: str
  # Whether the bias is a parameter, an input or closed over.
  bias: str
  hides_rows: bool

  @property
  def inputs(self) -> Arrays:
    seen = SEEN & ~IS_HIDDEN if self.hides_rows else SEEN
    number = np.float32(self.number)
    mask = np.where(seen, np.float32(0), number)
    given = {"x": X, "seen": seen, "weights": seen.astype("float32"), "mask": mask}
    return {name: jnp.asarray(x) for name, x in {**given, "bias": PARAMS["bias"]}.items()}

  def __call__(self, params: Arrays, inputs: Arrays) -> Any:
    x, w = inputs["x"], params["w"]
    each = {"parameter": params["bias"], "input": inputs["bias"], "closed over": PARAMS["bias"]}
    bias = each[self.bias]
    mask = MASKS[self.mask](inputs, bias, np.float32(self.number))
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    scores = AROUND[self.around](ORDERS[self.order])(scores, mask, bias)
    return jax.nn.softmax(scores) @ x @ w


ATTENTIONS = st.builds(
  Attention,
  mask=st.sampled_from(sorted(MASKS)),
  number=st.sampled_from((float(LEAST), -1e9, -1e4, -np.inf)),
  order=st.sampled_from(sorted(ORDERS)),
  around=st.sampled_from(sorted(AROUND)),
  bias=st.sampled_from(("parameter", "input", "closed over")),
  hides_rows=st.booleans(),
)

# How it is called under a policy.


class Linen(nn.Module):
  fun: Any

  @nn.compact
  def __call__(self, inputs: Arrays) -> Any:
    zeros = nn.initializers.zeros
    params = {name: self.param(name, zeros, x.shape) for name, x in PARAMS.items()}
    return self.fun(params, inputs)


class Nnx(nnx.Module):
  def __init__(self, fun: Any, params: Arrays) -> None:
    self.fun = fun
    self.w, self.bias = (nnx.Param(params[name]) for name in ("w", "bias"))

  def __call__(self, inputs: Arrays) -> Any:
    return self.fun({"w": self.w[...], "bias": self.bias[...]}, inputs)


WAYS: dict[str, Callable[[Any, str], Any]] = {
  "Linen": lambda fun, policy: (
    lambda params, inputs: mpjax.with_policy(Linen(fun), policy).apply({"params": params}, inputs)
  ),
  "NNX": lambda fun, policy: (
    lambda params, inputs: mpjax.with_policy(Nnx(fun, params), policy)(inputs)
  ),
  "autocast": lambda fun, policy: mpjax.autocast(fun, policy),
  "autocast, inputs": lambda fun, policy: mpjax.autocast(fun, policy, data_argnums=1),
}


def finite(fun: Any, inputs: Arrays) -> Any:
  """Returns which results are finite, and whether all gradients are."""

  def loss(params: Arrays) -> Any:
    out = fun(params, inputs)
    return jnp.mean(jnp.square(out)), out

  grads, out = jax.grad(loss, has_aux=True)(PARAMS)
  return np.isfinite(out), all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@given(attention=ATTENTIONS, way=st.sampled_from(sorted(WAYS)))
def test_attention_is_finite_where_it_is_without_a_policy(policy, attention, way):
  # The values of an argument are not known. See docs/limits.md.
  assume(way != "autocast" or attention.mask != "an input")
  out, grads = finite(WAYS[way](attention, policy), attention.inputs)
  plain, plain_grads = finite(attention, attention.inputs)
  assert (out >= plain).all()
  assert grads >= plain_grads
