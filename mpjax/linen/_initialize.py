"""What `init` stores under a policy: parameters in `param_dtype`, caches as they are computed."""

from typing import Any

import flax.linen as nn
import jax

from mpjax._core.policy import Policy
from mpjax._core.trees import cast_arrays, cast_like, is_floating
from mpjax._core.types import Args, Kwargs
from mpjax.linen._layers import stored_as


def store(module: nn.Module, policy: Policy | None) -> None:
  """Casts the parameters of a module that is being initialised, but not those of its submodules."""
  scope = module.scope
  if policy is None or scope is None:
    return
  for col in filter(scope.is_mutable_collection, stored_as("param_dtype")):
    for name, value in scope.variables().get(col, {}).items():
      if scope.name_reserved(name, col) and not scope.name_reserved(name, ""):
        new = cast_arrays(value, policy.param_dtype)
        if new is not value:
          scope.put_variable(col, name, new)


def store_computed(module: nn.Module, method: str, args: Args, kwargs: Kwargs) -> None:
  """Casts what a root, which has been initialised, created in collections stored as computed.

  In the active state, modules are called in their compute dtype.
  """
  scope: Any = module.scope
  if module.path:
    return
  made = {col: tree for col, tree in scope.variables().items() if col in stored_as("computed")}
  if not any(map(is_floating, jax.tree.leaves(made))):
    return
  rngs = {name: rng.as_jax_rng() for name, rng in scope.rngs.items()}
  plain = module.clone(parent=None)
  try:
    shapes = jax.eval_shape(lambda: plain.init(rngs, *args, method=method, **kwargs))
  except Exception:
    return  # A loop that carries float32, say: it meets float32 in `apply` too.
  for col, tree in made.items():
    for name, value in (cast_like(tree, shapes.get(col)) or {}).items():
      scope.put_variable(col, name, value)
