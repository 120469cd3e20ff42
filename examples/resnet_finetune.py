"""Fine-tune a ResNet-50 in half precision, from weights that were pretrained in float32.

  python examples/resnet_finetune.py
  python examples/resnet_finetune.py --memory   # of the full network, compiled for your device

This is the workflow of MXNet's float16 tutorial. A residual network is trained in float32 to tell
the digits 0 to 4 apart, and saved. Its weights are restored, its head is replaced, and it is
fine-tuned on the digits 5 to 9 under each policy: with warm-up and cosine decay, smoothed labels,
and batches and channels in multiples of 8, which is what tensor cores want. Images have 8 channels
for that, of which one holds something, and the head has 8 outputs, of which five are used.

The lines marked 1 to 3 are all that mixed precision adds. Where they stand in MXNet:

  1  `net.cast("float16")`, and a cast of the data
  2  `multi_precision=True` (here parameters are float32 and cast where they are used, so that they
     are their own masters), and a loss scale that one has to choose
  3  the backward pass at the scale; a step that overflows leaves no trace, in batch statistics too

Of the forward pass the outputs of the convolutions are kept, and all else is computed again (4). A
policy keeps them in low precision, and beside them what its norms scale, which no policy of
`jax.checkpoint` reaches. The table counts that for the full ResNet-50 and 224 x 224 pixels, as
traced. `--memory` compiles for your device; a CPU would say nothing, since XLA computes half
convolutions in float32 there.
"""

import argparse
import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import side_by_side
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax

STEPS, BATCH, CLASSES = 120, 32, 5

LOSS_SCALES = {
  # bfloat16 has the range of float32: nothing underflows, and nothing has to be scaled.
  "float32": mpjax.NoLossScale(),
  "mixed_bfloat16": mpjax.NoLossScale(),
  # The run is shorter than the default interval after which the scale grows.
  "mixed_float16": mpjax.DynamicLossScale(growth_interval=20),
}


class Bottleneck(nn.Module):
  """Three convolutions and a shortcut; the stride is in the 3x3 convolution (version 1.5)."""

  features: int
  stride: int

  @nn.compact
  def __call__(self, x, train):
    conv = functools.partial(nn.Conv, use_bias=False)
    norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
    y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
    y = nn.relu(norm()(conv(self.features, (3, 3), self.stride)(y)))
    y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
    if x.shape != y.shape:
      x = norm(name="shortcut_norm")(conv(4 * self.features, (1, 1), self.stride)(x))
    return nn.relu(x + y)


class ResNet(nn.Module):
  """ResNet-50, unless other numbers are given. With `small_images` nothing shrinks at its start."""

  outputs: int = 1000
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64
  small_images: bool = False

  @nn.compact
  def __call__(self, x, train):
    size, stride = (3, 1) if self.small_images else (7, 2)
    x = nn.Conv(self.width, (size, size), stride, use_bias=False)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
    if not self.small_images:
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    for stage, blocks in enumerate(self.blocks):
      for block in range(blocks):
        x = Bottleneck(self.width * 2**stage, 2 if stage > 0 and block == 0 else 1)(x, train)
    return nn.Dense(self.outputs, name="head")(x.mean((1, 2)))


SMALL = ResNet(outputs=8, blocks=(1, 2, 2, 1), width=8, small_images=True)
"""What a CPU can train in a minute: fewer blocks, narrower, otherwise the same."""


class Data(NamedTuple):
  """Images [N, 16, 16, 8] in float32 and their labels [N] in int32, from 0 on."""

  images: np.ndarray
  labels: np.ndarray


def load_data(first):
  """Returns the training and the test set: scikit-learn's digits from `first` to `first + 4`."""
  images, labels = load_digits(return_X_y=True)
  chosen = (labels >= first) & (labels < first + CLASSES)
  images = (images[chosen].reshape(-1, 8, 8, 1).astype(np.float32) - 4.9) / 6
  images = np.pad(images.repeat(2, 1).repeat(2, 2), [(0, 0)] * 3 + [(0, 7)])
  labels = labels[chosen].astype(np.int32) - first
  parts = train_test_split(images, labels, test_size=224, random_state=0, stratify=labels)
  return Data(parts[0], parts[2]), Data(parts[1], parts[3])


