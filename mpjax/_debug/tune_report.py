"""The report of `mpjax.tune`: rules, and the error by share in low precision."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mpjax._debug.report import Report, Section, percent
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule


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
    path: that of the module, or its named scopes, or the path of its parameters.
    forward: the relative error, under the policy without rules, of the worst of its own matmuls
      and sums; NaN if it has none.
    gradient: that of the gradients of its parameters and those inside; NaN if there are none.
    flops_share: its share of the FLOPs of matmuls.
    is_stream: it has no matmuls, and adds up what the modules inside return.
  """

  path: str
  forward: float
  gradient: float
  flops_share: float
  is_stream: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TuneReport(Report):
  """What must stay in float32, see `mpjax.tune`.

  Args:
    policy: the one that was asked for.
    tolerance: the error that was allowed.
    float32: of the best choice, as `rules`, `error` and `half_share`: see `Evaluation`.
    rules: for `mpjax.with_policy` and `mpjax.autocast`.
    error: measured under them.
    half_share: from 0 to 1.
    evaluations: all choices that were measured, in order.
    bound: how many it might have been.
    loss_scale: the loss scale with which float16 was measured; 1 for bfloat16.
    modules: what is known of each module.
    models: whether models ran as under `mpjax.with_policy`; if not, all of the loss was autocast.

  >>> import jax.numpy as jnp, mpjax
  >>> tune = mpjax.tune(lambda w, x: jnp.mean((x @ w) ** 2), tolerance=0.1)
  >>> report = tune(jnp.eye(4), jnp.ones((2, 4)))
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
  models: bool = False

  def sections(self) -> list[Section]:
    return [self._errors(), Section("Rules", self._how_to_use()), self._choices()]

  def _errors(self) -> Section:
    """Returns the table of modules."""
    low = self.policy.compute_dtype.name
    share = f"{percent(self.half_share)} of the FLOPs of matmuls run in {low}"
    errors = f"{_text(self.error)}, with {_text(self.tolerance)} allowed"
    summary = f"{share}; the relative error of the gradient is {errors}."
    forward = "forward: of the worst of its own matmuls and sums."
    gradient = "gradient: of its parameters, and of those inside."
    columns = ("module", "forward", "gradient", "FLOPs", "")
    with_errors = (each for each in self.modules if each.forward > 0 or each.gradient > 0)
    rows = tuple(map(self._row, with_errors))
    title = f"Error of each module in {low} against float32"
    return Section(title, (summary, f"{forward} {gradient}"), columns, rows)

  def _row(self, module: ModuleReport) -> tuple[str, ...]:
    """Returns the cells of a module."""
    stream = " (residual stream)" if module.is_stream else ""
    errors = ("-" if math.isnan(x) else f"{x:.2g}" for x in (module.forward, module.gradient))
    dtype = "float32" if module.path in self.float32 else ""
    name = (module.path or "(no scope)") + stream
    return (name, *errors, percent(module.flops_share), dtype)

  def _how_to_use(self) -> tuple[str, ...]:
    """Returns how the rules were measured, and the rules as Python code."""
    scale = f", at loss scale {self.loss_scale:.0f}" if self.loss_scale != 1 else ""
    by = "mpjax.with_policy" if self.models else "mpjax.autocast"
    choices = f"{len(self.evaluations)} of at most {self.bound} choices"
    lines = [f"{choices} were measured with {by}{scale}."]
    if not self.models and {module.path for module in self.modules} == {""}:
      lines.append(
        "The function has no named scopes and no modules of parameters, and counts as one module: "
        'write with jax.named_scope("name"): around the calls that should be told apart.'
      )
    elif self.models and self.rules:
      lines.append('Of several models, pass unmatched="ignore" for one without such a module.')
    elif self.rules:
      lines.append(
        "A path that is no named scope is that of parameters: for mpjax.autocast write with "
        "jax.named_scope(path): there. For mpjax.with_policy, which also rounds what layers of "
        "Flax return, measure with the model as an argument, instead of its state."
      )
    if any(isinstance(rule.path, re.Pattern) for rule in self.rules):
      lines.append("import re")
    if not self.rules:
      return (*lines, "rules = ()  # none is needed")
    return (*lines, "rules = (", *(f"  {_line(rule)}," for rule in self.rules), ")")

  def _choices(self) -> Section:
    """Returns the table of what was measured, if it was more than one choice."""
    ranked = sorted(self.evaluations, key=lambda each: (each.half_share, -each.error))
    rows = [
      (percent(each.half_share), _text(each.error), self._verdict(each), _some_paths(each.float32))
      for each in ranked
    ]
    columns = ("share", "error", "", "in float32")
    shown = tuple(rows) if len(rows) > 1 else ()
    return Section("Error of the gradient by share in low precision", (), columns, shown)

  def _verdict(self, choice: Evaluation) -> str:
    if choice.float32 == self.float32:
      return "chosen"
    return "good" if choice.error <= self.tolerance else ""


def _some_paths(paths: Sequence[str]) -> str:
  """Returns the first paths, and how many more there are."""
  first = ", ".join(path or "(no scope)" for path in paths[:3]) or "nothing"
  more = len(paths) - 3
  return f"{first} and {more} more" if more > 0 else first


def _line(rule: Rule) -> str:
  presets = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
  same = (name for name in presets if Policy.parse(name) == rule.policy)
  return f'mpjax.Rule("{next(same, rule.policy)}", path={written(rule.path)})'


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"


def written(path: object) -> str:
  """Returns the path of a rule as one writes it."""
  return f'"{path}"' if isinstance(path, str) else repr(path)
