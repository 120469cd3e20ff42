"""The compiled form of a function: its kernels by library and dtype, and the casts left."""

import collections
import re
from typing import NamedTuple

_INSTRUCTION = re.compile(
  r"= \(?(?P<dtype>[a-z]\w*)\[[\d,]*\]\S*(?: [^=]*?)?\)? (?P<op>[a-z][\w-]*)\("
)
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]+)"')
_SHOWN = frozenset({"dot", "convolution", "convert", "custom-call"})


class Kernel(NamedTuple):
  """Instructions of a compiled function that are alike.

  Args:
    name: of the operation, or of the library's kernel, such as "__cublas$lt$matmul$f8".
    dtype: of its result.
    times: how many there are.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
  >>> compiled = jax.jit(jnp.matmul).lower(x, x).compile()
  >>> kernels = mpjax.audit(jnp.matmul, compiled=compiled)(x, x).kernels
  >>> len(kernels) > 0
  True
  """

  name: str
  dtype: str
  times: int


def kernels(text: str) -> tuple[Kernel, ...]:
  """Returns the matmuls, convolutions, casts and library calls in the text of a compiled function.

  Args:
    text: HLO, as `jax.stages.Compiled.as_text` returns it; those in fusions count.
  """
  found: collections.Counter[tuple[str, str]] = collections.Counter()
  for line in text.splitlines():
    match = _INSTRUCTION.search(line)
    if match is None or match["op"] not in _SHOWN:
      continue
    target = _TARGET.search(line)
    name = match["op"] if target is None else target["target"]
    found[name, match["dtype"]] += 1
  return tuple(Kernel(*key, n) for key, n in found.most_common())
