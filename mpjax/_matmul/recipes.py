"""The recipe of each format."""

from collections.abc import Callable
from typing import Any

from mpjax._matmul.blocks import BlockRecipe
from mpjax._matmul.float8 import Float8Recipe
from mpjax._matmul.int8 import Int8Recipe
from mpjax._matmul.protocol import Recipe
from mpjax._policy.formats import MXFP8, NVFP4, Float8, Int8


def _float8(options: Float8) -> Recipe:
  """Returns the recipe of float8, which depends on its scaling."""
  return BlockRecipe(options) if options.scaling == "block" else Float8Recipe(options)


_RECIPES: dict[type[Any], Callable[[Any], Recipe]] = {
  Float8: _float8,
  MXFP8: BlockRecipe,
  NVFP4: BlockRecipe,
  Int8: Int8Recipe,
}
"""From each format to a function from its options to a recipe."""


def recipe_of(matmul: Any) -> Recipe:
  """Returns the recipe of the field `matmul` of a policy: for a format, or the user's own."""
  make = _RECIPES.get(type(matmul))
  return matmul if make is None else make(matmul)
