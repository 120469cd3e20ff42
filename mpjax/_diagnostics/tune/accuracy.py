"""The error of each module under a policy: of what it computes, and of its gradients."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpjax._core.types import Array, NumpyArray
from mpjax._diagnostics.runner import Key, Observer, run
from mpjax._diagnostics.tune.modules import is_inside, module_of, visits
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.primitives import facts_of

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""What is exact, and the same with an error."""


class Accuracy(NamedTuple):
  """The relative errors of a module against float32.

  Fields:
    forward: of the worst of its own matmuls and sums, such as the sums of a residual stream; NaN if
      it has none.
    gradient: of the gradients of its parameters, and of those inside; NaN if there are none.
  """

  forward: float
  gradient: float


def accuracy_of(
  forwards: tuple[ClosedJaxpr, ClosedJaxpr],
  operands: Sequence[Array],
  gradients: Mapping[str, Sequence[Pair]],
) -> dict[str, Accuracy]:
  """Returns the errors by module, in the order of the function.

  Args:
    forwards: the loss in float32, and under a policy.
    operands: its arguments.
    gradients: for each module those of its own parameters, in float32 and under the policy.
  """
  exact: dict[_Name, Array] = {}
  worst: dict[str, float] = {}
  name_of = _named(forwards[0])

  def note(key: Key, eqn: JaxprEqn, picked: Sequence[Array]) -> None:
    name = name_of(key, eqn)
    exact[name] = picked[0]
    worst.setdefault(name[0], 0.0)

  run(forwards[0], operands, Observer(pick=_pick, see=note))
  other_name_of = _named(forwards[1])

  def compare(key: Key, eqn: JaxprEqn, picked: Sequence[Array]) -> None:
    name = other_name_of(key, eqn)
    if name in exact:
      error = relative_error([(exact.pop(name), picked[0])])
      worst[name[0]] = max(worst[name[0]], 0.0 if math.isnan(error) else error)

  run(forwards[1], operands, Observer(pick=_pick, see=compare))
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


_Name: TypeAlias = tuple[str, str, tuple[int, ...], int]
"""The module, the primitive, the shape of its result, and which of those that have all the same:
autocast changes dtypes, and none of this."""


def _pick(key: Key, eqn: JaxprEqn, ins: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
  """Returns what a matmul or a sum returns."""
  facts = facts_of(eqn)
  return outs[:1] if facts.flops is not None or facts.role == "sum" else ()


def _named(program: ClosedJaxpr) -> Callable[[Key, JaxprEqn], _Name]:
  """Returns a function that names equations in the order in which they run."""
  paths = {visit.key: module_of(visit.here) for visit in visits(program.jaxpr)}
  times: collections.Counter[tuple[str, str, tuple[int, ...]]] = collections.Counter()

  def name_of(key: Key, eqn: JaxprEqn) -> _Name:
    name = (paths[key], eqn.primitive.name, shape_of(eqn.outvars[0]))
    times[name] += 1
    return (*name, times[name])

  return name_of


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
