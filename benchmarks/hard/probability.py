"""Densities and couplings: exponentials, log-determinants, logarithms of sums."""

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
  normal,
  output_itself,
  squared_distances,
)


class RealNvp(nn.Module):
  """Six affine couplings; returns the negative log-likelihood."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x, log_det = inputs["x"], 0.0
    for _ in range(6):
      kept, moved = jnp.split(x, 2, axis=-1)
      both = self.style.mlp(kept, 32, 2 * moved.shape[-1])
      log_scale, shift = jnp.split(both, 2, axis=-1)
      log_scale = jnp.tanh(log_scale)
      log_det = log_det + jnp.sum(log_scale, axis=-1)
      x = jnp.concatenate([moved * jnp.exp(log_scale) + shift, kept], axis=-1)
    return jnp.mean(0.5 * jnp.sum(x * x, axis=-1) - log_det)


class Vae(nn.Module):
  """An encoder of mean and log-variance, and a decoder of logits."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    h = nn.gelu(self.style.layer(64)(inputs["x"]))
    mean, log_variance = (self.style.layer(8, wide=True)(h) for _ in range(2))
    z = mean + jnp.exp(0.5 * log_variance) * inputs["noise"]
    return {
      "logits": self.style.mlp(z, 64, inputs["x"].shape[-1]),
      "mean": mean,
      "log_variance": log_variance,
    }


class MixtureDensity(nn.Module):
  """The parameters of a mixture of five Gaussians in four dimensions."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    h = nn.gelu(self.style.layer(64)(inputs["x"]))
    h = nn.gelu(self.style.layer(64)(h))
    return {
      "weights": self.style.layer(5, wide=True)(h),
      "means": self.style.layer(20, wide=True)(h).reshape(-1, 5, 4),
      "log_deviations": self.style.layer(20, wide=True)(h).reshape(-1, 5, 4),
    }


class Contrastive(nn.Module):
  """Similarities of two normalised towers with a learned temperature, as in CLIP."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    towers = []
    for name in ("x", "y"):
      z = self.style.wide(self.style.mlp(inputs[name], 64, 32))
      towers.append(z * jax.lax.rsqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-8))
    temperature = self.param("temperature", nn.initializers.constant(2.5), ())
    return self.style.dot_wide(towers[0], towers[1].T) * jnp.exp(temperature)


class Sinkhorn(nn.Module):
  """The entropic transport cost of two embedded sets, after 20 iterations."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x, y = (self.style.wide(self.style.mlp(inputs[k], 32, 8, wide=False)) for k in ("x", "y"))
    cost = squared_distances(x, y)
    kernel = -cost / 2.0

    def step(columns: Any, _: Any) -> tuple[Any, Any]:
      rows = -jax.nn.logsumexp(kernel + columns, axis=1)
      return -jax.nn.logsumexp(kernel + rows[:, None], axis=0), rows

    columns, all_rows = jax.lax.scan(step, jnp.zeros(cost.shape[1]), None, length=20)
    rows = all_rows[-1]
    plan = jnp.exp(kernel + rows[:, None] + columns)
    return jnp.sum(plan * cost) / cost.shape[0]


class Crf(nn.Module):
  """The negative log-likelihood of a chain, by the forward algorithm."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    labels = inputs["labels"]
    emissions = self.style.mlp(inputs["x"], 64, 8)
    transitions = self.param("transitions", nn.initializers.normal(0.5), (8, 8))

    def step(alpha: Any, emission: Any) -> tuple[Any, None]:
      scores = alpha[:, :, None] + transitions + emission[:, None]
      return jax.nn.logsumexp(scores, axis=1), None

    by_time = jnp.moveaxis(emissions, 1, 0)
    alpha, _ = jax.lax.scan(step, by_time[0], by_time[1:])
    path = jnp.sum(jnp.take_along_axis(emissions, labels[..., None], axis=-1)[..., 0], axis=-1)
    path = path + jnp.sum(transitions[labels[:, :-1], labels[:, 1:]], axis=-1)
    return jnp.mean(jax.nn.logsumexp(alpha, axis=-1) - path)


def _evidence(outputs: Any, inputs: Any) -> Any:
  logits, mean, log_variance = (outputs[k] for k in ("logits", "mean", "log_variance"))
  losses = jax.nn.softplus(logits) - inputs["x"] * logits
  divergence = 0.5 * (mean * mean + jnp.exp(log_variance) - log_variance - 1.0)
  return jnp.mean(jnp.sum(losses, axis=-1) + jnp.sum(divergence, axis=-1))


def _mixture_loss(outputs: Any, inputs: Any) -> Any:
  log_deviations = outputs["log_deviations"]
  z = (inputs["y"][:, None] - outputs["means"]) * jnp.exp(-log_deviations)
  log_probs = -jnp.sum(0.5 * z * z + log_deviations, axis=-1)
  return -jnp.mean(jax.nn.logsumexp(log_probs + jax.nn.log_softmax(outputs["weights"]), axis=-1))


def _contrast(outputs: Any, inputs: Any) -> Any:
  labels = jnp.arange(inputs["x"].shape[0])
  return 0.5 * (cross_entropy(outputs, labels) + cross_entropy(outputs.T, labels))


def _two_sets(rng: np.random.Generator) -> dict[str, np.ndarray]:
  x = normal(rng, 48, 16)
  return {"x": x, "y": x + 0.5 * normal(rng, 48, 16)}


PROGRAMS = {
  "RealNVP": Program(RealNvp, lambda rng: {"x": normal(rng, 64, 8)}, output_itself, scale=1.0),
  "VAE": Program(
    Vae,
    lambda rng: {
      "x": (normal(rng, 64, 32) > 0).astype(np.float32),
      "noise": normal(rng, 64, 8),
    },
    _evidence,
  ),
  "mixture density network": Program(
    MixtureDensity,
    lambda rng: {"x": normal(rng, 64, 16), "y": normal(rng, 64, 4)},
    _mixture_loss,
  ),
  "contrastive loss": Program(Contrastive, _two_sets, _contrast),
  "Sinkhorn": Program(Sinkhorn, _two_sets, output_itself),
  "CRF": Program(
    Crf,
    lambda rng: {
      "x": normal(rng, 8, 16, 16),
      "labels": rng.integers(0, 8, (8, 16), np.int32),
    },
    output_itself,
  ),
}
