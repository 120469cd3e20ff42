"""`ranges`: one instrumented run of a function, and what its numbers look like."""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxTypeError, check_call, kind_of
from mpjax._core.leaves import changes_nothing
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray, PyTree
from mpjax._diagnostics.arguments import Call, check_function, is_array
from mpjax._diagnostics.parameter_scopes import with_parameter_scopes
from mpjax._diagnostics.ranges.plan import Group, inputs_of, plan
from mpjax._diagnostics.ranges.ranges_report import GroupRanges, RangesReport
from mpjax._diagnostics.report import Pending, progress
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.runner import Look, run_on_host
from mpjax._jaxprs.steps import Step, body_of
from mpjax.transforms._state import scales_in

P = ParamSpec("P")

_FIX = "Write mpjax.ranges(step)(params, opt_state, batch), with a function and then its arguments."


@check_call("mpjax.ranges(fn)", fix=_FIX)
def ranges(fn: Callable[P, object]) -> Callable[P, RangesReport]:
  """Returns a function that runs `fn` once and reports what its numbers look like.

  `fn` may be a training step, a gradient, a loss or a model, jitted or not. It runs one operation
  after the other, and the exponents of all numbers are counted, exactly: of activations and
  gradients by module (named scope), of parameters and optimizer state, and of updates, with the
  share of them that change nothing, since they round away in the dtype that the parameter is stored
  in. A loss, which returns a scalar (or one and aux) and contains no backward pass, is
  differentiated with respect to its first argument. docs/ranges.md says what is counted where.

  Args:
    fn: any function of trees of arrays. What it donates is not donated here.

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
      return counted(fn, args, kwargs, advance)

  return Pending(count, "ranges", fn)


def gradient_of(fn: Function, scale: float = 1.0) -> Callable[..., PyTree]:
  """Returns the value and gradient of a loss by the floating arrays in its first argument."""

  def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
    call = Call(args[:1], {}, lambda x: is_array(x) and is_inexact(x))

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
      return scaled, [x for x in jax.tree.leaves(aux) if is_array(x)]

    return jax.value_and_grad(loss, has_aux=True)(call.arrays)

  return gradient


def counted(
  fn: Function, args: Args, kwargs: Kwargs, advance: Callable[[int, int], None]
) -> RangesReport:
  """Returns the report of one call; `advance` takes the operations that are done, and all."""
  call = Call(args, kwargs)
  call.check_concrete("mpjax.ranges(fn)")
  program, outputs = call.traced(fn)
  backward = any(s.location.direction == "backward" for s in body_of(program).every_step())
  if not backward:
    # A loss returns a floating scalar, or one and aux.
    first = program.out_avals[0] if args and outputs[:1] in ([()], [("0",)]) else None
    is_loss = first is not None and first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)
    scoped = with_parameter_scopes(fn)
    program, outputs = call.traced(gradient_of(scoped) if is_loss else scoped)
  body, operands = body_of(program), [*map(jnp.asarray, call.arrays)]
  scales = [each.state.scale for each in scales_in((args, kwargs)) if each.state is not None]
  counting = plan(body, inputs_of(args, kwargs, scales), outputs)
  groups: dict[Group, GroupRanges] = {}

  def count(group: Group, x: Array, lost: Array | None = None) -> None:
    add(groups.setdefault(group, GroupRanges(kind=group.kind, path=group.path)), x, lost)

  for position, group in counting.inputs.items():
    count(group, operands[position])
  total, done = sum(step.times for step in body.every_step() if step.number in counting.steps), 0

  def pick(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
    if step.number not in counting.additions:
      return [x for x in outs if is_inexact(x) and step.number in counting.steps]
    argument, dtype = counting.additions[step.number]
    update = jnp.broadcast_to(jnp.asarray(ins[1 - argument]), outs[0].shape)
    # As it is stored: that is where it rounds away.
    old, new = (x.astype(dtype) for x in (ins[argument], outs[0]))
    return [update, changes_nothing(*map(_parts, (old, new, update)))]

  def see(step: Step, picked: Sequence[Array]) -> None:
    nonlocal done
    done += picked[0].size // max(math.prod(shape_of(step.eqn.outvars[0])), 1)
    advance(done, total)
    calls = [picked] if step.number in counting.additions else zip(picked)
    for each in calls:
      count(counting.steps[step.number], *each)

  run_on_host(body, operands, Look(pick=pick, see=see))
  in_use = float(scales[0]) if len(scales) == 1 and not np.ndim(scales[0]) else None
  return RangesReport(getattr(fn, "__name__", type(fn).__name__), tuple(groups.values()), in_use)


def add(group: GroupRanges, x: Array | NumpyArray, lost: Array | None = None) -> None:
  """Counts the numbers of an array; of updates, `lost` says which change nothing."""
  # On the host: XLA flushes subnormal numbers to zero in arithmetic and in comparisons.
  numbers = np.asarray(_parts(x)).reshape(-1)
  numbers = numbers.astype(np.float64 if numbers.dtype.itemsize > 4 else np.float32)
  numbers = np.sort(np.abs(numbers))  # NaN comes last.
  one, info = numbers.dtype.type(1), np.finfo(numbers.dtype)
  lowest = info.minexp - info.nmant  # The exponent of the smallest number.
  borders = np.append(np.ldexp(one, np.arange(lowest, info.maxexp)), one * math.inf)
  smaller = np.searchsorted(numbers, borders)
  zero, finite = int(smaller[0]), int(smaller[-1])
  no_nan = int(np.searchsorted(numbers, borders[-1], side="right"))
  group.zero += zero
  group.inf += no_nan - finite
  group.nan += numbers.size - no_nan
  group.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
  group.largest = max(group.largest, float(np.max(numbers[:finite], initial=0)))
  for exponent, count in enumerate(np.diff(smaller).tolist(), lowest):
    if count:
      group.exponents[exponent] = group.exponents.get(exponent, 0) + count
  group.exponents = dict(sorted(group.exponents.items()))
  for name, fates in group.lost.items():
    first = np.searchsorted(numbers, limits(name, numbers.dtype.name))
    to_subnormal, to_normal, to_infinity = first.tolist()
    fates["zero"] += to_subnormal - zero
    fates["subnormal"] += to_normal - to_subnormal
    fates["overflow"] += finite - to_infinity


def _parts(x: Leaf) -> Leaf:
  """Returns the parts of complex numbers: each is a number of its own."""
  return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


@functools.cache
def limits(name: str, source: str) -> NumpyArray:
  """Returns the smallest numbers of `source` that a cast makes subnormal, normal and infinite."""
  info, wide = jnp.finfo(name), np.dtype(source)
  unsigned = np.dtype(f"uint{8 * wide.itemsize}")

  def cast(bits: int) -> float:
    with np.errstate(all="ignore"):
      number = float(np.asarray(bits, unsigned).view(wide).astype(name))
    return number if math.isfinite(number) else math.inf  # One of 8 bits has NaN alone.

  every = range(int(np.asarray(math.inf, wide).view(unsigned)) + 1)
  borders = map(float, (info.smallest_subnormal, info.smallest_normal, math.inf))
  bits = [bisect.bisect_left(every, border, key=cast) for border in borders]
  return np.asarray(bits, unsigned).view(wide)
