"""Check that a training step is the same at every loss scale, and changes nothing at overflow."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from mpjax._core import errors
from mpjax._core.leaves import Path, is_key
from mpjax._core.types import Array, Leaf, NumpyArray, P, PyTree, is_inexact
from mpjax._jaxpr.locations import Location
from mpjax._optim.find_scale import OwnedScale, leaves_of, refuse_outside
from mpjax._optim.new_versions import STATE_THEM, STATED, Names, Stated, names_of, text_of
from mpjax._optim.optimizer_trees import full_like
from mpjax._optim.step_at_scales import (
  ExaminedStep,
  Run,
  ScaleInStep,
  Versions,
  examine,
  is_of_scale,
  is_updated,
  locate_scales,
  pair_versions,
  run_at,
  to_numpy,
)
from mpjax._optim.step_call import ResultPath, StepCall, StepProgram

WHERE = "mpjax.check_loss_scaling(step)"
_TWO_CALLS = "Call what it returns: mpjax.check_loss_scaling(step)(*args)."


@errors.check_call(WHERE, fix=_TWO_CALLS)
def check_loss_scaling(step: Callable[P, PyTree], *, returns: PyTree = None) -> Callable[P, None]:
  """Return a function that raises unless `step` handles its loss scale correctly.

  The function runs `step` in float32 at several loss scales and at an overflow. A correct step
  returns the same at each scale, and changes nothing at an overflow. The function warns if the
  gradients change nothing. docs/getting_started.md explains how arguments are paired with results.

  Args:
    step: any function that returns the new state of a `mpjax.loss_scaling` among its arguments, or
      writes it to an `nnx.Optimizer` there. If it cannot be traced it runs in its own precision.
    returns: the argument that each result replaces, as a tree with the structure of the results.
      Each entry is a position, the name of a keyword argument, or None: `(0, 1, None)` for
      `params, opt_state, loss = step(params, opt_state, batch)`. By default trees are compared.

  Returns:
    A function of the arguments of `step`, which keeps them and returns None.

  Raises:
    MpjaxTypeError: `returns` has entries other than positions and names. When called: an argument
      is traced, or arguments or results have no scale.
    MpjaxValueError: when called: the step is wrong, or computes in float16 with `NoLossScale`;
      several results may be the new version of an argument, or `returns` does not fit.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> def step(params, opt_state):
  ...   loss, grads = jax.value_and_grad(mpjax.scaled(lambda p: jnp.sum(p**2), opt_state))(params)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)))
  """
  errors.check_callable(step, WHERE, expected="a training step", fix=_TWO_CALLS)
  origins = _read_returns(returns)

  def check(*args: P.args, **kwargs: P.kwargs) -> None:
    call = StepCall(step, args, kwargs)
    scales = _scales_of(call)
    stated = None if origins is None else _stated_pairs(origins, call)
    # The check overflows on purpose, so the debugging flags must not raise. Under `disable_jit` a
    # `while_loop` of the step could not be traced.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
      program = StepProgram(call)
      nothing_moved = _check_scales(call, program, scales, stated)
    is_scaled = any(scale.owned.numbers for scale in scales)
    if program.unscaled_gradient is not None and is_scaled:
      warnings.warn(_unscaled_gradient(program.unscaled_gradient), stacklevel=2)
    for owned in nothing_moved:
      expected = f"a step whose gradients, scaled by {owned.label!r}, change what it returns"
      got = "the same result from an applied step and from a skipped one: nothing was checked"
      fix = "Check again after a step or two. If it stays, gradients are zero, or updates are lost."
      warnings.warn(errors.message(WHERE, expected=expected, got=got, fix=fix), stacklevel=2)

  return check


def _read_returns(returns: PyTree) -> dict[Names, int | str | None] | None:
  """Returns which argument each result comes from; None if the user has not said."""
  if returns is None:
    return None
  # None is an entry here, and JAX drops it from a tree unless it is a leaf.
  entries = leaves_of(returns, is_leaf=lambda x: x is None)
  origins = {names_of(path): x for path, x in entries.items()}
  for x in origins.values():
    # A bool is an int to Python, and would be taken for position 0 or 1.
    if isinstance(x, bool) or not isinstance(x, (int, str, NoneType)):
      expected = "positions and names of arguments, in the tree of the results"
      raise errors.MpjaxTypeError(STATED, expected=expected, got=errors.kind_of(x), fix=STATE_THEM)
  return origins


def _stated_pairs(origins: Mapping[Names, int | str | None], call: StepCall) -> Stated:
  """Returns pairs of an argument and a result, and raises if there is no such argument."""
  *args, kwargs = call.arguments
  pairs: list[tuple[Names | None, Names]] = []
  for result, argument in origins.items():
    if argument is None:
      pairs.append((None, result))
      continue
    if argument not in kwargs and argument not in range(len(args)):
      expected = f"positions from 0 to {len(args) - 1}, or names of keyword arguments"
      raise errors.MpjaxValueError(STATED, expected=expected, got=repr(argument), fix=STATE_THEM)
    # `StepCall` keeps keyword arguments in a dict behind the positional ones.
    node = (str(len(args)), argument) if isinstance(argument, str) else (str(argument),)
    pairs.append((node, result))
  return pairs


def _scales_of(call: StepCall) -> list[ScaleInStep]:
  """Returns the loss scales among the arguments, and raises if there are none that can be used."""
  scales = locate_scales(call)
  # The check runs the step with other scales and compares values, so it needs concrete arrays.
  is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call.arguments))
  if is_traced or not scales:
    expected = "concrete arguments, with the state of an optimizer created by mpjax.loss_scaling"
    fix = "Wrap tx by mpjax.loss_scaling. Pass its state or the merged nnx.Optimizer on the host."
    got = "traced ones" if is_traced else "no such state in the arguments"
    raise errors.MpjaxTypeError(WHERE, expected=expected, got=got, fix=fix)
  refuse_outside(call.arguments, WHERE)
  return scales


def _check_scales(
  call: StepCall, program: StepProgram, scales: Sequence[ScaleInStep], stated: Stated | None
) -> list[OwnedScale]:
  """Raises unless a step is right, and returns the loss scales for which nothing moved."""
  scaled = [scale for scale in scales if scale.fields]
  # Float16 gradients underflow without a factor on the loss: `NoLossScale` or `SkipNonfinite`.
  if np.dtype("float16") in program.dtypes and not any(one.owned.multiplies for one in scales):
    raise _not_scaled(scales[0].owned)
  if not scaled:
    return []
  step = examine(call, program, scaled)
  # Of several optimizers a step may update one alone, which may be one without a loss scale.
  if len(scaled) == len(scales) and not any(is_updated(step, scale) for scale in step.scales):
    raise _not_updated(scaled[0].owned)
  versions = pair_versions(step, stated)
  return [scale.owned for scale in step.scales if not _check_scale(step, versions, scale)]


def _unscaled_gradient(where: Location) -> str:
  """Returns the text of a warning about a float16 gradient inside of the loss."""
  return errors.message(
    WHERE,
    expected="gradients inside of the loss in float32, or scaled",
    got=f"one in float16, in {where.path or 'the loss'} at {where.source or 'an unknown line'}",
    fix="The loss scale does not reach it, and it may underflow. Write mpjax.inner_grad(fun) in "
    "place of jax.grad(fun) or nnx.grad(fun).",
  )


def _check_scale(step: ExaminedStep, versions: Versions, scale: ScaleInStep) -> bool:
  """Raises unless a step uses one loss scale as it should; returns whether something moved."""
  # 1. Run the step at several scales. Where it is applied, its results must not differ.
  largest, *others = _scales_to_try(step, scale)
  runs = [_run(step, scale, largest, step.call.arrays)]
  if runs[0].applied is None:
    return True  # This optimizer is not used.
  runs += [_run(step, scale, number, step.call.arrays) for number in others]
  compared = _where_applied(runs)
  # The loss scale and its counters change in every run.
  pairs = {x: new for x, new in versions.pairs.items() if not is_of_scale(x)}
  if dependent := _dependent_on_scale(step, pairs, compared):
    raise _depends_on_scale(scale.owned, min(dependent), versions, compared)
  # 2. Let it overflow, from a state in which each change shows. Nothing may change but the scale.
  start = _a_step_later(step, pairs, compared.finite[0])
  skipped = _run(step, scale, np.nan, start).after
  changed = _changed(step, pairs, start, skipped)
  # With several optimizers, one may apply its update at NaN. The step is then not skipped as a
  # whole.
  is_skipped = not any(np.any(skipped[one.new["finite"]]) for one in step.scales if one.new)
  if changed and is_skipped:
    raise _changes_when_skipped(step, scale.owned, changed, versions)
  return _moves(step, scale, pairs, compared)


def _scales_to_try(step: ExaminedStep, scale: ScaleInStep) -> list[float]:
  """Returns the loss scales at which a step is run, the largest first, inf and NaN last."""
  # A gradient with a wrong factor of the scale dominates at one extreme and vanishes at the other,
  # also behind a clip. With small gradients the mistake shows only at the largest scale. At inf a
  # plain gradient becomes 0 and a scaled one NaN. A correct step is then skipped, or retried at a
  # lower scale with the same results. At NaN no retry helps.
  if scale.owned.fields == {"scale": 1}:
    return [1.0]  # At a scale that is always 1, gradients need no factor.
  if step.program.traced:
    return [max(scale.owned.largest, 2.0**14), 2.0**14, 2.0**-22, np.inf, np.nan]
  # A step that is not traced may compute in float16, which overflows at larger scales.
  return [2.0**8, 2.0**6, np.inf, np.nan]


def _run(step: ExaminedStep, scale: ScaleInStep, number: float, start: Mapping[Path, Array]) -> Run:
  """Runs a step at one scale, and raises if it does not update the scale where it should."""
  run = run_at(step, scale, number, start)
  # A step may leave the scale of another optimizer alone. A scale that it reads must move, also at
  # an overflow: a step that selects the old state there keeps the old scale.
  if run.applied is None and (_is_used(step, scale) or not np.isfinite(number)):
    raise _not_updated(scale.owned)
  return run


def _is_used(step: ExaminedStep, scale: ScaleInStep) -> bool:
  """Whether a loss scale is read for another number than a loss scale."""
  dependent = step.program.depends_on(scale.fields["scale"]) or ()
  return any(not is_of_scale(place) for place in dependent)


class _Compared(NamedTuple):
  """The results of the runs that a step applied.

  Attributes:
    finite: at finite loss scales, the largest first.
    overflowed: at inf and NaN.
  """

  finite: Sequence[Mapping[ResultPath, NumpyArray]]
  overflowed: Sequence[Mapping[ResultPath, NumpyArray]]


def _where_applied(runs: Sequence[Run]) -> _Compared:
  """Returns the runs that applied the most steps, and raises if none of them is at a finite scale.

  A loop of several steps skips some of them at an overflow.
  """
  # A retried batch at inf is applied too, at a lower scale. Its results count as well.
  most = max(run.applied or 0 for run in runs)
  applied = [run for run in runs if run.applied == most and most > 0]
  finite = [run.after for run in applied if np.isfinite(run.number)]
  if not finite:
    tried = ", ".join(f"{run.number:.9g}" for run in runs if np.isfinite(run.number))
    raise errors.MpjaxValueError(
      WHERE,
      expected="a step whose gradients are finite at some loss scale",
      got=f"an inf or NaN at {tried}",
      fix="Call it with another batch; mpjax.check_skipped_steps says which gradient it is.",
    )
  return _Compared(finite, [run.after for run in applied if not np.isfinite(run.number)])


class _Dependent(NamedTuple):
  """A new version that depends on the loss scale. The error names the smallest of these tuples.

  Attributes:
    only_overflowed: it differs only at inf and NaN, where another optimizer may have skipped.
    rises: it moves more at the largest loss scale than at the smallest.
    place: where it is.
    argument: the path of the old version.
  """

  only_overflowed: bool
  rises: bool
  place: ResultPath
  argument: Path


def _dependent_on_scale(
  step: ExaminedStep, pairs: Mapping[Path, ResultPath], compared: _Compared
) -> list[_Dependent]:
  """Returns the new versions whose values depend on the loss scale."""
  dependent = []
  for argument, place in pairs.items():
    old = to_numpy(step.call.arrays[argument])
    if not is_inexact(old):
      continue
    moved = [_distance(old, after[place]) for after in compared.finite]
    # A step that is not traced rounds in its own precision, so a small part of the change may
    # differ. A wrong factor of the scale changes it by far more.
    limit = 0.25 * max(moved)
    first = compared.finite[0][place]
    at_finite = any(_distance(first, after[place]) > limit for after in compared.finite)
    at_overflow = any(_distance(first, after[place]) > limit for after in compared.overflowed)
    if at_finite or at_overflow:
      dependent.append(_Dependent(not at_finite, moved[0] > moved[-1], place, argument))
  return dependent


def _moves(
  step: ExaminedStep, scale: ScaleInStep, pairs: Mapping[Path, ResultPath], compared: _Compared
) -> bool:
  """Whether a new version that depends on gradients is another than the array that it replaces."""
  # Everything computed from gradients depends on the scale, by which `update` divides. Statistics
  # depend at most on whether the step is applied.
  dependent = step.program.depends_on(scale.fields["scale"])
  for argument, place in pairs.items():
    old = to_numpy(step.call.arrays[argument])
    # Without a trace, any new version may depend on gradients.
    may_depend = dependent is None or place in dependent
    if may_depend and is_inexact(old) and _distance(old, compared.finite[0][place]) > 0:
      return True
  return False


def _a_step_later(
  step: ExaminedStep, pairs: Mapping[Path, ResultPath], after: Mapping[ResultPath, NumpyArray]
) -> dict[Path, Array]:
  """Returns the arguments of the next step, as far as they have new versions."""
  # An average that begins as a copy of the parameters differs from them after a step. Arrays of
  # zeros, such as momentum, get another number, since a multiple of 0 would not show a change.
  start = dict(step.call.arrays)
  for argument, x in step.call.arrays.items():
    new: Leaf = to_numpy(x)
    if argument in pairs and not is_key(x.dtype):
      new = after[pairs[argument]]
    if not is_of_scale(argument) and is_inexact(new) and not np.any(new):
      new = 0.6875
    if not is_key(x.dtype):
      start[argument] = full_like(x, new)
  return start


def _changed(
  step: ExaminedStep,
  pairs: Mapping[Path, ResultPath],
  start: Mapping[Path, Array],
  skipped: Mapping[ResultPath, NumpyArray],
) -> list[tuple[Path, ResultPath]]:
  """Returns the arrays, and their new versions, that a skipped step does not keep."""
  scales = [path for path in step.call.arrays if is_of_scale(path)]
  around_scales = {path[:n] for path in scales for n in range(len(path))}
  changed = []
  for argument, place in pairs.items():
    old = to_numpy(start[argument])
    # Integers beside the optimizer's state may count all steps: a cursor, the number of batches.
    may_count = argument[:-1] in around_scales and not is_inexact(start[argument])
    # By bytes: NaN equals itself then, and a changed sign of zero shows.
    if old.tobytes() != skipped[place].tobytes() and not may_count:
      changed.append((argument, place))
  return changed


def _distance(a: NumpyArray, b: NumpyArray) -> float:
  """Returns the sum of the absolute differences of two arrays, inf if one is NaN."""
  # An inf, such as the first best loss, counts as 0: every number is infinitely far from inf.
  size = np.abs(np.where(np.isfinite(a), a, 0) - b)
  return float(np.nan_to_num(np.sum(size, where=a != b, dtype=np.float64), nan=np.inf))


def _not_scaled(scale: OwnedScale) -> errors.MpjaxValueError:
  """Returns the error for a float16 step without a factor on its loss."""
  expected = "a loss scale, since the step computes in float16, whose gradients underflow"
  fix = "Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16."
  got = f"{scale.kind.__name__}()"
  return errors.MpjaxValueError(WHERE, expected=expected, got=got, fix=fix)


def _not_updated(scale: OwnedScale) -> errors.MpjaxValueError:
  """Returns the error for a step that drops the new loss scale."""
  expected = f"a step that returns the new loss scale {scale.label!r}, when it is skipped too"
  fix = "Return the opt_state that tx.update of mpjax.loss_scaling returned, and never select it."
  if scale.in_variables:
    fix = (
      "Call optimizer.update(model, grads), and compile step by nnx.jit: jax.jit drops writes, and "
      "a step under it returns nnx.state((model, optimizer))."
    )
  return errors.MpjaxValueError(WHERE, expected=expected, got="none, or the old one", fix=fix)


def _depends_on_scale(
  scale: OwnedScale, one: _Dependent, versions: Versions, compared: _Compared
) -> errors.MpjaxValueError:
  """Returns the error for a result that depends on the scale, with the likely mistake."""
  text = text_of(one.place[1:])
  got = "gradients that were unscaled twice, clipped while scaled, or in part never scaled"
  # A change that grows with the scale has a factor too many, one that shrinks has one too few.
  if one.rises:
    got = "gradients that still carry the loss scale, or carry it twice"
  elif compared.overflowed:
    got = "gradients that were never scaled, clipped, all zero, or had inf and NaN replaced"
  state, library = ("optimizer", "nnx") if scale.in_variables else ("opt_state", "jax")
  name = "" if scale.name is None else f", name={scale.name!r}"
  fix = (
    f"Take the gradients by jax.value_and_grad(mpjax.scaled(loss_fn, {state}{name})), not by "
    f"{library}.value_and_grad, and pass them to update unchanged. Clip inside of "
    "mpjax.loss_scaling, and add penalties to the loss."
  )
  return errors.MpjaxValueError(
    WHERE,
    expected=f"{text} to be the same at every value of the loss scale {scale.label!r}",
    got=got,
    fix=fix + _unless_stated(one.argument, one.place, versions),
  )


def _changes_when_skipped(
  step: ExaminedStep,
  scale: OwnedScale,
  changed: Sequence[tuple[Path, ResultPath]],
  versions: Versions,
) -> errors.MpjaxValueError:
  """Returns the error for a skipped step that changes some of the arguments."""
  # Statistics are named first. Keys and counts of random numbers follow from the same mistake.
  is_number = {path: is_inexact(step.call.arrays[path]) for path, _ in changed}
  (argument, place), *others = sorted(changed, key=lambda pair: not is_number[pair[0]])
  got = f"another {text_of(place[1:])}"
  if others:
    got += f" (and {errors.listed([text_of(place[1:]) for _, place in others], most=3)})"
  fix = "Keep the old one by mpjax.keep_if_skipped."
  if scale.in_variables:
    fix = "Wrap it by @mpjax.nnx.atomic_step."
  if not any(is_number.values()):
    fix += " A key that may move belongs beside the optimizer's state."
  return errors.MpjaxValueError(
    WHERE,
    expected="a step that changes nothing when it is skipped",
    got=got,
    fix=fix + _unless_stated(argument, place, versions),
  )


def _unless_stated(argument: Path, place: ResultPath, versions: Versions) -> str:
  """Returns the fix for a result that was wrongly taken for the new version of an argument."""
  if argument not in versions.inferred:
    return ""
  return (
    f" If the result {text_of(place[1:])} is no new version of the argument {text_of(argument)}, "
    "state the pairs: mpjax.check_loss_scaling(step, returns=...), with an entry for each result."
  )
