"""Train a convolutional network with batch normalisation on handwritten digits, in any precision.

  python examples/digits.py mixed_float16

The lines marked 1 to 3 are all that mixed precision adds to this training script; the network, the
optimizer and the loss are what they were. Line 4 keeps skipped steps out of the batch statistics,
which no optimizer holds. What each of them does, you would otherwise do by hand:

  1  a `dtype` argument in every module, handed on to every layer, with norms taking their
     statistics in float32 all the same, and the logits cast back for the loss
  2  a scale kept beside the optimizer state; gradients cast to float32 and divided by it; a look
     at every element for inf and NaN; a choice between new and old for each leaf of parameters
     and optimizer state; growth and backoff of the scale
  3  the loss in float32, times the scale, inside of the function that is differentiated
  4  the same choice between new and old for the batch statistics
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax

STEPS = 400
BATCH = 64

LOSS_SCALES = {
  # bfloat16 has the range of float32: nothing underflows, and nothing has to be scaled.
  "float32": mpjax.NoLossScale(),
  "mixed_bfloat16": mpjax.NoLossScale(),
  # The usual 2000 finite steps until the scale grows are more than this whole run has.
  "mixed_float16": mpjax.DynamicLossScale(growth_interval=50),
}


class Network(nn.Module):
  """Three convolutions, and not a word about precision."""

  @nn.compact
  def __call__(self, images, train):
    x = images
    for features in (16, 32, 64):
      x = nn.Conv(features, (3, 3), use_bias=False)(x)
      x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
      x = nn.max_pool(x, (2, 2), strides=(2, 2))
    return nn.Dense(10)(x.reshape(len(x), -1))


NETWORK = Network()


class State(NamedTuple):
  """What training changes."""

  params: Any
  batch_stats: Any
  opt_state: Any


class Training(NamedTuple):
  """What training is made of: the first state, and functions of a state."""

  state: State
  loss_fn: Callable[..., Any]  # (params, batch_stats, images, labels) -> loss, new batch_stats
  step: Callable[..., Any]  # (state, images, labels) -> new state, loss
  predict: Callable[..., Any]  # (state, images) -> labels


def prepare(policy, loss_scale, steps=STEPS):
  """Returns the training of `NETWORK` under a policy."""
  model = mpjax.linen.with_policy(NETWORK, policy)  # 1
  tx = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-2)
  tx = mpjax.loss_scaling(tx, loss_scale)  # 2

  def loss_fn(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new["batch_stats"]

  @jax.jit
  def step(state, images, labels):
    params, batch_stats, opt_state = state
    grad_fn = mpjax.value_and_grad(loss_fn, opt_state, has_aux=True)  # 3
    (loss, new_stats), grads = grad_fn(params, batch_stats, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    finite = mpjax.loss_scaling_metrics(opt_state)["finite"]
    batch_stats = mpjax.commit(finite, new_stats, batch_stats)  # 4
    return State(params, batch_stats, opt_state), loss

  @jax.jit
  def predict(state, images):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return model.apply(variables, images, train=False).argmax(-1)

  variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
  params, batch_stats = variables["params"], variables["batch_stats"]
  return Training(State(params, batch_stats, tx.init(params)), loss_fn, step, predict)


class Data(NamedTuple):
  """Normalised images [N, 8, 8, 1] in float32 and their labels [N] in int32."""

  images: np.ndarray
  labels: np.ndarray


def load_data():
  """Returns the training and the test set: 1797 real digits, bundled with scikit-learn."""
  images, labels = load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8, 1).astype(np.float32)
  parts = train_test_split(
    images, labels.astype(np.int32), test_size=0.25, random_state=0, stratify=labels
  )
  mean, deviation = parts[0].mean(), parts[0].std()
  train, test = ((x - mean) / deviation for x in parts[:2])
  return Data(train, parts[2]), Data(test, parts[3])


def batches(data, steps):
  """Yields random batches of images and labels, the same ones in every run."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    chosen = rng.choice(len(data.labels), BATCH, replace=False)
    yield data.images[chosen], data.labels[chosen]


class Result(NamedTuple):
  """What came out."""

  accuracy: float  # on the test set
  losses: np.ndarray  # [steps], on the batch of each step
  metrics: dict[str, Any]  # of loss scaling, after the last step
  training: Training
  state: State  # after the last step


def main(policy="mixed_float16", steps=STEPS, on_step: Callable[[], Any] = lambda: None):
  """Trains under a policy, calls `on_step` after each step, and returns the result."""
  train, test = load_data()
  training = prepare(policy, LOSS_SCALES[policy], steps)
  state, losses = training.state, []
  for images, labels in batches(train, steps):
    state, loss = training.step(state, images, labels)
    losses.append(float(loss))
    on_step()
  mpjax.check_progress(state.opt_state)  # raises if the last 50 steps in a row were skipped
  accuracy = float((training.predict(state, test.images) == test.labels).mean())
  metrics = jax.device_get(mpjax.loss_scaling_metrics(state.opt_state))
  return Result(accuracy, np.array(losses), metrics, training, state)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("policy", nargs="?", default="mixed_float16", choices=list(LOSS_SCALES))
  parser.add_argument("--steps", type=int, default=STEPS)
  options = parser.parse_args()
  result = main(options.policy, options.steps)
  print(f"{options.policy}: test accuracy {result.accuracy:.2%}, ", end="")
  print(f"loss {result.losses[-1]:.4f}, loss scale {result.metrics['loss_scale']:.0f}")
