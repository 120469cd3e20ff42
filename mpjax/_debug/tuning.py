"""`tune`: rules for the modules that must stay in float32 for a tolerated error of the gradient."""

import collections
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast import autocast
from mpjax._core.errors import REFUSALS, MpjaxValueError, check_call, check_value
from mpjax._core.trees import is_inexact
from mpjax._core.types import HALVES, Args, Array, DType, Function, Kwargs, NumpyArray, P, PyTree
from mpjax._debug.arguments import Call, with_parameter_scopes
from mpjax._debug.ranges_measure import gradient_of, ranges_of_call
from mpjax._debug.ranges_plan import plan
from mpjax._debug.report import Advance, Pending
from mpjax._debug.selectors import homes_of, selector
from mpjax._debug.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._debug.tune_search import MORE, search
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.graph import Graph, Value
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import shape_of
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, Step, body_of
from mpjax._policy.policy import Policy, PolicyLike, parse_policy
from mpjax._policy.rules import Rule, around
from mpjax.linen import policy_scope
from mpjax.nnx._with_policy import views_of

_CALL = "mpjax.tune(loss_fn, policy)"
_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'

PROJECTIONS = 16
"""Random projections of the gradient: the error of a module is known within sqrt(1 / (2 * 16)),
18 %."""

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""An exact array, and the same with an error."""


class ModuleResult(NamedTuple):
  """The result of a matmul or sum, and the path of its module."""

  path: str
  array: Array


@check_call(_CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object], policy: PolicyLike = "mixed_bfloat16", *, tolerance: float
) -> Callable[P, TuneReport]:
  """Find the modules of a loss that must stay in float32.

  The gradient of `loss_fn` by its first argument is computed in float32, and then under the policy
  with some modules in float32. The search ends with the cheapest choice of modules whose relative
  error is within the tolerance: the norm of the difference over the norm of the gradient. Models of
  Linen, and of NNX in the arguments, run as under `mpjax.with_policy`; a loss without any runs as
  under `mpjax.autocast`. How many choices it may measure is printed first. docs/tune.md says what
  the modules are and how it searches.

  Args:
    loss_fn: the plain loss in float32, of a Linen model, an NNX model (an argument, or merged from
      a state), or any function of trees of arrays. Returns a scalar, or one and aux.
    policy: computes in bfloat16 or float16.
    tolerance: the relative error of the gradient that is allowed, such as 0.01.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete. It returns a report with
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
  (mpjax.Rule("float32", path="**/hot"),)
  """
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
    isinstance(tolerance, (int, float, np.floating))
    and 0 < tolerance < math.inf
    and tolerance is not True,
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )
  return Pending("mpjax.tune(loss_fn)", loss_fn, functools.partial(_tuned, parsed, tolerance), _FIX)


def _tuned(
  policy: Policy, tolerance: float, loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance
) -> TuneReport:
  """Measures choices until the best is among them, all at one scale of the loss."""
  tuner = Tuner(policy, loss_fn, args, kwargs, advance)
  low = tuner.measure((), ())
  if tuner.evaluations[0].error > tolerance:
    tuner.search(tolerance)
  good = [each for each in tuner.evaluations if each.error <= tolerance]
  best = max(good, key=lambda each: (each.half_share, -len(each.float32)))
  return TuneReport(
    policy=policy,
    tolerance=tolerance,
    **best._asdict(),
    evaluations=tuple(tuner.evaluations),
    bound=tuner.bound,
    loss_scale=tuner.scale,
    modules=tuple(tuner.rows(low)),
    models=tuner.has_models,
  )


class Tuner:
  """Measures the gradient of one loss, for some choices of modules in float32.

  Attributes:
    flops: the modules, by path, and the FLOPs of their matmuls.
    homes: by path, the path that rules match there.
    exact: the gradient in float32.
    bound: how many choices may be measured.
    evaluations: what was measured.
  """

  def __init__(
    self, policy: Policy, loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance
  ) -> None:
    self.policy, self.loss_fn = policy, loss_fn
    self.call = Call(args, kwargs, _CALL)
    self.call.check_concrete()
    _check_float32(Graph(self.call.traced(loss_fn)[0]))
    with_policy = with_models_under(loss_fn, policy, ())
    self.has_models = bool(lows_of(Graph(self.call.traced(with_policy)[0])))
    self.scale = 1.0
    if policy.compute_dtype == jnp.float16:
      report = ranges_of_call(gradient_of(loss_fn), args, kwargs, advance)
      self.scale = report.loss_scale or 1.0

    # The loss in float32, in which the modules have the paths that rules match.
    if self.has_models:
      self.named = with_models_under(loss_fn, None, ())
    else:
      self.named = with_parameter_scopes(loss_fn)
    program, outputs = self.call.traced(gradient_of(self.named, self.scale))
    self.body = body_of(program)
    self.operands = [*map(jnp.asarray, self.call.arrays)]
    # The results are those of ((loss, aux), gradients).
    self._gradients = slice(sum(path[0] == "0" for path in outputs), None)
    self.flops, self.homes = modules_of(self.body), homes_of(Graph(self.body))

    # Nothing in float32, the modules that overflow, all modules, and the entire function; the
    # bisection between; and the choices that may be cheaper.
    self.bound = 4 + math.ceil(math.log2(max(len(self.flops), 1))) + MORE
    sys.stdout.write(f"tune: {len(self.flops)} modules, at most {self.bound} measurements\n")
    self.evaluations = list[Evaluation]()
    self._advance, self._steps = advance, itertools.count(1)
    self.exact = self.gradient(self.body, Look())
    self.step()
    _check_gradient(self.exact)

  def step(self) -> None:
    """Shows that one more gradient was computed."""
    self._advance(next(self._steps), 1 + PROJECTIONS + self.bound)

  def gradient(self, body: Body, look: Look) -> list[Array]:
    """Returns the gradient that a program computes, while something looks at it."""
    return run_on_host(body, self.operands, look)[self._gradients]

  def under(self, rules: tuple[Rule, ...]) -> Function:
    """Returns the loss under the policy and some rules."""
    if self.has_models:
      return with_models_under(self.loss_fn, self.policy, rules)
    return autocast(self.named, self.policy, rules=rules)

  def measure(self, paths: Iterable[str], rules: tuple[Rule, ...]) -> list[Array]:
    """Returns the gradient if some paths are in float32 by these rules, and notes its error."""
    program, _ = self.call.traced(gradient_of(self.under(rules), self.scale))
    low = self.gradient(body_of(program), Look())
    error = relative_error(zip(self.exact, low, strict=True))
    self.evaluations.append(Evaluation(tuple(paths), rules, error, _half_share(Graph(program))))
    self.step()
    return low

  def search(self, tolerance: float) -> None:
    """Measures choices until one with an error within the tolerance is among them."""
    groups = self._paths_by_home()
    costs = [sum(self.flops[path] for path in paths) for paths in groups.values()]
    gradient = functools.partial(self.gradient, self.body)
    alone = errors_alone(gradient, groups.values(), self.policy.compute_dtype, self.step)
    if search(costs, alone, tolerance, functools.partial(self._error_of, groups)) is None:
      # Operations outside of these modules must stay in float32 too.
      self.measure(("**",), (Rule("float32", path="**"),))

  def _error_of(self, groups: Mapping[str, Sequence[str]], chosen: frozenset[int]) -> float:
    """Measures the error if the groups with some numbers are in float32."""
    if not chosen:  # It was measured first.
      return self.evaluations[0].error
    wide = [name for i, name in enumerate(groups) if i in chosen]
    others = [name for i, name in enumerate(groups) if i not in chosen]
    paths = [path for name in wide for path in groups[name]]
    self.measure(paths, rules_for(wide, others, self.homes, self.policy))
    return self.evaluations[-1].error

  def _paths_by_home(self) -> dict[str, list[str]]:
    """Returns the modules with low-precision matmuls, by the path that a rule matches."""
    graph = Graph(body_of(self.call.traced(self.under(()))[0]))
    low = {operation.where.path for operation, dtype, _ in graph.matmuls() if dtype.itemsize < 4}
    groups = dict[str, list[str]]()
    for path, flops in self.flops.items():
      if flops and path in low:
        groups.setdefault(self.homes[path], []).append(path)
    return groups

  def rows(self, low: Sequence[Array]) -> Iterator[ModuleReport]:
    """Yields the errors by module, given the gradient under the policy without rules."""
    of_float32, of_policy = (
      body_of(self.call.traced(fn)[0]) for fn in (self.named, self.under(()))
    )
    forward = forward_errors(of_float32, of_policy, self.operands)
    readers = plan(self.body, self.call.arguments(self.loss_fn)).readers
    # Gradients are those of the floating arrays in the first argument, the first ones of all.
    floats = (i for i, x in enumerate(self.operands) if is_inexact(x))
    pairs = dict[str, list[Pair]]()
    for i, exact, rounded in zip(floats, self.exact, low, strict=False):
      if i in readers:
        pairs.setdefault(readers[i].path, []).append((exact, rounded))
    return rows_of(self.flops, forward, pairs)


def _check_float32(graph: Graph) -> None:
  """Raises if a loss has low precision already: compared with itself, it would have no error.

  The loss is traced without its gradient, since a derivative rule of its own may round.
  """
  for value in lows_of(graph):
    path = "its arguments" if value.made_by is None else value.made_by.where.path
    raise MpjaxValueError(
      f"{_CALL}(*args)",
      expected="a loss in float32, with arguments in float32, to compare low precision with",
      got=f"{value.dtype} in {path or 'it'}",
      fix="Pass the loss of the plain model: without with_policy or autocast, without dtype= and "
      "param_dtype=, and its parameters and data as x.astype(jnp.float32).",
    )


def _check_gradient(gradient: Sequence[Array]) -> None:
  """Raises unless a gradient in float32 has errors that can be compared with it."""
  norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in gradient))
  if not (math.isfinite(norm) and norm > 0):
    raise MpjaxValueError(
      f"{_CALL}(*args)",
      expected="a gradient in float32 that is finite and not zero",
      got=f"one of norm {norm}" if gradient else "no floating array in the first argument",
      fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like; pass parameters first.",
    )


def _half_share(graph: Graph) -> float:
  """Returns the share of the FLOPs of matmuls that are in low precision."""
  low = total = 0
  for _, dtype, flops in graph.matmuls():
    total += flops
    if dtype.itemsize < 4:
      low += flops
  return low / max(total, 1)


def lows_of(graph: Graph) -> list[Value]:
  results = (v for operation in graph.operations for v in operation.results)
  return [v for v in (*graph.arguments, *results) if v.is_low]


def with_models_under(fn: Function, policy: Policy | None, rules: tuple[Rule, ...]) -> Function:
  """Returns a function whose models of Flax run under a policy, as `mpjax.with_policy` has them."""

  def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
    args, kwargs = views_of((args, kwargs), policy, rules)
    with policy_scope(policy, rules, unmatched="ignore"):
      return fn(*args, **kwargs)

  return run


def rows_of(
  flops: Mapping[str, int], forward: Mapping[str, float], pairs: Mapping[str, Sequence[Pair]]
) -> Iterator[ModuleReport]:
  """Yields what is known of each module, in the order of the function."""
  paths = dict.fromkeys((*forward, *pairs))  # In an order: the errors inside a module are summed.
  for path in (path for path in flops if path in paths):
    inside = [other for other in paths if path in around([other])]  # Itself is one.
    gradient = relative_error(pair for other in inside for pair in pairs.get(other, ()))
    share = flops[path] / max(sum(flops.values()), 1)
    stream = bool(path) and len(inside) > 1 and not share
    yield ModuleReport(path, forward.get(path, math.nan), gradient, share, stream)


def modules_of(body: Body) -> dict[str, int]:
  """Returns the modules of a gradient function that compute, and the FLOPs of their matmuls."""
  flops = collections.Counter[str]()
  for step in body.every_step():
    moves = step.bodies or facts_of(step.eqn).moves
    if facts_of(step.eqn).flops or (step.location.direction == "forward" and not moves):
      flops[step.location.path] += (flops_of(step.eqn) or 0) * step.times
  return flops


def rules_for(
  chosen: Collection[str], others: Collection[str], homes: Mapping[str, str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which chosen modules compute in float32, and others as the policy says."""
  # In Linen a model of one module has no name that selects it.
  if not others:
    return (Rule("float32", path="**"),)
  wide, rules = {**dict.fromkeys(chosen, True), **dict.fromkeys(others, False)}, list[Rule]()
  for path, is_wide in wide.items():
    # A module has the rule of the nearest one around it.
    outside = [other for other in around([path]) & wide.keys() if other != path]
    if is_wide != (bool(outside) and wide[max(outside, key=len)]):
      rules.append(Rule("float32" if is_wide else policy, path=selector(path, homes)))
  return tuple(rules)


