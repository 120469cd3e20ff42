"""What happened to the last step: metrics, the flag for other state, an alarm for the host."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._errors import MpjaxRuntimeError, MpjaxTypeError, message
from mpjax._tree import select
from mpjax._types import Array, PyTree
from mpjax.transforms._loss_scale_access import find_scale


def loss_scaling_metrics(opt_state: PyTree, *, name: str | None = None) -> dict[str, Array]:
  """Returns the numbers worth logging about loss scaling, after an `update`.

  Args:
    opt_state: a state that holds a loss scale.
    name: which of several loss scales to read.

  Returns:
    Scalars under these keys:

    - `loss_scale` (float32): the factor on the next loss;
    - `finite` (bool): whether the last step was applied, the flag for `mpjax.commit` (under `jit`
      it is traced: select with `commit` or `jnp.where`, not with `if`);
    - `good_steps` (int32): finite steps in a row since the scale last moved;
    - `total`, `skipped` (int32): steps so far, and those that were not applied;
    - `consecutive_skips` (int32): skipped steps since the last applied one;
    - `floor_hits` (int32): overflows that found the scale at its minimum already;
    - `bad_updates` (int32): steps skipped for their updates alone (`check_updates=True`).

    Under `NoLossScale` the scale is 1, `finite` is True and every count is 0.

  Raises:
    MpjaxTypeError: the state has no scale, or has two.
    MpjaxValueError: no scale is called `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> params = jnp.ones(2)
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(params), params)
  >>> metrics = mpjax.loss_scaling_metrics(opt_state)
  >>> float(metrics["loss_scale"]), bool(metrics["finite"]), int(metrics["skipped"])
  (16384.0, False, 1)
  """
  state = find_scale(opt_state, "mpjax.loss_scaling_metrics(opt_state)", name).state
  counters = ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits", "bad_updates")
  if state is None:
    nothing = {key: jnp.asarray(0, jnp.int32) for key in counters}
    return {"loss_scale": jnp.asarray(1, jnp.float32), "finite": jnp.asarray(True), **nothing}
  counts = {key: getattr(state, key) for key in counters}
  return {"loss_scale": state.scale, "finite": state.finite, **counts}


def check_progress(
  opt_state: PyTree,
  max_consecutive_skips: int = 50,
  *,
  params: PyTree = None,
  name: str | None = None,
) -> None:
  """Raises if training no longer moves. For the host, outside `jit`, now and then.

  A few skipped steps are the way a dynamic scale finds its value. Many in a row mean that no scale
  helps: the loss, the data or the model itself makes an inf or a NaN.

  Args:
    opt_state: a state that holds a loss scale, concrete.
    max_consecutive_skips: this many skipped steps in a row are an error.
    params: the tree that is trained, so that the error can name the gradient by its path.
    name: which of several loss scales to check.

  Raises:
    MpjaxRuntimeError: that many steps in a row were skipped, or the scale itself is no positive
      finite number (a damaged checkpoint).
    MpjaxTypeError: the state is traced, has no scale, or has two.
    MpjaxValueError: no scale is called `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> mpjax.check_progress(opt_state)
  """
  where = "mpjax.check_progress(opt_state)"
  state = find_scale(opt_state, where, name).state
  if state is None:
    return
  if isinstance(state.scale, Tracer):
    raise MpjaxTypeError(
      message(
        where,
        expected="a concrete state",
        got=f"a traced one ({state.scale})",
        fix="Call it on the host, after the jitted step has returned.",
      )
    )
  # Several values where the state is vmapped (an ensemble): the worst member counts.
  scales, skips = np.atleast_1d(state.scale), np.atleast_1d(state.consecutive_skips)
  if not np.all(np.isfinite(scales) & (scales > 0)):
    raise MpjaxRuntimeError(
      message(
        where,
        expected="a positive finite loss scale",
        got=str(np.asarray(state.scale)),
        fix="No step can leave it so: restore another checkpoint, or call mpjax.set_loss_scale.",
      )
    )
  worst = int(np.argmax(skips))
  if skips[worst] >= max_consecutive_skips:
    first_bad = int(np.atleast_1d(state.first_bad)[worst])
    raise MpjaxRuntimeError(
      message(
        where,
        expected=f"fewer than {max_consecutive_skips} skipped steps in a row",
        got=f"{skips[worst]}, at loss scale {scales[worst]:.9g}; the last step's first non-finite "
        f"value was in {_name_leaf(first_bad, params)}",
        fix="At a small scale the cause is not the scale: look for an inf or NaN in the data and "
        "the loss, log(0), a division by 0, or a learning rate that is too high.",
      )
    )


def _name_leaf(position: int, params: PyTree) -> str:
  if params is None:
    return f"gradient leaf {position} (in the order of jax.tree.leaves; params= gives its path)"
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  if position >= len(paths):
    return "the loss, the model state or the updates, not the gradients"
  return f"the gradient of {jax.tree_util.keystr(paths[position]) or 'the root'}"


def commit(finite: Array, new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` if the step was finite, else `old`: for state that no optimizer holds.

  Batch statistics, moving averages and step counters, once updated by a bad batch, stay so; this
  keeps a skipped step out of them, bit for bit.

  Args:
    finite: the scalar bool flag, `mpjax.loss_scaling_metrics(opt_state)["finite"]` after
      `update`. Combine it with `mpjax.all_finite(new)` where `new` may be non-finite by itself.
    new: a tree of arrays, after the step.
    old: the same tree before the step.

  Raises:
    MpjaxTypeError: `finite` is not a bool.
    MpjaxValueError: `finite` is not a scalar, or the trees differ in structure, shapes or dtypes.

  >>> import jax.numpy as jnp, mpjax
  >>> print(mpjax.commit(jnp.asarray(False), new=jnp.asarray(jnp.nan), old=jnp.asarray(0.5)))
  0.5
  """
  where = "mpjax.commit(finite, new, old)"
  if not isinstance(finite, bool) and getattr(finite, "dtype", None) != jnp.bool_:
    got = f"a {type(finite).__name__}" if not hasattr(finite, "dtype") else str(finite.dtype)
    raise MpjaxTypeError(
      message(
        where,
        expected="a bool flag as the first argument",
        got=got,
        fix='Pass mpjax.loss_scaling_metrics(opt_state)["finite"].',
      )
    )
  return select(jnp.asarray(finite), new, old, where)
