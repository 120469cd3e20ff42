"""The loss function as a jaxpr: traced once, checked, and looked at."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mpjax._core.errors import REFUSALS, MpjaxError, MpjaxTypeError, MpjaxValueError, flax_errors
from mpjax._core.trees import check_alike
from mpjax._core.types import Array, Leaf, Params, PyTree
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.walk import walk
from mpjax.transforms._value_and_grad import check_loss

Metrics: TypeAlias = dict[str, Leaf]

LossFn: TypeAlias = Callable[
  [Params, PyTree, PyTree, Array | None], tuple[Array, tuple[PyTree, Metrics]]
]
"""`loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`."""

OUR_METRICS = frozenset(
  {
    *("loss", "grad_norm", "retries"),
    *("loss_scale", "finite", "good_steps", "total", "skipped", "consecutive_skips"),
    *("floor_hits", "bad_updates", "scale_changed"),
  }
)
"""The names that a loss function leaves to the step."""


class TracedLoss(NamedTuple):
  """A traced loss function."""

  fun: LossFn  # evaluates the jaxpr; the Python function is not called again
  jaxpr: ClosedJaxpr
  unchanged: PyTree  # like the model state: whether a leaf is returned as it was given


def trace_loss(
  loss_fn: LossFn, params: Params, model_state: PyTree, batch: PyTree, rng: Array | None
) -> TracedLoss:
  """Returns `loss_fn` traced for arguments like these."""
  # A step that is differentiated, looked at and run again would otherwise call it for each of
  # these.
  args, checked = (params, model_state, batch, rng), _checked(loss_fn)
  try:
    jaxpr, shapes = jax.make_jaxpr(checked, return_shape=True)(*args)
  except (*REFUSALS, *flax_errors()) as error:
    if rng is None and not isinstance(error, MpjaxError):
      _raise_if_a_key_helps(loss_fn, args, error)
    raise
  run, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)

  def fun(*args: PyTree) -> PyTree:
    results = run(*jax.tree.leaves(args))
    # A constant comes as a NumPy value or as a literal of JAX.
    arrays = [
      x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
      for x, aval in zip(results, jaxpr.out_avals, strict=True)
    ]
    return structure.unflatten(arrays)

  # Leaves of the arguments are those of params, then of model_state; of the results, the loss comes
  # first.
  before, count = len(jax.tree.leaves(params)), len(jax.tree.leaves(model_state))
  graph = Graph(jaxpr)
  unchanged = [graph.results[1 + i] is graph.arguments[before + i] for i in range(count)]
  # Who has switched jit off wants to look at values inside of loss_fn.
  traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
  return TracedLoss(
    fun if traced else checked,
    jaxpr,
    jax.tree.unflatten(jax.tree.structure(model_state), unchanged),
  )


def _raise_if_a_key_helps(loss_fn: LossFn, args: tuple[PyTree, ...], error: Exception) -> None:
  try:
    jax.eval_shape(loss_fn, *args[:3], jax.random.key(0))
  except (*REFUSALS, *flax_errors()):
    return  # Something else is wrong.
  raise MpjaxTypeError(
    "mpjax.make_train_step(loss_fn): rng",
    expected="a PRNG key in the state, since loss_fn uses its argument rng",
    got=f"None ({type(error).__name__}: {' '.join(str(error).split())[:300]})",
    fix="Use TrainState.create(..., rng=jax.random.key(0)).",
  ) from error


def check_signature(loss_fn: LossFn) -> None:
  """Raises unless `loss_fn` can be called with four arguments."""
  try:
    signature = inspect.signature(loss_fn)
  except (TypeError, ValueError):  # Not every callable has one.
    return
  try:
    signature.bind(None, None, None, None)
  except TypeError as error:
    raise MpjaxTypeError(
      "mpjax.make_train_step(loss_fn)",
      expected="a function of four arguments, loss_fn(params, model_state, batch, rng)",
      got=f"one of {signature} ({error})",
      fix="Take all four, and return (loss, (model_state, metrics)): model_state is () and rng "
      "is None where TrainState.create was given none.",
    ) from error


def warn_without_float16(loss_fn: LossFn, jaxpr: ClosedJaxpr) -> None:
  """Warns if a dynamic scale protects no float16."""
  # A jaxpr says nothing of how the rules of `jax.custom_vjp` compute in it, nor of the inside of a
  # primitive that this version does not know.
  for visit in walk(jaxpr):
    avals = [v.aval for v in (*visit.eqn.invars, *visit.eqn.outvars)]
    in_float16 = any(getattr(aval, "dtype", None) == jnp.float16 for aval in avals)
    if in_float16 or not visit.entered or facts_of(visit.eqn).holds is Holds.CUSTOM_VJP:
      return
  text = (
    "mpjax.make_train_step: the loss scale is dynamic, but nothing in loss_fn is computed in "
    "float16. bfloat16 and float32 have the range to do without: StaticLossScale(1) skips bad "
    "steps without scaling, NoLossScale() does not even look for them."
  )
  code = getattr(inspect.unwrap(loss_fn), "__code__", None)
  if code is None:
    warnings.warn(text, UserWarning, stacklevel=2)
  else:
    # Between the user's call and this one are JAX's, as many as there are: the line to change is
    # where the function is.
    warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


def _checked(loss_fn: LossFn) -> LossFn:
  """`loss_fn`, made to raise where it returns something else than it should."""

  @functools.wraps(loss_fn)
  def checked(params: Params, model_state: PyTree, batch: PyTree, rng: Array | None) -> PyTree:
    out: PyTree = loss_fn(params, model_state, batch, rng)
    aux: PyTree = out[1] if isinstance(out, tuple) and len(out) == 2 else None
    pairs = isinstance(aux, tuple) and len(aux) == 2
    if not pairs or not isinstance(aux[1], Mapping):
      raise MpjaxTypeError(
        "mpjax.make_train_step(loss_fn)",
        expected="it to return (loss, (model_state, metrics)) with a dict of metrics",
        got=str(jax.tree.map(jax.typeof, out)),
        fix="Return (loss, ((), {})) if there is no model state and nothing to report.",
      )
    new_state, metrics = aux
    _check_names(metrics)
    check_alike(
      new_state,
      model_state,
      "mpjax.make_train_step(loss_fn): model_state",
      expected="the structure, shapes and dtypes that it was given",
      fix="Return the entire new state, cast to the dtypes of the old one.",
    )
    check_loss(out[0], "mpjax.value_and_grad(fun): the loss")
    return out

  return checked


def _check_names(metrics: Mapping[str, Leaf]) -> None:
  where = "mpjax.make_train_step(loss_fn): metrics"
  other = [name for name in metrics if not isinstance(name, str)]
  if other:
    expected, fix = "strings for names", "Name each number: ours are beside it in one dict."
    raise MpjaxTypeError(where, expected=expected, got=repr(other), fix=fix)
  taken = sorted(set(metrics) & OUR_METRICS)
  if taken:
    expected, fix = "metrics with other names than ours", "Rename them."
    raise MpjaxValueError(where, expected=expected, got=str(taken), fix=fix)
