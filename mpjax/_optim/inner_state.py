"""The state of an optimizer inside of the wrappers around it."""

from collections.abc import Mapping

import jax

from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.leaves import raw_value
from mpjax._core.types import OptState
from mpjax._optim.find_scale import is_scaling_state, with_classes
from mpjax._optim.optimizer_trees import stands_for
from mpjax._optim.states import (
  AccumulationState,
  MasterWeightsState,
  MonitorState,
  StochasticState,
)

# All have the state of the optimizer inside in a field `inner_state`. Add new wrappers here.
_WRAPPERS = (AccumulationState, MasterWeightsState, MonitorState, StochasticState)


def inner_state(opt_state: OptState) -> OptState:
  """Return the state of the optimizer that the wrappers of mpjax are around.

  Functions of optax that take the state of one optimizer take it, such as
  `optax.contrib.schedule_free_eval_params`. With `mpjax.master_weights`, pass these functions
  `mpjax.states.master_params(opt_state, params)` as the parameters.

  Args:
    opt_state: the state of an optimizer, a `TrainState`, an `nnx.Optimizer` or its `nnx.State`.

  Returns:
    The state that is innermost, with arrays in place of the variables of Flax NNX. Without a
    wrapper outermost it is `opt_state`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.contrib.schedule_free_sgd(0.5))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> inner = mpjax.states.inner_state(tx.init(params))
  >>> print(optax.contrib.schedule_free_eval_params(inner, params))
  [1. 2.]
  """
  # A `TrainState` and an `nnx.Optimizer` have the state in an attribute.
  state = getattr(opt_state, "opt_state", opt_state)
  while True:
    if is_scaling_state(state):
      state = with_classes(state).inner_state
    elif isinstance(state, _WRAPPERS):
      state = state.inner_state
    # From here on: an `nnx.State`, its pure dict, or a checkpoint that was read without a target.
    # Mappings stand for the classes, and states without arrays are missing.
    elif isinstance(state, Mapping) and "opt_state" in state:
      state = state["opt_state"]
    elif isinstance(state, Mapping) and any(stands_for(state, x, inside=True) for x in _WRAPPERS):
      state = state.get("inner_state", ())
    else:
      return jax.tree.map(raw_value, state, is_leaf=is_nnx_variable)