def is_convolution(primitive, *_, **__):
  """Says what the forward pass keeps: a policy for `jax.checkpoint`."""
  return primitive.name == "conv_general_dilated"


class Training(NamedTuple):
  """What training is made of."""

  network: ResNet
  tx: Any
  loss_fn: Any  # (params, batch_stats, batch, rng) -> loss, (new batch_stats, metrics)
  step: Any  # (state, batch) -> new state, metrics
  predict: Any  # (state, images) -> labels


def prepare(network, policy, steps, classes=CLASSES):
  """Returns the training of a network under a policy."""
  model = mpjax.with_policy(network, policy)  # 1
  schedule = optax.warmup_cosine_decay_schedule(0, 0.2, steps // 8, steps)
  tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, 0.9, nesterov=True))
  tx = mpjax.loss_scaling(tx, LOSS_SCALES[policy])  # 2

  @functools.partial(jax.checkpoint, policy=is_convolution)  # 4
  def loss_fn(params, batch_stats, batch, rng):
    del rng
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, batch.images, train=True, mutable=["batch_stats"])
    targets = optax.smooth_labels(jax.nn.one_hot(batch.labels, classes), 0.1)
    loss = optax.softmax_cross_entropy(logits[:, :classes], targets).mean()
    return loss, (new["batch_stats"], {})

  @jax.jit
  def predict(state, images):
    variables = {"params": state.params, "batch_stats": state.model_state}
    return model.apply(variables, images, train=False)[:, :classes].argmax(-1)

  step = mpjax.make_train_step(loss_fn, tx)  # 3
  return Training(network, tx, loss_fn, step, predict)


@functools.partial(jax.jit, static_argnums=0)
def initialise(network, key):
  """Returns new variables, which no policy changes."""
  return network.init(key, jnp.zeros((1, 64, 64, 8)), train=False)


def begin(training, variables):
  """Returns the state before the first step."""
  params, batch_stats = variables["params"], variables["batch_stats"]
  return mpjax.TrainState.create(params, training.tx, model_state=batch_stats)


def fit(training, state, data, steps, on_step):
  """Trains on random batches, the same ones in every run; returns the last state and all losses."""
  rng, losses = np.random.default_rng(0), []
  for _ in range(steps):
    chosen = rng.choice(len(data.labels), BATCH, replace=False)
    state, metrics = training.step(state, Data(data.images[chosen], data.labels[chosen]))
    losses.append(float(metrics["loss"]))
    on_step()
  mpjax.check_skipped_steps(state)  # raises if the last 50 steps in a row were skipped
  return state, np.array(losses)


def accuracy(training, state, data):
  """Returns the share of images that are told right."""
  return float((training.predict(state, data.images) == data.labels).mean())


def pretrain(training, steps, path, console):
  """Trains on the digits 0 to 4, and saves the weights and batch statistics at `path`."""
  data, test = load_data(0)
  state = begin(training, initialise(training.network, jax.random.key(0)))
  with side_by_side.progress_bar(console) as progress:
    task = progress.add_task("pretraining in float32", total=steps)
    state, _ = fit(training, state, data, steps, lambda: progress.advance(task))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"params": state.params, "batch_stats": state.model_state})
  return accuracy(training, state, test)


def restore(training, path):
  """Returns the state that fine-tuning begins with: the weights that were saved, but for the head.

  They are float32 under every policy. A leaf that is missing, or of another shape or dtype, is an
  error.
  """
  new = initialise(training.network, jax.random.key(1))
  saved = mpjax.checkpoints.restore_like(new, path)
  saved["params"]["head"] = new["params"]["head"]
  return begin(training, saved)


