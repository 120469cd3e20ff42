"""Models of Equinox and Haiku as `(params, batch) -> (loss, outputs)`, in float32.

Each is written as its library's own examples are, without a dtype.
"""

from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.plain import cross_entropy
from tests.models.values import filled, integers, normal


class Model(NamedTuple):
  """What a test needs of a model: the function, and values for its arguments."""

  fun: Any
  params: Any
  batch: Any


# Equinox: a model is a tree of arrays, mapped over the batch by `vmap`.


class Encoder(eqx.Module):
  """A patch convolution, attention, and a multilayer perceptron; of one image."""

  patches: eqx.nn.Conv2d
  norms: list[eqx.nn.LayerNorm]
  attention: eqx.nn.MultiheadAttention
  mlp: eqx.nn.MLP
  head: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key, 4)
    self.patches = eqx.nn.Conv2d(3, 16, kernel_size=2, stride=2, key=keys[0])
    self.norms = [eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)]
    self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[1])
    self.mlp = eqx.nn.MLP(16, 16, 32, depth=1, activation=jax.nn.gelu, key=keys[2])
    self.head = eqx.nn.Linear(16, 4, key=keys[3])

  def __call__(self, image):
    x = self.patches(image).reshape(16, -1).T
    h = jax.vmap(self.norms[0])(x)
    x = x + self.attention(h, h, h)
    x = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
    return self.head(x.mean(0))


def equinox_encoder() -> Model:
  model = eqx.filter_eval_shape(Encoder, jax.random.key(0))
  params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

  def fun(params, batch):
    model = eqx.combine(params, static)
    logits = jax.vmap(model)(batch["images"])
    return cross_entropy(logits, batch["labels"]), logits

  batch = {"images": normal(9, 3, 8, 8), "labels": integers(9, below=4, seed=1)}
  return Model(fun, _weights(params), batch)


def _weights(shapes):
  """Returns values for weights whose inputs come after their outputs, and scales of norms."""
  rng = np.random.default_rng(0)

  def leaf(path, x):
    noise = rng.normal(size=x.shape)
    if len(x.shape) < 2:
      is_scale = "norms" in str(path) and "weight" in str(path)
      return np.asarray(is_scale + 0.1 * noise, np.float32)
    return np.asarray(noise / np.sqrt(np.prod(x.shape[1:])), np.float32)

  return jax.tree_util.tree_map_with_path(leaf, shapes)


# Haiku: a pair of functions made out of one that calls modules.


def haiku_language_model() -> Model:
  def forward(ids):
    x = hk.Embed(13, 8)(ids)
    lstm = hk.LSTM(8)
    x, _ = hk.dynamic_unroll(lstm, x, lstm.initial_state(ids.shape[0]), time_major=False)
    mask = jnp.tril(jnp.ones((1, 1, ids.shape[1], ids.shape[1]), bool))
    attention = hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(), model_size=8)
    x = x + attention(x, x, x, mask=mask)
    x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
    return hk.Linear(13)(x)

  model = hk.without_apply_rng(hk.transform(forward))
  ids = integers(3, 8, below=13)

  def fun(params, batch):
    logits = model.apply(params, batch["ids"])
    return cross_entropy(logits[:, :-1], batch["ids"][:, 1:]), logits

  return Model(fun, filled(jax.eval_shape(model.init, jax.random.key(0), ids)), {"ids": ids})
