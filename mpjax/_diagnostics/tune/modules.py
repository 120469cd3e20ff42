"""The modules of a loss: what they cost, what rounding in them does, and rules that select them."""

import collections
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import REFUSALS
from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._core.types import Array, DType, NumpyArray
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import Body, Step

PROJECTIONS = 16
"""The error that a module causes is estimated within sqrt(1 / (2 * 16)), 18 %."""


def modules_of(body: Body) -> dict[str, int]:
  """Returns the modules of a gradient function that compute, and the FLOPs of their matmuls."""
  flops: dict[str, int] = {}
  for step in body.every_step():
    moves = step.bodies or facts_of(step.eqn).moves
    if _is_matmul(step) or (step.location.direction == "forward" and not moves):
      path = step.location.path
      flops[path] = flops.get(path, 0) + (flops_of(step.eqn) or 0) * step.times
  return flops


def _is_matmul(step: Step) -> bool:
  return facts_of(step.eqn).flops is not None


def scopes_of(body: Body) -> set[str]:
  """Returns all paths in a function."""
  return {""}.union(*(prefixes(step.location.path) for step in body.every_step()))


def rules_for(
  chosen: Collection[str], others: Collection[str], scopes: Collection[str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which chosen modules compute in float32, and others as the policy says."""
  # In Linen a model of one module has no name that selects it.
  if not others:
    return (Rule("float32", path="**"),)
  wide, rules = {**dict.fromkeys(chosen, True), **dict.fromkeys(others, False)}, list[Rule]()
  for path, is_wide in wide.items():
    # A module has the rule of the nearest one around it.
    around = [other for other in wide if is_inside(path, other)]
    if is_wide != (bool(around) and wide[max(around, key=len)]):
      rules.append(Rule("float32" if is_wide else policy, path=selector(path, scopes)))
  return tuple(rules)


def is_inside(path: str, other: str) -> bool:
  """Whether a module is inside of another one."""
  return path != other and (not other or path.startswith(f"{other}/"))


Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""What is exact, and the same with an error."""


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
  rounded, worst = _results(low, operands), dict[str, float]()
  for alike, values in _results(exact, operands).items():
    others = rounded[alike] if len(values) == len(rounded[alike]) else ()
    for (path, x), (_, y) in zip(values, others, strict=False):
      worst[path] = max(worst.get(path, 0.0), relative_error([(x, y)]))
  return worst


def _results(
  body: Body, operands: Sequence[Array]
) -> Mapping[tuple[str, tuple[int, ...]], list[tuple[str, Array]]]:
  """Returns what matmuls and sums return, each with its module, by primitive and shape."""
  # Autocast changes neither, nor the order of those that have both alike, but it may put what it
  # changes into calls, whose scopes are others.
  results = collections.defaultdict[tuple[str, tuple[int, ...]], list[tuple[str, Array]]](list)

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    return outs[:1] if _is_matmul(step) or facts_of(step.eqn).role == "sum" else ()

  def see(step: Step, picked: Sequence[Array]) -> None:
    alike = step.eqn.primitive.name, shape_of(step.eqn.outvars[0])
    results[alike].append((step.location.path, picked[0]))

  run_on_host(body, operands, Look(pick=pick, see=see))
  return results


@jax.custom_jvp
def _moved(x: Array, eps: Array, error: Array) -> Array:
  """Returns `x + eps * error` at `eps` 0, where the error may be infinite."""
  return x


@_moved.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
  return primals[0], tangents[0] + tangents[1] * primals[2]


def errors_alone(
  body: Body,
  operands: Sequence[Array],
  gradients: slice,
  flops: Mapping[str, int],
  dtype: DType,
  advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
  """Returns how far the gradient in float32 moves if a module rounds, and nothing else does.

  That is infinite where an operand or result of a matmul overflows. `advance` is called now and
  then.
  """
  # To first order, for all modules together: every matmul of the forward and backward pass takes
  # and returns `x + eps * (rounded(x) - x)`, with one `eps` for each module, which is 0. The
  # derivative of the gradient with respect to `eps` is the error that the module causes. It has the
  # size of the gradient, for each module; so instead the derivatives of a few random projections of
  # the gradient are computed, by one forward pass and one backward pass for each of them.
  order = {path: i for i, path in enumerate(flops)}

  def perturbed(eps: Array) -> list[Array]:
    def rounded(x: Array, module: int) -> Array:
      if x.dtype != jnp.float32:
        return x
      fixed = jax.lax.stop_gradient(x)
      error = fixed.astype(dtype).astype(jnp.float32) - fixed
      return _moved(x, eps[module], jnp.where(jnp.isfinite(fixed), error, jnp.zeros_like(x)))

    def compute(step: Step, values: Sequence[Array]) -> list[Array]:
      if not _is_matmul(step):
        return bind(step.eqn, values)
      module = order[step.location.path]
      first, *rest = bind(step.eqn, [*(rounded(x, module) for x in values[:2]), *values[2:]])
      return [rounded(first, module), *rest]

    return run_on_host(body, operands, Look(compute))[gradients]

  try:
    grads, pullback = jax.vjp(perturbed, jnp.zeros((len(flops),), jnp.float32))
  except REFUSALS as error:
    warnings.warn(
      "mpjax.tune(loss_fn, policy): the gradient cannot be differentiated, so that modules with few "
      f"FLOPs are tried first ({type(error).__name__}: {str(error).partition(chr(10))[0]}). What is "
      "returned is measured all the same.",
      UserWarning,
      stacklevel=2,
    )
    return dict.fromkeys(flops, 1.0)
  norm, squares = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads)), 0.0
  for key in jax.random.split(jax.random.key(0), PROJECTIONS):
    noise = (jax.random.normal(jax.random.fold_in(key, i), g.shape) for i, g in enumerate(grads))
    directions = [x.astype(g.dtype) for x, g in zip(noise, grads, strict=True)]
    squares += (np.asarray(pullback(directions)[0], np.float64) / norm) ** 2
    advance()
  alone = np.sqrt(np.nan_to_num(squares, nan=math.inf, posinf=math.inf) / PROJECTIONS)
  return dict(zip(flops, alone.tolist(), strict=True))


def prefixes(path: str) -> set[str]:
  """Returns a path and those around it: "", "Net" and "Net/up"."""
  names = path.split("/")
  return {"/".join(names[:depth]) for depth in range(len(names) + 1)}


def written(path: object) -> str:
  """Returns the path of a rule as one writes it."""
  return f'"{path}"' if isinstance(path, str) else repr(path)


def selector(path: str, scopes: Collection[str]) -> str | re.Pattern[str]:
  """Returns what selects a path, and none else."""
  # What is around all other paths is the root of a model, which is "" for `mpjax.with_policy`. That
  # counts neither the class of the model nor a module that only calls what another one has: the
  # last names decide.
  others = {f"{other}/" for other in scopes if other not in ("", path)}
  if path and others and all(other.startswith(f"{path}/") for other in others):
    return re.compile(f"({re.escape(path)})?")
  names = path.split("/")
  for glob in (*(f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names)))), path):
    if _selects_only(glob, path, scopes):
      return glob
  return re.compile(re.escape(path))


def _selects_only(glob: str, path: str, scopes: Collection[str]) -> bool:
  try:
    rule = Rule("float32", path=glob)
  except ValueError:  # A name with brackets is not the glob that it looks like.
    return False
  # JAX moves a constant out of a scan without the scopes around that: it is in a tail of the path.
  others = (other for other in scopes if not path.endswith(f"/{other}"))
  return all(rule.matches(None, other) == (path == other) for other in others)
