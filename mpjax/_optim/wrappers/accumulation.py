"""The optax wrapper that adds up gradients of several micro-batches for one update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import REFUSALS, MpjaxTypeError, MpjaxValueError, check_int, check_scalar
from mpjax._core.types import Array, Grads, OptState, Params, PyTree, Updates
from mpjax._optim.find_scale import refuse_scale_inside
from mpjax._optim.loss_scale import count_up
from mpjax._optim.optimizer_trees import (
  align_gradients,
  arrays_only,
  float32_view,
  nothing_like,
  place_like,
  step_or_skip,
)
from mpjax._optim.states import AccumulationState
from mpjax._optim.wrapper_checks import check_inner, check_state, refuse_integers
from mpjax._optim.wrappers.master_weights import as_checked, init_in_float32, update_in_float32

_EVERY = "mpjax.accumulate_gradients(every)"


def accumulate_gradients(
  inner: optax.GradientTransformation, every: int | Callable[[Array], Array | int]
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that it makes one update from the mean gradient of several micro-batches.

  Until the window is full the updates are -0.0, which changes no bits, and the inner state stays.
  Gradients are added in float32, and the sum is divided once. So are losses passed as `value=`, if
  `inner` reads them. Other extra arguments are those of the micro-batch that ends the window. The
  functions that a line search or opaque sam needs are an error.

  With loss scaling, write `loss_scaling(accumulate_gradients(inner, every))`. The window waits for
  `every` finite micro-batches. `mpjax.make_train_step(micro_batches=...)` decides once for all.

  Args:
    inner: the optimizer.
    every: the number of micro-batches in a window, or a function that returns it for the number of
      updates (int32 of shape ()). Under `jit` fractions are rounded up, and the least is 1.

  Returns:
    An optax transformation, with an `AccumulationState`. Its updates have the shapes of the
    parameters, and are float32 (64-bit and complex ones as the parameters).

  Raises:
    MpjaxTypeError: an argument has the wrong type; `init`: there is a `loss_scaling` inside.
    MpjaxValueError: `every` is less than 1; `update`: the gradients do not match the parameters.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> inner = mpjax.accumulate_gradients(optax.sgd(1.0), 2)
  >>> tx = mpjax.loss_scaling(inner, mpjax.StaticLossScale(8))
  >>> params = jnp.asarray([1.0])
  >>> opt_state = tx.init(params)
  >>> for gradient in (1.0, jnp.inf, 3.0):
  ...   updates, opt_state = tx.update(jnp.asarray([gradient]), opt_state, params)
  >>> print(updates)
  [-2.]
  """
  where = "mpjax.accumulate_gradients(inner)"
  inner = check_inner(inner, where)
  if not callable(every):
    expected = "an integer, at least 1, or a function of the number of updates"
    fix = "Pass how many micro-batches make one update."
    every = check_int(every, _EVERY, least=1, expected=expected, fix=fix, fix_type=fix)

  def init(params: Params) -> AccumulationState:
    refuse_integers(params, f"{where}.init(params)")
    params = arrays_only(params)
    inner_state = init_in_float32(inner, params, where)
    # With the scale inside, one overflowed micro-batch would turn the sum of the entire window into
    # inf.
    fix = "Swap the two: loss_scaling(accumulate_gradients(inner, every)) adds finite gradients."
    refuse_scale_inside(inner_state, where, got="mpjax.loss_scaling", fix=fix)
    # The state holds float32 sums: in bfloat16 a sum stops growing after 256 equal gradients.
    zero, view = jnp.zeros((), jnp.int32), float32_view(params)
    value = (
      jnp.zeros((), jnp.float32) if _reads_value(inner, view, as_checked(inner_state)) else None
    )
    new = AccumulationState(zero, zero, nothing_like(view), inner_state, value)
    return place_like(params, new)

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, AccumulationState]:
    state = check_state(state, AccumulationState, f"{where}.update(state)")
    params = arrays_only(params)
    # A line search and opaque SAM evaluate the loss of one batch. An update of several has none.
    alone = [f"{name}=" for name in ("grad", "value_fn", "grad_fn") if name in extra_args]
    if alone:
      expected = "value= and arguments that do not depend on the batch"
      got = "a gradient or function of one micro-batch, but an update belongs to a whole window"
      fix = "Leave them out, or add up the gradients in the step, without accumulate_gradients."
      call = f"{where}.update({', '.join(alone)})"
      raise MpjaxTypeError(call, expected=expected, got=got, fix=fix)
    expected, fix = "the loss of the micro-batch, a scalar", "Pass its mean."
    check_scalar(extra_args.get("value", 0), f"{where}.update(value)", expected=expected, fix=fix)
    # `params` is optional in optax. The sum has the same tree and shapes, and stands in for it.
    like = state.total if params is None else params
    grads = float32_view(align_gradients(updates, like, f"{where}.update(updates)"))
    total = jax.tree.map(jnp.add, state.total, grads)
    count = count_up(state.micro_batches)
    window = every(state.updates_done) if callable(every) else every
    # A traced number cannot raise. `count >= window` rounds fractions up, and ends windows below 1.
    if not isinstance(window, Tracer) and not (window >= 1 and float(window).is_integer()):
      expected, fix = "a function that returns an integer, at least 1", "Round its result."
      raise MpjaxValueError(_EVERY, expected=expected, got=str(window), fix=fix)
    # >=, not ==: a state restored into a shorter window may be past it already.
    full = count >= window
    # Optimizers that read the loss get its mean over the micro-batches so far, like the gradient.
    value = state.value
    if value is not None and extra_args.get("value") is not None:
      value = value + jnp.asarray(extra_args["value"], jnp.float32)
      extra_args["value"] = value / count.astype(jnp.float32)

    def step(inner_state: OptState) -> tuple[Updates, OptState]:
      # Divide by the true number of gradients, which differs from `every` after a restore. `real`
      # is the dtype of the magnitude: a complex sum is divided by a real count.
      mean = jax.tree.map(lambda t: t / count.astype(t.real.dtype), total)
      return update_in_float32(inner, mean, inner_state, params, extra_args, f"{where}.update")

    # Inside an open window `inner` does not run, so its counts and moments stay.
    new_updates, inner_state = step_or_skip(full, step, state.inner_state)
    # The next sum starts from -0.0, since -0.0 + g has the bits of g, also for g = -0.0.
    return new_updates, AccumulationState(
      micro_batches=jnp.where(full, 0, count),
      updates_done=count_up(state.updates_done, full),
      total=jax.tree.map(lambda t, n: jnp.where(full, n, t), total, nothing_like(total)),
      inner_state=inner_state,
      value=None if value is None else jnp.where(full, jnp.zeros_like(value), value),
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _reads_value(
  inner: optax.GradientTransformationExtraArgs, params: Params, inner_state: OptState
) -> bool:
  """Whether `inner` reads `value=`; only then the state holds a sum of it."""
  # The signature does not tell: a chain takes any extra argument. The jaxpr of `update` shows
  # whether it uses `value`, the last argument.

  def update(p: Params, state: OptState, value: Array) -> tuple[Updates, OptState]:
    return inner.update(p, state, p, value=value)

  try:
    jaxpr = jax.make_jaxpr(update)(params, inner_state, np.float32(1)).jaxpr
  except REFUSALS:  # It wants more arguments, which only update will have.
    return True
  # A value that is only passed through to the new state counts as used, too.
  used = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
  return any(v is jaxpr.invars[-1] for v in used)
