"""`tune`: rules for what must stay in float32, for an error of the gradient that is allowed."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec

import jax.numpy as jnp
import numpy as np

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import MpjaxValueError, check_call, check_value
from mpjax._core.policy import Policy, PolicyLike, parse_policy
from mpjax._core.rules import Rule
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, Array, Function, Kwargs
from mpjax._diagnostics.arguments import Call, check_function
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.measure import counted, gradient_of
from mpjax._diagnostics.ranges.plan import inputs_of, plan
from mpjax._diagnostics.report import Pending, progress
from mpjax._diagnostics.tune.modules import (
  PROJECTIONS,
  Pair,
  errors_alone,
  forward_errors,
  is_inside,
  modules_of,
  relative_error,
  rules_for,
  scopes_of,
)
from mpjax._diagnostics.tune.search import Chosen, most_evaluations, search
from mpjax._diagnostics.tune.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import body_of

P = ParamSpec("P")

_CALL = "mpjax.tune(loss_fn, policy)"
_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'


@check_call(_CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object], policy: PolicyLike = "mixed_bfloat16", *, tolerance: float
) -> Callable[P, TuneReport]:
  """Returns a function that finds out which modules of a loss must stay in float32.

  The gradient of `loss_fn` by its first argument is computed in float32, and under
  `mpjax.autocast(loss_fn, policy, rules=rules)` for some choices of rules, until the cheapest was
  found whose relative error, the norm of the difference over the norm of the gradient, is within
  the tolerance. A choice is a set of modules with matmuls or convolutions that compute in float32.
  docs/tune.md says what the modules are and how it searches; how many choices it may measure, log2
  of the number of modules and a few, is printed first.

  Args:
    loss_fn: the plain loss in float32, of trees of arrays: of a Linen model, an NNX model (an
      argument, or merged from a state), or any JAX function. Returns a scalar, or one and aux.
    policy: computes in bfloat16 or float16.
    tolerance: the relative error of the gradient that is allowed, such as 0.01.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete, that returns a report, with
    `.rules`, `.error` and `.half_share`. Print it: it begins with the error of each module.

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
  check_function(loss_fn, "mpjax.tune(loss_fn)", _FIX)
  parsed = parse_policy(policy, "mpjax.tune(policy)")
  check_value(
    policy,
    parsed.compute_dtype in HALVES,
    "mpjax.tune(policy)",
    expected="a policy that computes in bfloat16 or float16",
    fix='Write "mixed_bfloat16" or "mixed_float16": what stays in float32 is to be found.',
  )
  check_value(
    tolerance,
    isinstance(tolerance, (int, float, np.floating)) and 0 < tolerance < math.inf,
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )

  def tuned(*args: P.args, **kwargs: P.kwargs) -> TuneReport:
    with progress("tune") as advance:
      return _tuned(loss_fn, parsed, tolerance, args, kwargs, advance)

  return Pending(tuned, "tune", loss_fn)


