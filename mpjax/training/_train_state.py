"""What training changes, in one tree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._types import Array, PyTree
from mpjax.transforms import master_params
from mpjax.transforms._checks import refuse_integers
from mpjax.transforms._loss_scale_access import find_scale
from mpjax.transforms._master_weights import merged_masters
from mpjax.transforms._wrapper_trees import float32_view, place_like, strong


class TrainState(NamedTuple):
  """What training changes; every leaf is an array.

  Make one with `TrainState.create`, which copies: a donated step gives its input's memory to its
  output, and no array may be given away twice, or while the caller still holds it.

  Args:
    step: scalar int32, how many steps were applied.
    params: the parameters.
    opt_state: the state of the optimizer, with its loss scale.
    model_state: batch statistics and whatever else the model changes; () for none.
    ema: the average of the parameters, in float32; () for none.
    rng: the key from which the key of each step is folded; None for none.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.TrainState.create(jnp.ones(2), mpjax.loss_scaling(optax.sgd(0.1)), ema=True)
  >>> print(state.step, state.ema)
  0 [1. 1.]
  """

  step: Array
  params: PyTree
  opt_state: PyTree
  model_state: PyTree
  ema: PyTree
  rng: Array | None

  @classmethod
  def create(
    cls,
    params: PyTree,
    tx: Any,
    *,
    model_state: PyTree = (),
    rng: Array | None = None,
    ema: bool = False,
  ) -> "TrainState":
    """Returns the state before the first step.

    Args:
      params: the parameters, on the devices and in the dtypes that they are trained in.
      tx: the optimizer, wrapped by `mpjax.loss_scaling`.
      model_state: what the model changes by itself, such as `variables["batch_stats"]`.
      rng: a PRNG key for what is random in the loss.
      ema: keep an average of the parameters (of their masters, where they are stored in half);
        `mpjax.make_train_step` then wants its `ema_decay`.

    Returns:
      A state that shares no memory with the arguments. On a mesh, what is new is replicated.

    Raises:
      MpjaxTypeError: a parameter is no floating array, or `tx` has no loss scale.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> tx = mpjax.loss_scaling(optax.adam(1e-3))
    >>> int(mpjax.TrainState.create({"w": jnp.ones(3)}, tx).step)
    0
    """
    where = "mpjax.TrainState.create"
    refuse_integers(params, f"{where}(params)")
    params = jax.tree.map(strong, params)
    opt_state = tx.init(params)
    find_scale(opt_state, f"{where}(tx)", None)
    average = averaged(params, opt_state) if ema else ()
    state = cls(jnp.zeros((), jnp.int32), params, opt_state, model_state, average, rng)
    return place_like(params, jax.tree.map(lambda x: jnp.copy(strong(x)), state))


def averaged(params: PyTree, opt_state: PyTree) -> PyTree:
  """Returns what an average follows: the parameters in float32, their masters where there are."""
  has_masters = merged_masters(opt_state) is not None
  return float32_view(master_params(opt_state, params) if has_masters else params)
