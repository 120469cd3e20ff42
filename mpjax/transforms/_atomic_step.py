"""A step that writes to objects of NNX: all of it happens, or nothing."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp

from mpjax._core.errors import MpjaxTypeError, check_callable
from mpjax._core.leaves import is_nnx_variable
from mpjax._core.trees import select
from mpjax._core.types import P
from mpjax.transforms._loss_scale import scales_in
from mpjax.transforms._trees import leaves_with_path, plain_array

R = TypeVar("R")


def atomic_step(step: Callable[P, R]) -> Callable[P, R]:
  """Returns `step` such that nothing of a skipped step remains in what it was given.

  What a step writes beside parameters and the optimizer's state (batch statistics, counts of random
  numbers, `optimizer.step`) this takes back, bit for bit, where an optimizer that it has updated
  has skipped. Only the loss scale moves.

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
    scales = scales_in((args, kwargs))
    if not scales:
      fix = "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)."
      expected, got = "an optimizer with a loss scale among the arguments", "none"
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
    totals = [one.state and one.state.total for one in scales]
    # An only optimizer has kept its own state, in place; of several one may have been applied.
    kept = [one.owner if len(scales) == 1 else one.stored for one in scales]
    own = {id(x) for _, x in leaves_with_path(kept)}
    leaves = [x for _, x in leaves_with_path((args, kwargs))]
    variables = [x for x in leaves if is_nnx_variable(x) and id(x) not in own]
    old = [plain_array(x) for x in variables]
    result = step(*args, **kwargs)
    applied = jnp.asarray(True)
    for one, total in zip(scales, totals, strict=True):
      if one.state is not None:  # One that the step has not updated has no say.
        applied &= one.state.finite | (one.state.total == total)
    chosen = select(applied, [plain_array(x) for x in variables], old, where)
    for variable, x in zip(variables, chosen, strict=True):
      variable[...] = x
    return result

  return wrapper
