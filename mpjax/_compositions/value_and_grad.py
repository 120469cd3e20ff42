"""`value_and_grad` for the state of an optimizer, and for an `nnx.Optimizer`."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mpjax._core.frameworks import framework_of
from mpjax._core.types import Grads, PyTree
from mpjax.transforms import value_and_grad as of_a_state


@functools.wraps(of_a_state)
def value_and_grad(*args: Any, **options: Any) -> Callable[..., tuple[PyTree, Grads]]:
  state = args[1] if len(args) > 1 else options.get("opt_state")
  if framework_of(options.get("optimizer", state)) == "NNX":
    options = {"optimizer" if key == "opt_state" else key: x for key, x in options.items()}
    return importlib.import_module("mpjax.nnx").value_and_grad(*args, **options)
  return of_a_state(*args, **options)
