"""Train a GPT in half precision, in parts on several devices, and let it write with a half cache.

  python examples/gpt.py
  python examples/gpt.py --devices 4 --policy float32 mixed_float16

What a large language model needs, small: one block scanned over the layers (`nn.scan`), recomputed
in the backward pass (`nn.remat`), dropout, one table as embedding and as output layer, parameters
and optimizer state in parts on all devices (FSDP; DeepSpeed and FairScale call it ZeRO), and a
cache to write with. The text is the reference of Python, see `python_reference.py`. The numbered
lines are all that mixed precision adds:

  1  products in half; softmax and norms in float32; parameters, in float32, are cast where they are
     used, so that what travels to the devices that need it is half
  2  on several devices gradients of kernels are added up in float32: a sum in float16 may overflow
  3  the scale of the loss, around all of the optimizer: a skipped step changes none of its state
  4  parameters to write with: in half, but for those that the model uses in float32

To write, the model is called with one character after the other. Keys and values of those before
stay in Flax's collection "cache", which under a policy is made in half. The last row of the table
says how many of the characters it also chooses when it is called with the whole text and no cache.
"""

import argparse
import dataclasses
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
from rich.console import Console

import mpjax

STEPS = 500
ROWS = 16
OUT = side_by_side.OUT / "gpt.png"
PROMPT = "The statement "

# bfloat16 has the range of float32: nothing underflows. The run is shorter than the default
# interval after which the scale grows.
LOSS_SCALES = {"mixed_float16": mpjax.DynamicLossScale(growth_interval=50)}


class Block(nn.Module):
  """Attention and an MLP, each beside a residual connection, in the form that `nn.scan` takes."""

  heads: int
  dropout: float
  train: bool
  decode: bool
  rows: Any

  @nn.compact
  def __call__(self, x, _):
    x = stay(x, self.rows)
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    mask = None if self.decode else nn.make_causal_mask(x[..., 0])  # A cache knows its length.
    attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, decode=self.decode)
    x = x + dropout(attention(nn.LayerNorm(use_bias=False)(x), mask=mask))
    y = nn.gelu(nn.Dense(4 * x.shape[-1], use_bias=False)(nn.LayerNorm(use_bias=False)(x)))
    return x + dropout(nn.Dense(x.shape[-1], use_bias=False)(y)), None


class Gpt(nn.Module):
  """A causal language model. With `decode` it is called with one character after the other.

  `rows` says on which devices the rows of a batch are, if on several.
  """

  layers: int = 3
  width: int = 128
  heads: int = 4
  context: int = 64
  dropout: float = 0.1
  train: bool = False
  decode: bool = False
  rows: jax.sharding.Sharding | None = None

  @nn.compact
  def __call__(self, tokens):
    places = jnp.arange(tokens.shape[1])[None]
    if self.decode:
      place = self.variable("cache", "place", jnp.zeros, (), jnp.int32)
      places = places + place.value
      if not self.is_initializing():
        place.value += tokens.shape[1]
    embed = nn.Embed(python_reference.VOCABULARY, self.width)
    x = embed(tokens) + nn.Embed(self.context, self.width, name="places")(places)
    x = nn.Dropout(self.dropout, deterministic=not self.train)(x)
    layers = nn.scan(
      nn.remat(Block, prevent_cse=False),
      variable_axes={"params": 0, "cache": 0},
      split_rngs={"params": True, "dropout": True},
      length=self.layers,
    )
    block = layers(self.heads, self.dropout, self.train, self.decode, self.rows, name="layers")
    x, _ = block(x, None)
    return embed.attend(stay(nn.LayerNorm(use_bias=False)(x), self.rows))


def stay(x, rows):
  """Keeps activations where their rows are: parameters travel to them, and not the other way."""
  return x if rows is None else jax.lax.with_sharding_constraint(x, rows)


MODEL = Gpt()


