"""Train one model on several machines, with a process on each: `jax.distributed`.

  python examples/several_processes.py                           on a TPU pod, or under Slurm
  python examples/several_processes.py HOST:PORT PROCESSES RANK  anywhere: once in each process

The same command runs on every machine. On a TPU pod, and under Slurm or Open MPI, JAX finds the
other processes by itself; anywhere else it is told where process 0 listens, how many there are, and
which this one is. CPUs exchange by gloo: set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo.

Each process reads its own rows of a batch. Parameters, moments and the loss scale are arrays over
all devices, in parts where they can be divided (FSDP). The kernels travel in float16, and an inf on
one machine skips the step on all of them. No line of the step says how many machines there are.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import mpjax

BATCH = 64


def in_parts(x: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
  """Returns an array that is in parts on all devices, if its rows can be divided."""
  fits = x.ndim > 1 and x.shape[0] % mesh.size == 0
  return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data" if fits else None)))


def train(steps: int) -> float:
  """Returns the last loss of the training, the same in every process."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))  # of all processes
  rows = NamedSharding(mesh, PartitionSpec("data"))
  pixels, labels = load_digits(return_X_y=True)
  model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)])
  model = mpjax.with_policy(model, "mixed_float16")
  tx = mpjax.loss_scaling(optax.adamw(1e-3))

  def loss_fn(params, model_state, batch, rng):
    logits = model.apply({"params": params}, batch["pixels"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.mean(losses), (model_state, {})

  # One seed: the parameters are the same in all processes.
  params = model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
  params = jax.tree.map(lambda x: in_parts(x, mesh), params)
  state = mpjax.TrainState.create(params, tx)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  step = mpjax.make_train_step(loss_fn, tx, state_shardings=shardings)
  order, loss = np.random.default_rng(0), float("nan")
  for number in range(steps):
    mine = order.permutation(len(labels))[:BATCH][jax.process_index() :: jax.process_count()]
    local = {"pixels": np.float32(pixels[mine] / 16), "labels": labels[mine]}
    batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), local)
    state, metrics = step(state, batch)
    loss = float(metrics["loss"])  # Metrics are on every device: each process may read them.
    if jax.process_index() == 0 and number % 25 == 24:
      scale, skipped = int(metrics["loss_scale"]), int(metrics["skipped"])
      print(
        f"step {number + 1}: loss {loss:.3f}, loss scale {scale}, {skipped} skipped", flush=True
      )
  return loss


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("coordinator", nargs="?", help="HOST:PORT of process 0")
  parser.add_argument("processes", nargs="?", type=int, help="how many there are")
  parser.add_argument("rank", nargs="?", type=int, help="which of them this is, from 0")
  parser.add_argument("--steps", type=int, default=100)
  args = parser.parse_args()
  jax.distributed.initialize(args.coordinator, args.processes, args.rank)
  final = train(args.steps)
  print(f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices:")
  print(f"last loss {final:.6f}")
