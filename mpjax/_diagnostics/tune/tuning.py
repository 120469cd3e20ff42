"""`tune`: rules for what must stay in float32, for an error of the gradient that is allowed."""

import collections
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import MpjaxValueError, check_call, check_value
from mpjax._core.policy import Policy, PolicyLike, parse_policy
from mpjax._core.rules import Rule
from mpjax._core.types import Array, Function, NumpyArray
from mpjax._diagnostics.arguments import Call, check_function, gradient_of
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.measure import counted, inputs_of
from mpjax._diagnostics.ranges.plan import Input, plan
from mpjax._diagnostics.report import Pending, progress
from mpjax._diagnostics.tune.modules import (
  Modules,
  Pair,
  accuracy_of,
  is_inside,
  modules_of,
  overflows_of,
  projections_of,
  relative_error,
  rules_for,
)
from mpjax._diagnostics.tune.search import Chosen, Problem, most_evaluations, search
from mpjax._diagnostics.tune.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import body_of

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
  of a Flax model, that compute in float32. How they are found:

  1. `mpjax.ranges` gives the loss scale for float16, by which all gradients are then computed.
  2. What rounding in each module does to the gradient is computed to first order, for all modules
     at once; modules with a number that overflows in a matmul are in float32 in any case.
  3. The modules are sorted by what they help for what they cost, and the shortest list that is
     good enough is found by bisection; then some cheaper choices are tried.

  Every choice is measured, and the one that is returned with it. The most measurements that this
  may take, log2 of the number of modules and a few, is printed first. The report begins with the
  error of each module if none is in float32. Matmuls add up in float32 under autocast, and so do
  sums, so that the depth of a reduction needs no rule of its own.

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
    call = Call(args, kwargs)
    call.check_concrete("mpjax.tune(loss_fn, policy)")
    with progress("tune") as advance:
      _check_float32(call.traced(loss_fn)[0])
      scale = 1.0
      if parsed.compute_dtype == jnp.float16:
        report = counted(loss_fn, args, kwargs, differentiate=True, advance=advance)
        scale = report.loss_scale or 1.0
      tuning = _Tuning(loss_fn, parsed, tolerance, call, inputs_of(args, kwargs))
      return tuning.run(scale, advance)

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


