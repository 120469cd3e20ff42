"""The modules of a loss: their FLOPs, their errors, and which are residual streams."""

import collections
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from jax.extend.core.primitives import add_p

from mpjax._debug.paths import is_inside, is_within
from mpjax._debug.tune_errors import Pair, relative_error
from mpjax._debug.tune_report import ModuleReport
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.graph import Graph, Value
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.steps import Body


def modules_of(body: Body) -> dict[str, int]:
  """Returns the modules of a gradient function that compute, and the FLOPs of their matmuls."""
  flops = collections.Counter[str]()
  for step in body.every_step():
    # Loops and moves compute nothing. Their location may be outside of all modules.
    moves = step.bodies or facts_of(step.eqn).moves
    if facts_of(step.eqn).flops or (step.location.direction == "forward" and not moves):
      # A module without matmuls is counted with 0 FLOPs.
      flops[step.location.path] += (flops_of(step.eqn) or 0) * step.times
  return flops


def rows_of(
  flops: Mapping[str, int],
  forward: Mapping[str, float],
  pairs: Mapping[str, Sequence[Pair]],
  streams: Collection[str] = (),
) -> Iterator[ModuleReport]:
  """Yields the report of each module, in the order of the function."""
  paths = dict.fromkeys((*forward, *pairs))  # A fixed order, since floating sums depend on it.
  for path in (path for path in flops if path in paths):
    inside = [other for other in paths if is_within(other, path)]
    gradient = relative_error(pair for other in inside for pair in pairs.get(other, ()))
    # A loss may have no matmuls.
    share = flops[path] / max(sum(flops.values()), 1)
    is_stream = path in streams and not share
    yield ModuleReport(path, forward.get(path, math.nan), gradient, share, is_stream)


def streams_of(graph: Graph) -> set[str]:
  """Returns the residual streams: modules that add a value to a result computed inside from it."""
  streams = set[str]()
  for each in graph.computing():
    path = each.where.path
    is_sum = each.eqn.primitive is add_p and each.where.direction == "forward"
    if is_sum and path and path not in streams:
      # The residual stream may be on either side of the sum.
      first, second = each.operands
      if _is_branch(first, second, path) or _is_branch(second, first, path):
        streams.add(path)
  return streams


def _is_branch(value: Value, start: Value, path: str) -> bool:
  """Whether modules inside of a path compute a value from another one."""
  pending = [value]
  seen = {start}
  computed_inside = False
  for each in pending:
    # Go from the result of the branch back to where it started.
    if each not in seen and each.made_by is not None:
      seen.add(each)
      computed_inside |= is_inside(each.made_by.where.path, path)
      pending += each.made_by.operands
  return computed_inside and start in pending
