"""What `mpjax.compare` costs: a loss of a GPT, compared with itself under a policy.

python benchmarks/compare_cost.py --layers 12 --width 256 --length 128
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import optax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpjax
from benchmarks.models import Gpt


def losses(layers: int, width: int, length: int, batch: int, vocabulary: int, policy: str):
  """Returns a loss under a policy, the same in float32, and their arguments."""
  model = Gpt(layers=layers, width=width, heads=max(1, width // 64), vocabulary=vocabulary)
  tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, vocabulary)
  params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"]

  def loss_of(model):
    def loss_fn(params, tokens):
      logits = model.apply({"params": params}, tokens[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn

  return loss_of(mpjax.with_policy(model, policy)), loss_of(model), (params, tokens)


def seconds(run) -> float:
  """Returns how long a call takes whose functions are not compiled yet."""
  jax.clear_caches()
  start = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (("layers", 12), ("width", 256), ("length", 128), ("batch", 2)):
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--vocabulary", type=int, default=1024)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--policy", default="mixed_bfloat16")
  options = vars(parser.parse_args())
  rounds = options.pop("rounds")
  f, g, args = losses(**options)

  def two_runs():
    return [jax.jit(jax.value_and_grad(fn))(*args) for fn in (f, g)]

  def comparison():
    return mpjax.compare(f, g)(*args).rows[0].output

  plain = min(seconds(two_runs) for _ in range(rounds))
  compared = min(seconds(comparison) for _ in range(rounds))
  print(f"two runs of value_and_grad, traced and compiled: {plain:.2f} s")
  print(f"mpjax.compare: {compared:.2f} s ({compared / plain:.2f}x)")


if __name__ == "__main__":
  main()
