"""The report of `mpjax.tune`: rules, the error of each module, and the measured choices."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpjax._diagnose.report import WIDTH, Report, Section, amount, percent, some
from mpjax._matmul.recipes import recipe_of
from mpjax._policy.policy import Policy, shortest_text
from mpjax._policy.rules import Rule


class Evaluation(NamedTuple):
  """A choice of formats that was measured.

  Fields:
    policy: the policy of everything without a rule. It is the first that was passed, if a module
      has that.
    rules: the rules for modules in another format than that of `policy`.
    error: the relative error of the gradient; inf where it is not finite.
    predicted: the error as predicted from the roundings.
    by_decisions: the part of it that comes from comparisons and indices that differ.
    headroom: how many times the float16 values may grow before one overflows; 0 if one did, and inf
      without such values.
    half_share: the share of the FLOPs of matmuls in low precision, forward and backward.
    shares: by format, the shares of the FLOPs of matmuls.
    formats: by path, the formats in which the matmuls of the module ran.
    upgrades: by path, the policies of the modules that do not have the first policy.
    contributions: by path, the error that the roundings of the module cause.
    headrooms: by path, the headroom of its float16 values.
    noise: the relative difference of two computations of the gradient in float32.
  """

  policy: Policy
  rules: tuple[Rule, ...]
  error: float
  predicted: float
  by_decisions: float
  headroom: float
  half_share: float
  shares: Mapping[str, float]
  formats: Mapping[str, Sequence[str]]
  upgrades: Mapping[str, Policy]
  contributions: Mapping[str, float]
  headrooms: Mapping[str, float]
  noise: float


class ModuleReport(NamedTuple):
  """A module, and its part of the error and of the FLOPs.

  Fields:
    path: the path that a rule for the module matches; "" for the code around all modules.
    error: the error of the gradient that its roundings cause under the first policy.
    flops_share: its share of the FLOPs of matmuls.
    headroom: how many times its float16 values may grow before they overflow; NaN if it has none.
  """

  path: str
  error: float
  flops_share: float
  headroom: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TuneReport(Report):
  """The format that each module needs, see `mpjax.tune`.

  Args:
    policies: the policies of the call, the preferred one first.
    tolerance: the error that was allowed.
    required_headroom: the headroom that was asked for.
    policy: the policy of the best choice, for `mpjax.with_policy` or `mpjax.autocast`.
    rules: the rules of the best choice, for the modules with another policy.
    error: the relative error of the gradient under these rules, as measured.
    headroom: how many times the float16 values may grow under these rules, see `Evaluation`.
    half_share: the share of the FLOPs of matmuls in low precision, from 0 to 1.
    shares: the shares of the FLOPs of matmuls, by format.
    formats: the formats in which the matmuls of a module ran under `rules`, by its path.
    upgrades: the policies of the modules that do not have the first one, by path.
    plain: the measurement of the first policy for all modules, without rules.
    evaluations: all choices that were measured, in order.
    bound: the largest number of measurements.
    loss_scale: the loss scale with which float16 was measured; 1 without float16.
    modules: the errors, FLOPs and headroom of each module.
    models: whether models ran as under `mpjax.with_policy`; if not, all of the loss was autocast.
    kernels: the paths of modules whose kernels run in float32 under any of the policies.

  >>> import jax.numpy as jnp, mpjax
  >>> tune = mpjax.tune(lambda w, x: jnp.mean((x @ w) ** 2), tolerance=0.1)
  >>> report = tune(jnp.eye(8), jnp.ones((2, 8)))
  tune: 1 modules, at most 7 measurements
  >>> report.rules, report.error, report.half_share
  ((), 0.0, 1.0)
  """

  policies: tuple[Policy, ...]
  tolerance: float
  required_headroom: float
  policy: Policy
  rules: tuple[Rule, ...]
  error: float
  headroom: float
  half_share: float
  shares: Mapping[str, float]
  formats: Mapping[str, Sequence[str]]
  upgrades: Mapping[str, Policy]
  plain: Evaluation
  evaluations: tuple[Evaluation, ...]
  bound: int
  loss_scale: float
  modules: tuple[ModuleReport, ...]
  models: bool = False
  kernels: tuple[str, ...] = ()

  def sections(self) -> list[Section]:
    return [self._errors(), Section("Rules", self._how_to_use()), self._choices()]

  @property
  def float32(self) -> tuple[str, ...]:
    """The paths of the modules in float32."""
    return tuple(path for path, each in self.upgrades.items() if each not in self.policies)

  def _errors(self) -> Section:
    """Returns the table of modules."""
    # The share of low precision is the answer, even if it is 0.
    is_low = any(name != "float32" for name in self.shares)
    first, *others = self.shares if is_low else (self.policy.compute_dtype.name, *self.shares)
    share = f"{percent(self.shares.get(first, 0.0))} of the FLOPs of matmuls run in {first}"
    share += "".join(f", {percent(self.shares[name])} in {name}" for name in others)
    errors = f"{_text(self.error)}, with {_text(self.tolerance)} allowed"
    lines = [f"{share}; the relative error of the gradient is {errors}."]
    # What the rules buy, and which tolerances make sense.
    plain, noise = self.plain.error, self.plain.noise
    name = self._name_of(self.policies[0])
    if math.isfinite(plain):
      result = f"{name} has an error of {_text(plain)}"
    else:
      result = f"the gradient in {name} is not finite"
    lines.append(f"Without rules, {result}. Float32 has {noise:.1g}.")
    if self.upgrades and math.isfinite(plain) and self.plain.headroom >= self.required_headroom:
      moved = percent(max(self.plain.half_share - self.half_share, 0.0))
      bought = f"take the error from {_text(plain)} to {_text(self.error)}"
      lines.append(f"The rules {bought}, and move {moved} of the FLOPs to float32.")
      lines.append(f"With tolerance={_above(plain)} or more there would be no rules.")
    # Without float16 values the headroom is inf.
    if math.isfinite(self.headroom):
      asked = f"with {_times(self.required_headroom)} asked for"
      lines.append(f"Float16 values may grow {_times(self.headroom)} times, {asked}.")

    # Modules without the headroom need another format whatever their error is. NaN is no headroom.
    def rank(module: ModuleReport) -> tuple[bool, float]:
      return not module.headroom < self.required_headroom, -module.error

    rows: list[tuple[str, ...]] = []
    for module in sorted(self.modules, key=rank):
      headroom = "" if self._has_no_float16 else _times(module.headroom)
      upgrade = self.upgrades.get(module.path)
      # A module without matmuls ran in no format, but may have an upgrade.
      ran = "" if upgrade is None else format_of_policy(upgrade)
      ran = " ".join(self.formats.get(module.path, (ran,)))
      flops = percent(module.flops_share)
      rows.append((module.path or "(root)", f"{module.error:.2g}", headroom, flops, ran))
    title = f"Error that each module causes in {name}"
    return Section.cut(title, "module, error, headroom, FLOPs, in", rows, lines)

  @property
  def _has_no_float16(self) -> bool:
    """Whether no policy computes in float16; the other formats have the range of float32."""
    return all(each.compute_dtype != np.float16 for each in self.policies)

  def _how_to_use(self) -> tuple[str, ...]:
    """Returns how the rules were measured, and the rules as Python code."""
    scale = f", at loss scale {self.loss_scale:.0f}" if self.loss_scale != 1 else ""
    by = "mpjax.with_policy" if self.models else "mpjax.autocast"
    choices = f"{len(self.evaluations)} of at most {self.bound} choices"
    lines = [f"{choices} were measured with {by}{scale}."]
    # The hint depends on how paths came about, and on what rules can match.
    if not self.models and {module.path for module in self.modules} == {""}:
      lines.append(
        "The function has no named scopes and no modules of parameters, so it is one module. Put "
        'calls into jax.named_scope("name") to choose their formats separately.'
      )
    elif self.models and self.rules:
      lines.append('If a model has no such module, pass unmatched="ignore" for it.')
    elif self.rules:
      lines.append(
        "A path that is not a named scope is a path of parameters. For mpjax.autocast, put these "
        "calls in jax.named_scope(path). For mpjax.with_policy, which also rounds the results of "
        "Flax layers, call mpjax.tune with the model as an argument instead of its state."
      )
    if self.kernels:
      paths = _some_paths(self.kernels)
      lines.append(f"Kernels of {paths} ran in float32, as traced, in every choice.")
    if len(self.policies) > 1:
      # A report would fold a line that is wider than the page, and the fold would be in the string.
      text = f'"{shortest_text(self.policy)}"'
      line = f"policy = {text}"
      lines += [line] if len(line) <= WIDTH else ["policy = (", f"  {text}", ")"]
    # The printed code must run when it is pasted.
    if any(isinstance(rule.path, re.Pattern) for rule in self.rules):
      lines.append("import re")
    if not self.rules:
      return (*lines, "rules = ()  # none is needed")
    return (*lines, "rules = (", *(f"  {rule}," for rule in self.rules), ")")

  def _choices(self) -> Section:
    """Returns the table of measured choices, if there are several."""
    # If the first choice is good, the first section says everything.
    if len(self.evaluations) == 1:
      return Section()
    names = list(dict.fromkeys(name for each in self.evaluations for name in each.shares))
    columns = (*names, "predicted", "error", "headroom", "", "upgraded")
    rows: list[tuple[str, ...]] = []
    for choice in self.evaluations:
      shares = (percent(choice.shares.get(name, 0.0)) for name in names)
      headroom = "" if self._has_no_float16 else _times(choice.headroom)
      is_best = (choice.policy, choice.upgrades) == (self.policy, self.upgrades)
      is_good = choice.error <= self.tolerance and choice.headroom >= self.required_headroom
      verdict = "chosen" if is_best else "good" if is_good else ""
      paths = collections.defaultdict[str, list[str]](list)
      for path, policy in choice.upgrades.items():
        name = self._name_of(policy) if policy in self.policies else "float32"
        paths[name].append(path)
      upgraded = "; ".join(f"{name}: {_some_paths(of)}" for name, of in paths.items())
      errors = _text(choice.predicted), _text(choice.error)
      rows.append((*shares, *errors, headroom, verdict, upgraded or "nothing"))
    return Section("Choices that were measured, by share of the FLOPs", (), columns, tuple(rows))

  def _name_of(self, policy: Policy) -> str:
    """Returns the format of a policy, or its text if another policy has the same format."""
    name = format_of_policy(policy)
    # Two policies may multiply in one format and differ in their output dtype.
    is_one = [*map(format_of_policy, self.policies)].count(name) == 1
    return name if is_one else shortest_text(policy)


def _above(error: float) -> str:
  """Returns a number of two digits that is not below an error."""
  digit = 10.0 ** (math.floor(math.log10(error)) - 1) if error > 0 else 1.0
  return f"{math.ceil(error / digit) * digit:.2g}"


_LISTED = 3
"""The number of paths that a cell lists."""


def _some_paths(paths: Sequence[str]) -> str:
  return some([path or "(root)" for path in paths], _LISTED)


def format_of_policy(policy: Policy) -> str:
  """Returns the format in which a policy multiplies: its recipe, or else the compute dtype."""
  return policy.compute_dtype.name if policy.matmul is None else recipe_of(policy.matmul).name


def _times(headroom: float) -> str:
  """Returns a headroom in two digits; "-" where there are no values."""
  if not math.isfinite(headroom):
    return "-"
  return f"{headroom:.2g}" if headroom < 100 else amount(headroom)


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"