def full_size(policy, batch):
  """Returns the training of the full ResNet-50, and the shapes of its state and of a batch."""
  training = prepare(ResNet(), policy, 1, classes=1000)
  images = jax.ShapeDtypeStruct((batch, 224, 224, 8), jnp.float32)
  data = Data(images, jax.ShapeDtypeStruct((batch,), jnp.int32))
  variables = jax.eval_shape(lambda: initialise(training.network, jax.random.key(0)))
  state = jax.eval_shape(functools.partial(begin, training), variables)
  return training, state, data


def kept_bytes(policy, batch):
  """Returns what the forward pass of the full ResNet-50 keeps for the backward pass."""
  training, state, data = full_size(policy, batch)

  def keep(state, data):
    rest = (state.model_state, data, None)
    return jax.tree.leaves(jax.vjp(lambda p: training.loss_fn(p, *rest)[0], state.params)[1])

  # An array that is read twice is kept once. Parameters and images are there anyway.
  kept = {id(v): v.aval for v in jax.make_jaxpr(keep)(state, data).jaxpr.outvars}.values()
  kept = [x for x in kept if x.shape[:1] == (batch,) and x.shape != data.images.shape]
  return sum(x.size * x.dtype.itemsize for x in kept)


def print_memory(policies, batch=64):
  """Prints what the compiled step needs beside its arguments: in half also for twice the batch."""
  for policy in policies:
    for images in (batch,) if policy == "float32" else (batch, 2 * batch):
      training, state, data = full_size(policy, images)
      memory = training.step.lower(state, data).compile().memory_analysis()
      print(f"{policy}, {images} images: {memory.temp_size_in_bytes / 1e9:.2f} GB")
  if jax.default_backend() == "cpu":
    print("XLA for CPUs computes half convolutions in float32: look at a GPU or a TPU.")


class Result(NamedTuple):
  """What came out of fine-tuning."""

  training: Training
  first: Any  # parameters and batch statistics before it
  state: mpjax.TrainState  # after it
  accuracy: float  # on the test set
  kept: int  # bytes for the backward pass of the full ResNet-50, of 64 images


def main(
  steps=STEPS,
  path=side_by_side.OUT / "resnet_finetune.png",
  policies=side_by_side.POLICIES,
  console=None,
  *,
  network=SMALL,
):
  """Pretrains, fine-tunes under each policy, prints a table, draws the losses; returns the runs."""
  with tempfile.TemporaryDirectory() as folder:
    checkpoint, plain = pathlib.Path(folder) / "pretrained", prepare(network, "float32", steps)
    before = pretrain(plain, steps, checkpoint, console)

    def train(policy, steps, on_step):
      training = plain if policy == "float32" else prepare(network, policy, steps)
      data, test = load_data(CLASSES)
      state = restore(training, checkpoint)
      first = jax.device_get((state.params, state.model_state))
      state, losses = fit(training, state, data, steps, on_step)
      kept = kept_bytes(policy, 64)
      found = Result(training, first, state, accuracy(training, state, test), kept)
      metrics = mpjax.loss_scaling_metrics(state.opt_state)
      figures = {
        "pretrained, digits 0 to 4": f"{before:.2%}",
        "fine-tuned, digits 5 to 9": f"{found.accuracy:.2%}",
        "final loss (20 batches)": f"{losses[-20:].mean():.4f}",
        "skipped steps": f"{int(metrics['skipped'])}",
        "final loss scale": f"{float(metrics['loss_scale']):.0f}",
        "kept by ResNet-50, for an image": f"{kept / 64e6:.1f} MB",
      }
      return side_by_side.Run(losses, figures, found)

    return side_by_side.compare("Accuracy of a ResNet", train, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--policy", action="append", choices=side_by_side.POLICIES)
  parser.add_argument("--memory", action="store_true", help="compile the full ResNet-50 instead")
  options = parser.parse_args()
  chosen = options.policy or side_by_side.POLICIES
  if options.memory:
    print_memory(chosen)
  else:
    main(options.steps, policies=chosen)
