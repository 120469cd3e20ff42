"""A model to train on several devices, on numbers that add up exactly, and the same in NumPy.

Linear in its parameters and fed with signs: all sums are exact in float32, whoever adds up how much
of them, so that every way to divide the work has to agree with the oracle to the bit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.loss_scale_oracle import Oracle
from tests.programs import mesh_of

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
ROWS, STEPS = 16, 60
CONFIG = {"init_scale": 2.0**10, "growth_interval": 5, "max_scale": 2.0**13, "min_scale": 2.0**4}
RATE = 2.0**-6
KEY = 11
PARTS = ["gradients", "loss", "statistics"]


@jax.custom_vjp
def poisoned(x, fault):
  # Returns `x`, to whose gradient `fault` will be added.
  del fault
  return x


def _poison(fault, ct):
  return ct + jnp.reshape(fault, (1, 1)).astype(ct.dtype), jnp.zeros_like(fault)


poisoned.defvjp(lambda x, fault: (x, fault), _poison)


def loss_fn(params, stats, batch, rng):
  """Linear in the parameters, with dropout; half products, half parameters if they are so."""
  faults = {part: jnp.sum(batch[part]) for part in PARTS}
  w = poisoned(params["w"], faults["gradients"]).astype(jnp.float16)
  mesh, rows = jax.typeof(w).sharding.mesh, None
  if not mesh.empty and mesh.are_all_axes_explicit:  # Then a program says what goes where.
    w = jax.sharding.reshard(w, jax.NamedSharding(mesh, jax.P()))
    rows = jax.NamedSharding(mesh, jax.P("data"))
  out = (batch["x"].astype(jnp.float16) @ w).astype(jnp.float32)
  kept = jax.random.bernoulli(rng, 0.5, out.shape, out_sharding=rows)
  loss = jnp.sum(jnp.where(kept, out, 0) * batch["y"]) / len(out) + faults["loss"]
  stats = {
    "mean": jnp.mean(out, 0, keepdims=True) + faults["statistics"],
    "steps": stats["steps"] + 1,
  }
  return loss, (stats, {"kept": jnp.sum(kept), "mean": jnp.mean(out)})


@functools.cache
def data():
  """Signs, and faults: on one device as a rule, in one part; twice inf against -inf."""
  rng = np.random.default_rng(0)
  batch = {
    "x": rng.integers(-1, 2, (STEPS, ROWS, 8)).astype(np.float32),
    "y": rng.integers(-1, 2, (STEPS, ROWS, 4)).astype(np.float32),
    **{part: np.zeros((STEPS, ROWS), np.float32) for part in PARTS},
  }
  for step in np.flatnonzero(rng.random(STEPS) < 0.3):
    value = rng.choice([np.nan, np.inf, -np.inf])
    batch[rng.choice(PARTS)][step, rng.integers(ROWS)] = value
  batch["gradients"][[3, 40], :2] = 0
  batch["gradients"][[3, 40], 5], batch["gradients"][[3, 40], 12] = np.inf, -np.inf
  return batch


def start():
  return np.random.default_rng(1).integers(-8, 9, (8, 4)).astype(np.float32) / 8


@functools.cache
def masks(devices):
  """What dropout keeps in each step: drawn for all rows, or by each of `devices` for its own."""

  def draw(step):
    key = jax.random.fold_in(jax.random.key(KEY), step)
    if not devices:
      return jax.random.bernoulli(key, 0.5, (ROWS, 4))
    keys = jax.vmap(lambda device: jax.random.fold_in(key, device))(jnp.arange(devices))
    shape = (ROWS // devices, 4)
    return jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, shape))(keys).reshape(ROWS, 4)

  return np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(STEPS)))


@functools.cache
def expected(devices, steps=STEPS):
  """Returns parameters, momentum, statistics and applied steps at the end; numbers of each step."""
  # So many devices have a dropout key of their own; 0 for one key of all.
  batch, kept = data(), masks(devices)
  w, momentum, mean, step = start().astype(np.float64), np.zeros((8, 4)), np.zeros((1, 4)), 0
  oracle, history = Oracle(**CONFIG), []
  for i in range(steps):
    x, y, mask = batch["x"][i].astype(np.float64), batch["y"][i], kept[step]
    out = (x @ w.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
    grads = x.T @ (mask * y) / ROWS
    numbers = {
      "loss": np.sum(out * mask * y) / ROWS,
      "grad_norm": np.sqrt(np.sum(grads**2)),
      "kept": mask.sum(),
      "mean": out.mean(),
      "finite": all(np.all(np.isfinite(batch[part][i])) for part in PARTS),
    }
    if numbers["finite"]:
      momentum = momentum + grads
      w = w - RATE * momentum
      mean, step = out.mean(0, keepdims=True), step + 1
    numbers |= oracle.step(numbers["finite"]).numbers()
    numbers.pop("hysteresis")
    history.append(numbers)
  assert steps / 2 < step < steps * 0.9
  return (np.float32(w), np.float32(momentum), np.float32(mean), step), history


class Engine(NamedTuple):
  """How the work is divided; parameters stored in half have masters."""

  axis_type: Any = AUTO
  mapped: str = ""
  params: Any = jax.P()
  stored: Any = jnp.float32


def place(mesh, tree, spec):
  return jax.device_put(tree, jax.NamedSharding(mesh, spec))


def prepare(engine, devices, fn=loss_fn):
  """Returns the state, the step, and a function that puts a batch onto all devices."""
  # Those are of all processes; without an engine it is one.
  stored = engine.stored if engine else jnp.float32
  inner = optax.sgd(RATE, momentum=1.0)
  inner = inner if stored == jnp.float32 else mpjax.master_weights(inner)
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG))

  def create(params):
    stats = {"mean": jnp.zeros((1, 4)), "steps": jnp.asarray(0, jnp.int32)}
    rng = jax.random.key(KEY)
    return mpjax.TrainState.create({"w": params}, tx, model_state=stats, rng=rng)

  params = start().astype(stored)
  axis = "data" if engine is not None and engine.mapped else None
  step = mpjax.make_train_step(fn, tx, axis_name=axis)
  if engine is None:
    return create(jnp.asarray(params)), step, lambda batch: batch
  if engine.mapped == "pmap":
    count = len(devices)
    state = jax.tree.map(lambda x: jnp.stack([x] * count), create(jnp.asarray(params)))
    cut = functools.partial(jax.tree.map, lambda x: x.reshape(count, -1, *x.shape[1:]))
    return state, jax.pmap(step, axis_name="data", devices=devices), cut
  mesh = mesh_of(devices, engine.axis_type)
  if engine.mapped:
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    step = jax.shard_map(step, mesh=mesh, check_vma=engine.mapped == "shard_map", **specs)
    step = jax.jit(step, donate_argnums=0)
  rows = jax.NamedSharding(mesh, jax.P("data"))
  # Of a batch each process gives what it has: its rows, or all if it is alone.
  put = functools.partial(jax.make_array_from_process_local_data, rows)
  return create(place(mesh, params, engine.params)), step, functools.partial(jax.tree.map, put)


def replicas(x):
  """Returns the bytes that each device of this process has; a replicated array's are all alike."""
  x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