class Training(NamedTuple):
  """What training is made of, compiled once for all seeds."""

  model: Any  # under its policy
  start: Callable[..., Any]  # key -> mpjax.TrainState, in parts
  loss_fn: Callable[..., Any]  # (params, (), tokens, rng) -> loss, ((), metrics)
  step: Callable[..., Any]  # (state, tokens) -> new state, metrics
  shard: Callable[..., Any]  # puts the rows of a batch onto the devices


@functools.cache
def prepare(policy, model=MODEL, steps=STEPS, devices=1):
  """Returns the training of a model under a policy, in parts on some devices."""
  loss_scale = LOSS_SCALES.get(policy, mpjax.NoLossScale())
  policy = mpjax.Policy.parse(policy)
  if devices > 1:
    policy = dataclasses.replace(policy, weight_grad_dtype=jnp.float32)  # 2
  evaluated = mpjax.with_policy(model, policy)  # 1
  rows = jax.NamedSharding(data_mesh(devices), jax.P("data"))
  trained = evaluated.clone(train=True, rows=rows)
  rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-2))
  tx = mpjax.loss_scaling(tx, loss_scale)  # 3

  def loss_fn(params, nothing, tokens, rng):
    model, rngs = (evaluated, {}) if rng is None else (trained, {"dropout": rng})
    logits = model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), (nothing, {})

  def start(key):
    return mpjax.TrainState.create(initialiser(model, devices)(key), tx, rng=key)

  shardings = in_parts(jax.eval_shape(start, jax.random.key(0)), devices)
  step = mpjax.make_train_step(loss_fn, tx, state_shardings=shardings)
  return Training(evaluated, start, loss_fn, step, lambda tokens: jax.device_put(tokens, rows))


@functools.cache
def initialiser(model, devices):
  """Returns `key -> parameters`, which are made in parts, and are the same under every policy."""

  def init(key):
    return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

  return jax.jit(init, out_shardings=in_parts(jax.eval_shape(init, jax.random.key(0)), devices))


def data_mesh(devices):
  """Returns the devices in a row: along it go the rows of a batch, and the parts of an array."""
  return jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))


def in_parts(tree, devices):
  """Returns where arrays are to be: divided along the longest axis that can be."""

  def place(x):
    axes = [axis for axis in range(x.ndim) if x.shape[axis] % devices == 0]
    longest = max(axes, key=lambda axis: x.shape[axis], default=None)
    return jax.P(*("data" if axis == longest else None for axis in range(x.ndim)))

  return jax.tree.map(lambda x: jax.NamedSharding(data_mesh(devices), place(x)), tree)


