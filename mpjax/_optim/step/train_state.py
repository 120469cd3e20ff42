"""The state of a training run, in one tree."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxTypeError, check_call, check_type, kind_of, listed
from mpjax._core.frameworks import framework_of
from mpjax._core.leaves import path_text
from mpjax._core.nnx_objects import is_nnx_variable
from mpjax._core.trees import is_array_like
from mpjax._core.types import Array, Class, Leaf, OptState, Params, PyTree
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
    _check_optimizer(tx, where)
    _check_trained(params, f"{where}(params)")
    _check_rng(rng, f"{where}(rng)")
    # A weak type would not survive the first step, and the second would compile again.
    params = jax.tree.map(strong, params)
    opt_state = tx.init(params)
    # Refuse optimizers without one loss scale here, before the first step is compiled.
    own_scale(opt_state, f"{where}(tx)")
    state = cls(jnp.zeros((), jnp.int32), params, opt_state, model_state, rng)
    _check_arrays(state, where)
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


def _check_optimizer(tx: object, call: str) -> None:
  """Raises unless `tx` is a transformation of optax."""
  expected = "the optimizer, an optax transformation"
  fix = "Write mpjax.TrainState.create(params, tx), with what loss_scaling returned, not its state."
  check_type(tx, optax.GradientTransformation, f"{call}(tx)", expected=expected, fix=fix)


def _check_trained(params: Params, where: str) -> None:
  """Raises unless all of `params` can be trained, and is meant to be as far as its types tell."""
  _refuse_nnx_objects(params, where)
  _refuse_collections(params, where)
  refuse_integers(params, where)


def _refuse_nnx_objects(params: Params, where: str) -> None:
  """Raises for an NNX model, and for its parameters together with other variables."""
  # Stop at variables and modules, whose classes tell what they are.
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable_or_model)
  kinds = [
    (type(x), path_text(path) or "the root") for path, x in leaves if _is_variable_or_model(x)
  ]
  has_model = any(framework_of(kind) == "NNX" for kind, _ in kinds)
  others = [f"{kind.__name__} at {path}" for kind, path in kinds if not _is_param(kind)]
  # Only `nnx.Param` is known to be trained. A tree of other variables alone is left to the caller.
  is_mixed = 0 < len(others) < len(kinds)
  # A model holds batch statistics and counts beside its parameters, and weight decay would act on
  # them.
  if has_model or is_mixed:
    got = f"objects of NNX with {listed(others)}"
    fix = "graphdef, params, rest = nnx.split(model, nnx.Param, ...) takes a model apart: pass "
    fix += "nnx.as_pure(params), and nnx.as_pure(rest) as model_state."
    raise _not_alone(where, got, fix)


def _is_variable_or_model(x: Leaf) -> bool:
  """Whether a node is a variable or a module of NNX."""
  return is_nnx_variable(x) or framework_of(x) == "NNX"


def _is_param(kind: Class) -> bool:
  """Whether a class of variables is `nnx.Param` or a subclass of it."""
  # By name: NNX is not imported here.
  return any(base.__name__ == "Param" for base in kind.__mro__)


def _refuse_collections(params: Params, where: str) -> None:
  """Raises for a Linen model, and for all its variables."""
  fix = 'Pass variables["params"], and the other collections as model_state.'
  # Both names together mean the variables of Linen. A layer may be called "params".
  if isinstance(params, Mapping) and {"params", "batch_stats"} <= set(params):
    got = f"all variables, with the collections {sorted(map(str, params))}"
    raise _not_alone(where, got, fix)
  if params is None or framework_of(params) == "Linen":
    raise _not_alone(where, kind_of(params), fix)


def _not_alone(where: str, got: str, fix: str) -> MpjaxTypeError:
  """Returns the error for parameters together with other variables."""
  expected = "the parameters alone: weight decay would act on running statistics too"
  return MpjaxTypeError(where, expected=expected, got=got, fix=fix)


def _check_rng(rng: object, where: str) -> None:
  """Raises unless `rng` is None or one PRNG key, typed or raw."""
  dtype, shape = getattr(rng, "dtype", None), getattr(rng, "shape", ())
  # `jax.random.PRNGKey` returns raw key data, an array of uint32 of one axis.
  is_raw = dtype == jnp.uint32 and len(shape) == 1
  is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  if rng is not None and not is_raw and not is_typed:
    fix = "Pass jax.random.key(0); each step folds its own key from it."
    raise MpjaxTypeError(where, expected="one PRNG key", got=kind_of(rng), fix=fix)


def _check_arrays(state: PyTree, where: str) -> None:
  """Raises unless all leaves of a state are arrays."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  wrong = [f"{kind_of(x)} at {path_text(path)}" for path, x in leaves if not is_array_like(x)]
  if wrong:
    fix = (
      "Leave these out of the state. Of an Equinox model pass "
      "equinox.partition(model, equinox.is_inexact_array)[0]."
    )
    raise MpjaxTypeError(where, expected="a tree of arrays", got=listed(wrong), fix=fix)
