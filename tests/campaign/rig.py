"""The rig of all that trains: a run as a user of mpjax writes it, its control, and a witness.

The run is `mpjax.make_train_step` and nothing else of ours. The control is plain optax, which is
never shown a batch with a fault. The oracle of the scale tells in plain Python which steps are
applied, and at which scale. The witness says in plain JAX whether a step without any guard would
have met something that is not finite.
"""

import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign import control, network
from tests.campaign.network import GRADIENT, INPUT, LARGE, LOSS, NOWHERE, STATISTICS, Faults
from tests.campaign.outcome import (
  Outcome,
  check_clean,
  differing,
  digest,
  good_steps,
  judge,
  oracle_numbers,
  require,
  unlike_digests,
  unlike_oracle,
)
from tests.loss_scale_oracle import Oracle
from tests.programs import stored

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
  "adam": lambda: optax.adam(2**-4, b1=0.5, b2=0.5),
  "sgd momentum": lambda: optax.sgd(2**-3, momentum=0.5, nesterov=True),
  "clip adamw schedule": lambda: optax.chain(
    optax.clip(0.25),
    optax.adamw(
      optax.piecewise_constant_schedule(2**-4, {4: 0.5, 9: 0.5}), b1=0.5, b2=0.5, weight_decay=0.5
    ),
  ),
  "lion": lambda: optax.lion(2**-4, b1=0.5, b2=0.5, weight_decay=0.25),
  "adamax": lambda: optax.adamax(2**-4, b1=0.5, b2=0.5),
  "ema of gradients": lambda: optax.chain(optax.ema(0.5, debias=False), optax.scale(-(2**-3))),
}
"""Constants are powers of two, and no other product is added to: whether XLA contracts it cannot
show. A product with the reciprocal of a debiasing term, say, is divided again at once."""

WINDOWS: dict[str, Any] = {
  "": 1,
  "2": 2,
  "4": 4,
  "2, then 4": lambda done: jnp.where(done < 3, 2, 4),
}
"""The micro-batches of `mpjax.accumulate_gradients`; the last character is the most of them."""

PLACES = {GRADIENT: "gradients", LOSS: "the loss", STATISTICS: "statistics", INPUT: "input data"}
FIELDS = ("parameters", "optimizer", "statistics", "average", "step", "sum", "phase", "updates")
"""What a step commits together; the last three with windows of accumulation."""

BATCHES = 64


class Setup(NamedTuple):
  """One kind of run; each is compiled once."""

  compute: str
  stored: str
  optimizer: str
  parts: int = 1  # micro-batches of `mpjax.make_train_step`
  ema: bool = False
  hysteresis: int = 1
  lanes: bool = False  # runs go side by side: a skip is then a selection, not a branch
  window: str = ""  # of `mpjax.accumulate_gradients`
  retries: int = 0

  @property
  def name(self) -> str:
    masters = "" if self.stored == "float32" else " with masters"
    steps = f"{self.parts} micro-batch(es), windows of {self.window or 1}, {self.retries} retries"
    return f"{self.compute}{masters}, {self.optimizer}, {steps}"


class Sizes(NamedTuple):
  """How many runs of how many steps, for each setup and kind of place."""

  runs: int
  steps: int


class Story(NamedTuple):
  """What the oracle says of all steps, [runs, steps]."""

  met: np.ndarray  # bool: something was not finite, in the first run of the batch at least
  applied: np.ndarray  # bool
  scale: np.ndarray  # of the last run of the batch
  numbers: np.ndarray  # of the scaler after the step


