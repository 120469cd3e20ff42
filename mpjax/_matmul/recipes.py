"""The formats of matmuls and their recipes, and the argument of a policy that chooses one."""

import contextlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, alternatives, nearest
from mpjax._core.types import HALF_NAMES, HALVES, DType
from mpjax._matmul.blocks import MXFP8, NVFP4, BlockRecipe, NVFP4Recipe
from mpjax._matmul.float8 import Float8, Float8Recipe
from mpjax._matmul.int8 import Int8, Int8Recipe
from mpjax._matmul.options import Format, format_name, read_options
from mpjax._matmul.protocol import Recipe

FORMATS: Mapping[type[Format], Callable[[Any], Recipe]] = {
  Float8: lambda options: (
    BlockRecipe(options) if options.scaling == "block" else Float8Recipe(options)
  ),
  MXFP8: BlockRecipe,
  NVFP4: NVFP4Recipe,
  Int8: Int8Recipe,
}
"""Every format, and a function from its options to its recipe.

The presets of policies, the texts that policies read and the names in errors follow from it.
"""

_BY_NAME = {format_name(cls): cls for cls in FORMATS}


def recipe_of(matmul: Any) -> Recipe:
  """Returns the recipe of the field `matmul` of a policy: for a format, or the user's own."""
  make = FORMATS.get(type(matmul))
  return matmul if make is None else make(matmul)


def parse_recipe(matmul: Any, compute: DType, where: str) -> Any:
  """Returns the recipe for matmuls of an argument of a policy.

  Args:
    matmul: the options of a format or their text, or another recipe or its text
      "package.module:NAME". The text of a recipe must lead back to it, because a jaxpr holds the
      text.
    compute: the compute dtype of the policy.
    where: the public call and the argument, for errors.

  Raises:
    MpjaxValueError: an unknown text, or a recipe that does not fit the compute dtype.
    MpjaxTypeError: the argument is neither a recipe nor a text.
  """
  # An object goes through its text too, which shows that the text leads back to it.
  text, recipe = str(matmul).strip(), None
  name, *items = text.split(":")
  if name in _BY_NAME:
    recipe = read_options(_BY_NAME[name], items, where, text)
  elif items:  # Without a colon, `resolve_name` would import any module.
    with contextlib.suppress(ImportError, AttributeError, ValueError):
      recipe = pkgutil.resolve_name(text)
  is_text = isinstance(matmul, str)
  if recipe is None or not (is_text or matmul == recipe):
    names = ", ".join(f"mpjax.{cls.__name__}" for cls in FORMATS)
    expected = f"{names}, its text such as 'float8:row', or a recipe 'package.module:NAME'"
    if not is_text:
      fix = "Write matmul=mpjax.Float8(...), or a recipe that its str() imports."
      raise MpjaxTypeError(where, expected=expected, got=repr(matmul), fix=fix)
    near = alternatives(nearest(name, _BY_NAME, count=2))
    fix = f"Did you mean {near}? Write what str(mpjax.Float8(...)) prints."
    raise MpjaxValueError(where, expected=expected, got=repr(matmul), fix=fix)

  got = f"{recipe} with compute_dtype={compute.name}"
  if compute not in HALVES:
    expected = f"a policy that computes in {' or '.join(HALF_NAMES)}"
    fix = 'Write compute_dtype="bfloat16". Other operations and small matmuls run in it.'
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  # "bfloat16" in place of "half" must be the compute dtype. User recipes may lack both options.
  for option in ("input_grad", "weight_grad"):
    if getattr(recipe, option, None) in {*HALF_NAMES} - {compute.name}:
      expected = f"{option}={format_name(type(recipe))!r}, 'half' or {compute.name!r}"
      fix = f'Write {option}="half" for the compute dtype.'
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return recipe
