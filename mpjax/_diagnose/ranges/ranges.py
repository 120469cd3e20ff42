"""`ranges`: runs a function once, and counts the exponents of its numbers."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import check_call
from mpjax._core.leaves import changes_nothing
from mpjax._core.trees import is_floating
from mpjax._core.types import Args, Array, Function, Kwargs, NumpyArray, P
from mpjax._core.wrappers import name_of
from mpjax._diagnose.call import Call
from mpjax._diagnose.gradient import gradient_of
from mpjax._diagnose.optimizer_work import Addition
from mpjax._diagnose.ranges.low_steps import programs_of, programs_of_gradient
from mpjax._diagnose.ranges.plan import Plan, plan
from mpjax._diagnose.ranges.report import FORMATS, HEADROOM, GroupRanges, RangesReport, Rescaled
from mpjax._diagnose.report import Advance, Pending
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.reader import shape_of
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, Step
from mpjax._optim.find_scale import scales_in
from mpjax._optim.scaled import scale_value_p

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."

_SMALLER = 2.0**-16
"""The factor between two loss scales that are tried. Float16 ends at 2^16 and begins at 2^-24."""

_PART = 2**18
"""The most numbers that are counted at once. They fit into the cache of a core."""


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(fn: Callable[P, object]) -> Callable[P, RangesReport]:
  """Count the exponents of all numbers in one call of a function.

  The report has a row for the activations and the gradients of each module (named scope), and for
  each leaf of the parameters, the optimizer state and the updates. It says which updates change
  nothing because the sum rounds to the old number in the dtype of the parameter. The function runs
  one operation after the other, and counts are exact. docs/ranges.md says what is counted where.

  Args:
    fn: a training step, a gradient, a model or a loss, jitted or not. A loss, which returns a
      scalar (or one and aux), is differentiated with respect to its first argument. An NNX model
      that is called, or whose method is called, is the first argument.

  Returns:
    A function with the arguments of `fn`, which must be concrete arrays. It returns a report:
    print it, show it in a notebook, or call `.plot()`, `.to_html(path)` or `.to_json()`.

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
  return Pending("mpjax.ranges(fn)", fn, ranges_of_call, _FIX)


