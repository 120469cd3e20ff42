"""Masters of both storages under faults, composed, on devices, in memory: equal to a float32 run.

The control is optax on float32 parameters, fed with the good gradients alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.loss_scale_oracle import Oracle
from tests.programs import bits, run

HALF = ("bfloat16", "float16")
LEAVES = (*HALF, "float32")
STEPS = 60
CONFIG = {"init_scale": 2.0**5, "growth_interval": 4, "max_scale": 2.0**8}
F32 = np.float32


def optimizer():
  """Decay, momentum and a schedule by powers of two."""
  # A product that is exact is the same whether or not a compiler contracts it with a sum.
  rate = optax.scale_by_schedule(lambda count: -(2.0 ** -(8 + count % 3)))
  return optax.chain(optax.add_decayed_weights(2.0**-4), optax.trace(0.5), rate)


def params():
  """A leaf in each dtype, named by it; the float32 one is its own master."""
  values = np.random.default_rng(0).normal(size=(3, 8)).astype(F32)
  return {name: np.asarray(x, name) for name, x in zip(LEAVES, values, strict=True)}


@functools.cache
def stream():
  """Gradients in the dtypes of the parameters, and a fault for one leaf at each step, or 0."""
  rng = np.random.default_rng(1)
  grads = {name: rng.normal(size=(STEPS, 8)).astype(name) for name in LEAVES}
  bad = rng.random(STEPS) < 0.3
  faults = np.where(bad, rng.choice([np.inf, -np.inf, np.nan], STEPS), 0).astype(F32)
  return grads, faults, rng.integers(0, 3, STEPS)


def injected(grads, fault, leaf, scale):
  """Gradients times a power of two, exact in half, with a fault in one of the leaves."""
  return {
    name: (g * scale.astype(g.dtype)).at[3].add(jnp.where(leaf == i, fault, 0).astype(g.dtype))
    for i, (name, g) in enumerate(grads.items())
  }


STORAGES = ("float32", "split")


def masters(storage="float32"):
  return functools.partial(mpjax.master_weights, storage=storage)


def scaling(inner, **options):
  return mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG), **options)


def clipped(inner):
  return optax.chain(optax.clip(0.75), inner)


class Composition(NamedTuple):
  make: Any  # takes what puts masters around an optimizer
  control: Any = optimizer
  scaled: bool = True  # else it is fed with the good gradients alone
  window: int = 1
  frozen: tuple[str, ...] = ()


def freezing(masters):
  """Only some leaves have a master, and are trained."""
  trained = {name: name != "bfloat16" for name in LEAVES}
  frozen = {name: not of for name, of in trained.items()}
  return scaling(
    optax.chain(
      optax.masked(masters(optimizer()), trained), optax.masked(optax.set_to_zero(), frozen)
    )
  )


def labelled(masters):
  """A master for each half type, of an optimizer of its own."""
  branches = {"x": masters(optimizer()), "y": masters(optimizer())}
  return optax.multi_transform(branches, {"bfloat16": "x", "float16": "y", "float32": "y"})


COMPOSITIONS = {
  "alone": Composition(lambda masters: masters(optimizer()), scaled=False),
  "inside": Composition(lambda masters: scaling(masters(optimizer()))),
  "around": Composition(lambda masters: masters(scaling(optimizer()))),
  "after a clip": Composition(
    lambda masters: scaling(clipped(masters(optimizer())), check_updates=True),
    control=lambda: clipped(optimizer()),
  ),
  "masked": Composition(freezing, frozen=("bfloat16",)),
  "labelled": Composition(labelled, scaled=False),
  "labelled inside": Composition(lambda masters: mpjax.monitor(scaling(labelled(masters)))),
  "window inside": Composition(
    lambda masters: scaling(masters(mpjax.accumulate_gradients(optimizer(), 2))), window=2
  ),
  "window around": Composition(
    lambda masters: scaling(mpjax.accumulate_gradients(masters(optimizer()), 2)), window=2
  ),
  "window alone": Composition(
    lambda masters: mpjax.accumulate_gradients(masters(optimizer()), 4), scaled=False, window=4
  ),
}


def trained(tx, start, stream):
  """Runs all steps; returns parameters, their sums with the updates, masters, metrics of each."""
  state = tx.init(start)
  has_scale = "LossScalingState" in str(jax.tree.structure(state))
  split = "Split" in str(jax.tree.structure(state))

  def step(carry, now):
    params, state = carry
    grads, fault, leaf = now
    scale = mpjax.loss_scaling_metrics(state)["loss_scale"] if has_scale else jnp.ones(())
    updates, state = tx.update(injected(grads, fault, leaf, scale), state, params)
    sums = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
    # With split masters nothing but the updates is applied.
    master = None if split else mpjax.master_params(state)
    params = mpjax.apply_updates(params, updates, master=master)
    metrics = mpjax.loss_scaling_metrics(state) if has_scale else {}
    return (params, state), (params, sums, mpjax.master_params(state, params), metrics)

  return jax.lax.scan(step, (start, state), stream)[1]


@functools.cache
def control(make, window):
  """Float32 parameters after each update of optax, from the means of the good gradients."""
  grads, faults, _ = stream()
  good = np.isfinite(faults)
  start = {name: x.astype(F32) for name, x in params().items()}
  updates = np.sum(good) // window
  means = {}
  for name, g in grads.items():
    windows = g[good][: updates * window].astype(F32).reshape(updates, window, -1)
    means[name] = functools.reduce(np.add, windows.swapaxes(0, 1)) / F32(window)
  inner = make()

  def step(carry, g):
    params, state = carry
    changes, state = inner.update(g, state, params)
    params = optax.apply_updates(params, changes)
    return (params, state), params

  after = run(lambda g: jax.lax.scan(step, (start, inner.init(start)), g)[1], means)
  return {name: np.concatenate([start[name][None], x]) for name, x in after.items()}


@pytest.mark.case("A67", "I16", "B103", "B115", "I1", "I19")
@pytest.mark.filterwarnings("ignore:.*1 parameters are stored in low precision")
@pytest.mark.parametrize("storage", STORAGES)
def test_parameters_are_the_rounded_masters_of_a_float32_run(storage):
  # All compositions are in one compiled program.
  grads, faults, leaves = stream()
  good = np.isfinite(faults)
  streams = {
    True: (grads, faults, leaves),
    False: jax.tree.map(lambda x: x[good], (grads, faults, leaves)),
  }
  start = params()

  def train_all(start, streams):
    return {
      name: trained(this.make(masters(storage)), start, streams[this.scaled])
      for name, this in COMPOSITIONS.items()
    }

  all_found = jax.device_get(run(train_all, start, streams))
  violations = []
  for name, this in COMPOSITIONS.items():
    found, sums, master, metrics = all_found[name]
    flags = good if this.scaled else good[good]
    updates_done = np.cumsum(flags) // this.window
    assert updates_done[-1] >= 8
    expected = {leaf: x[updates_done] for leaf, x in control(this.control, this.window).items()}
    for leaf in LEAVES:
      if leaf in this.frozen:
        right = {"frozen": (found[leaf], np.stack([start[leaf]] * STEPS))}
      else:
        right = {
          "master": (master[leaf], expected[leaf]),
          "parameter": (found[leaf], expected[leaf].astype(leaf)),
          # Already in float32, so that nothing depends on how a sum is rounded.
          "sum with the update": (sums[leaf], found[leaf].astype(F32)),
        }
        assert bits(found[leaf][-1]) != bits(start[leaf])
      violations += [
        f"{name}, {leaf}: {what}" for what, (a, b) in right.items() if bits(a) != bits(b)
      ]
    if this.scaled:
      numbers = Oracle(**CONFIG).run(flags)
      for key, other in (("loss_scale", "scale"), ("skipped", "skipped")):
        if metrics[key].tolist() != [n[other] for n in numbers]:
          violations.append(f"{name}: {key}")
  assert violations == []
