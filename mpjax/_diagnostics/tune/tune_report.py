"""What `mpjax.tune` found: the rules, and the curve of error against share in low precision."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._diagnostics.ranges.heat_map import pyplot
from mpjax._diagnostics.report import Column, Json, Report, Section, percent
from mpjax._diagnostics.selectors import written
from mpjax._diagnostics.tune.modules import named


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
    flops_share: its share of the FLOPs of matmuls.
    error: the relative error of the gradient that rounding in it alone is expected to cause.
    overflows: "yes" if an operand or result of a matmul overflows; "maybe" if another number would,
      which may stay in float32 anyway; else "no".
  """

  path: str
  flops_share: float
  error: float
  overflows: Literal["no", "maybe", "yes"]


class TuneReport(Report):
  """What must stay in float32, see `mpjax.tune`.

  `rules` are for `mpjax.autocast`, and, where each path begins with `"**/"`, for `with_policy` too:
  but for what the root of a Linen model computes itself, whose path there is "".
  `error` is the relative error of the gradient under them, measured, and `half_share` the share of
  the FLOPs of matmuls in low precision, from 0 to 1.

  Args:
    policy: the one that was asked for.
    tolerance: the error that was allowed.
    best: the choice of which `rules`, `error` and `half_share` are.
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

  def __init__(
    self,
    *,
    policy: Policy,
    tolerance: float,
    best: Evaluation,
    evaluations: Sequence[Evaluation],
    bound: int,
    loss_scale: float,
    modules: Sequence[ModuleReport],
    scopes: bool = True,
  ) -> None:
    self.policy = policy
    self.rules: tuple[Rule, ...] = best.rules
    self.error: float = best.error
    self.half_share: float = best.half_share
    self.tolerance = tolerance
    self.evaluations: tuple[Evaluation, ...] = tuple(evaluations)
    self.bound = bound
    self.loss_scale = loss_scale
    self.modules: tuple[ModuleReport, ...] = tuple(modules)
    self.scopes = scopes
    self._best = best

  def __repr__(self) -> str:
    found = f"{len(self.rules)} rules, error {_text(self.error)}"
    return f"<TuneReport: {found}, {percent(self.half_share)} in low precision>"

  def plot(self, path: str | None = None) -> Any:
    """Draws the error of each choice against its share in low precision.

    Args:
      path: a file to write, such as "tune.png"; None writes none.

    Returns:
      The figure of matplotlib.

    Raises:
      MpjaxRuntimeError: matplotlib is not installed.
    """
    return draw(self.evaluations, self._best, self.tolerance, self.policy, path)

  def sections(self) -> list[Section]:
    """Returns what is shown, in order."""
    found = (
      f"{percent(self.half_share)} of the FLOPs of matmuls run in "
      f"{self.policy.compute_dtype.name}; the relative error of the gradient is "
      f"{_text(self.error)}, with {_text(self.tolerance)} allowed."
    )
    scale = f", at loss scale {self.loss_scale:.0f}" if self.loss_scale != 1 else ""
    left = ()
    if not self.half_share and any(each.error > self.tolerance for each in self.evaluations[1:]):
      least = min(each.error for each in self.evaluations if each.half_share or each.error)
      text = (
        f"The least error measured with anything in low precision is {_text(least)}: allow more "
        "than that. What is left comes from operations that are no matmuls."
      )
      left = (text,)
    if [module.path for module in self.modules] == [""]:
      text = (
        "The function has no named scopes, and its parameters are in no modules, so that all of "
        'it counts as one module: write with jax.named_scope("name"): around the calls that '
        "should be told apart."
      )
      left = (*left, text)
    if not self.scopes:
      text = (
        "Paths are those of the parameters, since the function has no such named scopes: the rules "
        "are for mpjax.with_policy; for mpjax.autocast write with jax.named_scope(path): "
        "around what computes with these parameters."
      )
      left = (*left, text)
    measured = f"{len(self.evaluations)} of at most {self.bound} choices were measured{scale}."
    rules = [f"  {_line(rule)}," for rule in self.rules] or ["  # none is needed"]
    sections = [
      Section(title="tune", lines=(found, measured, *left)),
      Section(title="Rules", lines=("rules = (", *rules, ")")),
      self._curve(),
      self._modules(),
    ]
    return [section for section in sections if section is not None]

  def as_dict(self) -> dict[str, Json]:
    """Returns what `to_json` writes."""
    return {
      "policy": str(self.policy),
      "tolerance": self.tolerance,
      "error": self.error,
      "half_share": self.half_share,
      "rules": [
        {"policy": str(rule.policy), "path": path}
        for rule, path in zip(self.rules, named(self.rules), strict=True)
      ],
      "bound": self.bound,
      "loss_scale": self.loss_scale,
      "evaluations": [
        {"float32": each.float32, "error": each.error, "half_share": each.half_share}
        for each in self.evaluations
      ],
      "modules": [each._asdict() for each in self.modules],
    }

  def _curve(self) -> Section:
    rows = []
    for each in sorted(self.evaluations, key=lambda e: (e.half_share, -e.error)):
      mark = "chosen" if each is self._best else "" if each.error > self.tolerance else "good"
      rows.append(
        (
          percent(each.half_share),
          _text(each.error),
          mark,
          _listed(each.float32),
        )
      )
    return Section(
      title="Error of the gradient by share in low precision",
      columns=(
        Column("share", "right"),
        Column("error", "right"),
        Column(""),
        Column("in float32", wide=True),
      ),
      rows=tuple(rows),
    )

  def _modules(self) -> Section | None:
    if not self.modules:
      return None  # Nothing had to be looked for.
    ranked = sorted(self.modules, key=lambda m: (m.overflows != "yes", -m.error))
    rows = [
      (
        m.path or "(no scope)",
        percent(m.flops_share),
        _text(m.error),
        m.overflows,
        "float32" if m.path in self._best.float32 else "",
      )
      for m in ranked
    ]
    return Section(
      title="What rounding in each module alone is expected to cost",
      columns=(
        Column("module", wide=True),
        Column("FLOPs", "right"),
        Column("error", "right"),
        Column("overflows"),
        Column(""),
      ),
      rows=tuple(rows),
    )


_PRESETS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")


def _line(rule: Rule) -> str:
  """Returns a rule as one writes it."""
  same = (name for name in _PRESETS if Policy.parse(name) == rule.policy)
  text = f'"{next(same, rule.policy)}"'
  return f"mpjax.Rule({text}, path={written(rule.path)})"


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"


def _listed(paths: Sequence[str]) -> str:
  """Returns paths in one line or two."""
  if not paths:
    return "nothing"
  shown = [path or "(no scope)" for path in paths[:3]]
  return ", ".join(shown) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def draw(
  evaluations: Sequence[Evaluation],
  best: Evaluation,
  tolerance: float,
  policy: Policy,
  path: str | None,
) -> Any:
  """Draws the error of each choice against its share in low precision, and returns the figure."""
  plt = pyplot("mpjax.tune(loss_fn, policy)(...).plot()")
  figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained", facecolor="white")
  finite = [e for e in evaluations if math.isfinite(e.error)]
  errors = [e.error for e in finite if e.error > 0]
  low, high = min([*errors, tolerance]) / 3, max([*errors, tolerance]) * 3
  axis.semilogy([], [])
  axis.axhspan(low, tolerance, color="C2", alpha=0.10, linewidth=0)
  axis.axhline(tolerance, color="C2", linewidth=1.2)
  axis.text(
    0.01,
    tolerance,
    " allowed",
    transform=axis.get_yaxis_transform(),
    va="bottom",
    fontsize=8,
    color="C2",
  )
  for each in evaluations:
    x, bad = 100 * each.half_share, not math.isfinite(each.error)
    y = high / 1.5 if bad else max(each.error, low * 1.3)
    color = "C2" if each.error <= tolerance else "C3"
    axis.plot(x, y, "x" if bad else "o", color=color, markersize=6, alpha=0.8)
    if bad:
      axis.annotate(
        "not finite",
        (x, y),
        (-6, 0),
        textcoords="offset points",
        fontsize=7.5,
        ha="right",
        va="center",
        color=color,
      )
  spot = (100 * best.half_share, max(best.error, low * 1.3))
  axis.plot(*spot, "o", markersize=14, markerfacecolor="none", markeredgecolor="black")
  text = f"chosen: {percent(best.half_share)}, with {_listed(best.float32)} in float32"
  figure.suptitle("What must stay in float32", x=0.02, ha="left", weight="bold", fontsize=12)
  axis.set_title("\n".join(textwrap.wrap(text, 90)), loc="left", fontsize=8.5)
  axis.set_ylim(low, high)
  axis.set_xlabel(f"share of the FLOPs of matmuls in {policy.compute_dtype.name}, %")
  axis.set_ylabel("relative error of the gradient")
  for side in ("top", "right"):
    axis.spines[side].set_visible(False)
  axis.grid(alpha=0.25)
  if path is not None:
    figure.savefig(path, dpi=150)
  plt.close(figure)  # Else a notebook shows it twice.
  return figure
