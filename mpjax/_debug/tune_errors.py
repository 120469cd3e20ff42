"""The errors that low precision causes: of a gradient, of each module, and of a module alone."""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import REFUSALS
from mpjax._core.types import Array, DType, NumpyArray
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import RECIPE
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import shape_of
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, Step

PROJECTIONS = 16
"""Random projections of the gradient: the error of a module is known within sqrt(1 / (2 * 16)),
18 %."""

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""An exact array, and the same with an error."""


class ModuleResult(NamedTuple):
  """The result of a matmul or sum, and the path of its module."""

  path: str
  array: Array


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

  Sums are paired by primitive, shape and order, and matmuls by shape and order. A policy does not
  change these. It may change their scopes: what it casts can be put into calls.
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
  """Returns the results of matmuls and of sums, by kind and shape, in the order of the run."""
  results = collections.defaultdict[Hashable, list[ModuleResult]](list)
  kinds = _kinds_by_result(body)

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    return outs[:1] if step.number in kinds else ()

  def see(step: Step, picked: Sequence[Array]) -> None:
    alike = kinds[step.number], shape_of(step.eqn.outvars[0])
    results[alike].append(ModuleResult(step.location.path, picked[0]))

  run_on_host(body, operands, Look(pick=pick, see=see))
  return results


def _kinds_by_result(body: Body) -> dict[int, str]:
  """Returns "matmul" or the primitive of a sum, by the number of the step that has the result."""
  kinds = dict[int, str]()
  for operation in Graph(body).computing():
    if operation.facts.flops is not None:
      # A recipe may multiply by another primitive.
      kinds[_rescaled(operation).step.number] = "matmul"
    elif operation.facts.gradient == "added":
      kinds[operation.step.number] = operation.name
  return kinds


def _rescaled(operation: Operation) -> Operation:
  """Returns the operation that has the result: with a recipe, the last that rescales it."""
  if operation.where.marked(RECIPE) is None:
    return operation
  while True:
    result = operation.results[0]
    later = [each for each in result.consumers if each.where.marked(RECIPE) is not None]
    # A matmul of blocks has its axes in another order, which is restored.
    later = [each for each in later if each.results[0].size == result.size]
    if not later:
      return operation
    operation = later[0]
    if result.is_wide and operation.results[0].is_low:
      return operation  # It is cast to the compute dtype. The next matmul may scale it again.


@jax.custom_jvp
def _moved(x: Array, eps: Array, error: Array) -> Array:
  """Returns `x + eps * error` at `eps` 0, where the error may be infinite."""
  return x


@_moved.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
  return primals[0], tangents[0] + tangents[1] * primals[2]


_Rounding: TypeAlias = Callable[[Array], Array]
"""From a float32 array to what is left of it in another format, in float32 again."""


def _cast_to(dtype: DType, x: Array) -> Array:
  return x.astype(dtype).astype(jnp.float32)


def _scaled_to_float8(x: Array) -> Array:
  """Returns an array rounded to float8, with one scale for all of it."""
  largest = jnp.max(jnp.abs(x), initial=0.0)
  scale = jnp.where(largest > 0, largest / float(jnp.finfo(jnp.float8_e4m3fn).max), 1.0)
  return _cast_to(jnp.float8_e4m3fn, x / scale) * scale


def _rounded(rounding: _Rounding, eps: Array, x: Array) -> Array:
  """Returns `x + eps * (rounding(x) - x)`, at `eps` 0; arrays of other dtypes are not rounded."""
  if x.dtype != jnp.float32:
    return x
  fixed = jax.lax.stop_gradient(x)
  error = rounding(fixed) - fixed
  return _moved(x, eps, jnp.where(jnp.isfinite(fixed), error, jnp.zeros_like(x)))


def errors_alone(
  gradient: Callable[[Look], Sequence[Array]],
  modules: Collection[Sequence[str]],
  dtype: DType,
  advance: Callable[[], None],
  float8: Collection[str] = (),
) -> NumpyArray:
  """Returns how far the gradient in float32 moves if a module rounds, and nothing else does.

  A module is a sequence of paths. Matmuls round their operands and results to `dtype`, or their
  operands to float8 where the path is in `float8`. The error is infinite where an operand or result
  of one of its matmuls overflows. The errors are found to first order, for all modules together:
  every matmul of the forward and backward pass takes and returns `x + eps * (rounded(x) - x)`, with
  one `eps` for each module, which is 0. The derivative of the gradient with respect to `eps` is the
  error that the module causes. It has the size of the gradient, for each module. Instead, the
  derivatives of a few random projections of the gradient are computed: one forward pass, and one
  backward pass for each projection.
  """
  module_of = {path: i for i, paths in enumerate(modules) for path in paths}
  to_dtype = functools.partial(_cast_to, dtype)

  def perturbed(eps: Array) -> Sequence[Array]:
    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      path = step.location.path
      if path not in module_of or facts_of(step.eqn).flops is None:
        return bind(step.eqn, values)
      of_module = eps[module_of[path]]
      of_operands = _scaled_to_float8 if path in float8 else to_dtype
      operands = [_rounded(of_operands, of_module, x) for x in values[:2]]
      first, *rest = bind(step.eqn, [*operands, *values[2:]])
      return [_rounded(to_dtype, of_module, first), *rest]

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
