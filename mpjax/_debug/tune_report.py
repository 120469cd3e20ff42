"""The report of `mpjax.tune`: rules, and the error by share in low precision."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpjax._debug.report import WIDTH, Report, Section, amount, percent
from mpjax._matmul.recipes import recipe_of
from mpjax._policy.policy import Policy, shortest_text
from mpjax._policy.rules import Rule


class Evaluation(NamedTuple):
  """A choice of formats that was measured.

  Fields:
    float32: the paths of the modules in float32.
    rules: the rules for modules in another format than the format of `policy`.
    error: the relative error of the gradient; inf where it is not finite.
    half_share: the share of the FLOPs of matmuls in low precision, forward and backward.
    policy: the policy of everything else. It is the first that was passed, if a module has that.
    headroom: how many times the float16 values may grow before one overflows; 0 if one did, and
      inf without such values.
    others: by path, the policies of the modules that have another one, and not float32.
    shares: by format, the shares of the FLOPs of matmuls.
    formats: by path, the formats in which the matmuls of the module ran.
  """

  float32: tuple[str, ...]
  rules: tuple[Rule, ...]
  error: float
  half_share: float
  policy: Policy
  headroom: float
  others: Mapping[str, Policy]
  shares: Mapping[str, float]
  formats: Mapping[str, Sequence[str]]


class ModuleReport(NamedTuple):
  """A module.

  Fields:
    path: the path of the module, its named scopes, or the path of its parameters.
    forward: the relative error, under the first policy without rules, of the worst of its own
      matmuls and sums; NaN if it has none.
    gradient: the relative error of the gradients of its parameters, and of those inside; NaN if
      there are none.
    flops_share: its share of the FLOPs of matmuls.
    is_stream: whether it is a residual stream: it has no matmuls, and adds a value to the result
      that modules inside compute from it.
    headroom: how many times its low-precision values may grow before they overflow float16; NaN if
      there are none.
  """

  path: str
  forward: float
  gradient: float
  flops_share: float
  is_stream: bool = False
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
    error: measured under them.
    headroom: measured under them, see `Evaluation`.
    half_share: from 0 to 1.
    float32: the paths of the modules in float32.
    others: the policies of the modules that have another one, by path.
    shares: the shares of the FLOPs of matmuls, by format.
    formats: the formats in which the matmuls of a module ran under `rules`, by its path.
    evaluations: all choices that were measured, in order.
    bound: the largest number of measurements.
    loss_scale: the loss scale with which float16 was measured; 1 without float16.
    modules: the errors, FLOPs and headroom of each module.
    models: whether models ran as under `mpjax.with_policy`; if not, all of the loss was autocast.
    kernels: the paths of modules whose kernels run in float32 under any of the policies.

  >>> import jax.numpy as jnp, mpjax
  >>> tune = mpjax.tune(lambda w, x: jnp.mean((x @ w) ** 2), tolerance=0.1)
  >>> report = tune(jnp.eye(8), jnp.ones((2, 8)))
  tune: 1 modules, at most 16 measurements
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
  float32: tuple[str, ...]
  others: Mapping[str, Policy]
  shares: Mapping[str, float]
  formats: Mapping[str, Sequence[str]]
  evaluations: tuple[Evaluation, ...]
  bound: int
  loss_scale: float
  modules: tuple[ModuleReport, ...]
  models: bool = False
  kernels: tuple[str, ...] = ()

  def sections(self) -> list[Section]:
    return [self._errors(), Section("Rules", self._how_to_use()), self._choices()]

  @property
  def _may_overflow(self) -> bool:
    """Whether a policy computes in float16; the other formats have the range of float32."""
    return any(each.compute_dtype == np.float16 for each in self.policies)

  def _errors(self) -> Section:
    """Returns the table of modules."""
    # The share of low precision is the answer, even if it is 0.
    is_low = any(name != "float32" for name in self.shares)
    first, *others = self.shares if is_low else (compute_dtype_of(self.policy), *self.shares)
    share = f"{percent(self.shares.get(first, 0.0))} of the FLOPs of matmuls run in {first}"
    share += "".join(f", {percent(self.shares[name])} in {name}" for name in others)
    errors = f"{_text(self.error)}, with {_text(self.tolerance)} allowed"
    lines = [f"{share}; the relative error of the gradient is {errors}."]
    # Without float16 values the headroom is inf.
    if math.isfinite(self.headroom):
      asked = f"with {_times(self.required_headroom)} asked for"
      lines.append(f"Float16 values may grow {_times(self.headroom)} times, {asked}.")
    lines.append(
      "forward: its worst matmul or sum. gradient: of its parameters, modules inside included."
    )
    if self._may_overflow:
      lines.append("headroom: of its low-precision values, were they in float16.")
    columns = ("module", "forward", "gradient", "headroom", "FLOPs", "in")
    shown = (each for each in self.modules if self._is_shown(each))
    rows = tuple(map(self._row, shown))
    title = f"Error of each module in {self._name_of(self.policies[0])} against float32"
    return Section(title, tuple(lines), columns, rows)

  def _is_shown(self, module: ModuleReport) -> bool:
    # NaN compares as false, so modules without any error are left out.
    has_error = module.forward > 0 or module.gradient > 0
    return has_error or (self._may_overflow and module.headroom < self.required_headroom)

  def _row(self, module: ModuleReport) -> tuple[str, ...]:
    """Returns the cells of a module."""
    stream = " (residual stream)" if module.is_stream else ""
    # NaN means that the module has no such value.
    errors = ("-" if math.isnan(x) else f"{x:.2g}" for x in (module.forward, module.gradient))
    headroom = _times(module.headroom) if self._may_overflow else ""
    name = (module.path or "(no scope)") + stream
    return (name, *errors, headroom, percent(module.flops_share), self._format_of_module(module))

  def _format_of_module(self, module: ModuleReport) -> str:
    """Returns the formats in which the matmuls of a module ran; of one without, its upgrade."""
    # `formats` has the modules with matmuls. Others may still be upgraded for their headroom.
    if module.path in self.formats:
      return " ".join(self.formats[module.path])
    if module.path in self.float32:
      return "float32"
    policy = self.others.get(module.path)
    return "" if policy is None else format_of_policy(policy)

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
      lines.extend(_assignment("policy", shortest_text(self.policy)))
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
    is_one = len(self.policies) == 1
    shares = (name for each in self.evaluations for name in each.shares)
    # Formats of policies come first, in the order of preference.
    names = [*dict.fromkeys((*map(format_of_policy, self.policies), *shares))]

    def rank(choice: Evaluation) -> tuple[float, ...]:
      # The table begins with the choices that have least of the preferred format.
      return (*(choice.shares.get(name, 0.0) for name in names), -choice.error)

    ranked = sorted(self.evaluations, key=rank)
    # One policy has one share in low precision. Several have a column for each format.
    columns = ("share",) if is_one else tuple(names)
    columns += ("error", "headroom", "", "in float32" if is_one else "upgraded")
    rows = tuple(self._choice(each, names) for each in ranked)
    return Section("Error of the gradient by share in low precision", (), columns, rows)

  def _choice(self, choice: Evaluation, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the cells of a choice; `names` are the formats that have a column."""
    # A column without text is not printed.
    headroom = _times(choice.headroom) if self._may_overflow else ""
    about = (_text(choice.error), headroom, self._verdict(choice), self._upgrades(choice))
    if len(self.policies) == 1:
      return (percent(choice.half_share), *about)
    return (*(percent(choice.shares.get(name, 0.0)) for name in names), *about)

  def _upgrades(self, choice: Evaluation) -> str:
    """Returns the upgrades of a choice, or its difference from the best if they are too many."""
    own, best = self._formats_of_upgrades(choice), self._formats_of_upgrades(self)
    # A long list of paths is cut, and would look the same for similar choices. The difference is
    # shorter.
    if len(own) > _LISTED and own != best and choice.policy == self.policy:
      usual = self._name_of(choice.policy)
      paths = (path for path in (*own, *best) if own.get(path) != best.get(path))
      changed = {path: own.get(path, usual) for path in paths}
      return f"as chosen, but {_by_format(changed)}"
    if len(self.policies) == 1:
      return _some_paths(choice.float32)
    texts = [_by_format(own)] if own else []
    # The base policy of the choice applies to all modules that are not listed.
    if choice.policy != self.policies[0]:
      texts.append(f"{self._name_of(choice.policy)}: all{' others' if texts else ''}")
    return "; ".join(texts) or "nothing"

  def _formats_of_upgrades(self, choice: "Evaluation | TuneReport") -> dict[str, str]:
    """Returns the formats of the modules with another format than the policy, by path."""
    # `float32` and `others` together are the modules with a rule.
    others = {path: self._name_of(policy) for path, policy in choice.others.items()}
    return others | dict.fromkeys(choice.float32, "float32")

  def _name_of(self, policy: Policy) -> str:
    """Returns the format of a policy, or its text if another policy has the same format."""
    name = format_of_policy(policy)
    # Two policies may multiply in one format and differ in their output dtype.
    is_one = [*map(format_of_policy, self.policies)].count(name) == 1
    return name if is_one else shortest_text(policy)

  def _verdict(self, choice: Evaluation) -> str:
    # The report holds the fields of the best choice, not the choice itself.
    is_best = (choice.policy, choice.float32, choice.others) == (
      self.policy,
      self.float32,
      self.others,
    )
    if is_best:
      return "chosen"
    is_good = choice.error <= self.tolerance and choice.headroom >= self.required_headroom
    return "good" if is_good else ""


