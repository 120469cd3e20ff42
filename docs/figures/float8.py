"""One matmul in float8, forward and backward: what is scaled, cast, multiplied and kept.

All of it is read from the jaxpr of a layer under a policy with `mpjax.Float8`.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from matplotlib.figure import Figure

import mpjax
from docs.figures import style
from docs.figures.flow import Box, Flow
from docs.figures.style import SMALL, Theme, text
from mpjax._diagnose.call import Call
from mpjax._jaxpr.graph import Graph, Operation, Value

RECIPE = mpjax.Float8(skip=())


class Operand(NamedTuple):
  """An operand of a matmul in float8.

  Fields:
    name: "x", "w" or "gradient".
    stored: its dtype before it is scaled.
    dtype: its float8 dtype.
    largest: to what it is scaled and clipped.
    kept: the bytes of an element that the forward pass keeps for the backward pass; 0 if it is cast
      where it is multiplied.
  """

  name: str
  stored: str
  dtype: str
  largest: float
  kept: int


class Matmul(NamedTuple):
  """A matmul in float8.

  Fields:
    operands: its two operands.
    direct: the dtype of what the matmul returns.
    result: that of the result after scaling.
  """

  operands: tuple[Operand, Operand]
  direct: str
  result: str


class Network(nn.Module):
  """Two layers, of which the second is drawn: what goes into it was computed."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(64, use_bias=False, name="before")(x)
    return nn.Dense(64, use_bias=False, name="drawn")(x)


@functools.cache
def facts() -> dict[str, Matmul]:
  """Returns the forward matmul, "y", and those of the gradients: "x" and "w"."""
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=RECIPE)
  model: Any = mpjax.with_policy(Network(), policy)
  x = jax.ShapeDtypeStruct((32, 64), "float32")
  variables = jax.eval_shape(model.init, jax.random.key(0), x)

  def loss_fn(variables, x):
    return model.apply(variables, x).astype("float32").sum()

  call = Call((variables, x), {}, is_traced=lambda x: hasattr(x, "dtype"))
  program = call.traced(jax.grad(loss_fn)).program
  found: dict[str, Matmul] = {}
  for each in Graph(program, [each.name for each in call.arguments(loss_fn)]).computing():
    if each.name == "dot_general" and "drawn" in each.where.path.split("/"):
      lhs, rhs = (_operand(value) for value in each.operands)
      result, (direct,) = each.results[0], each.results
      while (after := _scaling(result)) is not None:
        result = after.results[0]
      given = {lhs.name, rhs.name}
      name = "y" if given == {"x", "w"} else min({"x", "w"} - given)
      found[name] = Matmul((lhs, rhs), str(direct.dtype), str(result.dtype))
  if set(found) != {"y", "x", "w"}:
    raise ValueError(f"the figure shows three matmuls in float8, and the jaxpr has {found}")
  return found


def _scaling(value: Value) -> Operation | None:
  """Returns the operation that scales or casts the result of a matmul, if there is one more."""
  inside = [each for each in value.consumers if "drawn" in each.where.path.split("/")]
  after = [each for each in inside if each.name in ("convert_element_type", "mul", "transpose")]
  return after[0] if after else None


def _operand(value: Value) -> Operand:
  """Returns what is known of an operand; raises where it was not scaled, clipped and cast."""
  dtype, kept = str(value.dtype), 0
  cast = _made_by(value, "name", "convert_element_type")
  if cast.name == "name":  # `checkpoint_name`
    cast, kept = _made_by(cast.operands[0], "convert_element_type"), cast.results[0].dtype.itemsize
  clamp = _made_by(cast.operands[0], "clamp")
  low, scaled, high = clamp.operands
  largest = float(str(high.data))
  divided = _made_by(scaled, "mul")
  source, reciprocal = map(_without_identities, divided.operands)
  scale = _made_by(_made_by(reciprocal, "div").operands[1], "max").operands[0]
  amax, factor = _made_by(scale, "mul").operands
  before = source
  if source.made_by is not None:  # Of an array in low precision, the float32 copy is scaled.
    barriers = [
      _made_by(_made_by(value, "convert_element_type").operands[0], "optimization_barrier")
      for value in (source, amax)
    ]
    if barriers[0] is not barriers[1]:
      raise ValueError("an operand and its largest magnitude go through two barriers")
    before, amax = barriers[0].operands
  magnitude = _made_by(_made_by(amax, "reduce_max").operands[0], "abs").operands[0]
  before, magnitude = map(_without_identities, (before, magnitude))
  if magnitude is not before or float(str(low.data)) != -largest:
    raise ValueError("the largest magnitude is that of another array, or clipped on one side")
  if abs(float(str(factor.data)) * largest - 1) > 1e-6:
    raise ValueError(f"scaled to {1 / float(str(factor.data))}, and clipped to {largest}")
  name = "x" if cast.where.direction == "forward" else "gradient"
  return Operand(
    "w" if before.kind == "argument" else name, str(before.dtype), dtype, largest, kept
  )


