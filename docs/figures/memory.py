"""What a training step keeps in memory, for five ways of storing parameters and moments.

What is drawn is in memory.json: the bytes of the parameters, the state of the optimizer and the
gradients, by their shapes, and what `mpjax.audit` says that the forward pass keeps for the backward
pass. The model is traced; nothing runs.
"""

import collections
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import mpjax
from docs.figures import style
from docs.figures.casts import Block
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER / "memory.json"

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 12, 768, 12, 50257, 1024
"""Those of the smallest GPT-2, and of a batch of one text."""

_TEXT = jax.ShapeDtypeStruct((1, TOKENS), "int32")

KINDS = {
  "parameters": ("P", "parameters"),
  "masters": ("M", "float32 masters, or the half that the parameters lack"),
  "moments": ("O", "moments of adamw"),
  "gradients": ("G", "gradients"),
  "kept": ("B", "results of the forward pass, kept for the backward pass"),
}

WAYS = {
  "float32": ("float32", "float32", "float32", None),
  "mixed_bfloat16": ("mixed_bfloat16", "float32", "float32", None),
  "bfloat16 parameters with masters": ("mixed_bfloat16", "bfloat16", "float32", "float32"),
  "… with split masters": ("mixed_bfloat16", "bfloat16", "float32", "split"),
  "… and first moments in bfloat16": ("mixed_bfloat16", "bfloat16", "bfloat16", "split"),
}
"""The policy, the dtypes of the parameters and the first moments, and the storage of masters."""


class Transformer(nn.Module):
  """Blocks between a table of tokens and a head."""

  layers: int = LAYERS

  @nn.compact
  def __call__(self, tokens):
    places = self.param("places", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
    x = nn.Embed(VOCABULARY, WIDTH)(tokens) + places
    for i in range(self.layers):
      x = Block(HEADS, name=f"block_{i}")(x)
    return nn.Dense(VOCABULARY, use_bias=False)(nn.LayerNorm()(x))


def measure() -> dict[str, Any]:
  """Returns the bytes of each way by kind and dtype, and the number of parameters."""
  full = shapes(Transformer())
  audited = functools.cache(backward)
  ways = {
    name: {**stored(full, params, moments, masters), **audited(LAYERS, policy, params)}
    for name, (policy, params, moments, masters) in WAYS.items()
  }
  return {"parameters": sum(x.size for x in jax.tree.leaves(full)), "ways": ways}


def stored(full: Any, params: str, moments: str, masters: str | None) -> dict[str, dict[str, int]]:
  """Returns the bytes of the parameters and of the optimizer's state, by kind and dtype."""
  tx = optax.adamw(1e-3)
  if moments != "float32":
    tx = mpjax.state_dtype(tx, mu=moments)
  if masters:
    tx = mpjax.master_weights(tx, storage=masters)
  cast = _cast(full, params)
  state = jax.eval_shape(tx.init, cast)
  first, rest = (state.master, state.inner_state) if masters else ((), state)
  return {"parameters": _bytes(cast), "masters": _bytes(first), "moments": _bytes(rest)}


def _cast(full: Any, dtype: str) -> Any:
  """Returns the shapes of parameters stored in a dtype, norms in float32."""
  return jax.eval_shape(lambda params: mpjax.convert(params, dtype), full)


def shapes(model: Transformer) -> Any:
  """Returns the shapes of the parameters, in float32."""
  return jax.eval_shape(model.init, jax.random.key(0), _TEXT)["params"]


def backward(layers: int, policy: str, params: str) -> dict[str, dict[str, int]]:
  """Returns the bytes of the gradients and of what is kept for them, by dtype."""
  model = Transformer(layers)
  apply = mpjax.with_policy(model, policy).apply

  def loss_fn(params, tokens):
    logits = apply({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

  gradient, cast = jax.value_and_grad(loss_fn), _cast(shapes(model), params)
  kept = mpjax.audit(gradient)(cast, _TEXT).residual_bytes
  return {"gradients": _bytes(jax.eval_shape(gradient, cast, _TEXT)[1]), "kept": dict(kept)}


def _bytes(tree: Any) -> dict[str, int]:
  """Returns the bytes of the arrays of a tree by dtype; a few counters do not count."""
  found: collections.Counter[str] = collections.Counter()
  for x in jax.tree.leaves(tree):
    if x.ndim:
      found[x.dtype.name] += x.size * x.dtype.itemsize
  return dict(found)


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


LEFT, RIGHT, ROW = 12, 508, 64


def draw(theme: Theme) -> Figure:
  found = facts()
  figure, axes = style.page(34 + ROW * len(WAYS) + 22 * (len(KINDS) + 1) + 18)
  words = f"A transformer of {found['parameters'] / 1e6:.0f} million parameters, {TOKENS:,} tokens"
  text(axes, LEFT, 16, words, theme.text, bold=True)
  most = max(_total(kinds.values()) for kinds in found["ways"].values())
  y = 50
  for name, kinds in found["ways"].items():
    text(axes, LEFT, y, name, theme.text, size=SMALL)
    total = f"{_total(kinds.values()) / 1e9:.1f} GB"
    text(axes, RIGHT, y, total, theme.text, size=SMALL, ha="right", bold=True)
    _bar(axes, theme, y + 14, kinds, (RIGHT - LEFT) / most)
    y += ROW
  for letter, words in KINDS.values():
    text(axes, LEFT + 10, y, letter, theme.text, size=SMALL, ha="center", bold=True)
    text(axes, LEFT + 28, y, words, theme.faint, size=SMALL)
    y += 22
  x = LEFT
  for kind, words, wide in [
    ("float32", "float32", 96),
    ("bfloat16", "bfloat16", 102),
    ("plain", "integers: the bits of split masters", 0),
  ]:
    edge = {"fc": theme.fills[kind], "ec": theme.lines[kind], "lw": 1}
    axes.add_patch(Rectangle((x + 2, y - 7), 16, 14, **edge))
    text(axes, x + 28, y, words, theme.faint, size=SMALL)
    x += wide
  return figure


def _total(kinds: Iterable[Mapping[str, int]]) -> int:
  return sum(sum(each.values()) for each in kinds)


def _bar(
  axes: Axes, theme: Theme, y: float, kinds: Mapping[str, Mapping[str, int]], scale: float
) -> None:
  x = float(LEFT)
  for kind, (letter, _) in KINDS.items():
    for dtype, count in sorted(kinds[kind].items(), key=lambda item: -item[1]):
      wide, color = count * scale, dtype if dtype in theme.fills else "plain"
      if wide >= 1:
        edge = {"fc": theme.fills[color], "ec": theme.lines[color], "lw": 1}
        axes.add_patch(Rectangle((x + 0.75, y), wide - 1.5, 26, **edge))
      if wide > 14:
        text(axes, x + wide / 2, y + 13, letter, theme.text, size=SMALL, ha="center", bold=True)
      x += wide
