"""`ranges`: one instrumented run of a function, and what its numbers look like.

All is read from the bits of the numbers: a CPU flushes subnormal numbers to zero in arithmetic and
in comparisons.
"""

import bisect
import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import check_call
from mpjax._core.leaves import changes_nothing, key_names
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray
from mpjax._diagnostics.arguments import Call, check_function, gradient_of, is_array
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.plan import Group, Input, Plan, plan
from mpjax._diagnostics.ranges.ranges_report import GroupRanges, RangesReport
from mpjax._diagnostics.report import Pending, progress
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import Body, Step, body_of
from mpjax.transforms._loss_scale import scales_in

P = ParamSpec("P")

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(
  fn: Callable[P, object], *, differentiate: bool | None = None
) -> Callable[P, RangesReport]:
  """Returns a function that runs `fn` once and reports what its numbers look like.

  `fn` may be a training step, a gradient, a loss or a model, jitted or not. It runs one operation
  after the other, inside of `scan`, `while`, `cond`, `remat`, custom derivatives and `shard_map`
  too, and the exponents of all numbers are counted, exactly: of activations and gradients by module
  (named scope), of parameters and optimizer state, and of updates, with the share of them that
  change nothing, since they round away in the dtype that the parameter is stored in. A loss, which
  returns a scalar (or one and aux) and contains no backward pass, is differentiated with respect to
  its first argument, so that there are gradients to look at. docs/ranges.md says what is counted
  under which heading.

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

  def count(*args: P.args, **kwargs: P.kwargs) -> RangesReport:
    with progress("ranges") as advance:
      return counted(fn, args, kwargs, differentiate, advance)

  return Pending(count, "ranges", fn)


def counted(
  fn: Function,
  args: Args,
  kwargs: Kwargs,
  differentiate: bool | None,
  advance: Callable[[int, int], None],
) -> RangesReport:
  """Returns the report of one call; `advance` takes the operations that are done, and all."""
  call = Call(args, kwargs)
  call.check_concrete("mpjax.ranges(fn)")
  program, outputs = call.traced(fn)
  backward = any(s.location.direction == "backward" for s in body_of(program).every_step())
  if differentiate is None:  # A loss returns a floating scalar, or one and aux.
    first = program.out_avals[0] if outputs[:1] in ([()], [("0",)]) else None
    scalar = first is not None and first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)
    differentiate = bool(args) and scalar and not backward
  scoped = with_parameter_scopes(fn)
  if differentiate:
    program, outputs = call.traced(gradient_of(scoped))
  elif not backward:
    program, outputs = call.traced(scoped)
  scales = [each.state.scale for each in scales_in((args, kwargs)) if each.state is not None]
  inputs, body = inputs_of(args, kwargs, scales), body_of(program)
  counting = plan(body, inputs, [*zip(outputs, program.out_avals, strict=True)])
  groups = _groups(body, call.operands, counting, advance)
  in_use = float(scales[0]) if len(scales) == 1 and not np.ndim(scales[0]) else None
  return RangesReport(getattr(fn, "__name__", type(fn).__name__), groups, in_use)


def inputs_of(args: Args, kwargs: Kwargs, scales: Sequence[Leaf] = ()) -> list[Input | None]:
  """Returns what the arrays among the leaves of arguments are; None where it is not floating."""
  inputs: list[Input | None] = []
  for position, one in enumerate((*args, *(kwargs[name] for name in sorted(kwargs)))):
    held = hasattr(one, "params") or (isinstance(one, Mapping) and "params" in one)
    for path, x in jax.tree_util.tree_leaves_with_path(one):
      if not is_array(x):
        continue
      # "value" is that of a Variable of NNX.
      names = tuple(name for name in key_names(path) if name != "value")
      inside = position == 0 and held and names[:1] == ("params",)
      text = "/".join(names[inside:]) or "(array)"
      is_parameter = position == 0 and inside == held and not any(x is each for each in scales)
      shown = text if position == 0 else f"args[{position}]/{text}"
      floating = Input(shown, is_parameter, x.dtype, x.shape, names)
      inputs.append(floating if is_inexact(x) else None)
  return inputs


def _groups(
  body: Body, operands: Sequence[Array], counting: Plan, advance: Callable[[int, int], None]
) -> tuple[GroupRanges, ...]:
  """Runs a function, and returns what was counted."""
  groups: dict[Group, GroupRanges] = {}

  def count(group: Group, x: Array, lost: Array | None = None) -> None:
    add(groups.setdefault(group, GroupRanges(kind=group.kind, path=group.path)), x, lost)

  for position, group in counting.inputs.items():
    count(group, operands[position])
  counted = counting.additions.keys() | counting.results.keys()
  total, done = sum(step.times for step in body.every_step() if step.number in counted), 0

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    addition = counting.additions.get(step.number)
    if addition is None:
      return [x for x in outs if is_inexact(x)] if step.number in counting.results else []
    update = jnp.broadcast_to(jnp.asarray(ins[1 - addition.argument]), outs[0].shape)
    # As it is stored: that is where it rounds away.
    old, new = (x.astype(addition.dtype) for x in (ins[addition.argument], outs[0]))
    return [update, changes_nothing(*map(_parts, (old, new, update)))]

  def see(step: Step, picked: Sequence[Array]) -> None:
    nonlocal done
    done += picked[0].size // max(math.prod(shape_of(step.eqn.outvars[0])), 1)
    advance(done, total)
    if step.number in counting.additions:
      count(counting.additions[step.number].group, *picked)
    else:
      for x in picked:
        count(counting.results[step.number], x)

  run_on_host(body, operands, Look(pick=pick, see=see))
  return tuple(groups.values())


def add(group: GroupRanges, x: Array | NumpyArray, lost: Array | None = None) -> None:
  """Counts the numbers of an array; of updates, `lost` says which change nothing."""
  numbers = np.asarray(_parts(x)).reshape(-1)
  dtype = np.dtype(np.float64 if numbers.dtype.itemsize > 4 else np.float32)
  unsigned, digits = np.dtype(f"uint{8 * dtype.itemsize}").type, int(np.finfo(dtype).nmant)
  bits = np.ascontiguousarray(numbers, dtype).view(unsigned) & unsigned(np.iinfo(unsigned).max >> 1)
  infinity = int(np.asarray(math.inf, dtype).view(unsigned))
  fields = (bits >> unsigned(digits)).astype(np.intp)
  counts = np.bincount(fields, minlength=(infinity >> digits) + 1)
  below = np.cumsum(counts) - counts

  def smaller(border: int) -> int:
    """How many are smaller; few of the borders lie among the numbers of an array."""
    field = border >> digits
    return int(np.count_nonzero(bits < border) if counts[field] else below[field])

  zero, finite, no_nan = map(smaller, (1, infinity, infinity + 1))
  group.zero += zero
  group.inf += no_nan - finite
  group.nan += bits.size - no_nan
  group.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
  largest = np.max(bits if finite == bits.size else bits[bits < infinity], initial=0)
  group.largest = max(group.largest, float(largest.view(dtype)))
  for name, fates in group.lost.items():
    to_zero, to_subnormal, to_finite = map(smaller, limits(name, dtype.name))
    fates["zero"] += to_zero - zero
    fates["subnormal"] += to_subnormal - to_zero
    fates["overflow"] += finite - to_finite
  bias, normal = 1 - int(np.finfo(dtype).minexp), np.flatnonzero(counts[1:-1]) + 1
  exponents = collections.Counter({int(field) - bias: int(counts[field]) for field in normal})
  if counts[0] > zero:
    subnormal = bits[(bits > 0) & (fields == 0)].view(dtype)
    exponents.update((np.frexp(subnormal)[1] - 1).tolist())
  exponents += collections.Counter(group.exponents)
  group.exponents = {e: exponents[e] for e in sorted(exponents)}


def _parts(x: Leaf) -> Leaf:
  """Returns the parts of complex numbers: each is a number of its own."""
  return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


@functools.cache
def limits(name: str, source: str) -> tuple[int, ...]:
  """Returns the bits of the smallest numbers whose cast is not zero, not subnormal, not finite.

  The cast is to the dtype `name`, from "float32" or "float64".
  """
  info, wide = jnp.finfo(name), np.dtype(source)
  unsigned = np.dtype(f"uint{8 * wide.itemsize}")

  def cast(bits: int) -> float:
    with np.errstate(all="ignore"):
      number = float(np.asarray(bits, unsigned).view(wide).astype(name))
    return number if math.isfinite(number) else math.inf  # One of 8 bits has NaN alone.

  every = range(int(np.asarray(math.inf, wide).view(unsigned)) + 1)
  borders = map(float, (info.smallest_subnormal, info.smallest_normal, math.inf))
  return tuple(bisect.bisect_left(every, border, key=cast) for border in borders)
