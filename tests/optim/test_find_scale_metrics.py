import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.loss_scale_oracle import Oracle
from tests.optim.steps import ADAM, BAD, GOOD, PARAMS, after, update
from tests.programs import bits

pytestmark = pytest.mark.standard_promotion("dtypes")


def test_metrics_are_these_scalars():
  metrics = mpjax.loss_scaling_metrics(after(GOOD, BAD, BAD))
  counters = ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits", "bad_updates")
  dtypes = {"loss_scale": "float32", "finite": "bool"} | dict.fromkeys(counters, "int32")
  off = mpjax.loss_scaling(optax.sgd(1.0), mpjax.NoLossScale()).init(PARAMS)
  for found in (metrics, mpjax.loss_scaling_metrics(off)):
    assert {key: value.dtype.name for key, value in found.items()} == dtypes
    assert list(found) == list(metrics)
    assert {np.shape(value) for value in found.values()} == {()}


def test_each_metric_is_described_and_in_the_oracle():
  metrics = mpjax.loss_scaling_metrics(after(GOOD, BAD))
  text = mpjax.loss_scaling_metrics.__doc__
  assert [key for key in metrics if f"`{key}`" not in text] == []
  assert metrics.keys() - {"loss_scale", "finite"} <= Oracle().numbers().keys()


def test_metrics_equal_the_oracle():
  state, oracle, step = ADAM.init(PARAMS), Oracle(init_scale=4, growth_interval=2), jnp.int32(0)
  for flag in [1, 0, 0, 0, 1, 1, 1, 0, 1]:
    old, state = state, update(GOOD if flag else BAD, state)
    step = mpjax.keep_if_skipped(state, step + 1, step)
    numbers = oracle.step(bool(flag)).numbers()
    metrics = mpjax.loss_scaling_metrics(state, before=old)
    moved = metrics["loss_scale"] != mpjax.loss_scaling_metrics(old)["loss_scale"]
    assert bool(metrics.pop("scale_changed")) is bool(moved)
    assert bool(metrics.pop("finite")) == bool(mpjax.step_applied(state)) == bool(flag)
    assert float(metrics.pop("loss_scale")) == numbers.pop("scale")
    numbers.pop("hysteresis")
    assert {key: int(metrics[key]) for key in numbers} == numbers
  assert state.inner_state[0].count == step == 5, "adam counts the applied steps only"


SGD = mpjax.loss_scaling(optax.sgd(0.1))


def after_step(*, finite):
  """Returns the state after one step, which was applied if the gradient was finite."""
  grads = jnp.asarray([1.0, 2.0 if finite else jnp.inf])
  return SGD.update(grads, SGD.init(jnp.ones(2)), jnp.ones(2))[1]


APPLIED, SKIPPED = after_step(finite=True), after_step(finite=False)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_keep_if_skipped_returns_one_of_two_trees_to_the_bit(wrap):
  rest = {"none": None, "nothing": np.zeros(2, jax.dtypes.float0)}
  new = {"mean": jnp.asarray([jnp.nan, 1.0]), "n": jnp.asarray(4), "key": jax.random.key(1)} | rest
  old = {"mean": jnp.asarray([0.5, -0.0]), "n": jnp.asarray(3), "key": jax.random.key(0)} | rest
  keep = wrap(mpjax.keep_if_skipped)
  for kept in (keep(SKIPPED, new, old), keep(APPLIED, old, new)):
    assert kept.pop("key") == old["key"]
    assert kept["nothing"].dtype == jax.dtypes.float0
    assert bits(kept) == bits({name: x for name, x in old.items() if name != "key"})
    assert kept["none"] is None


def test_keep_if_skipped_takes_python_numbers():
  old = {"step": 3, "rate": 0.25, "text": "a"}
  assert mpjax.keep_if_skipped(SKIPPED, old | {"step": 4, "rate": 0.5}, old) == old


def test_keep_if_skipped_without_a_scale_returns_the_new_tree():
  state = mpjax.loss_scaling(optax.sgd(0.1), mpjax.NoLossScale()).init(jnp.ones(2))
  assert mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0)) == 1


def test_keep_if_skipped_reads_the_scale_of_a_name():
  scales = {"a": mpjax.StaticLossScale(8), "b": mpjax.StaticLossScale(8)}
  tx = mpjax.loss_scaling(optax.sgd(0.1), scales)
  state = tx.init(jnp.ones(2))
  _, state = tx.update({"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}, state, jnp.ones(2))
  for name in scales:  # One decision for both.
    assert mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0), name=name) == 2
  with refused(TypeError, "mpjax.keep_if_skipped(opt_state)", "one loss scale", "with 2", "name="):
    mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0))


KEEP = "mpjax.keep_if_skipped(opt_state, new, old)"


def test_keep_if_skipped_of_several_members_needs_vmap():
  several = jax.tree.map(lambda *x: jnp.stack(x), APPLIED, SKIPPED)
  with refused(ValueError, KEEP, "a scalar flag", "shape (2,)", "jax.vmap"):
    mpjax.keep_if_skipped(several, jnp.ones(2), jnp.zeros(2))
  kept = jax.vmap(mpjax.keep_if_skipped)(several, jnp.ones(2), jnp.zeros(2))
  assert kept.tolist() == [1, 0]


def test_keep_if_skipped_needs_a_state():
  where, made = "mpjax.keep_if_skipped(opt_state)", "created by mpjax.loss_scaling"
  for state, got in ((jnp.ones(2), "an array float32[2]"), (True, "True"), (None, "None")):
    with refused(TypeError, where, made, got, "tx = mpjax.loss_scaling(tx)"):
      mpjax.keep_if_skipped(state, jnp.ones(2), jnp.zeros(2))


def test_keep_if_skipped_wants_trees_alike():
  for new, got in (
    ({"a": jnp.ones(2), "b": jnp.ones(2, jnp.float16)}, "float16[2] for float32[2] at ['b']"),
    ({"a": jnp.ones(1), "b": jnp.arange(2)}, "float32[1] for float32[2] at ['a']; int32[2]"),
    ({"a": jnp.ones(2), "b": jnp.ones(2), "c": 1.0}, "an extra leaf at ['c']"),
    ({"a": jnp.ones(2), "b": None}, "None for float32[2] at ['b']"),
  ):
    with refused(ValueError, KEEP, "like the old one", got, "same structure"):
      mpjax.keep_if_skipped(APPLIED, new, {"a": jnp.ones(2), "b": jnp.ones(2)})
