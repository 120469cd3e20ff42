"""Linear algebra and iterations inside of a model."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hard.program import (
  PLAIN,
  Program,
  Style,
  cross_entropy,
  mean_squared_error,
  normal,
  output_itself,
  squared_distances,
)


class Kalman(nn.Module):
  """A filter with learned dynamics over encoded observations; returns its likelihood.

  By hand the matmuls have low-precision operands and float32 sums. The solve is float32.
  """

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    dot = self.style.dot_wide
    observations = self.style.mlp(inputs["x"], 32, 4)
    state, eye = 8, jnp.eye(8)
    move = 0.9 * eye + self.param("move", nn.initializers.normal(0.1), (state, state))
    look = self.param("look", nn.initializers.lecun_normal(), (4, state))
    drift = jnp.diag(jnp.exp(self.param("drift", nn.initializers.constant(-2.0), (state,))))
    noise = jnp.diag(jnp.exp(self.param("noise", nn.initializers.constant(-1.0), (4,))))

    def step(carry: Any, observed: Any) -> Any:
      mean, covariance = carry
      mean = dot(mean, move.T)
      covariance = dot(dot(move, covariance), move.T) + drift
      crossed = dot(look, covariance)
      spread = dot(crossed, look.T) + noise
      gain = jnp.linalg.solve(spread, crossed).T
      innovation = observed - dot(mean, look.T)
      whitened = jnp.linalg.solve(spread, innovation.T).T
      log_det = jnp.linalg.slogdet(spread)[1]
      loss = 0.5 * jnp.mean(jnp.sum(innovation * whitened, axis=-1) + log_det)
      mean = mean + dot(innovation, gain.T)
      return (mean, dot(eye - dot(gain, look), covariance)), loss

    start = (jnp.zeros((inputs["x"].shape[1], state)), eye)
    _, losses = jax.lax.scan(step, start, observations)
    return jnp.mean(losses)


class GaussianProcess(nn.Module):
  """A deep kernel on expanded distances; returns the marginal likelihood."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    z = self.style.wide(self.style.mlp(inputs["x"], 32, 8, wide=False))
    noise = jnp.exp(self.param("noise", nn.initializers.constant(-2.0), ()))
    length = jnp.exp(self.param("length", nn.initializers.constant(0.5), ()))
    distances = squared_distances(z, z)
    kernel = jnp.exp(-0.5 * distances / length**2)
    factor = jnp.linalg.cholesky(kernel + noise * jnp.eye(z.shape[0]))
    white = jax.scipy.linalg.solve_triangular(factor, inputs["y"], lower=True)
    log_det = jnp.sum(jnp.log(jnp.diag(factor)))
    return (0.5 * jnp.sum(white * white) + log_det) / z.shape[0]


class Ridge(nn.Module):
  """Ridge regression on features of a support set, evaluated on a query set."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    z = self.style.wide(self.style.mlp(inputs["x"], 64, 16, wide=False))
    support, query = jnp.split(z, 2)
    strength = jnp.exp(self.param("strength", nn.initializers.constant(-1.0), ()))

    def fit(support: Any, y: Any, strength: Any) -> Any:
      gram = support.T @ support + strength * jnp.eye(support.shape[-1])
      return jnp.linalg.solve(gram, support.T @ y)

    weights = fit(support, inputs["support"], strength)
    return self.style.dot_wide(query, weights)


class Whitening(nn.Module):
  """Features whitened by the Cholesky factor of their covariance, then a classifier."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    z = self.style.wide(self.style.mlp(inputs["x"], 64, 16, wide=False))
    z = z - jnp.mean(z, axis=0)
    covariance = z.T @ z / z.shape[0]
    factor = jnp.linalg.cholesky(covariance + 1e-3 * jnp.eye(z.shape[-1]))
    white = jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T
    return self.style.mlp(white, 64, 10)