class _Tuning:
  """One search."""

  def __init__(
    self,
    loss_fn: Function,
    policy: Policy,
    tolerance: float,
    call: Call,
    inputs: Sequence[Input | None],
  ) -> None:
    self._plain, self._loss_fn = loss_fn, with_parameter_scopes(loss_fn)
    self._policy, self._tolerance, self._call, self._inputs = policy, tolerance, call, inputs
    self.evaluations: list[Evaluation] = []

  def run(self, scale: float, advance: Callable[[int, int], None]) -> TuneReport:
    """Measures choices until the best is among them, all at a scale of the loss."""
    self._scale = scale
    program, outputs = self._call.traced(gradient_of(self._loss_fn, scale))
    # ((loss, aux), gradients).
    self._gradients = slice(sum(keys[0] == "0" for keys in outputs), None)
    body, operands = body_of(program), self._call.operands
    modules = modules_of(body)
    bound = most_evaluations(len(modules.paths))
    sys.stdout.write(f"tune: {len(modules.paths)} modules, at most {bound} measurements\n")
    self._advance = lambda: advance(len(self.evaluations), bound)
    self._advance()
    results, overflows = overflows_of(body, operands, modules, self._policy.compute_dtype)
    self._exact = results[self._gradients]
    norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in self._exact))
    if not (math.isfinite(norm) and norm > 0):
      raise MpjaxValueError(
        "mpjax.tune(loss_fn, policy)(*args)",
        expected="a gradient in float32 that is finite and not zero",
        got=f"one of norm {norm}",
        fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like.",
      )
    low = self._evaluate((), ())
    alone: NumpyArray = np.full(len(modules.paths), math.nan)
    if self.evaluations[0].error > self._tolerance:
      dtype = self._policy.compute_dtype
      projections = projections_of(body, operands, self._gradients, modules, dtype)
      alone = np.sqrt(np.mean(projections**2, axis=0))
      self._search(modules, alone, overflows)
    good = [each for each in self.evaluations if each.error <= self._tolerance]
    best = max(good, key=lambda each: (each.half_share, -len(each.float32)))
    # The named scopes of the function as the user wrote it.
    scopes = modules_of(body_of(self._call.traced(gradient_of(self._plain))[0])).scopes
    return TuneReport(
      policy=self._policy,
      tolerance=self._tolerance,
      best=best,
      evaluations=tuple(self.evaluations),
      bound=bound,
      loss_scale=scale,
      modules=self._modules(modules, alone, overflows, low),
      scopes=all(any(rule.matches(None, scope) for scope in scopes) for rule in best.rules),
    )

  def _modules(
    self, modules: Modules, alone: NumpyArray, overflows: NumpyArray, low: Sequence[Array]
  ) -> tuple[ModuleReport, ...]:
    """Returns what is known of each module, of its errors under the policy without rules first."""
    fns = self._loss_fn, autocast(self._loss_fn, self._policy)
    exact, rounded = (body_of(self._call.traced(fn)[0]) for fn in fns)
    readers = plan(exact, self._inputs).readers
    gradients: dict[str, list[Pair]] = collections.defaultdict(list)
    # The gradients are those of the floating arrays in the first argument, the first ones of all.
    floats = [i for i, one in enumerate(self._inputs) if one is not None]
    for position, pair in zip(floats, zip(self._exact, low, strict=True), strict=False):
      if position in readers:
        gradients[readers[position].path].append(pair)
    errors = accuracy_of((exact, rounded), self._call.operands, gradients)
    number = {path: i for i, path in enumerate(modules.paths)}
    total = max(sum(modules.flops), 1)
    return tuple(
      ModuleReport(
        path,
        *errors[path],
        modules.flops[i] / total,
        float(alone[i]),
        _OVERFLOWS[int(overflows[i])],
        bool(path and not modules.flops[i]) and any(is_inside(other, path) for other in errors),
      )
      for path, i in ((path, number[path]) for path in errors if path in number)
    )

  def _search(self, modules: Modules, alone: NumpyArray, overflows: NumpyArray) -> None:
    """Measures choices until the best is among them."""
    flops = np.asarray(modules.flops)
    used = np.flatnonzero((flops > 0) | (overflows > 0))
    paths = [modules.paths[i] for i in used]
    problem = Problem(tuple(flops[used].tolist()), alone[used], overflows[used], self._tolerance)

    def evaluate(chosen: Chosen) -> float:
      if chosen:
        names = [paths[i] for i in sorted(chosen)]
        others = [path for path in paths if path not in names]
        self._evaluate(tuple(names), rules_for(names, others, modules.scopes, self._policy))
        return self.evaluations[-1].error
      return self.evaluations[0].error

    if search(problem, evaluate) is None:
      # What is in no such module must stay in float32 too.
      self._evaluate(("**",), (Rule("float32", path="**"),))

  def _evaluate(self, names: tuple[str, ...], rules: tuple[Rule, ...]) -> list[Array]:
    """Measures the error of the gradient under rules, and returns the gradient."""
    cast = autocast(self._loss_fn, self._policy, rules=rules)
    program, _ = self._call.traced(gradient_of(cast, self._scale))
    gradient = run_on_host(body_of(program), self._call.operands, Look())[self._gradients]
    error = relative_error(zip(self._exact, gradient, strict=True))
    flops = [(dtype.itemsize < 4, n) for _, dtype, n in Graph(program).matmuls()]
    share = sum(n for is_low, n in flops if is_low) / max(sum(n for _, n in flops), 1)
    self.evaluations.append(Evaluation(names, rules, error, share))
    self._advance()
    return gradient


_OVERFLOWS = ("no", "maybe", "yes")
"""What the numbers of `overflows_of` mean."""
