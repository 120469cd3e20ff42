"""Walking the equations of a jaxpr, those of inner jaxprs included.

Nothing here runs a jaxpr or depends on values. What the jaxpr alone does not say, how often a
`while` loop runs and which branch of a `cond` is taken, is marked as not certain.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from mpjax._jaxprs.inner_jaxprs import Program, inner_jaxprs, opened


class Visit(NamedTuple):
  """An equation met on a walk."""

  eqn: JaxprEqn
  times: int  # how often it runs, as far as the jaxpr says
  certain: bool  # False inside a `while`, which may turn more often, or a branch of a `cond`
  entered: bool = True  # False if it holds jaxprs, and how they run is not known


def walk(program: Program) -> Iterator[Visit]:
  """Yields every equation of a jaxpr, those inside of others after the one that holds them.

  Every branch of a `cond` is walked, and the body of a `while` once; neither is certain. A
  primitive of a newer JAX or of another library, of which it is not known how it runs the jaxprs
  that it holds, is not entered.

  Args:
    program: a jaxpr, closed or not, such as `jax.make_jaxpr` returns.
  """
  return _walk(program, 1, True)


def _walk(program: Program, times: int, certain: bool) -> Iterator[Visit]:
  for eqn in opened(program).eqns:
    jaxprs = inner_jaxprs(eqn)
    yield Visit(eqn, times, certain, entered=jaxprs is not None)
    for inner in jaxprs or ():
      runs = 1 if inner.times is None else inner.times
      yield from _walk(inner.program, times * runs, certain and inner.times is not None)
