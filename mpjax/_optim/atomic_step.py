"""A step that writes to objects of NNX: all of it happens, or nothing."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp

from mpjax._core.errors import MpjaxTypeError, check_callable
from mpjax._core.leaves import is_nnx_variable, raw_value, set_raw_value
from mpjax._core.trees import select
from mpjax._core.types import Array, P
from mpjax._optim.loss_scale import UPDATED, LossScaleState, scales_in
from mpjax._optim.trees import leaves_with_path

R = TypeVar("R")


def atomic_step(step: Callable[P, R]) -> Callable[P, R]:
  """Returns `step` such that nothing of a skipped step remains in what it was given.

  What a step writes beside parameters and the optimizer's state (batch statistics, counts of random
  numbers, `optimizer.step`) this takes back, bit for bit, where an optimizer that it has updated
  has skipped, and with it all other updates of the step. Only loss scales and their counters move.

  Args:
    step: a function of models, of an `nnx.Optimizer` around `mpjax.loss_scaling`, and of anything
      else, in any order. Put `nnx.jit` around the result: `jax.jit` drops what a step writes.

  Returns:
    A function that returns what `step` does. Variables that it creates are not taken back.

  Raises:
    MpjaxTypeError: `step` is no function; when called: no argument holds a loss scale.
    MpjaxValueError: when called: the step has changed the shape or dtype of a variable.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> from flax import nnx
  >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)
  >>> @nnx.jit
  ... @mpjax.nnx.atomic_step
  ... def step(model, optimizer, x):
  ...   grad_fn = mpjax.value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)
  ...   loss, grads = grad_fn(model)
  ...   optimizer.update(model, grads)
  ...   return loss
  >>> loss = step(model, optimizer, jnp.full((2, 3), jnp.inf))
  >>> print(model.mean[...], optimizer.step[...], mpjax.last_step_finite(optimizer))
  [0. 0. 0.] 0 False
  """
  where = "mpjax.nnx.atomic_step(step)"
  fix = "Write it above the step: @nnx.jit, @mpjax.nnx.atomic_step, def step(model, optimizer, x)."
  check_callable(step, where, expected="a function", fix=fix)

  @functools.wraps(step)
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
    scales = [one for one in scales_in((args, kwargs)) if one.in_variables or not one.stored]
    if not scales:
      fix = "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)."
      expected, got = "an optimizer with a loss scale among the arguments", "none"
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
    before = [(one.stored, one.state) for one in scales if one.state]
    variables = [x for _, x in leaves_with_path((args, kwargs)) if is_nnx_variable(x)]
    old = [raw_value(x) for x in variables]
    updates: list[tuple[Array, Array]] = []
    outer = UPDATED.set(lambda *counts: updates.append(counts))
    try:
      result = step(*args, **kwargs)
    finally:
      UPDATED.reset(outer)
    # It was applied if each of its updates was.
    applied = jnp.asarray(True)
    for stored, state in before:
      applied &= raw_value(stored.skipped) == state.skipped
    # An only optimizer that was updated once has kept its own state, in place. A loop updates
    # other arrays than those that are here.
    ends = [(state.total, raw_value(stored.total)) for stored, state in before]
    in_place = len(scales) == 1 and any(x is a and y is b for x, y in updates for a, b in ends)
    kept = [one.owner if in_place else one.stored for one in scales]
    own = {id(x) for _, x in leaves_with_path(kept)}
    pairs = [(x, value) for x, value in zip(variables, old, strict=True) if id(x) not in own]
    chosen = select(applied, [raw_value(x) for x, _ in pairs], [x for _, x in pairs], where)
    for (variable, _), x in zip(pairs, chosen, strict=True):
      set_raw_value(variable, x)
    # An update that is taken back counts as skipped.
    for stored, state in [] if in_place else before:
      new = LossScaleState(*map(raw_value, stored))
      count = new.total - state.total
      undone = {field: getattr(state, field) + count for field in ("skipped", "consecutive_skips")}
      for field, x in {**undone, "finite": new.finite & (count == 0)}.items():
        set_raw_value(getattr(stored, field), jnp.where(applied, getattr(new, field), x))
    return result

  return wrapper
