"""`ranges`: one instrumented run of a function, and what its numbers look like.

A number is an activation or a gradient where a policy would hold it in low precision: the results
of matmuls and convolutions, what they take, and what is computed from such results alone. The rest
stays in float32 whatever the policy says, so that a narrow dtype loses nothing of it: masks, the
cotangent of a loss, softmax, and what is computed with float32 data: see `docs/concepts.md`.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import add_p, bitcast_convert_type_p, scatter_add_p, sub_p

from mpjax._core.errors import MpjaxTypeError, check_call, kind_of
from mpjax._core.leaves import Path, changes_nothing
from mpjax._core.trees import is_floating, is_inexact
from mpjax._core.types import Args, Array, DType, Function, Kwargs, Leaf, NumpyArray, P, PyTree
from mpjax._debug.arguments import Argument, Call, name_by_parameters, with_parameter_scopes
from mpjax._debug.ranges_report import FORMATS, GroupRanges, Kind, RangesReport
from mpjax._debug.report import Advance, Pending
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import Location
from mpjax._jaxpr.primitives import OUTER_PRODUCT
from mpjax._jaxpr.reader import shape_of
from mpjax._jaxpr.runner import Look, run_on_host
from mpjax._jaxpr.steps import Body, Step, body_of
from mpjax._optim.loss_scale import scales_in

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."

_TOGETHER = 2**18
"""Numbers that are counted together: they fit into the cache of a core."""

Group: TypeAlias = tuple[Kind, str]
"""A heading: what numbers are, and the path of the module, or of a leaf of the arguments."""


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(fn: Callable[P, object]) -> Callable[P, RangesReport]:
  """Returns a function that runs `fn` once and reports what its numbers look like.

  It runs one operation after the other, and the exponents of all numbers are counted, exactly: of
  activations and gradients by module (named scope), of parameters and optimizer state, and of
  updates, with the share of them that change nothing, since they round away in the dtype that the
  parameter is stored in. docs/ranges.md says what is counted where.

  Args:
    fn: a training step, a gradient, a model or a loss, jitted or not. A loss, which returns a
      scalar (or one and aux), is differentiated with respect to its first argument.

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
  return Pending("mpjax.ranges(fn)", fn, counted, _FIX)


def gradient_of(fn: Function, scale: float = 1.0) -> Callable[..., PyTree]:
  """Returns the value and gradient of a loss by the floating arrays in its first argument."""

  def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
    call = Call(args[:1], {}, is_traced=lambda x: isinstance(x, jax.Array) and is_inexact(x))

    def loss(moving: Sequence[Leaf]) -> tuple[Leaf, PyTree]:
      returned = fn(*call.with_arrays(moving)[0], *args[1:], **kwargs)
      value, *aux = returned if isinstance(returned, tuple) else (returned,)
      if not args or getattr(value, "shape", None) != () or not is_inexact(value):
        raise MpjaxTypeError(
          "mpjax.tune(loss_fn)",
          expected="a loss of parameters, by position, that returns a floating scalar",
          got=f"one that returns {kind_of(value)}" if args else "no argument by position",
          fix="Pass (params, x=x), and take the mean: jnp.mean(fn(params, x) ** 2).",
        )
      scaled = value if scale == 1 else scale * value
      return scaled, [x for x in jax.tree.leaves(aux) if isinstance(x, jax.Array)]

    return jax.value_and_grad(loss, has_aux=True)(call.arrays)

  return gradient


