"""`ranges`: one instrumented run of a function, and what its numbers look like."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpjax._core.bits import changes_nothing
from mpjax._core.errors import check_call
from mpjax._core.paths import key_names
from mpjax._core.types import Args, Array, Kwargs, PyTree
from mpjax._diagnostics.arguments import check_function
from mpjax._diagnostics.flat import Call, gradient_of, is_array
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.exponents import (
  Counts,
  Grid,
  added,
  as_integers,
  counted,
  grid,
  no_counts,
  over_devices,
  settled,
)
from mpjax._diagnostics.ranges.observed import Key, run_observed
from mpjax._diagnostics.ranges.plan import Input, Plan, is_inexact, plan
from mpjax._diagnostics.ranges.ranges_report import RangesReport, group_ranges
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.walk import walk
from mpjax.transforms._state import scales_in

P = ParamSpec("P")

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(
  fn: Callable[P, object], *, differentiate: bool | None = None
) -> Callable[P, RangesReport]:
  """Returns a function that runs `fn` once and reports what its numbers look like.

  `fn` may be a training step, a gradient, a loss or a model, jitted or not. It is traced, and runs
  as one jitted function that also counts the exponents of all numbers, exactly, inside of `scan`,
  `while`, `cond`, `remat`, custom derivatives and `shard_map` too:

  - *activations*: the results of the operations of the forward pass, by module (named scope);
  - *gradients*: those of the backward pass, by module, times the loss scale if there is one;
  - *parameters*: the floating leaves of the first argument, of its `params` where it has such;
  - *updates*: what is added to an argument that `fn` returns changed, `param + update`, with the
    share of them that change nothing: they round away in the dtype that the parameter is stored in.

  Operations that only move or cast numbers are not counted again, nor is what `remat` repeats. A
  loss, which returns a scalar (or one and aux) and contains no backward pass, is differentiated
  with respect to its first argument, so that there are gradients to look at.

  Args:
    fn: any function of trees of arrays. What it donates is not donated here.
    differentiate: whether to differentiate `fn`; None decides as described above.

  Returns:
    A function with the arguments of `fn`, which must be concrete arrays, that returns a report:
    print it, show it in a notebook, or call `.plot()`, `.to_html(path)`, `.to_json()`.

  Raises:
    MpjaxTypeError: `fn` is no function; when called: an argument is traced.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> def step(params, grads):
  ...   return optax.apply_updates(params, -1e-3 * grads)
  >>> params, grads = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
  >>> report = mpjax.ranges(step)(params, grads)
  >>> report.lost_updates  # 1 - 0.001 is 1 in bfloat16
  1.0
  """
  check_function(fn, "mpjax.ranges(fn)", _FIX)

  def measured(*args: P.args, **kwargs: P.kwargs) -> RangesReport:
    call = Call(args, kwargs, "mpjax.ranges(fn)")
    program, outputs = call.traced(fn)
    is_loss = bool(args) and _is_scalar(program) and not _has_backward(program)
    scoped = with_parameter_scopes(fn)
    if is_loss if differentiate is None else differentiate:
      program, outputs = call.traced(gradient_of(scoped))
    elif not _has_backward(program):
      program, outputs = call.traced(scoped)
    found = plan(program.jaxpr, _inputs(args, kwargs), outputs)
    counts, largest = as_integers(_run(program, call.operands, found))
    on = grid(found.dtypes)
    groups = [
      group_ranges(group, row, float(most), on)
      for group, row, most in zip(found.groups, counts, largest, strict=True)
    ]
    name = getattr(fn, "__name__", type(fn).__name__)
    return RangesReport(name, tuple(groups), _scale_in(args, kwargs))

  return measured


def _is_scalar(program: ClosedJaxpr) -> bool:
  """Whether the first result is a floating scalar."""
  first = program.out_avals[:1]
  return bool(first) and first[0].shape == () and jnp.issubdtype(first[0].dtype, jnp.floating)


def _has_backward(program: ClosedJaxpr) -> bool:
  return any("transpose(" in str(visit.eqn.source_info.name_stack) for visit in walk(program))


def _inputs(args: Args, kwargs: Kwargs) -> list[Input | None]:
  """Returns what the arrays among the leaves of arguments are."""
  found: list[Input | None] = []
  for position, one in enumerate((*args, *kwargs.values())):
    inside = position == 0 and _holds_params(one)
    for path, x in jax.tree_util.tree_leaves_with_path(one):
      if not is_array(x):
        continue
      names = key_names(path)
      first = position == 0 and (not inside or names[:1] == ("params",))
      text = "/".join(names[1:] if first and inside else names) or "(array)"
      prefix = () if position == 0 else (f"args[{position}]",)
      floating = is_inexact(x.dtype)
      shown = "/".join((*prefix, text))
      found.append(Input(shown, first, x.dtype, x.shape, names) if floating else None)
  return found


def _holds_params(tree: PyTree) -> bool:
  held = isinstance(tree, Mapping) and "params" in tree
  return held or hasattr(tree, "params")


def _scale_in(args: Args, kwargs: Kwargs) -> float | None:
  """Returns the loss scale in the arguments; None where there is none, or several."""
  found = [one.state for one in scales_in((args, kwargs))]
  scales = [np.asarray(one.scale) for one in found if one is not None]
  return float(scales[0]) if len(scales) == 1 and scales[0].shape == () else None


class _Counter:
  """Counts the results of equations."""

  def __init__(self, plan: Plan, on: Grid) -> None:
    self._plan, self._on = plan, on

  def visit(
    self, key: Key, eqn: JaxprEqn, operands: Sequence[Array], state: Counts
  ) -> tuple[list[Array], Counts]:
    results = bind(eqn, operands)
    row = self._plan.results.get(key)
    for x in () if row is None else results:
      if row is not None and is_inexact(getattr(x, "dtype", None)):
        state = counted(state, row, x, self._on)
    addition = self._plan.additions.get(key)
    if addition is not None:
      update = jnp.asarray(operands[1 - addition.argument])
      update = jnp.broadcast_to(update, results[0].shape)
      # As it is stored: in bits, since XLA may compare what was not rounded.
      old, new = (x.astype(addition.dtype) for x in (operands[addition.argument], results[0]))
      lost = _lost(old, new, update)
      state = counted(state, addition.row, update, self._on, lost)
    return results, state

  def settled(self, state: Counts) -> Counts:
    return settled(state, self._on)

  def empty(self) -> Counts:
    return no_counts(len(self._plan.groups), self._on)

  def over_devices(self, state: Counts, axes: frozenset[Hashable]) -> Counts:
    return over_devices(state, axes)

  def added(self, state: Counts, more: Counts) -> Counts:
    return added(state, more)


def _lost(old: Array, new: Array, update: Array) -> Array:
  """Returns which updates change nothing though they are not zero."""
  if jnp.issubdtype(old.dtype, jnp.complexfloating):
    # A part of a complex number is a number of its own, in the order of `counted`.
    parts = [changes_nothing(f(old), f(new), f(update)) for f in (jnp.real, jnp.imag)]
    return jnp.stack(parts)
  return changes_nothing(old, new, update)


def _run(program: ClosedJaxpr, operands: Sequence[Array], found: Plan) -> Counts:
  on = grid(found.dtypes)
  counter = _Counter(found, on)

  def instrumented(consts: Sequence[Array], operands: Sequence[Array]) -> Counts:
    state = counter.empty()
    for position, row in found.inputs.items():
      state = counted(state, row, operands[position], on)
    return counter.settled(run_observed(program.jaxpr, operands, counter, state, consts)[1])

  return jax.jit(instrumented)(program.consts, list(operands))
