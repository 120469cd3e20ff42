"""A small network whose every sum is exact, and the places in it where a fault can be planted.

A run and its control are different programs, and XLA may add in another order in each, or contract
a product and a sum. Neither shows where nothing is rounded: parameters are put on a grid before
they are used, inputs are halves, the derivative of the loss is in halves too, and so float32 holds
every sum of every pass, and the square of every gradient. In half the sums are made in float32, and
rounded once. So the bits of a gradient are a matter of arithmetic alone, and those of a state can
be compared.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 8
"""Examples in a batch."""

SHAPES = {"b1": (8,), "b2": (4,), "table": (5, 2), "w1": (8, 8), "w2": (8, 4)}
"""The parameters, in the order of their leaves."""

NOWHERE, GRADIENT, LOSS, STATISTICS, INPUT = range(5)
"""Where a fault is planted."""

LARGE = 2.0**127
"""A finite number whose double is not; it stands for all faults that begin as a finite number."""

LARGEST_SLOPE = {"float32": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**14}
"""A finite derivative, which overflows as soon as it is multiplied by the smallest scale."""


MIN_SCALE = 4.0


class Faults(NamedTuple):
  """Faults, one for each element of the arrays; no fault where `place` is `NOWHERE`."""

  place: Any  # int32
  row: Any  # int32: the example that it comes with, and so the micro-batch and the device
  position: Any  # int32: the element, counted through all parameters, or statistics, or inputs
  value: Any  # float32: NaN, an inf, or LARGE with either sign


def initial_parameters(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in SHAPES.items()}


def initial_statistics() -> dict[str, Any]:
  zero = jnp.zeros(8, jnp.float32)
  return {"mean": zero, "square": zero, "seen": jnp.zeros((), jnp.int32)}


def plan(rng: np.random.Generator, runs: int, steps: int, place: int, compute: str) -> Faults:
  """Returns faults at one kind of place: single ones and bursts, in any row, leaf and element."""
  bad = rng.random((runs, steps)) < rng.choice([0.1, 0.3, 0.5, 0.8], (runs, 1))
  bad[:, 1:] |= bad[:, :-1] & (rng.random((runs, steps - 1)) < 0.2)
  values = [np.nan, np.inf, -np.inf, LARGE, -LARGE]
  if place == INPUT and compute != "float16":
    values = values[:3]  # A large input need not be a fault there: its product may be 0.
  # Of the leaves in which a fault can be planted there.
  leaves = [math.prod(shape) for shape in SHAPES.values()]
  sizes = np.asarray({GRADIENT: leaves, LOSS: [1], STATISTICS: [8, 8], INPUT: [6]}[place])
  leaf = rng.integers(0, len(sizes), (runs, steps))
  position = (np.cumsum(sizes) - sizes)[leaf] + rng.integers(0, sizes[leaf])
  return Faults(
    place=np.where(bad, place, NOWHERE).astype(np.int32),
    row=rng.integers(0, ROWS, (runs, steps)).astype(np.int32),
    position=position.astype(np.int32),
    value=np.where(bad, rng.choice(values, (runs, steps)), 0).astype(np.float32),
  )


def no_faults(shape: tuple[int, ...] = ()) -> Faults:
  zero = np.zeros(shape, np.int32)
  return Faults(zero, zero, zero, np.zeros(shape, np.float32))


def pool(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
  """Returns `count` batches."""
  return {
    "x": rng.integers(-2, 3, (count, ROWS, 6)).astype(np.float32) / 2,
    "token": rng.integers(0, 5, (count, ROWS)).astype(np.int32),
    "y": rng.integers(-8, 9, (count, ROWS, 4)).astype(np.float32) / 4,
  }


def make_batch(batches: Any, index: Any, fault: Faults) -> dict[str, Any]:
  """Returns batch number `index` with a fault, whose fields are arrays over the rows."""
  batch = jax.tree.map(lambda b: jnp.asarray(b)[index], batches)
  mine = jnp.arange(ROWS) == fault.row
  return batch | {"fault": Faults(*(jnp.where(mine, f, jnp.zeros_like(f)) for f in fault))}


@jax.custom_vjp
def on_grid(p):
  """Returns the nearest quarter in [-1, 1]; the derivative is that of the identity."""
  return jnp.clip(jnp.round(p * 4) / 4, -1, 1)


on_grid.defvjp(lambda p: (on_grid(p), None), lambda _, g: (g,))


@jax.custom_vjp
def poison(p, fault):
  """Returns `p`; `fault` is added to its derivative."""
  return p


poison.defvjp(lambda p, fault: (p, fault), lambda fault, g: (g + fault, jnp.zeros_like(fault)))


def loss_fn(dtype: Any, params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
  """The loss for `mpjax.make_train_step`; products are computed in `dtype`."""
  rows = batch["fault"]
  # All rows but one hold zeros; in a sum, unlike in a maximum, a NaN stays.
  fault = Faults(*(jnp.sum(f, dtype=f.dtype) for f in rows))

  p = on_grid(jnp.concatenate([p.reshape(-1) for p in params.values()])).astype(dtype)
  planted = jnp.where(fault.place == GRADIENT, fault.value, 0)
  planted = jnp.where(jnp.arange(p.size) == fault.position, planted, 0)
  finite = jnp.isfinite(planted)
  p = poison(p, jnp.where(finite, 0, planted).astype(dtype))
  slope = jnp.where(finite, planted, 0) * (LARGEST_SLOPE[jnp.dtype(dtype).name] / LARGE)
  linear = slope * p.astype(jnp.float32)
  term = jnp.sum(linear - jax.lax.stop_gradient(linear))  # Zero, but for its derivative.
  ends = np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1]
  cut = zip(SHAPES.items(), jnp.split(p, ends), strict=True)
  used = {name: part.reshape(shape) for (name, shape), part in cut}

  rows = jax.tree.map(lambda f: f[:, None], rows)
  hit = jnp.logical_and(rows.place == INPUT, jnp.arange(6)[None] == rows.position)
  x = batch["x"] + jnp.where(hit, rows.value, 0)
  token = used["table"].astype(jnp.float32)[batch["token"]]
  x = jnp.concatenate([x.astype(dtype), token.astype(dtype)], axis=-1)
  h = _product(x, used["w1"]) + used["b1"].astype(jnp.float32)[None]

  old = jnp.concatenate([model_state["mean"], model_state["square"]])
  new = (old + jnp.concatenate([jnp.mean(h, 0), jnp.mean(h * h, 0)])) * 0.5
  here = jnp.logical_and(jnp.arange(16) == fault.position, fault.place == STATISTICS)
  extra = jnp.where(here, fault.value, 0)
  new = jax.lax.stop_gradient(new + extra + extra)
  new = {"mean": new[:8], "square": new[8:], "seen": model_state["seen"] + 1}

  h = jax.nn.relu(h - on_grid(model_state["mean"])[None])
  if rng is not None:
    h = jnp.where(_kept(rng, h.shape), h * 2, 0)
  y = _product(h.astype(dtype), used["w2"]) + used["b2"].astype(jnp.float32)[None]
  error = y - batch["y"]
  # The derivative by an output is the sign of its error, in halves.
  by_output = jnp.round(jnp.clip(error, -1, 1) * 2) / 2
  loss = jnp.mean(error * jax.lax.stop_gradient(by_output)) + term
  extra = jnp.where(fault.place == LOSS, fault.value, 0)
  return loss + extra + extra, (new, {})


def _kept(rng, shape):
  """Returns what dropout keeps, about half: a bit of a product will do, and compiles fast."""
  numbers = np.arange(1, 1 + math.prod(shape), dtype=np.uint32).reshape(shape)
  word = jnp.bitwise_xor(*jax.random.key_data(rng)) | np.uint32(1)
  return ((word * numbers) >> np.uint32(17)) & np.uint32(1) == 0


def _product(a, b):
  return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@functools.cache
def loss_in(dtype: str) -> Any:
  """Returns the loss function whose products are computed in `dtype`; the same each time."""
  return functools.partial(loss_fn, jnp.dtype(dtype))