def counted(fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> RangesReport:
  """Returns the report of one call; `advance` takes the operations that are done, and all."""
  call = Call(args, kwargs, "mpjax.ranges(fn)")
  call.check_concrete()
  program, outputs = call.traced(fn)
  backward = any(s.location.direction == "backward" for s in body_of(program).every_step())
  if not backward:
    # A loss returns a floating scalar, or one and aux.
    is_first = args and outputs[:1] == [("0",) if issubclass(call.returned[0], tuple) else ()]
    first = program.out_avals[0] if is_first else None
    is_loss = first is not None and first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)
    if is_loss:
      program, outputs = call.traced(gradient_of(with_parameter_scopes(fn)))
  body, operands = body_of(program), [*map(jnp.asarray, call.arrays)]
  scales = [each.state.scale for each in scales_in((args, kwargs)) if each.state is not None]
  counting = plan(body, call.arguments(fn, scales), outputs)
  every = (*counting.inputs.values(), *counting.steps.values())
  groups = {group: GroupRanges(*group) for group in every}
  for position, group in counting.inputs.items():
    add(groups[group], operands[position])
  total, done = sum(step.times for step in body.every_step() if step.number in counting.steps), 0

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    if step.number not in counting.additions:
      return [x for x in outs if is_floating(x) and step.number in counting.steps]
    argument, dtype = counting.additions[step.number]
    # What it makes of zeros: that of a scatter is an update of some elements.
    nothing = [jnp.zeros_like(x) if i == argument else x for i, x in enumerate(ins)]
    (update,) = bind(step.eqn, nothing)
    # As it is stored: that is where it rounds away.
    old, new = (x.astype(dtype) for x in (ins[argument], outs[0]))
    return [update, changes_nothing(old, new, update)]

  def see(step: Step, picked: Sequence[Array]) -> None:
    nonlocal done
    done += picked[0].size // max(math.prod(shape_of(step.eqn.outvars[0])), 1)
    advance(done, total)
    for each in [picked] if step.number in counting.additions else zip(picked):
      add(groups[counting.steps[step.number]], *each)

  run_on_host(body, operands, Look(pick=pick, see=see))
  in_use = float(scales[0]) if len(scales) == 1 and not np.ndim(scales[0]) else None
  rows = tuple(group for group in groups.values() if group.total)
  return RangesReport(getattr(fn, "__name__", type(fn).__name__), rows, in_use)


class Plan(NamedTuple):
  inputs: Mapping[int, Group]  # arguments: parameters, and what the optimizer alone reads
  steps: Mapping[int, Group]  # the results of steps, by their numbers, or their updates
  # Of the steps that add an update to an argument, which operand that is, and how it is stored.
  additions: Mapping[int, tuple[int, DType]]
  readers: Mapping[int, Location]  # where an argument is read first, but by the optimizer


def plan(body: Body, arguments: Sequence[Argument], outputs: Sequence[Path] = ()) -> Plan:
  """Returns what is to be counted in a function; of its results, the names of their keys."""
  graph = Graph(body)
  # What follows the backward pass and is in no module is the work of the optimizer.
  since = itertools.dropwhile(lambda each: each.where.direction != "backward", graph.computing())
  after = [*since]
  work = {each for each in after if each.where.direction == "forward" and not each.where.path}
  name_by_parameters(graph, [one.module if one.is_first else () for one in arguments])
  pairs = zip(graph.arguments, arguments, strict=True)
  floats = {v: one for v, one in pairs if v.is_floating}
  held, steps = _held(graph, floats, body.depth), dict[int, Group]()

  # A result that is a sum with an argument is that one, updated.
  additions = dict[int, tuple[int, DType]]()
  for keys, result in zip(outputs, graph.results, strict=False):
    # A momentum `0.9 * mu + grads` is no update of gradients that are an argument: another path.
    stored = [
      v
      for v, one in floats.items()
      if (v.dtype, v.aval.shape) == (result.dtype, getattr(result.aval, "shape", None))
      and (one.is_first or (v.aval.shape and one.keys and one.keys in (keys, keys[1:])))
    ]
    makers = [v.made_by for v in _copies(result) if v.made_by is not None]
    # Stochastic rounding computes with the bits of a sum, and loses nothing of many.
    rounds = any(each.eqn.primitive is bitcast_convert_type_p for each in makers)
    for operation in [] if rounds else makers:
      if operation.eqn.primitive not in (add_p, sub_p, scatter_add_p):
        continue
      updated = operation.operands[: 2 if operation.eqn.primitive is add_p else 1]
      copies = [*enumerate(map(_copies, updated))]
      # Of `a + b`, two arguments, the first is what is updated.
      for v, i in [(v, i) for v in stored for i, values in copies if v in values][:1]:
        others = [each.made_by for each in _copies(operation.operands[1 - i])]
        if any(x and x.eqn.primitive is sub_p and v in _copies(x.operands[1]) for x in others):
          continue  # `p + (master - p)`: it is the master that an update is added to.
        steps.setdefault(operation.step.number, ("updates", floats[v].name))
        additions.setdefault(operation.step.number, (i, v.aval.dtype))

  # Backwards: which numbers matmuls take, moved or cast perhaps, and the first consumer of each.
  taken, read = set[Value](), dict[Value, Location]()
  for operation in [*reversed(graph.operations)] * (body.depth + 1):
    operands, results = operation.operands, operation.results
    moved = (operation.moves or operation.casts) and not taken.isdisjoint(results)
    taken.update(operands if moved or _is_matmul(operation, held) else ())
    if operation.joins:
      read.update((v, read[out]) for out in results if out in read for v in operands)
    elif operation not in work:
      read.update(dict.fromkeys(operands, operation.where))

  for operation in graph.computing():
    kinds = [held[v] for v in operation.results if v in held]
    again = operation.moves or operation.casts or operation.where.direction == "recomputed"
    if kinds and not again and operation not in work:
      low = any(each.kind == "low" and not each.wide for each in kinds)
      kind: Kind = "float32"
      if low or not taken.isdisjoint(operation.results):
        kind = "gradients" if operation.where.direction == "backward" else "activations"
      steps.setdefault(operation.step.number, (kind, operation.where.path))
  of_inputs: dict[int, Group] = {}
  for i, v in enumerate(graph.arguments):
    of_optimizer = bool(after and v.consumers) and v not in read
    if v in floats and (of_optimizer or floats[v].is_first):
      of_inputs[i] = "optimizer state" if of_optimizer else "parameters", floats[v].name
  readers = {i: read[v] for i, v in enumerate(graph.arguments) if v in read}
  return Plan(of_inputs, steps, additions, readers)


