"""Measure the cost of `mpjax.audit`, `mpjax.compare` and `mpjax.find_nonfinite` for a GPT.

  python benchmarks/diagnostics_cost.py audit --out benchmarks/results/audit/cpu.json
  python benchmarks/diagnostics_cost.py compare --layers 12 --width 256 --length 128
  python benchmarks/diagnostics_cost.py find_nonfinite --layers 24 --width 256 --length 128

`audit` is compared with `jax.make_jaxpr` of the same function, in processor time. They take turns
in one process. Both get an equal function that JAX has not seen before. *Cold*: JAX's caches are
emptied before each. *Warm*: JAX has traced the functions of `jax.numpy` and `jax.nn` before.
`str(report)` is not measured.

`compare` is compared with tracing, compiling and running `jax.value_and_grad` of both functions.

`find_nonfinite` is compared with a training step: the time of compiling, of the first run and of
later runs, and the memory of temporaries.
"""

import argparse
import functools
import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from measure import environment, orders, ratio, taken, write
from models import Gpt
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import mpjax
from mpjax._diagnose.nonfinite.find_nonfinite import Finder

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


def linen_loss(model: Any, params: Any, tokens: Any) -> Any:
  return cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens)


def linen_step(model: Any, tx: optax.GradientTransformation) -> Any:
  """Returns a training step of a Linen model."""

  def loss_fn(params, model_state, batch, rng):
    return linen_loss(model, params, batch), (model_state, {})

  return mpjax.make_train_step(loss_fn, tx, donate=False)


