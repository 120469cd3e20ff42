"""`tune`: rules for what must stay in float32, for an error of the gradient that is allowed.

They are found by the sensitivities of modules, to first order, a bisection, and cheaper choices.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

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
from mpjax._debug.tune_report import Evaluation, ModuleReport, TuneReport
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.graph import Graph, Value
from mpjax._jaxpr.locations import MODULE
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
"""The error that a module causes is estimated within sqrt(1 / (2 * 16)), 18 %."""

MORE = 12
"""Evaluations after the bisection, which look for a cheaper choice."""

_CORE = 12
"""Of so many modules, those around where the sorted list was cut, all subsets are looked at."""

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""What is exact, and the same with an error."""


@check_call(_CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object], policy: PolicyLike = "mixed_bfloat16", *, tolerance: float
) -> Callable[P, TuneReport]:
  """Returns a function that finds out which modules of a loss must stay in float32.

  The gradient of `loss_fn` by its first argument is computed in float32, and under the policy for
  some choices of modules in float32, until the cheapest was found whose relative error, the norm of
  the difference over the norm of the gradient, is within the tolerance. Models of Linen, and of NNX
  in the arguments, run as `mpjax.with_policy` runs them; a loss without any as `mpjax.autocast`
  does. docs/tune.md says what the modules are and how it searches; how many choices it may measure
  is printed first.

  Args:
    loss_fn: the plain loss in float32, of a Linen model, an NNX model (an argument, or merged from
      a state), or any function of trees of arrays. Returns a scalar, or one and aux.
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
  call, where = Call(args, kwargs, _CALL), f"{_CALL}(*args)"
  dtype, scale = policy.compute_dtype, 1.0
  call.check_concrete()

  # A loss that has low precision already, compared with itself, has no error. The loss alone: what
  # a derivative of its own keeps in low precision is no policy's.
  for value in lows_of(Graph(call.traced(loss_fn)[0])):
    path = "its arguments" if value.made_by is None else value.made_by.where.path
    raise MpjaxValueError(
      where,
      expected="a loss in float32, with arguments in float32, to compare low precision with",
      got=f"{value.dtype} in {path or 'it'}",
      fix="Pass the loss of the plain model: without with_policy or autocast, without dtype= and "
      "param_dtype=, and its parameters and data as x.astype(jnp.float32).",
    )
  models = bool(lows_of(Graph(call.traced(with_models_under(loss_fn, policy, ()))[0])))
  if dtype == jnp.float16:
    scale = ranges_of_call(gradient_of(loss_fn), args, kwargs, advance).loss_scale or 1.0

  # The gradient in float32, of ((loss, aux), gradients).
  operands = [*map(jnp.asarray, call.arrays)]
  # A policy of None is none, but names the modules as rules do.
  named = with_models_under(loss_fn, None, ()) if models else with_parameter_scopes(loss_fn)
  program, outputs = call.traced(gradient_of(named, scale))
  body, gradients = body_of(program), slice(sum(keys[0] == "0" for keys in outputs), None)
  flops, homes = modules_of(body), homes_of(Graph(body))
  # Nothing in float32, what overflows, all modules, all of the function; the steps between; and
  # those that look for something cheaper.
  bound = 4 + math.ceil(math.log2(max(len(flops), 1))) + MORE
  sys.stdout.write(f"tune: {len(flops)} modules, at most {bound} measurements\n")
  steps, evaluations = itertools.count(1), list[Evaluation]()

  def step() -> None:
    advance(next(steps), 1 + PROJECTIONS + bound)

  gradient = lambda program, look: run_on_host(program, operands, look)[gradients]  # noqa: E731
  exact = gradient(body, Look())
  step()
  norm = math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in exact))
  if not (math.isfinite(norm) and norm > 0):
    raise MpjaxValueError(
      where,
      expected="a gradient in float32 that is finite and not zero",
      got=f"one of norm {norm}" if exact else "no floating array in the first argument",
      fix="Ask mpjax.ranges(loss_fn)(*args) what its numbers look like; pass parameters first.",
    )

  def under(rules: tuple[Rule, ...]) -> Function:
    if models:
      return with_models_under(loss_fn, policy, rules)
    return autocast(named, policy, rules=rules)

  def measure(names: Iterable[str], rules: tuple[Rule, ...]) -> list[Array]:
    program, _ = call.traced(gradient_of(under(rules), scale))
    low = gradient(body_of(program), Look())
    error = relative_error(zip(exact, low, strict=True))
    runs = [(dtype.itemsize < 4, count) for _, dtype, count in Graph(program).matmuls()]
    share = sum(is_low * count for is_low, count in runs) / max(sum(n for _, n in runs), 1)
    evaluations.append(Evaluation(tuple(names), rules, error, share))
    step()
    return low

  # The search, if there is an error that is too large, among what a rule selects and runs low.
  low, used = measure((), ()), dict[str, list[str]]()
  of_float32, of_policy = (body_of(call.traced(fn)[0]) for fn in (named, under(())))
  lows = {each.where.path for each, x, _ in Graph(of_policy).matmuls() if x.itemsize < 4}
  for path in (path for path in flops if flops[path] and path in lows):
    used.setdefault(homes[path], []).append(path)

  def evaluate(chosen: frozenset[int]) -> float:
    if chosen:
      names = [name for i, name in enumerate(used) if i in chosen]
      others = [name for name in used if name not in names]
      paths = (path for name in names for path in used[name])
      measure(paths, rules_for(names, others, homes, policy))
    return evaluations[-1 if chosen else 0].error

  if evaluations[0].error > tolerance:
    costs = [sum(flops[path] for path in paths) for paths in used.values()]
    alone = errors_alone(functools.partial(gradient, body), used.values(), dtype, step)
    if search(costs, alone, tolerance, evaluate) is None:
      # What is in no such module must stay in float32 too.
      measure(("**",), (Rule("float32", path="**"),))
  good = [each for each in evaluations if each.error <= tolerance]
  best = max(good, key=lambda each: (each.half_share, -len(each.float32)))

  # The errors by module, under the policy without rules. Gradients are those of the floating arrays
  # in the first argument, the first ones of all.
  forward, pairs = forward_errors(of_float32, of_policy, operands), dict[str, list[Pair]]()
  readers = plan(body, call.arguments(loss_fn)).readers
  floats = (i for i, x in enumerate(operands) if is_inexact(x))
  for i, *pair in zip(floats, exact, low, strict=False):
    if i in readers:
      pairs.setdefault(readers[i].path, []).append((pair[0], pair[1]))
  return TuneReport(
    policy=policy,
    tolerance=tolerance,
    **best._asdict(),
    evaluations=tuple(evaluations),
    bound=bound,
    loss_scale=scale,
    modules=tuple(rows_of(flops, forward, pairs)),
    models=models,
  )


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
  paths = {*forward, *pairs}
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


def homes_of(graph: Graph) -> dict[str, str]:
  """Returns by scope the path that rules match there: in a model its own, relative to the root."""
  homes = {each.where.path: each.where.marked(MODULE) for each in graph.operations}
  # JAX moves a constant out of a scan without the scopes around that: it is in a tail of the path.
  tails = {path for path in homes if any(other.endswith(f"/{path}") for other in homes)}
  tails -= {each.where.path for each, *_ in graph.matmuls()}
  return {k: k if home is None else home for k, home in homes.items() if k not in tails}


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
  """Returns by module the error of the worst matmul or sum of a loss under a policy."""

  def results(body: Body) -> Mapping[Hashable, list[tuple[str, Array]]]:
    # By primitive and shape: autocast changes neither, nor the order of those that have both alike,
    # but it may put what it changes into calls, whose scopes are others.
    arrays = collections.defaultdict[Hashable, list[tuple[str, Array]]](list)

    def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
      return outs[:1] if facts_of(step.eqn).flops or facts_of(step.eqn).gradient == "added" else ()

    def see(step: Step, picked: Sequence[Array]) -> None:
      alike = step.eqn.primitive.name, shape_of(step.eqn.outvars[0])
      arrays[alike].append((step.location.path, picked[0]))

    run_on_host(body, operands, Look(pick=pick, see=see))
    return arrays

  rounded, worst = results(low), dict[str, float]()
  for alike, values in results(exact).items():
    others = rounded[alike] if len(values) == len(rounded[alike]) else ()
    for (path, x), (_, y) in zip(values, others, strict=False):
      worst[path] = max(worst.get(path, 0.0), relative_error([(x, y)]))
  return worst


@jax.custom_jvp
def _moved(x: Array, eps: Array, error: Array) -> Array:
  """Returns `x + eps * error` at `eps` 0, where the error may be infinite."""
  return x


@_moved.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
  return primals[0], tangents[0] + tangents[1] * primals[2]


def errors_alone(
  gradient: Function, modules: Collection[Sequence[str]], dtype: DType, advance: Function
) -> NumpyArray:
  """Returns how far the gradient in float32 moves if a module rounds, and nothing else does."""
  # That is infinite where an operand or result of a matmul overflows.
  # To first order, for all modules together: every matmul of the forward and backward pass takes
  # and returns `x + eps * (rounded(x) - x)`, with one `eps` for each module, which is 0. The
  # derivative of the gradient with respect to `eps` is the error that the module causes. It has the
  # size of the gradient, for each module; so instead the derivatives of a few random projections of
  # the gradient are computed, by one forward pass and one backward pass for each of them.
  order = {path: i for i, paths in enumerate(modules) for path in paths}

  def perturbed(eps: Array) -> list[Array]:
    def rounded(x: Array, module: int) -> Array:
      if x.dtype != jnp.float32:
        return x
      fixed = jax.lax.stop_gradient(x)
      error = fixed.astype(dtype).astype(jnp.float32) - fixed
      return _moved(x, eps[module], jnp.where(jnp.isfinite(fixed), error, jnp.zeros_like(x)))

    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      module = order.get(step.location.path)
      if not facts_of(step.eqn).flops or module is None:
        return bind(step.eqn, values)
      first, *rest = bind(step.eqn, [*(rounded(x, module) for x in values[:2]), *values[2:]])
      return [rounded(first, module), *rest]

    return gradient(Look(compute))

  try:
    grads, pullback = jax.vjp(perturbed, jnp.zeros(len(modules), jnp.float32))
  except REFUSALS as error:
    warnings.warn(
      "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated, so that modules with "
      f"few FLOPs are tried first ({type(error).__name__}: {str(error).splitlines()[0]}). What is "
      "returned is measured all the same.",
      UserWarning,
      stacklevel=2,
    )
    return np.ones(len(modules))
  norm, squares = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads)), 0.0
  for key in jax.random.split(jax.random.key(0), PROJECTIONS):
    noise = (jax.random.normal(jax.random.fold_in(key, i), g.shape) for i, g in enumerate(grads))
    directions = [x.astype(g.dtype) for x, g in zip(noise, grads, strict=True)]
    squares += (np.asarray(pullback(directions)[0], np.float64) / norm) ** 2
    advance()
  return np.sqrt(np.nan_to_num(squares, nan=math.inf, posinf=math.inf) / PROJECTIONS)


def selector(path: str, homes: Mapping[str, str]) -> str | re.Pattern[str]:
  """Returns what selects a path, and the scopes that it is home to if it can, and none else."""
  own = {path, *(scope for scope, home in homes.items() if home == path)}
  every = around([*homes, *homes.values()]) | own
  names, scopes = path.split("/"), "|".join(map(re.escape, sorted(own - {""})))
  globs = (f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names) if path else 0)))
  for glob in (*globs, path):
    with contextlib.suppress(ValueError):  # A name with brackets is not the glob it looks like.
      rule = Rule("float32", path=glob)
      if {scope for scope in every if rule.matches(None, scope)} == own:
        return glob
  return re.compile(f"({scopes})?" if "" in own else scopes)


def search(
  flops: Sequence[int],
  alone: NumpyArray,
  tolerance: float,
  evaluate: Callable[[frozenset[int]], float],
) -> frozenset[int] | None:
  """Returns the numbers of the modules that are to compute in float32."""
  # `alone` is the error that each module is expected to cause, and `evaluate` measures a choice.
  count, errors = len(flops), dict[frozenset[int], float]()

  def is_good(chosen: frozenset[int]) -> bool:
    if chosen not in errors:
      errors[chosen] = evaluate(chosen)
    return errors[chosen] <= tolerance

  cost = lambda chosen: (sum(flops[i] for i in chosen), len(chosen))  # noqa: E731
  if is_good(frozenset()):
    return frozenset()
  # The modules that overflow, and those that help most for what they cost.
  ratio = alone**2 / np.maximum(np.asarray(flops, np.float64), 1)
  order = sorted(range(count), key=lambda i: (-ratio[i], i))
  # What overflows goes together: with a part of it in float32 the gradient is still not finite.
  sure = int(np.sum(np.isinf(alone)))
  lists = [frozenset(order[:size]) for size in range(sure, count + 1)]
  cut = 0 if is_good(lists[0]) else bisect.bisect_left(lists, True, lo=1, key=is_good)
  if cut == len(lists):
    return None
  best = lists[cut]
  start = max(min(sure + cut - _CORE // 2, count - _CORE), sure)
  core, always = order[start : start + _CORE], frozenset(order[:start])
  subsets = (itertools.combinations(core, size) for size in range(len(core) + 1))
  choices = [always.union(some) for some in itertools.chain(*subsets)]
  for _ in range(MORE):
    expected = _expected(np.where(np.isinf(alone), 0, alone), errors, choices)
    ranked = [
      (float(error), cost(chosen), sorted(chosen), chosen)
      for chosen, error in zip(choices, expected, strict=True)
      if chosen not in errors and cost(chosen) < cost(best)
    ]
    if not ranked:
      break
    good = [each for each in ranked if each[0] <= tolerance]
    # Where none is expected to be good, the one that is expected to miss least.
    *_, chosen = min(good, key=lambda each: each[1:3]) if good else min(ranked)
    if is_good(chosen):
      best = chosen
  return best


def _expected(
  alone: NumpyArray, errors: Mapping[frozenset[int], float], choices: Sequence[frozenset[int]]
) -> NumpyArray:
  # The square of an error is taken to be a sum over the modules that round, and a rest. Each term
  # is expected to be what the sensitivities say, within a factor of about two, and is fitted to
  # what was measured: a module in float32 also keeps the operations in float32 that its result
  # goes into.
  measured = {chosen: error for chosen, error in errors.items() if math.isfinite(error)}

  def table(choices: Sequence[frozenset[int]]) -> NumpyArray:
    rounded = [[i not in chosen for i in range(len(alone))] + [True] for chosen in choices]
    return np.asarray(rounded, np.float64)

  rows, squares = table(list(measured)), np.asarray(list(measured.values())) ** 2
  worst, terms = int(np.argmax(rows.sum(axis=1))), alone**2
  total = max(float(np.sum(terms * rows[worst, :-1])), np.finfo(float).tiny)
  prior = np.append(terms, 0.1 * total) * (squares[worst] / total)
  spread = (prior + 0.3 * prior.mean()) ** 2
  noise = np.diag((0.05 * squares + 0.01 * squares.max()) ** 2 + np.finfo(float).tiny)
  gain = (rows * spread).T @ np.linalg.pinv((rows * spread) @ rows.T + noise, hermitian=True)
  fitted = np.maximum(prior + gain @ (squares - rows @ prior), 0)
  return np.sqrt(table(choices) @ fitted)
