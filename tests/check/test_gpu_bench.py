"""The script that measures steps on a GPU, with processes that are made up, and that fail.

What becomes of a version that has no memory, or ends its process, and what a second call measures.
"""

import collections
import functools
import importlib
import io
import json
import sys
import time

import pytest
from rich.console import Console

from tests.scripts import benchmark

gpu_bench, gpu_groups, gpu_ratios = map(benchmark, ("gpu_bench", "gpu_groups", "gpu_ratios"))
workers = benchmark("workers")


# Processes that fail

ANSWERS = """
import os, sys, workers
print("noise of an import", flush=True)
def measure(name):
  print("noise")
  workers.say("working")
  if name == "dies":
    sys.stderr.write("Fatal: a kernel\\n  at 0x1\\n")
    sys.stderr.flush()
    os._exit(7)
  if name == "raises":
    raise RuntimeError("RESOURCE_EXHAUSTED: too much")
  return {"name": name}
workers.serve({"measure": measure})
"""


@pytest.fixture
def process(workers, tmp_path):
  script = tmp_path / "script.py"
  script.write_text(ANSWERS)
  worker = workers.Worker([sys.executable, str(script)], {})
  yield worker
  worker.close()
  assert worker.process.returncode is not None


def test_process_answers_and_says_how_it_ended(workers, process):
  far = time.monotonic() + 60
  heard = []
  process.send("measure", name="one")
  assert process.receive(far, heard.append) == {"name": "one"}
  assert heard == ["working"]
  assert process.ask(far, "measure", name="raises") == {"failed": workers.OUT_OF_MEMORY}
  with pytest.raises(workers.OutOfTimeError):
    process.receive(time.monotonic() + 0.01)
  for _ in range(2):
    with pytest.raises(workers.WorkerEndedError, match="ended with 7: Fatal: a kernel"):
      process.ask(far, "measure", name="dies")
  torch = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
  assert workers.why(torch) == workers.OUT_OF_MEMORY
  assert workers.why(ValueError("a\nb")) == "ValueError: a"


class Fake:
  """A worker in this process: figures of a machine that is made up.

  Args:
    seconds: of a step, by version.
    fails: an answer or an exception, by question and version.
    memory: temporaries by version.
  """

  def __init__(self, seconds, fails=(), memory=(), log=None, cuda=False):
    self.seconds, self.fails, self.memory = seconds, dict(fails), dict(memory)
    self.log = [] if log is None else log
    self.waiting = collections.deque()
    self.cuda, self.dead = cuda, None

  def send(self, question, **arguments):
    self.waiting.append((question, arguments))

  def receive(self, deadline, progress=lambda text: None):
    del progress
    question, arguments = self.waiting.popleft()
    if time.monotonic() > deadline:
      raise importlib.import_module("workers").OutOfTimeError
    name = arguments.get("name")
    self.log.append((question, name))
    failure = self.fails.get((question, name)) or self.dead
    if isinstance(failure, BaseException):
      self.dead = failure
      raise failure
    return failure or self.answer(question, arguments)

  def ask(self, deadline, question, **arguments):
    self.send(question, **arguments)
    return self.receive(deadline)

  def answer(self, question, arguments):
    name = arguments.get("name")
    if question == "hello":
      versions = {"jax": "0", "torch": "0"}
      where = {"backend": "cpu", "hardware": "1 x GPU X", "versions": versions, "date": "today"}
      return {
        "environment": {**where, "python": "3"}, "attention": "xla", "versions": versions,
        "cuda": self.cuda, "hardware": "GPU X",
      }  # fmt: skip
    if question == "trace":
      self.names = arguments["names"]
    if question == "compile":
      return {name: {"temp_bytes": self.memory.get(name, 1)} for name in self.names}
    seconds = self.seconds.get(name, 0.1)
    return {
      "describe": {"shapes": {}},
      "load": {"parameters": 10},
      "trace": {"failed_versions": {}},
      "check": {"losses": [2.0, 1.0], "seconds": seconds},
      "measure": {"seconds": seconds, "finite": True},
    }.get(question, {})

  def close(self):
    self.log.append(("close", None))


def test_a_version_that_fails_is_a_figure_and_the_others_go_on(gpu_groups, workers):
  # One lacks memory, one ends its process, which is started again without it.
  dies = workers.WorkerEndedError("the process ended with -6: abort")
  fails = {("check", "a"): {"failed": "out of memory"}, ("measure", "b"): dies}
  log = []
  memory = {"a": 1, "b": 2, "c": 7, "d": 45}

  def start():
    return Fake({}, fails, memory, log)

  questions = [("load", {}), ("trace", {})]
  group = gpu_groups.Group(start, list(memory), questions, time.monotonic() + 60)
  group.then("compile")
  figures = gpu_groups.take_turns([group], 3, 0.1)
  # What needs most memory is first.
  assert "".join(name for question, name in log if question == "check") == "dcba"
  assert figures["a"]["failed"] == "out of memory"
  assert "seconds" not in figures["a"]
  assert ("drop", "a") in log
  assert figures["b"]["failed"] == "the process ended with -6: abort"
  assert [question for question, _ in log].count("load") == 2
  assert group.worker.names == ["c", "d"]
  assert [len(figures[name]["seconds"]) for name in "cd"] == [3, 3]
  measured = "".join(name for question, name in log if question == "measure")
  assert measured == "bcd" + "cd" + "dc"


