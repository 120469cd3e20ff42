"""Situations in which a policy must reach every product: modules as people write them.

None of these modules names a dtype. `SITUATIONS` holds for each the module, its inputs, and how it
is run on bound variables (`model.apply(variables, *inputs)`, unless said otherwise).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import normal

X = normal(3, 4, 8)
INIT = nn.initializers.normal(0.3)
RNGS = {"dropout": jax.random.key(2)}


def apply(model: Any, variables: Any, *inputs: Any) -> Any:
  return model.apply(variables, *inputs, rngs=RNGS)


class Situation(NamedTuple):
  """One module and how it is run.

  Fields:
    make: returns the module.
    run: `(model, variables, *inputs) -> outputs`.
    inputs: floating arrays, which gradients are taken of too.
    backward: whether it has a gradient (a while loop has none).
  """

  make: Callable[[], nn.Module]
  run: Callable[..., Any] = apply
  inputs: tuple[Any, ...] = (X,)
  backward: bool = True


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


class RawCompact(nn.Module):
  """Raw parameters in a tree, an all-zero start, a convolution from `jax.lax`."""

  @nn.compact
  def __call__(self, x):
    tree = self.param("tree", lambda key: {"a": INIT(key, (8, 8)), "b": [INIT(key, (8,))]})
    kernel = self.param("kernel", INIT, (3, 8, 4))
    x = jnp.tanh(x @ tree["a"] + tree["b"][0])
    return jax.lax.conv_general_dilated(
      x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


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

SITUATIONS: dict[str, Situation] = {
  "scan": Situation(Scan),
  "scan_remat": Situation(lambda: Scan(remat=True)),
  "scan_of_a_function": Situation(ScanBody),
  "remat": Situation(lambda: Lifted(nn.remat)),
  "jit": Situation(lambda: Lifted(nn.jit)),
  "vmap": Situation(lambda: Lifted(_VMAP)),
  "inner_jit": Situation(Block, inner_jit),
  "lax_loop": Situation(Block, own_loop),
  "cond_and_switch": Situation(Conditional),
  "while_loop": Situation(WhileLoop, backward=False),
  "share_scope": Situation(LowRank),
  "raw_in_compact": Situation(RawCompact),
  "after_a_child_that_promotes": Situation(MultipliesWhatPromotes),
}
