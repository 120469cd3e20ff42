"""The equations of a traced program. Nothing of mpjax is used here."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

REDUCERS = frozenset(
  (
    *("reduce", "reduce_window", "select_and_scatter", "select_and_scatter_add"),
    *("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
  )
)
"""Operations that hold a jaxpr only to say how they combine two numbers."""


def walk(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
  """Yields every equation, then those of the jaxprs that it holds.

  Each branch of a `cond` is walked, and the body of a loop once.
  """
  jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
  for eqn in jaxpr.eqns:
    yield eqn
    if eqn.primitive.name not in REDUCERS:
      for inner in _jaxprs(eqn.params):
        yield from walk(inner)


def _jaxprs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
  if isinstance(value, (ClosedJaxpr, Jaxpr)):
    yield value
  elif isinstance(value, Mapping):
    for item in value.values():
      yield from _jaxprs(item)
  elif isinstance(value, Sequence) and not isinstance(value, str):
    for item in value:
      yield from _jaxprs(item)