def _tuned(
  loss_fn: Function,
  policy: Policy,
  tolerance: float,
  args: Args,
  kwargs: Kwargs,
  advance: Callable[[int, int], None],
) -> TuneReport:
  """Measures choices until the best is among them, all at one scale of the loss."""
  call, dtype, scale, where = Call(args, kwargs), policy.compute_dtype, 1.0, f"{_CALL}(*args)"
  call.check_concrete(_CALL)

  # A loss that has low precision already, compared with itself, has no error. The loss alone: what
  # a derivative of its own keeps in low precision is no policy's.
  program = call.traced(loss_fn)[0]
  graph, named = Graph(program), scopes_of(body_of(program))
  results = (v for operation in graph.operations for v in operation.results)
  for value in (*graph.arguments, *results):
    if value.is_low:
      path = "its arguments" if value.made_by is None else value.made_by.where.path
      raise MpjaxValueError(
        where,
        expected="a loss in float32, with arguments in float32, to compare low precision with",
        got=f"{value.dtype} in {path or 'it'}",
        fix="Pass the loss of the plain model: without with_policy or autocast, without dtype= and "
        "param_dtype=, and its parameters and data as x.astype(jnp.float32).",
      )
  if dtype == jnp.float16:
    scale = counted(gradient_of(loss_fn), args, kwargs, advance).loss_scale or 1.0

  # The gradient in float32, of ((loss, aux), gradients).
  scoped, operands = with_parameter_scopes(loss_fn), [*map(jnp.asarray, call.arrays)]
  program, outputs = call.traced(gradient_of(scoped, scale))
  body, gradients = body_of(program), slice(sum(keys[0] == "0" for keys in outputs), None)
  flops = modules_of(body)
  bound = most_evaluations(len(flops))
  sys.stdout.write(f"tune: {len(flops)} modules, at most {bound} measurements\n")
  steps = itertools.count(1)

  def step() -> None:
    advance(next(steps), 1 + PROJECTIONS + bound)

  exact = run_on_host(body, operands, Look())[gradients]
  step()
  norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in exact))
  if not (math.isfinite(norm) and norm > 0):
    raise MpjaxValueError(
      where,
      expected="a gradient in float32 that is finite and not zero",
      got=f"one of norm {norm}",
      fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like.",
    )
  evaluations: list[Evaluation] = []

  def measure(names: Sequence[str], rules: tuple[Rule, ...]) -> list[Array]:
    """Measures the error of the gradient under rules, and returns the gradient."""
    cast = autocast(scoped, policy, rules=rules)
    program, _ = call.traced(gradient_of(cast, scale))
    gradient = run_on_host(body_of(program), operands, Look())[gradients]
    error = relative_error(zip(exact, gradient, strict=True))
    runs = [(dtype.itemsize < 4, count) for _, dtype, count in Graph(program).matmuls()]
    share = sum(is_low * count for is_low, count in runs) / max(sum(n for _, n in runs), 1)
    evaluations.append(Evaluation(tuple(names), rules, error, share))
    step()
    return gradient

  # The search, if there is an error that is too large.
  low, alone, used = measure((), ()), dict[str, float](), [path for path in flops if flops[path]]
  if evaluations[0].error > tolerance:
    alone = errors_alone(body, operands, gradients, flops, dtype, step)

    def evaluate(chosen: Chosen) -> float:
      if chosen:
        names = [used[i] for i in sorted(chosen)]
        others = [path for path in used if path not in names]
        measure(names, rules_for(names, others, scopes_of(body), policy))
      return evaluations[-1 if chosen else 0].error

    errors = np.asarray([alone[path] for path in used])
    if search([flops[path] for path in used], errors, tolerance, evaluate) is None:
      # What is in no such module must stay in float32 too.
      measure(("**",), (Rule("float32", path="**"),))
  good = [each for each in evaluations if each.error <= tolerance]
  best = max(good, key=lambda each: (each.half_share, -len(each.float32)))

  # The errors by module, under the policy without rules. Gradients are those of the floating arrays
  # in the first argument, the first ones of all.
  of_float32, of_policy = (body_of(call.traced(f)[0]) for f in (scoped, autocast(scoped, policy)))
  forward, pairs = forward_errors(of_float32, of_policy, operands), dict[str, list[Pair]]()
  readers = plan(body, inputs_of(args, kwargs)).readers
  floats = [i for i, x in enumerate(operands) if is_inexact(x)]
  for i, pair in zip(floats, zip(exact, low, strict=True), strict=False):
    if i in readers:
      pairs.setdefault(readers[i].path, []).append(pair)
  return TuneReport(
    policy=policy,
    tolerance=tolerance,
    **best._asdict(),
    evaluations=tuple(evaluations),
    bound=bound,
    loss_scale=scale,
    modules=tuple(rows_of(flops, forward, pairs, alone)),
    scopes=all(any(rule.matches(None, scope) for scope in named) for rule in best.rules),
  )


def rows_of(
  flops: Mapping[str, int],
  forward: Mapping[str, float],
  pairs: Mapping[str, Sequence[Pair]],
  alone: Mapping[str, float],
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
      bool(path and inside) and not flops[path],
    )
