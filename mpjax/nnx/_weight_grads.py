"""The layers of NNX whose weight gradients can be in a wider dtype than their products."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from mpjax._weight_grads import products, promoted

# These layers cast by `promote_dtype`, multiply by the field named here, then add their bias, and
# do nothing else with either result.
_PRODUCTS: Mapping[Callable[..., Any], tuple[type[nnx.Module], str]] = types.MappingProxyType(
  {
    nnx.Linear.__call__: (nnx.Linear, "dot_general"),
    nnx.LoRALinear.__call__: (nnx.Linear, "dot_general"),
    nnx.LinearGeneral.__call__: (nnx.LinearGeneral, "dot_general"),
    nnx.Conv.__call__: (nnx.Conv, "conv_general_dilated"),
  }
)


def product_field(module: nnx.Module) -> str | None:
  """Returns the field that holds the product of one of NNX's layers; None of anything else.

  Args:
    module: a module. A field of it that has to do with the product and was set by a user makes the
      answer None, and so does a `__call__` of a subclass's own.
  """
  cls, field = _PRODUCTS.get(type(module).__call__, (nnx.Module, None))
  if field is None:
    return None
  hooks = ("promote_dtype", "preferred_element_type", field, f"{field}_cls")
  defaults = {hook: default for hook, default in _defaults(cls).items() if hook in hooks}
  return field if all(getattr(module, h) is default for h, default in defaults.items()) else None


def _defaults(cls: type[nnx.Module]) -> dict[str, Any]:
  """Returns what the arguments are that a layer is made with, where the user gives none."""
  return {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}


def product_fields(field: str, wide: np.dtype[Any]) -> dict[str, Any]:
  """Returns the fields that a layer shows in its own call, so that its weight gradients are wide.

  What the layer computes stays the same to the bit. It must see its parameters as stored.

  Args:
    field: the field that holds its product.
    wide: the dtype of the gradients of kernel and bias; each is cast to the parameter's own last.
  """
  own = _defaults(nnx.Linear)["promote_dtype"]

  def promote(args: tuple[Any, ...], /, **options: Any) -> Any:
    return promoted(own, *args, **options)

  return {"promote_dtype": promote, field: products(wide)[field]}
