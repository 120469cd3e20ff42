"""Values that are not finite, in a step written with `mpjax.loss_scaling` and `select_tree`.

The control is plain optax at the recorded scales. In float32 and bfloat16 it runs at scale 1: only
in float16 does a scale round differently, among subnormals. The model is a Flax one, the optimizers
are those of everyday, and nothing is exact. So run and control share their compiled pieces, the
gradients and the addition of updates: another program may add in another order, or contract a
product and a sum. All runs go side by side, as lanes of a vmap.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import mpjax
from tests.campaign import control
from tests.campaign.network import GRADIENT, LARGE, LOSS, NOWHERE, STATISTICS
from tests.campaign.outcome import (
  Job,
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
from tests.campaign.rig import once
from tests.integration.rig import OPTIMIZERS, Model, average, loss_fn
from tests.loss_scale_oracle import Oracle
from tests.programs import options_of_users

CONFIG = {"init_scale": 2.0**8, "growth_interval": 3, "max_scale": 2.0**12, "hysteresis": 2}
PLACES = {GRADIENT: "gradients", LOSS: "the loss", STATISTICS: "statistics"}
DTYPES = ("float32", "bfloat16", "float16")
FIELDS = ("parameters", "optimizer", "statistics, average and step")
BATCHES = 40


def jobs(small: bool, guard: bool) -> list[Job]:
  names, dtypes = list(OPTIMIZERS), DTYPES
  if small:
    names, dtypes = ["sgd momentum"], ("float16",)
  # Without the guard, either nothing is guarded or all but what no optimizer holds.
  guards = ("all",) if guard else ("none", "optimizer")
  runs, steps = (9, 10) if small else (66, 12)
  return [
    Job("by_hand", functools.partial(attack, name, dtypes, runs, steps, guarded))
    for name in names
    for guarded in guards
  ]


def attack(name: str, dtypes, runs: int, steps: int, guarded: str, rng) -> list[Outcome]:
  suffix = {"all": "", "none": ", nothing guarded", "optimizer": ", only the optimizer guarded"}
  outcomes = {p: Outcome(f"by hand: {text}{suffix[guarded]}") for p, text in PLACES.items()}
  clean = {place: Outcome("") for place in PLACES}
  for dtype in dtypes:
    nowhere = np.zeros((runs, steps), bool)
    meet(clean, name, dtype, nowhere, guarded, rng)
    planted = rng.random((runs, steps)) < rng.choice([0.1, 0.3, 0.5, 0.8], (runs, 1))
    meet(outcomes, name, dtype, planted, guarded, rng)
  for place, outcome in outcomes.items():
    check_clean(clean[place], outcome, guarded == "all")
  times = run_update(name, guarded)._cache_size()
  outcomes[GRADIENT].lose(times - 1, f"{name}: compiled {times} times")
  return list(outcomes.values())


def meet(outcomes: dict[int, Outcome], name, dtype, planted, guarded, rng) -> None:
  """Runs and their control; each run meets faults at one kind of place."""
  runs, steps = planted.shape
  place = np.asarray(list(PLACES))[np.arange(runs) % len(PLACES)]
  index = rng.integers(0, BATCHES, (runs, steps))
  position = rng.integers(0, 2**31, (runs, steps))
  value = rng.choice([np.nan, np.inf, -np.inf, LARGE, -LARGE], (runs, steps)).astype(np.float32)
  faults = np.where(planted, place[:, None], NOWHERE), position, np.where(planted, value, 0)
  data, init = pool(rng), variables(rng, runs)

  inner = OPTIMIZERS[name]()
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG))
  update, plain = run_update(name, guarded), control_update(name)
  params, opt_state, rest = start(tx, init)
  trail = []
  for i in range(steps):
    (before,) = opt_state.loss_scale.values()
    raw = gradients(dtype, params, rest[0], data, index[:, i], before.scale)
    loss, grads, stats, finite = poison(*raw, *(f[:, i] for f in faults))
    updates, opt_state = update(grads, opt_state, params, (loss, stats))
    params = apply(params, updates)
    (scale,) = opt_state.loss_scale.values()
    rest = commit(scale.finite if guarded == "all" else np.ones(runs, bool), params, stats, rest)
    seen = observe(params, opt_state.inner_state, rest)
    trail.append((before.scale, finite, scale, seen))
  scales, finite, numbers, seen = jax.tree.map(lambda *x: np.stack(x, 1), *jax.device_get(trail))
  order, active, good = good_steps(planted)
  scales = np.take_along_axis(scales, order, 1)
  if dtype != "float16":
    scales = np.ones_like(scales)
  index = np.take_along_axis(index, order, 1)
  state = start(inner, init)
  digests = [observe(*state)[0]]
  for i in range(steps):
    raw = gradients(dtype, state[0], state[2][0], data, index[:, i], scales[:, i])
    nothing = np.zeros(runs, np.int32), position[:, i], np.zeros(runs, np.float32)
    _, grads, stats, _ = poison(*raw, *nothing)
    state = plain_step(plain, state, active[:, i], scales[:, i], grads, stats)
    digests.append(observe(*state)[0])
  wrong = unlike_digests(seen[0], np.stack(jax.device_get(digests), 1), good, FIELDS)
  wrong["not finite"] = ~seen[1]
  wrong["the last state"] = np.zeros_like(planted)
  wrong["the last state"][:, -1] = differing((params, opt_state.inner_state, rest), state)
  if guarded == "all":
    oracles = [Oracle(**CONFIG) for _ in planted]
    expected = [
      [oracle_numbers(oracle.step(not bad)) for bad in run]
      for oracle, run in zip(oracles, planted, strict=True)
    ]
    wrong |= {"flag": numbers.finite == planted, "scale": unlike_oracle(numbers, expected)}
  for p, outcome in outcomes.items():
    mine = place == p
    own = {key: found[mine] for key, found in wrong.items()}
    right = judge(outcome, planted[mine], own, f"{name}, {dtype}")
    if guarded == "all":
      as_planned = (finite != planted)[mine]
      require(np.all(as_planned[right]), f"{name}, {dtype}: other faults than those planned")


def pool(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
  """Returns batches of sixteenths, each with the data of its key for dropout."""
  x = rng.integers(-16, 17, (BATCHES, 8, 24)).astype(np.float32) / 16
  token = rng.integers(0, 5, (BATCHES, 8)).astype(np.int32)
  return x[..., :16], token, x[..., 16:], rng.integers(0, 2**32, (BATCHES, 2), dtype=np.uint32)


def variables(rng: np.random.Generator, runs: int) -> Any:
  """Returns what the model could have been initialised with, for each run."""
  x, token = np.zeros((8, 16), np.float32), np.zeros(8, np.int32)
  init = functools.partial(Model().init, train=False)
  shapes = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0), x, token)

  def draw(path, x):
    shape, name = (runs, *x.shape), path[-1].key
    if name in ("scale", "var"):
      return np.ones(shape, np.float32)
    spread = 0.3 if name in ("kernel", "embedding") else 0
    return rng.normal(scale=spread, size=shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def start(tx: Any, init: Any) -> tuple[Any, Any, Any]:
  params, stats = jax.tree.map(jnp.asarray, (init["params"], init["batch_stats"]))
  runs = len(jax.tree.leaves(params)[0])
  # All runs begin with the same state of the optimizer: zeros, and a scale.
  one = tx.init(jax.tree.map(lambda p: p[0], init["params"]))
  state = jax.tree.map(lambda x: jnp.asarray(np.broadcast_to(x, (runs, *x.shape))), one)
  return params, state, (stats, params, jnp.asarray(np.zeros(runs, np.int32)))


@functools.partial(jax.jit, static_argnums=0)
def gradients(dtype, params, stats, data, index, scale):
  """Returns the loss, gradients of the loss times `scale`, and the new statistics."""
  *batch, keys = jax.tree.map(lambda x: jnp.asarray(x)[index], data)
  batch = *batch, jax.random.wrap_key_data(keys)

  def scaled(params, stats, batch, scale):
    loss, stats = loss_fn(params, stats, batch, jnp.dtype(dtype))
    return loss * scale, (loss, stats)

  def one(params, stats, batch, scale):
    grads, (loss, new) = jax.grad(scaled, has_aux=True)(params, stats, batch, scale)
    return loss, grads, new

  return jax.vmap(one)(params, stats, batch, scale)


@jax.jit
@jax.vmap
def poison(loss, grads, stats, place, position, value):
  """Plants a fault; returns as well whether everything is finite then, in plain JAX."""

  def add(tree, here):
    flat, unravel = ravel_pytree(tree)
    hit = jnp.logical_and(jnp.arange(flat.size) == position % flat.size, place == here)
    extra = jnp.where(hit, value, 0)
    return unravel(flat + extra + extra)

  out = add(loss, LOSS), add(grads, GRADIENT), add(stats, STATISTICS)
  return *out, control.is_finite(out)


apply = jax.jit(jax.vmap(optax.apply_updates))


@jax.jit
@jax.vmap
def commit(finite, params, stats, rest):
  """What no optimizer holds: batch statistics, an average of the parameters, the step."""
  return mpjax.select_tree(finite, (stats, average(rest[1], params), rest[2] + 1), rest)


@jax.jit
@jax.vmap
def plain_rest(active, params, stats, rest):
  new = stats, average(rest[1], params), rest[2] + 1
  return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, rest)


@jax.jit
@jax.vmap
def observe(params, inner_state, rest):
  trees = params, inner_state, rest
  return digest(*trees), control.is_finite(trees)


@once
def run_update(name: str, guarded: str) -> Any:
  """Returns the update of the run, over all lanes."""
  inner = OPTIMIZERS[name]()
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG))

  def update(grads, state, params, watched):
    if guarded != "none":
      return tx.update(grads, state, params, loss=watched)
    (scale,) = state.loss_scale.values()
    grads = jax.tree.map(lambda g: g / scale.scale, grads)
    updates, new = inner.update(grads, state.inner_state, params)
    # Selected as in the control, always: it must round as there.
    taken = scale.scale > 0
    updates = jax.tree.map(lambda u: jnp.where(taken, u, -0.0), updates)
    inner_state = jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, state.inner_state)
    return updates, state._replace(inner_state=inner_state)

  return jax.jit(jax.vmap(update), compiler_options=options_of_users())


@once
def control_update(name: str) -> Any:
  """Returns that of the control."""
  inner = OPTIMIZERS[name]()

  def update(active, scale, params, opt_state, grads):
    grads = jax.tree.map(lambda g: g / scale, grads)
    updates, new = inner.update(grads, opt_state, params)
    # Selected as in the run: a sum that is stored first might be contracted with a product.
    updates = jax.tree.map(lambda u: jnp.where(active, u, -0.0), updates)
    return updates, jax.tree.map(lambda a, b: jnp.where(active, a, b), new, opt_state)

  return jax.jit(jax.vmap(update), compiler_options=options_of_users())


def plain_step(plain, state, active, scale, grads, stats):
  params, opt_state, rest = state
  updates, opt_state = plain(active, scale, params, opt_state, grads)
  params = apply(params, updates)
  return params, opt_state, plain_rest(active, params, stats, rest)
