"""Two real processes, each with two devices, train as one with four: `jax.distributed`, gloo.

Each process sees only its own half of a batch, and most faults strike in one of the two.
"""

import pathlib
import pickle
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.check import two_processes_worker as worker
from tests.integration.sharded_rig import PARTS, ROWS, data, expected

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 150
"""A hang is a failure after this; undisturbed, the two take a tenth of it."""


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def run_both(folder):
  """Returns the exit codes of both processes and what they said; none is left running."""
  port, logs, running = free_port(), [folder / f"{name}.log" for name in "01"], []
  try:
    for name, log in zip("01", logs, strict=True):
      module = "tests.check.two_processes_worker"
      command = [sys.executable, "-m", module, name, str(port), str(folder)]
      with log.open("w") as out:
        running.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
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
  return [p.returncode for p in running], "\n".join(log.read_text() for log in logs)


@pytest.mark.case("I6", "B131", "A51", "A93", "A67", "B129", "B151")
def test_two_processes_and_one_agree_to_the_bit(tmp_path, devices):
  # All of the state, and the metrics of each step: the bytes that each of four devices has.
  # One test, so that the processes are started once.
  codes, text = run_both(tmp_path)
  if codes != [0, 0] and "already in use" in text:  # Somebody else was given the port meanwhile.
    codes, text = run_both(tmp_path)
  assert codes == [0, 0], text
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


def test_faults_strike_in_one_process_as_a_rule():
  bad = np.stack([~np.isfinite(data()[part][: worker.STEPS]) for part in PARTS]).any(0)
  first, second = (half.any(1) for half in (bad[:, : ROWS // 2], bad[:, ROWS // 2 :]))
  assert np.sum(first & ~second) >= 2
  assert np.sum(second & ~first) >= 2
