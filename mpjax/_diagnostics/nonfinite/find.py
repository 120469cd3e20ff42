"""`find_nonfinite`: where the first inf or NaN came from."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import check_call
from mpjax._core.types import Args, Function, Kwargs, Leaf
from mpjax._diagnostics.arguments import check_function
from mpjax._diagnostics.flat import check_concrete
from mpjax._diagnostics.nonfinite.capture import CaptureProbe, Seen
from mpjax._diagnostics.nonfinite.cures import Fault, cause_and_cure
from mpjax._diagnostics.nonfinite.first import NONE, First, FirstProbe
from mpjax._diagnostics.nonfinite.interpreter import run
from mpjax._diagnostics.nonfinite.passes import direction_of
from mpjax._diagnostics.nonfinite.paths import path_of
from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, Range
from mpjax._diagnostics.nonfinite.scales import Implied, Scale, implied_scale, scale_of
from mpjax._diagnostics.nonfinite.sentinels import FlagProbe, suspects
from mpjax._diagnostics.nonfinite.traced import Traced, compiled, trace
from mpjax._diagnostics.progress import progress
from mpjax._diagnostics.selectors import named_scopes, prefixes, selector, written
from mpjax._jaxprs.atoms import Atom, aval_of, shape_of
from mpjax._jaxprs.inner_jaxprs import mapped_with
from mpjax._jaxprs.primitive_facts import Holds

_CLOSELY = 256
"""How many steps are looked at closely in one run: of more, compiling takes minutes."""


class _Found(NamedTuple):
  """The number of the step that broke, in which iteration, and on which device."""

  number: int
  iterations: tuple[int, ...]
  device: int


class _Finder:
  """Looks for the first step that breaks, at this loss scale or at another one.

  One run says which values are not finite. Only if there are some, the steps that lead to them are
  looked at closely, in a second one: most often -inf in masks, and the fault.
  """

  def __init__(self, traced: Traced, scale: Scale | None, implied: Implied | None) -> None:
    self.traced, self.scale, self.implied = traced, scale, implied
    body, probe = traced.body, FlagProbe()
    self.look = compiled(lambda *leaves: run(body, leaves, probe, outermost=True)[1])

  def closely(self, only: Collection[int]) -> Callable[..., First]:
    """Returns a function of a factor of the scale, and arguments, that looks at these steps."""
    body, places = self.traced.body, {} if self.implied is None else self.implied.places

    def first(factor: jax.Array, *leaves: Leaf) -> First:
      return run(body, leaves, FirstProbe(body.depth, only, places, factor), outermost=True)[1]

    return compiled(first)

  def found(self) -> tuple[_Found | None, Callable[..., First]]:
    """Returns what breaks first, and a function that looks for it."""
    flags = jax.device_get(self.look(*self.traced.leaves))
    closely = self.closely(())
    for only in _together(suspects(self.traced.body, flags)):
      closely = self.closely(only)
      found = self.at(closely)
      if found is not None:
        return found, closely
    return None, closely

  def at(self, closely: Callable[..., First], factor: float = 1.0) -> _Found | None:
    """Returns what breaks first with the loss scale multiplied by a factor."""
    leaves, inside = self.traced.leaves, 1.0
    if factor != 1.0 and self.scale is not None:
      leaves = self.scale.with_factor(factor)
    elif self.implied is not None:
      inside = factor
    number, iterations, device = closely(jnp.asarray(inside, jnp.float32), *leaves)
    if int(number) == NONE:
      return None
    kept = tuple(int(i) for i in np.asarray(iterations) if i >= 0)
    return _Found(int(number), kept, int(device))


def _together(found: Iterable[Sequence[int]]) -> Iterator[frozenset[int]]:
  """Yields numbers of steps, about `_CLOSELY` at once."""
  some: set[int] = set()
  for each in found:
    some.update(each)
    if len(some) >= _CLOSELY:
      yield frozenset(some)
      some = set()
  if some:
    yield frozenset(some)


_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.find_nonfinite(fn)", fix=_FIX)
def find_nonfinite(fn: Function) -> Callable[..., NonfiniteReport]:
  """Returns a function that runs `fn`, and says where the first inf or NaN came from.

  That is the first value, in the order of execution, which is not finite though the values that it
  is computed from are, or which is NaN though they are not (0 * inf). inf counts as NaN does. A
  constant that is -inf on purpose, as in a mask, is no fault, nor is a value that nothing reads but
  comparisons and a `where` that discards it: log(0) in `jnp.where(x > 0, jnp.log(x), 0)` is not
  reported, the NaN that its gradient makes of it is.

  `fn` is traced and compiled once, with a flag for what must stay finite and an index for each
  loop. Only if a flag is set are the operations that lead to it compiled again, each with a flag
  of its own, and once more to look at the numbers where it broke. Donated arguments are not
  deleted, and `jit`, `grad`, `scan`, `while_loop`, `cond`, `remat`, functions with derivatives of
  their own, `vmap` and `shard_map` are looked into. If the arguments hold the state of
  `mpjax.loss_scaling`, or the loss is multiplied by a power of two, smaller scales are tried: the
  verdict says whether one helps.

  Args:
    fn: a function of trees of arrays: a loss, a gradient, a training step, jitted or not.

  Returns:
    `find(*args, **kwargs)`, which takes the arguments of `fn` and returns a `NonfiniteReport`. It
    is false if nothing was found. Print it; `operation`, `path`, `direction`, `source`, `iteration`
    and `verdict` are for code.

  Raises:
    MpjaxTypeError: `fn` is not a function, or one that is compiled already; when called: an
      argument is traced, or has no value.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("head"):
  ...     return jnp.mean(jnp.exp(x @ w))
  >>> w, x = jnp.full((4, 2), 3, jnp.float16), jnp.ones((2, 4), jnp.float16)
  >>> found = mpjax.find_nonfinite(jax.grad(loss_fn))(w, x)
  >>> found.path, found.operation, found.direction, found.verdict
  ('head', 'exp', 'forward', 'value')
  >>> found.cure
  'Rule("float32", path="**/head")  # or the policy mixed_bfloat16'
  >>> bool(mpjax.find_nonfinite(jax.grad(loss_fn))(w / 2, x))
  False
  """
  check_function(fn, "mpjax.find_nonfinite(fn)", _FIX)

  @functools.wraps(fn)
  def find(*args: object, **kwargs: object) -> NonfiniteReport:
    # Compiling a training step takes as long as the step's own.
    with progress("find_nonfinite: compiling and running the function"):
      return _find(fn, args, kwargs)

  return find


def _find(fn: Function, args: Args, kwargs: Kwargs) -> NonfiniteReport:
  check_concrete(jax.tree.leaves((args, kwargs)), "mpjax.find_nonfinite(fn)(*args)")
  traced = trace(fn, args, kwargs)
  finder = finder_of(traced, args, kwargs)
  (found, closely), scale = finder.found(), finder.scale
  known = scale or finder.implied
  about = {
    "loss_scale": None if known is None else known.value,
    "step": None if scale is None else scale.step,
  }
  if found is None:
    return NonfiniteReport(**about)
  if found.number < len(traced.leaves) + len(traced.constants):
    return _given(traced, found.number, about)
  finite_at = _finite_at(finder, closely, found)
  body = traced.body
  step = next(each for each in body.every_step() if each.number == found.number)
  probe = CaptureProbe(body, found.number, found.iterations, found.device)
  leaves = traced.leaves
  seen = compiled(lambda *xs: run(body, xs, probe, outermost=True)[1])(*leaves)
  return _report(traced, step, found, probe, seen, finite_at, about, scale is not None)


def finder_of(traced: Traced, args: Args, kwargs: Kwargs) -> _Finder:
  """Returns what looks for the first step that breaks."""
  scale = scale_of(traced, args, kwargs)
  return _Finder(traced, scale, None if scale is not None else implied_scale(traced))


def _finite_at(finder: _Finder, closely: Callable[..., First], found: _Found) -> float | None:
  """Returns the largest power of two, as loss scale, at which the step does not break first."""
  known = finder.scale or finder.implied
  if known is None:
    return None
  least = math.ceil(math.log2(finder.scale.least)) if finder.scale else 0
  high = math.ceil(math.log2(known.value))  # It breaks there, or is not a power of two.

  def breaks(exponent: int) -> bool:
    again = finder.at(closely, 2.0**exponent / known.value)
    return again is not None and again.number == found.number

  if high <= least or breaks(least):
    return None
  low = least
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if breaks(middle) else (middle, high)
  return 2.0**low


def _given(traced: Traced, number: int, about: Mapping[str, Any]) -> NonfiniteReport:
  """Returns the report of an argument or a constant that came so."""
  arguments = len(traced.leaves)
  argument = number < arguments
  if argument:
    value, path = traced.leaves[number], traced.names[number]
  else:
    slot = traced.constants[number - arguments]
    value = traced.body.consts[slot]
    reader = next((s for s in traced.body.every_step() if slot in s.reads), None)
    path = "" if reader is None else path_of(traced, reader)
  x = np.asarray(value, np.float64) if not np.iscomplexobj(value) else np.abs(np.asarray(value))
  finite = np.abs(x[np.isfinite(x)])
  dtype, shape = jnp.asarray(value).dtype.name, np.shape(value)
  bad = int(np.isinf(x).sum()), int(np.isnan(x).sum())
  least, most = (float(f(finite)) if finite.size else math.nan for f in (np.min, np.max))
  index = np.argwhere(~np.isfinite(x))[0]
  kind = "argument" if argument else "constant"
  named = path if argument else f"an array that the function closes over, {dtype}{[*shape]}"
  return NonfiniteReport(
    operation=kind,
    path=path,
    direction="forward",
    verdict="value",
    index=tuple(map(int, index)),
    count=sum(bad),
    dtype=dtype,
    shape=shape,
    result=Range(
      name=kind, dtype=dtype, shape=shape, least=least, most=most, inf=bad[0], nan=bad[1]
    ),
    cause=f"{named} holds {bad[0]} inf and {bad[1]} NaN before anything is computed.",
    cure="mpjax.all_finite(x)  # of the data, or restore a checkpoint if it is a parameter",
    **about,
  )


def _report(
  traced: Traced,
  step: Step,
  found: _Found,
  probe: CaptureProbe,
  seen: Seen,
  finite_at: float | None,
  about: Mapping[str, Any],
  from_state: bool,
) -> NonfiniteReport:
  """Returns the report of a step that broke."""
  sizes, counts = np.asarray(seen.sizes), np.asarray(seen.counts)
  place, eqn, path = step.location, step.eqn, path_of(traced, step)
  rows = iter(range(len(sizes)))

  def ranged(name: str, var: Atom, path: str = "") -> Range:
    row, aval = next(rows), aval_of(var)
    least, most, value = map(float, sizes[row])
    none = most < 0
    return Range(
      name=name,
      dtype=aval.dtype.name,
      shape=aval.shape,
      least=math.nan if none else least,
      most=math.nan if none else most,
      inf=int(counts[row][0]),
      nan=int(counts[row][1]),
      path=path,
      value=None if math.isnan(value) else value,
    )

  before = tuple(
    ranged(s.eqn.primitive.name, s.eqn.outvars[0], s.location.path) for s in probe.before
  )
  operands = tuple(ranged(f"operand {i}", eqn.invars[i]) for i in probe.positions)
  var = eqn.outvars[probe.result]
  result, wide = ranged("result", var), ranged("in float32", var)
  selects = _selector(traced, step, path)
  fault = Fault(eqn.primitive, path, selects, operands, result, wide, finite_at, from_state)
  cause, cure = cause_and_cure(fault)
  shape = shape_of(var)
  index = np.unravel_index(int(seen.place), shape) if math.prod(shape) else ()
  notes = []
  if about["loss_scale"] is None and direction_of(traced.body, step) == "backward":
    notes.append(
      "No loss scale was found in the arguments: pass the optimizer's state, as a training step "
      "does, if the gradients are scaled."
    )
  return NonfiniteReport(
    operation=eqn.primitive.name,
    path=path,
    direction=direction_of(traced.body, step),
    source=None if place.source is None else str(place.source),
    iteration=_iteration(found.iterations),
    verdict="value" if finite_at is None else "scale",
    finite_at=finite_at,
    index=tuple(map(int, index)),
    count=int(seen.broken),
    device=_device(traced.body, found),
    dtype=result.dtype,
    shape=shape,
    operands=operands,
    result=result,
    before=before,
    float32_value=wide.most if not wide.inf + wide.nan else math.inf,
    cause=cause,
    cure=cure,
    notes=tuple(notes),
    **about,
  )


def _selector(traced: Traced, step: Step, path: str) -> str:
  """Returns what selects the module of a step in a rule, as one writes it."""
  names = named_scopes(step.location)
  if not names:
    return written(f"**/{path}")  # That of a parameter, as rules for NNX have it.
  every = [prefixes(named_scopes(each.location)) for each in traced.body.every_step()]
  own = "/".join(itertools.takewhile(lambda name: "->" not in name, names))
  return written(selector(own, set[str]().union(*every)))


def _iteration(iterations: tuple[int, ...]) -> int | tuple[int, ...] | None:
  return iterations[0] if len(iterations) == 1 else iterations or None


def _device(body: Body, found: _Found) -> dict[str, int] | None:
  """Returns the positions of a device along the axes of the `shard_map` that a step is in."""
  if found.device < 0:
    return None
  around = next(
    each
    for each in body.every_step()
    if each.holds is Holds.SHARD_MAP
    and any(inner.holds_step(found.number) for inner in each.bodies)
  )
  given = mapped_with(around.eqn)
  names = [name for name in given["mesh"].axis_names if name in given["axis_names"]]
  sizes = [given["mesh"].shape[name] for name in names]
  places = np.unravel_index(found.device, sizes)
  return {str(name): int(i) for name, i in zip(names, places, strict=True)}
