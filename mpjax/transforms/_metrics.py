"""What happened to the last step: metrics, the flag for other state, an alarm for the host."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError, check_int, kind_of
from mpjax._core.trees import is_inexact, is_nnx_object, select
from mpjax._core.types import Array, Leaf, OptState, Params, PyTree
from mpjax.transforms._loss_scale import COUNTERS
from mpjax.transforms._state import (
  LossScalingState,
  OwnedScale,
  find_scale,
  plain_array,
  read_state,
)
from mpjax.transforms._trees import key_text, nodes_of

T = TypeVar("T")


def loss_scaling_metrics(
  opt_state: OptState, *, before: OptState | None = None, name: str | None = None
) -> dict[str, Array]:
  """Returns the numbers worth logging about loss scaling, after an `update`.

  Args:
    opt_state: a state that holds a loss scale.
    before: the state before the update, for `scale_changed`.
    name: which of several loss scales to read.

  Returns:
    Arrays of shape () under these keys:

    - `loss_scale` (float32): the factor on the next loss;
    - `finite` (bool): whether the last step was applied, as `mpjax.last_step_finite`;
    - `good_steps` (int32): finite steps in a row since the scale last moved;
    - `total`, `skipped` (int32): steps so far, and those that were not applied;
    - `consecutive_skips` (int32): skipped steps since the last applied one;
    - `floor_hits` (int32): overflows that found the scale at its minimum already;
    - `bad_updates` (int32): steps skipped for their updates alone (`check_updates=True`);
    - `scale_changed` (bool), where `before` is given: whether the update moved the scale.

    Under `NoLossScale` the scale is 1, `finite` is True and every count is 0.

  Raises:
    MpjaxTypeError: the state has no scale, or has two.
    MpjaxValueError: no scale is called `name`.
    MpjaxRuntimeError: the state would be a constant of the function that is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> params = jnp.ones(2)
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(params), params)
  >>> metrics = mpjax.loss_scaling_metrics(opt_state)
  >>> float(metrics["loss_scale"]), bool(metrics["finite"]), int(metrics["skipped"])
  (16384.0, False, 1)
  """
  where = "mpjax.loss_scaling_metrics"
  state = read_state(opt_state, f"{where}(opt_state)", name)
  metrics = {"loss_scale": state.scale, "finite": state.finite}
  metrics |= {key: getattr(state, key) for key in COUNTERS}
  if before is not None:
    old = find_scale(before, f"{where}(before)", name).state or state
    metrics["scale_changed"] = state.scale != old.scale
  return metrics


def last_step_finite(opt_state: OptState, *, name: str | None = None) -> Array:
  """Returns whether the last step was applied: the flag for `mpjax.select_tree`.

  Args:
    opt_state: a state that holds a loss scale, after an `update`.
    name: which of several loss scales to read.

  Returns:
    A bool of shape (); True before the first step and under `NoLossScale`. Under `jit` it is
    traced: select with `mpjax.select_tree` or `jnp.where`.

  Raises:
    MpjaxTypeError: the state has no scale, or has two.
    MpjaxValueError: no scale is called `name`.
    MpjaxRuntimeError: the state would be a constant of the function that is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> params = jnp.ones(2)
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(params), params)
  >>> bool(mpjax.last_step_finite(opt_state))
  False
  """
  return read_state(opt_state, "mpjax.last_step_finite(opt_state)", name).finite


def check_skipped_steps(
  opt_state: OptState,
  max_consecutive_skips: int = 50,
  *,
  params: Params = None,
  name: str | None = None,
) -> None:
  """Raises if training no longer moves. For the host, outside `jit`, now and then.

  A few skipped steps are the way a dynamic scale finds its value. Many in a row mean that no scale
  helps: the loss, the data or the model itself makes an inf or a NaN. `NoLossScale` skips nothing,
  and what came of a NaN is looked for: in the optimizer's state and in the parameters.

  Args:
    opt_state: a concrete state that holds a loss scale. Of one created under `jax.vmap`, the worst
      member counts.
    max_consecutive_skips: this many skipped steps in a row, at least 1, are an error.
    params: the tree that is trained, `variables["params"]` or `nnx.state(model, nnx.Param)`: the
      error names the gradient by its path then. Donated and abstract arrays will do. A train state
      has them.
    name: which of several loss scales to check.

  Raises:
    MpjaxRuntimeError: that many steps in a row were skipped, or the scale itself is no positive
      finite number (a damaged checkpoint); under `NoLossScale`, the optimizer's state or the
      parameters hold a NaN.
    MpjaxTypeError: the state is traced, has no scale, or has two; `max_consecutive_skips` is no
      integer.
    MpjaxValueError: no scale is called `name`; `max_consecutive_skips` is below 1.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> mpjax.check_skipped_steps(opt_state)
  """
  where = "mpjax.check_skipped_steps(opt_state)"
  most = check_int(
    max_consecutive_skips,
    "mpjax.check_skipped_steps(max_consecutive_skips)",
    least=1,
    fix="1 raises after the first skipped step.",
  )
  scale = find_scale(opt_state, where, name)
  state = scale.state
  params = getattr(opt_state, "params", None) if params is None else params
  if state is None:
    # An inf may be meant: a best value so far, a mask.
    trees = {"the optimizer's state": scale.owner.inner_state, "params": params}
    for kind, tree in trees.items():
      for leaf in jax.tree.leaves(tree):
        _refuse_tracers(leaf, where)
      if (path := _first_nan(tree)) is not None:
        raise MpjaxRuntimeError(
          where,
          expected="no NaN after steps that NoLossScale() does not check",
          got=f"one in {kind} at {path}",
          fix="Go back to a checkpoint, and train with mpjax.StaticLossScale(1): it skips such "
          "steps, and says where they begin.",
        )
    return
  _refuse_tracers(state.scale, where)
  # Several values where the state is vmapped (an ensemble): the worst member counts.
  scales, skips = np.atleast_1d(state.scale), np.atleast_1d(state.consecutive_skips)
  if not np.all(np.isfinite(scales) & (scales > 0)):
    raise MpjaxRuntimeError(
      where,
      expected="a positive finite loss scale",
      got=str(np.asarray(state.scale)),
      fix="No step can leave it so: restore another checkpoint, or call mpjax.set_loss_scale.",
    )
  worst = int(np.argmax(skips))
  if skips[worst] >= most:
    fix = (
      "At a small scale the cause is not the scale: look for an inf or NaN in the data and "
      "the loss, log(0), a division by 0, or a learning rate that is too high. "
      "print(mpjax.find_nonfinite(step)(state, batch)) shows where it begins."
    )
    if (nan := _first_nan(params)) is not None:
      fix = f"The parameters hold a NaN at {nan}, which no step removes: restore a checkpoint."
    if _may_have_more(params, scale.owner):
      fix += ' Pass variables["params"], or nnx.as_pure(nnx.state(model, nnx.Param)).'
    raise MpjaxRuntimeError(
      where,
      expected=f"fewer than {most} skipped steps in a row",
      got=f"{skips[worst]}, at loss scale {scales[worst]:.9g}; the last step's first non-finite "
      f"value was in {_first_bad(opt_state, scale, worst, params)}",
      fix=fix,
    )


def _refuse_tracers(x: Leaf, where: str) -> None:
  if isinstance(x, Tracer):
    raise MpjaxTypeError(
      where,
      expected="a concrete state",
      got=f"a traced one ({x})",
      fix="Call it on the host, after the jitted step has returned.",
    )


def _may_have_more(params: Params, owner: LossScalingState) -> bool:
  """Whether `params` may hold more than is trained: its positions are not those of gradients."""
  # Variables of Linen and models of NNX do. A tree of parameters may look the same, as that of a
  # model with a submodule called "params"; then the optimizer's moments are a tree like it.
  structure = jax.tree.structure(params)
  is_like = lambda x: jax.tree.structure(x) == structure  # noqa: E731
  variables = isinstance(params, Mapping) and "params" in params and len(params) > 1
  moments = filter(is_like, jax.tree.leaves(owner.inner_state, is_leaf=is_like))
  return (variables or is_nnx_object(params)) and not any(True for _ in moments)


def _first_nan(tree: PyTree) -> str | None:
  """Returns the path of the first leaf with a NaN, if any; donated and abstract ones show none."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
      continue
    is_gone = isinstance(x, jax.Array) and x.is_deleted()
    if not is_gone and is_inexact(x) and bool(jnp.any(jnp.isnan(x))):
      return key_text(path)
  return None


