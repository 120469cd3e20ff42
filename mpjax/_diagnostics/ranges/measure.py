"""`ranges`: one instrumented run of a function, and what its numbers look like.

All is read from the bits of the numbers: a CPU flushes subnormal numbers to zero in arithmetic and
in comparisons.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._core.errors import check_call
from mpjax._core.leaves import changes_nothing, key_names
from mpjax._core.types import Args, Array, DType, Function, Kwargs, Leaf, NumpyArray
from mpjax._diagnostics.arguments import Call, check_function, gradient_of, is_array
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.plan import Group, Input, Plan, is_inexact, plan
from mpjax._diagnostics.ranges.ranges_report import FATES, FORMATS, GroupRanges, RangesReport
from mpjax._diagnostics.report import Pending, progress
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import Body, Step, body_of
from mpjax.transforms._state import scales_in


class Tally:
  """Counts of numbers: the fields of a `GroupRanges`."""

  def __init__(self) -> None:
    self.exponents: collections.Counter[int] = collections.Counter()
    self.zero = self.inf = self.nan = self.lost_updates = 0
    self.lost = {name: dict.fromkeys(FATES, 0) for name in FORMATS}
    self.largest = 0.0

  def add(self, x: Array, lost: Array | None = None) -> None:
    """Counts the elements of an array; of updates, `lost` says which change nothing."""
    bits = _magnitude(np.asarray(x).reshape(-1))
    dtype = np.dtype(f"float{8 * bits.itemsize}")
    digits, infinity = int(np.finfo(dtype).nmant), _bits(math.inf, dtype)
    ends = infinity >> digits
    counts = np.bincount((bits >> bits.dtype.type(digits)).astype(np.intp), minlength=ends + 1)
    zero = int(np.count_nonzero(bits == 0)) if counts[0] else 0
    inf = int(np.count_nonzero(bits == infinity)) if counts[ends] else 0
    self.zero += zero
    self.inf += inf
    self.nan += int(counts[ends]) - inf
    self.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
    counts[0] -= zero
    finite = int(counts[:ends].sum())
    if not finite:
      return
    largest = np.max(bits, where=bits < infinity, initial=0) if counts[ends] else bits.max()
    self.largest = max(self.largest, float(largest.view(dtype)))
    bias = 1 - int(np.finfo(dtype).minexp)
    fields = np.flatnonzero(counts[1:ends]) + 1
    self.exponents.update({int(e) - bias: int(counts[e]) for e in fields})
    if counts[0]:
      tiny = bits[(bits > 0) & (bits >> bits.dtype.type(digits) == 0)]
      self.exponents.update((np.frexp(tiny.view(dtype))[1] - 1).tolist())
    below = np.cumsum(counts) - counts

    def smaller(border: int) -> int:
      """How many are not zero and smaller; few of the borders lie among the numbers of an array."""
      field = border >> digits
      return int(np.count_nonzero(bits < border)) - zero if counts[field] else int(below[field])

    for name, fates in self.lost.items():
      to_zero, to_subnormal, to_finite = map(smaller, limits(name, dtype.name))
      fates["zero"] += to_zero
      fates["subnormal"] += to_subnormal - to_zero
      fates["overflow"] += finite - to_finite

  def as_dict(self) -> Mapping[str, Any]:
    """Returns the counts by name."""
    return {**vars(self), "exponents": {e: self.exponents[e] for e in sorted(self.exponents)}}


def _magnitude(x: NumpyArray) -> NumpyArray:
  """Returns the bits of |x| in float32, or in float64 if it is that wide."""
  if np.iscomplexobj(x):
    x = np.concatenate([x.real, x.imag])
  x = x if x.dtype.itemsize > 4 else x.astype(np.float32)
  unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}").type
  return np.ascontiguousarray(x).view(unsigned) & (np.iinfo(unsigned).max >> unsigned(1))


def _bits(number: float, dtype: DType) -> int:
  return int(np.asarray(number, dtype).view(f"uint{8 * dtype.itemsize}"))


@functools.cache
def limits(name: str, source: str) -> tuple[int, int, int]:
  """Returns the bits of the smallest numbers whose cast is not zero, not subnormal, not finite.

  The cast is to the dtype `name`, from "float32" or "float64".
  """
  narrow, wide = jnp.dtype(name), np.dtype(source)
  normal = float(jnp.finfo(narrow).smallest_normal)

  def first(border: float) -> int:
    """The bits of the smallest number whose cast is at least `border`, or NaN."""
    below, above = 0, _bits(math.inf, wide)
    while above - below > 1:
      middle = (below + above) // 2
      number = np.asarray(middle, f"uint{8 * wide.itemsize}").view(wide)
      with np.errstate(all="ignore"):
        rounded = float(number.astype(narrow))
      below, above = (middle, above) if rounded < border else (below, middle)
    return above

  smallest = float(jnp.finfo(narrow).smallest_subnormal)
  return first(smallest), first(normal), first(math.inf)


P = ParamSpec("P")

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(
  fn: Callable[P, object], *, differentiate: bool | None = None
) -> Callable[P, RangesReport]:
  """Returns a function that runs `fn` once and reports what its numbers look like.

  `fn` may be a training step, a gradient, a loss or a model, jitted or not. It is traced, and runs
  one operation after the other, inside of `scan`, `while`, `cond`, `remat`, custom derivatives and
  `shard_map` too. The exponents of all numbers are counted, exactly:

  - *activations*: the results of the forward pass, by module (named scope), that a policy would
    hold in low precision: what matmuls return and take, and what is computed from their results;
  - *gradients*: those of the backward pass, by module, times the loss scale if there is one;
  - *float32*: the other results, such as masks, softmax and the loss. No dtype loses any of these;
  - *parameters*: the floating leaves of the first argument, of its `params` where it has such;
  - *optimizer state*: those among them that nothing reads but the optimizer, such as moments;
  - *updates*: what is added to an argument that `fn` returns changed, `param + update`, with the
    share of them that change nothing: they round away in the dtype that the parameter is stored in.

  Operations that only move, sort, send or cast numbers are not counted again, nor is what `remat`
  repeats. A loss, which returns a scalar (or one and aux) and contains no backward pass, is
  differentiated with respect to its first argument, so that there are gradients to look at.

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
  is_loss = bool(args) and _is_scalar(program, outputs) and not backward
  scoped = with_parameter_scopes(fn)
  if is_loss if differentiate is None else differentiate:
    program, outputs = call.traced(gradient_of(scoped))
  elif not backward:
    program, outputs = call.traced(scoped)
  scales = [scale.state for scale in scales_in((args, kwargs)) if scale.state is not None]
  inputs, body = inputs_of(args, kwargs, [s.scale for s in scales]), body_of(program)
  counting = plan(body, inputs, [*zip(outputs, program.out_avals, strict=True)])
  tallies = _tallies(body, call.operands, counting, advance)
  groups = (GroupRanges(**group._asdict(), **tally.as_dict()) for group, tally in tallies.items())
  scale = np.asarray(scales[0].scale) if len(scales) == 1 else None
  in_use = float(scale) if scale is not None and not scale.shape else None
  return RangesReport(getattr(fn, "__name__", type(fn).__name__), tuple(groups), in_use)


