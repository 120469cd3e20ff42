"""The formats of matmuls, and their shares of the FLOPs."""

import collections
from collections.abc import Mapping

from mpjax._core.types import HALF_NAMES, DType
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import EMULATED, RECIPE
from mpjax._policy.policy import EXACT_FLOAT32, Policy

FLOAT32_POLICY = Policy.parse(EXACT_FLOAT32)
"""The policy of modules that no low precision is good enough for."""

WIDE_FORMATS = ("float32", "float64")
"""The formats that are not low precision."""


def flops_by_format(graph: Graph) -> dict[str, collections.Counter[str]]:
  """Returns the FLOPs of matmuls by module and format."""
  flops = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
  for matmul, dtype, each in graph.matmuls():
    flops[matmul.where.path][format_of_matmul(matmul, dtype)] += each
  return dict(flops)


def format_of_matmul(matmul: Operation, dtype: DType) -> str:
  """Returns the name of the recipe that quantised the operands, or else of the dtype."""
  recipe = matmul.where.marked(RECIPE)
  # A recipe may leave one of the products in the compute dtype.
  is_quantised = dtype.itemsize == 1 or EMULATED in matmul.where.scopes
  return recipe.rpartition(":")[0] if recipe is not None and is_quantised else dtype.name


def shares_of(flops: Mapping[str, collections.Counter[str]]) -> dict[str, float]:
  """Returns the share of each format in the FLOPs of all modules, float32 last."""
  of_formats = sum(flops.values(), collections.Counter[str]())
  # By size: 8 bits or fewer, which are the names of recipes, 16 bits, more.
  sizes = {name: i for i, name in enumerate((*HALF_NAMES, *WIDE_FORMATS), 1)}
  names = sorted(of_formats, key=lambda name: sizes.get(name, 0))
  return {name: of_formats[name] / of_formats.total() for name in names}
