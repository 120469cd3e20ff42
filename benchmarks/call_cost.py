"""What a policy adds to Python's time: tracing a deep model, and an eager call of a small one.

    PYTHONPATH=. python benchmarks/call_cost.py

Each figure is the CPU time of this process under a policy over that without one. Both are measured
in turn, and the median of the ratios is printed with its quartiles.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import mpjax

BOUNDS = {"trace": 1.25, "eager call": 1.6}
"""The ratios that the project aims at."""


class Block(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x: Any) -> Any:
    x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
    return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
  layers: int
  width: int = 64

  @nn.compact
  def __call__(self, tokens: Any) -> Any:
    x = nn.Embed(100, self.width)(tokens)
    for _ in range(self.layers):
      x = Block(self.width)(x)
    return nn.Dense(100)(nn.LayerNorm()(x))


def loss_of(model: nn.Module) -> Callable[..., Any]:
  def loss(params: Any, tokens: Any) -> Any:
    logits = model.apply(params, tokens)
    return -jnp.mean(jax.nn.log_softmax(jnp.asarray(logits))[..., 0])

  return jax.value_and_grad(loss)


def trace_time(model: nn.Module, params: Any, tokens: Any) -> float:
  """Returns the CPU seconds to trace a training step, with nothing in JAX's caches."""
  jax.clear_caches()
  gc.collect()
  step = jax.jit(loss_of(model))
  start = time.process_time()
  step.trace(params, tokens)
  return time.process_time() - start


def call_time(model: nn.Module, params: Any, tokens: Any, calls: int = 20) -> float:
  """Returns the CPU seconds of a call outside of `jit`."""
  jax.block_until_ready(model.apply(params, tokens))
  gc.collect()
  start = time.process_time()
  for _ in range(calls):
    jax.block_until_ready(model.apply(params, tokens))
  return (time.process_time() - start) / calls


def ratios(measure: Callable[..., float], layers: int, rounds: int) -> list[float]:
  tokens = jnp.zeros((2, 16), jnp.int32)
  plain = Transformer(layers)
  policied = mpjax.with_policy(plain, "mixed_bfloat16")
  params = plain.init(jax.random.key(0), tokens)
  for model in (plain, policied):
    measure(model, params, tokens)
  found = []
  for _ in range(rounds):
    base = measure(plain, params, tokens)
    found.append(measure(policied, params, tokens) / base)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=9)
  rounds = parser.parse_args().rounds
  table = Table("", "policy / plain", "quartiles", "bound")
  for name, measure, layers in (("trace", trace_time, 24), ("eager call", call_time, 1)):
    found = ratios(measure, layers, rounds)
    low, middle, high = statistics.quantiles(found, n=4)
    table.add_row(name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(BOUNDS[name]))
  Console().print(table)


if __name__ == "__main__":
  main()
