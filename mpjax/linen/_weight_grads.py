"""The fields of a Linen layer whose weight gradients are in a wider dtype than its products."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpjax._weight_grads import products, promoted


def product_fields(
  promote_dtype: Callable[..., Any], field: str, wide: np.dtype[Any]
) -> dict[str, Any]:
  """Returns the fields to set on a layer, for one call, so that its weight gradients are wide.

  What the layer computes stays the same to the bit. It must be handed its parameters as stored.

  Args:
    promote_dtype: the layer's own function of this name.
    field: the field that holds its product: "dot_general" or "conv_general_dilated".
    wide: the dtype of the gradients of kernel and bias; each is cast to the parameter's own last.
  """

  def together(args: tuple[Any, ...], **options: Any) -> Any:
    return promote_dtype(*args, **options)

  def promote(inputs: Any, kernel: Any, bias: Any, **options: Any) -> Any:
    return promoted(together, inputs, kernel, bias, **options)

  return {"promote_dtype": promote, field: products(wide)[field]}
