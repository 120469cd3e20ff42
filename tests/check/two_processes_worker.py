"""One of two processes that train together; `test_two_processes.py` starts both.

  python -m tests.check.two_processes_worker PROCESS PORT FOLDER

Writes, for each way to divide the work, the bytes that its own devices hold in the end.
"""

import pathlib
import pickle
import sys

LOCAL_DEVICES, STEPS = 2, 30

ENGINES = {
  "automatic": {},
  "sharded parameters": {"params": ("data",), "stored": "float16"},
  "shard_map": {"mapped": "shard_map", "stored": "float16"},
}
"""Fields of `sharded_rig.Engine`, without anything of JAX, which is imported later."""


def engine_of(name):
  from tests.integration.sharded_rig import Engine, jax

  fields = dict(ENGINES[name])
  if "params" in fields:
    fields["params"] = jax.P(*fields["params"])
  return Engine(**fields)


def train(engine, devices, rows):
  """Returns what this process has after `STEPS` steps: all leaves of the state, and all metrics.

  Args:
    engine: how to divide the work.
    devices: those of all processes.
    rows: a slice, the rows of a batch that this process has.
  """
  from tests.integration.sharded_rig import data, jax, prepare, replicas

  state, step, put = prepare(engine, devices)
  history = []
  for i in range(STEPS):
    state, metrics = jax.block_until_ready(
      step(state, put({key: x[i, rows] for key, x in data().items()}))
    )
    history.append(metrics)
  leaves = jax.tree_util.tree_leaves_with_path((state, history))
  return {jax.tree_util.keystr(path): replicas(x) for path, x in leaves}


def main(process, port, folder):
  """Trains with the other process, once for each engine."""
  import jax

  jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=2, process_id=process, initialization_timeout=60
  )
  from tests.integration.sharded_rig import ROWS

  assert (len(jax.devices()), len(jax.local_devices())) == (2 * LOCAL_DEVICES, LOCAL_DEVICES)
  half = ROWS // 2
  rows = slice(process * half, (process + 1) * half)
  found = {name: train(engine_of(name), jax.devices(), rows) for name in ENGINES}
  (folder / f"{process}.pickle").write_bytes(pickle.dumps(found))
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
