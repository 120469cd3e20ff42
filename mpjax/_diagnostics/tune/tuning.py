"""`tune`: rules for what must stay in float32, for an error of the gradient that is allowed."""

import collections
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import MpjaxValueError, check_call, check_value
from mpjax._core.policy import Policy, PolicyLike, parse_policy
from mpjax._core.rules import Rule
from mpjax._core.types import Args, Array, Function, Kwargs
from mpjax._diagnostics.arguments import Call, check_function, gradient_of
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.measure import counted, inputs_of
from mpjax._diagnostics.ranges.plan import Input, plan
from mpjax._diagnostics.report import Pending, progress
from mpjax._diagnostics.tune.modules import (
  Pair,
  errors_alone,
  forward_errors,
  is_inside,
  modules_of,
  overflows_of,
  relative_error,
  rules_for,
  scopes_of,
)
from mpjax._diagnostics.tune.search import Chosen, Problem, most_evaluations, search
from mpjax._diagnostics.tune.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import Body, body_of

P = ParamSpec("P")

_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'


@check_call("mpjax.tune(loss_fn, policy)", fix=_FIX)
def tune(
  loss_fn: Callable[P, object], policy: PolicyLike = "mixed_bfloat16", *, tolerance: float
) -> Callable[P, TuneReport]:
  """Returns a function that finds out which modules of a loss must stay in float32.

  The gradient of `loss_fn` by its first argument is computed in float32, and under
  `mpjax.autocast(loss_fn, policy, rules=rules)` for some choices of rules, until the cheapest was
  found whose relative error, the norm of the difference over the norm of the gradient, is within
  the tolerance. A choice is a set of named scopes with matmuls or convolutions, such as the layers
  of a Flax model, that compute in float32. docs/tune.md says how it searches; how many choices it
  may measure, log2 of the number of modules and a few, is printed first. The report begins with the
  error of each module if none is in float32.

  Args:
    loss_fn: the plain loss in float32, of trees of arrays: of a Linen model, an NNX model (an
      argument, or merged from a state), or any JAX function. Returns a scalar, or one and aux. Its
      named scopes are the modules: Linen writes them. Where there is none, as in NNX, an operation
      is in the module whose parameter it takes, and one on what two modules return in the one
      around both.
    policy: computes in bfloat16 or float16.
    tolerance: the relative error of the gradient that is allowed, such as 0.01.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete, that returns a report, with
    `.rules`, `.error` and `.half_share`. Print it, or call `.plot()`.

  Raises:
    MpjaxTypeError: an argument has the wrong type; when called: an argument is traced.
    MpjaxValueError: the policy computes in float32, or the tolerance is not positive; when called:
      the loss has low precision already, or its gradient is zero, or not finite in float32.

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
  (Rule('params=float32,compute=float32,output=float32', path='**/hot'),)
  """
  parsed = _checked(loss_fn, policy, tolerance)

  def tuned(*args: P.args, **kwargs: P.kwargs) -> TuneReport:
    with progress("tune") as advance:
      return _tuned(loss_fn, parsed, tolerance, args, kwargs, advance)

  return Pending(tuned, "tune", loss_fn)


def _checked(loss_fn: object, policy: PolicyLike, tolerance: object) -> Policy:
  where = "mpjax.tune(loss_fn)"
  check_function(loss_fn, where, _FIX)
  parsed = parse_policy(policy, "mpjax.tune(policy)")
  if parsed.compute_dtype not in HALVES:
    raise MpjaxValueError(
      "mpjax.tune(policy)",
      expected="a policy that computes in bfloat16 or float16",
      got=str(parsed),
      fix='Write "mixed_bfloat16" or "mixed_float16": what stays in float32 is to be found.',
    )
  number: Any = tolerance
  is_number = isinstance(number, (int, float, np.floating)) and not isinstance(number, bool)
  check_value(
    tolerance,
    is_number and bool(math.isfinite(number) and number > 0),
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )
  return parsed


def _check_float32(program: ClosedJaxpr) -> None:
  """Raises MpjaxValueError if a function has low precision already: its error is no news."""
  graph = Graph(program)
  results = (v for operation in graph.operations for v in operation.results)
  for value in (*graph.arguments, *results):
    if value.is_low:
      where = "its arguments" if value.made_by is None else value.made_by.where.path
      raise MpjaxValueError(
        "mpjax.tune(loss_fn, policy)(*args)",
        expected="a loss in float32, with arguments in float32, to compare low precision with",
        got=f"{value.dtype} in {where or 'it'}",
        fix="Pass the loss of the plain model: without with_policy or autocast, without dtype= and "
        "param_dtype=, and its parameters and data as x.astype(jnp.float32).",
      )


