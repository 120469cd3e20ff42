"""Ask which modules of a Transformer must stay in float32, for an error that is allowed.

The second block scales the logits of its attention by hand, after the matmul: they reach 1e5, which
float16 does not represent. And the gradient is to be within 0.15 %, which float16 everywhere else
does not reach either.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax

WIDTH, VOCABULARY = 32, 64


class Attention(nn.Module):
  """Attention with a softmax by hand, whose operands are larger by `gain`."""

  gain: float

  @nn.compact
  def __call__(self, x):
    query, key, value = jnp.split(nn.Dense(3 * WIDTH, name="qkv")(x), 3, axis=-1)
    logits = jnp.einsum("bqc,bkc->bqk", self.gain * query, self.gain * key)
    logits = logits / (self.gain**2 * WIDTH**0.5)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    logits = jnp.where(mask[None], logits, -1e9)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return nn.Dense(WIDTH, name="out")(jnp.einsum("bqk,bkc->bqc", weights, value))


class Transformer(nn.Module):
  """Two blocks, and not a word about precision."""

  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids)
    for number, gain in enumerate((1.0, 200.0)):
      x = x + Attention(gain, name=f"attention_{number}")(nn.LayerNorm()(x))
      hidden = nn.gelu(nn.Dense(4 * WIDTH, name=f"up_{number}")(nn.LayerNorm()(x)))
      x = x + nn.Dense(WIDTH, name=f"down_{number}")(hidden)
    return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm()(x))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tolerance", type=float, default=1.5e-3)
  args = parser.parse_args()
  model, ids = Transformer(), jax.random.randint(jax.random.key(0), (8, 17), 0, VOCABULARY)
  params = model.init(jax.random.key(1), ids)

  def loss_fn(params, ids):
    logits = jax.nn.log_softmax(model.apply(params, ids[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1))

  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=args.tolerance)(params, ids)
  print(report)


if __name__ == "__main__":
  main()
