"""Train a mixture of experts in bfloat16 and in float8, from several seeds: one loss.

  python examples/moe.py
  python examples/moe.py --steps 50 --seeds 2

Each token goes to the expert that a router chooses. Tokens are sorted by expert, and one
`jax.lax.ragged_dot` multiplies each group with the kernel of its own. What is trained are the
handwritten digits of scikit-learn, an image as four tokens of 16 pixels. The policy is all that
differs: experts and projections are in float8, forward and backward, the router and the head (its
10 columns are no multiple of 16) in bfloat16. They are far too small to gain by it: `skip=none`
asks for float8 all the same. The audit says how much of the FLOPs that is.
"""

import argparse
import functools

import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import side_by_side

import mpjax

STEPS, SEEDS = 150, 5
OUT = side_by_side.OUT / "moe.png"
FLOAT8 = "c=bf16,o=f32,matmul=float8:skip=none"
POLICIES = ("float32", "mixed_bfloat16", FLOAT8)


class Experts(nn.Module):
  """Two layers for each token, those of the expert that the router gives it to."""

  experts: int = 4
  hidden: int = 128

  @nn.compact
  def __call__(self, tokens):
    width, count = tokens.shape[-1], self.experts
    gates = jax.nn.softmax(nn.Dense(count, name="router")(tokens))
    expert = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=count).astype(jnp.int32)
    init = nn.initializers.lecun_normal(batch_axis=0)
    up = self.param("up", init, (count, width, self.hidden))
    down = self.param("down", init, (count, self.hidden, width))
    grouped = nn.gelu(jax.lax.ragged_dot(tokens[order], up, sizes))
    grouped = jax.lax.ragged_dot(grouped, down, sizes)
    chosen = jnp.take_along_axis(gates, expert[:, None], axis=-1)
    # Each expert should get a share of the tokens: a loss that falls where they do.
    self.sow("losses", "balance", count * jnp.mean(jnp.mean(gates, axis=0) * sizes / len(tokens)))
    return jnp.zeros_like(grouped).at[order].set(grouped) * chosen


class Network(nn.Module):
  """Tokens of 16 pixels, blocks of experts between dense layers, and the mean of all tokens."""

  width: int = 64
  blocks: int = 2

  @nn.compact
  def __call__(self, images):
    count = len(images)
    patches = images.reshape(count, 2, 4, 2, 4).swapaxes(2, 3).reshape(4 * count, 16)
    places = self.param("places", nn.initializers.normal(0.1), (4, self.width))
    x = nn.Dense(self.width, name="embed")(patches) + jnp.tile(places, (count, 1))
    for _ in range(self.blocks):
      x = x + Experts()(nn.LayerNorm()(x))
      mixed = nn.Dense(self.width)(nn.LayerNorm()(x).reshape(count, -1))  # Of an image's tokens.
      x = x + jnp.repeat(mixed, 4, axis=0)
    return nn.Dense(10, name="head")(x.reshape(count, 4, -1).mean(axis=1))


NETWORK = Network()


@functools.cache
def prepare(policy, steps, network=NETWORK):
  """Returns the optimizer, the loss and the step of a training, compiled once for all seeds."""
  model = mpjax.with_policy(network, policy)
  tx = optax.adamw(optax.cosine_decay_schedule(2e-3, steps))

  def loss_fn(params, images, labels):
    logits, state = model.apply({"params": params}, images, mutable=["losses"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + 0.01 * sum(jax.tree.leaves(state)), (loss, logits)

  @jax.jit
  def step(params, opt_state, images, labels):
    grads, (loss, _) = jax.grad(loss_fn, has_aux=True)(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return tx, jax.jit(loss_fn), step


def train(policy, steps, on_step, *, seeds=SEEDS, network=NETWORK):
  """Trains from each seed under a policy, and returns the means."""
  (images, labels), test = (
    (data.images.reshape(-1, 8, 8), data.labels) for data in digits.load_data()
  )
  tx, loss_fn, step = prepare(policy, steps, network)
  losses, tested, right = np.zeros((seeds, steps)), [], []
  for seed in range(seeds):
    params = network.init(jax.random.key(seed), images[:1])["params"]
    opt_state, rng = tx.init(params), np.random.default_rng(seed)
    for number in range(steps):
      rows = rng.integers(len(images), size=128)
      params, opt_state, loss = step(params, opt_state, images[rows], labels[rows])
      losses[seed, number] = loss
      if seed == seeds - 1:
        on_step()
    _, (loss, logits) = loss_fn(params, *test)
    tested.append(float(loss))
    right.append(float(jnp.mean(jnp.argmax(logits, axis=-1) == test[1])))
  audit = mpjax.audit(step)(params, opt_state, images[:128], labels[:128])
  figures = {
    f"training loss, last tenth, {seeds} seeds": spread(losses[:, -max(1, steps // 10) :].mean(1)),
    "test loss": spread(tested),
    "wrong test images, %": spread([100 * (1 - each) for each in right]),
    "matmuls in a format": f"{100 * audit.format_share:.1f} %",
  }
  return side_by_side.Run(losses.mean(0), figures, (tested, audit))


def spread(values):
  """Returns the mean and the standard deviation over seeds, as text."""
  deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
  return f"{np.mean(values):.4f} ± {deviation:.4f}"


def main(steps=STEPS, path=OUT, policies=POLICIES, console=None, **options):
  """Trains under each policy, and shows them side by side; `options` are those of `train`."""
  title = "Mixture of experts on handwritten digits"
  train_with = functools.partial(train, **options)
  return side_by_side.compare(title, train_with, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--seeds", type=int, default=SEEDS)
  parser.add_argument("--policy", nargs="+", default=POLICIES, dest="policies")
  main(**vars(parser.parse_args()))
