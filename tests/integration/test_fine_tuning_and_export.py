"""From a float32 checkpoint into half training, and from half training to a float32 checkpoint.

The checkpoint is written by plain Flax, optax and Orbax, and the exported one is read by them: the
model that was pretrained knows digits, and is fine-tuned on digits that lie on their side.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import mpjax

STEPS = 40
ADAM = optax.adam(0.01)


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(10, name="head")(nn.relu(nn.LayerNorm()(nn.Dense(32)(x))))


class NnxNetwork(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.first = nnx.Linear(64, 32, rngs=rngs)
    self.norm = nnx.LayerNorm(32, rngs=rngs)
    self.head = nnx.Linear(32, 10, rngs=rngs)

  def __call__(self, x):
    return self.head(nnx.relu(self.norm(self.first(x))))


@functools.cache
def data():
  """Digits as they are, and lying on their side."""
  images, labels = load_digits(return_X_y=True)
  images = (images / 8 - 1).astype(np.float32)
  turned = images.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, 64)
  return images[:512], turned[:512], labels[:512].astype(np.int32)


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def bits(tree):
  return jax.tree.map(lambda x: (x.dtype.name, x.shape, np.asarray(x).tobytes()), tree)


def save(path, tree):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)
  return path


def read(path):
  """Returns what Orbax reads by itself."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path)


