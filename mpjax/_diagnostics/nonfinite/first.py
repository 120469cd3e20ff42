"""The first step whose result is not finite though its operands are: found while it all runs."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.scales import Rescale
from mpjax._diagnostics.nonfinite.uses import (
  Uses,
  births,
  is_cast,
  is_elementwise,
  is_inexact,
  is_move,
  is_nan,
  is_select,
  not_finite,
)
from mpjax._diagnostics.runner import Around
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Body, Step

NONE = 2**31 - 1
"""The number of no step: it comes after all others."""

_TOGETHER = 16
"""How many masks of one shape are reduced at once."""


class First(NamedTuple):
  """Where the first value broke, in int32."""

  number: Array  # that of the step; negative for arguments and constants, `NONE` if no value did
  iterations: Array  # of the loops inside of one another, -1 where there is no loop
  device: Array  # the position in the mesh of a `shard_map`; -1 outside of one


class FirstProbe:
  """Looks, among the steps and arguments `only`, for the first whose result is not finite."""

  merges = True

  def __init__(self, top: Body, uses: Uses, only: Collection[int], rescale: Rescale) -> None:
    self.top, self.uses, self.only, self.rescale = top, uses, only, rescale

  def watch(self, body: Body, values: Sequence[Any], around: Around) -> "_Watch":
    watch = _Watch(self, around.indices)
    if body is self.top:
      watch.look_at_arguments(body, values)
    return watch

  def nothing(self) -> First:
    """Returns the state in which nothing broke."""
    return self.at(jnp.asarray(NONE, jnp.int32), ())

  def at(self, number: Array, indices: tuple[Array, ...]) -> First:
    """Returns the state of a step of a body."""
    none = jnp.asarray(-1, jnp.int32)
    iterations = [*indices, *[none] * (self.top.depth - len(indices))]
    return First(number, jnp.stack(iterations) if iterations else jnp.zeros(0, jnp.int32), none)

  def merge(self, one: First, other: First) -> First:
    """Returns the state of what ran first."""
    return jax.tree.map(lambda a, b: jnp.where(one.number < NONE, a, b), one, other)

  def of_devices(self, states: First) -> First:
    """Returns the state of the device on which the first step broke."""
    device = jnp.argmin(states.number)
    first = First(*(each[device] for each in states))
    return first._replace(device=jnp.where(first.number < NONE, device.astype(jnp.int32), -1))


class _Watch:
  """Looks at the values of one list of steps."""

  # Of a value that a `where` may discard, the number of the step that broke follows each element,
  # until something computes with it.

  def __init__(self, probe: FirstProbe, indices: tuple[Array, ...]) -> None:
    self.probe, self.uses, self.indices = probe, probe.uses, indices
    self.followed: dict[int, Array] = {}
    self.factors: dict[int, tuple[int, Array]] = {}
    self.masks: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
    self.broken: list[Array] = []
    self.inner: list[First] = []

  def look_at_arguments(self, body: Body, values: Sequence[Any]) -> None:
    """Looks at arguments: one that holds a NaN or +inf is at fault, -inf may be a mask."""
    given = [*zip(body.inputs, values, strict=True), *body.consts.items()]
    for number, (slot, x) in enumerate(given, -len(given)):
      x = jnp.asarray(x) if number in self.probe.only else x
      if number not in self.probe.only or not jnp.issubdtype(x.dtype, jnp.inexact):
        continue
      # What is added up is no mask.
      may_be_mask = (jnp.real(x) < 0) & (slot not in self.uses.summed)
      inf_counts = slot not in body.consts
      self._broke(slot, number, is_nan(x) | (inf_counts & not_finite(x) & ~may_be_mask))

  def compute(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    ins = self.probe.rescale(step, ins)
    outs = bind(step.eqn, ins)
    self._multiply(step, ins)
    self._follow(step, ins, outs)
    if step.number in self.probe.only and not self.uses.constants.issuperset(step.outs):
      for slot, mask in zip(step.outs, births(step, ins, outs), strict=True):
        if mask is not None:
          self._broke(slot, step.number, mask)
    return outs

  def inside(self, state: First) -> None:
    self.inner.append(state)

  def state(self) -> First:
    for shape in list(self.masks):
      self._reduce(shape)
    state = self.probe.nothing()
    if self.broken:
      state = self.probe.at(functools.reduce(jnp.minimum, self.broken), self.indices)
    for each in self.inner:
      earlier = state.number <= each.number
      state = jax.tree.map(lambda a, b, earlier=earlier: jnp.where(earlier, a, b), state, each)
    return state

  def _broke(self, slot: int, number: int, mask: Array) -> None:
    """Takes which elements of a value broke."""
    numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
    if slot in self.uses.discarded:
      old = self.followed.get(slot)
      self.followed[slot] = numbers if old is None else jnp.minimum(old, numbers)
    elif slot in self.uses.factors:
      self.factors[slot] = (number, jnp.any(mask))
      if slot in self.uses.derived:
        self.followed[slot] = numbers
    else:
      self._mask(number, mask)

  def _mask(self, number: int, mask: Array) -> None:
    """Takes which elements broke that something computes with."""
    # To reduce one mask after the other would be as many kernels as steps: those of one shape are
    # put together first.
    masks = self.masks.setdefault(mask.shape, [])
    masks.append((number, mask))
    if len(masks) == _TOGETHER:
      self._reduce(mask.shape)

  def _reduce(self, shape: tuple[int, ...]) -> None:
    numbers = jnp.full(shape, NONE, jnp.int32)
    for number, mask in reversed(self.masks.pop(shape)):
      numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), numbers)
    self.broken.append(jnp.min(numbers, initial=NONE))

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    if all(each is None for each in numbers) or facts_of(step.eqn).tests:
      return
    for slot, carried in _carried(step, ins, numbers, outs).items():
      if slot in self.uses.derived or (
        slot in self.uses.discarded and (is_move(step) or is_cast(step) or is_select(step))
      ):
        self.followed[slot] = carried
      else:
        if slot in self.uses.returned:  # An argument that is returned as it came.
          carried = jnp.where(carried < 0, NONE, carried)
        self.broken.append(jnp.min(carried, initial=NONE))

  def _multiply(self, step: Step, ins: Sequence[Any]) -> None:
    """A factor of the backward pass counts where it is NaN, or meets something else than 0."""
    # 0 * inf is NaN, and that it is 0 tells that the value did not count in the forward pass:
    # there, the multiplication is what broke. 0 * NaN breaks nothing that was not broken before.
    for position, slot in enumerate(step.ins):
      if isinstance(slot, Literal) or slot not in self.factors:
        continue
      number, broke = self.factors[slot]
      if is_move(step) or is_cast(step):
        self.factors.update(dict.fromkeys(step.outs, (number, broke)))
      elif len(ins) == 2 and is_elementwise(step) and step.location.direction == "backward":
        other = jnp.asarray(ins[1 - position])
        counts = is_nan(ins[position]) | (other != 0)
        self._mask(number, broke & not_finite(ins[position]) & ~not_finite(other) & counts)


def _carried(
  step: Step, ins: Sequence[Any], numbers: Sequence[Array | None], outs: Sequence[Array]
) -> Mapping[int, Array]:
  """Returns which steps broke the elements of the results, given those of the operands."""
  if is_elementwise(step):
    followed = [each for each in numbers if each is not None]
    return {step.outs[0]: functools.reduce(jnp.minimum, [*followed, _none_of(outs[0])])}
  operands = [
    number if number is not None else _none_of(jnp.asarray(x)) if is_inexact(v) else x
    for number, x, v in zip(numbers, ins, step.eqn.invars, strict=True)
  ]
  moved = bind(step.eqn, operands)
  pairs = zip(step.outs, step.eqn.outvars, moved, strict=True)
  return {slot: each for slot, var, each in pairs if is_inexact(var)}


def _none_of(x: Array) -> Array:
  """Returns the number of no step for each element: on the devices that an array is on."""
  return jnp.where(not_finite(x), jnp.asarray(NONE, jnp.int32), NONE)
