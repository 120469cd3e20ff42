"""What the numbers were where a step broke: looked at in a second run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import primitives as p

from mpjax._core.dtypes import FLOAT32, is_low_precision
from mpjax._core.errors import REFUSALS
from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.uses import births, is_elementwise, is_inexact, is_nan, not_finite
from mpjax._diagnostics.runner import Around
from mpjax._jaxprs.atoms import dtype_of, shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.inner_jaxprs import opened
from mpjax._jaxprs.steps import Body, Step

BEFORE = 10
"""How many operations before the one that broke are shown."""


class Seen(NamedTuple):
  """What was seen, of all values that are looked at in a row."""

  hit: Array  # whether the step was met in its iteration
  # float32 of shape (values, 3): the least and the largest absolute value of those that are
  # finite, and the value at the first element that broke.
  sizes: Array
  counts: Array  # int32 of shape (values, 2): how many are inf, and how many NaN
  place: Array  # int32, the first element that broke, counted along the last axis first
  broken: Array  # int32, how many did


class CaptureProbe:
  """Looks at the operands and results of one step, and at the results of those before it."""

  # The device is that on which it broke, -1 outside of a `shard_map`.

  merges = True

  def __init__(self, top: Body, number: int, iterations: Sequence[int], device: int) -> None:
    self.iterations, self.device = iterations, device
    self.body, self.step = top.path_to(number)[-1]
    earlier = (s for s in self.body.steps if s.number < number and not s.bodies and _is_numbers(s))
    self.before = tuple(earlier)[-BEFORE:]
    self.positions = tuple(i for i, v in enumerate(self.step.eqn.invars) if is_inexact(v))
    self.result = next(i for i, v in enumerate(self.step.eqn.outvars) if is_inexact(v))

  def watch(self, body: Body, values: Sequence[Any], around: Around) -> "_Watch":
    return _Watch(self, body is self.body, around.indices)

  def nothing(self) -> Seen:
    """Returns the state in which nothing was seen."""
    zero, rows = jnp.zeros((), jnp.int32), len(self.before) + len(self.positions) + 2
    sizes, counts = jnp.zeros((rows, 3), jnp.float32), jnp.zeros((rows, 2), jnp.int32)
    return Seen(jnp.asarray(False), sizes, counts, zero, zero)

  def merge(self, one: Seen, other: Seen) -> Seen:
    """Returns the state in which something was seen."""
    return jax.tree.map(lambda a, b: jnp.where(one.hit, a, b), one, other)

  def of_devices(self, states: Seen) -> Seen:
    """Returns what the device saw on which the step broke."""
    return jax.tree.map(lambda x: x[max(self.device, 0)], states)


class _Watch:
  """Looks at the values of one list of steps."""

  def __init__(self, probe: CaptureProbe, is_here: bool, indices: tuple[Array, ...]) -> None:
    self.probe, self.indices = probe, indices
    self.before = {step.number for step in probe.before} if is_here else set[int]()
    self.rows: list[tuple[Array, Array]] = []
    self.seen = probe.nothing()

  def compute(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = bind(step.eqn, ins)
    if step.number in self.before:
      self.rows.append(_row(outs[0], jnp.zeros((), jnp.float32)))
    if step.number == self.probe.step.number:
      self.seen = self._captured(step, ins, outs)
    return outs

  def inside(self, state: Seen) -> None:
    self.seen = self.probe.merge(self.seen, state)

  def state(self) -> Seen:
    return self.seen

  def _captured(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> Seen:
    result = outs[self.probe.result]
    mask = births(step, ins, outs)[self.probe.result]
    mask = not_finite(result) if mask is None else jnp.broadcast_to(mask, result.shape)
    # By reductions, which sharded arrays take as well: they may not be reshaped.
    places = _places(result.shape)
    index = jnp.min(jnp.where(mask, places, _LAST), initial=_LAST)

    def value(x: Array) -> Array:
      if jnp.size(x) == 1:
        return _as_float32(jnp.reshape(x, ()))
      if not (is_elementwise(step) and jnp.shape(x) == result.shape):
        return jnp.full((), jnp.nan, jnp.float32)
      return jnp.sum(jnp.where(places == index, _as_float32(x), 0))

    operands = [jnp.asarray(ins[position]) for position in self.probe.positions]
    wide = in_float32(step, ins)
    wide = result if wide is None else wide[self.probe.result]
    self.rows += [_row(x, value(x)) for x in (*operands, result, wide)]
    sizes, counts = (jnp.stack(each) for each in zip(*self.rows, strict=True))
    hit = jnp.asarray(True)
    for now, then in zip(self.indices, self.probe.iterations, strict=False):
      hit = hit & (now == then)
    count = jnp.sum(mask, dtype=jnp.int32)
    return Seen(hit, sizes, counts, index.astype(jnp.int32), count)


_LAST = 2**31 - 1


def _places(shape: tuple[int, ...]) -> Array:
  """Returns the positions of elements, counted along the last axis first."""
  found, stride = jnp.zeros(shape, jnp.int32), 1
  for axis in reversed(range(len(shape))):
    found = found + jax.lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    stride *= shape[axis]
  return found


def _is_numbers(step: Step) -> bool:
  return bool(step.eqn.outvars) and is_inexact(step.eqn.outvars[0])


def _as_float32(x: Array) -> Array:
  return jnp.real(x).astype(jnp.float32)


def _row(x: Array, value: Array) -> tuple[Array, Array]:
  size = jnp.abs(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x).astype(jnp.float32)
  bad, nan = not_finite(x), is_nan(x)
  least = jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf)
  most = jnp.max(jnp.where(bad, -1.0, size), initial=-1.0)
  inf = jnp.sum(bad & ~nan, dtype=jnp.int32)
  return jnp.stack([least, most, value]), jnp.stack([inf, jnp.sum(nan, dtype=jnp.int32)])


_JAXPRS = (Jaxpr, ClosedJaxpr)

_ADD_UP = frozenset((p.reduce_p, p.scatter_add_p, p.scatter_mul_p))
"""Primitives with a jaxpr of scalars, such as that of an addition."""


def _wider(value: object) -> object:
  """Returns a parameter of an equation as it is in float32."""
  if isinstance(value, np.dtype) and is_low_precision(value):
    return FLOAT32
  if not isinstance(value, _JAXPRS):
    return value
  jaxpr, consts = opened(value), getattr(value, "consts", ())
  scalars = [jax.ShapeDtypeStruct((), FLOAT32) if is_inexact(v) else v.aval for v in jaxpr.invars]
  traced = jax.make_jaxpr(lambda *xs: eval_jaxpr(jaxpr, consts, *xs))(*scalars)
  return traced if isinstance(value, ClosedJaxpr) else traced.jaxpr


def in_float32(step: Step, ins: Sequence[Any]) -> list[Array] | None:
  """Returns what a step gives in float32 for the same operands; None if that is not known."""
  eqn = step.eqn
  low = [dtype_of(v) for v in (*eqn.invars, *eqn.outvars) if is_inexact(v)]
  if not any(dtype is not None and is_low_precision(dtype) for dtype in low):
    return None
  if eqn.primitive not in _ADD_UP and any(isinstance(x, _JAXPRS) for x in eqn.params.values()):
    return None  # Such as a kernel written for float16.
  params = {name: _wider(value) for name, value in eqn.params.items()}
  wide = [
    jnp.asarray(x).astype(FLOAT32)
    if is_inexact(v) and is_low_precision(jnp.asarray(x).dtype)
    else x
    for x, v in zip(ins, eqn.invars, strict=True)
  ]
  try:
    found = bind(eqn.replace(params=params), wide)
  except REFUSALS:
    return None  # It takes no float32.
  shapes = [shape_of(v) for v in eqn.outvars]
  return found if [x.shape for x in found] == shapes else None