def relative_error(pairs: Iterable[Pair]) -> float:
  """Returns the length of the difference over the length of the first ones; NaN of nothing."""
  difference = total = 0.0
  for exact, x in pairs:
    wide = complex if np.iscomplexobj(exact) else float
    a, b = np.asarray(exact).astype(wide), np.asarray(x).astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
      difference += float(np.sum(np.abs(b - a) ** 2))
      total += float(np.sum(np.abs(a) ** 2))
  if not math.isfinite(difference):
    return math.inf
  return math.sqrt(difference / total) if total else math.nan


def forward_errors(exact: Body, low: Body, operands: Sequence[Array]) -> dict[str, float]:
  """Returns by module the error of the worst matmul or sum of a loss under a policy.

  Results are paired by primitive, shape and order, which a policy does not change. It may change
  their scopes: what it casts can be put into calls.
  """
  rounded, worst = _matmuls_and_sums(low, operands), dict[str, float]()
  for alike, results in _matmuls_and_sums(exact, operands).items():
    others = rounded[alike] if len(results) == len(rounded[alike]) else ()
    for result, other in zip(results, others, strict=False):
      error = relative_error([(result.array, other.array)])
      worst[result.path] = max(worst.get(result.path, 0.0), error)
  return worst


def _matmuls_and_sums(
  body: Body, operands: Sequence[Array]
) -> Mapping[Hashable, list[ModuleResult]]:
  """Returns the results of matmuls and of sums, by primitive and shape, in the order of the run."""
  results = collections.defaultdict[Hashable, list[ModuleResult]](list)

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    facts = facts_of(step.eqn)
    return outs[:1] if facts.flops is not None or facts.gradient == "added" else ()

  def see(step: Step, picked: Sequence[Array]) -> None:
    alike = step.eqn.primitive.name, shape_of(step.eqn.outvars[0])
    results[alike].append(ModuleResult(step.location.path, picked[0]))

  run_on_host(body, operands, Look(pick=pick, see=see))
  return results