def windows(tokens, steps, seed, rows, length):
  """Yields [rows, length] characters out of random places in the text."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    yield tokens[rng.integers(len(tokens) - length, size=(rows, 1)) + np.arange(length)]


class Written(NamedTuple):
  """What generation used and made."""

  params: Any
  cache: Any  # after the last character
  tokens: jax.Array  # [rows, context]


class Result(NamedTuple):
  """What a training left."""

  held_out_loss: float  # of a character, in nats
  state: mpjax.TrainState
  model: Any  # under its policy
  written: Written | None = None


def train(policy, steps, on_step, *, seed=0, model=MODEL, rows=ROWS, devices=1):
  """Trains under a policy; `seed` chooses parameters, dropout and windows of text."""
  text, training = python_reference.load_text(), prepare(policy, model, steps, devices)
  state, losses = training.start(jax.random.key(seed)), []
  for tokens in windows(text.train, steps, seed, rows, model.context + 1):
    state, metrics = jax.block_until_ready(training.step(state, training.shard(tokens)))
    losses.append(float(metrics["loss"]))
    on_step()
  mpjax.check_skipped_steps(state)  # raises if the last 50 steps in a row were skipped
  count = len(text.held_out) // (model.context + 1)
  rest = text.held_out[: count * (model.context + 1)].reshape(count, -1)
  held_out = float(jax.jit(training.loss_fn)(jax.device_get(state.params), (), rest, None)[0])
  scaling = jax.device_get(mpjax.loss_scaling_metrics(state.opt_state))
  figures = {
    "held-out perplexity of a character": f"{np.exp(held_out):.3f}",
    "training loss, last tenth": f"{np.mean(losses[-max(1, steps // 10) :]):.4f}",
    f"skipped steps, of {steps}": f"{scaling['skipped']}",
    "final loss scale": f"{scaling['loss_scale']:.0f}",
  }
  return side_by_side.Run(np.array(losses), figures, Result(held_out, state, training.model))


@functools.partial(jax.jit, static_argnums=0)
def generate(model, params, prompts, temperatures, key):
  """Returns prompts [rows, n] continued to [rows, model.context], and the cache at the end.

  At temperature 0 the likeliest character is taken, else one is drawn.
  """
  model, tokens = model.clone(decode=True), jnp.zeros((len(prompts), model.context), jnp.int32)
  shapes = jax.eval_shape(model.init, key, tokens)["cache"]
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def step(carry, place):
    cache, tokens = carry
    current = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
    logits, new = model.apply({"params": params, "cache": cache}, current, mutable=["cache"])
    noise = jax.random.gumbel(jax.random.fold_in(key, place), logits[:, 0].shape)
    chosen = jnp.argmax(logits[:, 0] + temperatures[:, None] * noise, axis=-1)
    following = jnp.where(place + 1 < prompts.shape[1], tokens[:, place + 1], chosen)
    return (new["cache"], tokens.at[:, place + 1].set(following)), None

  start = empty, tokens.at[:, : prompts.shape[1]].set(prompts)
  (cache, tokens), _ = jax.lax.scan(step, start, jnp.arange(model.context - 1))
  return tokens, cache


def agreement(model, params, tokens, given):
  """Returns how many characters after the `given` ones the model chooses without a cache as well.

  Each hangs only on those before it: one pass over the text says what is chosen everywhere.
  """
  chosen = jax.jit(model.apply)({"params": params}, tokens[:, :-1]).argmax(-1)
  return int((chosen == tokens[:, 1:])[:, given - 1 :].sum())


def train_and_write(policy, steps, on_step, *, prompt=PROMPT, temperature=0.7, **options):
  """Trains, writes once what is likeliest and once by chance, and adds what was seen of it."""
  run = train(policy, steps, on_step, **options)
  model, params = run.state.model, jax.device_get(run.state.state.params)
  prompts = jnp.tile(python_reference.encode(prompt), (2, 1))
  half = model.convert({"params": params}, prompts)["params"]  # 4
  temperatures = jnp.array([0.0, temperature])
  tokens, cache = generate(model, half, prompts, temperatures, jax.random.key(0))
  same = agreement(model, half, tokens[:1], len(prompt))
  figures = {
    "parameters for generation": kilobytes(half),
    "keys and values in the cache": kilobytes(cache),
    "characters chosen without a cache as well": f"{same} of {model.context - len(prompt)}",
  }
  state = run.state._replace(written=Written(half, cache, tokens))
  return run._replace(figures={**run.figures, **figures}, state=state)


def kilobytes(tree):
  """Returns what the floating arrays of a tree occupy, as text."""
  return f"{sum(x.nbytes for x in jax.tree.leaves(tree) if x.dtype != jnp.int32) / 1024:.0f} kB"


def main(steps=STEPS, path=OUT, policies=side_by_side.POLICIES, console=None, **options):
  """Trains under each policy, shows them side by side; `options` are those of `train_and_write`."""
  train_with = functools.partial(train_and_write, **options)
  title, console = "GPT on the reference of Python", console or Console()
  runs = side_by_side.compare(title, train_with, steps, path, policies, console)
  for policy, run in runs.items():
    console.rule(policy)
    console.print(python_reference.decode(run.state.written.tokens[1]), markup=False)
  return runs


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--policy", nargs="+", default=side_by_side.POLICIES, dest="policies")
  parser.add_argument("--devices", type=int, default=1, help="a CPU is divided into as many")
  options = parser.parse_args()
  if options.devices > 1:
    jax.config.update("jax_num_cpu_devices", options.devices)  # no effect on GPUs
  main(**vars(options))
