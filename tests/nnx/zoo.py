"""Models as research code writes them in NNX: raw parameters, own attention, tied heads, loops.

None of them names a dtype or knows of mpjax. Here is what is written in another way than in Linen;
what differs in nothing but its layers is described for both in `tests/models`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tests.models import language, parts, signals, vision
from tests.models.values import integers, normal


class Model(NamedTuple):
  """One model and how it is run.

  Fields:
    make: returns the module, given `nnx.Rngs`.
    inputs: its arguments.
    run: `(model, *inputs) -> outputs`.
  """

  make: Callable[[nnx.Rngs], nnx.Module]
  inputs: tuple[Any, ...]
  run: Callable[..., Any] = lambda model, *inputs: model(*inputs)


def generate(model: Any, ids: Any) -> Any:
  """Writes tokens chosen greedily, through float32 caches."""
  for block in (model.block_0, model.block_1):
    block.attention.keys.start(ids.shape[0])
    block.attention.values.start(ids.shape[0])
  token, found = ids[:, :1], []
  for index in range(3):
    logits = model(token, index)
    token = jnp.argmax(logits[:, -1:], axis=-1).astype(token.dtype)
    found.append(logits)
  return found


class Switch(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(17, 16, rngs=rngs)
    self.experts = nnx.List([language.EXPERT.nnx(self, rngs) for _ in range(2)])
    self.head = nnx.Linear(16, 17, rngs=rngs)

  def __call__(self, ids):
    x = self.embed(ids)
    for expert in self.experts:
      x = x + expert(nnx.standardize(x))
    return self.head(x)


def with_balance(model: Any, ids: Any) -> Any:
  out = model(ids)
  return out, nnx.as_pure(nnx.pop(model, nnx.Intermediate))


def slopes(model: Any, points: Any) -> Any:
  graphdef, state = nnx.split(model)
  return jax.vmap(jax.grad(lambda point: nnx.merge(graphdef, state)(point)[0]))(points)


class Hypernetwork(nnx.Module):
  def __init__(self, rngs):
    self.code, self.target = nnx.Linear(9, 32, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, conditions, points):
    kernel = self.code(conditions.mean(0)).reshape(8, 4)
    graphdef, params = nnx.split(self.target)
    params = jax.tree.map(lambda x: x, params)
    params["kernel"][...] = kernel
    return nnx.tanh(nnx.merge(graphdef, params)(points))


def _of_nnx(part: parts.Part) -> Callable[[nnx.Rngs], nnx.Module]:
  return lambda rngs: part.nnx(None, rngs)


MODELS: dict[str, Model] = {
  "gpt": Model(_of_nnx(language.GPT), (integers(2, 8, below=17),)),
  "gpt_decode": Model(_of_nnx(language.GPT), (integers(2, 8, below=17),), generate),
  "experts": Model(Switch, (integers(2, 8, below=17),), with_balance),
  "vae": Model(_of_nnx(vision.VAE), (normal(3, 8, 8, 3),)),
  "state_space": Model(_of_nnx(signals.STATE_SPACE), (normal(3, 12, 8),)),
  "field_by_its_gradient": Model(_of_nnx(signals.FIELD), (normal(20, 2),), slopes),
  "hypernetwork": Model(Hypernetwork, (normal(3, 9), normal(5, 8))),
}
