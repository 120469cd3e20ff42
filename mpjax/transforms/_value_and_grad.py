"""`jax.value_and_grad` with the loss scaled on the inside, and its parts for a loop by hand."""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import ParamSpec

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.active import AUDIT
from mpjax._core.errors import MpjaxTypeError, check_call, check_scalar, kind_of
from mpjax._core.frameworks import framework_of
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Function, Grads, Leaf, Module, OptState, PyTree
from mpjax.transforms._loss_scale import find_scale, scale_reader, unscale_tree
from mpjax.transforms._trees import at_least_float32

P = ParamSpec("P")

_CALL = "mpjax.value_and_grad"
_ONE_NUMBER = "Return one number to minimise, such as jnp.mean(losses)."
_BUILD = f"Write {_CALL}(loss_fn, opt_state)(params, batch), inside of the step."


@check_call(f"{_CALL}(fun, opt_state)", fix=_BUILD)
def value_and_grad(
  fun: Callable[P, PyTree],
  opt_state: OptState,
  argnums: Hashable | Sequence[int] = 0,
  has_aux: bool = False,
  allow_int: bool = False,
  *,
  name: str | None = None,
  differentiator: Callable[..., Function] = jax.value_and_grad,
) -> Callable[P, tuple[PyTree, Grads]]:
  """Like `jax.value_and_grad`, for a loss that is scaled before it is differentiated.

  **Build it in the step**, from the state that the step is given: the function keeps the scale of
  `opt_state`, and after an update `update` would divide by another one. With a dynamic scale that
  is an error where it can be seen.

  Args:
    fun: returns a loss, floating of shape (), or that and anything else if `has_aux`.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`; its `update` takes the
      gradients.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: `fun` returns a pair of the loss and something else, which is returned as it is.
    allow_int: integer arguments may be differentiated (their gradients are `float0`).
    name: which of several loss scales to use.
    differentiator: what differentiates, called as `differentiator(fun, has_aux=True)` (and with
      `argnums` and `allow_int` where they are given): `equinox.filter_value_and_grad` for models of
      Equinox.

  Returns:
    A function of the arguments of `fun` that returns the loss as `fun` computed it (unscaled, in
    its own dtype; or `(loss, aux)`) and the *scaled* gradients, in the shapes and dtypes of the
    arguments.

  Raises:
    MpjaxTypeError: `fun` is no function, or the state has no scale, or has two; when called: the
      loss is not a floating number, `fun` returns no pair under `has_aux`, or a model has to be
      differentiated by the function of its own library.
    MpjaxValueError: no scale is called `name`; when called: the loss is not a scalar.
    MpjaxRuntimeError: when called: the dynamic scale would be a constant of a function that is
      traced with the parameters as its arguments (also where that would do no harm, in
      `jax.checkpoint` say), or the state that it came from was there at the first call and is gone.

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
  return differentiate_scaled(
    fun, opt_state, argnums, has_aux, allow_int, name, differentiator, _CALL, "opt_state"
  )


def differentiate_scaled(
  fun: Callable[P, PyTree],
  opt_state: OptState,
  argnums: Hashable | Sequence[int],
  has_aux: bool,
  allow_int: bool,
  name: str | None,
  differentiator: Callable[..., Function],
  call: str,
  state: str,
) -> Callable[P, tuple[PyTree, Grads]]:
  """Returns `mpjax.value_and_grad(...)`; errors say which function was called, and with what."""
  if not callable(fun):
    raise MpjaxTypeError(
      f"{call}(fun)",
      expected="the function that computes the loss as the first argument",
      got=kind_of(fun),
      fix=f"Write {call}(loss_fn, {state})(...).",
    )
  owned = find_scale(opt_state, f"{call}({state})", name)
  read, largest = scale_reader(owned, f"{call}(fun, {state})"), owned.largest
  options: dict[str, object] = {} if argnums == 0 else {"argnums": argnums}
  options |= {"allow_int": True} if allow_int else {}

  @functools.wraps(fun, updated=())
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, Grads]:
    # What is differentiated; `nnx.DiffState` has its position in a field.
    several: Sequence[Leaf] = argnums if isinstance(argnums, Sequence) else [argnums]
    positions = [getattr(one, "argnum", one) for one in several]
    primals = [args[i] for i in positions if -len(args) <= i < len(args)]
    scale = read(primals)
    if differentiator is jax.value_and_grad:
      _check_library(primals, allow_int)

    @functools.wraps(fun, updated=())
    def scaled(
      *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Array, tuple[Array, PyTree, Array | None]]:
      loss, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
      # The derivative of a float16 loss starts with the scale in float16, which is inf from 2^16
      # on. So no more than 2^15 of it is multiplied there, and the gradients by the rest.
      within, rest = scale, None
      if scale is not None and _may_overflow(loss, largest):
        within = jnp.minimum(scale, jnp.float32(2**15))
        rest = scale / within
      product = loss if within is None else _scaled(loss, within)
      # The plain loss leaves as aux: dividing the scaled one again would round or overflow.
      return product, (loss, aux, rest)

    (_, (loss, aux, rest)), grads = differentiator(scaled, has_aux=True, **options)(*args, **kwargs)
    if rest is not None:
      grads = jax.tree.map(lambda g: _times(g, rest), grads)
    return ((loss, aux) if has_aux else loss), grads

  return wrapper


def scale_loss(loss: Array, opt_state: OptState, *, name: str | None = None) -> Array:
  """Returns `loss` times the loss scale of `opt_state`, to be differentiated.

  A loss in low precision is cast to float32 before it is multiplied. Its derivative starts with the
  scale in its own dtype: where that is float16 and the scale may exceed 2^15, there is a warning.
  `mpjax.value_and_grad` does without it, and returns the plain loss as well.

  Args:
    loss: floating, of shape ().
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`, or any tree that holds
      one such state (a chain, a mask, a train state).
    name: which of several loss scales to use.

  Returns:
    Float32 of shape () (float64 if `loss` is); `loss` itself under `NoLossScale`.

  Raises:
    MpjaxTypeError: the loss is not a floating number, or the state has no scale, or has two.
    MpjaxValueError: the loss is not a scalar, or no scale is called `name`.
    MpjaxRuntimeError: the dynamic scale would be a constant of the function that is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> mpjax.scale_loss(jnp.asarray(5.0, jnp.float16), tx.init(jnp.ones(3)))
  Array(163840., dtype=float32)
  """
  where = "mpjax.scale_loss(opt_state)"
  owned = find_scale(opt_state, where, name)
  check_loss(loss, "mpjax.scale_loss(loss)")
  scale, largest = scale_reader(owned, where)(loss), owned.largest
  if isinstance(loss, Tracer) and scale is not None and _may_overflow(loss, largest):
    warnings.warn(
      "mpjax.scale_loss(loss): the loss is float16. Its derivative starts with the loss scale, "
      f"which in float16 is inf from 2^16 on, and this one may be {largest:.9g}: such steps are "
      "skipped. Let mpjax.value_and_grad scale it, cast to float32 in the loss function, before "
      "the mean (losses.astype(jnp.float32)), or pass DynamicLossScale(max_scale=2**15).",
      UserWarning,
      stacklevel=2,
    )
  return loss if scale is None else _scaled(loss, scale)


def unscale(grads: Grads, opt_state: OptState, *, name: str | None = None) -> Grads:
  """Returns the gradients of the plain loss, to look at.

  `update` still takes the scaled ones: it unscales them itself.

  Args:
    grads: the gradients of the scaled loss, arrays of any shapes and floating dtypes.
    opt_state: the state whose scale multiplied that loss, before `update`.
    name: which of several loss scales to use.

  Returns:
    `grads` divided by the scale, in their shapes, in float32 (float64 and complex leaves keep their
    dtype; None, integers and keys stay as they are).

  Raises:
    MpjaxTypeError: the state has no scale, or has two.
    MpjaxValueError: no scale is called `name`.
    MpjaxRuntimeError: the dynamic scale would be a constant of the function that is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(4))
  >>> mpjax.unscale(jnp.asarray([8.0, 2.0], jnp.float16), tx.init(jnp.ones(2)))
  Array([2. , 0.5], dtype=float32)
  """
  where = "mpjax.unscale(opt_state)"
  return unscale_tree(grads, scale_reader(find_scale(opt_state, where, name), where)(grads))


def _may_overflow(loss: Leaf, largest: float) -> bool:
  """Whether a scale up to `largest`, as the cotangent of the loss, may be too large for it."""
  return jnp.result_type(loss) == jnp.float16 and largest > float(jnp.finfo(jnp.float16).max)


def _scaled(loss: Leaf, scale: Array) -> Array:
  if AUDIT.value is not None:
    AUDIT.value.note_scaled()
  wide = at_least_float32(loss)
  return wide * scale.astype(wide.dtype)


def _times(grad: Leaf, factor: Array) -> Leaf:
  """Returns a gradient times a factor, multiplied in float32 at least."""
  if not is_inexact(grad):
    return grad
  wide = at_least_float32(grad)
  return (wide * factor.astype(wide.real.dtype)).astype(grad.dtype)


def _check_library(models: Sequence[Module], allow_int: bool) -> None:
  """Raises for models that `jax.value_and_grad` does not take, or whose updates it would lose."""
  for model in models:
    framework = framework_of(model)
    leaves = jax.tree.leaves(model) if framework == "Equinox" and not allow_int else []
    if framework == "NNX" or not all(map(is_inexact, leaves)):
      raise MpjaxTypeError(
        "mpjax.value_and_grad(fun, opt_state)(params)",
        expected="a tree of floating arrays to differentiate",
        got=f"a model of {framework} ({type(model).__name__})",
        fix="Use mpjax.value_and_grad(loss_fn, optimizer)."
        if framework == "NNX"
        else "Pass differentiator=equinox.filter_value_and_grad.",
      )


def _loss_and_aux(out: PyTree, has_aux: bool) -> tuple[Leaf, PyTree]:
  """Returns what `fun` returned as a loss, checked, and the rest."""
  pair = isinstance(out, (tuple, list)) and len(out) == 2
  where = "mpjax.value_and_grad(fun): the loss"
  if has_aux and not pair:
    where, fix = "mpjax.value_and_grad(fun, has_aux=True)", "Return both, or leave has_aux out."
    expected, got = "fun to return a pair (loss, aux)", kind_of(out)
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  if pair and not has_aux:
    fix = f"If it is (loss, aux), pass has_aux=True. Else: {_ONE_NUMBER}"
    got = f"{kind_of(out)} of two"
    raise MpjaxTypeError(where, expected="a floating scalar", got=got, fix=fix)
  loss, aux = out if has_aux else (out, None)
  check_loss(loss, where)
  return loss, aux


def check_loss(loss: Leaf, where: str) -> None:
  """Raises unless `loss` is a floating scalar."""
  is_number = isinstance(loss, float) or hasattr(loss, "dtype")
  if not is_number or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    raise MpjaxTypeError(where, expected="a floating scalar", got=kind_of(loss), fix=_ONE_NUMBER)
  check_scalar(loss, where, expected="a floating scalar", fix=_ONE_NUMBER)
