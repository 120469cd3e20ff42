"""What training changes, in one tree."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, kind_of, listed
from mpjax._core.frameworks import framework_of
from mpjax._core.leaves import is_nnx_variable, path_text
from mpjax._core.types import Array, OptState, Params, PyTree
from mpjax.transforms._checks import refuse_integers
from mpjax.transforms._loss_scale import (
  LossScalingState,
  OwnedScale,
  find_scale,
  scales_in,
)
from mpjax.transforms._masters import MasterWeightsState, master_params
from mpjax.transforms._metrics import MonitorState
from mpjax.transforms._trees import float32_view, nodes_of, place_like, strong


class TrainState(NamedTuple):
  """What training changes; every leaf is an array. Make one with `TrainState.create`.

  Args:
    step: int32 of shape (), how many steps were applied.
    params: the parameters, floating arrays of any shapes.
    opt_state: the state of the optimizer, with its loss scale.
    model_state: batch statistics and whatever else the model changes; () for none.
    ema: the average of the parameters, in float32 and their shapes; () for none.
    rng: the key (of shape (), or raw) from which the key of each step is folded; None for none.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> state = mpjax.TrainState.create(jnp.ones(2), mpjax.loss_scaling(optax.sgd(0.1)), ema=True)
  >>> print(state.step, state.ema)
  0 [1. 1.]
  """

  step: Array
  params: Params
  opt_state: OptState
  model_state: PyTree
  ema: Params
  rng: Array | None

  @classmethod
  @check_call("mpjax.TrainState.create", fix="Write mpjax.TrainState.create(params, tx).")
  def create(
    cls,
    params: Params,
    tx: optax.GradientTransformation,
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
      ema: keep an average of the parameters (of their masters, where they are stored in 16 bits);
        `mpjax.make_train_step` then wants its `ema_decay`.

    Returns:
      A state that shares no memory with the arguments, which a donated step would give away. On a
      mesh, what is new is replicated.

    Raises:
      MpjaxTypeError: a parameter is no floating array, `params` holds variables of NNX besides
        `nnx.Param`, `rng` is no PRNG key, or `tx` is not `loss_scaling` of one loss
        (`master_weights` may be around it).
      MpjaxValueError: `params` holds entire collections of variables.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> tx = mpjax.loss_scaling(optax.adam(1e-3))
    >>> int(mpjax.TrainState.create({"w": jnp.ones(3)}, tx).step)
    0
    """
    where = "mpjax.TrainState.create"
    _check_arguments(params, tx, rng, where)
    params = jax.tree.map(strong, params)
    opt_state = tx.init(params)
    own_scale(opt_state, f"{where}(tx)")
    average = float32_view(trained_params(params, opt_state)) if ema else ()
    state = cls(jnp.zeros((), jnp.int32), params, opt_state, model_state, average, rng)
    return place_like(params, jax.tree.map(lambda x: jnp.copy(strong(x)), state))


def trained_params(params: Params, opt_state: OptState) -> Params:
  """Returns what the optimizer trains: the masters of parameters that have some, or themselves."""
  return master_params(opt_state, params) if nodes_of(opt_state, MasterWeightsState) else params


def own_scale(opt_state: OptState, where: str) -> OwnedScale:
  """Returns the loss scale of a training step, which has to cover the entire optimizer."""
  scales = scales_in(opt_state) or [find_scale(opt_state, where, None)]
  outermost = opt_state
  while isinstance(outermost, (MasterWeightsState, MonitorState)):
    outermost = outermost.inner_state
  if not isinstance(outermost, LossScalingState) or len(scales) > 1:
    raise MpjaxTypeError(
      where,
      expected="mpjax.loss_scaling around the entire optimizer, for one loss",
      got=f"{len(scales)} loss scale(s) inside of {kind_of(outermost)}",
      fix="Write mpjax.loss_scaling(optax.chain(...)): what is outside would see scaled "
      "gradients, and skipped steps. With several losses write the step with "
      "mpjax.value_and_grad(..., name=...).",
    )
  return scales[0]


def _check_arguments(params: Params, tx: object, rng: Array | None, call: str) -> None:
  if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
    raise MpjaxTypeError(
      f"{call}(tx)",
      expected="the optimizer, an optax transformation",
      got=kind_of(tx),
      fix="Write mpjax.TrainState.create(params, tx), with what loss_scaling returned as tx, "
      "not its state.",
    )
  where = f"{call}(params)"
  if isinstance(params, Mapping) and {"params", "batch_stats"} <= set(params):
    raise MpjaxValueError(
      where,
      expected="the parameters alone",
      got=f"all variables, with the collections {sorted(map(str, params))}",
      fix='Pass variables["params"], and the other collections as model_state.',
    )
  # Variables of NNX that nobody trains, among those that are trained. Only nnx.Param is known to be
  # trained, so a tree of other variables alone is left to the caller.
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_nnx_variable)
  variables = [(path, x) for path, x in leaves if is_nnx_variable(x)]
  others = [
    f"{type(x).__name__} at {path_text(path) or 'the root'}"
    for path, x in variables
    if all(kind.__name__ != "Param" for kind in type(x).__mro__)
  ]
  if others and len(others) < len(variables):
    raise MpjaxTypeError(
      where,
      expected="the parameters alone: weight decay would act on running statistics too",
      got=f"variables of NNX with {listed(others)}",
      fix=_SPLIT,
    )
  is_model = lambda x: framework_of(x) == "NNX"  # noqa: E731
  for model in filter(is_model, jax.tree.leaves(params, is_leaf=is_model)):
    raise MpjaxTypeError(
      where,
      expected="a tree of arrays, whose next values the step returns",
      got=f"a model of NNX ({type(model).__name__})",
      fix=_SPLIT,
    )
  refuse_integers(
    params,
    where,
    fix="Keep counters, tables of integers and keys in model_state, from where loss_fn takes them.",
  )
  if rng is None:
    return
  dtype, shape = getattr(rng, "dtype", None), jnp.shape(rng)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  if not typed and not (dtype == jnp.uint32 and len(shape) == 1):
    raise MpjaxTypeError(
      f"{call}(rng)",
      expected="one PRNG key",
      got=kind_of(rng),
      fix="Pass jax.random.key(0); each step folds its own key from it.",
    )


_SPLIT = (
  "graphdef, params, rest = nnx.split(model, nnx.Param, ...) takes it apart: pass "
  "nnx.as_pure(params), and nnx.as_pure(rest) as model_state."
)
