"""The work that an audit does not enter: kernels, objects of JAX, primitives that are not known."""

from collections.abc import Callable, Iterable, Iterator

from mpjax._core.types import DType, is_low_precision
from mpjax._diagnose.audit.findings import Finding
from mpjax._diagnose.suggested_changes import module_of
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.primitives import Holds
from mpjax._policy.rules import Rule, glob_of

UNKNOWN = "unknown"
"""The estimate of a kernel that has no `cost_estimate`."""


def find_kernels(graph: Graph) -> tuple[Finding, ...]:
  """Returns the operations that are not entered, with the dtypes of their operands and FLOPs.

  `Finding.flops` is 0 and `Finding.reason` is `UNKNOWN` for one that does not estimate its cost.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> find_kernels(Graph(jax.make_jaxpr(jnp.dot)(jnp.ones(3), jnp.ones(3))))
  ()
  """
  return tuple(_finding(operation, dtype) for operation, dtype in _kernels(graph))


def kernel_leaks(graph: Graph, asked: Callable[[Operation], DType | None]) -> Iterator[Finding]:
  """Yields the kernels that get float32 where a policy asks for low precision.

  Args:
    graph: the graph of a function.
    asked: returns the low-precision dtype that is asked for where an operation is; None for none.
  """
  # A kernel in low precision needs no cure, nor does one outside of all policies.
  for operation, dtype in _kernels(graph):
    low = asked(operation)
    if low is not None and not is_low_precision(dtype):
      yield _finding(operation, dtype)._replace(
        reason="its operands were traced in float32, and a kernel cannot be rewritten",
        kind="kernel",
        cause=operation.name,
        fix=_cure(operation, low),
        nbytes=sum(v.nbytes for v in operation.results) * operation.times,
      )


def _cure(operation: Operation, low: DType) -> str:
  cure = "Call it in the compute dtype, its parameters too: mpjax.low_precision(kernel)(...)."
  if path := module_of(operation):
    # The policy has no output dtype: a mixed one would return float32 into the modules around.
    cure += f" Or run its module so: {Rule(f'c={low}', path=glob_of(path), rewrite=False)}"
  return cure


def is_unknown_in_float32(kernel: Finding) -> bool:
  """Whether a kernel has float32 operands, and nobody knows how much it computes with them."""
  return kernel.reason == UNKNOWN and not is_low_precision(DType(kernel.dtype))


def _kernels(graph: Graph) -> Iterator[tuple[Operation, DType]]:
  """Yields the operations that are not entered, and the dtype of their largest operand."""
  for operation in graph.computing():
    # XLA drops operations that nothing uses.
    if not operation.used or not _is_kernel(operation):
      continue
    # A kernel of integers has no precision.
    floats = [v for v in operation.operands if v.is_floating]
    if floats:
      yield operation, DType(_largest(floats).dtype)


def _is_kernel(operation: Operation) -> bool:
  # An unknown primitive may hold a kernel or a jaxpr, which nobody reads.
  return operation.facts.holds is Holds.KERNEL or operation.step.is_unknown


def _largest(values: Iterable[Value]) -> Value:
  """Returns the value of the most elements before broadcasts; of several, one in float32."""
  # Attention's small float32 statistics must not hide bfloat16 operands.
  return max(values, key=lambda v: (_size_before_broadcasts(v), v.is_wide))


def _size_before_broadcasts(value: Value) -> int:
  """Returns the number of elements that a value had before it was broadcast.

  Flash attention repeats the float32 statistics of a row 128 times for its backward kernels.
  """
  least = value.size
  # The least size on the way is the size of the data. A slice reduces it as well.
  while value.made_by is not None and _moves_one(value.made_by):
    (value,) = value.made_by.operands
    least = min(least, value.size)
  return least


def _moves_one(operation: Operation) -> bool:
  """Whether an operation moves or casts one value. A loop, which may go around, does not."""
  moves = operation.moves or operation.casts
  return moves and operation.joins is None and len(operation.operands) == 1


def _finding(operation: Operation, dtype: DType) -> Finding:
  estimate = operation.eqn.params.get("cost_estimate")
  # The estimate is for one run.
  flops = None if estimate is None else int(estimate.flops) * operation.times
  where = operation.where
  return Finding(
    where.path,
    operation.name,
    where.direction,
    str(dtype),
    where.source,
    reason=UNKNOWN if flops is None else "",
    flops=flops or 0,
    times=operation.times,
  )