class NeuralOde(nn.Module):
  """Eight steps of the classic Runge-Kutta method. By hand the state is float32."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    init = nn.initializers.lecun_normal()
    first = self.param("first", init, (16, 64))
    second = self.param("second", init, (64, 16))
    bias = self.param("bias", nn.initializers.normal(0.3), (64,))

    def slope(z: Any, t: Any) -> Any:
      h = jnp.tanh(self.style.dot_wide(z, first) + t * bias)
      return self.style.dot_wide(h, second)

    def step(z: Any, t: Any) -> Any:
      size = 0.125
      k_1 = slope(z, t)
      k_2 = slope(z + 0.5 * size * k_1, t + 0.5 * size)
      k_3 = slope(z + 0.5 * size * k_2, t + 0.5 * size)
      k_4 = slope(z + size * k_3, t + size)
      return z + size / 6.0 * (k_1 + 2.0 * k_2 + 2.0 * k_3 + k_4), None

    z, _ = jax.lax.scan(step, inputs["x"], jnp.arange(8) / 8.0)
    return z


class DeepEquilibrium(nn.Module):
  """A fixed point by iteration to a tolerance, then eight steps that are differentiated."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x = self.style.layer(32, wide=True)(inputs["x"])
    kernel = self.param("kernel", nn.initializers.variance_scaling(0.3, "fan_in", "normal"),
                        (32, 32))  # fmt: skip

    def update(z: Any) -> Any:
      return jnp.tanh(self.style.dot_wide(z, kernel) + x)

    def unfinished(carry: Any) -> Any:
      old, new, count = carry
      change = jnp.sqrt(jnp.sum(jnp.square(new - old)))
      return (change > 1e-3 * jnp.sqrt(jnp.sum(jnp.square(new)))) & (count < 50)

    start = (jnp.zeros_like(x), update(jnp.zeros_like(x)), 0)
    fixed = jax.lax.while_loop(
      unfinished, lambda c: (c[1], update(c[1]), c[2] + 1), jax.lax.stop_gradient(start)
    )[1]
    z = jax.lax.stop_gradient(fixed)
    for _ in range(8):
      z = update(z)
    return self.style.layer(4, wide=True)(z)


class SpectralNorm(nn.Module):
  """Layers divided by their largest singular value, from power iterations in float32."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    h = inputs["x"]
    for i, width in enumerate((64, 64, 1)):
      kernel = self.param(f"kernel_{i}", nn.initializers.lecun_normal(), (h.shape[-1], width))
      v = jnp.ones((width,)) / np.sqrt(width)
      for _ in range(5):
        u = kernel @ v
        u = u / jnp.sqrt(jnp.sum(u * u) + 1e-12)
        v = kernel.T @ u
        v = v / jnp.sqrt(jnp.sum(v * v) + 1e-12)
      u, v = jax.lax.stop_gradient((u, v))
      sigma = u @ (kernel @ v)
      h = self.style.dot(h, kernel / sigma) if width > 1 else self.style.dot_wide(h, kernel / sigma)
      h = nn.leaky_relu(h, 0.2) if width > 1 else h
    return h


def _regression(rng: np.random.Generator, outputs: int, rows: int = 64) -> dict[str, np.ndarray]:
  x = normal(rng, rows, 16)
  y = np.tanh(x @ normal(rng, 16, outputs) / 4.0) + 0.1 * normal(rng, rows, outputs)
  return {"x": x, "y": y.astype(np.float32)}


def _episode(rng: np.random.Generator) -> dict[str, np.ndarray]:
  both = _regression(rng, 4, rows=96)
  support, query = np.split(both["y"], 2)
  return {"x": both["x"], "support": support, "y": query}


def _labelled(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {"x": normal(rng, 128, 16), "labels": rng.integers(0, 10, 128, np.int32)}


def _hinge(outputs: Any, inputs: Any) -> Any:
  return jnp.mean(nn.relu(1.0 - outputs * jnp.sign(inputs["y"])))


PROGRAMS = {
  "Kalman filter": Program(Kalman, lambda rng: {"x": normal(rng, 12, 16, 6)}, output_itself),
  "Gaussian process": Program(
    GaussianProcess, functools.partial(_regression, outputs=1), output_itself
  ),
  "ridge regression": Program(Ridge, _episode, mean_squared_error),
  "whitening": Program(Whitening, _labelled, lambda out, x: cross_entropy(out, x["labels"])),
  "neural ODE": Program(NeuralOde, functools.partial(_regression, outputs=16), mean_squared_error),
  "deep equilibrium": Program(
    DeepEquilibrium, functools.partial(_regression, outputs=4), mean_squared_error
  ),
  "spectral normalisation": Program(
    SpectralNorm, functools.partial(_regression, outputs=1), _hinge
  ),
}