def ranges_of_call(fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> RangesReport:
  """Returns the report of one call; `advance` takes how many operations are done, of how many."""
  call = Call(args, kwargs, "mpjax.ranges(fn)")
  call.check_concrete()
  traced = call.traced(fn)
  # A loss alone has no gradients to count, so it is differentiated. A training step has its own.
  if args and traced.is_loss:
    programs = programs_of_gradient(call, fn)
  else:
    programs = programs_of(traced, call.arguments(fn))
  # The body is not optimized for compilation: every step runs and is counted.
  body = programs.body
  operands = [*map(jnp.asarray, call.arrays)]
  states = [each.state.scale for each in scales_in((args, kwargs)) if each.state is not None]
  counting = plan(body, call.arguments(fn, states), programs.low, programs.outputs)
  name = name_of(fn)
  rows, in_use = _counted(body, operands, counting, advance)
  report = RangesReport(name, rows, in_use)
  # Without a scale there is nothing to reduce, and without an overflow no reason to.
  fewest, scale = _nonfinite(report.of("gradients")), in_use or 1.0
  # Gradients at another scale need no parameters and no updates.
  gradients = {number: each for number, each in counting.steps.items() if each.kind == "gradients"}
  of_gradients = Plan({}, gradients, {})
  # Each run takes as long as the first, so the scale falls in large steps. A number that overflows
  # at scale 1 too is no fault of the scale.
  while fewest > 0 and scale > 1:
    scale *= _SMALLER
    rows, _ = _counted(body, operands, of_gradients, advance, scale / (in_use or 1.0))
    if _nonfinite(rows) < fewest:
      fewest = _nonfinite(rows)
      report = dataclasses.replace(report, rescaled=Rescaled(scale, rows))
  return report


def scale_for_float16(
  loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance, headroom: float = HEADROOM
) -> float:
  """Returns the scale of a loss that leaves headroom to gradients in float16."""
  report = ranges_of_call(gradient_of(loss_fn), args, kwargs, advance)
  # A larger headroom than that of the report needs a smaller scale, by a power of two.
  more = math.ceil(math.log2(max(headroom / HEADROOM, 1)))
  return max((report.loss_scale or 1.0) / 2**more, 1.0)


def _nonfinite(rows: Sequence[GroupRanges]) -> int:
  return sum(row.inf + row.nan for row in rows)


def _counted(
  body: Body, operands: Sequence[Array], counting: Plan, advance: Advance, factor: float = 1.0
) -> tuple[tuple[GroupRanges, ...], float | None]:
  """Runs a function, with its loss scales times a factor.

  Returns:
    The rows of the groups that have numbers, and the loss scale that all gradients carry; None
    without one.
  """
  every_group = (*counting.inputs.values(), *counting.steps.values())
  # Arguments first, then steps in order: the rows of the report keep this order.
  ranges_of = {group: GroupRanges(group.kind, group.path) for group in every_group}
  for position, group in counting.inputs.items():
    add(ranges_of[group], operands[position])
  # Progress counts the runs of steps. Iterations of a `while` are unknown, so the total is a lower
  # bound.
  counted = [step for step in body.every_step() if step.number in counting.steps]
  done = 0
  total = sum(step.times for step in counted)
  places = itertools.count(1)
  scales = set[float]()

  def compute(step: Step, ins: Sequence[Array]) -> list[Array]:
    if step.eqn.primitive is scale_value_p:
      x, bits = ins
      scale = jax.lax.bitcast_convert_type(bits, jnp.float32) * factor
      ins = [x, jax.lax.bitcast_convert_type(scale, bits.dtype)]
    return bind(step.eqn, ins)

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    if step.eqn.primitive is scale_value_p:
      return [ins[1]]
    addition = counting.additions.get(step.number)
    # The result of an addition is the new argument. Count the update instead.
    if addition is not None:
      return _update_and_lost(step, addition, ins, outs[0])
    if step.number in counting.steps:
      return [x for x in outs if is_floating(x)]
    return []

  def see(step: Step, picked: Sequence[Array]) -> None:
    nonlocal done
    # The scale is an operand, wherever its state comes from. Each device or lane has its own.
    if step.eqn.primitive is scale_value_p:
      scales.update(np.asarray(picked[0]).reshape(-1).view(np.float32).tolist())
      return
    # A compiled loop shows the results of several iterations at once.
    done += picked[0].size // max(math.prod(shape_of(step.eqn.outvars[0])), 1)
    advance(done, total)
    # An update and its mask belong together. Results of other steps are counted one by one.
    row = ranges_of[counting.steps[step.number]]
    for each in [picked] if row.kind == "updates" else zip(picked):
      add(row, *each, place=next(places))

  run_on_host(body, operands, Look(compute=compute, pick=pick, see=see))
  # Several different scales cannot be divided out of the gradients.
  scale = scales.pop() if len(scales) == 1 else None
  return tuple(row for row in ranges_of.values() if row.total), scale


def _update_and_lost(
  step: Step, addition: Addition, ins: Sequence[Array], result: Array
) -> list[Array]:
  """Returns the update that a step adds to an argument, and a mask of updates without effect."""
  # The step computes the update itself if the argument is 0: a scatter adds to some elements only.
  old = ins[addition.operand]
  with_zeros = [*ins]
  with_zeros[addition.operand] = jnp.zeros_like(old)
  (update,) = bind(step.eqn, with_zeros)
  # A sum in float32 rounds where it is cast to the dtype in which the argument is stored.
  dtype = addition.old.aval.dtype
  stored, new = old.astype(dtype), result.astype(dtype)
  return [update, changes_nothing(stored, new, update)]


def add(
  group: GroupRanges, x: Array | NumpyArray, lost: Array | None = None, *, place: int = 0
) -> None:
  """Counts the numbers of an array.

  Args:
    group: the row that they are added to.
    x: the array.
    lost: for updates, a mask of those that change nothing.
    place: how many arrays of results were counted before.
  """
  # On the host: XLA flushes subnormal numbers to zero in arithmetic and in comparisons.
  numbers = np.asarray(x).reshape(-1)
  numbers = numbers.astype(np.float64 if numbers.dtype.itemsize > 4 else np.float32, copy=False)
  # Float32 holds every number of a smaller dtype, so two tables of borders suffice.
  lowest, borders = _borders(numbers.dtype.name)
  parts = np.split(numbers.view(borders.dtype), range(_PART, numbers.size, _PART))
  smaller = np.sum([_smaller(part, borders) for part in parts], axis=0)
  # `smaller` counts below each border: the exponents, inf, and three borders for each format.
  count = 3 * len(FORMATS)
  *by_exponent, no_nan = smaller[:-count].tolist()
  # Below the least exponent are zeros, below inf all finite numbers, below NaN all but NaN.
  zero, finite = by_exponent[0], by_exponent[-1]
  group.zero += zero
  group.inf += no_nan - finite
  group.nan += numbers.size - no_nan
  if group.first_nonfinite is None and group.inf + group.nan:
    group.first_nonfinite = place
  # Other rows than updates have no such mask.
  group.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
  finite_numbers = numbers if finite == numbers.size else numbers[np.isfinite(numbers)]
  group.largest = max(group.largest, float(np.max(np.abs(finite_numbers), initial=0)))
  counts = enumerate(np.diff(by_exponent).tolist(), lowest)
  group.exponents.update({exponent: count for exponent, count in counts if count})
  # Differences of these counts are the numbers between two borders.
  for fates, first in zip(group.lost.values(), smaller[-count:].reshape(-1, 3), strict=True):
    to_zero, subnormal, _, overflow = np.diff([zero, *first, finite]).tolist()
    fates.update(zero=to_zero, subnormal=subnormal, overflow=overflow)


def _smaller(bits: NumpyArray, borders: NumpyArray) -> NumpyArray:
  """Returns how many numbers have a smaller magnitude than each border, given their bits."""
  # Magnitudes have the order of their bits. Numbers with equal upper 14 bits are counted together,
  # which takes a third of the time of sorting. Only groups that a border divides are sorted.
  bits = bits << 1 >> 1
  shift = borders.dtype.type(8 * borders.itemsize - 14)
  # Shifting left and right has removed the sign. 14 upper bits less the sign leave 2^13 buckets.
  upper = (bits >> shift).astype(np.intp)
  first = borders >> shift
  counts = np.bincount(upper, minlength=2**13)
  zeros = bits.size - np.count_nonzero(bits)
  # A bucket that a border divides must be sorted. A border at its beginning divides nothing.
  is_divided = np.zeros(2**13, bool)
  is_divided[first[first << shift < borders]] = True
  is_divided[0] = zeros < counts[0]  # Zeros may be many, the smallest numbers are rare.
  few = np.sort(bits[is_divided[upper]])
  # Numbers in earlier buckets are smaller. In the bucket of the border, the sorted ones decide.
  before = np.append(0 if is_divided[0] else zeros, np.cumsum(counts))
  return before[first] + np.searchsorted(few, borders) - np.searchsorted(few, first << shift)


@functools.cache
def _borders(source: str) -> tuple[int, NumpyArray]:
  """Returns the least exponent of a dtype, and the bits of the numbers where a count begins."""
  # The borders are the powers of two, inf and NaN. For each of `FORMATS` they are also the smallest
  # numbers that a cast makes subnormal, normal and infinite.
  wide = np.dtype(source)
  info = np.finfo(source)
  unsigned = np.dtype(f"uint{8 * wide.itemsize}")
  lowest = info.minexp - info.nmant
  powers = np.ldexp(wide.type(1), np.arange(lowest, info.maxexp))
  borders = np.append(powers, wide.type(math.inf)).view(unsigned).tolist()
  # Positive floats have the order of their bits, so a bisection over integers finds each border.
  every = range(borders[-1] + 1)
  borders.append(every.stop)

  def cast(name: str, bits: int) -> float:
    with np.errstate(all="ignore"):
      number = float(np.asarray(bits, unsigned).view(wide).astype(name))
    return number if math.isfinite(number) else math.inf  # float8_e4m3fn has NaN and no inf.

  for name in FORMATS:
    narrow = jnp.finfo(name)
    for border in map(float, (narrow.smallest_subnormal, narrow.smallest_normal, math.inf)):
      borders.append(bisect.bisect_left(every, border, key=functools.partial(cast, name)))
  return lowest, np.asarray(borders, unsigned)
