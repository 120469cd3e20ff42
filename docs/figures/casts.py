"""Where the casts of a transformer block are under mixed_bfloat16: read from its jaxpr."""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

import mpjax
from docs.figures import style
from docs.figures.flow import Box, Flow, Point
from docs.figures.style import SMALL, Theme, text
from mpjax._diagnose.call import Call
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.primitives import facts_of

NODES = {
  "norm_1": "LayerNorm",
  "qkv": "Dense: q, k, v",
  "scores": "scores = q · kᵀ",
  "softmax": "softmax of scores / √d",
  "mix": "weights · v",
  "out": "Dense",
  "add_1": "+",
  "norm_2": "LayerNorm",
  "up": "Dense",
  "gelu": "gelu",
  "down": "Dense",
  "add_2": "+",
}
"""What is drawn, by module or named scope, in the order of the forward pass."""


class Block(nn.Module):
  """A block of a transformer, norms first, in plain Flax."""

  heads: int = 4

  @nn.compact
  def __call__(self, x):
    size = x.shape[-1] // self.heads
    y = nn.LayerNorm(name="norm_1")(x)
    q, k, v = jnp.moveaxis(nn.DenseGeneral((self.heads, 3, size), name="qkv")(y), -2, 0)
    with jax.named_scope("scores"):
      scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    with jax.named_scope("softmax"):
      weights = nn.softmax(scores / size**0.5)
    with jax.named_scope("mix"):
      mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    y = nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)
    with jax.named_scope("add_1"):
      x = x + y
    y = nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm_2")(x))
    with jax.named_scope("gelu"):
      y = nn.gelu(y)
    y = nn.Dense(x.shape[-1], name="down")(y)
    with jax.named_scope("add_2"):
      return x + y


class Model(nn.Module):
  """Two blocks, of which the second is drawn: what goes into it comes out of a block."""

  @nn.compact
  def __call__(self, tokens):
    x = Block(name="first")(nn.Embed(100, 64)(tokens))
    return Block(name="second")(x)


class Facts(NamedTuple):
  """What the jaxpr of the block says.

  Fields:
    nodes: the dtype in which each node computes.
    edges: for each pair of nodes, the dtype of what the first computes for the second, and the one
      in which the second takes it: another one means that it is cast.
    params: likewise for the kernels, scales and biases of a node.
    casts: how many casts there are of activations, and of parameters.
  """

  nodes: dict[str, str]
  edges: dict[tuple[str, str], tuple[str, str]]
  params: dict[str, tuple[str, str]]
  casts: tuple[int, int]


@functools.cache
def facts() -> Facts:
  """Traces the model under the policy, and reads the block."""
  tokens = jax.ShapeDtypeStruct((2, 16), "int32")
  variables = jax.eval_shape(Model().init, jax.random.key(0), tokens)
  apply = mpjax.with_policy(Model(), "p=f32,c=bf16").apply
  call = Call((variables, tokens), {}, is_traced=lambda x: hasattr(x, "dtype"))
  program = call.traced(apply).program
  nodes: dict[str, set[str]] = {}
  edges: dict[tuple[str, str], set[tuple[str, str]]] = {}
  params: dict[str, set[tuple[str, str]]] = {}
  casts = [0, 0]
  for operation in Graph(program, [each.name for each in call.arguments(apply)]).computing():
    node, floats = _node(operation), [v for v in operation.operands if _is_float(v)]
    if "second" not in operation.where.path.split("/"):
      continue
    if _is_cast(operation):
      casts[_source(floats[0]).kind == "argument"] += 1
    elif node in NODES and not _only_moves(operation):
      nodes.setdefault(node, set()).add(operation.results[0].dtype.name)
      for value in floats:
        made = _source(value)
        dtypes = made.dtype.name, value.dtype.name
        if made.kind == "argument":
          params.setdefault(node, set()).add(dtypes)
        elif made.made_by is not None and _node(made.made_by) != node:
          edges.setdefault((_node(made.made_by), node), set()).add(dtypes)
  return Facts(
    nodes={name: _only(found, name) for name, found in nodes.items()},
    edges={pair: _only(found, pair) for pair, found in edges.items()},
    params={name: _only(found, name) for name, found in params.items()},
    casts=(casts[0], casts[1]),
  )


def _node(operation: Operation) -> str:
  path = operation.where.path.split("/")
  return path[-1] if "second" in path else "input"


def _is_float(value: Value) -> bool:
  return value.kind != "literal" and jnp.issubdtype(value.dtype, jnp.floating)


def _is_cast(operation: Operation) -> bool:
  return operation.name == "convert_element_type"


def _only_moves(operation: Operation) -> bool:
  return facts_of(operation.eqn).moves