_LISTED = 3
"""The number of paths that a cell lists."""


def _by_format(formats: Mapping[str, str]) -> str:
  """Returns the first paths of each format."""
  paths = collections.defaultdict[str, list[str]](list)
  for path, name in formats.items():
    paths[name].append(path)
  return "; ".join(f"{name}: {_some_paths(of_format)}" for name, of_format in paths.items())


def _some_paths(paths: Sequence[str]) -> str:
  """Returns the first paths, and how many more there are."""
  first = ", ".join(path or "(no scope)" for path in paths[:_LISTED]) or "nothing"
  more = len(paths) - _LISTED
  return f"{first} and {more} more" if more > 0 else first


def _assignment(name: str, text: str) -> list[str]:
  """Returns the lines of code that assign a string, none of which is broken by a report."""
  # A report would fold a line that is wider than the page, and the fold would be in the string.
  line = f'{name} = "{text}"'
  return [line] if len(line) <= WIDTH else [f"{name} = (", f'  "{text}"', ")"]


def format_of_policy(policy: Policy) -> str:
  """Returns the format in which a policy multiplies: its recipe, or else the compute dtype."""
  if policy.matmul is None:
    return compute_dtype_of(policy)
  return recipe_of(policy.matmul).name


def compute_dtype_of(policy: Policy) -> str:
  return policy.compute_dtype.name


def _times(headroom: float) -> str:
  """Returns a headroom in two digits; "-" where there are no values."""
  if not math.isfinite(headroom):
    return "-"
  return f"{headroom:.2g}" if headroom < 100 else amount(headroom)


def _text(error: float) -> str:
  return "not finite" if math.isinf(error) else f"{error:.2g}"
