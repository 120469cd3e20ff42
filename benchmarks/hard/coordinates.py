"""Networks on coordinates, whose angles and derivatives magnify a rounding."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hard.program import PLAIN, Program, Style, mean_squared_error, normal, uniform


class FourierFeatures(nn.Module):
  """An image as a function of coordinates, with learned frequencies."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    frequencies = self.param("frequencies", nn.initializers.normal(5.0), (2, 32))
    angles = 2.0 * np.pi * (inputs["x"] @ frequencies)
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return self.style.mlp(features, 64, 64, 3)


class Siren(nn.Module):
  """Layers of sines. By hand the first layer is float32, the others return float32 sums."""

  style: Style = PLAIN
  omega: float = 30.0

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    first = nn.initializers.uniform(1.0)
    layer = nn.Dense(64, kernel_init=lambda *args: first(*args) - 0.5)
    h = layer(inputs["x"])
    for _ in range(2):
      h = jnp.sin(self.omega * h)
      init = nn.initializers.variance_scaling(2.0 / self.omega**2, "fan_in", "uniform")
      h = self.style.layer(64, wide=True, kernel_init=init)(h)
    return self.style.layer(1, wide=True)(jnp.sin(self.omega * h))


class Pinn(nn.Module):
  """The residual of Burgers' equation: first and second derivatives of a network."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    widths = (2, 32, 32, 1)
    init = nn.initializers.lecun_normal()
    pairs = list(itertools.pairwise(widths))
    kernels = [self.param(f"kernel_{i}", init, shape) for i, shape in enumerate(pairs)]
    biases = [self.param(f"bias_{i}", nn.initializers.normal(0.3), (w,)) for i, (_, w) in
              enumerate(pairs)]  # fmt: skip

    def u(x: Any, t: Any) -> Any:
      h = jnp.concatenate([x, t], axis=-1) @ kernels[0] + biases[0]
      for kernel, bias in zip(kernels[1:], biases[1:], strict=True):
        h = self.style.dot_wide(jnp.tanh(h), kernel) + bias
      return h

    x, t = inputs["x"], inputs["t"]
    ones = jnp.ones_like(x)
    value, u_t = jax.jvp(functools.partial(u, x), (t,), (ones,))

    def u_x(x: Any) -> Any:
      return jax.jvp(lambda x: u(x, t), (x,), (ones,))[1]

    slope, u_xx = jax.jvp(u_x, (x,), (ones,))
    return {"residual": u_t + value * slope - 0.05 * u_xx, "value": value}


def _grid(rng: np.random.Generator, outputs: int) -> dict[str, np.ndarray]:
  x = uniform(rng, 128, 2)
  waves = np.sin(3.0 * x @ normal(rng, 2, outputs) + normal(rng, outputs))
  return {"x": x, "y": waves.astype(np.float32)}


def _collocation(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {"x": uniform(rng, 128, 1), "t": uniform(rng, 128, 1, low=0.0)}


def _burgers(outputs: Any, inputs: Any) -> Any:
  start = outputs["value"] + jnp.sin(np.pi * inputs["x"])
  return jnp.mean(jnp.square(outputs["residual"])) + jnp.mean(jnp.square(start))


PROGRAMS = {
  "Fourier features": Program(
    FourierFeatures, functools.partial(_grid, outputs=3), mean_squared_error
  ),
  "SIREN": Program(Siren, functools.partial(_grid, outputs=1), mean_squared_error),
  "PINN (Burgers)": Program(Pinn, _collocation, _burgers),
}
