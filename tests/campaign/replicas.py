"""A fault on one device: all replicas skip, stay bit-equal, and equal a run on one device.

The control is that of `rig.py`: one device, the whole batch, plain optax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign import network, rig
from tests.campaign.network import Faults
from tests.campaign.outcome import Job, Outcome, good_steps, judge
from tests.campaign.rig import OPTIMIZERS, PLACES, Program, Setup, Sizes
from tests.campaign.training import SETUPS

DEVICES = 4

WAYS = {
  "shard_map": (Setup("float16", "float16", "adam", 2, ema=True), 2),
  # Of these the control is compiled already.
  "automatic sharding": (SETUPS[1], DEVICES),
  "sharded parameters": (SETUPS[-1], 2),
}
"""How the work is divided: what runs on how many devices."""


def mesh_of(devices: int) -> jax.sharding.Mesh:
  kinds = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((devices,), ("data",), kinds, devices=jax.devices("cpu")[:devices])


def jobs(small: bool, guard: bool) -> list[Job]:
  """All of them in one job: two programs on the same devices at a time may wait for each other."""

  def attack_all(rng):
    outcomes = attack_parts(10, 40, rng, guard)
    for how, (setup, devices) in {} if small else WAYS.items():
      classes = dict.fromkeys(PLACES, f"replicas: {how}")
      program, keys = divided(how, setup, devices, guard), devices if how == "shard_map" else 1
      arguments = {"guard": guard, "program": program, "devices": keys}
      outcomes += rig.attack(setup, Sizes(6, 32), classes, rng, **arguments)
    return outcomes

  return [Job("replicas", attack_all)]


def divided(how: str, setup: Setup, devices: int, guard: bool) -> Program:
  """Returns a run on several devices, by `shard_map` or by the sharding of its arguments."""
  mesh, is_mapped = mesh_of(devices), how == "shard_map"
  names = {"axis_name": "data", "integer_state": "same"} if is_mapped else {}
  own = rig.make_run(setup, guard, **names)

  def run(params, key, batches):
    return own(params, key, batches, lambda batch: batch)

  if is_mapped:  # JAX checks that what comes out is the same everywhere.
    specs = (jax.P(), jax.P(), jax.P(None, "data"))
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P())

  def put(x, *axes):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))

  def place(params, key, index, faults, batches):
    """Puts rows, and parameters if asked for, on devices; each fault comes with its row."""
    mine = np.arange(network.ROWS) == faults.row[..., None]
    rows = Faults(*(np.where(mine, f[..., None], np.zeros_like(f[..., None])) for f in faults))
    batches = jax.tree.map(lambda b: b[index], batches) | {"fault": rows}
    if is_mapped:
      return params, key, batches
    cut = how == "sharded parameters"
    params = {
      name: put(p, "data") if cut and p.shape[0] % devices == 0 else put(p)
      for name, p in params.items()
    }
    return params, put(key), put(batches, None, "data")

  return Program(jax.jit(run), place=place)


SIZE, PARTS = 16, 4
GRADIENT_OF_PARTS = np.arange(-SIZE // 2, SIZE // 2, dtype=np.float32) / 8


def attack_parts(runs: int, steps: int, rng: np.random.Generator, guard: bool) -> list[Outcome]:
  """Each device owns a part of the parameters: of the NaN of another it only learns by the flag."""
  outcome = Outcome("replicas: each its own part")
  planted = rng.random((runs, steps)) < rng.choice([0.1, 0.4, 0.7], (runs, 1))
  value = np.where(planted, rng.choice([np.nan, np.inf, -np.inf], (runs, steps)), 0)
  position = rng.integers(0, SIZE, (runs, steps))
  trail, flags = jax.block_until_ready(parts_program(guard)(value.astype(np.float32), position))
  _, _, seen = good_steps(planted)
  wrong = {
    "parameters": np.any(np.asarray(trail) != without_faults(steps)[seen], axis=-1),
    "flag": np.any(np.asarray(flags) == planted[..., None], axis=-1),
  }
  judge(outcome, planted, wrong, "parts")
  return [outcome]


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


def parts_program(guard: bool):
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

  # Without the check of JAX, which would refuse what is wrong without the guard.
  out, mesh = jax.P(None, None, "data"), mesh_of(PARTS)
  mapped = jax.shard_map(runs, mesh=mesh, in_specs=jax.P(), out_specs=(out, out), check_vma=False)
  return jax.jit(mapped)
