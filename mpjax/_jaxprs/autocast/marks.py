"""Marks in a jaxpr: which region of it a policy holds in, and in which dtype a result leaves one.

They are named scopes, so that they go through `jit`, `scan`, `grad` and `vmap` with the operations.
Rewriting a jaxpr takes them out.
"""

import contextlib
import functools
from typing import Any

import jax

from mpjax._core.containers import mapped
from mpjax._core.dtypes import FLOAT32
from mpjax._core.policy import Policy
from mpjax._core.types import PyTree
from mpjax._jaxprs.autocast.values import FLOATS

PREFIX = "mpjax."

REGION = PREFIX + "region="

OUTPUT = PREFIX + "output="

REST = PREFIX + "rest="
"""The scope of the result of a layer that rounds it, with the dtype."""

AS_GIVEN = PREFIX + "as-given"
"""The scope of a layer that returns the dtype that it is given, such as a dropout."""

MODULE = PREFIX + "module="
"""The path of a module under a policy, in the jaxpr that `mpjax.audit` traces."""

AS_IT_IS = "as-it-is"
"""The region of a module that a rule leaves as it is."""

FLOAT8 = PREFIX + "float8"
"""The scope of a matmul in float8, with the scaling of its operands."""

TABLE = PREFIX + "table"
"""The scope of a module whose own matmuls are not in float8. No dtype depends on it otherwise."""

NOT_FLOAT8 = PREFIX + "not-float8="
"""Why a matmul is not in float8, in the jaxpr that `mpjax.audit` traces."""

_BITS = {"exponent_bits": 8, "mantissa_bits": 23}
"""Those of float32, which round nothing."""


def region_of(policy: Policy | None) -> str:
  """Returns the text that marks the region of a module with a policy; None leaves it as it is."""
  return AS_IT_IS if policy is None else str(policy)


@functools.lru_cache(maxsize=1024)
def policy_of(region: str) -> Policy | None:
  """Returns the policy that marks a region."""
  return None if region == AS_IT_IS else Policy.parse(region)


def mark(region: str) -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which operations are traced as part of a region."""
  return jax.named_scope(REGION + region)


def leaving(tree: PyTree, dtype: Any) -> PyTree:
  """Returns the results of a module where its policy ends: in `dtype` for all that read them.

  What is traced stays float32, with an operation that rounds nothing and represents the cast.

  Args:
    tree: results of a module; leaves that are no floating arrays stay.
    dtype: float32 or a low-precision dtype.
  """

  def leaf(x: Any) -> Any:
    if isinstance(x, jax.Array) and x.dtype == "float64":
      return x.astype(dtype)  # It stays as it is until here.
    return _marked(x, OUTPUT + dtype.name)

  return mapped(leaf, tree)


def at_rest(tree: PyTree, dtype: str) -> PyTree:
  """Returns the results of a layer, rounded to `dtype`: see `REST`.

  What leaves in float32 right after it is not rounded first.
  """
  return mapped(lambda x: _marked(x, REST + dtype), tree)


def _marked(x: Any, name: str) -> Any:
  if not isinstance(x, jax.Array) or x.dtype not in FLOATS:
    return x
  with jax.named_scope(name):
    return jax.lax.reduce_precision(x.astype(FLOAT32), **_BITS)
