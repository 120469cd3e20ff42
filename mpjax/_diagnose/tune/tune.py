"""`tune`: the formats of modules that leave the error of the gradient within a tolerance."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxValueError, check_call, check_value
from mpjax._core.types import HALVES, Args, Function, Kwargs, NumpyArray, P, is_inexact
from mpjax._diagnose.audit.not_entered import find_kernels
from mpjax._diagnose.call import Call, Traced
from mpjax._diagnose.expectations import check_float32, lows_of
from mpjax._diagnose.gradient import gradient_of, positions_of_gradients
from mpjax._diagnose.matmul_formats import (
  FLOAT32_POLICY,
  WIDE_FORMATS,
  flops_by_format,
  shares_of,
)
from mpjax._diagnose.module_names import with_models_under
from mpjax._diagnose.parameter_scopes import with_parameter_scopes
from mpjax._diagnose.paths import rule_paths_of
from mpjax._diagnose.ranges.ranges import scale_for_float16
from mpjax._diagnose.ranges.report import HEADROOM
from mpjax._diagnose.relative_errors import norm_of, relative_error
from mpjax._diagnose.report import Advance, Pending
from mpjax._diagnose.sensitivity.errors import errors_of
from mpjax._diagnose.tune.report import Evaluation, ModuleReport, TuneReport
from mpjax._diagnose.tune.rules import rules_for
from mpjax._jaxpr.graph import Graph
from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.policy import Policy, PolicyLike, parse_policy
from mpjax._policy.rules import Rule

CALL = "mpjax.tune(loss_fn, policy)"
_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'


@check_call(CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object],
  policy: PolicyLike | Sequence[PolicyLike] = "mixed_bfloat16",
  *,
  tolerance: float,
  headroom: float = HEADROOM,
) -> Callable[P, TuneReport]:
  """Choose the format of each module of a loss, for a tolerated error of the gradient.

  `mpjax.sensitivity` says what the roundings of each module contribute to the error of the
  gradient. The modules with the largest contributions get a more exact format until the predicted
  error is within the tolerance, and that choice is measured. An error is the norm of the difference
  over the norm of the gradient. Models of Linen, and of NNX in the arguments, run as under
  `mpjax.with_policy`. Other losses run as under `mpjax.autocast`. docs/tune.md describes the
  modules and how they are chosen.

  Args:
    loss_fn: the plain loss in float32, of a Linen model, an NNX model (an argument, or merged from
      a state), or any function of trees of arrays. Returns a scalar, or one and aux. The first
      argument of a method of an NNX model is the model.
    policy: a policy that computes in bfloat16 or float16, with or without a format for its matmuls.
      Of several policies, the first is preferred for each module, and float32 comes last.
    tolerance: the relative error of the gradient that is allowed, such as 0.01. The report says
      what errors the plain policy and float32 itself have.
    headroom: how many times the float16 values may grow before they overflow. A module that leaves
      less is upgraded, even if its error is small. The default is 8, as `mpjax.ranges` leaves for
      gradients.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete. It returns a report with
    `.policy`, `.rules`, `.error`, `.headroom` and `.half_share`. Print it: it begins with the error
    of each module.

  Raises:
    MpjaxTypeError: an argument has the wrong type. When called: an argument is traced.
    MpjaxValueError: a policy computes in float32, the tolerance is not positive, or the headroom is
      less than 1. When called: no module runs in low precision, or the loss is in low precision
      already. The loss is not finite in float32, or its gradient is zero. The gradient differs
      from call to call.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("safe"):
  ...     y = x @ w
  ...   with jax.named_scope("hot"):  # its matmul overflows float16
  ...     y = ((y * 3e3) @ w) / 3e3
  ...   return jnp.mean(y**2)
  >>> w, x = 9 * jnp.eye(8), 3 + jnp.arange(16.0).reshape(2, 8) / 16
  >>> report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(w, x)
  tune: 3 modules, at most 7 measurements
  >>> report.rules
  (mpjax.Rule("float32_highest", path="**/hot"),)
  >>> report.headroom > 8
  True
  """
  policies = _parse_policies(policy)
  check_value(
    tolerance,
    _is_number(tolerance) and 0 < tolerance < math.inf,
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )
  check_value(
    headroom,
    _is_number(headroom) and 1 <= headroom < math.inf,
    "mpjax.tune(headroom)",
    expected="a number from 1 on, by which float16 values may grow",
    fix="Write headroom=16 for values that may become 16 times as large, or 1 for none.",
  )
  goal = _Goal(tolerance, headroom)

  def report(loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> TuneReport:
    return _tuned(policies, goal, loss_fn, Call(args, kwargs, CALL), advance)

  return Pending("mpjax.tune(loss_fn)", loss_fn, report, _FIX)


def _is_number(x: object) -> bool:
  return isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)


def _parse_policies(policy: PolicyLike | Sequence[PolicyLike]) -> tuple[Policy, ...]:
  """Returns the policies to choose among, the preferred one first."""
  where = "mpjax.tune(policy)"
  # A string is a sequence too, and one policy.
  several = (policy,) if isinstance(policy, (str, Policy)) else policy
  is_sequence = isinstance(several, Sequence)  # Anything else is refused as a policy.
  parsed = tuple(parse_policy(each, where) for each in (several if is_sequence else (several,)))
  check_value(
    policy,
    bool(parsed) and all(each.compute_dtype in HALVES for each in parsed),
    where,
    expected="a policy that computes in bfloat16 or float16, or several of them",
    fix='Write "mixed_bfloat16" or "mixed_float16": tune finds the modules that need float32.',
  )
  check_value(
    policy,
    len(set(parsed)) == len(parsed),
    where,
    expected="policies that differ",
    fix='Name each once, the preferred first: ("mixed_float8", "mixed_bfloat16").',
  )
  return parsed


class _Goal(NamedTuple):
  """What a choice of formats must reach.

  Fields:
    tolerance: the largest relative error of the gradient.
    headroom: how many times float16 values may grow before they overflow, at least.
  """

  tolerance: float
  headroom: float

  def is_reached(self, choice: Evaluation) -> bool:
    return choice.error <= self.tolerance and choice.headroom >= self.headroom


_CHOICES = 5
"""The most choices of upgrades that are measured."""

_CLOSER = 0.7
"""The factor of the predicted error that is aimed at, after a choice that was not good enough."""


def _tuned(
  policies: Sequence[Policy], goal: _Goal, loss_fn: Function, call: Call, advance: Advance
) -> TuneReport:
  call.check_concrete()
  args, kwargs = call.with_arrays(call.arrays)
  check_float32(Graph(call.traced(loss_fn).program), f"{CALL}(*args)", "loss")
  # A loss has Flax models if a policy for models changes its dtypes.
  with_policy = with_models_under(loss_fn, policies[0], ())
  has_models = bool(lows_of(Graph(call.traced(with_policy).program)))
  named = with_models_under(loss_fn, None, ()) if has_models else with_parameter_scopes(loss_fn)
  has_float16 = any(each.compute_dtype == jnp.float16 for each in policies)
  scale = scale_for_float16(loss_fn, args, kwargs, advance, goal.headroom) if has_float16 else 1.0
  low = Graph(call.traced(with_policy if has_models else autocast(named, policies[0])).program)

  def gradient_under(policy: Policy, rules: tuple[Rule, ...]) -> Traced:
    fn = with_models_under(loss_fn, policy, rules)
    fn = fn if has_models else autocast(named, policy, rules=rules)
    with AUDIT(AuditRecord(shows_roundings=True)):
      return call.traced(gradient_of(fn, scale))

  exact = _gradient(call, gradient_of(named, scale))
  again = _gradient(call, gradient_of(named, scale))
  _check_low(low, policies[0])
  _check_repeats(exact, again, goal.tolerance)
  rule_paths = rule_paths_of(Graph(call.traced(gradient_of(named, scale)).program))
  bound = len(policies) + _CHOICES + 1
  evaluations: list[Evaluation] = []

  def measure(levels: Mapping[str, int]) -> Evaluation:
    """Measures a choice, which has the position of the policy of each module by its rule path."""
    every_policy = (*policies, FLOAT32_POLICY)
    formats = {path: every_policy[level] for path, level in levels.items()}
    # The base policy needs no rule, so it is the first that some module has.
    policy = next((each for each in policies if each in formats.values()), policies[0])
    rules = rules_for(formats, rule_paths, policy)
    gradient = gradient_under(policy, rules)
    graph, counted = Graph(gradient.program), dict.fromkeys(positions_of_gradients(gradient))
    errors = errors_of(gradient.program, [*map(jnp.asarray, call.arrays)], counted)
    flops = flops_by_format(graph)
    shares = shares_of(flops)
    formats_of_modules: dict[str, tuple[str, ...]] = {}
    for path, of_module in flops.items():
      path = rule_paths.get(path, path)
      known = formats_of_modules.get(path, ())
      formats_of_modules[path] = tuple(dict.fromkeys((*known, *of_module)))
    contributions: dict[str, float] = {}
    headroom: dict[str, float] = {}
    for each in errors.roundings:
      path = rule_paths.get(each.step.location.path, each.step.location.path)
      contributions[path] = math.hypot(contributions.get(path, 0.0), each.contribution)
      if each.format.name == "float16":
        left = float(jnp.finfo(jnp.float16).max) / each.largest if each.largest else math.inf
        headroom[path] = min(headroom.get(path, math.inf), left)
    evaluation = Evaluation(
      policy=policy,
      rules=rules,
      error=errors.measured,
      predicted=errors.predicted,
      # After an overflow the decisions are of values that are not finite, and say nothing.
      by_decisions=errors.by_decisions if math.isfinite(errors.measured) else 0.0,
      # An overflow in the run with roundings may come from values that are finite in float32.
      headroom=min(headroom.values(), default=math.inf) if math.isfinite(errors.measured) else 0.0,
      half_share=sum(share for name, share in shares.items() if name not in WIDE_FORMATS),
      shares=shares,
      formats=formats_of_modules,
      upgrades={path: each for path, each in formats.items() if each != policies[0]},
      contributions=contributions,
      headrooms=headroom,
      noise=relative_error(zip(errors.results, exact, strict=True)),
    )
    evaluations.append(evaluation)
    advance(len(evaluations), bound)
    return evaluation

  flops = _flops_of(Graph(gradient_under(policies[0], ()).program), rule_paths)
  sys.stdout.write(f"tune: {len(flops)} modules, at most {bound} measurements\n")
  plain = measure({})
  if not goal.is_reached(plain):
    _upgrade(policies, goal, plain, flops, measure)
  good = [each for each in evaluations if goal.is_reached(each)]
  if not good:
    # Operations outside of the modules must stay in float32 too.
    good = [measure({"**": len(policies)})]
  # A format without float16 has no headroom, so that of the first choice with float16 is shown.
  headrooms = {path: x for each in reversed(evaluations) for path, x in each.headrooms.items()}
  best = min(good, key=lambda choice: _cost_of(policies, choice))
  return TuneReport(
    policies=tuple(policies),
    tolerance=goal.tolerance,
    required_headroom=goal.headroom,
    policy=best.policy,
    rules=best.rules,
    error=best.error,
    headroom=best.headroom,
    half_share=best.half_share,
    shares=best.shares,
    formats=best.formats,
    upgrades=best.upgrades,
    plain=plain,
    evaluations=tuple(evaluations),
    bound=bound,
    loss_scale=scale,
    modules=tuple(
      ModuleReport(
        path,
        plain.contributions.get(path, 0.0),
        count / max(sum(flops.values()), 1),
        headrooms.get(path, math.nan),
      )
      for path, count in flops.items()
      if path in plain.contributions
    ),
    models=has_models,
    kernels=tuple(
      dict.fromkeys(each.path for each in find_kernels(low) if each.dtype == "float32")
    ),
  )


def _upgrade(
  policies: Sequence[Policy],
  goal: _Goal,
  plain: Evaluation,
  flops: Mapping[str, int],
  measure: Callable[[Mapping[str, int]], Evaluation],
) -> None:
  """Measures choices, in which modules have more exact formats, until one is good."""
  levels = dict.fromkeys((*plain.contributions, *plain.headrooms), 0)
  # What each module contributes in each format, and how much float16 values may grow there.
  alone = [plain, *(measure(dict.fromkeys(levels, i)) for i in range(1, len(policies)))]
  contributions = [dict(each.contributions) for each in alone]
  contributions.append(dict.fromkeys(levels, 0.0))

  def contribution(path: str) -> float:
    return contributions[levels[path]].get(path, 0.0)

  def next_level(path: str) -> int:
    """Returns the next format in which a module fits and contributes less."""
    for level in range(levels[path] + 1, len(policies)):
      fits = alone[level].headrooms.get(path, math.inf) >= goal.headroom
      if fits and contributions[level].get(path, 0.0) < contribution(path):
        return level
    return len(policies)

  for path in levels:
    if plain.headrooms.get(path, math.inf) < goal.headroom:
      # Whatever it contributes, it must not overflow.
      levels[path] = next(
        (i for i, x in enumerate(alone) if x.headrooms.get(path, math.inf) >= goal.headroom and i),
        len(policies),
      )
  least, aim, choice = dict(levels), goal.tolerance, plain
  for _ in range(_CHOICES):
    before = dict(levels)
    while math.hypot(choice.by_decisions, *map(contribution, levels)) > aim:
      largest = max(levels, key=contribution)
      if levels[largest] == len(policies):
        break
      levels[largest] = next_level(largest)
    # The last upgrade may have made an earlier one needless. The most costly are tried first.
    for path in sorted(levels, key=lambda path: -flops.get(path, 0)):
      upgraded, levels[path] = levels[path], least[path]
      if math.hypot(choice.by_decisions, *map(contribution, levels)) > aim:
        levels[path] = upgraded
    if levels != before or choice is plain:
      choice = measure(levels)
    if goal.is_reached(choice) or all(level == len(policies) for level in levels.values()):
      return
    # A module in float32 leaves the rounding of its results to the modules that read them.
    for path, level in levels.items():
      contributions[level][path] = choice.contributions.get(path, 0.0)
    aim *= _CLOSER


def _cost_of(policies: Sequence[Policy], choice: Evaluation) -> tuple[float, ...]:
  """Returns how far a choice is from the preferred format: the share of float32 decides first."""
  wide_share = sum(choice.shares.get(name, 0.0) for name in WIDE_FORMATS)
  levels = [policies.index(each) for each in choice.upgrades.values() if each in policies]
  # Equal shares may differ in their last bits.
  return round(wide_share, 9), sum(levels), len(choice.upgrades)


def _flops_of(graph: Graph, rule_paths: Mapping[str, str]) -> dict[str, int]:
  """Returns the FLOPs of the matmuls of each module that computes, by the path of its rule."""
  flops: dict[str, int] = {}
  for each in graph.computing():
    if each.facts.flops is not None or not each.moves:
      path = rule_paths.get(each.where.path, each.where.path)
      flops[path] = flops.get(path, 0) + (each.flops or 0)
  return flops


def _gradient(call: Call, gradient: Function) -> list[NumpyArray]:
  """Traces and runs a gradient in float32; raises unless it is finite and not zero."""
  traced = call.traced(gradient)
  results = jax.device_get(jax.jit(jaxpr_as_fun(traced.program))(*call.arrays))
  found = [results[i] for i in positions_of_gradients(traced) if is_inexact(results[i])]
  loss, norm = results[0], norm_of(found)
  if not (math.isfinite(norm) and norm > 0 and np.isfinite(loss)):
    of_gradient = f"one of norm {norm}, of a loss of {float(loss):g}"
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a gradient in float32 that is finite and not zero, of a finite loss",
      got=of_gradient if found else "no floating array in the first argument",
      fix="Pass the parameters first. mpjax.ranges(loss_fn)(*args) shows where numbers overflow.",
    )
  return found


def _check_repeats(
  exact: Sequence[NumpyArray], again: Sequence[NumpyArray], tolerance: float
) -> None:
  """Raises unless a loss, traced and run again, has the same gradient.

  On an accelerator the order of additions may differ from run to run.
  """
  error = relative_error(zip(again, exact, strict=True))
  # A difference between runs must be small against the errors that are measured.
  if error > tolerance / 10:
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a loss with the same gradient in each call",
      got=f"gradients in float32 that differ by {error:.2g}",
      fix="Pass what changes, such as a key or a counter, as an argument.",
    )


def _check_low(graph: Graph, policy: Policy) -> None:
  """Raises if a policy changes nothing in a loss: every choice would have the error 0."""
  if lows_of(graph):
    return
  kernels = [f"{each.operation} in {each.path or 'it'}" for each in find_kernels(graph)]
  traced = f": {', '.join(kernels)} runs as it was traced" if kernels else ""
  raise MpjaxValueError(
    f"{CALL}(*args)",
    expected=f"a loss that computes in {policy.compute_dtype.name} under the policy",
    got=f"one without such an operation{traced}",
    fix="Tune a loss with matmuls of floating parameters, outside of full_precision. Run a kernel "
    "in the compute dtype by mpjax.low_precision(kernel), and compare by mpjax.compare.",
  )
