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
"""Random projections of the gradient. The error of a module is known within sqrt(1 / (2 * 16)), or
18 %."""

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""An exact array, and the array with an error."""


class ModuleResult(NamedTuple):
  """The result of a matmul or sum, and the path of its module."""

  path: str
  array: Array


def relative_error(pairs: Iterable[Pair]) -> float:
  """Returns the norm of the differences over the norm of the exact arrays; NaN if that is 0."""
  difference = total = 0.0
  for exact, x in pairs:
    # Squares of float16 errors would underflow, and squares of gradients overflow.
    wide = complex if np.iscomplexobj(exact) else float
    a, b = np.asarray(exact).astype(wide), np.asarray(x).astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
      difference += float(np.sum(np.abs(b - a) ** 2))
      total += float(np.sum(np.abs(a) ** 2))
  # An inf or NaN in one array makes the difference inf or NaN.
  if not math.isfinite(difference):
    return math.inf
  return math.sqrt(difference / total) if total else math.nan


def forward_errors(exact: Body, low: Body, operands: Sequence[Array]) -> dict[str, float]:
  """Returns by module the error of the worst matmul or sum of a loss under a policy.

  Sums are paired by primitive, shape and order, and matmuls by shape and order. A policy does not
  change these. It may change their scopes: what it casts can be put into calls.
  """
  # Both programs run one step after the other, so their results come in the same order.
  rounded = _matmuls_and_sums(low, operands)
  worst = dict[str, float]()
  for alike, results in _matmuls_and_sums(exact, operands).items():
    # If the counts differ, the order does not pair them. Such results have no row.
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
    # A matmul and a sum have one result.
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
    # Sums cancel, so their errors may be larger than those of their operands.
    elif operation.facts.gradient == "added":
      kinds[operation.step.number] = operation.name
  return kinds


def _rescaled(operation: Operation) -> Operation:
  """Returns the operation that has the result: with a recipe, the last that rescales it."""
  if operation.where.marked(RECIPE) is None:
    return operation
  # Follow the chain of rescaling operations. A cast of the result ends it.
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
# A product `eps * error` would be 0 * inf, which is NaN, for an error of inf.
def _moved(x: Array, eps: Array, error: Array) -> Array:
  """Returns `x + eps * error` at `eps` 0, where the error may be infinite."""
  return x


@_moved.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
  # The derivative with respect to `eps` is the error itself.
  return primals[0], tangents[0] + tangents[1] * primals[2]


_Rounding: TypeAlias = Callable[[Array], Array]
"""Rounds a float32 array to another format, and returns it in float32."""


def _cast_to(dtype: DType, x: Array) -> Array:
  return x.astype(dtype).astype(jnp.float32)


def _scaled_to_float8(x: Array) -> Array:
  """Returns an array rounded to float8, with one scale for all of it."""
  largest = jnp.max(jnp.abs(x), initial=0.0)
  # Recipes scale an operand so that its largest magnitude is the largest float8.
  scale = jnp.where(largest > 0, largest / float(jnp.finfo(jnp.float8_e4m3fn).max), 1.0)
  return _cast_to(jnp.float8_e4m3fn, x / scale) * scale


def _rounded(rounding: _Rounding, eps: Array, x: Array) -> Array:
  """Returns `x + eps * (rounding(x) - x)`, at `eps` 0; arrays of other dtypes are not rounded."""
  # A policy does not round integers, and leaves complex numbers as they are.
  if x.dtype != jnp.float32:
    return x
  # The rounding error is a constant: its own derivative would be a second-order effect.
  fixed = jax.lax.stop_gradient(x)
  error = rounding(fixed) - fixed
  # An inf of a mask stays an inf in every format.
  return _moved(x, eps, jnp.where(jnp.isfinite(fixed), error, jnp.zeros_like(x)))


def errors_alone(
  gradient: Callable[[Look], Sequence[Array]],
  modules: Collection[Sequence[str]],
  dtype: DType,
  quantised: Collection[str] = (),
) -> NumpyArray:
  """Returns how far the gradient in float32 moves if a module rounds, and nothing else does.

  A module is a sequence of paths. Matmuls round their operands and results to `dtype`, or their
  operands to float8 where the path is in `quantised`. The error is infinite where an operand or
  result of one of its matmuls overflows. The errors are found to first order, for all modules
  together: every matmul of the forward and backward pass takes and returns
  `x + eps * (rounded(x) - x)`, with one `eps` for each module, which is 0. The derivative of the
  gradient with respect to `eps` is the error that the module causes. It has the size of the
  gradient, for each module. Instead, the derivatives of a few random projections of the gradient
  are computed: one forward pass, and one backward pass for each projection.
  """
  module_of = {path: i for i, paths in enumerate(modules) for path in paths}
  to_dtype = functools.partial(_cast_to, dtype)

  # The body contains the backward pass, so gradients of matmuls are rounded as well.
  def perturbed(eps: Array) -> Sequence[Array]:
    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      # All other operations run in float32.
      path = step.location.path
      if path not in module_of or facts_of(step.eqn).flops is None:
        return bind(step.eqn, values)
      of_module = eps[module_of[path]]
      of_operands = _scaled_to_float8 if path in quantised else to_dtype
      operands = [_rounded(of_operands, of_module, x) for x in values[:2]]
      first, *rest = bind(step.eqn, [*operands, *values[2:]])
      return [_rounded(to_dtype, of_module, first), *rest]

    return gradient(Look(compute))

  try:
    # One forward pass serves all projections.
    grads, pullback = jax.vjp(perturbed, jnp.zeros(len(modules), jnp.float32))
  # A custom rule may not be differentiable twice. With equal errors, the search sorts by FLOPs.
  except REFUSALS as error:
    _warn_of_refusal(error)
    return np.ones(len(modules))
  # Errors are relative to the norm of the gradient, as the tolerance is.
  norm = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads))
  squares = np.zeros(len(modules))
  for key in jax.random.split(jax.random.key(0), PROJECTIONS):
    (derivative,) = pullback(_random_like(grads, key))
    # The mean square of projections on normal vectors is the square of the length.
    squares += (np.asarray(derivative, np.float64) / norm) ** 2
  # An overflow makes a projection inf or NaN.
  return np.sqrt(np.nan_to_num(squares, nan=math.inf, posinf=math.inf) / PROJECTIONS)


def _random_like(grads: Sequence[Array], key: Array) -> list[Array]:
  keys = (jax.random.fold_in(key, i) for i in range(len(grads)))
  pairs = zip(keys, grads, strict=True)
  return [jax.random.normal(each, g.shape).astype(g.dtype) for each, g in pairs]


def _warn_of_refusal(error: Exception) -> None:
  warnings.warn(
    "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated, so modules with few "
    f"FLOPs are tried first ({type(error).__name__}: {str(error).splitlines()[0]}). The returned "
    "choice is measured nevertheless.",
    UserWarning,
    stacklevel=3,
  )