@dataclasses.dataclass
class Program:
  """A compiled run, called for each of several, or compiled for all of them side by side.

  The arguments have a leading axis of runs, but for the last, which is common to all.
  """

  run: Any  # jitted, and vmapped if there are lanes
  lanes: bool = False
  place: Callable[..., Any] = lambda *args: args  # puts the arguments of one run on devices
  differing: int = 0  # runs whose replicas differed

  @classmethod
  def of(cls, run: Callable[..., Any], lanes: bool) -> "Program":
    def all_lanes(*args):
      return jax.vmap(lambda *own: run(*own, args[-1]))(*args[:-1])

    return cls(jax.jit(all_lanes if lanes else run), lanes)

  def __call__(self, *args: Any) -> Any:
    if self.lanes:
      return self.run(*args)
    *own, common = args
    results = []
    for i in range(len(jax.tree.leaves(own)[0])):
      mine = self.place(*jax.tree.map(lambda x, i=i: x[i], own), common)
      results.append(jax.block_until_ready(self.run(*mine)))
      copies = [x for x in jax.tree.leaves(results[-1]) if len(x.devices()) > 1]
      self.differing += any(_differ(x) for x in copies if x.is_fully_replicated)
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(results))


def _differ(x: jax.Array) -> bool:
  return len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) > 1


