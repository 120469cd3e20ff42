"""How much the rounding in each module changes the gradient: to first order, for all at once.

Every matmul of the forward and backward pass takes and returns `x + eps * (rounded(x) - x)`, with
one `eps` for each module, which is 0. The derivative of the gradient with respect to `eps` is the
error that the module causes. It has the size of the gradient, for each module; so instead the
derivatives of a few random projections of the gradient are computed, by one forward pass and one
backward pass for each of them, and these are enough to estimate the error of any choice of modules.
"""

import warnings
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpjax._core.types import Array, DType, Function, Leaf, NumpyArray
from mpjax._diagnostics.ranges.observed import Key, run_observed
from mpjax._diagnostics.tune.modules import Modules
from mpjax._jaxprs.compat import bind

PROJECTIONS = 16
"""The error that a module causes is estimated within sqrt(1 / (2 * 16)), 18 %."""


_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Sensitivity(NamedTuple):
  """What rounding in each module does.

  Fields:
    projections: of shape (projections, modules), for each random direction how far the gradient
      moves in it if a module rounds, relative to the length of the gradient.
    overflows: 2 where a matmul of the module has an operand or result that overflows, 1 where
      another operation does, which may or may not run in low precision.
    exact: False where the function could not be differentiated twice: then it is only known how
      many operations a module has.
  """

  projections: NumpyArray
  overflows: NumpyArray
  exact: bool


class _Rounding:
  """Perturbs matmuls, and notes whether one overflows. Its state is that note."""

  def __init__(self, modules: Modules, dtype: DType, eps: Array) -> None:
    self._modules, self._dtype, self._eps = modules, dtype, eps
    self._overflows = jnp.finfo(dtype).max < jnp.finfo(jnp.float32).max / 2**8

  def visit(
    self, key: Key, eqn: JaxprEqn, operands: Sequence[Array], state: Array
  ) -> tuple[list[Array], Array]:
    module = self._modules.matmuls.get(key)
    if module is None:
      results = bind(eqn, operands)
      other = self._modules.others.get(key)
      if other is not None and self._overflows:
        over = [_any_over(x, self._narrow(x)) for x in results if x.dtype == jnp.float32]
        for each in over:
          state = state.at[other].max(each.astype(jnp.int32))
      return results, state
    pairs = [self._rounded(x, module) for x in operands[:2]]
    results = bind(eqn, [*(x for x, _ in pairs), *operands[2:]])
    pairs.append(self._rounded(results[0], module))
    over = jnp.any(jnp.stack([bad for _, bad in pairs]))
    return [pairs[-1][0], *results[1:]], state.at[module].max(np.int32(2) * over.astype(jnp.int32))

  def _rounded(self, x: Array, module: int) -> tuple[Array, Array]:
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
      return x, jnp.asarray(False)
    narrow = self._narrow(x)
    error = jnp.where(jnp.isfinite(narrow), narrow - x, jnp.zeros_like(x))
    return x + self._eps[module] * jax.lax.stop_gradient(error), _any_over(x, narrow)

  def _narrow(self, x: Array) -> Array:
    x = jax.lax.stop_gradient(x)
    return x.astype(self._dtype).astype(jnp.float32)

  def settled(self, state: Array) -> Array:
    return state

  def empty(self) -> Array:
    return jnp.zeros((len(self._modules.paths),), jnp.int32)

  def over_devices(self, state: Array, axes: frozenset[Hashable]) -> Array:
    return jax.lax.pmax(state, tuple(axes))

  def added(self, state: Array, more: Array) -> Array:
    return jnp.maximum(state, more)


def _any_over(x: Array, narrow: Array) -> Array:
  return jnp.any(jnp.logical_and(jnp.isfinite(x), jnp.logical_not(jnp.isfinite(narrow))))


def sensitivity(
  program: ClosedJaxpr,
  operands: Sequence[Array],
  gradients: slice,
  modules: Modules,
  dtype: DType,
) -> Sensitivity:
  """Returns what rounding in each module does to a gradient.

  Args:
    program: a gradient function in float32.
    operands: its arguments.
    gradients: which of its results are the gradient.
    modules: its modules.
    dtype: what is rounded to.
  """

  def perturbed(eps: Array, operands: Sequence[Array]) -> tuple[list[Leaf], Array]:
    observer = _Rounding(modules, dtype, eps)
    outs, over = run_observed(program.jaxpr, operands, observer, observer.empty(), program.consts)
    return outs[gradients], over

  count = len(modules.paths)
  zero = jnp.zeros((count,), jnp.float32)
  # An estimate that runs once: XLA takes longer to optimize it than to run it.
  options = _UNOPTIMIZED if jax.default_backend() == "cpu" else None
  found, reason = None, ""
  for way in (_backward, _forward):
    try:
      compiled = jax.jit(
        lambda operands, way=way: way(perturbed, zero, operands), compiler_options=options
      )
      found = compiled(list(operands))
      break
    except (NotImplementedError, TypeError, ValueError) as error:
      # It cannot be differentiated in this way. Any other fault is raised again below, where the
      # same function runs without a derivative.
      reason = f"{type(error).__name__}: {error}".partition("\n")[0]
  if found is None:
    overflows = jax.jit(lambda operands: perturbed(zero, operands)[1])(list(operands))
    warnings.warn(
      "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated once more, so that "
      "modules are tried in the order of their FLOPs and not of what rounding in them does "
      f"({reason}). What is returned is measured all the same.",
      UserWarning,
      stacklevel=2,
    )
    sizes = np.sqrt(np.asarray(modules.flops, np.float64))
    return Sensitivity(sizes[None] / max(sizes.sum(), 1), np.asarray(overflows), exact=False)
  projections, norm, overflows = (np.asarray(x, np.float64) for x in found)
  scaled = projections / norm if norm > 0 else projections
  return Sensitivity(np.nan_to_num(scaled), overflows, exact=True)


_Found = tuple[Array, Array, Array]


def _backward(perturbed: Function, eps: Array, operands: Sequence[Array]) -> _Found:
  grads, pullback, overflows = jax.vjp(lambda e: perturbed(e, operands), eps, has_aux=True)
  keys = jax.random.split(jax.random.key(0), PROJECTIONS)
  rows = jax.lax.map(lambda key: pullback(_directions(key, grads))[0], keys)
  return rows, _norm(grads), overflows


def _forward(perturbed: Function, eps: Array, operands: Sequence[Array]) -> _Found:
  """The same, one module after the other: a `while` has no backward pass."""
  keys = jax.random.split(jax.random.key(0), PROJECTIONS)

  def column(direction: Array) -> Array:
    grads, moved = jax.jvp(lambda e: perturbed(e, operands)[0], (eps,), (direction,))
    return jnp.stack([_dot(_directions(key, grads), moved) for key in keys])

  columns = jax.lax.map(column, jnp.eye(eps.size, dtype=eps.dtype))
  grads, overflows = perturbed(eps, operands)
  return columns.T, _norm(grads), overflows


def _directions(key: Array, grads: Sequence[Array]) -> list[Array]:
  return [
    jax.random.normal(jax.random.fold_in(key, i), g.shape, jnp.float32).astype(g.dtype)
    for i, g in enumerate(grads)
  ]


def _dot(a: Sequence[Array], b: Sequence[Array]) -> Array:
  parts = [jnp.sum((x * y).real.astype(jnp.float32)) for x, y in zip(a, b, strict=True)]
  return jnp.sum(jnp.stack(parts))


def _norm(grads: Sequence[Array]) -> Array:
  return jnp.sqrt(_dot([g.conj() for g in grads], grads))
