"""How much the rounding in each module changes the gradient: to first order, for all together.

Every matmul of the forward and backward pass takes and returns `x + eps * (rounded(x) - x)`, with
one `eps` for each module, which is 0. The derivative of the gradient with respect to `eps` is the
error that the module causes. It has the size of the gradient, for each module; so instead the
derivatives of a few random projections of the gradient are computed, by one forward pass and one
backward pass for each of them, and these are enough to estimate the error of any choice of modules.
"""

import math
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import REFUSALS
from mpjax._core.types import Array, DType, NumpyArray
from mpjax._diagnostics.runner import Look, run_on_host
from mpjax._diagnostics.tune.modules import Modules
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.steps import Body, Step

PROJECTIONS = 16
"""The error that a module causes is estimated within sqrt(1 / (2 * 16)), 18 %."""


def overflows_of(
  body: Body, operands: Sequence[Array], modules: Modules, dtype: DType
) -> tuple[list[Array], NumpyArray]:
  """Returns the results of a gradient function, and which modules overflow in a dtype."""
  # 2 is for an operand or result of a matmul, 1 for that of what may or may not be low.
  overflows, most = np.zeros(len(modules.paths), np.int64), float(jnp.finfo(dtype).max)

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    is_matmul = step.number in modules.matmuls
    if most > 1e30 or not (is_matmul or step.number in modules.others):
      return ()
    numbers = [*ins[:2], *outs] if is_matmul else outs
    numbers = [jnp.abs(x) for x in numbers if x.dtype == jnp.float32]
    return [jnp.any((x > most) & jnp.isfinite(x)) for x in numbers]

  def see(step: Step, picked: Sequence[Array]) -> None:
    is_matmul = step.number in modules.matmuls
    module = (modules.matmuls if is_matmul else modules.others)[step.number]
    if any(bool(np.any(np.asarray(x))) for x in picked):
      overflows[module] = max(overflows[module], 1 + is_matmul)

  return run_on_host(body, operands, Look(pick=pick, see=see)), overflows


def projections_of(
  body: Body,
  operands: Sequence[Array],
  gradients: slice,
  modules: Modules,
  dtype: DType,
) -> NumpyArray:
  """Returns how far the gradient in float32 moves in random directions if a module rounds."""

  def perturbed(eps: Array) -> list[Array]:
    def rounded(x: Array, module: int) -> Array:
      if x.dtype != jnp.float32:
        return x
      fixed = jax.lax.stop_gradient(x)
      narrow = fixed.astype(dtype).astype(jnp.float32)
      return x + eps[module] * jnp.where(jnp.isfinite(narrow), narrow - fixed, jnp.zeros_like(x))

    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      module = modules.matmuls.get(step.number)
      if module is None:
        return bind(step.eqn, values)
      first, *rest = bind(step.eqn, [*(rounded(x, module) for x in values[:2]), *values[2:]])
      return [rounded(first, module), *rest]

    return run_on_host(body, operands, Look(compute))[gradients]

  zero = jnp.zeros((len(modules.paths),), jnp.float32)
  try:
    grads, pullback = jax.vjp(perturbed, zero)
  except REFUSALS as error:
    warnings.warn(
      "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated, so that modules are "
      "tried in the order of their FLOPs and not of what rounding in them does "
      f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). What is returned is measured "
      "all the same.",
      UserWarning,
      stacklevel=2,
    )
    sizes = np.sqrt(np.asarray(modules.flops, np.float64))
    return sizes[None] / max(sizes.sum(), 1)
  keys = jax.random.split(jax.random.key(0), PROJECTIONS)
  rows = [np.asarray(pullback(_directions(key, grads))[0], np.float64) for key in keys]
  norm = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads))
  return np.nan_to_num(np.stack(rows) / norm)


def _directions(key: Array, grads: Sequence[Array]) -> list[Array]:
  return [
    jax.random.normal(jax.random.fold_in(key, i), g.shape, jnp.float32).astype(g.dtype)
    for i, g in enumerate(grads)
  ]