# A call


@pytest.fixture
def call(gpu_bench, tmp_path):
  """Calls the script with made-up processes; returns figures, the text printed, and the log."""

  def run(jax_fails=(), torch_fails=(), seconds=(), **options):
    log, text = [], io.StringIO()
    make = functools.partial(Fake, dict(seconds), log=log)
    results = gpu_bench.main(
      **{"models": ["mlp", "lstm"], "rounds": 3, "out": tmp_path / "figures", **options},
      console=Console(file=text, width=140),
      start_jax=lambda fraction, backend="": make(jax_fails),
      start_torch=lambda python: make(torch_fails),
    )
    return results, text.getvalue(), log

  return run


def test_both_parts_are_measured_and_recorded_by_the_name_of_the_gpu(call, tmp_path, gpu_bench):
  results, text, log = call(seconds={"policy": 0.10, "TF32": 0.21, "float8": 0.08})
  assert json.loads((tmp_path / "figures" / "1_x_gpu_x.json").read_text()) == results
  assert list(results["models"]) == ["mlp", "lstm"]
  parts = results["models"]["mlp"]["parts"]
  assert tuple(parts["jax"]["versions"]) == gpu_bench.NAMES
  assert set(parts["torch"]["versions"]) == {"policy", "dynamic", *gpu_bench.TORCH_VERSIONS}
  rows = {tuple(row[:2]): row[2:] for row in gpu_bench.gpu_ratios.rows(results)}
  assert rows["lstm", "TF32 / policy"] == ("2.100 (2.100-2.100)", "≥ 1.5", "met")
  assert rows["mlp", "policy / float8"] == ("1.250 (1.250-1.250)", "≥ 1.5", "missed")
  assert rows["mlp", "policy / by hand"][1:] == ("0.99 to 1.01", "met")
  assert rows["mlp", "TF32 / policy"][1:] == ("", "")
  page = list(gpu_bench.gpu_ratios.page_rows(results))
  times = ("210.0", "100.0", "100.0 (1.000)", "100.0 (1.000)", "80.0 (0.800)")
  assert ("MLP, bfloat16", *times) in page
  assert "suspicious" not in text
  assert log.count(("close", None)) == 2 + 2 * 3


def test_a_second_call_measures_what_is_not_recorded(call):
  first, _, _ = call(models=["mlp"])
  again, text, log = call()
  assert "mlp: recorded in" in text
  assert again["models"]["mlp"] == first["models"]["mlp"]
  assert len([x for x in log if x[0] == "describe"]) == 2  # of the other model alone
  others, text, log = call(models=["mlp"], rounds=4)
  assert [x for x in log if x[0] == "measure"]
  assert "lstm" in others["models"]  # kept, but not shown among figures of 4 rounds
  assert "lstm" not in text
  _, _, log = call(models=["mlp"], rounds=4)
  assert not [x for x in log if x[0] == "measure"]
  _, _, log = call(models=["mlp"], rounds=4, fresh=True)
  assert [x for x in log if x[0] == "measure"]


def test_what_pytorch_lacks_is_said_and_the_rest_is_measured(call, workers):
  gone = workers.WorkerEndedError("the process ended with 1: No module named 'torch'")
  results, text, _ = call(torch_fails={("hello", None): gone}, models=["mlp"])
  assert "No module named 'torch'" in results["models"]["mlp"]["parts"]["torch"]["missing"]
  assert "PyTorch is not measured: no PyTorch in" in text
  assert len(results["models"]["mlp"]["parts"]["jax"]["versions"]["policy"]["seconds"]) == 3
  parts = call(models=["after"])[0]["models"]["after"]["parts"]
  assert parts["torch"]["missing"] == "no PyTorch model for it"


def test_a_call_that_is_broken_off_leaves_what_it_measured(call, tmp_path):
  # In the second part of a model, and in the first of the next.
  with pytest.raises(KeyboardInterrupt):
    call(torch_fails={("measure", "torch amp"): KeyboardInterrupt()})
  kept = json.loads((tmp_path / "figures" / "1_x_gpu_x.json").read_text())
  assert {name: list(x["parts"]) for name, x in kept["models"].items()} == {"mlp": ["jax"]}
  results, _, log = call()
  assert results["models"]["mlp"]["parts"]["jax"] == kept["models"]["mlp"]["parts"]["jax"]
  assert list(results["models"]["mlp"]["parts"]) == ["jax", "torch"]
  # A part with both, and a model with two parts.
  assert len([x for x in log if x == ("measure", "policy")]) == 3 * (1 + 2)
  assert len([x for x in log if x == ("measure", "TF32")]) == 3
