"""Training through a view: optimizer, loss scaling, state that is committed or not, checkpoints."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.models.values import integers, normal
from tests.nnx import rig
from tests.programs import bits, jitted

with_policy = mpjax.nnx.with_policy
STATE = nnx.Not(nnx.Param)


class Net(nnx.Module):
  """A layer, statistics, dropout, a raw parameter, a table."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 4, rngs=rngs)
    self.first = nnx.Linear(4, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.2, rngs=rngs)
    self.head = nnx.Param(rngs.params.normal((8, 3)))

  def __call__(self, ids, x):
    x = self.first(self.embed(ids) + x)
    return self.drop(nnx.relu(self.norm(x))) @ self.head


INPUTS = (integers(8, below=7), normal(8, 4))
LABELS = integers(8, below=3, seed=1)


@functools.cache
def step(policy: str) -> Any:
  """Returns graph definition, state, `(state, inputs, poison) -> (state, loss)`, its traces."""
  model = rig.model(Net)
  tx = mpjax.loss_scaling(optax.adam(0.02), mpjax.DynamicLossScale(init_scale=2**10))
  graphdef, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

  traces = []

  def one(state, inputs, poison):
    traces.append(policy)
    model, optimizer = nnx.merge(graphdef, state, copy=True)
    scaled_by = nnx.as_pure(optimizer.opt_state)

    def loss_fn(model):
      logits = with_policy(model, policy)(*inputs)
      loss = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean() * poison
      return mpjax.scale_loss(loss, scaled_by), loss

    old = nnx.as_pure(nnx.state(model, STATE))
    grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype("float32")}
    optimizer.update(model, grads)
    finite = mpjax.loss_scaling_metrics(nnx.as_pure(optimizer.opt_state))["finite"]
    nnx.update(model, mpjax.select_tree(finite, nnx.as_pure(nnx.state(model, STATE)), old))
    return nnx.state((model, optimizer)), loss

  return graphdef, state, jitted(one), traces


@pytest.mark.case("I1", "I4", "I16")
def test_a_step_that_is_not_finite_leaves_no_trace():
  graphdef, state, one, traces = step("mixed_float16")
  start = state
  for _ in range(2):
    state, _ = one(state, INPUTS, jnp.float32(1))
  skipped, loss = one(state, INPUTS, jnp.float32(jnp.nan))
  assert not np.isfinite(loss)
  (old, before), (new, after) = (nnx.merge(graphdef, s) for s in (state, skipped))
  assert bits(jax.tree.map(raw, nnx.state(old))) == bits(jax.tree.map(raw, nnx.state(new)))
  old_opt, new_opt = nnx.as_pure(before.opt_state), nnx.as_pure(after.opt_state)
  assert bits(old_opt.inner_state) == bits(new_opt.inner_state)
  metrics = mpjax.loss_scaling_metrics(new_opt)
  assert (int(metrics["skipped"]), float(metrics["loss_scale"])) == (1, 2**9)
  # And one that is finite leaves a trace in all of them.
  moved, _ = one(skipped, INPUTS, jnp.float32(1))
  model, _ = nnx.merge(graphdef, moved)
  for kind in (nnx.Param, nnx.BatchStat, nnx.RngCount):
    assert bits(nnx.state(model, kind)) != bits(nnx.state(new, kind))
  # One program for all of it, since nothing changed its type.
  assert len(traces) == 1
  assert [x.dtype for x in jax.tree.leaves(start)] == [x.dtype for x in jax.tree.leaves(moved)]


def test_an_optimizer_of_a_view_is_one_of_the_model():
  model = rig.model(Net)
  view = with_policy(model, "mixed_bfloat16")
  of_view, of_model = (
    nnx.Optimizer(m, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param) for m in (view, model)
  )
  ours, plain = (nnx.to_pure_dict(nnx.state(o)) for o in (of_view, of_model))
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  before = np.asarray(model.head[...])
  grads = jax.tree.map(jnp.ones_like, nnx.state(view, nnx.Param))
  of_view.update(view, grads)
  np.testing.assert_allclose(model.head[...], before - 0.5, rtol=1e-6)
  np.testing.assert_array_equal(view.head[...], model.head[...])


@pytest.mark.case("I10", "B063")
def test_keys_and_counters_are_those_of_the_model_through_split_and_merge():
  def counted(policy, calls):
    model = rig.model(Net)
    before = bits(jax.tree.map(raw, nnx.state(model, nnx.RngState)))
    view = rig.under(model, policy)
    graphdef, state = nnx.split(view)
    merged = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    assert bits(jax.tree.map(raw, nnx.state(merged, nnx.RngState))) == before
    for _ in range(calls):
      nnx.jit(lambda m: m(*INPUTS))(merged)
    nnx.update(model, nnx.state(merged))
    return nnx.state(model, nnx.RngState)

  for calls in (0, 2):
    ours, plain = (counted(policy, calls) for policy in ("mixed_float16", None))
    assert bits(jax.tree.map(raw, ours)) == bits(jax.tree.map(raw, plain))
    counts = jax.tree.leaves(nnx.filter_state(ours, nnx.RngCount))
    assert {(x.dtype, int(x)) for x in counts} == {(np.dtype("uint32"), calls)}


def raw(x: Any) -> Any:
  """Returns the bits of a key, and what is no key as it is."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x
