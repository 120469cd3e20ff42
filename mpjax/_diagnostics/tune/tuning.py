"""`tune`: rules for what must stay in float32, for an error of the gradient that is allowed."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import MpjaxValueError, check_call
from mpjax._core.policy import Policy, PolicyLike
from mpjax._core.rules import Rule
from mpjax._core.types import Array, Leaf
from mpjax._core.validators import check_value
from mpjax._diagnostics.arguments import check_function
from mpjax._diagnostics.flat import Call, gradient_of
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.progress import progress
from mpjax._diagnostics.ranges.measure import ranges
from mpjax._diagnostics.tune.modules import Modules, modules_of, rules_for
from mpjax._diagnostics.tune.search import Chosen, Problem, most_evaluations, search
from mpjax._diagnostics.tune.sensitivity import Sensitivity, sensitivity
from mpjax._diagnostics.tune.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.count import half_share, products

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
  may take, log2 of the number of modules and a few, is printed first. Matmuls add up in float32
  under autocast, and so do sums, so that the depth of a reduction needs no rule of its own.

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
      the gradient is zero, or not finite in float32.

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
    call = Call(args, kwargs, "mpjax.tune(loss_fn, policy)")
    scale = 1.0
    if parsed.compute_dtype == jnp.float16:
      scale = ranges(loss_fn, differentiate=True)(*args, **kwargs).loss_scale or 1.0
    tuning = _Tuning(loss_fn, parsed, tolerance, call, scale)
    return tuning.run()

  return tuned


def _checked(loss_fn: object, policy: PolicyLike, tolerance: object) -> Policy:
  """Returns the policy, or raises if an argument is wrong."""
  where = "mpjax.tune(loss_fn)"
  check_function(loss_fn, where, _FIX)
  parsed = Policy.parse(policy)
  if parsed.compute_dtype not in HALVES:
    raise MpjaxValueError(
      "mpjax.tune(policy)",
      expected="a policy that computes in bfloat16 or float16",
      got=str(parsed),
      fix='Write "mixed_bfloat16" or "mixed_float16": what stays in float32 is to be found.',
    )
  given: Any = tolerance
  number = isinstance(given, (int, float, np.floating)) and not isinstance(given, bool)
  check_value(
    tolerance,
    number and bool(math.isfinite(given) and given > 0),
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )
  return parsed


class _Tuning:
  """One search."""

  def __init__(
    self,
    loss_fn: Callable[..., object],
    policy: Policy,
    tolerance: float,
    call: Call,
    scale: float,
  ) -> None:
    self._plain, loss_fn = loss_fn, with_parameter_scopes(loss_fn)
    self._loss_fn, self._policy, self._tolerance = loss_fn, policy, tolerance
    self._call, self._scale = call, scale
    program, outputs = call.traced(gradient_of(loss_fn, scale))
    # ((loss, aux), gradients).
    first = next(i for i, keys in enumerate(outputs) if keys[0] == "1")
    self._gradients = slice(first, len(outputs))
    self._program = program
    self._wanted = self._run(program)
    self._norm = _norm(self._wanted)
    if not (math.isfinite(self._norm) and self._norm > 0):
      raise MpjaxValueError(
        "mpjax.tune(loss_fn, policy)(*args)",
        expected="a gradient in float32 that is finite and not zero",
        got=f"one of norm {self._norm}",
        fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like.",
      )
    self.evaluations: list[Evaluation] = []

  def _run(self, program: ClosedJaxpr) -> list[Array]:
    def run(consts: Sequence[Array], operands: Sequence[Array]) -> list[Leaf]:
      return eval_jaxpr(program.jaxpr, consts, *operands)[self._gradients]

    return jax.jit(run)(program.consts, self._call.operands)

  def run(self) -> TuneReport:
    modules = modules_of(self._program.jaxpr)
    bound = most_evaluations(len(modules.paths))
    sys.stdout.write(f"tune: {len(modules.paths)} modules, at most {bound} measurements\n")
    with progress("tune") as advance:
      found = self._search(modules, lambda: advance(len(self.evaluations), bound))
    good = [each for each in self.evaluations if each.error <= self._tolerance]
    best = max(good, key=lambda each: (each.half_share, -len(each.float32)))
    return TuneReport(
      policy=self._policy,
      tolerance=self._tolerance,
      best=best,
      evaluations=tuple(self.evaluations),
      bound=bound,
      loss_scale=self._scale,
      modules=found,
      scopes=self._are_scopes(best.rules),
    )

  def _are_scopes(self, rules: Sequence[Rule]) -> bool:
    """Whether each rule selects a named scope of the function as the user wrote it."""
    if not rules:
      return True
    program, _ = self._call.traced(gradient_of(self._plain))
    scopes = modules_of(program.jaxpr).scopes
    return all(any(rule.matches(None, scope) for scope in scopes) for rule in rules)

  def _search(self, modules: Modules, advance: Callable[[], None]) -> tuple[ModuleReport, ...]:
    """Measures choices until the best is among them, and returns what is known of the modules."""
    self._evaluate((), ())
    advance()
    if self.evaluations[0].error <= self._tolerance:
      return ()
    dtype = self._policy.compute_dtype
    found = sensitivity(self._program, self._call.operands, self._gradients, modules, dtype)
    flops, overflows = np.asarray(modules.flops), found.overflows
    used = np.flatnonzero((flops > 0) | (overflows > 0))
    paths = [modules.paths[i] for i in used]
    problem = Problem(
      tuple(flops[used].tolist()),
      Sensitivity(found.projections[:, used], overflows[used], found.exact),
      self._tolerance,
    )

    def evaluate(chosen: Chosen) -> float:
      if chosen:
        names = [paths[i] for i in sorted(chosen)]
        others = [path for path in paths if path not in names]
        rules = rules_for(names, others, modules.scopes, self._policy)
        self._evaluate(tuple(names), rules)
        advance()
        return self.evaluations[-1].error
      return self.evaluations[0].error

    if search(problem, evaluate) is None:
      # What is in no such module must stay in float32 too.
      self._evaluate(("**",), (Rule("float32", path="**"),))
    return _module_reports(problem, paths, modules)

  def _evaluate(self, names: tuple[str, ...], rules: tuple[Rule, ...]) -> None:
    """Measures the error of the gradient under rules."""
    cast = autocast(self._loss_fn, self._policy, rules=rules)
    program, _ = self._call.traced(gradient_of(cast, self._scale))
    difference = [a - b for a, b in zip(self._run(program), self._wanted, strict=True)]
    error = _norm(difference) / self._norm
    share = half_share(products(program))
    finite = error if math.isfinite(error) else math.inf
    self.evaluations.append(Evaluation(names, rules, finite, 0.0 if math.isnan(share) else share))


def _norm(tree: Sequence[Array]) -> float:
  """Returns the length of a gradient, in float64."""
  parts = [np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else float) for x in tree]
  with np.errstate(invalid="ignore", over="ignore"):
    return math.sqrt(sum(float(np.sum(np.abs(x) ** 2)) for x in parts))


_OVERFLOWS = ("no", "maybe", "yes")
"""What `Sensitivity.overflows` means."""


def _module_reports(
  problem: Problem, paths: Sequence[str], modules: Modules
) -> tuple[ModuleReport, ...]:
  total = max(sum(modules.flops), 1)
  alone = np.sqrt(np.mean(problem.sensitivity.projections**2, axis=0))
  return tuple(
    ModuleReport(path, flops / total, float(error), _OVERFLOWS[int(over)])
    for path, flops, error, over in zip(
      paths, problem.flops, alone, problem.sensitivity.overflows, strict=True
    )
  )
