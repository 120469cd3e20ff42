"""Two real processes, each with two devices, train as one with four: `jax.distributed`, gloo.

Each process sees only its own half of a batch, and most faults strike in one of the two.
"""

import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import time

import numpy as np

from tests.check import two_processes_worker as worker
from tests.integration.sharded_rig import PARTS, ROWS, data, expected

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 150
"""A hang is a failure after this; undisturbed, the two take a tenth of it."""


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def run_both(folder, command, again=True):
  """Returns what both processes printed, if neither failed; none is left running."""
  port, logs, running = free_port(), [folder / f"{name}.log" for name in "01"], []
  options = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={worker.LOCAL_DEVICES}"}
  options |= {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
  try:
    for name, log in zip("01", logs, strict=True):
      with log.open("w") as out:
        started = subprocess.Popen(
          [sys.executable, *(each.format(port=port, rank=name) for each in command)],
          cwd=ROOT,
          env=os.environ | options,
          stdout=out,
          stderr=subprocess.STDOUT,
        )
      running.append(started)
    end = time.monotonic() + SECONDS
    # When one fails, the other waits for it in vain.
    while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
      if time.monotonic() > end:
        break
      time.sleep(0.05)
  finally:
    for process in running:
      process.kill()
      process.wait()
  texts = [log.read_text() for log in logs]
  if any(p.returncode for p in running) and again and "already in use" in "".join(texts):
    return run_both(folder, command, again=False)  # Somebody else was given the port meanwhile.
  assert [p.returncode for p in running] == [0, 0], "\n".join(texts)
  return texts


def test_two_processes_and_one_agree_to_the_bit(tmp_path, devices):
  # All of the state, and the metrics of each step: the bytes that each of four devices has.
  # One test, so that the processes are started once.
  run_both(tmp_path, ("-m", worker.__name__, "{rank}", "{port}", str(tmp_path)))
  first, second = (
    pickle.loads((tmp_path / f"{process}.pickle").read_bytes()) for process in (0, 1)
  )
  for name in worker.ENGINES:
    alone = worker.train(worker.engine_of(name), devices, slice(None))
    assert set(first[name]) == set(second[name]) == set(alone)
    both = {path: first[name][path] + second[name][path] for path in alone}
    assert [path for path in alone if both[path] != alone[path]] == [], name
    cut = {path for path, shards in both.items() if len(set(shards)) > 1}
    assert bool(cut) == (name == "sharded parameters")
    assert all(path.endswith("['w']") for path in cut), cut

  (w, _, _, steps), history = expected(0, worker.STEPS)
  found = {path: shards[0] for path, shards in first["automatic"].items()}
  last = f"[1][{worker.STEPS - 1}]"
  assert found["[0].params['w']"] == w.tobytes()
  assert found["[0].step"] == np.int32(steps).tobytes()
  assert found[f"{last}['skipped']"] == np.int32(history[-1]["skipped"]).tobytes()
  assert found[f"{last}['loss_scale']"] == np.float32(history[-1]["scale"]).tobytes()


def test_the_example_of_a_cluster_trains_the_same_model_in_both(tmp_path):
  script = "examples/several_processes.py"
  texts = run_both(tmp_path, (script, "127.0.0.1:{port}", "2", "{rank}", "--steps", "50"))
  first, second = (re.findall(r"process (\d of 2, 4) devices:\nlast loss (.*)", x) for x in texts)
  assert (first[0][0], second[0][0]) == ("0 of 2, 4", "1 of 2, 4")
  assert first[0][1] == second[0][1]
  assert float(first[0][1]) < 1.5  # It begins at 2.4.


def test_faults_strike_in_one_process_as_a_rule():
  bad = np.stack([~np.isfinite(data()[part][: worker.STEPS]) for part in PARTS]).any(0)
  first, second = (half.any(1) for half in (bad[:, : ROWS // 2], bad[:, ROWS // 2 :]))
  assert np.sum(first & ~second) >= 2
  assert np.sum(second & ~first) >= 2
