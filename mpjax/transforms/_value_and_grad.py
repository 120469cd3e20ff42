"""`jax.value_and_grad` with the loss scaled on the inside."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError, check_call
from mpjax._core.frameworks import framework_of
from mpjax._core.trees import half_to_float32, is_inexact
from mpjax._core.types import Array, PyTree
from mpjax.transforms._loss_scale_access import (
  Found,
  LossScalingState,
  check_loss,
  find_scale,
  plain_array,
  scale_in_range,
)

_BUILD_IN_THE_STEP = (
  "Build it inside of the step, from the state that the step is given: "
  "mpjax.value_and_grad(loss_fn, opt_state)(params, batch), or with NNX "
  "mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, batch)."
)


@check_call("mpjax.value_and_grad(fun, opt_state)", fix=_BUILD_IN_THE_STEP)
def value_and_grad(
  fun: Callable[..., Any],
  opt_state: PyTree,
  argnums: Any = 0,
  has_aux: bool = False,
  allow_int: bool = False,
  *,
  name: str | None = None,
  differentiator: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
  """Like `jax.value_and_grad`, for a loss that is scaled before it is differentiated.

  **Build it in the step**, from the state that the step is given. The function keeps the scale of
  `opt_state`: after an update it would multiply by the old one, and `update` divide by the new one.
  With a dynamic scale that is an error where it can be seen.

  Args:
    fun: returns a floating scalar, or that and anything else if `has_aux`.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`; its `update` takes the
      gradients.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: `fun` returns a pair of the loss and something else, which is returned as it is.
    allow_int: integer arguments may be differentiated (their gradients are `float0`).
    name: which of several loss scales to use.
    differentiator: what differentiates, called as `differentiator(fun, has_aux=True)` (and with
      `argnums` and `allow_int` where they are given): `equinox.filter_value_and_grad` for models of
      Equinox. For those of NNX there is `mpjax.nnx.value_and_grad`.

  Returns:
    A function of the arguments of `fun` that returns the loss as `fun` computed it (unscaled, in
    its own dtype; or `(loss, aux)`) and the *scaled* gradients, in the dtypes of the arguments.

  Raises:
    MpjaxTypeError: `fun` is no function, or the state has no scale, or has two; when called: the
      loss is not a floating number, `fun` returns no pair under `has_aux`, or a model has to be
      differentiated by the function of its own library.
    MpjaxValueError: no scale is called `name`; when called: the loss is not a scalar.
    MpjaxRuntimeError: when called: the dynamic scale would be a constant of a program that is
      traced with the parameters as its arguments (also for `jax.checkpoint`, `jax.eval_shape` and
      loops outside of `jit`, where it would do no harm: that cannot be seen), or the state that it
      came from was there at the first call and is gone.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> loss, grads = mpjax.value_and_grad(lambda p: jnp.sum(p**2), opt_state)(params)
  >>> print(loss, grads)
  5.0 [16. 32.]
  >>> updates, opt_state = tx.update(grads, opt_state, params)
  >>> print(updates)
  [-1. -2.]
  """
  _check_fun(fun)
  found = find_scale(opt_state, "mpjax.value_and_grad(opt_state)", name)
  scaled_by, check_current = _scale_alone(found), _check_of_currency(found)
  options: dict[str, Any] = {} if argnums == 0 else {"argnums": argnums}
  options |= {"allow_int": True} if allow_int else {}

  @functools.wraps(fun, updated=())
  def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    loss: Any
    loss, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
    product, rest = scale_in_range(loss, scaled_by, name)
    # The plain loss leaves as aux: dividing the scaled one again would round or overflow.
    return product, (loss, aux, rest)

  differentiate = differentiator(scaled, has_aux=True, **options)

  @functools.wraps(fun, updated=())
  def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    wanted = [args[i] for i in _positions(argnums) if -len(args) <= i < len(args)]
    check_current(wanted)
    if differentiator is jax.value_and_grad:
      _check_library(wanted, allow_int)
    (_, (loss, aux, rest)), grads = differentiate(*args, **kwargs)
    if rest is not None:
      grads = jax.tree.map(lambda g: _times(g, rest), grads)
    return ((loss, aux) if has_aux else loss), grads

  return wrapper


def _times(grad: Any, factor: Array) -> Any:
  """Returns a gradient times a factor, multiplied in float32 at least."""
  if not is_inexact(grad):
    return grad
  wide = half_to_float32(grad)
  return (wide * factor.astype(wide.real.dtype)).astype(grad.dtype)


def _check_fun(fun: Any) -> None:
  if not callable(fun):
    raise MpjaxTypeError(
      "mpjax.value_and_grad(fun)",
      expected="the function that computes the loss as the first argument",
      got=f"a {type(fun).__name__}",
      fix="Write mpjax.value_and_grad(loss_fn, opt_state)(params, batch).",
    )


def _scale_alone(found: Found) -> LossScalingState:
  """Returns a state with the scale in it and nothing else: moments must not live on for its sake.

  Where the scale is a variable (of an `nnx.Optimizer`) it is kept as such, and read at each call.
  """
  state = found.owner.loss_scale[found.label]
  if state:
    state = state._replace(**{field: None for field in state._fields if field != "scale"})
  return LossScalingState({found.label: state}, ())


def _check_of_currency(found: Found) -> Callable[[PyTree], None]:
  """Returns a check that the scale is still that of the state which `update` will be given.

  A static scale always is, and so is one in a variable, or in a state that is traced together with
  the parameters. Else two things give a function away that was built once, outside of the step: a
  constant scale where parameters are traced, and a state that was there at the first call and is
  not at a later one. (Every update makes a new count of good steps. A state that is kept elsewhere
  looks current for ever: what is refused here is wrong, but not all that is wrong is refused.)
  """
  state = found.owner.loss_scale[found.label]
  if not state or not found.config.startswith("dynamic"):
    return lambda wanted: None
  source, seen = state.scale, False
  array = isinstance(state.good_steps, jax.Array) and not isinstance(state.good_steps, Tracer)
  there = weakref.ref(state.good_steps) if array else None

  def check(wanted: PyTree) -> None:
    nonlocal seen
    got, scale = None, plain_array(source)
    if there is not None:
      seen = seen or there() is not None
      if seen and there() is None:
        got = "one of a state that is gone since the first call"
    if not isinstance(scale, Tracer) and _is_staged(wanted, scale):
      got = "one from outside of the program that is being traced, where it would be a constant"
    if got is not None:
      raise MpjaxRuntimeError(
        "mpjax.value_and_grad(fun, opt_state)",
        expected="the dynamic loss scale of the state that this step updates",
        got=got,
        fix=f"{_BUILD_IN_THE_STEP} To jit, scan, checkpoint or eval_shape that is an argument or "
        "the carry, as the parameters are.",
      )

  return check


def _is_staged(wanted: PyTree, scale: Any) -> bool:
  """Whether parameters are arguments of a program being traced, in which `scale` is a constant.

  Under `vmap` or `grad` alone what is computed from a constant is an array again.
  """
  traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(wanted))
  return traced and isinstance(jax.lax.neg(scale), Tracer)


def _positions(argnums: Any) -> list[int]:
  """Returns the positions of what is differentiated; `nnx.DiffState` has its own in a field."""
  several = argnums if isinstance(argnums, Sequence) else [argnums]
  return [getattr(one, "argnum", one) for one in several]


def _check_library(wanted: Sequence[Any], allow_int: bool) -> None:
  """Raises for models that `jax.value_and_grad` does not take, or whose updates it would lose."""
  for model in wanted:
    framework = framework_of(model)
    leaves = jax.tree.leaves(model) if framework == "Equinox" and not allow_int else []
    if framework == "NNX" or not all(map(is_inexact, leaves)):
      raise MpjaxTypeError(
        "mpjax.value_and_grad(fun, opt_state)(params)",
        expected="a tree of floating arrays to differentiate",
        got=f"a model of {framework} ({type(model).__name__})",
        fix="Use mpjax.nnx.value_and_grad(loss_fn, optimizer)."
        if framework == "NNX"
        else "Pass differentiator=equinox.filter_value_and_grad.",
      )


def _loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
  """Returns what `fun` returned as a loss, checked, and the rest."""
  pair = isinstance(out, (tuple, list)) and len(out) == 2
  if has_aux and not pair:
    raise MpjaxTypeError(
      "mpjax.value_and_grad(fun, has_aux=True)",
      expected="fun to return a pair (loss, aux)",
      got=f"a {type(out).__name__}",
      fix="Return both, or leave has_aux out.",
    )
  if pair and not has_aux:
    raise MpjaxTypeError(
      "mpjax.value_and_grad(fun): the loss",
      expected="a floating scalar",
      got=f"a {type(out).__name__} of two",
      fix="If it is (loss, aux), pass has_aux=True; else return one number to minimise, such as "
      "jnp.mean(losses).",
    )
  loss, aux = out if has_aux else (out, None)
  check_loss(loss, "mpjax.value_and_grad(fun): the loss")
  return loss, aux
