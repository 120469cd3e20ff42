"""The rig of all that trains: a run as a user of mpjax writes it, its control, and a witness.

The run is `mpjax.make_train_step`, or what a loop by hand has instead of it. The control is plain
optax, which is never shown a batch with a fault. The oracle of the scale tells in plain Python
which steps are applied, and at which scale. The witness says in plain JAX whether a step without
any guard would have met something that is not finite.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.campaign import control, network
from tests.campaign.network import GRADIENT, INPUT, LOSS, NOWHERE, STATISTICS
from tests.campaign.outcome import Outcome, differing, digest, judge, require
from tests.loss_scale_oracle import NUMBERS, Oracle
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


PLACES = {GRADIENT: "gradients", LOSS: "the loss", STATISTICS: "statistics", INPUT: "input data"}
FIELDS = ("parameters", "optimizer", "statistics", "average", "step")
"""What a step commits together."""

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
  by_hand: bool = False  # instead of `mpjax.make_train_step`

  @property
  def name(self) -> str:
    masters = "" if self.stored == "float32" else " with masters"
    hand = ", by hand" if self.by_hand else ""
    return f"{self.compute}{masters}, {self.optimizer}, {self.parts} micro-batch(es){hand}"


class Sizes(NamedTuple):
  """How many runs of how many steps, for each setup and kind of place."""

  runs: int
  steps: int


def compiled(run: Callable[..., Any], lanes: bool) -> Any:
  """Returns `run`, over a leading axis of runs in all arguments but the last, common to all."""

  # They go side by side, as lanes of a vmap, or one after the other.
  def all_runs(*args):
    one = lambda own: run(*own, args[-1])  # noqa: E731
    return jax.vmap(one)(args[:-1]) if lanes else jax.lax.map(one, args[:-1])

  return jax.jit(all_runs)


def attack(setup, sizes, classes, rng, *, guard) -> list[Outcome]:
  """Lets runs of one setup meet no faults, and then one kind of place after the other.

  Args:
    setup: what to run.
    sizes: how often, for each kind of place.
    classes: the name of the class of faults by the kind of place.
    rng: draws data and faults.
    guard: whether what should catch the faults is in place.
  """
  program = run_program(setup, guard)
  clean, outcomes = Outcome(""), [Outcome(name) for name in classes.values()]
  for place, outcome in zip((NOWHERE, *classes), (clean, *outcomes), strict=True):
    faults = network.no_faults(sizes)
    if place != NOWHERE:
      faults = network.plan(rng, *sizes, place, setup.compute)
    data = draw(setup, sizes, rng)
    final, trail = program(*data[:3], faults, data[3])
    judge_trail(outcome, setup, faults, data, final, trail, guard)
  # What is wrong without a fault is a loss, unless nothing was guarded anyway.
  text = f"without any fault: {clean.first}"
  require(guard or not clean.lost, text)
  outcomes[0].lose(clean.lost, text)
  times = program._cache_size()
  outcomes[0].lose(times - 1, f"{setup.name}: compiled {times} times")
  return outcomes


def draw(setup: Setup, sizes: Sizes, rng: np.random.Generator) -> tuple[Any, ...]:
  """Returns parameters, data of keys and numbers of batches for each run, and all batches."""
  params = [network.initial_parameters(rng) for _ in range(sizes.runs)]
  stored = jnp.dtype(setup.stored)
  params = jax.tree.map(lambda *p: np.stack(p).astype(stored), *params)
  keys = rng.integers(0, 2**32, (sizes.runs, 2), dtype=np.uint32)
  return params, keys, rng.integers(0, BATCHES, sizes), network.pool(rng, BATCHES)


def judge_trail(outcome, setup, faults, data, final, trail, guard):
  """Lets the control run, and puts down where the trail of a run differs from it."""
  params, keys, index, batches = data
  digests, finite, agree, scale, flags, before = jax.device_get(trail)
  applied = faults.place == NOWHERE
  oracles = [Oracle(**scale_arguments(setup)) for _ in applied]
  numbers = [
    [list(n.values()) for n in oracle.run(row)]
    for oracle, row in zip(oracles, applied, strict=True)
  ]
  # The control is fed the good steps of a run in their order, and its bad ones to fill it up.
  order = np.argsort(~applied, axis=1, kind="stable")
  shown, active = (np.take_along_axis(x, order, 1) for x in (index, applied))
  seen = np.cumsum(applied, axis=1)
  scales = np.take_along_axis(before[-1], order, 1).astype(np.float32)
  if setup.compute != "float16":  # Only there does a scale round differently, among subnormals.
    scales = np.ones_like(scales)
  program = control_program(setup._replace(hysteresis=1, by_hand=False))
  plain, expected = program(params, keys, shown, scales, active, batches)
  unlike = digests != np.asarray(expected)[np.arange(len(seen))[:, None], seen]
  wrong = dict(zip(FIELDS, np.moveaxis(unlike, -1, 0), strict=True))
  wrong |= {"not finite": ~finite, "masters": ~agree}
  wrong["the last state"] = np.zeros_like(applied)
  wrong["the last state"][:, -1] = differing(final, plain)
  if guard:
    wrong["flag"] = flags != applied
    found = np.stack([getattr(scale, field) for field in NUMBERS], axis=-1)
    wrong["scale"] = np.any(found != numbers, axis=-1)
  right = judge(outcome, ~applied, wrong, setup.name)
  if guard:
    witness = witness_program(setup.compute)
    met = ~np.asarray(witness(*before, keys, index, faults, batches))
    require(np.all((met == ~applied)[right]), f"{setup.name}: other faults than those planned")


def scale_arguments(setup: Setup) -> dict[str, Any]:
  limits = {"min_scale": network.MIN_SCALE, "max_scale": 2.0**12}
  return {"init_scale": 64.0, "growth_interval": 3, "hysteresis": setup.hysteresis, **limits}


@functools.cache
def run_program(setup: Setup, guard: bool) -> Any:
  """Returns the runs over (params, key, index, faults, batches), as a user of mpjax writes them."""
  # Without the guard nothing is looked at, or only the optimizer skips. A run returns what was
  # committed last, and the trail of all steps.
  inner = OPTIMIZERS[setup.optimizer]()
  inner = inner if setup.stored == "float32" else mpjax.master_weights(inner)
  config = mpjax.DynamicLossScale(**scale_arguments(setup))
  is_scaled = guard or setup.by_hand
  tx = mpjax.loss_scaling(inner, config if is_scaled else mpjax.NoLossScale())
  if setup.by_hand:
    step = functools.partial(step_by_hand, setup, tx, guard)
  else:
    step = mpjax.make_train_step(network.loss_in(setup.compute), tx, micro_batches=setup.parts)

  def run(params, key, index, faults, batches):
    statistics = network.initial_statistics()
    key = jax.random.wrap_key_data(key)
    state = mpjax.TrainState.create(params, tx, model_state=statistics, rng=key)

    def trained(state):
      """Returns what is averaged: nothing, the masters or the parameters."""
      if not setup.ema or setup.stored == "float32":
        return state.params if setup.ema else ()
      return mpjax.states.master_params(state.opt_state)

    def body(carry, x):
      state, average = carry
      scale = mpjax.loss_scaling_metrics(state.opt_state)["loss_scale"]
      before = state.params, state.model_state, scale
      state, metrics = step(state, network.make_batch(batches, *x))
      (numbers,) = state.opt_state.loss_scale.values()
      moved = jax.tree.map(lambda e, t: e + (t - e) * 0.5, average, trained(state))
      average = mpjax.keep_if_skipped(state.opt_state, moved, average) if guard else moved
      seen = *observe(setup, state, average), numbers, metrics["finite"], before
      return (state, average), seen

    (state, average), trail = jax.lax.scan(body, (state, trained(state)), (index, faults))
    return committed(state, average), trail

  return compiled(run, setup.lanes)


def step_by_hand(setup: Setup, tx: Any, guard: bool, state: mpjax.TrainState, batch: Any) -> Any:
  """Returns what a step of `mpjax.make_train_step` does, but for most of its metrics."""
  loss_fn, key = network.loss_in(setup.compute), jax.random.fold_in(state.rng, state.step)
  of_params = lambda params: loss_fn(params, state.model_state, batch, key)  # noqa: E731
  grad_fn = jax.value_and_grad(mpjax.scaled(of_params, state.opt_state), has_aux=True)
  # The view has the values of parameters in float16, whose gradients would be divided there.
  (loss, (statistics, _)), grads = grad_fn(mpjax.convert(state.params, "float32"))
  watched = loss, statistics
  updates, opt_state = tx.update(grads, state.opt_state, state.params, loss=watched)
  params = mpjax.apply_updates(state.params, updates, opt_state)
  rest = {"model_state": statistics, "step": state.step + 1}
  if guard:
    rest = mpjax.keep_if_skipped(opt_state, rest, {name: getattr(state, name) for name in rest})
  state = state._replace(params=params, opt_state=opt_state, **rest)
  return state, mpjax.loss_scaling_metrics(opt_state)


def committed(state: mpjax.TrainState, average: Any) -> Any:
  """Returns what a step commits together, in the order of `FIELDS`."""
  own = state.opt_state.inner_state
  return state.params, own, state.model_state, average, state.step


def observe(setup: Setup, state: mpjax.TrainState, average: Any) -> tuple[Any, Any, Any]:
  """Returns digests, whether all is finite, and whether parameters are their rounded masters."""
  agree = jnp.asarray(True)
  if setup.stored != "float32":
    masters = mpjax.states.master_params(state.opt_state)
    same = [jnp.all(stored(masters[n], p.dtype) == p) for n, p in state.params.items()]
    agree = jnp.all(jnp.stack(same))
  parts = committed(state, average)
  return digest(*parts), control.is_finite(parts), agree


@functools.cache
def control_program(setup: Setup) -> Any:
  """Returns the control: the last state, and digests from the start on."""
  inner, loss_fn = OPTIMIZERS[setup.optimizer](), network.loss_in(setup.compute)

  def plainly(state):
    """Returns the same as `committed` leaf for leaf."""
    own = state.master, state.opt_state
    return state.params, own, state.statistics, state.ema, state.step

  def run(params, key, index, scales, active, batches):
    first = control.start(inner, params, network.initial_statistics(), setup.ema)
    key = jax.random.wrap_key_data(key)

    def body(state, x):
      index, scale, active = x
      batch = network.make_batch(batches, index, network.no_faults())
      own = jax.random.fold_in(key, state.step)
      parts = loss_fn, state.params, state.statistics, batch, own, scale, setup.parts
      _, grads, new = control.gradients(*parts)
      grads = jax.tree.map(lambda g: g / scale, grads)
      state = control.where(active, control.update(inner, state, grads, new), state)
      return state, digest(*plainly(state))

    state, digests = jax.lax.scan(body, first, (index, scales, active))
    return plainly(state), jnp.concatenate([digest(*plainly(first))[None], digests])

  return compiled(run, setup.lanes)


@functools.cache
def witness_program(compute: str) -> Any:
  """Returns a jitted function: were loss, gradients and statistics finite, without any guard?"""
  # Of the whole batch, whatever micro-batches it was cut into: a fault comes with one of its rows.
  loss_fn = network.loss_in(compute)

  def finite(params, statistics, scale, key, index, fault, batches):
    batch, key = network.make_batch(batches, index, fault), jax.random.wrap_key_data(key)
    parts = control.float32(params), statistics, batch, key, scale
    return control.is_finite(*control.gradients(loss_fn, *parts))

  steps = jax.vmap(finite, (0, 0, 0, None, 0, 0, None))
  return jax.jit(jax.vmap(steps, (0, 0, 0, 0, 0, 0, None)))
