"""The compiled programs: a run by mpjax as a user writes it, its control, and a witness.

The run is `mpjax.make_train_step` and nothing else of ours. The control is plain optax. The witness
says in plain JAX whether a step without any guard would have met something that is not finite.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign import control, network
from tests.campaign.outcome import digest

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


class Setup(NamedTuple):
  """One kind of run; each is compiled once."""

  compute: str
  stored: str
  optimizer: str
  parts: int = 1  # micro-batches
  ema: bool = False
  hysteresis: int = 1
  lanes: bool = False  # runs go side by side: a skip is then a selection, not a branch

  @property
  def name(self) -> str:
    masters = "" if self.stored == "float32" else " with masters"
    return f"{self.compute}{masters}, {self.optimizer}, {self.parts} micro-batch(es)"


FIELDS = ("parameters", "optimizer", "statistics", "average", "step")
"""What a step commits together."""


def scale_arguments(setup: Setup) -> dict[str, Any]:
  limits = {"min_scale": network.MIN_SCALE, "max_scale": 2.0**12}
  return {"init_scale": 64.0, "growth_interval": 3, "hysteresis": setup.hysteresis, **limits}


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled run, called for each of several, or compiled for all of them side by side.

  The arguments have a leading axis of runs, but for the last, which is common to all.
  """

  run: Any  # jitted, and vmapped if there are lanes
  lanes: bool

  @classmethod
  def of(cls, run: Callable[..., Any], lanes: bool) -> "Program":
    def all_lanes(*args):
      return jax.vmap(lambda *own: run(*own, args[-1]))(*args[:-1])

    return cls(jax.jit(all_lanes if lanes else run), lanes)

  def __call__(self, *args: Any) -> Any:
    if self.lanes:
      return self.run(*args)
    *own, common = args
    runs = range(len(jax.tree.leaves(own)[0]))
    results = [
      jax.block_until_ready(self.run(*jax.tree.map(lambda x, i=i: x[i], own), common)) for i in runs
    ]
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(results))

  @property
  def compilations(self) -> int:
    return self.run._cache_size()


def once(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `make` with a memory, for jobs in several threads."""
  lock, remembered = threading.Lock(), functools.cache(make)

  @functools.wraps(make)
  def get(*args):
    with lock:
      return remembered(*args)

  return get


@once
def run_program(setup: Setup, guard: bool, max_retries: int = 0) -> Any:
  """Returns the jitted runs over (params, keys, index, faults, batches)."""
  run = make_run(setup, guard, max_retries=max_retries)

  def from_pool(params, key, index, faults, batches):
    return run(params, key, (index, faults), lambda x: network.make_batch(batches, *x))

  return Program.of(from_pool, setup.lanes)


def make_run(setup: Setup, guard: bool, **arguments: Any) -> Callable[..., Any]:
  """Returns a run as a user of mpjax writes it, with what is observed of it.

  Args:
    setup: what to run.
    guard: skip bad steps; else nothing is looked at.
    **arguments: more of them for `mpjax.make_train_step`.

  Returns:
    A function of the initial parameters, the key, what there is for each step, and how a batch is
    made of that; it returns what was committed last, and the trail of all steps.
  """
  inner = OPTIMIZERS[setup.optimizer]()
  inner = inner if setup.stored == "float32" else mpjax.master_weights(inner)
  config = mpjax.DynamicLossScale(**scale_arguments(setup))
  tx = mpjax.loss_scaling(inner, config if guard else mpjax.NoLossScale())
  arguments |= {"accumulate": setup.parts, "ema_decay": 0.5 if setup.ema else None}
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
      return state, (*observe(state), numbers, metrics["finite"], before)

    state, trail = jax.lax.scan(body, state, xs)
    return committed(state), trail

  return run


def committed(state: mpjax.TrainState) -> Any:
  """Returns what a step commits together, in the order of `FIELDS`."""
  return state.params, state.opt_state.inner_state, state.model_state, state.ema, state.step


def observe(state: mpjax.TrainState) -> tuple[Any, Any, Any]:
  """Returns digests, whether all is finite, and whether parameters are their rounded masters."""
  agree = jnp.asarray(True)
  if any(p.dtype != jnp.float32 for p in state.params.values()):
    masters = mpjax.master_params(state.opt_state)
    same = [jnp.all(masters[n].astype(p.dtype) == p) for n, p in state.params.items()]
    agree = jnp.all(jnp.stack(same))
  parts = committed(state)
  return digest(*parts), control.is_finite(parts), agree


def committed_plain(state: control.Plain) -> Any:
  """Returns the same of the control: leaf for leaf like `committed`."""
  return (
    state.params,
    (state.master, state.opt_state),
    state.statistics,
    state.ema,
    state.step,
  )


@once
def control_program(setup: Setup, devices: int) -> Any:
  """Returns the jitted control: the last state, and digests from the start on."""
  inner = OPTIMIZERS[setup.optimizer]()
  loss_fn = network.loss_in(setup.compute)

  def run(params, key, index, faults, scales, active, batches):
    state = control.start(inner, params, network.initial_statistics(), setup.ema)
    key = jax.random.wrap_key_data(key)

    def body(state, x):
      index, fault, scale, active = x
      batch = network.make_batch(batches, index, fault)
      own = jax.random.fold_in(key, state.step)
      _, grads, new = control.gradients(
        loss_fn, state.params, state.statistics, batch, own, scale, setup.parts, devices
      )
      grads = jax.tree.map(lambda g: g / scale, grads)
      state = control.apply(inner, state, grads, new, active)
      return state, digest(*committed_plain(state))

    first = digest(*committed_plain(state))
    state, digests = jax.lax.scan(body, state, (index, faults, scales, active))
    return state, jnp.concatenate([first[None], digests])

  return Program.of(run, setup.lanes)


@once
def witness_program(compute: str) -> Any:
  """Returns a jitted function: were loss, gradients and statistics finite, without any guard?

  Of the whole batch, whatever micro-batches it was cut into: a fault comes with one of its rows.
  """
  loss_fn = network.loss_in(compute)

  def finite(params, statistics, scale, key, index, fault, batches):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    batch = network.make_batch(batches, index, fault)
    key = jax.random.wrap_key_data(key)
    return control.is_finite(*control.gradients(loss_fn, params, statistics, batch, key, scale))

  steps = jax.vmap(finite, (0, 0, 0, None, 0, 0, None))
  return jax.jit(jax.vmap(steps, (0, 0, 0, 0, 0, 0, None)))
