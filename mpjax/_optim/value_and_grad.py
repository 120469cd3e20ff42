"""`jax.value_and_grad` and `nnx.value_and_grad` of a loss that is scaled on the inside."""

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxTypeError, check_call, check_callable, check_scalar, kind_of
from mpjax._core.frameworks import framework_of, kind_of_model, library_of_grad
from mpjax._core.types import Array, Function, Grads, Leaf, Module, OptState, P, PyTree, is_inexact
from mpjax._optim.find_scale import find_scale, scale_reader
from mpjax._optim.loss_scale import unscale_tree
from mpjax._optim.optimizer_trees import at_least_float32
from mpjax._policy.active import AUDIT

_CALL = "mpjax.value_and_grad"
_WHERE = f"{_CALL}(fun, opt_state)"
_FIX = (
  f"Write {_CALL}(loss_fn, opt_state)(params, batch). With Flax NNX pass optimizer and model: "
  f"{_CALL}(loss_fn, optimizer)(model, batch)."
)
_ONE_NUMBER = "Return one number to minimise, such as jnp.mean(losses)."


@check_call(_WHERE, fix=_FIX)
def value_and_grad(
  fun: Callable[P, PyTree],
  opt_state: OptState,
  argnums: Any = 0,
  has_aux: bool = False,
  allow_int: bool = False,
  *,
  name: str | None = None,
  differentiator: Callable[..., Function] | None = None,
) -> Callable[P, tuple[PyTree, Grads]]:
  """Scale a loss and differentiate it, like `jax.value_and_grad`.

  **Build it inside the step**, from the state that the step is given. The function keeps the scale
  of `opt_state`, while `update` divides by the current scale. In a compiled step a dynamic scale
  from outside raises an error. In a loop outside `jit` nothing detects the mistake.

  If modules or variables of Flax NNX are among the arguments, `nnx.value_and_grad` differentiates.
  Pass the gradients to `optimizer.update(model, grads)`. `mpjax.nnx.atomic_step` restores what the
  forward pass of a skipped step wrote.

  Args:
    fun: returns a loss, floating of shape (), or `(loss, aux)` with `has_aux`.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`, or an `nnx.Optimizer`.
    argnums: which positional arguments to differentiate with respect to: an integer, several, or
      an `nnx.DiffState`.
    has_aux: whether `fun` returns a pair `(loss, aux)`.
    allow_int: whether integer arguments may be differentiated (their gradients are `float0`).
    name: which of several loss scales to use.
    differentiator: the function that differentiates, in place of `jax.value_and_grad` or
      `nnx.value_and_grad`; `equinox.filter_value_and_grad` for models of Equinox.

  Returns:
    A function of the arguments of `fun` that returns a pair. The first is the unscaled loss in its
    own dtype, or `(loss, aux)`. The second is the *scaled* gradients, in trees like the arguments.
    The gradients of an NNX module are an `nnx.State`.

  Raises:
    MpjaxTypeError: `fun` is no function, or a method of an NNX module; `argnums` is no position;
      the state has no loss scale, or several. When called: the loss is no floating number, or a
      model needs the differentiator of its library.
    MpjaxValueError: no scale is called `name`; when called: the loss is not a scalar.
    MpjaxRuntimeError: when called: a dynamic scale would be a constant of what is traced, or the
      state was donated.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> loss, grads = mpjax.value_and_grad(lambda p: jnp.sum(p**2), opt_state)(params)
  >>> print(loss, grads, tx.update(grads, opt_state, params)[0])
  5.0 [16. 32.] [-1. -2.]
  """
  _check_fun(fun)
  positions = _positions(argnums)
  scale = find_scale(opt_state, f"{_CALL}(opt_state)", name)
  # Found once, when the function is built. The scale is read at each call.
  read, largest = scale_reader(scale, _WHERE), scale.largest
  # Pass an option only if it was given: other differentiators may not have it.
  options: dict[str, object] = {} if argnums == 0 else {"argnums": argnums}
  options |= {"allow_int": True} if allow_int else {}

  @functools.wraps(fun, updated=())
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, Grads]:
    # A position out of range is left to the differentiator, which raises its own error.
    primals = [args[i] for i in positions if -len(args) <= i < len(args)]
    scaled = _scaled_loss(fun, read(primals), largest, has_aux)
    differentiate = differentiator
    if differentiate is None:
      _check_leaves_of_equinox(primals, allow_int)
      differentiate = library_of_grad((args, kwargs)).value_and_grad
    (_, (loss, aux, rest)), grads = differentiate(scaled, has_aux=True, **options)(*args, **kwargs)
    if rest is not None:
      grads = _times_rest(grads, rest)
    return ((loss, aux) if has_aux else loss), grads

  return wrapper


def _check_fun(fun: object) -> None:
  """Raises unless `fun` is a function whose arguments can be differentiated."""
  expected = "the function that computes the loss as the first argument"
  check_callable(fun, f"{_CALL}(fun)", expected=expected, fix=_FIX)
  if isinstance(fun, types.MethodType) and framework_of(fun.__self__) == "NNX":
    expected = "a function that is given the model as an argument"
    got = f"a method of the model ({fun.__qualname__})"
    fix = "Write lambda model, x: model.loss(x), so that the model is differentiated."
    raise MpjaxTypeError(_WHERE, expected=expected, got=got, fix=fix)