def _source(value: Value) -> Value:
  """Returns what was cast, reshaped or sliced to a value, or moved by what no node is."""
  made_by = value.made_by
  while made_by is not None and (
    _is_cast(made_by) or _only_moves(made_by) or _node(made_by) == "second"
  ):
    value = made_by.operands[0]
    made_by = value.made_by
  return value


def _only(found: set[Any], where: object) -> Any:
  if len(found) != 1:
    raise ValueError(f"{where}: the figure shows one dtype, and the jaxpr has {sorted(found)}")
  return next(iter(found))


MIDDLE, WIDE, TALL = 296, 260, 32


def draw(theme: Theme) -> Figure:
  found = facts()
  chain = ["input", *NODES]
  gaps = [36 if len(set(found.edges[pair])) > 1 else 22 for pair in pairwise(chain)]
  figure, axes = style.page(62 + len(NODES) * TALL + sum(gaps) + 44)
  flow = Flow(axes, theme)
  kind = found.edges["input", "norm_1"][0]
  text(axes, MIDDLE, 16, f"x, from the block before: {kind}", theme.text, size=SMALL, ha="center")
  boxes, y = {"input": Box(MIDDLE, 18, WIDE, 18)}, 27.0
  for (before, name), gap in zip(pairwise(chain), gaps, strict=True):
    y += gap + TALL / 2
    boxes[name] = _node_box(flow, y, NODES[name], found.nodes[name])
    _edge(flow, [boxes[before].bottom, boxes[name].top], *found.edges[before, name])
    y += TALL / 2
  last = boxes[chain[-1]]
  flow.arrow([last.bottom, (MIDDLE, y + 24)], found.nodes[chain[-1]])
  words = f"to the next block: {found.nodes[chain[-1]]}"
  text(axes, MIDDLE, y + 34, words, theme.text, size=SMALL, ha="center")
  for name, dtypes in found.params.items():
    _params(flow, boxes[name], *dtypes)
  for before, name in found.edges:
    if chain.index(name) != chain.index(before) + 1:
      x = 452 if before == "qkv" else 486
      (x0, y0), (x1, y1) = boxes[before].right, boxes[name].right
      start = (MIDDLE + 126, 16) if before == "input" else (x0, y0 + 8)
      (first, second), end = found.edges[before, name], (x1, y1 - 8)
      if first != second:
        raise ValueError(f"{before} to {name}: the figure has no place for this cast")
      flow.arrow([start, (x, start[1]), (x, end[1]), end], first)
      words = "v" if before == "qkv" else "x"
      text(axes, x + 7, (start[1] + end[1]) / 2, words, theme.text, size=SMALL)
  return figure


def _node_box(flow: Flow, y: float, name: str, dtype: str) -> Box:
  box = flow.box(MIDDLE, y, WIDE, TALL, "", dtype)
  text(flow.axes, MIDDLE - WIDE / 2 + 10, y, name, flow.theme.text, size=SMALL, bold=True)
  right = MIDDLE + WIDE / 2 - 10
  text(flow.axes, right, y, dtype, flow.theme.text, size=SMALL, ha="right")
  return box


def _params(flow: Flow, box: Box, first: str, second: str) -> None:
  """Draws the parameters of a module on its left."""
  words = "scale, bias" if first == second else "kernel, bias"
  params = Box(56, box.y, 92, TALL)
  text(flow.axes, params.x, box.y - 8, words, flow.theme.text, size=SMALL, ha="center")
  text(flow.axes, params.x, box.y + 8, first, flow.theme.lines[first], size=SMALL, ha="center")
  _edge(flow, [params.right, box.left], first, second)


def _edge(flow: Flow, ends: list[Point], first: str, second: str) -> None:
  """Draws an arrow in the color of a dtype; with a cast, in those of two."""
  if first == second:
    flow.arrow(ends, first)
    return
  (x0, y0), (x1, y1) = ends
  middle = (x0 + x1) / 2 - (4 if x0 != x1 else 0), (y0 + y1) / 2 - (3 if y0 != y1 else 0)
  flow.arrow([middle, (x1, y1)], second)
  start = Path([(x0, y0), middle])
  flow.axes.add_patch(PathPatch(start, fc="none", ec=flow.theme.lines[first], lw=1.6))
  fill, line = flow.theme.fills["plain"], flow.theme.lines["plain"]
  pill = (middle[0] - 19, middle[1] - 8.5)
  shape = "round,pad=0,rounding_size=8"
  flow.axes.add_patch(FancyBboxPatch(pill, 38, 17, boxstyle=shape, fc=fill, ec=line, lw=0.8))
  text(flow.axes, *middle, "cast", flow.theme.text, size=SMALL - 1, ha="center")