def _made_by(value: Value, *names: str) -> Operation:
  """Returns the operation of a value, without identities that refuse second derivatives."""
  value = _without_identities(value)
  if value.made_by is None or value.made_by.name not in names:
    # The text of an operation would hold that of all operations before it.
    found = value.label if value.made_by is None else value.made_by.name
    raise ValueError(f"{found} is computed by none of {names}")
  return value.made_by


def _without_identities(value: Value) -> Value:
  while value.made_by is not None and value.made_by.name == "first_order":
    (value,) = value.made_by.operands
  return value


LEFT, RIGHT, MIDDLE = 136, 384, 260
WIDE = 216


def draw(theme: Theme) -> Figure:
  found = facts()
  figure, axes = style.page(832)
  flow = Flow(axes, theme)
  y, dx, dw = found["y"], found["x"], found["w"]
  x, w = sorted(y.operands, key=lambda operand: operand.name, reverse=True)
  gradient = next(operand for operand in dx.operands if operand.name == "gradient")

  text(axes, 26, 16, "Forward", theme.text, bold=True)
  cast_x, cast_w = _cast(flow, LEFT, 50, "x", x), _cast(flow, RIGHT, 50, "w, the weight", w)
  matmul = _matmul(flow, MIDDLE, 290, y)
  flow.arrow([cast_x.bottom, (LEFT, 250), (MIDDLE - 70, 250), (MIDDLE - 70, 267)], "float8")
  flow.arrow([cast_w.bottom, (RIGHT, 250), (MIDDLE + 70, 250), (MIDDLE + 70, 267)], "float8")
  _result(flow, matmul, 364, "y", y)

  axes.plot([26, 494], [402, 402], color=theme.rule, lw=0.8)
  text(axes, 26, 420, "Backward", theme.text, bold=True)
  cast_g = _cast(flow, MIDDLE, 452, "gradient of y", gradient)
  for side, result, name in ((LEFT, dw, "gradient of w"), (RIGHT, dx, "gradient of x")):
    matmul = _matmul(flow, side, 722, result)
    end = side + (40 if side == LEFT else -40)
    flow.arrow([cast_g.bottom, (MIDDLE, 672), (end, 672), (end, 699)], "float8")
    outer, kept = (14, cast_x.left) if side == LEFT else (506, cast_w.right)
    inner = side + (-60 if side == LEFT else 60)
    flow.arrow([kept, (outer, kept[1]), (outer, 672), (inner, 672), (inner, 699)], "float8")
    _result(flow, matmul, 796, name, result)
  for side, ha, result in ((22, "left", dw), (498, "right", dx)):
    (kept,) = {operand.kept for operand in result.operands} - {0}
    words = f"kept: {kept} byte\nfor each element"
    text(axes, side, 560, words, theme.lines["float8"], size=SMALL, ha=ha)
  return figure


def _cast(flow: Flow, x: float, y: float, name: str, operand: Operand) -> Box:
  """Draws an operand, its scaling and the float8 array, and returns the last box."""
  top = flow.box(x, y, WIDE, 32, f"{name}: {operand.stored}", operand.stored)
  largest = f"{operand.largest:g}"
  words = f"scale = largest |{name[0]}| / {largest}\ndivide by it, clip to ±{largest}"
  middle = flow.box(x, y + 76, WIDE, 62, f"Scale in float32\n{words}", "float32")
  last = flow.box(
    x, y + 152, WIDE, 32, f"{name.partition(',')[0]} in {_short(operand.dtype)}", "float8"
  )
  flow.arrow([top.bottom, middle.top], operand.stored)
  flow.arrow([middle.bottom, last.top], "float32")
  return last


def _matmul(flow: Flow, x: float, y: float, matmul: Matmul) -> Box:
  kinds = " · ".join(_short(operand.dtype) for operand in matmul.operands)
  return flow.box(x, y, WIDE, 46, f"Matmul\n{kinds} → {matmul.direct}", "float8")


def _result(flow: Flow, matmul: Box, y: float, name: str, result: Matmul) -> None:
  words = f"{name}: {result.result}\ntimes both scales, in float32"
  box = flow.box(matmul.x, y, WIDE, 46, words, result.result)
  flow.arrow([matmul.bottom, box.top], result.direct)


def _short(dtype: str) -> str:
  return dtype.removeprefix("float8_").removesuffix("fn")
