"""What `mpjax.audit` costs, compared with a trace of the same function.

PYTHONPATH=. python benchmarks/audit_cost.py --out benchmarks/results/audit/cpu.json

Each figure is the processor time of `mpjax.audit(f)(*args)`, divided by that of
`jax.make_jaxpr(f)(*args)`. They take turns in one process. Both get an equal `f`, under a policy,
that JAX has not seen before. *Cold*: JAX's caches are emptied before each of both, as in a new
process. *Warm*: JAX has traced the functions of `jax.numpy` and `jax.nn` in `f` before.
`str(report)` is not measured.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

# The scripts of this folder import one another by their names.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from measure import environment, orders, ratio
from models import Gpt

import mpjax

_INPUTS = jax.ShapeDtypeStruct((2, 128), "int32")
_BATCH = jax.ShapeDtypeStruct((2, 129), "int32")
_VOCABULARY = 1024


class NnxLayer(nnx.Module):
  """A layer of a transformer, as `models.Layer` is one of Linen."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x, mask):
    x = x + self.attention(self.norms[0](x), mask=mask)
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxGpt(nnx.Module):
  """A causal language model, as `models.Gpt` is one of Linen. Input: tokens [batch, length]."""

  def __init__(self, layers: int, width: int, heads: int, length: int, rngs: nnx.Rngs) -> None:
    self.tokens = nnx.Embed(_VOCABULARY, width, rngs=rngs)
    self.places = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, length, width)))
    self.layers = nnx.List([NnxLayer(width, heads, rngs) for _ in range(layers)])
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, _VOCABULARY, use_bias=False, rngs=rngs)

  def __call__(self, tokens):
    x = self.tokens(tokens) + self.places[...]
    mask = nnx.make_causal_mask(tokens)
    for layer in self.layers:
      x = layer(x, mask)
    return self.head(self.norm(x))


class Program(NamedTuple):
  """A function with its arguments.

  Fields:
    make: returns the function. JAX has no trace of it yet, but perhaps of what it calls.
    args: its arguments, without values where the function takes that.
  """

  make: Callable[[], Callable[..., Any]]
  args: Sequence[Any]


def cross_entropy(logits: Any, tokens: Any) -> Any:
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def linen_programs(layers: int, width: int, policy: str) -> dict[str, Program]:
  """Returns the forward pass and a training step of a Linen model under a policy."""
  model = mpjax.with_policy(
    Gpt(layers=layers, width=width, heads=4, vocabulary=_VOCABULARY), policy
  )
  variables = jax.eval_shape(model.init, jax.random.key(0), _INPUTS)
  tx = mpjax.loss_scaling(optax.adamw(1e-3), mpjax.SkipNonfinite())

  def forward():
    return lambda variables, tokens: model.apply(variables, tokens)

  def step():
    def loss_fn(params, model_state, batch, rng):
      loss = cross_entropy(model.apply({"params": params}, batch[:, :-1]), batch)
      return loss, (model_state, {})

    return mpjax.make_train_step(loss_fn, tx, donate=False)

  state = jax.eval_shape(lambda params: mpjax.TrainState.create(params, tx), variables["params"])
  return {
    "Linen, forward": Program(forward, (variables, _INPUTS)),
    "Linen, training step": Program(step, (state, _BATCH)),
  }


def nnx_programs(layers: int, width: int, policy: str) -> dict[str, Program]:
  """Returns the forward pass and a training step of an NNX model under a policy."""
  plain = NnxGpt(layers, width, 4, _INPUTS.shape[1], nnx.Rngs(0))
  model = mpjax.with_policy(plain, policy)
  tx = mpjax.loss_scaling(optax.adamw(1e-3), mpjax.SkipNonfinite())
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  def forward():
    return lambda model, tokens: model(tokens)

  def step():
    def loss_fn(model, batch):
      return cross_entropy(model(batch[:, :-1]), batch)

    def train(model, optimizer, batch):
      loss, grads = mpjax.value_and_grad(loss_fn, optimizer)(model, batch)
      optimizer.update(model, grads)
      return loss

    return train

  return {
    "NNX, forward": Program(forward, (model, _INPUTS)),
    "NNX, training step": Program(step, (model, optimizer, _BATCH)),
  }


def traced(program: Program) -> None:
  jax.make_jaxpr(program.make())(*program.args)


def audited(program: Program) -> None:
  mpjax.audit(program.make())(*program.args)


RUNS = {"trace": traced, "audit": audited}


def seconds(run: Callable[[Program], None], program: Program, *, cold: bool) -> float:
  """Returns the processor time of a run, with JAX's caches emptied before it if `cold`."""
  if cold:
    jax.clear_caches()
  gc.collect()
  start = time.process_time()
  run(program)
  return time.process_time() - start


def turns(program: Program, rounds: int, *, cold: bool) -> dict[str, list[float]]:
  """Returns the processor times of a trace and of an audit, once for each round."""
  times: dict[str, list[float]] = {name: [] for name in RUNS}
  for run in () if cold else RUNS.values():
    run(program)
  for order in orders([*RUNS], rounds):
    for name in order:
      times[name].append(seconds(RUNS[name], program, cold=cold))
  return times


def table_of(programs: dict[str, Any]) -> Table:
  """Returns the ratios of recorded times: a median, and its quartiles."""
  table = Table("", "trace, cold", "audit / trace, cold", "audit / trace, warm")
  for name, times in programs.items():
    cold, warm = times["cold"], times["warm"]
    trace = f"{statistics.median(cold['trace']):.2f} s"
    ratios = [str(ratio(each["audit"], each["trace"])) for each in (cold, warm)]
    table.add_row(name, trace, *ratios)
  return table


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--layers", type=int, default=24)
  parser.add_argument("--width", type=int, default=64)
  parser.add_argument("--policy", default="mixed_bfloat16")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--out", type=pathlib.Path, help="where to record the times, a JSON file")
  options = parser.parse_args()
  model = options.layers, options.width, options.policy
  programs = {**linen_programs(*model), **nnx_programs(*model)}
  times = {
    name: {
      "cold": turns(program, options.rounds, cold=True),
      "warm": turns(program, options.rounds, cold=False),
    }
    for name, program in programs.items()
  }
  Console().print(table_of(times))
  if options.out is not None:
    settings = {"layers": options.layers, "width": options.width, "policy": options.policy}
    record = {"environment": environment(), "settings": settings, "programs": times}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
