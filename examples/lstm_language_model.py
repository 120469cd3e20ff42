"""Train an LSTM language model on characters: half precision reaches the perplexity of float32.

  python examples/lstm_language_model.py
  python examples/lstm_language_model.py --steps 100 --policy float32 mixed_float16

This is what MXNet and others report of mixed precision in language models: the same perplexity on
text that was held out. The text is the reference of Python, see `python_reference.py`. Lines 1 and
2 are all that mixed precision adds; the model and the loss are what they were.

  1  products in half. What an LSTM carries along stays float32, and so do parameters, which are
     cast where they are used: their gradients are added up over time in float32
  2  the scale of the loss, around all of the optimizer. Clipping reads the size of gradients, which
     are plain: the scale is only in the backward pass

Each window of text goes on where the one before it ended, and gradients end where windows do
(truncated backpropagation). So the carry is state of the model, a collection of its own, which a
policy leaves as it is (an argument would be cast to half). `make_train_step` commits it together
with the parameters: a window that overflowed leaves both as they were.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import python_reference
import side_by_side

import mpjax

STEPS = 500
ROWS = 32
WINDOW = 64
OUT = side_by_side.OUT / "lstm_language_model.png"

# bfloat16 has the range of float32: nothing underflows. The run is shorter than the default
# interval after which the scale grows.
LOSS_SCALES = {"mixed_float16": mpjax.DynamicLossScale(growth_interval=50)}


class LanguageModel(nn.Module):
  """An LSTM of several layers between an embedding and the same embedding as output layer.

  Its state after the last character stays in the collection "carry", from where it goes on.
  """

  features: int = 160
  layers: int = 2
  dropout: float = 0.1

  @nn.compact
  def __call__(self, tokens, train):
    embed = nn.Embed(python_reference.VOCABULARY, self.features)
    dropout = nn.Dropout(self.dropout, deterministic=not train)
    x = dropout(embed(tokens))
    for number in range(self.layers):
      cell = nn.OptimizedLSTMCell(self.features)
      first = functools.partial(cell.initialize_carry, jax.random.key(0), x[:, 0].shape)
      carry = self.variable("carry", f"layer_{number}", first)
      new_carry, x = nn.RNN(cell, return_carry=True)(x, initial_carry=carry.value)
      if not self.is_initializing():
        carry.value = new_carry
      x = dropout(x)
    return embed.attend(x)


MODEL = LanguageModel()


class Training(NamedTuple):
  """What training is made of, compiled once for all seeds."""

  start: Callable[..., Any]  # (key, rows) -> mpjax.TrainState
  loss_fn: Callable[..., Any]  # (params, carry, tokens, rng) -> loss, (new carry, metrics)
  step: Callable[..., Any]  # (state, tokens) -> new state, metrics


@functools.cache
def prepare(policy, model=MODEL, steps=STEPS):
  """Returns the training of a model under a policy."""
  half = mpjax.with_policy(model, policy)  # 1
  rate = optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-3))
  tx = mpjax.loss_scaling(tx, LOSS_SCALES.get(policy, mpjax.NoLossScale()))  # 2

  def loss_fn(params, carry, tokens, rng):
    variables, train = {"params": params, "carry": carry}, rng is not None
    rngs = {"dropout": rng} if train else None
    logits, new = half.apply(variables, tokens[:, :-1], train, rngs=rngs, mutable=["carry"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), (new["carry"], {})

  def start(key, rows):
    variables = first_variables(model, key, rows)
    return mpjax.TrainState.create(variables["params"], tx, model_state=variables["carry"], rng=key)

  return Training(start, loss_fn, mpjax.make_train_step(loss_fn, tx))


@functools.partial(jax.jit, static_argnums=(0, 2))
def first_variables(model, key, rows):
  """Returns what training starts from: it is the same under every policy."""
  return model.init(key, jnp.zeros((rows, 1), jnp.int32), train=False)


def windows(tokens, steps, seed, rows=ROWS, window=WINDOW):
  """Yields the next [rows, window + 1] characters of `rows` places in the text, around and around.

  The last character of a window is the first of the next: it was a target, and is now an input.
  """
  first = np.random.default_rng(seed).integers(len(tokens))
  places = first + np.arange(rows)[:, None] * (len(tokens) // rows) + np.arange(window + 1)
  for number in range(steps):
    yield tokens[(places + number * window) % len(tokens)]


def held_out_loss(training, params, tokens, rows=64):
  """Returns the mean loss of a character, in text that is read in `rows` parts."""
  parts = tokens[: len(tokens) // rows * rows].reshape(rows, -1)
  return float(jax.jit(training.loss_fn)(params, {}, parts, None)[0])


class Result(NamedTuple):
  """What a training left."""

  held_out_loss: float  # of a character, in nats
  state: mpjax.TrainState


def train(policy, steps, on_step, *, seed=0, model=MODEL, rows=ROWS, window=WINDOW):
  """Trains under a policy; `seed` chooses parameters, dropout and where the text begins."""
  text, training = python_reference.load_text(), prepare(policy, model, steps)
  state, losses = training.start(jax.random.key(seed), rows), []
  for tokens in windows(text.train, steps, seed, rows, window):
    state, metrics = training.step(state, tokens)
    losses.append(float(metrics["loss"]))
    on_step()
  mpjax.check_skipped_steps(state)  # raises if the last 50 steps in a row were skipped
  held_out = held_out_loss(training, state.params, text.held_out)
  scaling = jax.device_get(mpjax.loss_scaling_metrics(state.opt_state))
  figures = {
    "held-out perplexity of a character": f"{np.exp(held_out):.3f}",
    "training loss, last tenth": f"{np.mean(losses[-max(1, steps // 10) :]):.4f}",
    f"skipped steps, of {steps}": f"{scaling['skipped']}",
    "final loss scale": f"{scaling['loss_scale']:.0f}",
  }
  return side_by_side.Run(np.array(losses), figures, Result(held_out, state))


def main(steps=STEPS, path=OUT, policies=side_by_side.POLICIES, console=None, **options):
  """Trains under each policy, and shows them side by side; `options` are those of `train`."""
  train_with = functools.partial(train, **options)
  title = "LSTM language model on the reference of Python"
  return side_by_side.compare(title, train_with, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--policy", nargs="+", default=side_by_side.POLICIES, dest="policies")
  main(**vars(parser.parse_args()))
