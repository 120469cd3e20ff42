"""Saved under one policy, restored under another: explicitly, with nothing of float32 lost."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpjax
from tests.programs import bits, compilations

NONE = mpjax.NoLossScale()
ADAM = optax.adam(0.05)
OPTIMIZERS = {
  "float32": mpjax.loss_scaling(ADAM, NONE),
  "mixed_bfloat16": mpjax.loss_scaling(ADAM, NONE),
  "mixed_float16": mpjax.loss_scaling(ADAM),
  "bfloat16": mpjax.loss_scaling(mpjax.master_weights(ADAM), NONE),
}
POLICIES = tuple(OPTIMIZERS)
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.tanh(nn.LayerNorm()(nn.Dense(5)(x))))


@functools.cache
def training(policy):
  """Returns the first state and the step."""
  model = mpjax.linen.with_policy(Network(), policy)

  def loss_fn(params, model_state, batch, rng):
    loss = jnp.mean((model.apply({"params": params}, batch).astype(jnp.float32) - 1) ** 2)
    return loss, (model_state, {})

  params = model.init(jax.random.key(0), X)["params"]
  state = mpjax.TrainState.create(params, OPTIMIZERS[policy])
  return state, mpjax.make_train_step(loss_fn, OPTIMIZERS[policy], donate=False)


def advance(policy, state, steps):
  outputs = []
  for _ in range(steps):
    state, metrics = training(policy)[1](state, X)
    outputs.append(np.asarray(metrics["loss"]).tobytes())
  return state, outputs


@functools.cache
def trained(policy):
  return advance(policy, training(policy)[0], 3)[0]


@pytest.fixture
def checkpoints(tmp_path_factory):
  """The folder of all checkpoints: made once, but in a test, where the flags of tests are set."""
  folder = tmp_path_factory.getbasetemp() / "policies"
  if folder.exists():
    return folder
  with ocp.StandardCheckpointer() as checkpointer:
    for policy in POLICIES:
      checkpointer.save(folder / policy, trained(policy))
  return folder


def weights(state):
  """The float32 weights of a state: the masters, where there are any."""
  if state.params["Dense_0"]["kernel"].dtype == jnp.float32:
    return state.params
  return mpjax.master_params(state.opt_state, state.params)


def moments(state):
  (found,) = [
    x
    for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    if hasattr(x, "mu")
  ]
  return found


def begin_from(policy, old):
  """What docs/checkpoints.md says: weights and moments go over, the loss scale starts anew."""
  params = mpjax.Policy.parse(policy).cast_to_param(weights(old))
  opt_state = OPTIMIZERS[policy].init(params)
  if policy == "bfloat16":
    opt_state = mpjax.set_master_params(opt_state, weights(old))

  def put(x):
    return moments(old) if hasattr(x, "mu") else x

  opt_state = jax.tree.map(put, opt_state, is_leaf=lambda x: hasattr(x, "mu"))
  return old._replace(params=params, opt_state=opt_state)


@pytest.mark.case("A65")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_saved_for_weights_is_float32(policy, checkpoints):
  # And under the same policy the next five outputs are the same.
  with ocp.StandardCheckpointer() as checkpointer:
    raw = checkpointer.restore(checkpoints / policy)
  inner = raw["opt_state"]["inner_state"]
  saved = inner["master"] if policy == "bfloat16" else raw["params"]
  found = mpjax.checkpoints.restore_like(
    jax.eval_shape(lambda: training("float32")[0].params), saved
  )
  assert bits(found) == bits(weights(trained(policy)))
  restored = mpjax.checkpoints.restore_like(training(policy)[0], checkpoints / policy)
  assert bits(restored) == bits(trained(policy))
  with compilations() as compiled:
    state, outputs = advance(policy, restored, 5)
    straight, wanted = advance(policy, trained(policy), 5)
  assert outputs == wanted
  assert len(set(outputs)) == 5
  assert bits(state) == bits(straight)
  assert compiled["train_step"] == 0


@pytest.mark.case("A65", "B123")
@pytest.mark.parametrize("old", POLICIES)
@pytest.mark.parametrize("new", POLICIES)
def test_any_policy_goes_on_from_any_other(old, new, checkpoints):
  same_layout = old == new or {old, new} == {"float32", "mixed_bfloat16"}
  if not same_layout:
    with pytest.raises(
      mpjax.errors.MpjaxValueError, match=r"expected (a loss scale|the leaves) of"
    ):
      mpjax.checkpoints.restore_like(training(new)[0], checkpoints / old, cast=True)
  restored = mpjax.checkpoints.restore_like(training(old)[0], checkpoints / old)
  state = begin_from(new, restored)
  assert bits(weights(state)) == bits(weights(trained(old)))
  assert bits(moments(state)) == bits(moments(trained(old)))
  param_dtype = mpjax.Policy.parse(new).param_dtype
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {param_dtype}
  if same_layout and old != "mixed_float16":
    assert bits(mpjax.checkpoints.restore_like(training(new)[0], checkpoints / old)) == bits(state)
  # Its own step takes it, without a new trace, and goes on learning.
  before = advance(old, trained(old), 1)[1]
  trained(new)
  with compilations() as compiled:
    after, outputs = advance(new, state, 3)
  assert np.frombuffer(outputs[-1], np.float32) < np.frombuffer(before[0], np.float32)
  assert compiled["train_step"] == 0
  # And back: nothing was lost on the way.
  assert bits(weights(begin_from(old, after))) == bits(weights(after))


@pytest.mark.case("B120", "B123")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_float32_weights_train_on_in_half_with_exact_masters(half, checkpoints):
  full = training("float32")[0].params
  target = mpjax.Policy.parse(half).cast_to_param(full)
  with ocp.StandardCheckpointer() as checkpointer:
    raw = checkpointer.restore(checkpoints / "float32")["params"]
  with pytest.raises(
    mpjax.errors.MpjaxValueError, match=rf"float32\[4, 5\] for {half}\[4, 5\] at Dense_1"
  ):
    mpjax.checkpoints.restore_like(target, raw)
  params = mpjax.checkpoints.restore_like(target, raw, cast=True)
  opt_state = mpjax.master_weights(ADAM).init(params)
  opt_state = mpjax.set_master_params(opt_state, mpjax.checkpoints.restore_like(full, raw))
  saved = trained("float32").params
  assert bits(mpjax.master_params(opt_state)) == bits(saved)
  assert bits(params) == bits(jax.tree.map(lambda x: np.asarray(x).astype(half), saved))
