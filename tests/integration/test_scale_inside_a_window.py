"""Accumulation under a scale that moves: windows of finite micro-batches, whatever lies between."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.transforms import _skip
from tests.loss_scale_oracle import Oracle
from tests.programs import bits, compiled

PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.asarray(0.25)}
CONFIG = {"init_scale": 2.0**4, "growth_interval": 2, "max_scale": 2.0**8}
BAD = itertools.cycle([np.nan, np.inf, -np.inf])


class ByHand:
  """The same in NumPy: sums of the good micro-batches, and momentum on their mean."""

  def __init__(self, every):
    self.every, self.inside, self.done = every, 0, 0
    self.params = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)
    self.total = jax.tree.map(lambda x: -np.zeros_like(x), self.params)  # the sum of nothing
    self.momentum = jax.tree.map(np.zeros_like, self.params)

  def add(self, grads):
    self.total = jax.tree.map(np.add, self.total, grads)
    self.inside += 1
    if self.inside == self.every:
      mean = jax.tree.map(lambda t: t / self.every, self.total)
      self.momentum = jax.tree.map(lambda m, g: 0.5 * m + g, self.momentum, mean)
      self.params = jax.tree.map(lambda p, m: p - 0.5 * m, self.params, self.momentum)
      self.total = jax.tree.map(lambda x: -np.zeros_like(x), self.total)
      self.inside, self.done = 0, self.done + 1


@pytest.mark.case("I12", "A113", "B108")
@pytest.mark.parametrize(
  ("how", "every"),
  [*itertools.product(["by a branch"], [1, 2, 3, 8]), ("by a selection", 3), ("not traced", 3)],
)
def test_a_bad_micro_batch_in_each_place(monkeypatch, how, every):
  """Neither it nor the scale, which moves inside each window, can be seen in what is applied."""
  on_cpu = how == "by a branch"
  monkeypatch.setattr(_skip, "compiled_for_cpu", lambda: jnp.asarray(on_cpu))
  inner = mpjax.accumulate_gradients(optax.sgd(0.5, momentum=0.5), every)
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG))
  params, state = PARAMS, tx.init(PARAMS)
  update = tx.update
  if how != "not traced":
    # Optimised, XLA multiplies by a rounded 1/3 on the way.
    update = compiled(jax.jit(update).lower(PARAMS, state, PARAMS))
  by_hand, oracle, rng = ByHand(every), Oracle(**CONFIG), np.random.default_rng(0)
  # In window p the bad one comes before micro-batch p; the last window has none.
  for bad in [i == place for place in range(every + 1) for i in range(every + (place < every))]:
    # Sixteenths, and their mean too: all sums and quotients are exact.
    plain = jax.tree.map(lambda p: rng.integers(-8, 9, p.shape) * every / 16, PARAMS)
    scale = mpjax.loss_scaling_metrics(state)["loss_scale"]
    assert scale == oracle.scale
    grads = jax.tree.map(lambda g, s=scale: jnp.asarray(g, jnp.float32) * s, plain)
    if bad:
      grads["w"] = grads["w"].at[1].set(next(BAD))
    else:
      by_hand.add(plain)
    oracle.step(not bad)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    window = state.inner_state
    assert (window.micro_batches, window.updates_done) == (by_hand.inside, by_hand.done)
    expected = jax.tree.map(np.float32, (by_hand.params, by_hand.total, by_hand.momentum))
    assert bits((params, window.total, window.inner_state[0].trace)) == bits(expected)
  assert by_hand.done == every + 1
  assert oracle.skipped == every
