"""How many bytes the backward pass needs: float32, half by hand, and autocast.

Programs are traced only: nothing is computed, and sizes cost nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_by_hand
import models
import optax
from autocast_programs import PROGRAMS, Program, Style
from measure import Saved, saved

import mpjax

Loss = Callable[[Any], Any]


class Model(NamedTuple):
  """A Linen model at one size.

  Fields:
    make: `dtype or None -> module`.
    inputs: shape and dtype of its one input.
    classes: how many labels there are; None if the input holds them, as tokens do.
  """

  make: Callable[[Any], Any]
  inputs: jax.ShapeDtypeStruct
  classes: int | None = None


def losses(model: Model, half: Any) -> tuple[Loss, Any]:
  """Returns the loss as a function of parameters alone, and their shapes."""
  module = model.make(half)
  data = jnp.zeros(model.inputs.shape, model.inputs.dtype)
  variables = dict(jax.eval_shape(module.init, jax.random.key(0), data))
  params = variables.pop("params")
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)

  def loss(params: Any) -> Any:
    logits, _ = module.apply({"params": params, **state}, data, mutable=list(state))
    labels = data[:, : logits.shape[1]] if model.classes is None else jnp.zeros(len(data), int)
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  return loss, params


def _tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((batch, length), jnp.int32)


def _language(cls: Any, inputs: jax.ShapeDtypeStruct, **fields: int) -> Model:
  return Model(lambda half: cls(half=half, **fields), inputs)


def _resnet(batch: int, size: int, **fields: Any) -> Model:
  inputs = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
  return Model(lambda half: models.ResNet(**fields, dtype=half), inputs, fields["classes"])


_BASE = {"layers": 12, "width": 768, "heads": 12}

SIZES: dict[str, dict[str, Model]] = {
  "tiny": {
    "ResNet": _resnet(
      4, 8, stages=(1, 1), width=8, classes=10, bottleneck=False, large_images=False
    ),
    "GPT, scan and remat": _language(language_by_hand.Gpt, _tokens(3, 6)),
    "BERT": _language(language_by_hand.Bert, _tokens(3, 6)),
    "LSTM": _language(language_by_hand.Lstm, _tokens(3, 6)),
  },
  "full": {
    "ResNet": _resnet(
      32, 224, stages=(3, 4, 6, 3), width=64, classes=1000, bottleneck=True, large_images=True
    ),
    "GPT, scan and remat": _language(
      language_by_hand.Gpt, _tokens(8, 1024), **_BASE, vocabulary=50304
    ),
    "BERT": _language(language_by_hand.Bert, _tokens(32, 512), **_BASE, vocabulary=30522),
    "LSTM": _language(language_by_hand.Lstm, _tokens(32, 128), width=1024, vocabulary=10000),
  },
}
"""The models of Flax at two sizes: for the tests, and as they are trained: ResNet-50, GPT and BERT
with the 12 layers of their base size, an LSTM of 1024 features."""


def compare_models(size: str, half: str) -> dict[str, dict[str, Saved]]:
  """Returns what each Linen model keeps, in float32, by hand and under autocast."""
  found = {}
  for name, model in SIZES[size].items():
    plain, params = losses(model, None)
    by_hand, hand_params = losses(model, jnp.dtype(half).type)
    found[name] = {
      "float32": saved(plain, params),
      "by hand": saved(by_hand, hand_params),
      "autocast": saved(mpjax.autocast(plain, half), params),
    }
  return found


def _at(program: Program, style: Style, batch: Any) -> Loss:
  return lambda params: program.loss(params, batch, style)


def compare_programs(
  size: int, half: str, names: Sequence[str] = tuple(PROGRAMS)
) -> dict[str, dict[str, Saved]]:
  """Returns what each program of plain JAX keeps, without and with named scopes."""
  found = {}
  for name in names:
    program = PROGRAMS[name]
    params, batch = program.make(size)
    plain, scoped = (_at(program, Style(scopes=scopes), batch) for scopes in (False, True))
    by_hand = _at(program, Style(jnp.dtype(half).type), batch)
    found[name] = {
      "float32": saved(plain, params),
      "by hand": saved(by_hand, params),
      "autocast": saved(mpjax.autocast(plain, half), params),
      "autocast, scopes": saved(mpjax.autocast(scoped, half), params),
    }
  return found