def plain_loss(params, images):
  return cross_entropy(Network().apply({"params": params}, images), data()[2])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """Float32 parameters that have learned upright digits, without mpjax."""
  images = data()[0]

  def step(carry, _):
    params, opt_state = carry
    updates, opt_state = ADAM.update(jax.grad(plain_loss)(params, images), opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None

  params = Network().init(jax.random.key(0), images[:1])["params"]
  run = jax.jit(functools.partial(jax.lax.scan, step, length=STEPS))
  found = run((params, ADAM.init(params)), None)[0][0]
  assert plain_loss(found, images) < 0.2 * plain_loss(params, images)
  return save(tmp_path_factory.mktemp("linen") / "pretrained", {"params": found})


def target(policy):
  """Returns what a new model under a policy would begin with."""
  model = mpjax.linen.with_policy(Network(), policy)
  return jax.eval_shape(lambda: model.init(jax.random.key(0), data()[0][:1]))


OPTIMIZERS = {
  "float32": mpjax.loss_scaling(ADAM, mpjax.NoLossScale()),
  "mixed_float16": mpjax.loss_scaling(ADAM),
  "params=float16,compute=float16,output=float32": mpjax.loss_scaling(mpjax.master_weights(ADAM)),
}
STORED_IN_HALF = list(OPTIMIZERS)[-1]


@functools.cache
def fine_tuned(policy, checkpoint):
  """Returns the losses on turned digits, and the state before and after."""
  model, tx = mpjax.linen.with_policy(Network(), policy), OPTIMIZERS[policy]

  def loss_fn(params, model_state, batch, rng):
    return cross_entropy(model.apply({"params": params}, batch), data()[2]), (model_state, {})

  half = policy == STORED_IN_HALF
  params = mpjax.checkpoints.restore_like(target(policy), checkpoint, cast=half)["params"]
  first = mpjax.TrainState.create(params, tx)
  if half:
    weights = mpjax.checkpoints.restore_like(target("float32"), checkpoint)["params"]
    first = first._replace(opt_state=mpjax.set_master_params(first.opt_state, weights))
  step = mpjax.make_train_step(loss_fn, tx, donate=False)
  state, losses = first, []
  for _ in range(STEPS):
    state, metrics = step(state, data()[1])
    losses.append(float(metrics["loss"]))
  return losses, first, state


@pytest.mark.case("A65", "B123")
def test_fine_tuning_starts_from_the_weights_as_they_are_and_learns_as_in_float32(checkpoint):
  losses, first, state = fine_tuned("mixed_float16", checkpoint)
  assert bits(first.params) == bits(read(checkpoint)["params"])
  assert losses[0] == pytest.approx(float(plain_loss(first.params, data()[1])), rel=2e-3)
  # What comes out is float32 again, for the plain model.
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
  assert float(plain_loss(state.params, data()[1])) < 0.1 * losses[0]
  reference, *_ = fine_tuned("float32", checkpoint)
  assert reference[-1] < 0.1 * reference[0]
  for policy in list(OPTIMIZERS)[1:]:
    losses, *_ = fine_tuned(policy, checkpoint)
    assert losses != reference
    np.testing.assert_allclose(losses, reference, rtol=2e-3)


@pytest.mark.case("A65")
def test_the_export_of_half_training_is_its_masters(checkpoint, tmp_path):
  """Each parameter is what is exported of it, rounded."""
  losses, first, state = fine_tuned(STORED_IN_HALF, checkpoint)
  assert bits(mpjax.master_params(first.opt_state)) == bits(read(checkpoint)["params"])
  weights = mpjax.master_params(state.opt_state, state.params)
  raw = read(save(tmp_path / "export", {"params": weights}))
  held = state.opt_state.inner_state.master
  params = jax.tree.leaves(state.params)
  found = zip(jax.tree.leaves(raw["params"]), jax.tree.leaves(held), params, strict=True)
  for exported, master, param in found:
    assert (exported.dtype, param.dtype) == ("float32", "float16")
    assert bits(exported) == bits(master)
    assert bits(np.asarray(exported).astype(np.float16)) == bits(param)
    assert bits(np.asarray(param).astype(np.float32)) != bits(exported)
  # The plain model reads it with nothing to cast, and knows what was learned.
  plain = mpjax.checkpoints.restore_like(target("float32"), tmp_path / "export")
  assert bits(plain) == bits(raw)
  assert float(plain_loss(plain["params"], data()[1])) < losses[-1] * 1.02


NAMES = {"first": "Dense_0", "norm": "LayerNorm_0", "head": "head"}
"""What the layers of the NNX model are called in the Linen one."""


@pytest.mark.case("A65", "B123", "B120")
def test_nnx_fine_tunes_and_exports_the_same_checkpoint(checkpoint, tmp_path):
  model = NnxNetwork()
  raw = read(checkpoint)["params"]
  weights = {ours: raw[linen] for ours, linen in NAMES.items()}
  like = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  weights = nnx.State(mpjax.checkpoints.restore_like(like, weights))
  nnx.update(model, mpjax.Policy(param_dtype="bfloat16").cast_to_param(weights))
  tx = mpjax.loss_scaling(mpjax.master_weights(ADAM), mpjax.StaticLossScale(256))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  opt_state = mpjax.set_master_params(nnx.as_pure(optimizer.opt_state), weights)
  nnx.update(optimizer.opt_state, nnx.state(opt_state))

  @nnx.jit
  def step(model, optimizer):
    def loss_fn(model):
      return cross_entropy(mpjax.nnx.with_policy(model, "mixed_bfloat16")(data()[1]), data()[2])

    loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model)
    optimizer.update(model, grads)
    return loss

  losses = [float(step(model, optimizer)) for _ in range(STEPS)]
  reference, *_ = fine_tuned("float32", checkpoint)
  np.testing.assert_allclose(losses, reference, rtol=1e-2)
  params = nnx.as_pure(nnx.state(model, nnx.Param))
  weights = nnx.to_pure_dict(mpjax.master_params(nnx.as_pure(optimizer.opt_state), params))
  raw = read(save(tmp_path / "export", weights))
  assert bits(raw) == bits(weights)
  rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), raw)
  assert bits(rounded) == bits(nnx.to_pure_dict(params))
  assert bits(jax.tree.map(lambda x: x.astype(np.float32), rounded)) != bits(raw)
  plain = NnxNetwork()
  target = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
  nnx.update(plain, nnx.State(mpjax.checkpoints.restore_like(target, tmp_path / "export")))
  assert float(cross_entropy(plain(data()[1]), data()[2])) < losses[-1] * 1.05
