"""The single trace of a loss function, and the facts about the loss in its jaxpr."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from mpjax._core.errors import (
  REFUSALS,
  MpjaxTypeError,
  MpjaxValueError,
  check_scalar,
  flax_errors,
  kind_of,
)
from mpjax._core.trees import check_alike
from mpjax._core.types import Array, Leaf, Params, PyTree
from mpjax._jaxpr.compat import varying_axes, with_equations
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import Program, inner_jaxprs, opened, walk, with_each
from mpjax._optim.loss_scale import COUNTERS

Metrics: TypeAlias = dict[str, Leaf]

LossFn: TypeAlias = Callable[
  [Params, PyTree, PyTree, Array | None], tuple[Array, tuple[PyTree, Metrics]]
]
"""`loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`."""

OUR_METRICS = frozenset(
  {"loss", "grad_norm", "retries", "loss_scale", "finite", "scale_changed", *COUNTERS}
)
"""Names of metrics that are reserved for the step."""


class TracedLoss(NamedTuple):
  """A loss function that was called once, with tracers."""

  function: LossFn  # jitted, and JAX keeps the trace
  jaxpr: ClosedJaxpr
  unchanged: PyTree  # for each leaf of the model state, whether it is returned as it was given
  may_differ: Callable[[int], bool]  # whether a new leaf may differ between devices, by position


def trace_loss(
  loss_fn: LossFn, params: Params, model_state: PyTree, batch: PyTree, rng: Array | None
) -> TracedLoss:
  """Returns `loss_fn` traced. The step differentiates, reads and runs that one trace."""

  @functools.wraps(loss_fn)
  def checked(params: Params, model_state: PyTree, batch: PyTree, rng: Array | None) -> PyTree:
    try:
      out = loss_fn(params, model_state, batch, rng)
    except (*REFUSALS, *flax_errors()) as error:
      # A loss function fails on `()` or None if the state was created without what it needs.
      options = {"model_state=": not jax.tree.leaves(model_state), "rng=": rng is None}
      absent = " and ".join(name for name, is_absent in options.items() if is_absent)
      of_state = f"; TrainState.create made this state without {absent}" if absent else ""
      call = "mpjax.make_train_step calls loss_fn(params, model_state, batch, rng)"
      error.add_note(f"{call}{of_state}.")
      raise
    _check_result(out, model_state)
    return out

  # JAX caches traces of this jitted function. The step, its derivative and a scan reuse that one.
  function = jax.jit(checked)
  jaxpr = function.trace(params, model_state, batch, rng).jaxpr
  graph, before = Graph(jaxpr), len(jax.tree.leaves(params))
  # The arguments of the jaxpr are the leaves of `params`, then of `model_state`. Its results are
  # the loss, then the leaves of the new model state.
  leaves, structure = jax.tree.flatten(model_state)
  news = range(1, 1 + len(leaves))
  # By identity of values in the graph: an equal value that was computed is a change.
  unchanged = [graph.results[i] is graph.arguments[before + i - 1] for i in news]
  # In a `shard_map`, types say which values vary. Elsewhere, each value that is computed from rows
  # or the key may vary.
  has_types = any(map(varying_axes, jaxpr.in_avals))

  def may_differ(position: int) -> bool:
    if has_types:
      return bool(varying_axes(jaxpr.out_avals[news[position]]))
    wanted = [i == news[position] for i in range(len(jaxpr.out_avals))]
    _, read = dce_jaxpr(opened(_without_callbacks(jaxpr)), wanted)
    return any(read[before + len(leaves) :])

  return TracedLoss(function, jaxpr, structure.unflatten(unchanged), may_differ)


def _without_callbacks(program: Program) -> Program:
  """Returns a jaxpr whose callbacks count as used for their results alone."""
  # `dce_jaxpr` keeps all that an effect reads. `jax.debug.print` reads rows, and changes no result.
  # A write to a reference may change one; such an effect has the index of an operand.
  eqns = [
    eqn.replace(
      params=with_each(eqn, _without_callbacks),
      effects={effect for effect in eqn.effects if hasattr(effect, "input_index")},
    )
    for eqn in opened(program).eqns
  ]
  jaxpr = with_equations(opened(program), eqns)
  return program.replace(jaxpr=jaxpr) if isinstance(program, ClosedJaxpr) else jaxpr


def _check_result(out: PyTree, model_state: PyTree) -> None:
  """Raises unless a loss function has returned `(loss, (model_state, metrics))`."""
  where = "mpjax.make_train_step(loss_fn)"
  aux: PyTree = out[1] if isinstance(out, tuple) and len(out) == 2 else None
  if not (isinstance(aux, tuple) and len(aux) == 2 and isinstance(aux[1], Mapping)):
    expected = "it to return (loss, (model_state, metrics)) with a dict of metrics"
    fix = "Return (loss, ((), {})) if there is no model state and nothing to report."
    got = str(jax.tree.map(jax.typeof, out))
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  new_state, metrics = aux
  # The step adds its own metrics to this dict, and would overwrite these.
  bad = [name for name in metrics if not isinstance(name, str) or name in OUR_METRICS]
  if bad:
    expected = "strings that are not names of metrics of the step"
    fix = "Rename them: the step adds its own metrics to this dict."
    raise MpjaxValueError(f"{where}: metrics", expected=expected, got=str(bad), fix=fix)
  expected = "the structure, shapes and dtypes that it was given"
  fix = (
    "Return the entire new state, cast to the dtypes of the old one. A collection that `sow` fills "
    "(such as 'losses' or 'intermediates') is a result and no state: leave it out of model_state."
  )
  check_alike(new_state, model_state, f"{where}: model_state", expected=expected, fix=fix)
  # Here, because JAX refuses a loss that is no array, and `trace_loss` counts on one leaf.
  loss, where = out[0], f"{where}: the loss"
  expected, fix = "a floating scalar", "Return one number to minimise, such as jnp.mean(losses)."
  is_number = isinstance(loss, float) or hasattr(loss, "dtype")
  if not is_number or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    raise MpjaxTypeError(where, expected=expected, got=kind_of(loss), fix=fix)
  check_scalar(loss, where, expected=expected, fix=fix)


def warn_without_float16(loss_fn: LossFn, jaxpr: ClosedJaxpr) -> None:
  """Warns if a dynamic scale protects no float16."""
  # A jaxpr hides the rules of a `jax.custom_vjp`, and the inside of unknown primitives. Both may
  # compute in float16.
  for eqn in walk(jaxpr):
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    in_float16 = any(getattr(aval, "dtype", None) == jnp.float16 for aval in avals)
    if in_float16 or inner_jaxprs(eqn) is None or facts_of(eqn).holds is Holds.CUSTOM_VJP:
      return
  # The number of JAX's frames between the user's call and this one varies. So the warning shows the
  # line of the loss function.
  code = getattr(inspect.unwrap(loss_fn), "__code__", warn_without_float16.__code__)
  warnings.warn_explicit(
    "mpjax.make_train_step: the loss scale is dynamic, but nothing in loss_fn is computed in "
    "float16. bfloat16 and float32 need no scale: SkipNonfinite() skips non-finite steps "
    "without scaling, and NoLossScale() applies every step.",
    UserWarning,
    code.co_filename,
    code.co_firstlineno,
  )