def linen_model(options: argparse.Namespace) -> tuple[Gpt, Any, jax.Array]:
  """Returns a model without a policy, its parameters, and a batch of tokens."""
  width, vocabulary = options.width, options.vocabulary
  heads = max(1, width // 64)
  model = Gpt(layers=options.layers, width=width, heads=heads, vocabulary=vocabulary)
  shape = (options.batch, options.length + 1)
  tokens = jax.random.randint(jax.random.key(0), shape, 0, vocabulary)
  return model, jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"], tokens


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
  """Returns the result of a call, which is waited for, and its seconds."""
  start = time.perf_counter()
  result = jax.block_until_ready(run())
  return result, time.perf_counter() - start


def least_seconds(run: Callable[[], Any], rounds: int, *, cold: bool = False) -> float:
  """Returns the least seconds of several calls, with JAX's caches emptied before each if `cold`."""
  times = []
  for _ in range(rounds):
    if cold:
      jax.clear_caches()
    times.append(timed(run)[1])
  return min(times)


def linen_programs(layers: int, width: int, policy: str) -> dict[str, Program]:
  """Returns the forward pass and a training step of a Linen model under a policy."""
  model = mpjax.with_policy(
    Gpt(layers=layers, width=width, heads=4, vocabulary=_VOCABULARY), policy
  )
  variables = jax.eval_shape(model.init, jax.random.key(0), _INPUTS)
  tx = mpjax.loss_scaling(optax.adamw(1e-3), mpjax.SkipNonfinite())

  def forward():
    return lambda variables, tokens: model.apply(variables, tokens)

  state = jax.eval_shape(lambda params: mpjax.TrainState.create(params, tx), variables["params"])
  return {
    "Linen, forward": Program(forward, (variables, _INPUTS)),
    "Linen, training step": Program(functools.partial(linen_step, model, tx), (state, _BATCH)),
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
      loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model, batch)
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


def cpu_seconds(run: Callable[[Program], None], program: Program, *, cold: bool) -> float:
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
      times[name].append(cpu_seconds(RUNS[name], program, cold=cold))
  return times


def table_of(programs: Mapping[str, Any]) -> Table:
  """Returns the ratios of recorded times: a median, and its quartiles."""
  table = Table("", "trace, cold", "audit / trace, cold", "audit / trace, warm")
  for name, times in programs.items():
    cold, warm = times["cold"], times["warm"]
    trace = f"{statistics.median(cold['trace']):.2f} s"
    ratios = [str(ratio(each["audit"], each["trace"])) for each in (cold, warm)]
    table.add_row(name, trace, *ratios)
  return table


def cost_of_audit(options: argparse.Namespace, console: Console) -> None:
  model = options.layers, options.width, options.policy
  programs = {**linen_programs(*model), **nnx_programs(*model)}
  times = {
    name: {
      "cold": turns(program, options.rounds, cold=True),
      "warm": turns(program, options.rounds, cold=False),
    }
    for name, program in programs.items()
  }
  console.print(table_of(times))
  if options.out is not None:
    settings = {"layers": options.layers, "width": options.width, "policy": options.policy}
    write(options.out, {"environment": environment(), "settings": settings, "programs": times})


def cost_of_compare(options: argparse.Namespace, console: Console) -> None:
  model, *args = linen_model(options)
  low = functools.partial(linen_loss, mpjax.with_policy(model, options.policy))
  plain = functools.partial(linen_loss, model)

  def two_runs():
    return [jax.jit(jax.value_and_grad(fn))(*args) for fn in (low, plain)]

  def comparison():
    return mpjax.compare(low, plain)(*args).rows[0].output

  runs = least_seconds(two_runs, options.rounds, cold=True)
  compared = least_seconds(comparison, options.rounds, cold=True)
  console.print(f"two runs of value_and_grad, traced and compiled: {runs:.2f} s")
  console.print(f"mpjax.compare: {compared:.2f} s ({compared / runs:.2f}x)")


def cost_of_find_nonfinite(options: argparse.Namespace, console: Console) -> None:
  model, params, batch = linen_model(options)
  tx = mpjax.loss_scaling(optax.adamw(1e-3))
  step = linen_step(mpjax.with_policy(model, options.policy), tx)
  state = mpjax.TrainState.create(params, tx)
  compiled, seconds = timed(lambda: step.lower(state, batch).compile())
  console.print(f"step: compiled in {seconds:.1f} s")
  step_times = run_times(lambda: compiled(state, batch), options.rounds)
  finder, seconds = timed(lambda: Finder(step, (state, batch), {}))
  console.print(f"find_nonfinite: traced in {seconds:.1f} s")
  runs, seconds = timed(lambda: [*finder.runs()])
  console.print(f"find_nonfinite: compiled in {len(runs)} pieces and run in {seconds:.1f} s")
  times = run_times(lambda: [*finder.runs()][-1].flags, options.rounds)
  for which, of_step, found in zip(("first", "later"), step_times, times, strict=True):
    milliseconds = f"step {of_step * 1e3:.0f} ms, find_nonfinite {found * 1e3:.0f} ms"
    console.print(f"{which} runs: {milliseconds} ({found / of_step:.2f}x)")
  pieces = [ran.piece.flagged.lower(ran.values).compile() for ran in runs]
  for name, each in (("step", [compiled]), ("the largest piece of find_nonfinite", pieces)):
    temporaries = max(one.memory_analysis().temp_size_in_bytes for one in each)
    console.print(f"{name}: {temporaries // 2**20} MiB of temporaries")


def run_times(run: Callable[[], Any], rounds: int) -> tuple[float, float]:
  """Returns the seconds of the first call, and the least of later ones."""
  return timed(run)[1], least_seconds(run, rounds)


def arguments() -> argparse.Namespace:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  diagnostics = parser.add_subparsers(required=True)
  audit = diagnostics.add_parser("audit")
  audit.set_defaults(measure=cost_of_audit)
  audit.add_argument("--out", type=pathlib.Path, help="where to record the times, a JSON file")
  compare = diagnostics.add_parser("compare")
  compare.set_defaults(measure=cost_of_compare)
  find_nonfinite = diagnostics.add_parser("find_nonfinite")
  find_nonfinite.set_defaults(measure=cost_of_find_nonfinite)
  for each, layers, width, policy, rounds in (
    (audit, 24, 64, "mixed_bfloat16", 5),
    (compare, 12, 256, "mixed_bfloat16", 3),
    (find_nonfinite, 24, 256, "mixed_float16", 5),
  ):
    each.add_argument("--layers", type=int, default=layers)
    each.add_argument("--width", type=int, default=width)
    each.add_argument("--policy", default=policy)
    each.add_argument("--rounds", type=int, default=rounds)
  for each in (compare, find_nonfinite):
    each.add_argument("--length", type=int, default=128)
    each.add_argument("--batch", type=int, default=2)
    each.add_argument("--vocabulary", type=int, default=_VOCABULARY)
  return parser.parse_args()


def main() -> None:
  options, console = arguments(), Console()
  console.print(taken(environment()), highlight=False)
  options.measure(options, console)


if __name__ == "__main__":
  main()