def _copies(value: Value) -> set[Value]:
  """Returns what a value may be, element by element: selected, clipped, cast, out of a loop."""
  values, pending = set[Value](), [value]
  while pending:
    each = pending.pop()
    operation = each.made_by
    if each not in values and operation is not None:
      kept = operation.facts.exact or operation.casts
      pending += (
        v
        for v in operation.operands
        if operation.joins or (kept and v.is_floating and v.aval.shape == each.aval.shape)
      )
    values.add(each)
  return values


class _Held(NamedTuple):
  # Inputs are "data", activations are "low", parameters and numbers are "neutral".
  kind: str
  wide: bool  # a policy holds it in float32, or it is a number that float16 does not have


def _held(graph: Graph, floats: Mapping[Value, Argument], depth: int) -> dict[Value, _Held]:
  held = {
    v: _Held("neutral" if one.is_first else "data", not one.is_first) for v, one in floats.items()
  }
  held |= {v: _Held("low", False) for v in floats if v.is_low}
  for _ in range(depth + 1):  # What a carry is that starts as zeros, the body says.
    for operation in graph.operations:
      for v in (*operation.operands, *operation.results):
        if not v.is_floating:
          continue
        if v.kind == "constant":
          held[v] = _Held("data", True)
        elif v.kind == "literal":
          with np.errstate(over="ignore"):
            held[v] = _Held("neutral", bool(np.asarray(v.data).astype(np.float16) != v.data))
        elif v.made_by is operation:
          held[v] = _of_result(operation, v, held)
  return held


def _of_result(operation: Operation, out: Value, held: Mapping[Value, _Held]) -> _Held:
  """Returns what a result of an operation is: the table of `docs/concepts.md`."""
  facts = operation.facts
  if out.is_low or _is_matmul(operation, held):
    return _Held("low", False)
  floats = [held[v] for v in operation.operands if v in held]
  if not floats:  # Random numbers and masks are neutral, positions are data.
    neutral = facts.draws or np.dtype(np.bool_) in (v.dtype for v in operation.operands)
    return _Held("neutral" if neutral else "data", not neutral)
  kind = min((each.kind for each in floats), key=("low", "data", "neutral").index)
  wide = any(each.wide for each in floats)
  if operation.moves or operation.casts:
    return _Held(kind, wide)
  # Of a number that is computed from numbers, float16 may have it or not.
  return _Held(kind, wide or kind == "neutral" or operation.part in ("float32", "opaque", None))


