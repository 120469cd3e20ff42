"""Warnings at the user's line while a function is rewritten."""

import warnings
from collections.abc import Collection

from jax.extend.core import JaxprEqn

from mpjax._autocast.rewriter import Rewriter
from mpjax._jaxpr.locations import location

_LINEAR_ALGEBRA = (
  "mpjax: {names} takes the result of low-precision matmuls, and linear algebra multiplies their "
  "rounding by the condition number of the matrix. Compute the matmuls before it in float32: wrap "
  "the function that holds them and this line in mpjax.full_precision(fn)."
)


def warn_of_linear_algebra(rewriter: Rewriter, eqn: JaxprEqn, names: Collection[str]) -> None:
  """Warns that linear algebra takes a rounded activation.

  Equations inside jitted functions of JAX, such as `jnp.linalg.solve`, have no line. `rewriter`
  therefore keeps their names until the equation of a call has a line.
  """
  where = location(eqn)
  # A backward or recomputed operation has the line of a forward one, which has warned.
  if where.direction != "forward":
    return
  if where.source is None:
    rewriter.linear_algebra.update(dict.fromkeys(names))
  elif names and where.source not in rewriter.warned:
    rewriter.warned.add(where.source)
    text = _LINEAR_ALGEBRA.format(names=", ".join(names))
    warnings.warn_explicit(text, UserWarning, where.source.file, where.source.line)


def warn_without_line(names: Collection[str]) -> None:
  """Warns of linear algebra without a line of the user."""
  if names:
    text = _LINEAR_ALGEBRA.format(names=", ".join(names))
    warnings.warn(text, UserWarning, stacklevel=4)
