"""Cast the results of `init`: parameters to the policy's dtype, caches to the model's."""

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
from mpjax.linen._active import LinenActive
from mpjax.linen._layers import collections_with


def store_parameters(scope: Scope, policy: Policy) -> None:
  """Casts the parameters of a module that is being initialised, but not those of its submodules."""
  for col in filter(scope.is_mutable_collection, collections_with(dtype_rule="param_dtype")):
    for name, value in scope.variables().get(col, {}).items():
      # Flax reserves the names of variables per collection, those of submodules for "". Submodules
      # cast their own parameters.
      if scope.name_reserved(name, col) and not scope.name_reserved(name, ""):
        new = cast_arrays(value, policy.param_dtype)
        if new is not value:
          scope.put_variable(col, name, new)


def store_caches(scope: Any, init: Callable[[PyTree], Variables], state: LinenActive) -> None:
  """Casts the caches that a root has initialised to the dtypes of a model with `dtype=` fields."""
  # Only the code of the modules knows the dtypes of caches. Traced in float32, a bfloat16 model
  # creates its decode cache in float32, twice as large. So run `init` abstractly, in the compute
  # dtypes.
  caches = {col: scope.variables().get(col, {}) for col in collections_with(dtype_rule="computed")}
  floating = any(map(is_floating, jax.tree.leaves(caches)))
  # Nothing to cast, an abstract pass that only records modules, or the pass below itself.
  if not floating or state.record is not None or state.casting == EVERY:
    return
  # The keys that this scope was given, so that the pass takes the same branches.
  rngs = {key: rng.as_jax_rng() for key, rng in scope.rngs.items()}
  try:
    with ACTIVE(dataclasses.replace(state, casting=EVERY)):
      low = abstract(functools.partial(init, rngs))
  except (*REFUSALS, flax.errors.FlaxError):
    return  # The model fails in low precision: a loop may carry float32, also in `apply`.
  for col, cache in caches.items():
    for key, new in (cast_like(cache, low.get(col)) or {}).items():
      scope.put_variable(col, key, new)


def abstract(init: Callable[[], Variables]) -> Variables:
  """Returns the shapes and dtypes of what `init` returns, or itself where it looks at values."""
  try:
    return jax.eval_shape(init)
  except jax.errors.JAXTypeError:
    return init()