def _is_matmul(operation: Operation, held: Mapping[Value, _Held]) -> bool:
  """Whether an operation is a matmul in low precision: not of inputs alone."""
  kinds = {held[v].kind for v in operation.operands if v in held}
  if operation.facts is OUTER_PRODUCT and operation.where.direction == "forward":
    return "low" in kinds
  return operation.part == "half" and kinds != {"data"}


def add(group: GroupRanges, x: Array | NumpyArray, lost: Array | None = None) -> None:
  """Counts the numbers of an array; of updates, `lost` says which change nothing."""
  # On the host: XLA flushes subnormal numbers to zero in arithmetic and in comparisons.
  numbers = np.asarray(x).reshape(-1)
  numbers = numbers.astype(np.float64 if numbers.dtype.itemsize > 4 else np.float32, copy=False)
  lowest, borders = _borders(numbers.dtype.name)
  parts = np.split(numbers.view(borders.dtype), range(_TOGETHER, numbers.size, _TOGETHER))
  smaller = np.sum([_smaller(part, borders) for part in parts], axis=0)
  count = 3 * len(FORMATS)
  *by_exponent, no_nan = smaller[:-count].tolist()
  zero, finite = by_exponent[0], by_exponent[-1]
  group.zero += zero
  group.inf += no_nan - finite
  group.nan += numbers.size - no_nan
  group.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
  finite_numbers = numbers if finite == numbers.size else numbers[np.isfinite(numbers)]
  group.largest = max(group.largest, float(np.max(np.abs(finite_numbers), initial=0)))
  counts = enumerate(np.diff(by_exponent).tolist(), lowest)
  group.exponents.update({exponent: count for exponent, count in counts if count})
  for fates, first in zip(group.lost.values(), smaller[-count:].reshape(-1, 3), strict=True):
    to_zero, subnormal, _, overflow = np.diff([zero, *first, finite]).tolist()
    fates.update(zero=to_zero, subnormal=subnormal, overflow=overflow)


def _smaller(bits: NumpyArray, borders: NumpyArray) -> NumpyArray:
  """Returns how many numbers have a smaller magnitude than each border, given their bits."""
  # Integers are in the same order. Those whose upper 14 bits are equal are counted together, which
  # takes a third of the time of sorting. Only where a border is among them, they are sorted.
  bits, shift = bits << 1 >> 1, borders.dtype.type(8 * borders.itemsize - 14)
  upper, first = (bits >> shift).astype(np.intp), borders >> shift
  counts, zeros = np.bincount(upper, minlength=2**13), bits.size - np.count_nonzero(bits)
  is_divided = np.zeros(2**13, bool)
  is_divided[first[first << shift < borders]] = True
  is_divided[0] = zeros < counts[0]  # Zeros may be many, the smallest numbers are rare.
  few = np.sort(bits[is_divided[upper]])
  before = np.append(0 if is_divided[0] else zeros, np.cumsum(counts))
  return before[first] + np.searchsorted(few, borders) - np.searchsorted(few, first << shift)


@functools.cache
def _borders(source: str) -> tuple[int, NumpyArray]:
  """Returns the least exponent of a dtype, and the bits of the numbers where a count begins."""
  # Those are the powers of two, inf and NaN, and for each of `FORMATS` the smallest numbers that a
  # cast makes subnormal, normal and infinite.
  wide, info = np.dtype(source), np.finfo(source)
  unsigned, lowest = np.dtype(f"uint{8 * wide.itemsize}"), info.minexp - info.nmant
  powers = np.ldexp(wide.type(1), np.arange(lowest, info.maxexp))
  borders = np.append(powers, wide.type(math.inf)).view(unsigned).tolist()
  every = range(borders[-1] + 1)
  borders.append(every.stop)

  def cast(name: str, bits: int) -> float:
    with np.errstate(all="ignore"):
      number = float(np.asarray(bits, unsigned).view(wide).astype(name))
    return number if math.isfinite(number) else math.inf  # One of 8 bits has NaN alone.

  for name in FORMATS:
    narrow = jnp.finfo(name)
    for border in map(float, (narrow.smallest_subnormal, narrow.smallest_normal, math.inf)):
      borders.append(bisect.bisect_left(every, border, key=functools.partial(cast, name)))
  return lowest, np.asarray(borders, unsigned)
