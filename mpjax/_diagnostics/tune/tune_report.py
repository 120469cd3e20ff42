"""What `mpjax.tune` found: the rules, and the curve of error against share in low precision."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._diagnostics.ranges.heat_map import finished, pyplot
from mpjax._diagnostics.report import Column, Report, Section, percent, right
from mpjax._diagnostics.tune.modules import written


class Evaluation(NamedTuple):
  """A choice of modules that was measured.

  Fields:
    float32: the paths of the modules in float32.
    rules: the rules that keep them so.
    error: the relative error of the gradient; inf where it is not finite.
    half_share: the share of the FLOPs of matmuls in low precision, forward and backward.
  """

  float32: tuple[str, ...]
  rules: tuple[Rule, ...]
  error: float
  half_share: float


class ModuleReport(NamedTuple):
  """A module.

  Fields:
    path: its named scopes, or the path of its parameters.
    forward: the relative error, under the policy without rules, of the worst of its own matmuls
      and sums; NaN if it has none.
    gradient: that of the gradients of its parameters and those inside; NaN if there are none.
    flops_share: its share of the FLOPs of matmuls.
    alone: the relative error of the gradient that rounding in it alone is expected to cause; NaN
      where no rules were needed.
    overflows: "yes" if an operand or result of a matmul overflows; "maybe" if another number would,
      which may stay in float32 anyway; else "no".
    is_stream: it has no matmuls, and adds up what the modules inside return.
  """

  path: str
  forward: float
  gradient: float
  flops_share: float
  alone: float
  overflows: Literal["no", "maybe", "yes"]
  is_stream: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TuneReport(Report):
  """What must stay in float32, see `mpjax.tune`.

  Args:
    policy: the one that was asked for.
    tolerance: the error that was allowed.
    float32: the paths of the modules in float32, of the best choice.
    rules: that keep them so, for `mpjax.with_policy`, of an NNX model where the function has no
      named scopes, and `mpjax.autocast`.
    error: the relative error of the gradient under them, measured.
    half_share: the share of the FLOPs of matmuls in low precision under them, from 0 to 1.
    evaluations: all choices that were measured, in order.
    bound: how many it might have been.
    loss_scale: the loss scale with which float16 was measured; 1 for bfloat16.
    modules: what is known of each module.
    scopes: whether each rule selects a named scope; if not, the path of parameters.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("layer"):
  ...     return jnp.mean((x @ w) ** 2)
  >>> report = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=0.1)(jnp.eye(4), jnp.ones((2, 4)))
  tune: 1 modules, at most 16 measurements
  >>> report.rules, report.error, report.half_share
  ((), 0.0, 1.0)
  """

  policy: Policy
  tolerance: float
  float32: tuple[str, ...]
  rules: tuple[Rule, ...]
  error: float
  half_share: float
  evaluations: tuple[Evaluation, ...]
  bound: int
  loss_scale: float
  modules: tuple[ModuleReport, ...]
  scopes: bool = True

  def __repr__(self) -> str:
    summary = f"{len(self.rules)} rules, error {_text(self.error)}"
    return f"<TuneReport: {summary}, {percent(self.half_share)} in low precision>"

  def plot(self, path: str | None = None) -> Any:
    """Draws the error of each choice against its share in low precision.

    Args:
      path: a file to write, such as "tune.png"; None writes none.

    Returns:
      The figure of matplotlib.

    Raises:
      MpjaxRuntimeError: matplotlib is not installed.
    """
    plt = pyplot("mpjax.tune(loss_fn, policy)(...).plot()")
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained", facecolor="white")
    errors = [e.error for e in self.evaluations if math.isfinite(e.error) and e.error > 0]
    low, high = min([*errors, self.tolerance]) / 3, max([*errors, self.tolerance]) * 3
    axis.semilogy()
    axis.axhspan(low, self.tolerance, color="C2", alpha=0.10, linewidth=0)
    axis.axhline(self.tolerance, color="C2", linewidth=1.2)
    beside = {"transform": axis.get_yaxis_transform(), "va": "bottom", "fontsize": 8, "color": "C2"}
    axis.text(0.01, self.tolerance, " allowed", **beside)
    for each in self.evaluations:
      x, bad = 100 * each.half_share, math.isinf(each.error)
      y = high / 1.5 if bad else max(each.error, low * 1.3)
      color = "C2" if each.error <= self.tolerance else "C3"
      axis.plot(x, y, "x" if bad else "o", color=color, markersize=6, alpha=0.8)
      axis.text(x, y, "not finite  " * bad, ha="right", va="center", fontsize=7.5, color=color)
    spot = (100 * self.half_share, max(self.error, low * 1.3))
    axis.plot(*spot, "o", markersize=14, markerfacecolor="none", markeredgecolor="black")
    text = f"chosen: {percent(self.half_share)}, with {_listed(self.float32)} in float32"
    figure.suptitle("What must stay in float32", x=0.02, ha="left", weight="bold", fontsize=12)
    axis.set_title("\n".join(textwrap.wrap(text, 90)), loc="left", fontsize=8.5)
    axis.set_ylim(low, high)
    axis.set_xlabel(f"share of the FLOPs of matmuls in {self.policy.compute_dtype.name}, %")
    axis.set_ylabel("relative error of the gradient")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return finished(plt, figure, path)

  def sections(self) -> list[Section]:
    """Returns what is shown, in order."""
    scale = f", at loss scale {self.loss_scale:.0f}" if self.loss_scale != 1 else ""
    share = f"{percent(self.half_share)} of the FLOPs of matmuls run in"
    errors = f"{_text(self.error)}, with {_text(self.tolerance)} allowed"
    low = self.policy.compute_dtype.name
    lines = [
      f"{share} {low}; the relative error of the gradient is {errors}.",
      f"{len(self.evaluations)} of at most {self.bound} choices were measured{scale}.",
    ]
    if {module.path for module in self.modules} == {""}:
      lines.append(
        "The function has no named scopes, and its parameters are in no modules, so that all of "
        'it counts as one module: write with jax.named_scope("name"): around the calls that '
        "should be told apart."
      )
    if not self.scopes:
      lines.append(
        "Paths are those of the parameters, since the function has no such named scopes: the rules "
        "are for mpjax.with_policy; for mpjax.autocast write with jax.named_scope(path): "
        "around what computes with these parameters."
      )
    rules = ["rules = (", *(f"  {_line(rule)}," for rule in self.rules), ")"]
    if not self.rules:
      rules = ["rules = ()  # none is needed"]
    if any(isinstance(rule.path, re.Pattern) for rule in self.rules):
      rules = ["import re", *rules]
    return [
      self._modules(),
      Section(title="Rules", lines=(*lines, *rules)),
      self._curve(),
    ]

  def _modules(self) -> Section:
    searched = any(not math.isnan(module.alone) for module in self.modules)
    notes = {"yes": "overflows", "maybe": "may overflow", "no": ""}
    rows = []
    for each in self.modules:
      path = (each.path or "(no scope)") + " (residual stream)" * each.is_stream
      errors = each.forward, each.gradient, each.alone
      forward, gradient, alone = (f"{error:.2g}".replace("nan", "-") for error in errors)
      note = "float32" if each.path in self.float32 else notes[each.overflows]
      row = (path, forward, gradient, percent(each.flops_share), *(alone, note) * searched)
      if any(error > 0 for error in errors):
        rows.append(row)
    return Section(
      title=f"Error of each module in {self.policy.compute_dtype.name} against float32",
      lines=(
        "forward: of the worst of its own matmuls and sums. gradient: of its parameters, and of "
        "those inside." + " alone: of the entire gradient, if nothing else rounds." * searched,
      )
      * bool(rows),
      columns=(
        Column("module", wide=True),
        *right("forward", "gradient", "FLOPs"),
        *(*right("alone"), Column("")) * searched,
      ),
      rows=tuple(rows),
    )

  def _curve(self) -> Section:
    """Returns the choices that were measured; none where the first one was good."""
    ranked = sorted(self.evaluations, key=lambda each: (each.half_share, -each.error))
    return Section(
      title="Error of the gradient by share in low precision",
      columns=(*right("share", "error"), Column(""), Column("in float32", wide=True)),
      rows=tuple(
        (
          percent(each.half_share),
          _text(each.error),
          "chosen"
          if each.float32 == self.float32
          else ""
          if each.error > self.tolerance
          else "good",
          _listed(each.float32),
        )
        for each in ranked[: len(ranked) * (len(ranked) > 1)]
      ),
    )


_PRESETS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")


def _line(rule: Rule) -> str:
  same = (name for name in _PRESETS if Policy.parse(name) == rule.policy)
  text = f'"{next(same, rule.policy)}"'
  return f"mpjax.Rule({text}, path={written(rule.path)})"


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"


def _listed(paths: Sequence[str]) -> str:
  if not paths:
    return "nothing"
  shown = [path or "(no scope)" for path in paths[:3]]
  return ", ".join(shown) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
