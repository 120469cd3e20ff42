"""Points, cameras and molecules: differences of coordinates."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hard.program import (
  PLAIN,
  Program,
  Style,
  mean_squared_error,
  normal,
  output_itself,
  squared_distances,
)


class Egnn(nn.Module):
  """An equivariant graph network: messages summed by node, coordinates moved along edges.

  By hand coordinates, distances and sums over edges are float32.
  """

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    style, count = self.style, inputs["x"].shape[0]
    x, senders, receivers = inputs["x"], inputs["senders"], inputs["receivers"]
    h = style.layer(32)(inputs["atoms"])
    for _ in range(3):
      difference = x[receivers] - x[senders]
      squares = jnp.sum(difference * difference, axis=-1, keepdims=True)
      edges = jnp.concatenate([h[receivers], h[senders], style.low(squares)], axis=-1)
      messages = nn.silu(style.layer(32)(nn.silu(style.layer(32)(edges))))
      weights = style.layer(1, wide=True)(nn.silu(style.layer(32)(messages)))
      moves = difference / (jnp.sqrt(squares + 1e-8) + 1.0) * weights
      x = x + jax.ops.segment_sum(moves, receivers, count) / 8.0
      summed = jax.ops.segment_sum(style.wide(messages), receivers, count) / 8.0
      h = h + style.mlp(jnp.concatenate([style.wide(h), summed], axis=-1), 32, 32, wide=False)
    energy = jnp.sum(style.layer(1, wide=True)(h))
    return {"x": x, "energy": energy / count}


class Camera(nn.Module):
  """Points that a network displaces, rotated, and projected to pixels in float32."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    points = inputs["points"]
    features = jnp.concatenate([points, inputs["features"]], axis=-1)
    points = points + 0.1 * self.style.mlp(features, 64, 64, 3)
    angles = self.param("angles", nn.initializers.normal(0.3), (3,))
    shift = self.param("shift", nn.initializers.normal(0.1), (3,))
    zero = jnp.zeros(())
    x, y, z = angles
    skew = jnp.stack([zero, -z, y, z, zero, -x, -y, x, zero]).reshape(3, 3)
    size = jnp.sqrt(jnp.sum(angles * angles) + 1e-12)
    sine, cosine = jnp.sin(size) / size, (1.0 - jnp.cos(size)) / size**2
    rotation = jnp.eye(3) + sine * skew + cosine * (skew @ skew)
    seen = points @ rotation.T + shift + jnp.asarray([0.0, 0.0, 5.0])
    return 500.0 * seen[:, :2] / seen[:, 2:] + 320.0


class Chamfer(nn.Module):
  """The distance of a generated point cloud to a given one, on expanded distances."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    codes = jnp.concatenate([inputs["grid"], inputs["code"]], axis=-1)
    made = self.style.wide(self.style.mlp(codes, 64, 64, 3))
    distances = squared_distances(made, inputs["cloud"])
    there, back = jnp.min(distances, axis=0), jnp.min(distances, axis=1)
    return jnp.mean(there) + jnp.mean(back)


def _molecule(rng: np.random.Generator) -> dict[str, np.ndarray]:
  pairs = np.array([(i, j) for i in range(12) for j in range(12) if i != j], np.int32)
  return {
    "x": normal(rng, 12, 3),
    "atoms": np.eye(4, dtype=np.float32)[rng.integers(0, 4, 12)],
    "senders": pairs[:, 0],
    "receivers": pairs[:, 1],
    "y": normal(rng, 12, 3),
  }


def _molecule_loss(outputs: Any, inputs: Any) -> Any:
  return mean_squared_error(outputs["x"], inputs) + jnp.square(outputs["energy"] - 1.0)


def _scene(rng: np.random.Generator) -> dict[str, np.ndarray]:
  points = normal(rng, 64, 3)
  pixels = 500.0 * points[:, :2] / (points[:, 2:] + 5.0) + 320.0
  return {"points": points, "features": normal(rng, 64, 13), "y": pixels + 5 * normal(rng, 64, 2)}


def _reprojection(outputs: Any, inputs: Any) -> Any:
  return jnp.mean(jnp.sqrt(jnp.sum(jnp.square(outputs - inputs["y"]), axis=-1) + 1.0))


def _clouds(rng: np.random.Generator) -> dict[str, np.ndarray]:
  cloud = normal(rng, 128, 3)
  cloud /= np.linalg.norm(cloud, axis=-1, keepdims=True)
  return {"grid": normal(rng, 128, 3), "code": normal(rng, 128, 13), "cloud": cloud}


PROGRAMS = {
  "EGNN": Program(Egnn, _molecule, _molecule_loss),
  "camera projection": Program(Camera, _scene, _reprojection),
  "Chamfer distance": Program(Chamfer, _clouds, output_itself),
}
