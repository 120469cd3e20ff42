"""`jax.value_and_grad` with the loss scaled on the inside, and its parts for a loop by hand."""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.errors import MpjaxTypeError, check_call, check_callable, check_scalar, kind_of
from mpjax._core.frameworks import framework_of
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Function, Grads, Leaf, Module, OptState, P, PyTree
from mpjax._optim.loss_scale import find_scale, scale_reader, unscale_tree
from mpjax._optim.trees import at_least_float32
from mpjax._policy.active import AUDIT

_CALL = "mpjax.value_and_grad"
_ONE_NUMBER = "Return one number to minimise, such as jnp.mean(losses)."


@check_call(f"{_CALL}(fun, opt_state)", fix=f"Write {_CALL}(loss_fn, opt_state)(params, batch).")
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

  **Build it inside the step**, from the state that the step is given. The function keeps the scale
  of `opt_state`, while `update` divides by the current scale. In a compiled step a dynamic scale
  from outside raises an error. In a loop outside `jit` the mistake is not noticed.

  Args:
    fun: returns a loss, floating of shape (), or that and anything else if `has_aux`.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`, or an `nnx.Optimizer`.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: `fun` returns a pair of the loss and something else, which is returned as it is.
    allow_int: integer arguments may be differentiated (their gradients are `float0`).
    name: which of several loss scales to use.
    differentiator: what differentiates, `equinox.filter_value_and_grad` for models of Equinox.

  Returns:
    A function of the arguments of `fun` that returns the loss as `fun` computed it (unscaled, in
    its own dtype; or `(loss, aux)`) and the *scaled* gradients, like the arguments.

  Raises:
    MpjaxTypeError: `fun` is no function, `argnums` no position, or the state has no one scale;
      when called: the loss is no floating number, or a model needs that of its own library.
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
  # Called by `mpjax.nnx.value_and_grad`, errors have its argument.
  is_nnx = str(getattr(differentiator, "__module__", "")).startswith("flax.nnx")
  state = "optimizer" if is_nnx else "opt_state"
  expected = "the function that computes the loss as the first argument"
  fix = f"Write {_CALL}(loss_fn, {state})(...)."
  check_callable(fun, f"{_CALL}(fun)", expected=expected, fix=fix)
  # What is differentiated; `nnx.DiffState` has its position in a field.
  several: Sequence[Leaf] = argnums if isinstance(argnums, Sequence) else [argnums]
  positions = [getattr(one, "argnum", one) for one in several]
  if not all(isinstance(x, (int, jnp.integer)) for x in positions):
    where, expected = f"{_CALL}(argnums)", "positions of arguments"
    raise MpjaxTypeError(where, expected=expected, got=kind_of(argnums), fix=fix)
  owned = find_scale(opt_state, f"{_CALL}({state})", name)
  read, largest = scale_reader(owned, f"{_CALL}(fun, {state})"), owned.largest
  options: dict[str, object] = {} if argnums == 0 else {"argnums": argnums}
  options |= {"allow_int": True} if allow_int else {}

  @functools.wraps(fun, updated=())
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, Grads]:
    primals = [args[i] for i in positions if -len(args) <= i < len(args)]
    scale = read(primals)
    if differentiator is jax.value_and_grad:
      _check_library(primals, allow_int)

    @functools.wraps(fun, updated=())
    def scaled(
      *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Array, tuple[Array, PyTree, Array | None]]:
      loss, aux = loss_and_aux(fun(*args, **kwargs), has_aux, f"{_CALL}(fun)")
      # The derivative of a float16 loss starts with the scale in float16, which is inf from 2^16
      # on. So no more than 2^15 of it is multiplied there, and the gradients by the rest.
      within, rest = scale, None
      if scale is not None and _may_overflow(loss, largest):
        within = jnp.minimum(scale, jnp.float32(2**15))
        rest = scale / within
      product = loss if within is None else _scaled(loss, within)
      # The plain loss leaves as aux: dividing the scaled one again would round or overflow.
      return product, (loss, aux, rest)

    if isinstance(fun, functools.partial):
      # Flax reads no signature of a partial, in which its keywords would be those of the call.
      del scaled.__wrapped__
    (_, (loss, aux, rest)), grads = differentiator(scaled, has_aux=True, **options)(*args, **kwargs)
    if rest is not None:
      scaled_up = lambda g: _scaled(g, rest).astype(g.dtype) if is_inexact(g) else g  # noqa: E731
      grads = jax.tree.map(scaled_up, grads)
    return ((loss, aux) if has_aux else loss), grads

  return wrapper


def scale_loss(loss: Array, opt_state: OptState, *, name: str | None = None) -> Array:
  """Returns `loss` times the loss scale of `opt_state`, to be differentiated.

  `mpjax.value_and_grad` returns the plain loss as well, and has no limit for a float16 one.

  Args:
    loss: floating, of shape ().
    opt_state: any tree that holds one state of `mpjax.loss_scaling` (a chain, a train state).
    name: which of several loss scales to use.

  Returns:
    Float32 of shape () (float64 if `loss` is); `loss` itself under `NoLossScale`.

  Raises:
    MpjaxError: as `mpjax.value_and_grad` does, of the loss and the state.

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
      "skipped. Let mpjax.value_and_grad scale it, or cast to float32 before the mean over losses.",
      stacklevel=2,
    )
  return loss if scale is None else _scaled(loss, scale)


def unscale(grads: Grads, opt_state: OptState, *, name: str | None = None) -> Grads:
  """Returns the gradients of the plain loss, to look at: `update` takes the scaled ones.

  Args:
    grads: the gradients of the scaled loss, arrays of any shapes and floating dtypes.
    opt_state: the state whose scale multiplied that loss, before `update`.
    name: which of several loss scales to use.

  Returns:
    `grads` divided by the scale, in float32 (float64 and complex leaves keep their dtype; None,
    integers and keys stay as they are).

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


def _scaled(x: Leaf, scale: Array) -> Array:
  """Returns a loss, or a gradient, times a factor, multiplied in float32 at least."""
  if AUDIT.value is not None:
    AUDIT.value.uses.add("loss scale")
  wide = at_least_float32(x)
  return wide * scale.astype(wide.real.dtype)


def _check_library(models: Sequence[Module], allow_int: bool) -> None:
  """Raises for models that `jax.value_and_grad` does not take, or whose updates it would lose."""
  for model in models:
    framework, where = framework_of(model), f"{_CALL}(fun, opt_state)"
    leaves = jax.tree.leaves(model) if framework == "Equinox" and not allow_int else []
    if framework == "NNX":
      expected, got = "an nnx.Optimizer beside a model of NNX", "a state, such as its opt_state"
      fix = f"Pass the optimizer itself: {_CALL}(loss_fn, optimizer)(model)."
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
    if not all(map(is_inexact, leaves)):
      expected, got = "a tree of floating arrays", f"a model of Equinox ({type(model).__name__})"
      fix = "Pass differentiator=equinox.filter_value_and_grad."
      raise MpjaxTypeError(f"{where}(params)", expected=expected, got=got, fix=fix)


def loss_and_aux(out: PyTree, has_aux: bool, call: str) -> tuple[Leaf, PyTree]:
  """Returns the loss in the result of a function, checked, and the rest."""
  where = f"{call}: the loss"
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
