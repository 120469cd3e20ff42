"""Complete models written from papers, without any dtype in mind, each with its own loss.

A loss takes `(model, params, *inputs)` and closes over nothing but constants: whoever calls it
decides whether `model` is wrapped or a scope is around.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.models import language, signals, vision
from tests.models.values import integers, normal

RNGS = {"dropout": jax.random.key(5)}


class Paper(NamedTuple):
  """One model: how it is made, what it is initialised with, and the loss on these inputs.

  Fields:
    make: returns the module, or an object that hides it in `.module`.
    inputs: what the module is initialised with.
    loss: `(model, params, *inputs) -> scalar`.
    attention: whether there is attention in it.
  """

  make: Callable[[], Any]
  inputs: tuple[Any, ...]
  loss: Callable[..., Any]
  attention: bool = False


def _next_token(logits: Any, ids: Any) -> Any:
  labels = jnp.roll(ids, -1, axis=1)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _squared(target: Any) -> Callable[..., Any]:
  def loss(model: Any, params: Any, *inputs: Any) -> Any:
    return jnp.mean((model.apply({"params": params}, *inputs, rngs=RNGS) - target) ** 2)

  return loss


def hidden(model: language.TextModel, params: Any, ids: Any) -> Any:
  return _next_token(model(ids, params=params), ids)


def generated(model: language.TextModel, params: Any, ids: Any) -> Any:
  _, logits = model.generate(params, ids)
  return -jax.nn.log_softmax(logits).max(-1).mean()


def switch(model: Any, params: Any, ids: Any) -> Any:
  logits, state = model.apply({"params": params}, ids, mutable=["losses"])
  (balance,) = jax.tree.leaves(state["losses"])
  return _next_token(logits, ids) + 0.01 * balance.mean()


def classified(model: Any, params: Any, images: Any) -> Any:
  labels = jax.nn.one_hot(jnp.arange(len(images)), 10)
  return optax.softmax_cross_entropy(model.apply({"params": params}, images), labels).mean()


def evidence(model: Any, params: Any, images: Any) -> Any:
  images = nn.sigmoid(images)
  out, mean, log_variance = model.apply({"params": params}, images, rngs=RNGS)
  divergence = 0.5 * jnp.sum(mean**2 + jnp.exp(log_variance) - log_variance - 1, axis=-1)
  return jnp.mean((out - images) ** 2) + 1e-2 * divergence.mean()


def residual(model: Any, params: Any, points: Any) -> Any:
  """How far the field is from solving a wave equation: second derivatives of the network."""

  def u(point: Any) -> Any:
    return model.apply({"params": params}, point)[0]

  hessians = jax.vmap(jax.hessian(u))(points)
  return jnp.mean((hessians[:, 0, 0] - hessians[:, 1, 1]) ** 2)


PAPERS: dict[str, Paper] = {
  "gpt_behind_a_wrapper": Paper(language.TextModel, (integers(2, 8, below=17),), hidden, True),
  "gpt_decode_loop": Paper(language.TextModel, (integers(2, 8, below=17),), generated, True),
  "switch_experts": Paper(language.Switch, (integers(2, 8, below=17),), switch),
  "vit": Paper(vision.Vit, (normal(3, 16, 16, 3),), classified, True),
  "unet": Paper(
    vision.UNet, (normal(2, 8, 8, 3), normal(2) * 100), _squared(normal(2, 8, 8, 3, seed=1))
  ),
  "vae": Paper(lambda: vision.VAE.linen(None), (normal(3, 8, 8, 3),), evidence),
  "wavenet": Paper(signals.WaveNet, (normal(3, 12, 8),), _squared(normal(3, 12, 4, seed=1))),
  "state_space": Paper(signals.Mamba, (normal(3, 12, 8),), _squared(normal(3, 12, 8, seed=1))),
  "graph_network": Paper(
    signals.GraphNetwork,
    (normal(7, 8), normal(12, 2), integers(12, below=7), integers(12, below=7, seed=1)),
    _squared(10 * normal(3, seed=1)),
  ),
  "field_by_its_hessian": Paper(lambda: signals.FIELD.linen(None), (normal(20, 2),), residual),
  "hypernetwork": Paper(
    signals.Implicit, (normal(3, 12), normal(5, 8)), _squared(normal(3, 5, 1, seed=1))
  ),
}
