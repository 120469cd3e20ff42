"""What the program of a model under a policy computes in, read from its jaxpr."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests import programs

HALF = ["bfloat16", "float16"]
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def operands(fun: Any, *args: Any) -> list[tuple[str, str]]:
  """Returns the dtypes of both operands of every product of a program."""
  return [p.dtypes for p in programs.products(jax.make_jaxpr(fun)(*args))]


def all_half(fun: Any, *args: Any, count: int | None = None, half: str = "bfloat16") -> None:
  """Asserts that a program has products, so many if it is said, and that all are in half."""
  found = operands(fun, *args)
  assert found
  assert count is None or len(found) == count
  assert all(dtypes == (half, half) for dtypes in found), found


def values_of(program: Any, *primitives: str) -> set[str]:
  """Returns the dtypes that primitives work on, in a program and all inside it."""
  return {
    str(eqn.invars[0].aval.dtype)
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name in primitives
  }


def text(fun: Any, *args: Any) -> str:
  """Returns the traced program as text, without the addresses that functions print."""
  return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(fun)(*args)))


def dtypes(tree: Any) -> Any:
  """Returns the tree of dtype names."""
  return jax.tree.map(lambda x: str(x.dtype), tree)


# Models with parameters of their own, read in three ways.


class RawCompact(nn.Module):
  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4))
    b = self.param("b", lambda key: jnp.ones(4))
    tree = self.param("tree", lambda key: {"u": jnp.ones((4, 2)), "n": jnp.arange(2)})
    assert tree["n"].dtype == jnp.int32
    return (x @ w + b) @ tree["u"]


class RawSetup(nn.Module):
  def setup(self):
    self.w = self.param("w", nn.initializers.lecun_normal(), (3, 4))
    self.variable_too = self.variable("params", "v", lambda: jnp.ones((4, 2)))

  def __call__(self, x):
    return x @ self.w @ self.variable_too.value


class RawGetVariable(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4))
    again = self.get_variable("params", "w")
    return x @ again @ self.variables["params"]["w"].T


RAW = {"compact": RawCompact(), "setup": RawSetup(), "get_variable": RawGetVariable()}
