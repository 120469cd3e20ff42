"""Which recipe multiplies in which format."""

from collections.abc import Callable
from typing import Any

from mpjax._matmul.blocks import BlockRecipe
from mpjax._matmul.float8 import Float8Recipe
from mpjax._matmul.int8 import Int8Recipe
from mpjax._matmul.protocol import Recipe
from mpjax._policy.formats import MXFP8, NVFP4, Float8, Int8


def _float8(options: Float8) -> Recipe:
  return BlockRecipe(options) if options.scaling == "block" else Float8Recipe(options)


_RECIPES: dict[type[Any], Callable[[Any], Recipe]] = {
  Float8: _float8,
  MXFP8: BlockRecipe,
  NVFP4: BlockRecipe,
  Int8: Int8Recipe,
}
"""The recipe of each format, a function of its options."""


def recipe_of(matmul: Any) -> Recipe:
  """Returns the recipe of a policy: that of a format, or a recipe of the user."""
  make = _RECIPES.get(type(matmul))
  return matmul if make is None else make(matmul)
