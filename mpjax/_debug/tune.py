"""`tune`: the most exact format that each module needs for a tolerated error of the gradient."""

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import add_p

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxValueError, check_call, check_value
from mpjax._core.types import (
  HALF_NAMES,
  HALVES,
  Args,
  Array,
  DType,
  Function,
  Kwargs,
  NumpyArray,
  P,
  is_inexact,
)
from mpjax._debug.arguments import Call, with_parameter_scopes
from mpjax._debug.expectations import check_float32, lows_of
from mpjax._debug.headroom import (
  in_float16,
  watch_float16_values,
  watch_float32_values,
)
from mpjax._debug.module_names import with_models_under
from mpjax._debug.not_entered import find_kernels
from mpjax._debug.paths import is_inside, is_within
from mpjax._debug.ranges import gradient_of, ranges_of_call
from mpjax._debug.ranges_plan import Plan, plan
from mpjax._debug.ranges_report import HEADROOM
from mpjax._debug.report import Advance, Pending
from mpjax._debug.selectors import rule_paths_of, selector
from mpjax._debug.tune_errors import (
  Pair,
  errors_alone,
  forward_errors,
  relative_error,
)
from mpjax._debug.tune_report import (
  Evaluation,
  ModuleReport,
  TuneReport,
  compute_dtype_of,
  format_of_policy,
)
from mpjax._debug.tune_search import MORE, Choice, Upgrade, levels_of, search, upgrades_of
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import EMULATED, RECIPE
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, body_of
from mpjax._policy.policy import Policy, PolicyLike, parse_policy
from mpjax._policy.rules import Rule, with_enclosing

CALL = "mpjax.tune(loss_fn, policy)"
_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'

_FLOAT32 = Policy.parse("float32")

_WIDE = ("float32", "float64")


class Goal(NamedTuple):
  """What a choice of formats must reach.

  Fields:
    tolerance: the largest relative error of the gradient.
    headroom: how many times float16 values may grow before they overflow, at least.
  """

  tolerance: float
  headroom: float

  def is_reached(self, choice: Evaluation) -> bool:
    return choice.error <= self.tolerance and choice.headroom >= self.headroom


class TunedCall(NamedTuple):
  """A call of a loss, with what `tune` looks for.

  Fields:
    policies: the policies to choose among, the preferred one first.
    goal: what the chosen formats must reach.
    loss_fn: the loss.
    args: its positional arguments.
    kwargs: its keyword arguments.
    advance: shows the progress.
  """

  policies: tuple[Policy, ...]
  goal: Goal
  loss_fn: Function
  args: Args
  kwargs: Kwargs
  advance: Advance


