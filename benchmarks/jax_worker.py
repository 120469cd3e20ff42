"""The process that runs the JAX versions of a model; `gpu_bench.py` starts it and asks.

Every measurement begins from the same parameters, with the state of an optimizer that made no step
yet: no version trains on what another has computed, and only one state is in memory at a time. The
first two steps are not measured.
"""

import concurrent.futures
import gc
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import draws
import gpu_versions
import jax
import jax.numpy as jnp
import measure
import workers
from models import SIZES

import mpjax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
CHECKED = 5
"""Steps after which the loss is compared."""


class Session:
  """One model and its compiled steps."""

  def hello(self) -> dict[str, Any]:
    """Says where this process runs."""
    environment = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    attention = gpu_versions.attention_here(device)
    return {"environment": environment, "memory_limit": memory, "attention": attention}

  def describe(self, model: str, size: str, half: str) -> dict[str, Any]:
    """Says what another framework needs to build the same model."""
    return gpu_versions.described(model, size, half)

  def load(self, model: str, size: str, half: str, attention: str) -> dict[str, Any]:
    """Draws parameters and batch."""
    self.half, case = half, SIZES[size][model]
    described = gpu_versions.described(model, size, half)
    self.flat = draws.parameters(described["shapes"])
    self.variables = jax.eval_shape(lambda: gpu_versions.tree(self.flat))
    self.batch = draws.batch(**described["batch"])
    self.versions = gpu_versions.versions(case, half, attention)
    self.traced: dict[str, Any] = {}
    self.compiled: dict[str, Any] = {}
    self.on_device: Any = None
    return {"parameters": sum(x.size for x in jax.tree.leaves(self.variables[0]))}

  def trace(self, names: Sequence[str]) -> dict[str, Any]:
    """Traces each version, and says which cannot be, or has no point."""
    failed = {}
    for name in names:
      workers.say(f"trace {name}")
      version = self.versions[name]
      try:
        state = jax.eval_shape(version.begin, *self.variables)
        if name == "float8" and not gpu_versions.float8_matmuls(version, state, self.batch):
          failed[name] = "no matmul qualifies"
          continue
        with version.context():
          self.traced[name] = jax.jit(version.step, donate_argnums=0).trace(state, *self.batch)
      except Exception as error:
        failed[name] = workers.why(error)
    return {"failed_versions": failed}

  def compile(self) -> dict[str, Any]:
    """Compiles what was traced, several at once, the `LEADERS` first."""
    leaders = [name for name in gpu_versions.LEADERS if name in self.traced]
    others = [name for name in self.traced if name not in leaders]
    found: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
      for wave in (leaders, others):
        futures = {pool.submit(self._compile, name): name for name in wave}
        for future in concurrent.futures.as_completed(futures):
          name = futures[future]
          try:
            found[name] = future.result()
          except Exception as error:
            found[name] = {"failed": workers.why(error)}
          workers.say(f"compiled {name}")
    self.traced.clear()
    return found

  def _compile(self, name: str) -> dict[str, Any]:
    start = time.perf_counter()
    with self.versions[name].context():
      compiled = self.traced[name].lower().compile()
    self.compiled[name] = compiled
    memory = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return {
      "compile_seconds": round(time.perf_counter() - start, 1),
      "temp_bytes": int(memory.temp_size_in_bytes),
      "cudnn_attention": "__cudnn$fmha" in text,
      "float8_calls": text.count("__cublas$lt$matmul$f8"),
    }

  def begin(self, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the first state of a version, and the batch, on the device."""
    if self.on_device is None:
      self.on_device = jax.device_put((gpu_versions.tree(self.flat), self.batch))
      self.flat = {}
    (params, rest), batch = self.on_device
    # Copies: a step is given its state to write over.
    return self.versions[name].begin(*jax.tree.map(jnp.array, (params, rest))), batch

  def check(self, name: str) -> dict[str, Any]:
    """Runs a version for the first time: its losses, and about how long a step takes."""
    state, batch = self.begin(name)
    step = self.compiled[name]
    losses = []
    for _ in range(CHECKED):
      state, loss = step(state, *batch)
      losses.append(float(loss))
    start = time.perf_counter()
    for _ in range(2):
      state, loss = step(state, *batch)
    jax.block_until_ready((state, loss))
    return {"losses": losses, "seconds": (time.perf_counter() - start) / 2}

  def measure(self, name: str, repeats: int) -> dict[str, Any]:
    """Says how long a step takes, of several in a row."""
    state, batch = self.begin(name)
    step = self.compiled[name]
    # Twice: a graph of kernels is recorded anew for arrays at other addresses.
    for _ in range(2):
      state, loss = step(state, *batch)
    jax.block_until_ready((state, loss))
    start = time.perf_counter()
    for _ in range(repeats):
      state, loss = step(state, *batch)
    jax.block_until_ready((state, loss))
    seconds = (time.perf_counter() - start) / repeats
    return {"seconds": seconds, "finite": math.isfinite(float(loss))}

  def drop(self, name: str) -> dict[str, Any]:
    """Forgets a version that failed."""
    self.compiled.pop(name, None)
    gc.collect()
    return {}


def main() -> None:
  """Answers until the questions end."""
  session = Session()
  names = ("hello", "describe", "load", "trace", "compile", "check", "measure", "drop")
  workers.serve({name: getattr(session, name) for name in names})


if __name__ == "__main__":
  main()
