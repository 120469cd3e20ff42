"""Models around the functions of `stumbles`, as users write them, in Linen and in NNX.

`hand` is the dtype that their author would give to each layer by hand.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from tests.models import stumbles
from tests.models.parts import Part, dense, module
from tests.models.values import normal


def function(name: str) -> Part:
  """Returns a function as a module of its own."""
  return module(lambda m, *args: getattr(stumbles, name)(*args))


# Positions, times, coordinates.


def rotary(place: str) -> Part:
  """Rotated queries: in the method itself, in a helper, or in a module of their own."""

  def call(m, x):
    rotate = {
      "inline": stumbles.rope,
      "helper": lambda *args: m.helper(stumbles.rope, *args),
      "module": m.inner,
    }[place]
    return rotate(m.q(x), stumbles.angles(jnp.arange(x.shape[0]), 16))

  return module(call, q=dense(16, 16), inner=function("rope"))


def denoiser(hand: Any = None) -> Part:
  return module(
    lambda m, x, t: m.last(nn.silu(m.first(x) + m.time(t))),
    first=dense(8, 16, hand),
    last=dense(16, 8, hand),
    time=module(lambda m, t: m.dense(stumbles.sinusoid(t)), dense=dense(32, 16, hand)),
  )


def nerf(hand: Any = None) -> Part:
  return module(
    lambda m, *rays: m.last(nn.relu(m.first(m.encode(m.rays(*rays))))),
    rays=function("rays"),
    encode=function("encode"),
    first=dense(51, 16, hand),
    last=dense(16, 4, hand),
  )


# Probabilities.


def ends(end: str) -> Part:
  """A classifier that returns probabilities, by a softmax of some kind, or their logarithms."""

  def call(m, x):
    return {
      "by hand": stumbles.softmax,
      "by hand in a helper": lambda x: m.helper(stumbles.softmax, x),
      "by hand in a module": m.inner,
      "of JAX": jax.nn.softmax,
      "log_softmax": jax.nn.log_softmax,
    }[end](m.logits(x))

  return module(call, logits=dense(8, 10), inner=function("softmax"))


# Where products must stay in float32, or must not.


OWNER = module(lambda m, x: x @ m.w, {"w": (nn.initializers.normal(), (16, 4))})


class Reader(nn.Module):
  other: nn.Module

  def __call__(self, x):
    return x @ self.other.w


class NnxReader(nnx.Module):
  def __init__(self, other):
    self.other = other

  def __call__(self, x):
    return x @ self.other.w


def precisely(order: str) -> Part:
  """A layer called under the policy and without it, and its weight read by another module."""

  def call(m, x):
    calls = {"half": m.owner, "full": mpjax.full_precision(m.owner), "read": m.reader}
    found = {name: calls[name](x) for name in order.split()}
    return found["half"], found["full"], found["read"]

  reader = Part(lambda around: Reader(around.owner), lambda around, rngs: NnxReader(around.owner))
  return module(call, owner=OWNER, reader=reader)


def fused_block(kernel: str, hand: Any = None) -> Part:
  """Attention by a kernel that takes nothing but half."""

  def attend(m, x):
    q, k, v = (layer(x).reshape(*x.shape[:2], 2, 8) for layer in (m.q, m.k, m.v))
    return m.out(getattr(stumbles, kernel)(q, k, v).reshape(x.shape))

  layers = {name: dense(16, 16, hand) for name in ("q", "k", "v", "out")}
  return module(
    lambda m, x: m.last(x + m.attention(x)),
    attention=module(attend, **layers),
    last=dense(16, 4, hand),
  )


RAYS = normal(256, 3), normal(256, 3, seed=1), np.linspace(0, 4, 256, dtype=np.float32)
TIMES = np.linspace(0, 999, 1024, dtype=np.float32)

REACHED: dict[str, tuple[Part, tuple[Any, ...]]] = {
  "rotary": (rotary("helper"), (normal(4, 16),)),
  "denoiser": (denoiser(), (normal(1024, 8), TIMES)),
  "nerf": (nerf(), RAYS),
  "softmax": (ends("by hand"), (normal(2, 8),)),
}
"""Models with inputs for which structure is read."""
