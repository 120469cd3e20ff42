"""A fault on one device: all replicas skip, stay bit-equal, and equal a run on one device.

The control is that of `train_steps.py`: one device, the whole batch, plain optax.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign import network, train_steps
from tests.campaign.network import NOWHERE, Faults
from tests.campaign.outcome import Job, Outcome, check_clean, good_steps, judge
from tests.campaign.programs import OPTIMIZERS, Setup, make_run
from tests.campaign.train_steps import PLACES, SETUPS, Data, Sizes

MAPPED = Setup("float16", "float16", "adam", 2, ema=True)
AUTOMATIC = SETUPS[1]  # Its control is compiled already.
SHARDED = SETUPS[-1]

DEVICES = 4


def mesh_of(devices: int) -> jax.sharding.Mesh:
  kinds = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((devices,), ("data",), kinds, devices=jax.devices("cpu")[:devices])


def jobs(small: bool, guard: bool) -> list[Job]:
  return [Job("replicas", functools.partial(attack_all, small, guard=guard))]


def attack_all(small: bool, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """All of them in one job: two programs on the same devices at a time may wait for each other."""
  outcomes = attack_parts(Sizes(10, 40), rng, guard=guard)
  if not small:
    for how, setup, devices in (
      ("shard_map", MAPPED, 2),
      ("automatic sharding", AUTOMATIC, 4),
      ("sharded parameters", SHARDED, 2),
    ):
      outcomes += attack(how, setup, devices, Sizes(6, 32), rng, guard=guard)
  return outcomes


def attack(
  how: str,
  setup: Setup,
  devices: int,
  sizes: Sizes,
  rng: np.random.Generator,
  *,
  guard: bool,
) -> list[Outcome]:
  """Lets runs on several devices meet faults, each on one of them."""
  is_mapped = how == "shard_map"
  program = mapped(setup, devices, guard) if is_mapped else jax.jit(unmapped(setup, guard))
  place = placing(devices, how) if not is_mapped else lambda *args: args
  clean, outcome = Outcome(""), Outcome(f"replicas: {how}")
  begin = 0.0
  for where in (NOWHERE, *PLACES):
    faults = network.plan(rng, *sizes, where, setup.compute) if where else network.no_faults(sizes)
    data = train_steps.draw(setup, sizes, rng)
    args = data.params, data.keys, stream(data, faults)
    results = [
      jax.block_until_ready(program(*place(*jax.tree.map(lambda x, i=i: x[i], args))))
      for i in range(sizes.runs)
    ]
    final, trail = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(results))
    into = outcome if where else clean
    own_keys = devices if is_mapped else 1
    train_steps.judge_trail(into, setup, faults, data, final, trail, guard, own_keys)
    if any(differs(x) for x in jax.tree.leaves(results) if x.is_fully_replicated):
      into.lose(1, f"{setup.name}: replicas differ")
    begin = begin or time.perf_counter()
  check_clean(clean, outcome, guard)
  outcome.lose(program._cache_size() - 1, f"{setup.name}, {how}: compiled more than once")
  outcome.seconds = time.perf_counter() - begin
  return [outcome]


def differs(x: jax.Array) -> bool:
  """Whether a replicated array is not the same on all devices."""
  return len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) > 1


def stream(data: Data, faults: Faults) -> Any:
  """Returns the batches of all runs and steps with their faults, [runs, steps, rows, ...]."""
  batches = jax.tree.map(lambda b: b[data.index], data.batches)
  mine = np.arange(network.ROWS) == faults.row[..., None]
  rows = Faults(*(np.where(mine, f[..., None], np.zeros_like(f[..., None])) for f in faults))
  return batches | {"fault": rows}


def unmapped(setup: Setup, guard: bool, **arguments: Any) -> Callable[..., Any]:
  run = make_run(setup, guard, **arguments)
  return lambda params, key, batches: run(params, key, batches, lambda batch: batch)


def mapped(setup: Setup, devices: int, guard: bool) -> Any:
  """Returns a run by `shard_map`; JAX checks that what comes out is the same everywhere."""
  return jax.jit(
    jax.shard_map(
      unmapped(setup, guard, axis_name="data", integer_state="same"),
      mesh=mesh_of(devices),
      in_specs=(jax.P(), jax.P(), jax.P(None, "data")),
      out_specs=jax.P(),
    )
  )


def placing(devices: int, how: str) -> Callable[..., Any]:
  """Returns what puts the arguments of a run on devices: rows, and parameters if asked for."""
  mesh = mesh_of(devices)

  def put(x, *axes):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))

  def place(params, key, batches):
    sharded = how == "sharded parameters"
    cut = {name: sharded and p.shape[0] % devices == 0 for name, p in params.items()}
    params = {name: put(p, "data") if cut[name] else put(p) for name, p in params.items()}
    return params, put(key), put(batches, None, "data")

  return place


def attack_parts(sizes: Sizes, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """Each device owns a part of the parameters: of the NaN of another it only learns by the flag."""
  outcome = Outcome("replicas: each its own part")
  begin = time.perf_counter()
  planted = rng.random(sizes) < rng.choice([0.1, 0.4, 0.7], (sizes.runs, 1))
  value = np.where(planted, rng.choice([np.nan, np.inf, -np.inf], sizes), 0).astype(np.float32)
  position = rng.integers(0, SIZE, sizes)
  trail, flags = jax.block_until_ready(parts_program(guard)(value, position))
  _, _, seen = good_steps(planted)
  wrong = {
    "parameters": np.any(np.asarray(trail) != without_faults(sizes.steps)[seen], axis=-1),
    "flag": np.any(np.asarray(flags) == planted[..., None], axis=-1),
  }
  judge(outcome, planted, wrong, "parts")
  outcome.seconds = time.perf_counter() - begin
  return [outcome]


SIZE, PARTS = 16, 4
GRADIENT_OF_PARTS = np.arange(-SIZE // 2, SIZE // 2, dtype=np.float32) / 8


def without_faults(steps: int) -> np.ndarray:
  """Returns the parameters after 0, 1, 2 ... steps of plain optax."""
  tx = OPTIMIZERS["adam"]()

  def body(carry, _):
    updates, state = tx.update(jnp.asarray(GRADIENT_OF_PARTS), carry[1])
    params = optax.apply_updates(carry[0], updates)
    return (params, state), params

  first = jnp.ones(SIZE)
  _, params = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), length=steps))(first)
  return np.concatenate([np.asarray(first)[None], params])


def parts_program(guard: bool) -> Any:
  axis_name = "data" if guard else None
  config = mpjax.DynamicLossScale(init_scale=16.0, growth_interval=2, max_scale=64.0)
  tx = mpjax.loss_scaling(OPTIMIZERS["adam"](), config, axis_name=axis_name)

  def run(params, gradient, first, values, positions):
    def body(carry, x):
      params, state = carry
      value, position = x
      scale = mpjax.loss_scaling_metrics(state)["loss_scale"]
      here = jnp.arange(params.size) + first == position
      grads = gradient * scale + jnp.where(here, value, 0)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (params, mpjax.loss_scaling_metrics(state)["finite"][None])

    return jax.lax.scan(body, (params, tx.init(params)), (values, positions))[1]

  def runs(values, positions):
    params, gradient = jnp.ones(SIZE // PARTS), jnp.asarray(GRADIENT_OF_PARTS)
    first = jax.lax.axis_index("data") * params.size
    own = jax.lax.dynamic_slice_in_dim(gradient, first, params.size)
    one = functools.partial(run, params, own, first)
    return jax.lax.map(lambda x: one(*x), (values, positions))

  out = jax.P(None, None, "data")
  return jax.jit(
    # Without the check of JAX, which would refuse what is wrong without the guard.
    jax.shard_map(
      runs, mesh=mesh_of(PARTS), in_specs=jax.P(), out_specs=(out, out), check_vma=False
    )
  )