def _tuned(
  loss_fn: Function,
  policy: Policy,
  tolerance: float,
  args: Args,
  kwargs: Kwargs,
  advance: Callable[[int, int], None],
) -> TuneReport:
  """Measures choices until the best is among them, all at one scale of the loss."""
  call, dtype, scale = Call(args, kwargs), policy.compute_dtype, 1.0
  call.check_concrete("mpjax.tune(loss_fn, policy)")
  # The loss alone: what a derivative of its own keeps in low precision is no policy's.
  _check_float32(call.traced(loss_fn)[0])
  if dtype == jnp.float16:
    scale = counted(loss_fn, args, kwargs, True, advance).loss_scale or 1.0

  # The gradient in float32, of ((loss, aux), gradients), and what overflows.
  scoped = with_parameter_scopes(loss_fn)
  program, outputs = call.traced(gradient_of(scoped, scale))
  gradients = slice(sum(keys[0] == "0" for keys in outputs), None)
  body, operands = body_of(program), call.operands
  flops = modules_of(body)
  bound = most_evaluations(len(flops))
  sys.stdout.write(f"tune: {len(flops)} modules, at most {bound} measurements\n")
  advance(0, bound)
  results, overflows = overflows_of(body, operands, dtype)
  exact = results[gradients]
  norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in exact))
  if not (math.isfinite(norm) and norm > 0):
    raise MpjaxValueError(
      "mpjax.tune(loss_fn, policy)(*args)",
      expected="a gradient in float32 that is finite and not zero",
      got=f"one of norm {norm}",
      fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like.",
    )
  evaluations: list[Evaluation] = []

  def measure(names: tuple[str, ...], rules: tuple[Rule, ...]) -> list[Array]:
    """Measures the error of the gradient under rules, and returns the gradient."""
    cast = autocast(scoped, policy, rules=rules)
    program, _ = call.traced(gradient_of(cast, scale))
    gradient = run_on_host(body_of(program), operands, Look())[gradients]
    error = relative_error(zip(exact, gradient, strict=True))
    runs = [(dtype.itemsize < 4, count) for _, dtype, count in Graph(program).matmuls()]
    low = sum(count for is_low, count in runs if is_low)
    share = low / max(sum(count for _, count in runs), 1)
    evaluations.append(Evaluation(names, rules, error, share))
    advance(len(evaluations), bound)
    return gradient

  # The search, if there is an error that is too large.
  low, alone = measure((), ()), dict[str, float]()
  if evaluations[0].error > tolerance:
    alone = errors_alone(body, operands, gradients, flops, dtype)
    used, scopes = [path for path in flops if flops[path] or path in overflows], scopes_of(body)

    def evaluate(chosen: Chosen) -> float:
      if chosen:
        names = [used[i] for i in sorted(chosen)]
        others = [path for path in used if path not in names]
        measure(tuple(names), rules_for(names, others, scopes, policy))
      return evaluations[-1 if chosen else 0].error

    problem = Problem(
      tuple(flops[path] for path in used),
      np.asarray([alone[path] for path in used]),
      np.asarray([overflows.get(path, 0) for path in used]),
      tolerance,
    )
    if search(problem, evaluate) is None:
      # What is in no such module must stay in float32 too.
      measure(("**",), (Rule("float32", path="**"),))
  good = [each for each in evaluations if each.error <= tolerance]
  best = max(good, key=lambda each: (each.half_share, -len(each.float32)))

  # The errors by module, under the policy without rules.
  of_float32, of_policy = (body_of(call.traced(f)[0]) for f in (scoped, autocast(scoped, policy)))
  forward = forward_errors(of_float32, of_policy, operands)
  pairs = _by_module(body, inputs_of(args, kwargs), [*zip(exact, low, strict=True)])
  # The named scopes of the function as the user wrote it.
  named = scopes_of(body_of(call.traced(gradient_of(loss_fn))[0]))
  return TuneReport(
    policy=policy,
    tolerance=tolerance,
    **best._asdict(),
    evaluations=tuple(evaluations),
    bound=bound,
    loss_scale=scale,
    modules=tuple(rows_of(flops, forward, pairs, alone, overflows)),
    scopes=all(any(rule.matches(None, scope) for scope in named) for rule in best.rules),
  )


def _by_module(
  body: Body, inputs: Sequence[Input | None], pairs: Sequence[Pair]
) -> Mapping[str, Sequence[Pair]]:
  """Returns the gradients of the parameters of each module."""
  # They are those of the floating arrays in the first argument, the first ones of all.
  floats = [i for i, one in enumerate(inputs) if one is not None]
  readers, modules = plan(body, inputs).readers, collections.defaultdict[str, list[Pair]](list)
  for position, pair in zip(floats, pairs, strict=False):
    if position in readers:
      modules[readers[position].path].append(pair)
  return modules


_OVERFLOWS = ("no", "maybe", "yes")
"""What the numbers of `overflows_of` mean."""


def rows_of(
  flops: Mapping[str, int],
  forward: Mapping[str, float],
  pairs: Mapping[str, Sequence[Pair]],
  alone: Mapping[str, float],
  overflows: Mapping[str, int],
) -> Iterator[ModuleReport]:
  """Yields what is known of each module, in the order of the function."""
  total, paths = max(sum(flops.values()), 1), dict.fromkeys((*forward, *pairs))
  for path in (path for path in flops if path in paths):
    inside = [other for other in paths if is_inside(other, path)]
    yield ModuleReport(
      path,
      forward.get(path, math.nan),
      relative_error(pair for other in (path, *inside) for pair in pairs.get(other, ())),
      flops[path] / total,
      alone.get(path, math.nan),
      _OVERFLOWS[overflows.get(path, 0)],
      bool(path and inside) and not flops[path],
    )
