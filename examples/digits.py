"""Train a convolutional network with batch normalisation on handwritten digits, in any precision.

  python examples/digits.py mixed_float16
  python examples/digits.py mixed_bfloat16 --norm group --devices 4 --accumulate 2

The lines marked 1 to 3 are all that mixed precision adds to this training script; the network, the
optimizer and the loss are what they were. Line 4 keeps skipped steps out of the batch statistics,
which no optimizer holds. What each of them does, you would otherwise do by hand:

  1  a `dtype` argument in every module, handed on to every layer, with norms taking their
     statistics in float32 all the same, and the logits cast back for the loss
  2  a scale kept beside the optimizer state; a look at every element for inf and NaN; a choice
     between new and old for each leaf of parameters and optimizer state; growth and backoff of the
     scale
  3  the loss in float32, times the scale, inside of the function that is differentiated; gradients
     cast to float32 and divided by it
  4  the same choice between new and old for the batch statistics

On several devices the step is the same: arrays say where they are, and XLA divides the work (5).
`--accumulate` cuts each batch into parts that are run one after the other, for one update (6).
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
  # The run is shorter than the default interval after which the scale grows.
  "mixed_float16": mpjax.DynamicLossScale(growth_interval=50),
}


class Network(nn.Module):
  """Three convolutions, and not a word about precision.

  With `norm="group"` every image is normalised by itself, so that it does not matter which others
  are in its batch. `hidden` are the sizes of dense layers before the last.
  """

  norm: str = "batch"
  hidden: tuple[int, ...] = ()

  @nn.compact
  def __call__(self, images, train):
    x = images
    for features in (16, 32, 64):
      x = nn.Conv(features, (3, 3), use_bias=False)(x)
      if self.norm == "batch":
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
      else:
        x = nn.GroupNorm(num_groups=8)(x)
      x = nn.relu(x)
      x = nn.max_pool(x, (2, 2), strides=(2, 2))
    x = x.reshape(len(x), -1)
    for size in self.hidden:
      x = nn.relu(nn.Dense(size)(x))
    return nn.Dense(10)(x)


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
  shard: Callable[..., Any]  # puts a batch onto the devices


def prepare(policy, loss_scale, steps=STEPS, network=NETWORK, devices=1, accumulate=1, seed=0):
  """Returns the training of a network under a policy, on some devices."""
  model = mpjax.with_policy(network, policy)  # 1
  tx = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-2)
  if accumulate > 1:
    tx = mpjax.accumulate_gradients(tx, accumulate)  # 6
  tx = mpjax.loss_scaling(tx, loss_scale)  # 2
  mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))  # 5
  replicated, by_rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))

  def loss_fn(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new.get("batch_stats", {})

  @jax.jit
  def step(state, images, labels):
    params, batch_stats, opt_state = state
    grad_fn = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state), has_aux=True)  # 3
    (loss, new_stats), grads = grad_fn(params, batch_stats, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    batch_stats = mpjax.keep_if_skipped(opt_state, new_stats, batch_stats)  # 4
    return State(params, batch_stats, opt_state), loss

  @jax.jit
  def predict(state, images):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return model.apply(variables, images, train=False).argmax(-1)

  variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
  variables = jax.device_put(variables, replicated)
  params, batch_stats = variables["params"], variables.get("batch_stats", {})
  state = State(params, batch_stats, tx.init(params))
  return Training(state, loss_fn, step, predict, lambda batch: jax.device_put(batch, by_rows))


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


def batches(data, steps, parts=1, seed=0):
  """Yields random batches of images and labels, the same ones for the same seed, cut into parts."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    for chosen in np.split(rng.choice(len(data.labels), BATCH, replace=False), parts):
      yield data.images[chosen], data.labels[chosen]


class Result(NamedTuple):
  """What came out."""

  accuracy: float  # on the test set
  losses: np.ndarray  # [steps], on the batch of each step
  metrics: dict[str, Any]  # of loss scaling, after the last step
  training: Training
  state: State  # after the last step


def main(
  policy="mixed_float16",
  steps=STEPS,
  on_step: Callable[[], Any] = lambda: None,
  *,
  norm="batch",
  devices=1,
  accumulate=1,
):
  """Trains under a policy, calls `on_step` after each batch, and returns the result."""
  if BATCH % (devices * accumulate):
    raise ValueError(f"{BATCH} images cannot be cut for {devices} devices x {accumulate} parts")
  train, test = load_data()
  loss_scale, network = LOSS_SCALES[policy], Network(norm)
  training = prepare(policy, loss_scale, steps, network, devices, accumulate)
  state, losses = training.state, []
  for images, labels in batches(train, steps, accumulate):
    state, loss = training.step(state, *training.shard((images, labels)))
    losses.append(float(loss))
    if len(losses) % accumulate == 0:
      on_step()
  mpjax.check_skipped_steps(state.opt_state)  # raises if the last 50 steps in a row were skipped
  accuracy = float((training.predict(state, test.images) == test.labels).mean())
  metrics = jax.device_get(mpjax.loss_scaling_metrics(state.opt_state))
  losses = np.reshape(losses, (steps, accumulate)).mean(1)
  return Result(accuracy, losses, metrics, training, state)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("policy", nargs="?", default="mixed_float16", choices=list(LOSS_SCALES))
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--norm", default="batch", choices=["batch", "group"])
  parser.add_argument("--devices", type=int, default=1, help="a CPU is divided into as many")
  parser.add_argument("--accumulate", type=int, default=1, help="parts of a batch, in turn")
  options = parser.parse_args()
  if options.devices > 1:
    jax.config.update("jax_num_cpu_devices", options.devices)  # no effect on GPUs
  result = main(**vars(options))
  print(f"{options.policy}: test accuracy {result.accuracy:.2%}, ", end="")
  print(f"loss {result.losses[-1]:.6f}, loss scale {result.metrics['loss_scale']:.0f}")
