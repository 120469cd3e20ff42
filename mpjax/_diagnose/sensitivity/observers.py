"""The runs of a program in float32: without its roundings, with all of them, or with some.

A rounding is an identity whose derivative by a factor, which is 0, is the error of the rounding.
Comparisons and indices have no derivative. They are measured: once with all roundings made, and
once in float32 with the decisions of that run.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.trees import low_to_float32
from mpjax._core.types import Array, PyTree
from mpjax._diagnose.sensitivity.roundings import RESULT, Key, Places, Rounds
from mpjax._jaxpr.compat import varying_axes
from mpjax._jaxpr.in_float32 import is_low, results_widened
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import is_inexact_atom
from mpjax._jaxpr.runner import Enclosing, Observer, run_step
from mpjax._jaxpr.steps import Body, Step
from mpjax._matmul.format_rounding import format_rounding_p
from mpjax._optim.scaled import AS_COMPUTED


class InFloat32(Observer):
  """Runs a program in float32."""

  def __init__(self, places: Places) -> None:
    self.places = places

  def rounded(self, key: Key, x: Array) -> Array:
    """Returns what the program goes on with where a value is rounded."""
    return x

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    keys = self.places.keys.get(step.number, {})
    wide = [low_to_float32(x) if is_low(x) else x for x in ins]
    for i, key in keys.items():
      if i != RESULT:
        wide[i] = self.rounded(key, wide[i])
    # For the backward pass of a loss it is a constant, and its roundings change the loss.
    if step.eqn.primitive is p.stop_gradient_p:
      return wide
    if step.eqn.primitive is format_rounding_p:
      return [self.rounded(keys[RESULT], *wide)] if RESULT in keys else wide
    if step.number in self.places.blocked:
      wide = [*map(jax.lax.stop_gradient, wide)]
    if (computed := AS_COMPUTED.get(step.eqn.primitive)) is not None:
      return [computed(*wide, **step.eqn.params)]
    outs = results_widened(step.eqn, wide)
    if RESULT not in keys:
      return [*outs]
    low = zip(outs, step.eqn.outvars, strict=True)
    return [self.rounded(keys[RESULT], x) if is_low(v.aval) else x for x, v in low]


class Rounded(InFloat32):
  """Makes all roundings."""

  def rounded(self, key: Key, x: Array) -> Array:
    return self.places.roundings[key].format.rounded(x)


class Largest(InFloat32):
  """Notes the largest finite magnitude of each value that is rounded to float16."""

  def nothing(self) -> dict[Key, Array]:
    roundings = self.places.roundings.items()
    return {key: jnp.float32(0) for key, each in roundings if each.format.name == "float16"}

  def rounded(self, key: Key, x: Array) -> Array:
    if key in self.seen:
      magnitudes = jnp.abs(jnp.where(jnp.isfinite(x), x, 0)).astype(jnp.float32)
      self.seen[key] = jnp.maximum(self.seen[key], jnp.max(magnitudes, initial=0))
    return x

  def merge(self, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(jnp.maximum, one, other)

  def of_devices(self, seen: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.max(x, axis=0), seen)


class Recorded(InFloat32):
  """Notes the decisions of another run, by the number of their step.

  The iterations of a `while`, branches and devices are not observed.
  """

  merges: ClassVar[bool] = False

  def __init__(self, unobserved: InFloat32) -> None:
    super().__init__(unobserved.places)
    self.unobserved = unobserved

  def rounded(self, key: Key, x: Array) -> Array:
    return self.unobserved.rounded(key, x)

  def nothing(self) -> dict[int, Any]:
    return {}

  def inside(self, seen: Mapping[int, Any]) -> None:
    self.seen.update(seen)

  def of_devices(self, seen: PyTree) -> PyTree:
    return self.nothing()

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    if step.bodies:
      return run_step(step, ins, self.unobserved)
    outs = super().results_of(step, ins)
    return self.decide(step, outs) if decides(step) else outs

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    self.seen[step.number] = outs
    return outs


class Replayed(Recorded):
  """Takes the decisions of another run, and notes the share that differs."""

  def __init__(self, unobserved: InFloat32, decisions: Mapping[int, list[Array]]) -> None:
    super().__init__(unobserved)
    self.decisions = decisions

  def slices(self, step: Step) -> Mapping[int, list[Array]]:
    inside = {each.number for body in step.bodies for each in body.every_step()}
    return {number: x for number, x in self.decisions.items() if number in inside}

  def in_iteration(self, slices: Mapping[int, list[Array]]) -> Self:
    one = copy.copy(self)
    one.decisions = {**self.decisions, **slices}
    return one

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    if step.number not in self.decisions:
      return outs
    # Sorting returns values beside the indices. They differ by their rounding alone.
    counts = [not is_inexact_atom(v) or step.eqn.primitive in STEPS for v in step.eqn.outvars]
    others = self.decisions[step.number]
    differ = [a != b for a, b, counted in zip(outs, others, counts, strict=True) if counted]
    shares = [jnp.mean(x, dtype=jnp.float32) for x in differ if x.size]
    self.seen[step.number] = functools.reduce(jnp.maximum, shares, jnp.float32(0))
    return [b if counted else a for a, b, counted in zip(outs, others, counts, strict=True)]


class Perturbed(InFloat32):
  """Makes each rounding a change in proportion to its factor."""

  def __init__(self, places: Places, factors: Mapping[Key, Array]) -> None:
    super().__init__(places)
    self.factors = factors

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    facts = facts_of(step.eqn)
    # The derivatives of a move and of a matmul are finite.
    if not (facts.moves or facts.flops or step.eqn.primitive is p.convert_element_type_p):
      pairs = zip(ins, step.eqn.invars, strict=True)
      ins = [_with_finite_cotangent(x) if is_inexact_atom(v) else x for x, v in pairs]
    return super().results_of(step, ins)

  def bound(self, step: Step) -> int | None:
    return self.places.bounds.get(step.number)

  def slices(self, step: Step) -> Mapping[Key, Array]:
    steps = (each for body in step.bodies for each in body.every_step())
    inside = {key for each in steps for key in self.places.keys.get(each.number, {}).values()}
    # A value that is the same in all iterations has one factor, and each device needs all of them.
    on_devices = step.holds is Holds.SHARD_MAP
    return {key: self.factors[key] for key in inside if on_devices or self.factors[key].ndim}

  def in_iteration(self, slices: Mapping[Key, Array]) -> Self:
    one = copy.copy(self)
    one.factors = {**self.factors, **slices}
    return one

  def rounded(self, key: Key, x: Array) -> Array:
    factor = self.factors[key]
    # Each device of a `shard_map` has a part of the error, and their sum is the change.
    own = varying_axes(jax.typeof(factor))
    axes = tuple(axis for axis in varying_axes(jax.typeof(x)) if axis not in own)
    varying = jax.lax.pcast(factor, axes, to="varying") if axes else factor
    return _moved(self.places.roundings[key].format.rounded, x, varying)


class Counted(InFloat32):
  """Notes the most iterations of each `while`, by its position among those of a program."""

  def __init__(self, loops: Sequence[Step]) -> None:
    super().__init__(Places({}, {}, {}))
    # The condition and the body of a loop are its bodies, and the body runs as often as it goes on.
    self.loops = {id(step.bodies[1]): i for i, step in enumerate(loops)}

  def nothing(self) -> Array:
    return jnp.zeros(len(self.loops), jnp.int32)

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    if id(body) in self.loops:
      self.seen = self.seen.at[self.loops[id(body)]].max(enclosing.indices[-1] + 1)

  def merge(self, one: Array, other: Array) -> Array:
    return jnp.maximum(one, other)

  def of_devices(self, seen: Array) -> Array:
    return jnp.max(seen, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved(rounded: Rounds, x: Array, factor: Array) -> Array:
  """Returns `x + factor * (rounded(x) - x)` at a factor of 0."""
  return x


def _moved_forward(rounded: Rounds, x: Array, factor: Array) -> tuple[Array, Array]:
  return x, x


def _moved_backward(rounded: Rounds, x: Array, cotangent: Array) -> tuple[Array, Array]:
  # The error is computed again here, so that no rounding needs memory of its own: other operations
  # keep the value anyway. It is infinite for an overflow, which is reported by itself.
  error = rounded(x) - x
  changes = cotangent * jnp.where(jnp.isfinite(error), error, 0)
  return cotangent, jnp.sum(changes).astype(jnp.float32)


_moved.defvjp(_moved_forward, _moved_backward)


@jax.custom_vjp
def _with_finite_cotangent(x: Array) -> Array:
  """Returns a value whose infinite derivatives count as 0, such as that of a square root at 0.

  They say nothing to first order, and their product with 0 is NaN. Adam takes the square root of 0
  where a parameter has had no gradient yet.
  """
  return x


_with_finite_cotangent.defvjp(
  lambda x: (x, None), lambda _, cotangent: (jnp.where(jnp.isfinite(cotangent), cotangent, 0),)
)


class Finite(Recorded):
  """Notes whether the results of each step are finite."""

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    outs = super().results_of(step, ins)
    inexact = [x for x, v in zip(outs, step.eqn.outvars, strict=True) if is_inexact_atom(v)]
    if inexact:
      self.seen[step.number] = jnp.stack([jnp.all(jnp.isfinite(x)) for x in inexact])
    return outs

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    return outs


def decides(step: Step) -> bool:
  """Whether a step has results without a derivative that depend on floating operands."""
  if step.bodies or not any(map(is_inexact_atom, step.eqn.invars)):
    return False
  # The pivots of a factorization belong to the factors that are returned with them.
  if facts_of(step.eqn).acts_as == "linear algebra":
    return False
  return step.eqn.primitive in STEPS or not all(map(is_inexact_atom, step.eqn.outvars))


STEPS = frozenset((p.floor_p, p.ceil_p, p.round_p, p.sign_p))
"""Functions that are constant between steps."""
