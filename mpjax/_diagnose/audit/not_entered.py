"""The work that an audit does not enter: kernels, objects of JAX, primitives that are not known."""

from collections.abc import Iterator

from mpjax._diagnose.audit.findings import Kernel
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.primitives import Holds

UNKNOWN = "unknown"
"""The estimate of a kernel that has no `cost_estimate`."""


def find_kernels(graph: Graph) -> tuple[Kernel, ...]:
  """Returns the operations that are not entered.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> find_kernels(Graph(jax.make_jaxpr(jnp.dot)(jnp.ones(3), jnp.ones(3))))
  ()
  """
  return tuple(kernel for _, kernel in operations_of_kernels(graph))


def operations_of_kernels(graph: Graph) -> Iterator[tuple[Operation, Kernel]]:
  """Yields the operations that are not entered, and their rows."""
  for operation in graph.computing():
    # An unknown primitive may hold a kernel or a jaxpr, which nobody reads.
    is_kernel = operation.facts.holds is Holds.KERNEL or operation.step.is_unknown
    # A kernel of integers has no precision, and XLA drops operations that nothing uses.
    floats = [v for v in operation.operands if v.is_floating]
    if not (is_kernel and operation.used and floats):
      continue
    # Attention's small float32 statistics must not hide bfloat16 operands. Of several operands of
    # one size, one in float32 is the largest.
    largest = max(floats, key=lambda v: (_size_before_broadcasts(v), v.is_wide))
    estimate = operation.eqn.params.get("cost_estimate")
    where = operation.where
    yield (
      operation,
      Kernel(
        where.path,
        operation.name,
        where.direction,
        str(largest.dtype),
        where.source,
        reason=UNKNOWN if estimate is None else "",
        # The estimate is for one run.
        flops=0 if estimate is None else int(estimate.flops) * operation.times,
        times=operation.times,
      ),
    )


def _size_before_broadcasts(value: Value) -> int:
  """Returns the number of elements that a value had before it was broadcast.

  Flash attention repeats the float32 statistics of a row 128 times for its backward kernels.
  """
  least = value.size
  # The least size on the way is the size of the data. A slice reduces it as well.
  while (made_by := value.made_by) is not None:
    # A loop, which may go around, and a move of several values end the way.
    moves_one = (made_by.moves or made_by.casts) and made_by.joins is None
    if not moves_one or len(made_by.operands) != 1:
      break
    (value,) = made_by.operands
    least = min(least, value.size)
  return least
