"""`value_and_grad` for the state of an optimizer, and for an `nnx.Optimizer`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mpjax._core.frameworks import framework_of
from mpjax._core.types import Function, Grads, PyTree
from mpjax.transforms import value_and_grad as of_a_state


@functools.wraps(of_a_state)
def value_and_grad(
  fun: Function, opt_state: Any, *args: Any, **options: Any
) -> Callable[..., tuple[PyTree, Grads]]:
  if framework_of(opt_state) == "NNX":
    return importlib.import_module("mpjax.nnx").value_and_grad(fun, opt_state, *args, **options)
  return of_a_state(fun, opt_state, *args, **options)
