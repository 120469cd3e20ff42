"""Situations in which a policy must reach every product: modules as people write them.

None of these modules names a dtype. `SITUATIONS` holds for each what makes the module, and how it
is run: `(model, variables, x) -> outputs`.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import normal

X = normal(3, 4, 8)
INIT = nn.initializers.normal(0.3)
RNGS = {"dropout": jax.random.key(2)}


def apply(model: Any, variables: Any, x: Any) -> Any:
  return model.apply(variables, x, rngs=RNGS)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    y = nn.relu(nn.Dense(8)(nn.LayerNorm()(x)))
    return x + y @ self.param("out", INIT, (8, 8)), None


class Scan(nn.Module):
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block, prevent_cse=False) if self.remat else Block
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return stack()(x, None)[0]


class ScanBody(nn.Module):
  """A function is lifted, not a class: shared parameters, and a carry that starts in float32."""

  @nn.compact
  def __call__(self, x):
    def step(block, carry, row):
      carry = block(carry + row)[0]
      return carry, carry

    scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
    return scan(Block(), jnp.zeros(x[:, 0].shape), x)[1]


class Lifted(nn.Module):
  """A class under a transform given from outside."""

  lift: Callable[..., Any]

  @nn.compact
  def __call__(self, x):
    return self.lift(Block)()(x)[0]


class Conditional(nn.Module):
  @nn.compact
  def __call__(self, x):
    one, two = nn.Dense(8, name="one"), nn.Dense(8, name="two")
    if self.is_initializing():
      one(x)
      two(x)
    x = nn.cond(x.sum() > 0, lambda m, x: one(x), lambda m, x: jnp.zeros(x.shape), self, x)
    branches = [lambda m, x: one(x), lambda m, x: nn.relu(two(x)), lambda m, x: x]
    return nn.switch((x.sum() > 0).astype(int), branches, self, x)


class WhileLoop(nn.Module):
  @nn.compact
  def __call__(self, x):
    block = Block()
    if self.is_initializing():
      return block(x)[0]

    def more(module, carry):
      return (carry[0] < 3) & jnp.isfinite(carry[1]).all()

    def step(module, carry):
      return carry[0] + 1, block(carry[1])[0]

    return nn.while_loop(more, step, self, (0, x))[1]


class LowRank(nn.Module):
  """A Dense and an adapter beside it, in one scope."""

  def setup(self):
    self.base = nn.Dense(8)
    nn.share_scope(self, self.base)

  @nn.compact
  def __call__(self, x):
    low = self.param("low", INIT, (8, 2))
    return self.base(x) + x @ low @ self.param("high", INIT, (2, 8))


class Promotes(nn.Module):
  """Hands on float32, because of a NumPy scalar."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(8)(x) / np.sqrt(8)


class MultipliesWhatPromotes(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Promotes()(x) @ self.param("kernel", INIT, (8, 8))


def inner_jit(model: Any, variables: Any, x: Any) -> Any:
  return jax.jit(jax.checkpoint(lambda v, x: model.apply(v, x)[0]))(variables, x)


def own_loop(model: Any, variables: Any, x: Any) -> Any:
  """A loop of `jax.lax` around the model, with a float32 carry."""
  return jax.lax.fori_loop(0, 3, lambda _, x: model.apply(variables, x)[0].astype(x.dtype), x)


_VMAP = functools.partial(nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True})

SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
  "scan": (Scan, apply),
  "scan_remat": (lambda: Scan(remat=True), apply),
  "scan_of_a_function": (ScanBody, apply),
  "remat": (lambda: Lifted(nn.remat), apply),
  "jit": (lambda: Lifted(nn.jit), apply),
  "vmap": (lambda: Lifted(_VMAP), apply),
  "inner_jit": (Block, inner_jit),
  "lax_loop": (Block, own_loop),
  "cond_and_switch": (Conditional, apply),
  "while_loop": (WhileLoop, apply),
  "share_scope": (LowRank, apply),
  "after_a_child_that_promotes": (MultipliesWhatPromotes, apply),
}