def _first_bad(opt_state: OptState, scale: OwnedScale, member: int, params: Params) -> str:
  """Returns where the last step's first non-finite value was."""

  def position(one: OwnedScale) -> int:
    return int(np.atleast_1d(plain_array(one.stored.first_bad))[member])

  own, losses = position(scale), [OwnedScale(scale.owner, key) for key in scale.owner.loss_scale]
  # The paths of the parameters that it sees are unknown where a mask around it hides some of them.
  masks = nodes_of(opt_state, (optax.MaskedState, optax.PartitionState))
  masked = any(one is scale.owner for mask in masks for one in nodes_of(mask, LossScalingState))
  if params is None or masked or _may_have_more(params, scale.owner):
    hint = "params= gives its path" if params is None else "those that this loss scale sees"
    # Beyond the last leaf it is no gradient of this loss; without params nothing says how many.
    return f"gradient leaf {own} (in the order of jax.tree.leaves; {hint})" + "".join(
      f", or leaf {position(one)} of the loss {one.name!r}" for one in losses if position(one) < own
    )
  paths = [key_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for one in (scale, *losses):
    if (leaf := position(one)) < len(paths):
      of_loss = "" if one.label == scale.label else f", of the loss {one.name!r}"
      return f"the gradient of {paths[leaf]}{of_loss}"
  # Beyond the gradients `make_train_step` has the loss and the leaves of the model state.
  state = jax.tree_util.tree_leaves_with_path(getattr(opt_state, "model_state", ()))
  index = own - len(paths) - 1
  if 0 <= index < len(state):
    return f"the model state at {key_text(state[index][0])}"
  return "the loss, the model state or the updates, not the gradients"


def select_tree(finite: Array | bool, new: T, old: T) -> T:
  """Returns `new` if the step was finite, else `old`: for state that no optimizer holds.

  It keeps a skipped step, bit for bit, out of batch statistics, moving averages and counters.

  Args:
    finite: a bool of shape (): `mpjax.last_step_finite(opt_state)` after `update`. Combine it with
      `mpjax.all_finite(new)` where `new` may be non-finite by itself.
    new: a tree of arrays, after the step.
    old: the same tree before the step, in the same shapes and dtypes.

  Returns:
    A tree like `new`.

  Raises:
    MpjaxTypeError: `finite` is not a bool.
    MpjaxValueError: `finite` is not a scalar, or the trees differ in structure, shapes or dtypes.

  >>> import jax.numpy as jnp, mpjax
  >>> print(mpjax.select_tree(jnp.asarray(False), new=jnp.asarray(jnp.nan), old=jnp.asarray(0.5)))
  0.5
  """
  where = "mpjax.select_tree(finite, new, old)"
  if not isinstance(finite, bool) and getattr(finite, "dtype", None) != jnp.bool_:
    raise MpjaxTypeError(
      where,
      expected="a bool flag as the first argument",
      got=kind_of(finite),
      fix="Pass mpjax.last_step_finite(opt_state).",
    )
  return select(jnp.asarray(finite), new, old, where)
