"""The form of a hard program, and the casts that its author writes by hand."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Style:
  """The dtypes of a program: none in the plain version, `half` and float32 by hand.

  Fields:
    half: the compute dtype by hand. None leaves all casts out.
  """

  half: Any = None

  def low(self, x: Any) -> Any:
    """Return `x` in the compute dtype."""
    return x if self.half is None else x.astype(self.half)

  def wide(self, x: Any) -> Any:
    """Return `x` in float32."""
    return x if self.half is None else x.astype(jnp.float32)

  def dot(self, x: Any, w: Any) -> Any:
    """Return the low-precision matmul of `x` and `w`, rounded."""
    return self.low(x) @ self.low(w)

  def dot_wide(self, x: Any, w: Any) -> Any:
    """Return the low-precision matmul of `x` and `w` with its float32 sum."""
    if self.half is None:
      return x @ w
    return jnp.matmul(self.low(x), self.low(w), preferred_element_type=jnp.float32)

  def einsum(self, equation: str, *operands: Any) -> Any:
    """Return the einsum of low-precision operands, rounded."""
    return jnp.einsum(equation, *map(self.low, operands))

  def einsum_wide(self, equation: str, *operands: Any) -> Any:
    """Return the einsum of low-precision operands with its float32 sum."""
    if self.half is None:
      return jnp.einsum(equation, *operands)
    operands = tuple(map(self.low, operands))
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)

  def layer(self, features: int, *, wide: bool = False, **options: Any) -> nn.Dense:
    """Return a dense layer in the compute dtype; `wide` returns its float32 sum."""
    options = {"bias_init": nn.initializers.normal(0.1)} | options
    if wide and self.half is not None:
      options["dot_general"] = functools.partial(
        jax.lax.dot_general, preferred_element_type=jnp.float32
      )
    return nn.Dense(features, dtype=self.half, **options)

  def mlp(self, x: Any, *widths: int, wide: bool = True) -> Any:
    """Return dense layers with GELU in between; `wide` is about the last result."""
    for width in widths[:-1]:
      x = nn.gelu(self.layer(width)(x))
    return self.layer(widths[-1], wide=wide)(x)


PLAIN = Style()


class Program(NamedTuple):
  """One program: a module, the draw of its inputs, and a loss of its outputs.

  Fields:
    module: `style -> module`. The module takes a dictionary of inputs.
    draw: `rng -> inputs`, as NumPy arrays.
    loss: `(outputs, inputs) -> scalar`, without casts.
    scale: the loss scale in float16, a power of two.
  """

  module: Callable[[Style], nn.Module]
  draw: Callable[[np.random.Generator], dict[str, np.ndarray]]
  loss: Callable[[Any, dict[str, Any]], Any]
  scale: float = 2.0**8


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
  """Return standard normal numbers in float32."""
  return rng.normal(size=shape).astype(np.float32)


def uniform(rng: np.random.Generator, *shape: int, low: float = -1.0) -> np.ndarray:
  """Return numbers between `low` and 1 in float32."""
  return rng.uniform(low, 1.0, size=shape).astype(np.float32)


def mean_squared_error(outputs: Any, inputs: dict[str, Any]) -> Any:
  """Return the mean squared error against `inputs["y"]`."""
  return jnp.mean(jnp.square(outputs - inputs["y"]))


def output_itself(outputs: Any, inputs: dict[str, Any]) -> Any:
  """Return the output of a module that computes its own loss."""
  del inputs
  return outputs


def cross_entropy(logits: Any, labels: Any) -> Any:
  """Return the mean cross-entropy of `logits`."""
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def squared_distances(x: Any, y: Any) -> Any:
  """Return all squared distances of rows, in the expanded form."""
  squares = jnp.sum(x * x, axis=-1)[:, None] + jnp.sum(y * y, axis=-1)
  return squares - 2.0 * (x @ y.T)
