"""The first step whose result is not finite though its operands are: found while it all runs."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.births import births, is_nan, not_finite
from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._diagnostics.nonfinite.uses import (
  Uses,
  is_cast,
  is_elementwise,
  is_inexact,
  is_move,
  is_select,
  uses_of,
)
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.primitives import facts_of

NONE = 2**31 - 1
"""The number of no step: it comes after all others."""


_TOGETHER = 16
"""How many masks of one shape are reduced at once."""


class First(NamedTuple):
  """Where the first value broke.

  Fields:
    number: int32 of shape (), that of the step; `NONE` if no value did.
    iterations: int32 of shape (loops inside of one another,), -1 where there is no loop.
    device: int32 of shape (), the position in the mesh of a `shard_map`; -1 outside of one.
  """

  number: Array
  iterations: Array
  device: Array


class FirstProbe:
  """Looks for the first step whose result is not finite though its operands are.

  Args:
    depth: how many loops of the function are inside of one another, at most.
    only: the numbers of the steps and arguments that are looked at.
    scaled: the positions of operands that are the loss scale, by the numbers of their steps.
    factor: what these operands are multiplied by.
  """

  def __init__(
    self, depth: int, only: Collection[int], scaled: Mapping[int, int], factor: Array
  ) -> None:
    self.depth, self.only, self.scaled, self.factor = depth, only, scaled, factor

  def watch(self, body: Body, indices: tuple[Array, ...], outermost: bool) -> "_Watch":
    """Returns what looks at the values of a body."""
    return _Watch(self, body, indices)

  def nothing(self, bodies: Sequence[Body] = ()) -> First:
    """Returns the state in which nothing broke."""
    return self.at(jnp.asarray(NONE, jnp.int32), ())

  def at(self, number: Array, indices: tuple[Array, ...]) -> First:
    """Returns the state of a step of a body."""
    none = jnp.asarray(-1, jnp.int32)
    iterations = [*indices, *[none] * (self.depth - len(indices))]
    return First(number, jnp.stack(iterations) if iterations else jnp.zeros(0, jnp.int32), none)

  def first(self, one: First, other: First) -> First:
    """Returns the state of what ran first."""
    return jax.tree.map(lambda a, b: jnp.where(one.number < NONE, a, b), one, other)

  def of_devices(self, states: First) -> First:
    """Returns the state of the device on which the first step broke."""
    device = jnp.argmin(states.number)
    found = First(*(each[device] for each in states))
    here = jnp.where(found.number < NONE, device.astype(jnp.int32), -1)
    return found._replace(device=here)


def _earlier(one: First, other: First) -> First:
  return jax.tree.map(lambda a, b: jnp.where(one.number <= other.number, a, b), one, other)


class _Watch:
  """Looks at the values of one list of steps.

  Of a value that a `where` may discard, the number of the step that broke follows each element,
  until something computes with it.
  """

  def __init__(self, probe: FirstProbe, body: Body, indices: tuple[Array, ...]) -> None:
    self.probe, self.indices = probe, indices
    self.uses: Uses = uses_of(body)
    self.given = 0  # How many arguments the function has: those of inner lists are not looked at.
    self.followed: dict[int, Array] = {}
    self.factors: dict[int, tuple[int, Array]] = {}
    self.masks: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
    self.found: list[Array] = []
    self.inner: list[First] = []

  def arguments(self, body: Body, values: Sequence[Array]) -> None:
    """Looks at arguments: one that holds a NaN or +inf is at fault, -inf may be a mask.

    What is added up is no mask.
    """
    for number, (slot, x) in enumerate(zip(body.inputs, values, strict=True)):
      if number not in self.probe.only or not jnp.issubdtype(x.dtype, jnp.inexact):
        continue
      may_be_mask = (jnp.real(x) < 0) & (slot not in self.uses.summed)
      self._broke(slot, number, is_nan(x) | (not_finite(x) & ~may_be_mask))
    self.given = len(values)
    for number, (slot, x) in enumerate(body.consts.items(), self.given):
      x = jnp.asarray(x)
      if number in self.probe.only and jnp.issubdtype(x.dtype, jnp.inexact):
        self._broke(slot, number, is_nan(x))

  def operands(self, step: Step, ins: list[Any]) -> list[Any]:
    """Returns the operands with which a step is to run: a loss scale may be another one."""
    position = self.probe.scaled.get(step.number)
    if position is not None:
      scale = jnp.asarray(ins[position])
      ins = [*ins]
      ins[position] = scale * self.probe.factor.astype(scale.dtype)
    return ins

  def step(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Looks at a step that has run."""
    self._follow(step, ins, outs)
    if step.number not in self.probe.only or set(step.outs) <= self.uses.constants:
      return
    for slot, mask in zip(step.outs, births(step, ins, outs), strict=True):
      if mask is not None:
        self._broke(slot, step.number, mask)

  def inside(self, state: First) -> None:
    """Takes what was found in the inner lists of a step."""
    self.inner.append(state)

  def state(self) -> First:
    """Returns the first that was found."""
    for shape in list(self.masks):
      self._reduce(shape)
    state = self.probe.nothing()
    if self.found:
      state = self.probe.at(functools.reduce(jnp.minimum, self.found), self.indices)
    for each in self.inner:
      state = _earlier(state, each)
    return state

  def _broke(self, slot: int, number: int, mask: Array) -> None:
    """Takes which elements of a value broke."""
    if slot in self.uses.discarded:
      new = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
      old = self.followed.get(slot)
      self.followed[slot] = new if old is None else jnp.minimum(old, new)
    elif slot in self.uses.factors:
      self.factors[slot] = (number, jnp.any(mask))
      if slot in self.uses.derived:
        self.followed[slot] = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
    else:
      self._mask(number, mask)

  def _mask(self, number: int, mask: Array) -> None:
    """Takes which elements broke that something computes with.

    To reduce one mask after the other would be as many kernels as steps: those of one shape are
    put together first.
    """
    masks = self.masks.setdefault(mask.shape, [])
    masks.append((number, mask))
    if len(masks) == _TOGETHER:
      self._reduce(mask.shape)

  def _reduce(self, shape: tuple[int, ...]) -> None:
    numbers = jnp.full(shape, NONE, jnp.int32)
    for number, mask in reversed(self.masks.pop(shape)):
      numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), numbers)
    self._counts(numbers)

  def _counts(self, numbers: Array) -> None:
    """Takes the numbers of the steps of broken elements that something computes with."""
    self.found.append(jnp.min(numbers, initial=NONE))

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._multiply(step, ins)
    slots = [slot if isinstance(slot, int) else None for slot in step.ins]
    numbers = [None if slot is None else self.followed.get(slot) for slot in slots]
    if all(each is None for each in numbers) or facts_of(step.eqn).tests:
      return
    for slot, carried in _carried(step, ins, numbers, outs).items():
      if slot in self.uses.derived or (
        slot in self.uses.discarded and (is_move(step) or is_cast(step) or is_select(step))
      ):
        self.followed[slot] = carried
      else:
        if slot in self.uses.returned:  # An argument that is returned as it came.
          carried = jnp.where(carried < self.given, NONE, carried)
        self._counts(carried)

  def _multiply(self, step: Step, ins: Sequence[Any]) -> None:
    """A factor of the backward pass counts where it is NaN, or meets something else than 0.

    0 * inf is NaN, and that it is 0 tells that the value did not count in the forward pass: there,
    the multiplication is what broke. 0 * NaN breaks nothing that was not broken before.
    """
    for position, slot in enumerate(step.ins):
      if isinstance(slot, Literal) or slot not in self.factors:
        continue
      number, broke = self.factors[slot]
      if is_move(step) or is_cast(step):
        self.factors.update(dict.fromkeys(step.outs, (number, broke)))
      elif len(ins) == 2 and is_elementwise(step) and not self._only_discards(step):
        other = jnp.asarray(ins[1 - position])
        counts = is_nan(ins[position]) | (other != 0)
        meets = not_finite(ins[position]) & ~not_finite(other) & counts
        self._mask(number, broke & meets)

  def _only_discards(self, step: Step) -> bool:
    return step.location.direction != "backward"


def _carried(
  step: Step, ins: Sequence[Any], numbers: Sequence[Array | None], outs: Sequence[Array]
) -> Mapping[int, Array]:
  """Returns which steps broke the elements of the results, given those of the operands."""
  if is_elementwise(step):
    known = [each for each in numbers if each is not None]
    least = known[0]
    for each in known[1:]:
      least = jnp.minimum(least, each)
    return {step.outs[0]: jnp.minimum(least, _none_of(outs[0]))}

  def given(position: int, x: Any) -> Any:
    found = numbers[position]
    if found is not None:
      return found
    if not is_inexact(step.eqn.invars[position]):
      return x
    return _none_of(jnp.asarray(x))

  moved = bind(step.eqn, [given(i, x) for i, x in enumerate(ins)])
  pairs = zip(step.outs, step.eqn.outvars, moved, strict=True)
  return {slot: each for slot, var, each in pairs if is_inexact(var)}


def _none_of(x: Array) -> Array:
  """Returns the number of no step for each element: on the devices that an array is on."""
  return jnp.where(not_finite(x), jnp.asarray(NONE, jnp.int32), NONE)
