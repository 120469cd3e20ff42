"""Measure choices of formats for the modules of a loss, until one is good enough."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from mpjax._core.types import HALF_NAMES, Array, NumpyArray, is_inexact
from mpjax._debug.headroom import in_float16, watch_float16_values
from mpjax._debug.tune_errors import Pair, errors_alone, forward_errors, relative_error
from mpjax._debug.tune_formats import FLOAT32_POLICY, WIDE_FORMATS, flops_by_format, shares_of
from mpjax._debug.tune_loss import Reference, TunedLoss, gradient_program, run_gradient, under
from mpjax._debug.tune_modules import rows_of, streams_of
from mpjax._debug.tune_report import Evaluation, ModuleReport
from mpjax._debug.tune_rules import rules_for
from mpjax._debug.tune_search import Choice, Upgrade, levels_of, search, upgrades_of
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import body_of
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule


class Tuner:
  """Measures the gradient of one loss, for some choices of formats.

  Attributes:
    headroom: by path, how many times values may grow in float16. Measurements lower it.
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
    low = run_gradient(self.loss, body_of(program), watch_float16_values(largest))
    # Without rules every module runs under the policy, so all headroom is measured.
    if not rules:
      self._note_headroom(largest)
    shares_of_flops = shares_of(flops)
    others = {path: each for path, each in formats.items() if each not in (policy, FLOAT32_POLICY)}
    self.evaluations.append(
      Evaluation(
        float32=tuple(path for path, each in formats.items() if each == FLOAT32_POLICY),
        rules=rules,
        error=relative_error(zip(self.exact, low, strict=True)),
        half_share=sum(
          share for name, share in shares_of_flops.items() if name not in WIDE_FORMATS
        ),
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
      self.measure({"**": FLOAT32_POLICY})

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
    every_policy = (*self.policies, FLOAT32_POLICY)
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
    halves_and_wide = (*HALF_NAMES, *WIDE_FORMATS)
    formats = flops_by_format(graph)
    # A recipe rounds to fewer bits than the compute dtype.
    quantised = {path for path, flops in formats.items() if flops.keys() - halves_and_wide}
    in_float32 = functools.partial(run_gradient, self.loss, self.loss.body)
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
    low = {path for path, flops in formats.items() if flops.keys() - WIDE_FORMATS}
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
