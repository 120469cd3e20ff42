"""A scale for each loss: two optimizers, one optimizer of two or three losses, and all around."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

import mpjax
from tests.loss_scale_oracle import Oracle
from tests.optim.losses import over_devices
from tests.programs import bits, run

pytestmark = pytest.mark.standard_promotion("dtypes")

STEPS = 60
CONFIGS = {
  "generator": {"init_scale": 2.0**6, "growth_interval": 3, "max_scale": 2.0**9},
  "critic": {"init_scale": 2.0**9, "growth_interval": 5, "min_scale": 4.0, "hysteresis": 2},
  "prior": {"init_scale": 2.0**3, "growth_interval": 2, "min_scale": 0.25},
}
SCALES = {name: mpjax.DynamicLossScale(**config) for name, config in CONFIGS.items()}
PARAMS = {"w": jnp.asarray([1.0, -0.0, 3.0]), "b": jnp.asarray([-0.5])}


def optimizer():
  """Clipping, momentum and a schedule, all by powers of two."""
  # A product that is exact is the same whether or not a compiler contracts it with a sum.
  rate = optax.scale_by_schedule(lambda count: -(0.5 ** (count % 4)))
  return optax.chain(optax.clip(1.0), optax.trace(0.5), rate)


@functools.cache
def stream(*names):
  """Gradients of each loss at each step, and what is added to the last leaf: 0, an inf or a NaN."""
  rng = np.random.default_rng(0)
  grads = {
    name: jax.tree.map(lambda p: rng.normal(size=(STEPS, *p.shape)).astype(np.float32), PARAMS)
    for name in names
  }
  bad = {name: rng.random(STEPS) < 0.2 for name in names}
  kinds = {name: rng.choice([np.inf, -np.inf, np.nan], STEPS) for name in names}
  return grads, {name: np.where(bad[name], kinds[name], 0).astype(np.float32) for name in names}


def injected(grads, fault):
  """Gradients of a loss with a fault in one element."""
  return grads | {"w": grads["w"].at[1].add(fault)}


def metrics_of(state, names):
  return {name: mpjax.loss_scaling_metrics(state, name=name) for name in names}


def rows(tree, which):
  return jax.tree.map(lambda x: x[which], tree)


def plain(grads):
  """The same optimizer of optax on a stream of gradients, in float32."""
  inner = optimizer()

  def step(carry, g):
    params, state = carry
    updates, state = inner.update(g, state, params)
    return (optax.apply_updates(params, updates), state), None

  return run(lambda g: jax.lax.scan(step, (PARAMS, inner.init(PARAMS)), g)[0], grads)


def train(tx, start, names):
  """Returns parameters, state and metrics after all steps, and how often a step was traced."""
  traces = []

  def step(carry, now):
    traces.append(1)
    params, state = carry
    grads, fault = now
    given = {name: injected(grads[name], fault[name]) for name in reversed(names)}
    updates, state = tx.update(given, state, params)
    return (optax.apply_updates(params, updates), state), metrics_of(state, names)

  scan = lambda xs: jax.lax.scan(step, (start, tx.init(start)), xs)  # noqa: E731
  (params, state), metrics = run(scan, stream(*names))
  return params, state, metrics, len(traces)


def check_like_oracle(name, metrics, flags, applied):
  """The scale of one loss follows its own gradients, and its counts of skips what was applied."""
  expected = Oracle(**CONFIGS[name])
  for i, (finite, all_finite) in enumerate(zip(flags, applied, strict=True)):
    numbers = expected.step(bool(finite), bool(all_finite)).numbers()
    found = {key: x[i].item() for key, x in metrics.items()}
    assert found["loss_scale"] == numbers["scale"]
    assert found["finite"] == all_finite
    assert found["bad_updates"] == 0
    for key in ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits"):
      assert found[key] == numbers[key], (i, key)


# Two optimizers.


def test_only_the_optimizer_with_the_bad_gradients_skips():
  # As in a GAN: two parts of a model, each with its optimizer.
  names = ("generator", "critic")
  txs = {name: mpjax.loss_scaling(optimizer(), SCALES[name], name=name) for name in names}
  tx = optax.multi_transform(txs, {name: name for name in names})
  grads, faults = stream(*names)
  params, state, metrics, _ = train(tx, dict.fromkeys(names, PARAMS), names)
  flags = {name: np.isfinite(faults[name]) for name in names}
  both = flags["generator"] & flags["critic"]
  assert 4 < np.sum(~flags["generator"] & flags["critic"]) < STEPS - np.sum(both)
  for name in names:
    check_like_oracle(name, metrics[name], flags[name], flags[name])
    # As if the bad steps of its own had never been, whatever became of the other.
    expected, expected_state = plain(rows(grads[name], flags[name]))
    assert bits(params[name]) == bits(expected)
    assert bits(state.inner_states[name].inner_state.inner_state) == bits(expected_state)


# One optimizer.


def test_updates_are_those_of_the_float32_sum_and_each_scale_follows_its_own_loss():
  # The order of a dict is of no account: the sum is in that of the names.
  names = ("critic", "generator", "prior")
  tx = mpjax.loss_scaling(optimizer(), {name: SCALES[name] for name in reversed(names)})
  grads, faults = stream(*names)
  params, state, metrics, traced = train(tx, PARAMS, names)
  assert traced == 1
  flags = {name: np.isfinite(faults[name]) for name in names}
  applied = np.all(list(flags.values()), axis=0)
  assert 10 < np.sum(applied) < STEPS - 10
  for name in names:
    check_like_oracle(name, metrics[name], flags[name], applied)
  total = jax.tree.map(lambda *g: functools.reduce(np.add, g), *(grads[name] for name in names))
  expected, expected_state = plain(rows(total, applied))
  assert bits(params) == bits(expected)
  assert bits(state.inner_state) == bits(expected_state)


def two(init_scale=4):
  config = mpjax.DynamicLossScale(init_scale=init_scale)
  return mpjax.loss_scaling(optax.sgd(1.0, momentum=0.5), {"a": config, "b": config})


def test_a_sum_that_overflows_is_skipped_and_no_scale_is_to_blame():
  tx = two(init_scale=1)
  params = jnp.asarray([1.0, -0.0])
  state = tx.init(params)
  update = jax.jit(tx.update)
  huge = jnp.asarray([2e38, 1.0])
  updates, new = update({"a": huge, "b": huge}, state, params)
  assert bits(optax.apply_updates(params, updates)) == bits(params)
  assert bits(new.inner_state) == bits(state.inner_state)
  for name in "ab":
    found = mpjax.loss_scaling_metrics(new, name=name)
    assert not found["finite"]
    assert (found["loss_scale"], found["skipped"], found["bad_updates"]) == (1, 1, 0)
  updates, new = update({"a": huge, "b": -huge}, new, params)
  assert updates.tolist() == [0, 0]
  assert mpjax.loss_scaling_metrics(new, name="a")["finite"]


def test_what_counts_for_each_scale():
  # Its own loss, if the losses are passed, and its own gradients; the other's only skip.
  params, tx = jnp.ones(2), two()
  violations = []
  for bad in ("a", "b", None):
    losses = {name: jnp.asarray(np.nan if name == bad else 1.0) for name in "ab"}
    overflowed = {name: jnp.full(2, np.nan if name == bad else 1.0) for name in "ab"}
    for grads, more in (({"a": params, "b": params}, {"loss": losses}), (overflowed, {})):
      start = tx.init(params)
      updates, state = tx.update(grads, start, params, **more)
      for name in "ab":
        before, found = (mpjax.loss_scaling_metrics(s, name=name) for s in (start, state))
        back_off = found["loss_scale"] / before["loss_scale"]
        seen = float(back_off), bool(found["finite"]), bool(np.any(updates))
        if seen != (0.5 if name == bad else 1, bad is None, bad is None):
          violations.append(f"{bad} is bad, {name} of {list(more)}: {seen}")
  assert violations == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_scaling_the_sum_is_all_that_is_added(dtype):
  # And half gradients stay half, as those of one loss: inner has made its state for them.
  inner = optax.adam(0.1)
  tx = mpjax.loss_scaling(inner, dict.fromkeys("abc", mpjax.NoLossScale()))
  params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
  state, plain_state = tx.init(params), inner.init(params)
  grads = {"a": params, "b": jax.tree.map(lambda p: p + 1, params), "c": params}
  if dtype == "bfloat16":
    _, new = tx.update(grads, state, params, loss=jnp.nan)
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
    for name in "abc":
      found = mpjax.loss_scaling_metrics(new, name=name)
      assert (found["loss_scale"], found["finite"], found["total"]) == (1, True, 1)
    total = jax.tree.map(
      lambda *g: jnp.asarray(sum(np.asarray(x, np.float32) for x in g), dtype), *grads.values()
    )
    assert bits(new.inner_state) == bits(inner.update(total, plain_state, params)[1])
    return
  program = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p)[0])(grads, state, params)
  ours = jax.make_jaxpr(
    lambda g, s, p: inner.update(jax.tree.map(lambda a, b, c: a + b + c, *g.values()), s, p)[0]
  )(grads, plain_state, params)
  # The count of steps is computed beside the updates.
  found, expected = (dce_jaxpr(p.jaxpr, [True] * len(p.jaxpr.outvars))[0] for p in (program, ours))
  assert str(found) == str(expected)


def test_integers_and_line_searches_without_scaling():
  params = {"w": jnp.ones(2), "n": jnp.arange(2)}
  seen = []

  def update(updates, state, params=None, *, grad=None, **extra_args):
    seen.append((updates, grad))
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
  tx = mpjax.loss_scaling(inner, dict.fromkeys("ab", mpjax.NoLossScale()))
  nothing = np.zeros(2, jax.dtypes.float0)
  grads = {"a": {"w": jnp.ones(2), "n": nothing}, "b": {"w": jnp.ones(2), "n": nothing}}
  updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
  for tree in seen[0]:
    assert tree["w"].tolist() == [2, 2]
    assert tree["n"] == optax.MaskedNode(), "hidden from the optimizer, as with a scale"
  assert updates["w"].tolist() == [2, 2]
  assert updates["n"].tolist() == [0, 0]


def test_all_devices_decide_alike_for_each_loss(devices):
  # A NaN in one loss on one device skips the step everywhere, and that scale backs off.
  config = mpjax.DynamicLossScale(init_scale=4)
  tx = mpjax.loss_scaling(optax.sgd(1.0), {"a": config, "b": config}, axis_name="data")
  params = jnp.ones(2)

  def step(start, fault):
    params, state = start
    losses = {name: 1 + fault[0, i] for i, name in enumerate("ab")}
    updates, state = tx.update({"a": params, "b": params}, state, params, loss=losses)
    return optax.apply_updates(params, updates), metrics_of(state, "ab")

  step = over_devices(step, devices)
  for bad in (0, 1):
    fault = np.zeros((4, 2), np.float32)
    fault[2, bad] = np.nan
    new, metrics = jax.block_until_ready(step((params, tx.init(params)), fault))
    for shard in new.addressable_shards:
      assert bits(shard.data) == bits(params)
    scales = [float(metrics[name]["loss_scale"]) for name in "ab"]
    assert scales == [2 if i == bad else 4 for i in (0, 1)]
