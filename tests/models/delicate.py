"""Functions in which rounding one value in the wrong place changes the whole result.

Each takes parameters, an input and the dtype of its matmuls, None for float32: with a dtype it is
what one writes by hand, matmuls of rounded operands and JAX's promotion for all else.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import normal

Function = Callable[[Any, Any, Any], Any]


class Case(NamedTuple):
  """One function with its parameters and its input."""

  fun: Function
  params: Mapping[str, Any]
  x: Any


CASES: dict[str, Case] = {}


def case(params: Mapping[str, Any], x: Any) -> Callable[[Function], Function]:
  """Notes a function under its name."""

  def noted(fun: Function) -> Function:
    CASES[fun.__name__] = Case(fun, params, x)
    return fun

  return noted


def mm(x: Any, w: Any, low: Any) -> Any:
  return x @ w if low is None else x.astype(low) @ w.astype(low)


def wide(x: Any) -> Any:
  return x.astype(jnp.float32)


def kernels(*names: str, inputs: int = 16, outputs: int = 8) -> dict[str, Any]:
  scale = np.float32(inputs**-0.5)
  return {name: normal(inputs, outputs, seed=i) * scale for i, name in enumerate(names)}


ROWS = normal(64, 16)
PLACES = normal(16, 3) + 100
STEPS = normal(2000, 8) + np.float32(0.5)


# Comparisons, and the choices that they make.


@case(kernels("router", outputs=32) | {"w": normal(32, 4, seed=3)}, ROWS)
def router_of_two_experts(p, x, low):
  weights = jax.nn.softmax(wide(mm(x, p["router"], low)))
  chosen = weights >= jax.lax.top_k(weights, 2)[0][:, -1:]
  return mm(jnp.where(chosen, weights, 0.0), p["w"], low)


@case(kernels("w", outputs=32), ROWS)
def nucleus(p, x, low):
  weights = jax.nn.softmax(wide(mm(x, p["w"], low)) * 3)
  ordered = jnp.sort(weights, -1)[:, ::-1]
  last = jnp.sum(jnp.cumsum(ordered, -1) < 0.9, -1, keepdims=True)
  kept = weights >= jnp.take_along_axis(ordered, last, -1)
  return jnp.where(kept, weights, 0.0)


# Differences of coordinates.


@case(kernels("w", inputs=3), PLACES)
def pairwise_differences(p, x, low):
  def moved(x):
    return x * 1.5 + 300

  places = moved(x)
  return mm((places[:, None] - places[None]).reshape(-1, 3), p["w"], low)


@case(kernels("w", "f", outputs=16), ROWS)
def residual_difference(p, x, low):
  h = mm(x, p["w"], low) * 100
  return h + 0.5 * jnp.tanh(mm(h, p["f"], low)) - h


@case(kernels("q"), normal(2048, 16))
def rotary_positions(p, x, low):
  angle = jnp.arange(2048.0)[:, None] * 10000.0 ** (-jnp.arange(4) / 4)[None]
  left, right = jnp.split(mm(x, p["q"], low), 2, -1)
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


@case(kernels("first", outputs=16) | kernels("last"), np.arange(1000, dtype=np.int32))
def embedded_timesteps(p, x, low):
  angle = x[:, None] * jnp.exp(-np.log(10000.0) * jnp.arange(8) / 8)[None]
  waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
  return mm(jax.nn.silu(mm(waves, p["first"], low)), p["last"], low)


@case(kernels("first", inputs=51, outputs=16) | kernels("last"), normal(256, 6))
def radiance_field(p, x, low):
  points = x[:, :3] + x[:, 3:] * jnp.linspace(0.0, 4.0, 256)[:, None]
  waves = [wave(points * 2.0**k) for k in range(8) for wave in (jnp.sin, jnp.cos)]
  hidden = mm(jnp.concatenate([points, *waves], -1), p["first"], low)
  return mm(jax.nn.relu(hidden), p["last"], low)


# Gradients that cancel, of a value that is read in several places.


@case(kernels("v", inputs=8, outputs=4) | {"out": normal(4, 4)}, STEPS[:500])
def states_and_next_states(p, x, low):
  h = wide(mm(x, p["v"], low))
  return jnp.cumsum(h[1:] - 0.99 * h[:-1], 0) + mm(h, p["out"], low)[:1]


# Matmuls beside linear algebra, whose condition number multiplies a rounding.


def _features(p, x, low):
  return wide(mm(jnp.tanh(mm(x, p["w"], low)), p["v"], low))


@case({"a": np.array([[1, 0.1], [-0.1, 1]], np.float32), "c": normal(3, 2)}, ROWS[:, :3])
def kalman_filter(p, x, low):
  def step(state, y):
    mean, spread = p["a"] @ state[0], p["a"] @ state[1] @ p["a"].T + 1e-3 * jnp.eye(2)
    gain = jnp.linalg.solve(p["c"] @ spread @ p["c"].T + 1e-3 * jnp.eye(3), p["c"] @ spread).T
    miss = y - p["c"] @ mean
    return (mean + gain @ miss, spread - gain @ p["c"] @ spread), miss

  return jax.lax.scan(step, (jnp.zeros(2), jnp.eye(2)), x)[1]


@case(kernels("w", outputs=16) | kernels("v", outputs=4), ROWS)
def whitened_features(p, x, low):
  h = _features(p, x, low)
  h = h - h.mean(0)
  sizes, axes = jnp.linalg.eigh(h.T @ h / len(h) + 1e-2 * jnp.eye(4))
  return h @ (axes * sizes**-0.5) @ axes.T


@case(kernels("w", outputs=16) | kernels("v"), ROWS / 4)
def kernel_before_cholesky(p, x, low):
  h = _features(p, x, low)
  half = (h * h).sum(-1) / 2
  return jnp.linalg.cholesky(jnp.exp(h @ h.T - half[:, None] - half) + 1e-2 * jnp.eye(64))


# Parameters that a rounding would change.

_BOXES = np.linspace(0, 511, 100, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)


@case({"anchors": _BOXES[:16, :3] * 1, **kernels("w", outputs=3), "out": normal(3, 8)}, ROWS[:1])
def anchors_apart(p, x, low):
  places = p["anchors"] + mm(x, p["w"], low)
  return mm((places[:, None] - places[None]).reshape(-1, 3), p["out"], low)


@case({"w": normal(16, 4) * np.float32(0.25)}, ROWS[:4])
def inner_steps(p, x, low):
  def loss(w):
    return jnp.mean((mm(x, w, low) - 1) ** 2)

  w = p["w"]
  for _ in range(30):
    w = w - 1e-3 * jax.grad(loss)(w)
  return w - p["w"]


_DECAYS = {"decay": np.linspace(5, 8, 8, dtype=np.float32)}


@case(_DECAYS | kernels("u", "h", "b", inputs=8), STEPS)
def leaky_integrator(p, x, low):
  decay = jax.nn.sigmoid(p["decay"])
  inputs, state = mm(x, p["u"], low) + p["b"][0], wide(mm(x[0], p["h"], low))
  return jax.lax.scan(lambda h, u: (decay * h + (1 - decay) * u, None), state, inputs)[0]


# Long recurrences.


@case(_DECAYS | kernels("r", "u", inputs=8), STEPS)
def gated_recurrence(p, x, low):
  rate = jax.nn.sigmoid(mm(x, p["r"], low))
  gate = jnp.exp(-0.5 * jax.nn.softplus(-p["decay"]) * wide(rate))
  inputs = jnp.sqrt(1 - gate**2) * mm(x, p["u"], low)

  def step(h, both):
    h = both[0] * h + both[1]
    return h, h

  return jax.lax.scan(step, jnp.zeros(8), (gate, inputs))[1]


@case(kernels("k", "v", "b", inputs=8), STEPS[:500])
def delta_rule(p, x, low):
  def step(state, kvb):
    k, v, b = map(wide, kvb)
    k = k / jnp.sqrt(jnp.sum(k * k) + 1e-6)
    return state + jax.nn.sigmoid(b - 4) * k[:, None] * (v - k @ state)[None], None

  products = [mm(x, p[name], low) for name in "kvb"]
  exact = jax.default_matmul_precision("highest")
  with exact:
    return jax.lax.scan(step, jnp.zeros((8, 8)), tuple(products))[0]


# Numbers out of the range of float16.


@case(kernels("w", outputs=1024) | {"out": normal(1024, 4)}, ROWS * 500)
def shares_of_a_large_sum(p, x, low):
  h = jax.nn.relu(mm(x, p["w"], low))
  return mm(h / wide(h).sum(-1, keepdims=True), p["out"], low)


@case(kernels("w"), ROWS[:16])
def a_row_that_is_masked(p, x, low):
  h = mm(x, p["w"], low)
  logits = wide(mm(h, h.T, low))
  return jax.nn.softmax(jnp.where(jnp.arange(16)[:, None] > 0, logits, -1e9), -1)


@case(kernels("w", outputs=400) | {"v": normal(16, 100), "p": _BOXES}, ROWS)
def fused_boxes(p, x, low):
  boxes = p["p"][None] + mm(x, p["w"], low).reshape(-1, 100, 4)
  weights = jax.nn.relu(mm(x, p["v"], low))[..., None]
  return (boxes * weights).sum(1) / (weights.sum(1) + 1e-3) - 256.0


# Functions that saturate, averages, and gradients whose parts cancel.


def _in_remat(fun):
  return jax.checkpoint(fun, prevent_cse=False)


@case(kernels("w", outputs=8), ROWS)
def logarithm_in_a_remat(p, x, low):
  gate = jax.nn.sigmoid(wide(mm(x, p["w"], low)) * 2 + 6)
  return _in_remat(lambda gate: -jnp.log1p(-gate))(gate)


@case(kernels("w", outputs=1), np.concatenate([ROWS[:, :13], ROWS[:, 13:] + 100], 1))
def weighted_centroid(p, x, low):
  weights = jax.nn.softplus(wide(mm(x.at[:, 13:].add(-100.0), p["w"], low)))
  return (weights * x[:, 13:]).sum(0) / weights.sum(0)


@case(kernels("w", outputs=8) | {"out": normal(8, 4)}, ROWS * 40)
def rounded_codes(p, x, low):
  return mm(jnp.round(mm(x, p["w"], low)), p["out"], low)


@case(kernels("w", outputs=8) | {"out": normal(8, 4)}, ROWS)
def large_value_of_a_branch(p, x, low):
  h = wide(mm(x, p["w"], low))
  chosen = jax.lax.cond(x[0, 0] > 9, lambda h: h, lambda h: jnp.full_like(h, 1e6), h)
  return mm(chosen * 1e-6 + h, p["out"], low)


# Matmuls that are none: left as they were traced, sums of products, choices by a mask.


@case(kernels("w", outputs=4) | {"out": normal(4, 2)}, STEPS[:400] @ np.ones((8, 16), "f"))
def steps_before_an_exact_matmul(p, x, low):
  times = jnp.cumsum(jax.nn.softplus(wide(mm(x, p["w"], low))), 0)
  return jnp.matmul(jnp.diff(times, axis=0), p["out"], precision="highest")


@case(kernels("w", outputs=8), ROWS)
def ranks_by_a_triangle(p, x, low):
  chosen = jax.nn.one_hot(jnp.tile(jnp.arange(2), 300), 2)
  return jnp.tril(jnp.ones((600, 600))) @ chosen + 1e-3 * jnp.sum(mm(x, p["w"], low))


@case(kernels("w", "d") | {"out": normal(8, 4)}, ROWS)
def deviation_of_two_heads(p, x, low):
  heads = [wide(mm(x, p["w"] + step * p["d"], low)) for step in (0, 0.1)]
  variance = sum(y**2 for y in heads) / 2 - (sum(heads) / 2) ** 2
  return mm(jnp.sqrt(jnp.maximum(variance, 0) + 1e-6), p["out"], low)