@check_call(CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object],
  policy: PolicyLike | Sequence[PolicyLike] = "mixed_bfloat16",
  *,
  tolerance: float,
  headroom: float = HEADROOM,
) -> Callable[P, TuneReport]:
  """Choose the format of each module of a loss, for a tolerated error of the gradient.

  The gradient of `loss_fn` by its first argument is computed in float32, and then under the policy
  with some modules in float32. The search ends with the cheapest choice of modules whose relative
  error is within the tolerance: the norm of the difference over the norm of the gradient. Models of
  Linen, and of NNX in the arguments, run as under `mpjax.with_policy`; a loss without any runs as
  under `mpjax.autocast`. The most measurements there can be are printed first. docs/tune.md says
  what the modules are and how it searches.

  Args:
    loss_fn: the plain loss in float32, of a Linen model, an NNX model (an argument, or merged from
      a state), or any function of trees of arrays. Returns a scalar, or one and aux.
    policy: computes in bfloat16 or float16, or multiplies in a format. Of several policies, the
      first is preferred for each module, and float32 comes last.
    tolerance: the relative error of the gradient that is allowed, such as 0.01.
    headroom: how many times the float16 values may grow before they overflow. A module that leaves
      less is upgraded, even if its error is small. The default is what `mpjax.ranges` leaves for
      gradients.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete. It returns a report with
    `.policy`, `.rules`, `.error`, `.headroom` and `.half_share`. Print it: it begins with the error
    of each module.

  Raises:
    MpjaxTypeError: an argument has the wrong type; when called: an argument is traced.
    MpjaxValueError: a policy computes in float32, the tolerance is not positive, or the headroom is
      less than 1; when called: nothing in the loss runs in low precision, or all does already; the
      loss is not finite in float32, has a gradient of zero, or another one in each call.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("safe"):
  ...     y = x @ w
  ...   with jax.named_scope("hot"):  # its matmul overflows float16
  ...     y = ((y * 3e3) @ w) / 3e3
  ...   return jnp.mean(y**2)
  >>> w, x = 9 * jnp.eye(4), 3 + jnp.arange(8.0).reshape(2, 4) / 8
  >>> report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(w, x)
  tune: 3 modules, at most 18 measurements
  >>> report.rules
  (mpjax.Rule("float32", path="**/hot"),)
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
  goal = Goal(tolerance, headroom)

  def report(loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> TuneReport:
    return _tuned(TunedCall(policies, goal, loss_fn, args, kwargs, advance))

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


def _tuned(tuned: TunedCall) -> TuneReport:
  """Measures choices until the best is among them, all at one scale of the loss."""
  # The first measurement has no upgrade. If it is good, nothing is searched.
  policies, goal = tuned.policies, tuned.goal
  loss = prepare(tuned)
  sys.stdout.write(f"tune: {len(loss.flops)} modules, at most {loss.bound} measurements\n")
  tuner = Tuner(loss, reference_of(loss))
  low = tuner.measure({})
  if not goal.is_reached(tuner.evaluations[0]):
    tuner.search()
  # The search ends with a good choice, or the loss in float32 is one. Another measured choice may
  # be cheaper.
  good = [each for each in tuner.evaluations if goal.is_reached(each)]
  best = min(good, key=functools.partial(cost_of, policies, loss.flops))
  return TuneReport(
    policies=policies,
    tolerance=goal.tolerance,
    required_headroom=goal.headroom,
    **best._asdict(),
    evaluations=tuple(tuner.evaluations),
    bound=loss.bound,
    loss_scale=loss.scale,
    modules=tuple(tuner.rows(low)),
    models=loss.has_models,
    kernels=loss.kernels,
  )


class TunedLoss(NamedTuple):
  """A loss whose programs are traced, and of which nothing is measured yet.

  Fields:
    tuned: the call of the loss.
    call: its arguments.
    has_models: whether the loss has Flax models, which run as under `mpjax.with_policy`.
    scale: the scale of the loss.
    named: the loss in float32, whose modules have the paths that rules match.
    body: the program of the gradient in float32.
    operands: the arrays that every program takes.
    gradients: the position of the gradients among the results of the programs.
    flops: the modules, by path, and the FLOPs of their matmuls.
    rule_paths: by path, the path that rules match there.
    plan: the groups of the values of `body`.
    low: the operations of the loss under the first policy.
    kernels: the paths of modules with kernels in float32, which no policy changes.
    bound: how many choices may be measured.
  """

  tuned: TunedCall
  call: Call
  has_models: bool
  scale: float
  named: Function
  body: Body
  operands: list[Array]
  gradients: slice
  flops: Mapping[str, int]
  rule_paths: Mapping[str, str]
  plan: Plan
  low: Graph
  kernels: tuple[str, ...]
  bound: int


def prepare(tuned: TunedCall) -> TunedLoss:
  """Traces a loss in float32 and under the first policy."""
  policies, loss_fn = tuned.policies, tuned.loss_fn
  call = Call(tuned.args, tuned.kwargs, CALL)
  # All measurements run on the host with concrete values.
  call.check_concrete()
  check_float32(Graph(call.traced(loss_fn)[0]), f"{CALL}(*args)", "loss")
  # A loss has Flax models if a policy for models changes its dtypes.
  with_policy = with_models_under(loss_fn, policies[0], ())
  has_models = bool(lows_of(Graph(call.traced(with_policy)[0])))
  scale = _loss_scale(tuned)

  if has_models:
    named = with_models_under(loss_fn, None, ())
  else:
    named = with_parameter_scopes(loss_fn)
  program, outputs = call.traced(gradient_of(named, scale))
  body = body_of(program)
  # Modules come from the program in float32. Every choice has the same modules.
  flops = modules_of(body)
  # Under the first policy alone, to see what it computes in low precision.
  first = with_policy if has_models else autocast(named, policies[0])
  low = Graph(call.traced(first)[0])
  in_float32 = (each for each in find_kernels(low) if each.dtype == "float32")
  # At most there are: each policy alone, the overflowing modules, all modules, the entire
  # function, the bisection, and the choices that may be cheaper.
  most_upgrades = len(flops) * len(policies)
  bound = 3 + len(policies) + math.ceil(math.log2(max(most_upgrades, 1))) + MORE
  return TunedLoss(
    tuned=tuned,
    call=call,
    has_models=has_models,
    scale=scale,
    named=named,
    body=body,
    # Convert once: every measurement takes the same arrays.
    operands=[*map(jnp.asarray, call.arrays)],
    # The program returns ((loss, aux), gradients). Only paths of the first part begin with "0".
    gradients=slice(sum(path[0] == "0" for path in outputs), None),
    flops=flops,
    rule_paths=rule_paths_of(Graph(body)),
    plan=plan(body, call.arguments(loss_fn)),
    low=low,
    kernels=tuple(dict.fromkeys(each.path for each in in_float32)),
    bound=bound,
  )


def _has_float16(tuned: TunedCall) -> bool:
  return any(each.compute_dtype == jnp.float16 for each in tuned.policies)


def _loss_scale(tuned: TunedCall) -> float:
  """Returns the scale of the loss that leaves headroom to gradients in float16, if any are."""
  if not _has_float16(tuned):
    return 1.0
  # `mpjax.ranges` proposes the scale, with its default headroom.
  gradient = gradient_of(tuned.loss_fn)
  report = ranges_of_call(gradient, tuned.args, tuned.kwargs, tuned.advance)
  # A larger headroom needs a smaller scale, by a power of two.
  more = math.ceil(math.log2(max(tuned.goal.headroom / HEADROOM, 1)))
  return max((report.loss_scale or 1.0) / 2**more, 1.0)


def under(loss: TunedLoss, policy: Policy, rules: tuple[Rule, ...] = ()) -> Function:
  """Returns a loss under a policy and some rules."""
  if loss.has_models:
    return with_models_under(loss.tuned.loss_fn, policy, rules)
  return autocast(loss.named, policy, rules=rules)


def gradient_program(loss: TunedLoss, fn: Function) -> ClosedJaxpr:
  """Returns the program of the gradient of a loss, as `fn` computes it."""
  return loss.call.traced(gradient_of(fn, loss.scale))[0]


def gradient(loss: TunedLoss, body: Body, look: Look) -> list[Array]:
  """Returns the gradient that a program computes, while something looks at it."""
  return run_on_host(body, loss.operands, look)[loss.gradients]


class Reference(NamedTuple):
  """What a loss has in float32.

  Fields:
    gradient: its gradient.
    headroom: by path, how many times the values that a policy computes in low precision may grow in
      float16.
  """

  gradient: list[Array]
  headroom: Mapping[str, float]


def reference_of(loss: TunedLoss) -> Reference:
  """Measures a loss in float32, and checks that low precision can be compared with it."""
  reference = _in_float32(loss)
  _check_low(loss.low, loss.tuned.policies[0])
  _check_repeats(loss, reference)
  return reference


def _in_float32(loss: TunedLoss) -> Reference:
  # Only float16 can overflow, so other policies look at nothing.
  kinds = ("activations", "gradients") if _has_float16(loss.tuned) else ()
  counted = {number for number, group in loss.plan.steps.items() if group.kind in kinds}
  largest = dict[str, float]()
  results = run_on_host(loss.body, loss.operands, watch_float32_values(largest, counted))
  exact = results[loss.gradients]
  _check_gradient(results[0], exact)
  # A module without low precision cannot overflow float16.
  low = {each.where.path for each in loss.low.operations if any_low(each.results)}
  return Reference(exact, {path: in_float16(x) for path, x in largest.items() if path in low})


def _check_repeats(loss: TunedLoss, reference: Reference) -> None:
  """Raises unless a loss, traced and run again, has the same gradient.

  On an accelerator the order of additions may differ from run to run.
  """
  # Trace again: a number that Python code draws shows only in a new trace.
  again = gradient(loss, body_of(gradient_program(loss, loss.named)), Look())
  error = relative_error(zip(reference.gradient, again, strict=True))
  # A difference between runs must be small against the errors that are measured.
  if error > loss.tuned.goal.tolerance / 10:
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a loss with the same gradient in each call",
      got=f"gradients in float32 that differ by {error:.2g}",
      fix="Pass what changes, such as a key or a counter, as an argument.",
    )


class Tuner:
  """Measures the gradient of one loss, for some choices of formats.

  Attributes:
    headroom: that of the reference, and then the smallest of the measurements.
    evaluations: the measured choices, in order.
  """

  def __init__(self, loss: TunedLoss, reference: Reference) -> None:
    self.loss, self.policies, self.goal = loss, loss.tuned.policies, loss.tuned.goal
    self.exact, self.headroom = reference.gradient, dict(reference.headroom)
    self.evaluations = list[Evaluation]()

  def measure(self, formats: Mapping[str, Policy]) -> list[Array]:
    """Returns the gradient if modules have some policies, and notes its error and headroom.

    `formats` has the modules that may be upgraded, by path.
    """
    # Each choice is one policy with rules, which is what the report prints.
    policy, rules = self._policy_and_rules(formats)
    program = gradient_program(self.loss, under(self.loss, policy, rules))
    flops = flops_by_format(Graph(program))
    largest = dict[str, float]()
    low = gradient(self.loss, body_of(program), watch_float16_values(largest))
    # Without rules every module runs under the policy, so all headroom is measured.
    if not rules:
      self._note_headroom(largest)
    shares_of_flops = shares_of(flops)
    others = {path: each for path, each in formats.items() if each not in (policy, _FLOAT32)}
    self.evaluations.append(
      Evaluation(
        float32=tuple(path for path, each in formats.items() if each == _FLOAT32),
        rules=rules,
        error=relative_error(zip(self.exact, low, strict=True)),
        half_share=sum(share for name, share in shares_of_flops.items() if name not in _WIDE),
        policy=policy,
        headroom=in_float16(max(largest.values(), default=0.0)),
        others=others,
        shares=shares_of_flops,
        formats={path: tuple(of_module) for path, of_module in flops.items()},
      )
    )
    # The number that is printed first is of these measurements.
    self.loss.tuned.advance(len(self.evaluations), self.loss.bound)
    return low

  def _policy_and_rules(self, formats: Mapping[str, Policy]) -> tuple[Policy, tuple[Rule, ...]]:
    """Returns the policy of all but some modules, and rules for these.

    The policy is the first, in the order of `policies`, that one of the modules has.
    """
    # The base policy needs no rule, so choose one that some module has.
    used = [each for each in self.policies if each in formats.values()]
    policy = used[0] if used else self.policies[0]
    # Rules match paths relative to the models.
    rule_paths = self.loss.rule_paths
    by_rule_path = {rule_paths.get(path, path): each for path, each in formats.items()}
    return policy, rules_for(by_rule_path, rule_paths, policy)

  def _note_headroom(self, largest: Mapping[str, float]) -> None:
    """Notes the headroom of modules in a program in which all of them run in float16."""
    if largest and all(map(math.isfinite, largest.values())):
      # Nothing overflowed, so this run has every float16 value. Float32 statistics do not count.
      self.headroom = {path: in_float16(magnitude) for path, magnitude in largest.items()}
      return
    for path, magnitude in largest.items():
      measured, expected = in_float16(magnitude), self.headroom.get(path, math.inf)
      # An overflow has the headroom 0. The run in float32 says by how much it overflows.
      if measured > 0 or expected >= 1:
        self.headroom[path] = min(measured, expected)

  def search(self) -> None:
    """Measures choices until one that reaches the goal is among them."""
    # One rule may match several modules, which are upgraded together.
    groups = self._paths_by_rule_path()
    flops = [sum(self.loss.flops[path] for path in paths) for paths in groups.values()]
    # A later policy for all modules is often good, and bounds the cost of the search.
    cost_of_one = self._cost_of_one_policy([path for paths in groups.values() for path in paths])
    upgrades = upgrades_of(flops, [self._alone(groups, policy) for policy in self.policies])
    search(
      [each.flops for each in upgrades],
      np.asarray([each.error for each in upgrades]),
      self.goal.tolerance,
      functools.partial(self._error_of, [*groups.values()], upgrades),
      [each.after for each in upgrades],
      cost_of_one,
    )
    if not any(map(self.goal.is_reached, self.evaluations)):
      # Operations outside of these modules must stay in float32 too.
      self.measure({"**": _FLOAT32})

  def _cost_of_one_policy(self, paths: Sequence[str]) -> float:
    """Measures each later policy for all modules, and returns the cost of the first good one."""
    costs = [math.inf]
    for level, policy in enumerate(self.policies[1:], start=1):
      self.measure(dict.fromkeys(paths, policy))
      if self.goal.is_reached(self.evaluations[-1]):
        # The cost is the FLOPs, once for each position in the list of policies, as for upgrades.
        costs.append(level * sum(self.loss.flops[path] for path in paths))
    return min(costs)

  def _error_of(
    self,
    groups: Sequence[Sequence[str]],
    upgrades: Sequence[Upgrade],
    chosen: Choice,
  ) -> float:
    """Measures the error of a choice of upgrades; inf if it has too little headroom."""
    levels = levels_of(chosen, upgrades)
    every_policy = (*self.policies, _FLOAT32)
    formats = {
      path: every_policy[levels.get(i, 0)] for i, paths in enumerate(groups) for path in paths
    }
    policy_and_rules = self._policy_and_rules(formats)
    # The same rules may come from another choice, such as the first measurement.
    measured = (each for each in self.evaluations if (each.policy, each.rules) == policy_and_rules)
    choice = next(measured, None)
    if choice is None:
      self.measure(formats)
      choice = self.evaluations[-1]
    # To the search, too little headroom is an overflow.
    return choice.error if choice.headroom >= self.goal.headroom else math.inf

  def _alone(self, groups: Mapping[str, Sequence[str]], policy: Policy) -> NumpyArray:
    """Returns the expected errors of the groups in the format of a policy."""
    graph = Graph(self.loss.call.traced(under(self.loss, policy))[0])
    halves_and_wide = (*HALF_NAMES, *_WIDE)
    formats = flops_by_format(graph)
    # A recipe rounds to fewer bits than the compute dtype.
    quantised = {path for path, flops in formats.items() if flops.keys() - halves_and_wide}
    in_float32 = functools.partial(gradient, self.loss, self.loss.body)
    errors = errors_alone(in_float32, groups.values(), policy.compute_dtype, quantised)
    if policy.compute_dtype == jnp.float16:
      # An infinite error makes the search upgrade these modules first.
      tight = [any(map(self._is_tight, paths)) for paths in groups.values()]
      errors = np.where(tight, math.inf, errors)
    return errors

  def _is_tight(self, path: str) -> bool:
    """Whether the values of a module have too little headroom in float16."""
    return self.headroom.get(path, math.inf) < self.goal.headroom

  def _paths_by_rule_path(self) -> dict[str, list[str]]:
    """Returns the modules that may be upgraded, by the path that a rule matches.

    They have low-precision matmuls, or low-precision values with too little headroom.
    """
    formats = flops_by_format(self.loss.low)
    # A module with a matmul in float32 alone gains nothing from an upgrade.
    low = {path for path, flops in formats.items() if flops.keys() - _WIDE}
    groups = dict[str, list[str]]()
    for path, flops in self.loss.flops.items():
      if (flops and path in low) or self._is_tight(path):
        groups.setdefault(self.loss.rule_paths[path], []).append(path)
    return groups

  def rows(self, low: Sequence[Array]) -> Iterator[ModuleReport]:
    """Yields the errors by module, given the gradient under the first policy without rules."""
    # Compare forward passes only: gradients have a column of their own.
    of_float32, of_policy = (
      body_of(self.loss.call.traced(fn)[0])
      for fn in (self.loss.named, under(self.loss, self.policies[0]))
    )
    forward = forward_errors(of_float32, of_policy, self.loss.operands)
    # A module that is upgraded for its headroom has a row, even without a matmul or sum.
    for path in filter(self._is_tight, self.headroom):
      forward.setdefault(path, math.nan)
    readers = self.loss.plan.readers
    # Gradients belong to the floating arrays of the first argument, which come first.
    floats = (i for i, x in enumerate(self.loss.operands) if is_inexact(x))
    pairs = dict[str, list[Pair]]()
    for i, exact, rounded in zip(floats, self.exact, low, strict=False):
      # A parameter that nothing reads has a gradient of 0, and no module.
      if i in readers:
        pairs.setdefault(readers[i].path, []).append((exact, rounded))
    for row in rows_of(self.loss.flops, forward, pairs, streams_of(Graph(of_float32))):
      yield row._replace(headroom=self.headroom.get(row.path, math.nan))


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


def _check_gradient(loss: Array, gradient: Sequence[Array]) -> None:
  """Raises unless a loss and its gradient in float32 have errors that can be compared with them."""
  # NumPy's complex128 holds the squares of all float32 gradients.
  norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in gradient))
  if not (math.isfinite(norm) and norm > 0 and bool(jnp.isfinite(loss))):
    of_gradient = f"one of norm {norm}, of a loss of {float(loss):g}"
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a gradient in float32 that is finite and not zero, of a finite loss",
      got=of_gradient if gradient else "no floating array in the first argument",
      fix="Pass the parameters first. mpjax.ranges(loss_fn)(*args) shows where numbers overflow.",
    )


def cost_of(
  policies: Sequence[Policy], flops: Mapping[str, int], choice: Evaluation
) -> tuple[float, ...]:
  """Returns how far a choice is from the preferred format.

  The measured shares decide, that of float32 before the others. Choices with equal shares are
  compared by the modules that they upgrade.
  """
  # Float32 is the last resort, so its share decides first.
  wide = sum(choice.shares.get(name, 0.0) for name in _WIDE)
  levels = _levels_by_format(policies)
  # The later a format in the list of policies, the more it costs.
  below = sum(choice.shares.get(name, 0.0) * level for name, level in levels.items())
  shares = round(wide, 9), round(below, 9)  # Equal shares may differ in their last bits.
  return (*shares, *_cost_of_upgrades(policies, flops, choice))


def _levels_by_format(policies: Sequence[Policy]) -> dict[str, int]:
  """Returns the position of the first policy with a format.

  A dtype that is computed in beside a recipe is no nearer than the first policy without a recipe.
  """
  levels = dict[str, int]()
  for level, policy in enumerate(policies):
    # Several policies may have one format. The most preferred one counts.
    levels.setdefault(format_of_policy(policy), level)
  plain = (level for level, policy in enumerate(policies) if policy.matmul is None)
  beside = next(plain, len(policies) - 1)
  for policy in policies:
    levels.setdefault(compute_dtype_of(policy), beside)
  return levels


def _cost_of_upgrades(
  policies: Sequence[Policy], flops: Mapping[str, int], choice: Evaluation
) -> tuple[int, int]:
  """Returns the number of upgraded modules, and their FLOPs, once for each step of an upgrade."""
  levels = dict.fromkeys(flops, policies.index(choice.policy))
  levels |= {path: policies.index(each) for path, each in choice.others.items()}
  # The entire function in float32 is every module in float32.
  wide = flops if choice.float32 == ("**",) else choice.float32
  levels |= dict.fromkeys(wide, len(policies))
  upgraded = len(choice.float32) + len(choice.others)
  return upgraded, sum(flops[path] * level for path, level in levels.items())


def flops_by_format(graph: Graph) -> dict[str, collections.Counter[str]]:
  """Returns the FLOPs of matmuls by module and format."""
  flops = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
  for matmul, dtype, each in graph.matmuls():
    flops[matmul.where.path][format_of_matmul(matmul, dtype)] += each
  return dict(flops)


def format_of_matmul(matmul: Operation, dtype: DType) -> str:
  """Returns the name of the recipe that quantised the operands, or else of the dtype."""
  recipe = matmul.where.marked(RECIPE)
  # A recipe may leave one of the products in the compute dtype.
  is_quantised = dtype.itemsize == 1 or EMULATED in matmul.where.scopes
  return recipe.rpartition(":")[0] if recipe is not None and is_quantised else dtype.name


def shares_of(flops: Mapping[str, collections.Counter[str]]) -> dict[str, float]:
  """Returns the share of each format in the FLOPs of all modules, float32 last."""
  of_formats = sum(flops.values(), collections.Counter[str]())
  names = sorted(of_formats, key=_position_of)
  return {name: of_formats[name] / of_formats.total() for name in names}


def _position_of(name: str) -> int:
  """Returns the position of a format in a list by size: 8 bits, 16 bits, more."""
  # Other names are those of recipes, with 8 bits or fewer.
  of_16_bits_or_more = (*HALF_NAMES, *_WIDE)
  return of_16_bits_or_more.index(name) if name in of_16_bits_or_more else -1


def any_low(values: Sequence[Value]) -> bool:
  return any(value.is_low for value in values)


def rows_of(
  flops: Mapping[str, int],
  forward: Mapping[str, float],
  pairs: Mapping[str, Sequence[Pair]],
  streams: Collection[str] = (),
) -> Iterator[ModuleReport]:
  """Yields the report of each module, in the order of the function."""
  paths = dict.fromkeys((*forward, *pairs))  # A fixed order, since floating sums depend on it.
  for path in (path for path in flops if path in paths):
    inside = [other for other in paths if is_within(other, path)]
    gradient = relative_error(pair for other in inside for pair in pairs.get(other, ()))
    # A loss may have no matmuls.
    share = flops[path] / max(sum(flops.values()), 1)
    is_stream = path in streams and not share
    yield ModuleReport(path, forward.get(path, math.nan), gradient, share, is_stream)


def streams_of(graph: Graph) -> set[str]:
  """Returns the residual streams: modules that add a value to a result computed inside from it."""
  streams = set[str]()
  for each in graph.computing():
    path = each.where.path
    is_sum = each.eqn.primitive is add_p and each.where.direction == "forward"
    if is_sum and path and path not in streams:
      # The residual stream may be on either side of the sum.
      first, second = each.operands
      if _is_branch(first, second, path) or _is_branch(second, first, path):
        streams.add(path)
  return streams


def _is_branch(value: Value, start: Value, path: str) -> bool:
  """Whether modules inside of a path compute a value from another one."""
  pending = [value]
  seen = {start}
  computed_inside = False
  for each in pending:
    # Go from the result of the branch back to where it started.
    if each not in seen and each.made_by is not None:
      seen.add(each)
      computed_inside |= is_inside(each.made_by.where.path, path)
      pending += each.made_by.operands
  return computed_inside and start in pending


def modules_of(body: Body) -> dict[str, int]:
  """Returns the modules of a gradient function that compute, and the FLOPs of their matmuls."""
  flops = collections.Counter[str]()
  for step in body.every_step():
    # Loops and moves compute nothing. Their location may be outside of all modules.
    moves = step.bodies or facts_of(step.eqn).moves
    if facts_of(step.eqn).flops or (step.location.direction == "forward" and not moves):
      # A module without matmuls is counted with 0 FLOPs.
      flops[step.location.path] += (flops_of(step.eqn) or 0) * step.times
  return flops


def rules_for(
  formats: Mapping[str, Policy], rule_paths: Mapping[str, str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which some paths have some policies, and the rest of the program `policy`."""
  # All modules have one other policy, for example float32.
  others = set(formats.values()) - {policy}
  # In Linen a model of one module has no name that selects it.
  if len(others) == 1 and policy not in formats.values():
    return (Rule(*others, path="**"),)
  upgrades, kept = list[Rule](), list[Rule]()
  for path, policy_of_path in formats.items():
    # A module has the rule of the nearest one around it.
    outside = [other for other in with_enclosing([path]) & formats.keys() if other != path]
    # The longest path around a module is the nearest.
    inherited = formats[max(outside, key=len)] if outside else policy
    if policy_of_path != inherited:
      rule = Rule(_inside(policy_of_path, inherited), path=selector(path, rule_paths))
      # A rule with the base policy exempts a module from the rule around it.
      group = kept if policy_of_path == policy else upgrades
      group.append(rule)
  # Each rule selects one path, so that their order is free: upgrades are read first.
  return (*upgrades, *kept)


def _inside(policy: Policy, outer: Policy) -> Policy:
  """Returns the policy of a module inside a module with another policy.

  In low precision its results stay as they were computed. With an output dtype, a query and a key
  in float16 would be cast to float32, and their product would be a matmul of float32 inputs. A
  module in float32 runs as it was written, so that it must be given float32.
  """
  if policy == _FLOAT32:
    return policy
  output = jnp.float32 if outer == _FLOAT32 else None
  return dataclasses.replace(policy, output_dtype=output)
