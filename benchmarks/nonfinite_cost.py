"""What `mpjax.find_nonfinite` costs: a training step of a GPT, and the run that looks for an inf.

python benchmarks/nonfinite_cost.py --layers 24 --width 256 --length 128
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpjax
from benchmarks.models import Gpt
from mpjax._debug.find_nonfinite import Finder


def training(layers: int, width: int, length: int, batch: int, vocabulary: int, policy: str):
  """Returns a step, its state and a batch."""
  model = mpjax.with_policy(
    Gpt(layers=layers, width=width, heads=max(1, width // 64), vocabulary=vocabulary), policy
  )

  def loss_fn(params, model_state, batch, rng):
    logits = model.apply({"params": params}, batch[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    return loss, (model_state, {})

  tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, vocabulary)
  params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"]
  tx = mpjax.loss_scaling(optax.adamw(1e-3))
  step = mpjax.make_train_step(loss_fn, tx, donate=False)
  return step, mpjax.TrainState.create(params, tx), tokens


def seconds(run, rounds: int = 5) -> float:
  """Returns how long a call takes, the least of several."""
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return min(times)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (("layers", 24), ("width", 256), ("length", 128), ("batch", 2)):
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--vocabulary", type=int, default=1024)
  parser.add_argument("--policy", default="mixed_float16")
  options = parser.parse_args()
  step, state, batch = training(**vars(options))
  start = time.perf_counter()
  compiled = step.lower(state, batch).compile()
  print(f"step: compiled in {time.perf_counter() - start:.1f} s")
  first_step = seconds(lambda: compiled(state, batch), 1)
  one = seconds(lambda: compiled(state, batch))
  start = time.perf_counter()
  finder = Finder(step, (state, batch), {})
  print(f"find_nonfinite: traced in {time.perf_counter() - start:.1f} s")
  start = time.perf_counter()
  leaves = (jnp.float32(1), *finder.leaves)
  looking = finder.flags.lower(*leaves).compile()
  print(f"find_nonfinite: compiled in {time.perf_counter() - start:.1f} s")
  first = seconds(lambda: looking(*leaves), 1)
  run = seconds(lambda: looking(*leaves))
  print(f"first runs: step {first_step * 1e3:.0f} ms, find_nonfinite {first * 1e3:.0f} ms", end="")
  print(f" ({first / first_step:.2f}x)")
  print(f"later runs: step {one * 1e3:.0f} ms, find_nonfinite {run * 1e3:.0f} ms", end="")
  print(f" ({run / one:.2f}x)")
  for name, each in (("step", compiled), ("find_nonfinite", looking)):
    print(name, "temporaries", each.memory_analysis().temp_size_in_bytes // 2**20, "MiB")


if __name__ == "__main__":
  main()