def once(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `make` with a memory, for jobs in several threads."""
  lock, remembered = threading.Lock(), functools.cache(make)

  @functools.wraps(make)
  def get(*args):
    with lock:
      return remembered(*args)

  return get


def attack(
  setup, sizes, classes, rng, *, guard, plan=network.plan, program=None, devices=1
) -> list[Outcome]:
  """Lets runs of one setup meet no faults, and then one kind of place after the other.

  Args:
    setup: what to run.
    sizes: how often, for each kind of place.
    classes: the name of the class of faults by the kind of place.
    rng: draws data and faults.
    guard: whether what should catch the faults is in place.
    plan: draws the faults.
    program: runs instead of `run_program(setup, guard)`.
    devices: how many share each batch, each with a key of its own.
  """
  program = program or run_program(setup, guard)
  clean, outcomes = Outcome(""), [Outcome(name) for name in classes.values()]
  hit: set[tuple[int, bool]] = set()
  for place, outcome in zip((NOWHERE, *classes), (clean, *outcomes), strict=True):
    faults = plan(rng, *sizes, place, setup.compute) if place else network.no_faults(sizes)
    data = draw(setup, sizes, rng)
    final, trail = program(*data[:3], faults, data[3])
    hit |= judge_trail(outcome, setup, faults, data, final, trail, guard, devices)
  check_clean(clean, outcomes[0], guard)
  # Each phase of a window was hit; if batches are run again, some were saved by that and some not.
  phases, ends = range(int(setup.window[-1:] or 1)), {False, setup.retries > 0}
  require(hit == set(itertools.product(phases, ends)), f"{setup.name}: only {hit} were hit")
  times = program.run._cache_size()
  outcomes[0].lose(times - 1, f"{setup.name}: compiled {times} times")
  outcomes[0].lose(program.differing, f"{setup.name}: replicas differ")
  return outcomes


def draw(setup: Setup, sizes: Sizes, rng: np.random.Generator) -> tuple[Any, ...]:
  """Returns parameters, data of keys and numbers of batches for each run, and all batches."""
  params = [network.initial_parameters(rng) for _ in range(sizes.runs)]
  stored = jnp.dtype(setup.stored)
  params = jax.tree.map(lambda *p: np.stack(p).astype(stored), *params)
  keys = rng.integers(0, 2**32, (sizes.runs, 2), dtype=np.uint32)
  return params, keys, rng.integers(0, BATCHES, sizes), network.pool(rng, BATCHES)


def judge_trail(outcome, setup, faults, data, final, trail, guard, devices):
  """Lets the control run, and puts down where the trail of a run differs from it.

  Returns:
    For the faults that were met, the phases of the window and whether the step was applied.
  """
  params, keys, index, batches = data
  digests, finite, agree, scale, flags, before = jax.device_get(trail)
  story = tell(setup, faults)
  order, active, seen = good_steps(~story.applied)
  scales = np.take_along_axis(story.scale if guard else before[-1], order, 1).astype(np.float32)
  if setup.compute != "float16":  # Only there does a scale round differently, among subnormals.
    scales = np.ones_like(scales)
  shown, *given = (np.take_along_axis(x, order, 1) for x in (index, *faults))
  # What is no fault at the scale of its step stays.
  given = Faults(*given)._replace(place=np.where(active, given[0], NOWHERE).astype(np.int32))
  program = control_program(setup._replace(hysteresis=1, retries=0), devices)
  plain, rows = program(params, keys, shown, given, scales, active, batches)
  expected, phases = jax.device_get(rows)
  wrong = unlike_digests(digests, expected, seen, FIELDS)
  wrong |= {"not finite": ~finite, "masters": ~agree}
  wrong["the last state"] = np.zeros_like(story.met)
  wrong["the last state"][:, -1] = differing(final, plain)
  if guard:
    wrong |= {"flag": flags != story.applied, "scale": unlike_oracle(scale, story.numbers)}
  right = judge(outcome, story.met, wrong, setup.name)
  if guard:
    witness = witness_program(setup.compute)
    found = ~np.asarray(witness(*before, keys, index, faults, batches))
    require(np.all((found == story.met)[right]), f"{setup.name}: other faults than those planned")
  hit = zip(np.take_along_axis(phases, seen, 1)[story.met], story.applied[story.met], strict=True)
  return {(int(phase), bool(applied)) for phase, applied in hit}


def tell(setup: Setup, faults: Faults) -> Story:
  """Returns what the oracle says of all steps.

  A planted derivative overflows by its product with the scale: `LARGE` does at `MIN_SCALE`, and
  less at a higher one. What is not finite before it is scaled stays so, whatever the scale. The
  planted term is added to the mean, so that it is the same in a micro-batch.
  """
  steps = []
  for places, values in zip(faults.place, faults.value.astype(np.float64), strict=True):
    oracle = Oracle(**scale_arguments(setup))
    for place, value in zip(places, values, strict=True):
      forward, after = place in (NOWHERE, GRADIENT), []
      for _ in range(1 + setup.retries):
        scale = oracle.scale
        # False for a NaN.
        finite = bool(forward and abs(value) / LARGE * scale < network.MIN_SCALE)
        after.append(copy.copy(oracle.step(finite)))
        if finite or not forward or scale == oracle.limits[0]:
          break
        if oracle.scale == scale:  # Hysteresis withheld it, and the same would overflow again.
          oracle.scale = scale * oracle.factors[1]
      if not finite:  # Nothing helped: the batch was to blame, and costs one step of the scale.
        oracle = after[0]
      steps.append((len(after) > 1 or not finite, finite, scale, oracle_numbers(oracle)))
  shape = faults.place.shape
  return Story(*(np.reshape(x, (*shape, *np.shape(x)[1:])) for x in zip(*steps, strict=True)))


def scale_arguments(setup: Setup) -> dict[str, Any]:
  limits = {"min_scale": network.MIN_SCALE, "max_scale": 2.0**12}
  return {"init_scale": 64.0, "growth_interval": 3, "hysteresis": setup.hysteresis, **limits}


@once
def run_program(setup: Setup, guard: bool) -> Program:
  """Returns the runs over (params, keys, index, faults, batches)."""
  run = make_run(setup, guard)

  def from_pool(params, key, index, faults, batches):
    return run(params, key, (index, faults), lambda x: network.make_batch(batches, *x))

  return Program.of(from_pool, setup.lanes)


def make_run(setup: Setup, guard: bool, **arguments: Any) -> Callable[..., Any]:
  """Returns a run as a user of mpjax writes it, with what is observed of it.

  Args:
    setup: what to run.
    guard: skip bad steps; else nothing is looked at, or batches are not run again.
    **arguments: more of them for `mpjax.make_train_step`.

  Returns:
    A function of the initial parameters, the key, what there is for each step, and how a batch is
    made of that; it returns what was committed last, and the trail of all steps.
  """
  inner = OPTIMIZERS[setup.optimizer]()
  inner = inner if setup.stored == "float32" else mpjax.master_weights(inner)
  inner = mpjax.accumulate_gradients(inner, WINDOWS[setup.window]) if setup.window else inner
  config = mpjax.DynamicLossScale(**scale_arguments(setup))
  tx = mpjax.loss_scaling(inner, config if guard or setup.retries else mpjax.NoLossScale())
  arguments |= {"accumulate": setup.parts, "max_retries": setup.retries if guard else 0}
  arguments["ema_decay"] = 0.5 if setup.ema else None
  step = mpjax.make_train_step(network.loss_in(setup.compute), tx, **arguments)

  def run(params, key, xs, make_batch):
    statistics = network.initial_statistics()
    key = jax.random.wrap_key_data(key)
    state = mpjax.TrainState.create(params, tx, model_state=statistics, rng=key, ema=setup.ema)

    def body(state, x):
      scale = mpjax.loss_scaling_metrics(state.opt_state)["loss_scale"]
      before = state.params, state.model_state, scale
      state, metrics = step(state, make_batch(x))
      (numbers,) = state.opt_state.loss_scale.values()
      return state, (*observe(setup, state), numbers, metrics["finite"], before)

    state, trail = jax.lax.scan(body, state, xs)
    return committed(setup, state), trail

  return run


def committed(setup: Setup, state: mpjax.TrainState) -> Any:
  """Returns what a step commits together, in the order of `FIELDS`."""
  own, waiting = state.opt_state.inner_state, ()
  if setup.window:
    own, waiting = own.inner_state, (own.total, own.micro_batches, own.updates_done)
  return state.params, own, state.model_state, state.ema, state.step, *waiting


def observe(setup: Setup, state: mpjax.TrainState) -> tuple[Any, Any, Any]:
  """Returns digests, whether all is finite, and whether parameters are their rounded masters."""
  agree = jnp.asarray(True)
  if setup.stored != "float32":
    masters = mpjax.master_params(state.opt_state)
    same = [jnp.all(stored(masters[n], p.dtype) == p) for n, p in state.params.items()]
    agree = jnp.all(jnp.stack(same))
  parts = committed(setup, state)
  return digest(*parts), control.is_finite(parts), agree


@once
def control_program(setup: Setup, devices: int) -> Program:
  """Returns the control: the last state, and from the start on digests and phases of windows."""
  inner, every = OPTIMIZERS[setup.optimizer](), WINDOWS[setup.window]
  loss_fn = network.loss_in(setup.compute)

  def plainly(state):
    """Returns the same as `committed` leaf for leaf."""
    own = state.master, state.opt_state
    parts = state.params, own, state.statistics, state.ema, state.step
    return *parts, *((state.total, state.phase, state.updates) if setup.window else ())

  def run(params, key, index, faults, scales, active, batches):
    first = control.start(inner, params, network.initial_statistics(), setup.ema)
    key = jax.random.wrap_key_data(key)

    def body(state, x):
      index, fault, scale, active = x
      batch, own = network.make_batch(batches, index, fault), jax.random.fold_in(key, state.step)
      parts = loss_fn, state.params, state.statistics, batch, own, scale, setup.parts, devices
      _, grads, new = control.gradients(*parts)
      grads = jax.tree.map(lambda g: g / scale, grads)
      state = control.where(active, control.update(inner, every, state, grads, new), state)
      return state, (digest(*plainly(state)), state.phase)

    state, rows = jax.lax.scan(body, first, (index, faults, scales, active))
    before = digest(*plainly(first)), first.phase
    return plainly(state), jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), before, rows)

  return Program.of(run, setup.lanes)


@once
def witness_program(compute: str) -> Any:
  """Returns a jitted function: were loss, gradients and statistics finite, without any guard?

  Of the whole batch, whatever micro-batches it was cut into: a fault comes with one of its rows.
  """
  loss_fn = network.loss_in(compute)

  def finite(params, statistics, scale, key, index, fault, batches):
    batch, key = network.make_batch(batches, index, fault), jax.random.wrap_key_data(key)
    parts = control.float32(params), statistics, batch, key, scale
    return control.is_finite(*control.gradients(loss_fn, *parts))

  steps = jax.vmap(finite, (0, 0, 0, None, 0, 0, None))
  return jax.jit(jax.vmap(steps, (0, 0, 0, 0, 0, 0, None)))
