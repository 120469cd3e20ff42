"""Marks in a jaxpr: which region of it a policy holds in, and in which dtype a result leaves one.

They are named scopes, so that they go through `jit`, `scan`, `grad` and `vmap` with the operations.
Rewriting a jaxpr takes them out.
"""

import contextlib
from typing import Any

import jax

from mpjax._core.dtypes import FLOAT32
from mpjax._core.policy import Policy
from mpjax._core.precision import written
from mpjax._core.types import PyTree
from mpjax._jaxprs.autocast.values import FLOATS

PREFIX = "mpjax."

REGION = PREFIX + "region="

OUTPUT = PREFIX + "output="

REST = PREFIX + "rest="
"""The scope of the result of a layer that rounds it, with the dtype; none for one that returns the
dtype that it is given, such as a dropout."""

MODULE = PREFIX + "module="
"""The path of a module under a policy, in the jaxpr that `mpjax.audit` traces."""

AS_IT_IS = "as-it-is"
"""The region of a module that a rule leaves as it is."""

WEIGHT_GRADS = "+"
"""Separates the dtype of a region from that of the weight gradients in it."""

PRECISION = "@"
"""Separates the dtypes of a region from the precision of the matmuls in it."""

RECIPE = "#"
"""Separates all that from the recipe for matmuls in float8."""

FLOAT8 = PREFIX + "float8"
"""The scope of a matmul in float8, with the scaling of its operands."""

TABLE = PREFIX + "table"
"""The scope of a module whose own matmuls are not in float8. No dtype depends on it otherwise."""

NOT_FLOAT8 = PREFIX + "not-float8="
"""Why a matmul is not in float8, in the jaxpr that `mpjax.audit` traces."""

_BITS = {"exponent_bits": 8, "mantissa_bits": 23}
"""Those of float32, which round nothing."""


def region_of(policy: Policy | None) -> str:
  """Returns what marks the region of a module with this policy; None leaves it as it is."""
  if policy is None:
    return AS_IT_IS
  wide, precision = policy.weight_grad_dtype, policy.precision
  name = policy.compute_dtype.name + ("" if wide is None else f"{WEIGHT_GRADS}{wide.name}")
  name += "" if precision is None else f"{PRECISION}{written(precision)}"
  return name + ("" if policy.matmul is None else f"{RECIPE}{policy.matmul}")


def read_region(region: str) -> tuple[str, str, str]:
  """Returns what a mark names: dtype, that of weight gradients, precision; "" for none."""
  dtypes, _, precision = region.partition(RECIPE)[0].partition(PRECISION)
  compute, _, wide = dtypes.partition(WEIGHT_GRADS)
  return compute, wide, precision


def read_recipe(region: str) -> str:
  """Returns the recipe for matmuls in float8 that a mark names; "" for none."""
  return region.partition(RECIPE)[2]


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

  return jax.tree.map(leaf, tree)


def at_rest(tree: PyTree, dtype: str = "") -> PyTree:
  """Returns the results of a layer, rounded to `dtype`, or as its arguments are: see `REST`.

  What leaves in float32 right after it is not rounded first.
  """
  return jax.tree.map(lambda x: _marked(x, REST + dtype), tree)


def _marked(x: Any, name: str) -> Any:
  if not isinstance(x, jax.Array) or x.dtype not in FLOATS:
    return x
  with jax.named_scope(name):
    return jax.lax.reduce_precision(x.astype(FLOAT32), **_BITS)