def _positions(argnums: Hashable | Sequence[Leaf]) -> list[int]:
  """Returns the positions of the arguments that are differentiated."""
  several: Sequence[Any] = argnums if isinstance(argnums, Sequence) else [argnums]
  # An `nnx.DiffState` holds its position in the field `argnum`.
  positions = [getattr(one, "argnum", one) for one in several]
  if not all(isinstance(x, (int, jnp.integer)) for x in positions):
    where, expected = f"{_CALL}(argnums)", "positions of arguments"
    raise MpjaxTypeError(where, expected=expected, got=kind_of(argnums), fix=_FIX)
  return positions


def _scaled_loss(
  fun: Callable[..., PyTree], scale: Array | None, largest: float, has_aux: bool
) -> Function:
  """Returns a function that returns the scaled loss, and `(loss, aux, rest)`.

  The gradients are then multiplied by `rest`, if it is not None.
  """

  @functools.wraps(fun, updated=())
  def scaled(*args: Any, **kwargs: Any) -> tuple[Array, tuple[Array, PyTree, Array | None]]:
    loss, aux = loss_and_aux(fun(*args, **kwargs), has_aux, f"{_CALL}(fun)")
    # The backward pass starts with the scale in the dtype of the loss. In float16, 2^16 is inf. So
    # a float16 loss is multiplied by at most 2^15, and the gradients by the rest.
    within, rest = scale, None
    if scale is not None and _may_overflow(loss, largest):
      within = jnp.minimum(scale, jnp.float32(2**15))
      rest = scale / within
    product = loss if within is None else _times(loss, within)
    # Return the plain loss as aux: dividing the scaled one would round, or give inf.
    return product, (loss, aux, rest)

  if isinstance(fun, functools.partial):
    # The fixed keywords of a partial are defaults in its signature. Flax would take them for
    # keyword arguments of the call.
    del scaled.__wrapped__
  return scaled


def _times_rest(grads: Grads, rest: Array) -> Grads:
  """Multiplies gradients by the part of the scale that a float16 loss could not take."""

  def times(g: Leaf) -> Leaf:
    # Gradients keep their dtype.
    return _times(g, rest).astype(g.dtype) if is_inexact(g) else g

  return jax.tree.map(times, grads)


def unscale(grads: Grads, opt_state: OptState, *, name: str | None = None) -> Grads:
  """Divide gradients by the loss scale, to inspect them. `update` takes the scaled ones.

  Args:
    grads: the gradients of the scaled loss, arrays of any shapes and floating dtypes.
    opt_state: the state before `update`, whose scale multiplied the loss.
    name: which of several loss scales to use.

  Returns:
    `grads` divided by the scale, in float32. Float64 and complex leaves keep their dtype. None,
    integers and keys do not change.

  Raises:
    MpjaxError: as `mpjax.value_and_grad` does, of the state.

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


def _times(x: Leaf, scale: Array) -> Array:
  """Returns a loss, or a gradient, times a factor, multiplied in float32 at least."""
  if AUDIT.value is not None:
    AUDIT.value.uses.add("loss scale")  # The audit lists features that the function uses.
  wide = at_least_float32(x)
  return wide * scale.astype(wide.real.dtype)


def _check_leaves_of_equinox(models: Sequence[Module], allow_int: bool) -> None:
  """Raises for models of Equinox with leaves that `jax.value_and_grad` does not differentiate."""
  if allow_int:
    return
  for model in models:
    if framework_of(model) != "Equinox":
      continue
    # A module of Equinox has functions and integers among its leaves. `jax.value_and_grad` refuses
    # these in an error that does not name Equinox.
    if not all(map(is_inexact, jax.tree.leaves(model))):
      expected, got = "a tree of floating arrays", kind_of_model(model)
      fix = "Pass differentiator=equinox.filter_value_and_grad."
      raise MpjaxTypeError(f"{_WHERE}(params)", expected=expected, got=got, fix=fix)


def loss_and_aux(out: PyTree, has_aux: bool, call: str) -> tuple[Leaf, PyTree]:
  """Returns the loss in the result of a function, checked, and the rest."""
  where = f"{call}: the loss"
  # A wrong `has_aux` is the common mistake. JAX would report a loss of the wrong type.
  if has_aux != (isinstance(out, (tuple, list)) and len(out) == 2):
    expected, fix = "a floating scalar", "Pass has_aux=True, or return the loss alone."
    if has_aux:
      expected, fix = "a pair (loss, aux)", "Drop has_aux=True, or return (loss, aux)."
    raise MpjaxTypeError(where, expected=expected, got=kind_of(out), fix=fix)
  loss, aux = out if has_aux else (out, None)
  check_loss(loss, where)
  return loss, aux


def check_loss(loss: Leaf, where: str) -> None:
  """Raises unless `loss` is a floating scalar."""
  is_number = isinstance(loss, float) or hasattr(loss, "dtype")
  if not is_number or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    raise MpjaxTypeError(where, expected="a floating scalar", got=kind_of(loss), fix=_ONE_NUMBER)
  check_scalar(loss, where, expected="a floating scalar", fix=_ONE_NUMBER)
