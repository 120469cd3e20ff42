"""Which recipe multiplies in which format."""

from collections.abc import Callable
from typing import Any

from mpjax._matmul.float8 import Float8Recipe
from mpjax._matmul.matmul import Recipe
from mpjax._policy.formats import Float8

_RECIPES: dict[type[Any], Callable[[Any], Recipe]] = {Float8: Float8Recipe}
"""The recipe of each format, a function of its options."""


def recipe_of(matmul: Any) -> Recipe:
  """Returns the recipe of a policy: that of a format, or a recipe of the user."""
  make = _RECIPES.get(type(matmul))
  return matmul if make is None else make(matmul)
