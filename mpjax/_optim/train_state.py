"""What training changes, in one tree."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxTypeError, check_call, check_flag, check_type, kind_of, listed
from mpjax._core.frameworks import framework_of
from mpjax._core.leaves import is_nnx_variable, path_text
from mpjax._core.trees import is_array_like
from mpjax._core.types import Array, OptState, Params, PyTree
from mpjax._optim.checks import refuse_integers
from mpjax._optim.loss_scale import LossScalingState, OwnedScale, find_scale, scales_in
from mpjax._optim.masters import MasterWeightsState, master_params
from mpjax._optim.metrics import MonitorState
from mpjax._optim.trees import float32_view, nodes_of, place_like, strong


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

  def replace(self, **changes: PyTree) -> "TrainState":
    """Returns the state with other fields, as `_replace` does and `replace` of Flax's state.

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
    ema: bool = False,
  ) -> "TrainState":
    """Returns the state before the first step.

    Args:
      params: floating arrays, on the devices and in the dtypes that they are trained in.
      tx: the optimizer, wrapped by `mpjax.loss_scaling`.
      model_state: what the model changes by itself, such as `variables["batch_stats"]`.
      rng: a PRNG key for what is random in the loss.
      ema: keep an average of the parameters, or their masters, for `ema_decay` of the step.

    Returns:
      A state that shares no memory with the arguments. On a mesh, what is new is replicated.

    Raises:
      MpjaxTypeError: one of these is something else, or `tx` is not `loss_scaling` of one loss.
    """
    where = "mpjax.TrainState.create"
    _check_arguments(params, tx, rng, where)
    check_flag(ema, f"{where}(ema)")
    params = jax.tree.map(strong, params)
    opt_state = tx.init(params)
    own_scale(opt_state, f"{where}(tx)")
    average = float32_view(trained_params(params, opt_state)) if ema else ()
    state = cls(jnp.zeros((), jnp.int32), params, opt_state, model_state, average, rng)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if wrong := [f"{kind_of(x)} at {path_text(p)}" for p, x in leaves if not is_array_like(x)]:
      fix = "Of Equinox pass equinox.partition(model, equinox.is_inexact_array)[0]."
      raise MpjaxTypeError(where, expected="arrays alone, for jit", got=listed(wrong), fix=fix)
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
    expected = "mpjax.loss_scaling around the entire optimizer, for one loss"
    got = f"{len(scales)} loss scale(s) inside of {kind_of(outermost)}"
    fix = (
      "Write mpjax.loss_scaling(optax.chain(...)); with several losses write the step with "
      "mpjax.value_and_grad(..., name=...)."
    )
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  return scales[0]


def _check_arguments(params: Params, tx: object, rng: Array | None, call: str) -> None:
  expected = "the optimizer, an optax transformation"
  fix = "Write mpjax.TrainState.create(params, tx), with what loss_scaling returned, not its state."
  check_type(tx, optax.GradientTransformation, f"{call}(tx)", expected=expected, fix=fix)
  # What nobody trains, among what is trained: collections of Linen, and models and variables of
  # NNX. Only nnx.Param is known to be trained, so a tree of other variables alone is left to the
  # caller.
  fix = 'Pass variables["params"], and the other collections as model_state.'
  got = kind_of(params) if params is None or framework_of(params) == "Linen" else ""
  if isinstance(params, Mapping) and {"params", "batch_stats"} <= set(params):
    got = f"all variables, with the collections {sorted(map(str, params))}"
  is_nnx = lambda x: is_nnx_variable(x) or framework_of(x) == "NNX"  # noqa: E731
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_nnx)
  kinds = [(type(x), path_text(path) or "the root") for path, x in leaves if is_nnx(x)]
  is_param = lambda kind: any(base.__name__ == "Param" for base in kind.__mro__)  # noqa: E731
  others = [f"{kind.__name__} at {path}" for kind, path in kinds if not is_param(kind)]
  if any(framework_of(kind) == "NNX" for kind, _ in kinds) or 0 < len(others) < len(kinds):
    got = f"objects of NNX with {listed(others)}"
    fix = "graphdef, params, rest = nnx.split(model, nnx.Param, ...) takes a model apart: pass "
    fix += "nnx.as_pure(params), and nnx.as_pure(rest) as model_state."
  if got:
    expected = "the parameters alone: weight decay would act on running statistics too"
    raise MpjaxTypeError(f"{call}(params)", expected=expected, got=got, fix=fix)
  refuse_integers(params, f"{call}(params)")
  dtype, shape = getattr(rng, "dtype", None), getattr(rng, "shape", ())
  is_raw = dtype == jnp.uint32 and len(shape) == 1
  is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  if rng is not None and not is_raw and not is_key:
    fix = "Pass jax.random.key(0); each step folds its own key from it."
    raise MpjaxTypeError(f"{call}(rng)", expected="one PRNG key", got=kind_of(rng), fix=fix)