@jax.custom_jvp
def _moved(x: Array, eps: Array, error: Array) -> Array:
  """Returns `x + eps * error` at `eps` 0, where the error may be infinite."""
  return x


@_moved.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
  return primals[0], tangents[0] + tangents[1] * primals[2]


def _rounded(dtype: DType, eps: Array, x: Array) -> Array:
  """Returns `x + eps * (rounded(x) - x)`, at `eps` 0; arrays of other dtypes are not rounded."""
  if x.dtype != jnp.float32:
    return x
  fixed = jax.lax.stop_gradient(x)
  error = fixed.astype(dtype).astype(jnp.float32) - fixed
  return _moved(x, eps, jnp.where(jnp.isfinite(fixed), error, jnp.zeros_like(x)))


def errors_alone(
  gradient: Callable[[Look], Sequence[Array]],
  modules: Collection[Sequence[str]],
  dtype: DType,
  advance: Callable[[], None],
) -> NumpyArray:
  """Returns how far the gradient in float32 moves if a module rounds, and nothing else does.

  A module is a sequence of paths. The error is infinite where an operand or result of one of its
  matmuls overflows. The errors are found to first order, for all modules together: every matmul of
  the forward and backward pass takes and returns `x + eps * (rounded(x) - x)`, with one `eps` for
  each module, which is 0. The derivative of the gradient with respect to `eps` is the error that
  the module causes. It has the size of the gradient, for each module. Instead, the derivatives of a
  few random projections of the gradient are computed: one forward pass, and one backward pass for
  each projection.
  """
  module_of = {path: i for i, paths in enumerate(modules) for path in paths}

  def perturbed(eps: Array) -> Sequence[Array]:
    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      module = module_of.get(step.location.path)
      if module is None or facts_of(step.eqn).flops is None:
        return bind(step.eqn, values)
      rounded = functools.partial(_rounded, dtype, eps[module])
      first, *rest = bind(step.eqn, [*map(rounded, values[:2]), *values[2:]])
      return [rounded(first), *rest]

    return gradient(Look(compute))

  try:
    grads, pullback = jax.vjp(perturbed, jnp.zeros(len(modules), jnp.float32))
  except REFUSALS as error:
    _warn_of_refusal(error)
    return np.ones(len(modules))
  norm = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads))
  squares = np.zeros(len(modules))
  for key in jax.random.split(jax.random.key(0), PROJECTIONS):
    (derivative,) = pullback(_random_like(grads, key))
    squares += (np.asarray(derivative, np.float64) / norm) ** 2
    advance()
  return np.sqrt(np.nan_to_num(squares, nan=math.inf, posinf=math.inf) / PROJECTIONS)


def _random_like(grads: Sequence[Array], key: Array) -> list[Array]:
  keys = (jax.random.fold_in(key, i) for i in range(len(grads)))
  pairs = zip(keys, grads, strict=True)
  return [jax.random.normal(each, g.shape).astype(g.dtype) for each, g in pairs]


def _warn_of_refusal(error: Exception) -> None:
  warnings.warn(
    "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated, so that modules with "
    f"few FLOPs are tried first ({type(error).__name__}: {str(error).splitlines()[0]}). What is "
    "returned is measured all the same.",
    UserWarning,
    stacklevel=3,
  )
