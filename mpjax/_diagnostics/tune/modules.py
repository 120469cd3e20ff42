"""The modules of a loss: what they cost, rules that select them, and the error of each."""

import collections
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

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


class Modules(NamedTuple):
  """The modules of a gradient function that compute something of their own."""

  paths: tuple[str, ...]  # their named scopes, joined by "/"
  flops: tuple[int, ...]  # of each in matmuls and convolutions, forward and backward
  matmuls: dict[int, int]  # the position of the module of each matmul, by the number of the step
  others: dict[int, int]  # that of every other operation of the forward pass
  scopes: frozenset[str]  # all paths in the function


def modules_of(body: Body) -> Modules:
  """Returns the modules of a gradient function, in the order of the function."""
  flops: dict[str, int] = {}
  matmuls: dict[int, int] = {}
  others: dict[int, int] = {}
  position: dict[str, int] = {}
  scopes = {""}
  for step in body.every_step():
    path, operations = step.location.path, flops_of(step.eqn)
    scopes |= prefixes(path)
    forward = step.location.direction == "forward"
    if operations is not None or (forward and not (step.bodies or facts_of(step.eqn).moves)):
      flops[path] = flops.get(path, 0) + (operations or 0) * step.times
      steps = others if operations is None else matmuls
      steps[step.number] = position.setdefault(path, len(position))
  return Modules(tuple(flops), tuple(flops.values()), matmuls, others, frozenset(scopes))


def rules_for(
  chosen: Collection[str], others: Collection[str], scopes: Collection[str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which chosen modules compute in float32, and others as the policy says."""
  # In Linen a model of one module has no name that selects it.
  if not others:
    return (Rule("float32", path="**"),)
  every = {**dict.fromkeys(others, False), **dict.fromkeys(chosen, True)}

  def is_around_wide(path: str) -> bool:
    """Whether what is around a module is in float32: it has the rule of the nearest one."""
    outside = [other for other in every if is_inside(path, other)]
    return every[max(outside, key=len)] if outside else False

  wide = [path for path in chosen if not is_around_wide(path)]
  narrow = [path for path in others if is_around_wide(path)]
  return (
    *(Rule("float32", path=selector(path, scopes)) for path in wide),
    *(Rule(policy, path=selector(path, scopes)) for path in narrow),
  )


def is_inside(path: str, other: str) -> bool:
  """Whether a module is inside of another one."""
  return path != other and (not other or path.startswith(f"{other}/"))


Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""What is exact, and the same with an error."""


def accuracy_of(
  forwards: tuple[Body, Body],
  operands: Sequence[Array],
  gradients: Mapping[str, Sequence[Pair]],
) -> dict[str, tuple[float, float]]:
  """Returns the errors by module, in the order of the function: forward, and of gradients."""
  # Losses and gradients, of each module's own parameters, are in float32 and under the policy.
  exact: dict[_Alike, list[tuple[str, Array]]] = collections.defaultdict(list)
  errors: dict[_Alike, list[float]] = collections.defaultdict(list)
  worst: dict[str, float] = {}

  def note(step: Step, picked: Sequence[Array]) -> None:
    path = step.location.path
    exact[_alike(step)].append((path, picked[0]))
    worst.setdefault(path, 0.0)

  def compare(step: Step, picked: Sequence[Array]) -> None:
    alike = _alike(step)
    pairs = [(x, picked[0]) for _, x in exact[alike][len(errors[alike]) :][:1]]
    errors[alike].append(relative_error(pairs))

  for forward, see in zip(forwards, (note, compare), strict=True):
    run_on_host(forward, operands, Look(pick=_pick, see=see))
  for alike, values in exact.items():
    same = len(values) == len(errors[alike])
    for (path, _), error in zip(values, errors[alike], strict=True) if same else ():
      worst[path] = max(worst[path], 0.0 if math.isnan(error) else error)
  return {
    path: (
      worst.get(path, math.nan),
      relative_error(
        pair
        for other, each in gradients.items()
        if other == path or is_inside(other, path)
        for pair in each
      ),
    )
    for path in dict.fromkeys((*worst, *gradients))
  }


_Alike: TypeAlias = tuple[str, tuple[int, ...]]
"""The primitive and the shape of its result. Autocast changes neither, nor the order of those that
have both alike, but it may put what it changes into calls, whose scopes are others."""


def _alike(step: Step) -> _Alike:
  return step.eqn.primitive.name, shape_of(step.eqn.outvars[0])


def _pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
  """Returns what a matmul or a sum returns."""
  facts = facts_of(step.eqn)
  return outs[:1] if facts.flops is not None or facts.role == "sum" else ()


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
  # To first order, for all modules together: every matmul of the forward and backward pass takes
  # and returns `x + eps * (rounded(x) - x)`, with one `eps` for each module, which is 0. The
  # derivative of the gradient with respect to `eps` is the error that the module causes. It has the
  # size of the gradient, for each module; so instead the derivatives of a few random projections of
  # the gradient are computed, by one forward pass and one backward pass for each of them, and these
  # are enough to estimate the error of any choice of modules.

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
  rows = []
  for key in keys:
    noise = (jax.random.normal(jax.random.fold_in(key, i), g.shape) for i, g in enumerate(grads))
    directions = [x.astype(g.dtype) for x, g in zip(noise, grads, strict=True)]
    rows.append(np.asarray(pullback(directions)[0], np.float64))
  norm = math.sqrt(sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in grads))
  return np.nan_to_num(np.stack(rows) / norm)


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
