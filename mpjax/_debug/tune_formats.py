"""The formats of matmuls, their shares of the FLOPs, and the cost of a choice of formats."""

import collections
from collections.abc import Mapping, Sequence

from mpjax._core.types import HALF_NAMES, DType
from mpjax._debug.tune_report import Evaluation, compute_dtype_of, format_of_policy
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import EMULATED, RECIPE
from mpjax._policy.policy import EXACT_FLOAT32, Policy

FLOAT32_POLICY = Policy.parse(EXACT_FLOAT32)
"""The policy of modules that no low precision is good enough for."""

WIDE_FORMATS = ("float32", "float64")
"""The formats that are not low precision."""


def cost_of(
  policies: Sequence[Policy], flops: Mapping[str, int], choice: Evaluation
) -> tuple[float, ...]:
  """Returns how far a choice is from the preferred format.

  The measured shares decide, that of float32 before the others. Choices with equal shares are
  compared by the modules that they upgrade.
  """
  # Float32 is the last resort, so its share decides first.
  wide = sum(choice.shares.get(name, 0.0) for name in WIDE_FORMATS)
  levels = _levels_by_format(policies)
  # The later a format in the list of policies, the more it costs.
  below = sum(choice.shares.get(name, 0.0) * level for name, level in levels.items())
  shares = round(wide, 9), round(below, 9)  # Equal shares may differ in their last bits.
  return (*shares, *_cost_of_upgrades(policies, flops, choice))


def _levels_by_format(policies: Sequence[Policy]) -> dict[str, int]:
  """Returns the position of the first policy with a format.

  A dtype that is computed in beside a recipe is no nearer than the first policy without a recipe.
  """
  levels = dict[str, int]()
  for level, policy in enumerate(policies):
    # Several policies may have one format. The most preferred one counts.
    levels.setdefault(format_of_policy(policy), level)
  plain = (level for level, policy in enumerate(policies) if policy.matmul is None)
  beside = next(plain, len(policies) - 1)
  for policy in policies:
    levels.setdefault(compute_dtype_of(policy), beside)
  return levels


def _cost_of_upgrades(
  policies: Sequence[Policy], flops: Mapping[str, int], choice: Evaluation
) -> tuple[int, int]:
  """Returns the number of upgraded modules, and their FLOPs, once for each step of an upgrade."""
  levels = dict.fromkeys(flops, policies.index(choice.policy))
  levels |= {path: policies.index(each) for path, each in choice.others.items()}
  # The entire function in float32 is every module in float32.
  wide = flops if choice.float32 == ("**",) else choice.float32
  levels |= dict.fromkeys(wide, len(policies))
  upgraded = len(choice.float32) + len(choice.others)
  return upgraded, sum(flops[path] * level for path, level in levels.items())


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
  names = sorted(of_formats, key=_position_of)
  return {name: of_formats[name] / of_formats.total() for name in names}


def _position_of(name: str) -> int:
  """Returns the position of a format in a list by size: 8 bits, 16 bits, more."""
  # Other names are those of recipes, with 8 bits or fewer.
  of_16_bits_or_more = (*HALF_NAMES, *WIDE_FORMATS)
  return of_16_bits_or_more.index(name) if name in of_16_bits_or_more else -1