def _is_scalar(program: ClosedJaxpr, outputs: Sequence[tuple[str, ...]]) -> bool:
  """Whether a floating scalar is returned, or one and aux."""
  if not outputs or outputs[0] not in ((), ("0",)):
    return False
  first = program.out_avals[0]
  return first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)


def inputs_of(args: Args, kwargs: Kwargs, scales: Sequence[Leaf] = ()) -> list[Input | None]:
  """Returns what the arrays among the leaves of arguments are."""
  inputs: list[Input | None] = []
  for position, one in enumerate((*args, *(kwargs[name] for name in sorted(kwargs)))):
    held = hasattr(one, "params") or (isinstance(one, Mapping) and "params" in one)
    inside = position == 0 and held
    for path, x in jax.tree_util.tree_leaves_with_path(one):
      if not is_array(x):
        continue
      # "value" is that of a Variable of NNX.
      names = tuple(name for name in key_names(path) if name != "value")
      first = position == 0 and (not inside or names[:1] == ("params",))
      text = "/".join(names[1:] if first and inside else names) or "(array)"
      shown = text if position == 0 else f"args[{position}]/{text}"
      is_parameter = first and not any(x is scale for scale in scales)
      floating = is_inexact(x.dtype)
      inputs.append(Input(shown, is_parameter, x.dtype, x.shape, names) if floating else None)
  return inputs


def _tallies(
  body: Body,
  operands: Sequence[Array],
  counting: Plan,
  advance: Callable[[int, int], None],
) -> Mapping[Group, Tally]:
  tallies: dict[Group, Tally] = collections.defaultdict(Tally)
  for position, group in counting.inputs.items():
    tallies[group].add(operands[position])
  counted = counting.additions.keys() | counting.results.keys()
  total, done = sum(step.times for step in body.every_step() if step.number in counted), 0

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    addition = counting.additions.get(step.number)
    if addition is None:
      return [x for x in outs if is_inexact(x.dtype)] if step.number in counting.results else []
    update = jnp.broadcast_to(jnp.asarray(ins[1 - addition.argument]), outs[0].shape)
    # As it is stored: that is where it rounds away.
    old, new = (x.astype(addition.dtype) for x in (ins[addition.argument], outs[0]))
    return [update, _lost(old, new, update)]

  def see(step: Step, picked: Sequence[Array]) -> None:
    nonlocal done
    done += picked[0].size // max(math.prod(shape_of(step.eqn.outvars[0])), 1)
    advance(done, total)
    if step.number in counting.additions:
      tallies[counting.additions[step.number].group].add(*picked)
    else:
      for x in picked:
        tallies[counting.results[step.number]].add(x)

  run_on_host(body, operands, Look(pick=pick, see=see))
  return tallies


def _lost(old: Array, new: Array, update: Array) -> Array:
  """Returns which updates change nothing though they are not zero."""
  if jnp.issubdtype(old.dtype, jnp.complexfloating):
    # A part of a complex number is a number of its own.
    return jnp.stack([changes_nothing(f(old), f(new), f(update)) for f in (jnp.real, jnp.imag)])
  return changes_nothing(old, new, update)
