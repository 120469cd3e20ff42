"""Train a Vision Transformer in Flax NNX on handwritten digits, then store it in half.

  python examples/vit.py
  python examples/vit.py --policy mixed_float16 --steps 100

The model is plain NNX and says nothing about precision: a convolution makes the patches, the class
token and the positions are raw `nnx.Param`s, then come pre-norm blocks with attention and dropout.
The lines marked 1 to 5 are all that mixed precision adds to the script:

  1  the optimizer with a loss scale in its state
  2  the forward pass of a view of the model: same variables, half compute
  3  the gradients, by a backward pass at that scale
  4  what the optimizer does not hold (the counters of dropout) skips bad steps too
  5  for inference: parameters stored in half where only half is made of them

After line 5 the model has half the bytes, and its outputs are the same to the bit. The plot is
written to out/vit.png.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import side_by_side
from flax import nnx
from side_by_side import Run

import mpjax

STEPS = 300


class Block(nnx.Module):
  """Attention and a perceptron, each behind a norm and beside a shortcut."""

  def __init__(self, width, heads, dropout, rngs):
    self.norm1 = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      heads, width, dropout_rate=dropout, decode=False, rngs=rngs
    )
    self.norm2 = nnx.LayerNorm(width, rngs=rngs)
    self.hidden = nnx.Linear(width, 2 * width, rngs=rngs)
    self.out = nnx.Linear(2 * width, width, rngs=rngs)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)

  def __call__(self, x):
    x = x + self.dropout(self.attention(self.norm1(x)))
    return x + self.dropout(self.out(nnx.gelu(self.hidden(self.norm2(x)))))


class VisionTransformer(nnx.Module):
  """Classifies 8x8 images by 16 patches of 2x2 pixels and a class token."""

  def __init__(self, rngs, *, width=64, depth=3, heads=4, dropout=0.1):
    def normal(deviation, *shape):
      return nnx.Param(deviation * jax.random.normal(rngs.params(), shape))

    self.patches = nnx.Conv(1, width, (2, 2), strides=(2, 2), rngs=rngs)
    self.class_token = normal(0.02, 1, 1, width)
    self.positions = normal(0.5, 1, 17, width)
    self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(depth)])
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, 10, rngs=rngs)

  def __call__(self, images):
    x = self.patches(images)
    x = x.reshape(len(x), -1, x.shape[-1])
    token = jnp.broadcast_to(self.class_token, (len(x), 1, x.shape[-1]))
    x = jnp.concatenate([token, x], axis=1) + self.positions
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x[:, 0]))


class Trained(NamedTuple):
  """What a training leaves."""

  accuracy: float  # on the test set
  model: VisionTransformer  # with float32 parameters
  optimizer: nnx.Optimizer[Any]
  step: Callable[..., jax.Array]  # (model, optimizer, images, labels) -> loss; changes both
  inference: VisionTransformer  # with parameters in half where only half is made of them


def prepare(policy, steps, *, seed=0, **sizes):
  """Returns a model, its optimizer, and the training step under a policy."""
  model = VisionTransformer(nnx.Rngs(seed), **sizes)
  model.train()
  schedule = optax.warmup_cosine_decay_schedule(0, 5e-3, steps // 10, steps)
  tx = mpjax.loss_scaling(optax.adamw(schedule), digits.LOSS_SCALES[policy])  # 1
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  @mpjax.nnx.atomic_step  # 4
  def step(model, optimizer, images, labels):
    def loss_fn(model):
      logits = mpjax.with_policy(model, policy)(images)  # 2
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model)  # 3
    optimizer.update(model, grads)
    return loss

  return model, optimizer, step


def train(policy, steps, on_step, *, seed=0, **sizes):
  """Trains for some steps under a policy; the `state` of the run is a `Trained`."""
  train_data, test = digits.load_data()
  model, optimizer, step = prepare(policy, steps, seed=seed, **sizes)
  losses = []
  for images, labels in digits.batches(train_data, steps):
    losses.append(float(step(model, optimizer, images, labels)))
    on_step()
  mpjax.check_skipped_steps(optimizer)
  metrics = mpjax.loss_scaling_metrics(optimizer)

  model.eval()
  view = mpjax.with_policy(model, policy)
  small = mpjax.nnx.convert(view, test.images[:1])  # 5
  before, after = (np.asarray(predict(one, test.images)) for one in (view, small))
  accuracy = float((after.argmax(-1) == test.labels).mean())
  figures = {
    "test accuracy": f"{accuracy:.2%}",
    "loss of the last 20 batches": f"{np.mean(losses[-20:]):.4f}",
    "loss scale": f"{metrics['loss_scale']:.0f}",
    "skipped steps": f"{metrics['skipped']}",
    "parameters, in training": f"{parameter_bytes(view) / 1e3:.0f} kB",
    "parameters, for inference": f"{parameter_bytes(small) / 1e3:.0f} kB",
    "outputs of both": "equal to the bit" if before.tobytes() == after.tobytes() else "DIFFERENT",
  }
  return Run(np.array(losses), figures, Trained(accuracy, model, optimizer, step, small))


def predict(view, images):
  """Returns the logits, every value of the program rounded to its dtype.

  Left to itself XLA skips some of the roundings, on a CPU for example; which, depends on what else
  is in a program.
  """
  graphdef, state = nnx.split(view)
  exact = {"xla_allow_excess_precision": False}
  return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x), compiler_options=exact)(
    state, images
  )


def parameter_bytes(model):
  """Returns what the parameters of a model occupy."""
  return sum(x.nbytes for x in jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param))))


def main(
  steps=STEPS,
  path=side_by_side.OUT / "vit.png",
  policies=side_by_side.POLICIES,
  console=None,
  **sizes,
):
  """Trains under each policy, prints the table, writes the plot, and returns the runs."""
  title = "A Vision Transformer in Flax NNX, on digits"
  run = functools.partial(train, **sizes)
  return side_by_side.compare(title, run, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS, help="for each policy")
  parser.add_argument("--policy", choices=side_by_side.POLICIES, help="instead of all")
  options = parser.parse_args()
  main(options.steps, policies=[options.policy] if options.policy else side_by_side.POLICIES)
