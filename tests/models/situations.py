"""Situations in which a policy must reach every product: modules as people write them.

None of these modules names a dtype.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from tests.models.values import normal

X = normal(3, 4, 8)
INIT = nn.initializers.normal(0.3)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    y = nn.relu(nn.Dense(8)(nn.LayerNorm()(x)))
    return x + y @ self.param("out", INIT, (8, 8)), None


class ScanRemat(nn.Module):
  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block, prevent_cse=False)
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return stack()(x, None)[0]


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


SITUATIONS: dict[str, Callable[[], nn.Module]] = {
  "scan_remat": ScanRemat,
  "cond_and_switch": Conditional,
  "while_loop": WhileLoop,
}
