"""How the scale moves: at its floor and ceiling, with hysteresis, from restored counters.

The oracle is the scaler in pure Python, and the number of steps that it would have applied.
"""

import dataclasses
import functools
from typing import Any

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


CASES: dict[str, tuple[dict[str, Any], ...]] = {
  "floor": (
    {"init_scale": 8.0, "growth_interval": 5},
    {"init_scale": 2.0**-2, "min_scale": 2.0**-4, "growth_interval": 4},
    {"init_scale": 2.0**-122, "min_scale": 2.0**-126, "growth_interval": 6},
  ),
  "ceiling": (
    {"init_scale": 2.0**23, "growth_interval": 2},
    {"init_scale": 2.0**10, "max_scale": 2.0**10, "growth_interval": 3},
    {"init_scale": 2.0**122, "max_scale": 2.0**126, "growth_interval": 1},
  ),
  "hysteresis": (
    {"hysteresis": 2, "growth_interval": 4},
    {"hysteresis": 3, "growth_interval": 2, "min_scale": 2.0**10},
    {"hysteresis": 7, "growth_interval": 6},
  ),
  "interval 1": (
    {"growth_interval": 1},
    {"growth_interval": 1, "hysteresis": 2, "max_scale": 2.0**18},
  ),
  "restored counters": (
    {"growth_interval": 7, "hysteresis": 3},
    {"growth_interval": 2000},
    {"growth_interval": 3, "init_scale": 1.0, "min_scale": 0.25},
  ),
  "odd factors": (
    {"growth_factor": 1.5, "backoff_factor": 0.3, "growth_interval": 2},
    {
      **{"init_scale": 400.0, "min_scale": 0.37, "max_scale": 1000.0},
      **{"growth_interval": 3, "hysteresis": 2},
    },
    {"growth_factor": 16.0, "backoff_factor": 2.0**-9, "growth_interval": 1},
  ),
}
"""Configurations; with restored counters, each run starts from some of its own."""


def jobs(small: bool, guard: bool) -> list[Job]:
  # Runs go side by side in every other one: a skip is then a selection, not a branch.
  cases = [(name, c, i % 2 == 1) for name, configs in CASES.items() for i, c in enumerate(configs)]
  cases, runs, steps = (cases[7:14:3], 5, 20) if small else (cases, 12, 40)
  return [
    Job("scale", functools.partial(attack, *case, runs, steps, guard=guard)) for case in cases
  ]


def attack(name, config, lanes, runs: int, steps: int, rng, *, guard: bool) -> list[Outcome]:
  outcome = Outcome(f"scale: {name}")
  codes = plan(rng, runs, steps)
  initial = [start(name, config, rng) for _ in range(runs)]
  program = run_program(config, guard, lanes)
  state = jax.tree.map(lambda *x: np.stack(x), *initial)
  applied, finite, numbers = jax.device_get(program(state, codes))
  require(np.array_equal(~finite, codes != FINITE), f"{name}: other faults than those planned")

  expected = []
  for run in range(runs):
    oracle = Oracle(**config)
    for field in SCALE_FIELDS:
      setattr(oracle, field, np.asarray(getattr(initial[run], field)).item())
    steps_of = (oracle.step(c != BAD_GRADIENT, c != BAD_UPDATE) for c in codes[run])
    expected.append([oracle_numbers(step) for step in steps_of])
  wrong = {
    "scale or counters": unlike_oracle(numbers, expected),
    "parameters": applied != np.cumsum(codes == FINITE, axis=1),
  }
  judge(outcome, codes != FINITE, wrong, f"{name}, {config}")
  times = program._cache_size()
  outcome.lose(times - 1, f"{name}, {config}: compiled {times} times")
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


def scale_of(config: dict[str, Any], guard: bool) -> mpjax.DynamicLossScale:
  """Returns a configuration; without the guard it grows one step later, backs off twice as far."""
  scale = mpjax.DynamicLossScale(**config)
  later, lower = scale.growth_interval + 1, scale.backoff_factor / 2
  return scale if guard else dataclasses.replace(scale, growth_interval=later, backoff_factor=lower)


def start(name: str, config: dict[str, Any], rng: np.random.Generator) -> Any:
  """Returns a first state, or one in the middle of a run as it is restored from a checkpoint."""
  scale = scale_of(config, True)
  state = mpjax.loss_scaling(optimizer(), scale).init(jnp.zeros(2))
  if name == "restored counters":
    exponents = int(np.log2(scale.min_scale)), int(np.log2(scale.max_scale))
    many = rng.choice([0, 5, LIMIT - 3])
    values = {
      "scale": 2.0 ** rng.integers(exponents[0], exponents[1] + 1),
      "good_steps": rng.integers(max(0, scale.growth_interval - 9), scale.growth_interval),
      "hysteresis": rng.integers(0, scale.hysteresis + 1),
      **dict.fromkeys(("total", "skipped", "consecutive_skips", "floor_hits"), many),
    }
    arrays = mpjax.checkpoints.to_arrays(state)
    for path, array in arrays.items():
      value = values.get(path.rpartition("/")[2], array)
      arrays[path] = np.asarray(value, array.dtype)
    state = mpjax.checkpoints.restore_like(state, arrays)
  (numbers,) = state.loss_scale.values()
  return jax.tree.map(np.asarray, numbers)


def run_program(config: dict[str, Any], guard: bool, lanes: bool) -> Any:
  """Returns the jitted runs of one configuration; unguarded, updates are not looked at either."""
  tx = mpjax.loss_scaling(optimizer(), scale_of(config, guard), check_updates=guard)

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
  return jax.jit(jax.vmap(run) if lanes else in_turn)
