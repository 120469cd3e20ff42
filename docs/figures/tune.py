"""The gradient error of each module of a stack of layers, and the format that it gets.

`mpjax.tune` measured the data, which is in tune.json.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import mpjax
from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER / "tune.json"

LAYERS, HOT, GAIN, TOLERANCE = 4, 2, 3e4, 0.06

FLOAT8 = mpjax.Policy(
  compute_dtype="bfloat16", output_dtype="float32", matmul=mpjax.Float8(skip=())
)

LEFT, RIGHT, TOP, ROW = 118, 420, 92, 30

LOW, HIGH = -2, 0
"""Exponents of ten: the range of the errors that are drawn."""


class Up(nn.Module):
  """A matmul whose operand is larger by `gain`."""

  gain: float

  @nn.compact
  def __call__(self, x):
    kernel = self.param("kernel", nn.initializers.lecun_normal(), (64, 256))
    return (x * self.gain) @ kernel / self.gain


class Block(nn.Module):
  """A layer of a residual stream."""

  gain: float

  @nn.compact
  def __call__(self, x):
    y = Up(self.gain, name="up")(nn.LayerNorm(name="norm")(x))
    return x + nn.Dense(64, name="down")(nn.gelu(y))


class Net(nn.Module):
  """A stack of layers, one of which has large activations."""

  @nn.compact
  def __call__(self, x):
    for i in range(LAYERS):
      x = Block(GAIN if i == HOT else 1.0, name=f"block_{i}")(x)
    return nn.Dense(16, name="head")(nn.LayerNorm(name="norm")(x))


def measure() -> dict[str, Any]:
  """Tunes the stack for float8, float16 and float32, and measures it with the rules."""
  x = jax.random.normal(jax.random.key(0), (64, 64))
  labels = jax.random.randint(jax.random.key(1), (64, 1), 0, 16)
  params = Net().init(jax.random.key(2), x)

  def loss_of(model):
    def loss_fn(params):
      logits = nn.log_softmax(model.apply(params, x))
      return -jnp.mean(jnp.take_along_axis(logits, labels, axis=1))

    return loss_fn

  policies = (FLOAT8, "mixed_float16")
  report = mpjax.tune(loss_of(Net()), policies, tolerance=TOLERANCE)(params)
  models = {
    "float8": mpjax.with_policy(Net(), FLOAT8),
    "tuned": mpjax.with_policy(Net(), report.policy, report.rules),
  }
  exact = jax.grad(loss_of(Net()))(params)
  errors = {name: _errors(exact, _gradient(loss_of(each), params)) for name, each in models.items()}
  rows = [
    {
      "module": path,
      "format": _format_of(report, path),
      **{name: float(f"{of_module[path]:.3g}") for name, of_module in errors.items()},
    }
    for path in errors["tuned"]
  ]
  all_errors = [report.evaluations[0].error, report.error]
  return {"rows": rows, "errors": [float(f"{error:.2g}") for error in all_errors]}


def _gradient(loss_fn: Callable[[Any], Any], params: Any) -> Any:
  scale = 2.0**10
  grads = jax.grad(lambda params: scale * loss_fn(params))(params)
  return jax.tree.map(lambda g: g / scale, grads)


def _errors(exact: Any, found: Any) -> dict[str, float]:
  """Returns the relative error of the gradient of each kernel, by module."""
  errors = {}
  for (path, a), b in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(found), strict=True):
    _, *names, leaf = (key.key for key in path)
    if leaf == "kernel":
      errors["/".join(names)] = float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a))
  order = [f"block_{i}/{name}" for i in range(LAYERS) for name in ("up", "down")]
  return {path: errors[path] for path in (*order, "head")}


def _format_of(report: mpjax.reports.TuneReport, path: str) -> str:
  if path in report.float32:
    return "float32"
  policy = report.upgrades.get(path, report.policies[0])
  return "float8" if policy.matmul is not None else policy.compute_dtype.name


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


def draw(theme: Theme) -> Figure:
  rows = facts()["rows"]
  bottom = TOP + ROW * len(rows)
  figure, axes = style.page(bottom + 40)
  before, after = facts()["errors"]
  text(axes, 14, 18, "Error of the gradient of each module", theme.text, bold=True)
  axes.add_patch(Circle((19, 44), 3.6, fc="none", ec=theme.faint, lw=1.2))
  text(axes, 32, 44, f"all in float8, {before:g} together", theme.faint, size=SMALL)
  axes.add_patch(Circle((263, 44), 4.2, fc=theme.text, lw=0))
  text(axes, 276, 44, f"as tuned, {after:g} together", theme.text, size=SMALL)
  for exponent in range(LOW, HIGH + 1):
    x = _x(10.0**exponent)
    axes.plot([x, x], [TOP - 6, bottom], color=theme.rule, lw=0.5, zorder=0)
    text(axes, x, bottom + 16, f"1e{exponent}", theme.faint, size=SMALL, ha="center")
  for number, row in enumerate(rows):
    y, color = TOP + (number + 0.5) * ROW, theme.lines[row["format"]]
    text(axes, 14, y, row["module"], theme.text, size=SMALL)
    axes.plot([_x(row["tuned"]), _x(row["float8"])], [y, y], color=color, lw=1.0, zorder=1)
    axes.add_patch(Circle((_x(row["float8"]), y), 3.6, fc="none", ec=theme.faint, lw=1.2, zorder=2))
    axes.add_patch(Circle((_x(row["tuned"]), y), 4.2, fc=color, lw=0, zorder=3))
    text(axes, RIGHT + 18, y, row["format"], color, size=SMALL, bold=True)
  return figure


def _x(error: float) -> float:
  share = (math.log10(error) - LOW) / (HIGH - LOW)
  return LEFT + min(max(share, 0), 1) * (RIGHT - LEFT)
