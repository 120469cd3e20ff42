"""What `mpjax.tune` found: the rules, and the curve of error against share in low precision."""

import dataclasses
import math
import re
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
    low, ranked = self.policy.compute_dtype.name, list[tuple[str, ...]]()
    modules = [
      (
        (each.path or "(no scope)") + " (residual stream)" * each.is_stream,
        *(f"{error:.2g}".replace("nan", "-") for error in (each.forward, each.gradient)),
        *(percent(each.flops_share), "float32" * (each.path in self.float32)),
      )
      for each in self.modules
      if each.forward > 0 or each.gradient > 0
    ]
    about = "forward: of the worst of its own matmuls and sums. gradient: of its parameters"
    columns = ("module", "forward", "gradient", "FLOPs", "")
    for each in sorted(self.evaluations, key=lambda each: (each.half_share, -each.error)):
      verdict = "good" * (each.error <= self.tolerance)
      verdict = "chosen" if each.float32 == self.float32 else verdict
      paths = ", ".join(path or "(no scope)" for path in each.float32[:3]) or "nothing"
      paths += f" and {len(each.float32) - 3} more" * (len(each.float32) > 3)
      ranked.append((percent(each.half_share), _text(each.error), verdict, paths))
    title = f"Error of each module in {low} against float32"
    share = f"{percent(self.half_share)} of the FLOPs of matmuls run in {low}"
    errors = f"{_text(self.error)}, with {_text(self.tolerance)} allowed"
    scale = f", at loss scale {self.loss_scale:.0f}" if self.loss_scale != 1 else ""
    summary = f"{share}; the relative error of the gradient is {errors}."
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
    lines += ["import re"] * any(isinstance(rule.path, re.Pattern) for rule in self.rules)
    rules = ["rules = (", *(f"  {_line(rule)}," for rule in self.rules), ")"]
    lines += rules if self.rules else ["rules = ()  # none is needed"]
    curve = "Error of the gradient by share in low precision"
    return [
      Section(title, (summary, f"{about}, and of those inside."), columns, tuple(modules)),
      Section("Rules", tuple(lines)),
      Section(curve, (), ("share", "error", "", "in float32"), tuple(ranked) * (len(ranked) > 1)),
    ]


def _line(rule: Rule) -> str:
  presets = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
  same = (name for name in presets if Policy.parse(name) == rule.policy)
  return f'mpjax.Rule("{next(same, rule.policy)}", path={written(rule.path)})'


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"


def written(path: object) -> str:
  """Returns the path of a rule as one writes it."""
  return f'"{path}"' if isinstance(path, str) else repr(path)
