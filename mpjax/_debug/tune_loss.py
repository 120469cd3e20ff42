"""The loss that `tune` measures: its programs, its modules, and its gradient in float32."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxValueError
from mpjax._core.types import Args, Array, Function, Kwargs
from mpjax._debug.arguments import Call, with_parameter_scopes
from mpjax._debug.expectations import check_float32, lows_of
from mpjax._debug.headroom import in_float16, watch_float32_values
from mpjax._debug.module_names import with_models_under
from mpjax._debug.not_entered import find_kernels
from mpjax._debug.ranges import gradient_of, ranges_of_call
from mpjax._debug.ranges_plan import Plan, plan
from mpjax._debug.ranges_report import HEADROOM
from mpjax._debug.report import Advance
from mpjax._debug.selectors import rule_paths_of
from mpjax._debug.tune_errors import relative_error
from mpjax._debug.tune_modules import modules_of
from mpjax._debug.tune_report import Evaluation
from mpjax._debug.tune_search import MORE
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, body_of
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

CALL = "mpjax.tune(loss_fn, policy)"


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


def run_gradient(loss: TunedLoss, body: Body, look: Look) -> list[Array]:
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
  low = {each.where.path for each in loss.low.operations if any(v.is_low for v in each.results)}
  return Reference(exact, {path: in_float16(x) for path, x in largest.items() if path in low})


def _check_repeats(loss: TunedLoss, reference: Reference) -> None:
  """Raises unless a loss, traced and run again, has the same gradient.

  On an accelerator the order of additions may differ from run to run.
  """
  # Trace again: a number that Python code draws shows only in a new trace.
  again = run_gradient(loss, body_of(gradient_program(loss, loss.named)), Look())
  error = relative_error(zip(reference.gradient, again, strict=True))
  # A difference between runs must be small against the errors that are measured.
  if error > loss.tuned.goal.tolerance / 10:
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
