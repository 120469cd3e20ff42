"""Bad micro-batches in every phase of a window.

With `mpjax.accumulate_gradients` a bad one does not count: the window waits. The control is plain
optax, fed with the means of every so many good ones. With `make_train_step(accumulate=...)` a bad
one drops the window; that control is the one of `train_steps.py`.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.campaign import control, network, train_steps
from tests.campaign.network import GRADIENT, LOSS, STATISTICS, Faults
from tests.campaign.outcome import (
  Job,
  Outcome,
  check_clean,
  digest,
  follow,
  good_steps,
  judge,
  require,
  unlike_digests,
  unlike_oracle,
)
from tests.campaign.programs import OPTIMIZERS, Program, Setup, scale_arguments
from tests.campaign.train_steps import Sizes
from tests.loss_scale_oracle import Oracle


def growing(done: Any) -> Any:
  """Two micro-batches for each of the first three updates, then four."""
  return jnp.where(done < 3, 2, 4)


WINDOWS = {"2": 2, "4": 4, "2, then 4": growing}


def longest(window: str) -> int:
  return int(window[-1])


SETUPS = (
  (Setup("float16", "float16", "adam", hysteresis=2), "4"),
  (Setup("float32", "float32", "clip adamw schedule", lanes=True), "2"),
  (Setup("bfloat16", "bfloat16", "sgd momentum"), "2, then 4"),
)

DROPPED = Setup("float16", "float16", "lion", 8, ema=True, hysteresis=2)

FIELDS = ("parameters", "optimizer", "statistics", "step", "sum", "phase", "updates")
WAITING = "accumulation: the window waits"


def jobs(small: bool, guard: bool) -> list[Job]:
  if small:
    return []
  sizes = Sizes(9, 48)
  waiting = [functools.partial(attack, *setup, sizes, guard=guard) for setup in SETUPS]
  dropping = functools.partial(drop, DROPPED, Sizes(9, 32), guard=guard)
  return [Job("accumulation", run) for run in (*waiting, dropping)]


def drop(setup: Setup, sizes: Sizes, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """One bad micro-batch of eight drops the window."""
  outcome = Outcome("accumulation: the window is dropped")
  for found in train_steps.attack(setup, sizes, rng, guard=guard):
    outcome.add(found)
  return [outcome]


class Window(NamedTuple):
  """The control of a window: a run, and what was added up since its last update."""

  plain: control.Plain
  total: Any
  phase: Any
  updates: Any


def attack(
  setup: Setup, window: str, sizes: Sizes, rng: np.random.Generator, *, guard: bool
) -> list[Outcome]:
  clean, outcome = Outcome(""), Outcome(WAITING)
  meet(clean, setup, window, network.no_faults(sizes), rng, guard)
  check_clean(clean, outcome, guard)
  begin, hit = time.perf_counter(), set()
  for place in (GRADIENT, LOSS, STATISTICS):
    faults = network.plan(rng, *sizes, place, setup.compute)
    hit |= meet(outcome, setup, window, faults, rng, guard)
  require(hit == set(range(longest(window))), f"{setup.name}: only the phases {hit} were hit")
  outcome.seconds = time.perf_counter() - begin
  times = run_program(setup, window, guard).compilations
  outcome.lose(times - 1, f"{setup.name}: compiled {times} times")
  return [outcome]


def meet(
  outcome: Outcome,
  setup: Setup,
  window: str,
  faults: Faults,
  rng: np.random.Generator,
  guard: bool,
) -> set[int]:
  """Runs a setup with faults, and its control; returns the phases of the window that were hit."""
  planted = faults.place != network.NOWHERE
  data = train_steps.draw(setup, planted.shape, rng)
  trail = run_program(setup, window, guard)(
    data.params, data.keys, data.index, faults, data.batches
  )
  digests, finite, scale, flags, before = jax.device_get(trail)

  order, active, seen = good_steps(planted)
  scales = np.take_along_axis(before, order, 1)
  if setup.compute != "float16":
    scales = np.ones_like(scales)
  index = np.take_along_axis(data.index, order, 1)
  program = control_program(setup, window)
  expected, phases = jax.device_get(
    program(data.params, data.keys, index, scales, active, data.batches)
  )
  wrong = unlike_digests(digests, expected, seen, FIELDS) | {"not finite": ~finite}
  if guard:
    numbers = [follow(Oracle(**scale_arguments(setup)), ~run) for run in planted]
    wrong |= {"flag": flags == planted, "scale": unlike_oracle(scale, numbers)}
  judge(outcome, planted, wrong, f"{setup.name}, windows of {window}")
  return set(np.take_along_axis(phases, seen, 1)[planted].tolist())


@functools.cache
def run_program(setup: Setup, window: str, guard: bool) -> Any:
  """Returns the jitted runs: each batch is a micro-batch of `mpjax.accumulate_gradients`."""
  inner = OPTIMIZERS[setup.optimizer]()
  inner = inner if setup.stored == "float32" else mpjax.master_weights(inner)
  config = mpjax.DynamicLossScale(**scale_arguments(setup))
  tx = mpjax.loss_scaling(
    mpjax.accumulate_gradients(inner, WINDOWS[window]), config if guard else mpjax.NoLossScale()
  )
  step = mpjax.make_train_step(network.loss_in(setup.compute), tx)

  def run(params, key, index, faults, batches):
    statistics = network.initial_statistics()
    key = jax.random.wrap_key_data(key)
    state = mpjax.TrainState.create(params, tx, model_state=statistics, rng=key)

    def body(state, x):
      before = mpjax.loss_scaling_metrics(state.opt_state)["loss_scale"]
      state, metrics = step(state, network.make_batch(batches, *x))
      (numbers,) = state.opt_state.loss_scale.values()
      return state, (*observe(state), numbers, metrics["finite"], before)

    return jax.lax.scan(body, state, (index, faults))[1]

  return Program.of(run, setup.lanes)


def observe(state: mpjax.TrainState) -> tuple[Any, Any]:
  own = state.opt_state.inner_state
  parts = state.params, own.inner_state, state.model_state, state.step
  parts = *parts, own.total, own.micro_batches, own.updates_done
  return digest(*parts), control.is_finite(parts)


@functools.cache
def control_program(setup: Setup, window: str) -> Any:
  """Returns the jitted control: digests, and the phase of the window, from the start on."""
  inner = OPTIMIZERS[setup.optimizer]()
  loss_fn = network.loss_in(setup.compute)
  every = WINDOWS[window]

  def run(params, key, index, scales, active, batches):
    plain = control.start(inner, params, network.initial_statistics(), False)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    none = jnp.zeros((), jnp.int32)
    key = jax.random.wrap_key_data(key)
    state = Window(plain, zeros, none, none)

    def body(state, x):
      index, scale, active = x
      plain = state.plain
      batch = network.make_batch(batches, index, network.no_faults())
      own = jax.random.fold_in(key, plain.step)
      _, grads, new = control.gradients(loss_fn, plain.params, plain.statistics, batch, own, scale)
      total = jax.tree.map(lambda t, g: t + g / scale, state.total, grads)
      count = state.phase + 1
      full = count == (every(state.updates) if callable(every) else every)
      mean = jax.tree.map(lambda t: t / count.astype(jnp.float32), total)
      moved = control.apply(inner, plain, mean, new)
      waited = plain._replace(statistics=new, step=plain.step + 1)
      after = Window(
        jax.tree.map(lambda a, b: jnp.where(full, a, b), moved, waited),
        jax.tree.map(lambda t: jnp.where(full, 0.0, t), total),
        jnp.where(full, 0, count),
        state.updates + full,
      )
      after = jax.tree.map(lambda a, b: jnp.where(active, a, b), after, state)
      return after, (observe_plain(after), after.phase)

    first = observe_plain(state)[None], none[None]
    rows = jax.lax.scan(body, state, (index, scales, active))[1]
    return jax.tree.map(lambda *x: jnp.concatenate(x), first, rows)

  return Program.of(run, setup.lanes)


def observe_plain(state: Window) -> Any:
  plain = state.plain
  parts = plain.params, (plain.master, plain.opt_state), plain.statistics, plain.step
  return digest(*parts, state.total, state.phase, state.updates)
