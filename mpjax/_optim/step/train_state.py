"""The state of a training run, in one tree."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxTypeError, check_call, check_type, kind_of, listed
from mpjax._core.frameworks import framework_of, is_nnx_variable
from mpjax._core.leaves import path_text
from mpjax._core.trees import is_array_like
from mpjax._core.types import Array, Leaf, OptState, Params, PyTree
from mpjax._optim.find_scale import OwnedScale, find_scale, scales_in
from mpjax._optim.optimizer_trees import place_like, strong
from mpjax._optim.states import LossScalingState, MasterWeightsState, MonitorState
from mpjax._optim.wrapper_checks import refuse_integers


class TrainState(NamedTuple):
  """The state of a training run; every leaf is an array. Create one with `TrainState.create`.

  Args:
    step: int32 of shape (), the number of applied steps.
    params: the parameters, floating arrays of any shapes.
    opt_state: the state of the optimizer, with its loss scale.
    model_state: batch statistics and other variables of the model; () for none.
    rng: the key (of shape (), or raw) from which the key of each step is folded; None for none.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.TrainState.create(jnp.ones(2), mpjax.loss_scaling(optax.sgd(0.1)))
  >>> print(state.step, state.params)
  0 [1. 1.]
  """

  step: Array
  params: Params
  opt_state: OptState
  model_state: PyTree
  rng: Array | None

  def replace(self, **changes: PyTree) -> "TrainState":
    """Return the state with other fields, as `_replace` does and `replace` of Flax's state.

    Args:
      changes: new values by the names of fields.
    """
    return self._replace(**changes)

  @classmethod
  @check_call("mpjax.TrainState.create", fix="Write mpjax.TrainState.create(params, tx).")
  def create(
    cls,
    params: Params,
    tx: optax.GradientTransformation,
    *,
    model_state: PyTree = (),
    rng: Array | None = None,
  ) -> "TrainState":
    """Create the state before the first step.

    Args:
      params: floating arrays, in the dtypes and on the devices of the training.
      tx: the optimizer, wrapped by `mpjax.loss_scaling`.
      model_state: variables that the model writes, such as `variables["batch_stats"]`.
      rng: a PRNG key for the loss function.

    Returns:
      A state that shares no memory with the arguments. On a mesh, its new arrays are replicated.

    Raises:
      MpjaxTypeError: an argument has the wrong type, or `tx` is not `loss_scaling` of one loss.
    """
    where = "mpjax.TrainState.create"
    expected = "the optimizer, an optax transformation"
    fix = f"Write {where}(params, tx), with what loss_scaling returned, not its state."
    check_type(tx, optax.GradientTransformation, f"{where}(tx)", expected=expected, fix=fix)
    _check_trained(params, f"{where}(params)")
    dtype, shape = getattr(rng, "dtype", None), getattr(rng, "shape", ())
    # `jax.random.PRNGKey` returns raw key data, an array of uint32 of one axis.
    is_raw = dtype == jnp.uint32 and len(shape) == 1
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if rng is not None and not is_raw and not is_typed:
      got, fix = kind_of(rng), "Pass jax.random.key(0); each step folds its own key from it."
      raise MpjaxTypeError(f"{where}(rng)", expected="one PRNG key", got=got, fix=fix)
    # A weak type would not survive the first step, and the second would compile again.
    params = jax.tree.map(strong, params)
    opt_state = tx.init(params)
    # Refuse optimizers without one loss scale here, before the first step is compiled.
    own_scale(opt_state, f"{where}(tx)")
    state = cls(jnp.zeros((), jnp.int32), params, opt_state, model_state, rng)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    wrong = [f"{kind_of(x)} at {path_text(path)}" for path, x in leaves if not is_array_like(x)]
    if wrong:
      fix = (
        "Leave these out of the state. Of an Equinox model pass "
        "equinox.partition(model, equinox.is_inexact_array)[0]."
      )
      raise MpjaxTypeError(where, expected="a tree of arrays", got=listed(wrong), fix=fix)
    # The step donates the state. Without copies it would delete the caller's parameters.
    return place_like(params, jax.tree.map(lambda x: jnp.copy(strong(x)), state))


def own_scale(opt_state: OptState, where: str) -> OwnedScale:
  """Returns the loss scale of a training step, which has to cover the entire optimizer."""
  # `find_scale` raises the error for a state without a scale.
  scales = scales_in(opt_state) or [find_scale(opt_state, where, None)]
  # These wrappers may be around the scale, since they pass NaN on and count no steps.
  # `accumulate_gradients` counts.
  outermost = opt_state
  while isinstance(outermost, (MasterWeightsState, MonitorState)):
    outermost = outermost.inner_state
  if not isinstance(outermost, LossScalingState) or len(scales) > 1:
    expected = "mpjax.loss_scaling around the entire optimizer, for one loss"
    got = f"{len(scales)} loss scale(s) inside of {kind_of(outermost)}"
    fix = (
      "Write mpjax.loss_scaling(optax.chain(...)); with several losses write the step yourself, "
      "with mpjax.scaled(..., name=...)."
    )
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  return scales[0]


def _check_trained(params: Params, where: str) -> None:
  """Raises unless all of `params` can be trained, and is meant to be as far as its types tell."""
  expected = "the parameters alone: weight decay would act on running statistics too"
  # 1. An NNX model, and its parameters together with other variables. Stop at variables and
  # modules, whose classes tell what they are.

  def is_object(x: Leaf) -> bool:
    return is_nnx_variable(x) or framework_of(x) == "NNX"

  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_object)
  kinds = [(type(x), path_text(path) or "the root") for path, x in leaves if is_object(x)]
  has_model = any(framework_of(kind) == "NNX" for kind, _ in kinds)
  # Only `nnx.Param` and its subclasses are known to be trained. NNX is not imported here, so its
  # classes are known by name. A tree of other variables alone is left to the caller.
  others = [
    f"{kind.__name__} at {path}"
    for kind, path in kinds
    if not any(base.__name__ == "Param" for base in kind.__mro__)
  ]
  is_mixed = 0 < len(others) < len(kinds)
  # A model holds batch statistics and counts beside its parameters, and weight decay would act on
  # them.
  if has_model or is_mixed:
    got = f"objects of NNX with {listed(others)}"
    fix = "graphdef, params, rest = nnx.split(model, nnx.Param, ...) takes a model apart: pass "
    fix += "nnx.as_pure(params), and nnx.as_pure(rest) as model_state."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # 2. A Linen model, and all its variables. Both names together mean the variables of Linen: a
  # layer may be called "params".
  if isinstance(params, Mapping) and {"params", "batch_stats"} <= set(params):
    got = f"all variables, with the collections {sorted(map(str, params))}"
  else:
    got = kind_of(params) if params is None or framework_of(params) == "Linen" else None
  if got is not None:
    fix = (
      'Pass variables["params"], and the other collections as model_state, without those that '
      "`sow` fills."
    )
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  refuse_integers(params, where)
