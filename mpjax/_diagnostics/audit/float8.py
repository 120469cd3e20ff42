"""Which matmuls an audit found in float8, and why the others are not."""

from typing import NamedTuple

from mpjax._core.dtypes import is_float8
from mpjax._diagnostics.audit.causes import is_low, is_wide
from mpjax._diagnostics.audit.graph import Graph, Operation
from mpjax._diagnostics.audit.leaks import module_path
from mpjax._jaxprs.autocast.scopes import FLOAT8, NOT_FLOAT8
from mpjax._jaxprs.count import matmul_sizes


class Float8Matmul(NamedTuple):
  """The matmuls of a module that are in float8, or are not for one reason.

  Args:
    path: of the module or named scope.
    sizes: rows, columns and the length of the sum of the first one: M, N and K.
    reason: why they are not in float8; "" if they are.
    flops: floating-point operations, in all passes.

  >>> import jax, mpjax
  >>> fn = mpjax.autocast(lambda x, w: x @ w, "mixed_float8")
  >>> x, w = jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
  >>> matmul, = mpjax.audit(fn)(x, w).float8
  >>> matmul.reason
  'too small to gain: K=64, N=32'
  """

  path: str
  sizes: tuple[int, int, int]
  reason: str
  flops: int


def find_float8(graph: Graph) -> tuple[Float8Matmul, ...]:
  """Returns the matmuls of a graph, the costliest first; () if nothing asks for float8."""
  matmuls = [
    operation
    for operation in graph.computing()
    if operation.used
    and operation.flops is not None
    and all(is_low(v) or is_wide(v) for v in operation.operands[:2])
  ]
  if not any(_in_float8(each) or _noted(each) is not None for each in matmuls):
    return ()
  sizes: dict[tuple[str, str], tuple[int, int, int]] = {}
  flops: dict[tuple[str, str], int] = {}
  for operation in matmuls:
    key = module_path(operation.where), _reason(operation)
    sizes.setdefault(key, matmul_sizes(operation.eqn))
    flops[key] = flops.get(key, 0) + (operation.flops or 0)
  found = (Float8Matmul(path, sizes[path, why], why, n) for (path, why), n in flops.items())
  return tuple(sorted(found, key=lambda each: -each.flops))


def _in_float8(operation: Operation) -> bool:
  return all(v.dtype is not None and is_float8(v.dtype) for v in operation.operands[:2])


def _noted(operation: Operation) -> str | None:
  """Returns the reason that was noted where the matmul was rewritten."""
  scopes = reversed(operation.where.scopes)
  return next((s[len(NOT_FLOAT8) :] for s in scopes if s.startswith(NOT_FLOAT8)), None)


def _reason(operation: Operation) -> str:
  if _in_float8(operation):
    return ""
  noted = _noted(operation)
  if noted is not None:
    return noted
  if FLOAT8 in operation.where.scopes:
    return 'weight_grad="half"'
  if any(is_wide(v) for v in operation.operands[:2]):
    return "it is in float32"
  return "its policy has no float8"
