"""The error of each module under a policy: of what it computes, and of its gradients."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import Array, NumpyArray
from mpjax._diagnostics.runner import Look, run_on_host
from mpjax._diagnostics.tune.modules import is_inside, module_of
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Body, Step

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""What is exact, and the same with an error."""


class Accuracy(NamedTuple):
  """The relative errors of a module against float32: the fields of a `ModuleReport`."""

  forward: float
  gradient: float


def accuracy_of(
  forwards: tuple[Body, Body],
  operands: Sequence[Array],
  gradients: Mapping[str, Sequence[Pair]],
) -> dict[str, Accuracy]:
  """Returns the errors by module, in the order of the function."""
  # Losses and gradients, of each module's own parameters, are in float32 and under the policy.
  exact: dict[_Alike, list[tuple[str, Array]]] = collections.defaultdict(list)
  errors: dict[_Alike, list[float]] = collections.defaultdict(list)
  worst: dict[str, float] = {}

  def note(step: Step, picked: Sequence[Array]) -> None:
    path = module_of(step.location)
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
    path: Accuracy(
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
