"""What `init` stores: parameters in the dtype of the policy, caches in the dtype of the model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.errors
import jax
from flax.core import Scope

from mpjax._core.errors import REFUSALS
from mpjax._core.trees import cast_arrays, cast_like, is_floating
from mpjax._core.types import PyTree, Variables
from mpjax._policy.active import ACTIVE, EVERY
from mpjax._policy.policy import Policy
from mpjax.linen._active import Active
from mpjax.linen._layers import collections_with


def store_parameters(scope: Scope, policy: Policy) -> None:
  """Casts the parameters of a module that is being initialised, but not those of its submodules."""
  for col in filter(scope.is_mutable_collection, collections_with(stored="param_dtype")):
    for name, value in scope.variables().get(col, {}).items():
      if scope.name_reserved(name, col) and not scope.name_reserved(name, ""):
        new = cast_arrays(value, policy.param_dtype)
        if new is not value:
          scope.put_variable(col, name, new)


def store_caches(scope: Any, init: Callable[[PyTree], Variables], state: Active) -> None:
  """Casts the caches that a root has initialised to the dtypes of a model with `dtype=` fields."""
  # Only the modules themselves know these dtypes. Traced in float32, they create the decode cache
  # of a bfloat16 model in float32, twice as large.
  caches = {col: scope.variables().get(col, {}) for col in collections_with(stored="computed")}
  floating = any(map(is_floating, jax.tree.leaves(caches)))
  if not floating or state.record is not None or state.casting == EVERY:
    return
  rngs = {key: rng.as_jax_rng() for key, rng in scope.rngs.items()}
  try:
    with ACTIVE(dataclasses.replace(state, casting=EVERY)):
      low = abstract(functools.partial(init, rngs))
  except (*REFUSALS, flax.errors.FlaxError):
    return  # A loop may carry float32, say, as it then does in `apply` too.
  for col, cache in caches.items():
    for key, new in (cast_like(cache, low.get(col)) or {}).items():
      scope.put_variable(col, key, new)


def abstract(init: Callable[[], Variables]) -> Variables:
  """Returns the shapes and dtypes of what `init` returns, or itself where it looks at values."""
  try:
    return jax.eval_shape(init)
  except jax.errors.JAXTypeError:
    return init()
