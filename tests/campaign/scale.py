"""How the scale moves: at its floor and ceiling, with hysteresis, from restored counters.

The oracle is the scaler in pure Python, and the number of steps that it would have applied.
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign.outcome import (
  SCALE_FIELDS,
  Job,
  Outcome,
  judge,
  oracle_numbers,
  require,
  unlike_oracle,
)
from tests.loss_scale_oracle import LIMIT, Oracle

FINITE, BAD_GRADIENT, BAD_UPDATE = range(3)


class Case(NamedTuple):
  """One configuration."""

  name: str
  config: dict[str, Any]
  restored: bool = False  # each run starts from counters of its own
  lanes: bool = False


CASES = (
  Case("floor", {"init_scale": 8.0, "growth_interval": 5}),
  Case("floor", {"init_scale": 2.0**-2, "min_scale": 2.0**-4, "growth_interval": 4}, lanes=True),
  Case("floor", {"init_scale": 2.0**-122, "min_scale": 2.0**-126, "growth_interval": 6}),
  Case("ceiling", {"init_scale": 2.0**23, "growth_interval": 2}),
  Case("ceiling", {"init_scale": 2.0**10, "max_scale": 2.0**10, "growth_interval": 3}, lanes=True),
  Case("ceiling", {"init_scale": 2.0**122, "max_scale": 2.0**126, "growth_interval": 1}),
  Case("hysteresis", {"hysteresis": 2, "growth_interval": 4}),
  Case("hysteresis", {"hysteresis": 3, "growth_interval": 2, "min_scale": 2.0**10}),
  Case("hysteresis", {"hysteresis": 7, "growth_interval": 6}, lanes=True),
  Case("interval 1", {"growth_interval": 1}),
  Case("interval 1", {"growth_interval": 1, "hysteresis": 2, "max_scale": 2.0**18}),
  Case("restored counters", {"growth_interval": 7, "hysteresis": 3}, True),
  Case("restored counters", {"growth_interval": 2000}, True),
  Case(
    "restored counters", {"growth_interval": 3, "init_scale": 1.0, "min_scale": 0.25}, True, True
  ),
  Case("odd factors", {"growth_factor": 1.5, "backoff_factor": 0.3, "growth_interval": 2}),
  Case(
    "odd factors",
    {
      "init_scale": 400.0,
      "min_scale": 0.37,
      "max_scale": 1000.0,
      "growth_interval": 3,
      "hysteresis": 2,
    },
  ),
  Case("odd factors", {"growth_factor": 16.0, "backoff_factor": 2.0**-9, "growth_interval": 1}),
)


def jobs(small: bool, guard: bool) -> list[Job]:
  cases, runs, steps = (CASES[7:14:3], 3, 20) if small else (CASES, 11, 40)
  found = [
    Job("scale", functools.partial(attack, case, runs, steps, guard=guard)) for case in cases
  ]
  return [*found, Job("scale", functools.partial(attack_two, runs, steps, guard=guard))]


def attack(
  case: Case, runs: int, steps: int, rng: np.random.Generator, *, guard: bool
) -> list[Outcome]:
  outcome = Outcome(f"scale: {case.name}")
  begin = time.perf_counter()
  codes = plan(rng, runs, steps)
  initial = [restored(case, rng) if case.restored else state_of(case) for _ in range(runs)]
  state = jax.tree.map(lambda *x: np.stack(x), *initial)
  step = run_program(case, guard)
  applied, finite, numbers = jax.device_get(step(state, codes))
  require(np.array_equal(~finite, codes != FINITE), f"{case}: other faults than those planned")

  expected = []
  for run in range(runs):
    oracle = Oracle(**case.config)
    for field in SCALE_FIELDS:
      setattr(oracle, field, np.asarray(getattr(initial[run], field)).item())
    flags = codes[run]
    expected.append(
      [oracle_numbers(oracle.step(c != BAD_GRADIENT, c != BAD_UPDATE)) for c in flags]
    )
  wrong = {
    "scale or counters": unlike_oracle(numbers, expected),
    "parameters": applied != np.cumsum(codes == FINITE, axis=1),
  }
  judge(outcome, codes != FINITE, wrong, str(case))
  outcome.lose(step._cache_size() - 1, f"{case}: compiled {step._cache_size()} times")
  outcome.seconds = time.perf_counter() - begin
  return [outcome]


def plan(rng: np.random.Generator, runs: int, steps: int) -> np.ndarray:
  """Returns what each step is to be; some runs are all bad, or all bad but for one step."""
  share = rng.choice([0.05, 0.3, 0.6, 0.9, 1.0], (runs, 1))
  bad = rng.random((runs, steps)) < share
  kind = np.where(rng.random((runs, steps)) < 0.2, BAD_UPDATE, BAD_GRADIENT)
  return np.where(bad, kind, FINITE)


def optimizer() -> optax.GradientTransformation:
  """Returns one that takes steps of -1, and an infinite one where a gradient is negative."""
  return optax.stateless(
    lambda grads, _: jax.tree.map(lambda g: jnp.where(g < 0, jnp.inf, -1.0), grads)
  )


def transformation(config: dict[str, Any], guard: bool) -> Any:
  """Returns the optimizer; without the guard it moves otherwise, and updates are not looked at."""
  scale = mpjax.DynamicLossScale(**config)
  return mpjax.loss_scaling(optimizer(), scale if guard else other(scale), check_updates=guard)


def other(scale: mpjax.DynamicLossScale) -> mpjax.DynamicLossScale:
  """Returns a configuration that grows one step later and backs off twice as far."""
  return dataclasses.replace(
    scale,
    growth_interval=scale.growth_interval + 1,
    backoff_factor=scale.backoff_factor / 2,
  )


def state_of(case: Case) -> Any:
  (scale,) = transformation(case.config, True).init(jnp.zeros(2)).loss_scale.values()
  return jax.tree.map(np.asarray, scale)


def restored(case: Case, rng: np.random.Generator) -> Any:
  """Returns a state in the middle of a run, as a checkpoint of it would be restored."""
  target = transformation(case.config, True).init(jnp.zeros(2))
  config = mpjax.DynamicLossScale(**case.config)
  exponents = int(np.log2(config.min_scale)), int(np.log2(config.max_scale))
  many = rng.choice([0, 5, LIMIT - 3])
  values = {
    "scale": 2.0 ** rng.integers(exponents[0], exponents[1] + 1),
    "good_steps": rng.integers(max(0, config.growth_interval - 9), config.growth_interval),
    "hysteresis": rng.integers(0, config.hysteresis + 1),
    **{"total": many, "skipped": many, "consecutive_skips": many, "floor_hits": many},
  }
  arrays = mpjax.checkpoints.to_arrays(target)
  for path, array in arrays.items():
    field = path.rpartition("/")[2]
    arrays[path] = np.asarray(values.get(field, array), array.dtype)
  (scale,) = mpjax.checkpoints.restore_like(target, arrays).loss_scale.values()
  return jax.tree.map(np.asarray, scale)


def run_program(case: Case, guard: bool) -> Any:
  """Returns the jitted runs of one configuration."""
  tx = transformation(case.config, guard)

  def run(scale, codes):
    params = jnp.zeros(2)
    state = tx.init(params)
    (label,) = state.loss_scale
    state = state._replace(loss_scale={label: scale})

    def body(carry, code):
      params, state = carry
      factor = mpjax.loss_scaling_metrics(state)["loss_scale"]
      grads = factor * jnp.where(code == BAD_UPDATE, -1.0, jnp.asarray([1.0, 2.0]))
      grads = jnp.where(code == BAD_GRADIENT, jnp.asarray([1.0, jnp.nan]), grads)
      bare, _ = optimizer().update(grads, optimizer().init(params))
      finite = jnp.logical_and(jnp.all(jnp.isfinite(grads)), jnp.all(jnp.isfinite(bare)))
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      (scale,) = state.loss_scale.values()
      return (params, state), (-params[1], finite, scale)

    return jax.lax.scan(body, (params, state), codes)[1]

  in_turn = lambda *args: jax.lax.map(lambda a: run(*a), args)  # noqa: E731
  return jax.jit(jax.vmap(run) if case.lanes else in_turn)


TWO = {"a": {"growth_interval": 3}, "b": {"init_scale": 4.0, "growth_interval": 2, "hysteresis": 2}}


def attack_two(runs: int, steps: int, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """Two losses into one optimizer: one that overflows skips for both, its scale alone backs off."""
  outcome = Outcome("scale: one of two losses")
  begin = time.perf_counter()
  bad = rng.random((2, runs, steps)) < rng.choice([0.1, 0.3, 0.6], (1, runs, 1))
  applied, numbers = jax.device_get(two_program(guard)(*bad))
  good = ~bad.any(0)
  wrong = {"parameters": applied != np.cumsum(good, axis=1)}
  for number, (name, config) in enumerate(TWO.items()):
    expected = []
    for run in range(runs):
      oracle, rows = Oracle(**config), []
      for finite, step_good in zip(~bad[number, run], good[run], strict=True):
        oracle.step(finite, step_good)
        oracle.bad_updates = 0  # The other loss was to blame.
        rows.append(oracle_numbers(oracle))
      expected.append(rows)
    wrong[f"scale of {name}"] = unlike_oracle(numbers[name], expected)
  judge(outcome, ~good, wrong, "two losses")
  outcome.seconds = time.perf_counter() - begin
  return [outcome]


@functools.cache
def two_program(guard: bool) -> Any:
  scales = {name: mpjax.DynamicLossScale(**config) for name, config in TWO.items()}
  if not guard:
    scales = {name: other(scale) for name, scale in scales.items()}
  tx = mpjax.loss_scaling(optimizer(), scales)

  def run(bad_a, bad_b):
    params = jnp.zeros(2)

    def body(carry, bad):
      params, state = carry
      grads = {}
      for name, is_bad in zip(TWO, bad, strict=True):
        scale = mpjax.loss_scaling_metrics(state, name=name)["loss_scale"]
        grads[name] = jnp.where(is_bad, jnp.asarray([jnp.inf, 0.0]), scale)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      named = {label.partition(":")[0]: scale for label, scale in state.loss_scale.items()}
      return (params, state), (-params[1], named)

    return jax.lax.scan(body, (params, tx.init(params)), (bad_a, bad_b))[1]

  return jax.jit(jax.vmap(run))
