"""Running a jaxpr on the host, one equation after the other, with a look at each.

Only single operations are compiled, which JAX remembers, and what loops repeat. No number lives
longer than something reads it: that is what a function costs that runs without `jit`.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpjax._core.types import Array, Leaf
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.compat import bind, context_of, varying_axes
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs, mapped_with, opened
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.walk import walk

Key: TypeAlias = tuple[int, ...]
"""Which equation: its number, or that of the one it is in, the inner jaxpr, its number."""


class Observer(NamedTuple):
  """What happens at each first-order equation.

  Fields:
    compute: computes its results.
    pick: chooses arrays among its operands and results, or computes some from these.
    see: takes them, if there are any: of a loop perhaps those of several iterations together, and
      of a `shard_map` those of all devices, with one more axis in front.
    traced: whether JAX traces the equations. Numbers cannot decide what runs then.
  """

  compute: Callable[[Key, JaxprEqn, Sequence[Any]], list[Array]] = lambda key, eqn, ins: bind(
    eqn, ins
  )
  pick: Callable[[Key, JaxprEqn, Sequence[Any], Sequence[Array]], Sequence[Array]] = (
    lambda key, eqn, ins, outs: ()
  )
  see: Callable[[Key, JaxprEqn, Sequence[Array]], None] = lambda key, eqn, picked: None
  traced: bool = False


def run(
  program: Program,
  operands: Sequence[Array],
  observer: Observer,
  consts: Sequence[Array] = (),
  at: Key = (),
) -> list[Array]:
  """Returns the results of a jaxpr.

  The jaxprs inside of `jit`, `remat`, functions with derivatives of their own, `scan`, `while`,
  `cond` and `shard_map` are entered. The condition of a `while`, and what cannot be entered, run
  unobserved, the latter as one equation. So do `while` and `cond` inside of a `shard_map`.

  Args:
    program: the jaxpr.
    operands: its arguments.
    observer: what happens at each first-order equation.
    consts: the constants of a jaxpr that is not closed.
    at: the key of what holds the jaxpr.
  """
  jaxpr = opened(program)
  consts = program.consts if isinstance(program, ClosedJaxpr) else consts
  env: dict[Var, Leaf] = dict(zip(jaxpr.constvars, consts, strict=True))
  env |= dict(zip(jaxpr.invars, operands, strict=True))
  last_reads = _last_reads(jaxpr)
  for number, eqn in enumerate(jaxpr.eqns):
    key = (*at, number)
    values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
    enter = entered(eqn)
    if enter is None or (observer.traced and facts_of(eqn).holds in _DEPENDING):
      results = observer.compute(key, eqn, values)
      picked = observer.pick(key, eqn, values, results)
      if picked:
        observer.see(key, eqn, picked)
      del picked
    else:
      with context_of(eqn):
        results = enter(_Holder(eqn, inner_jaxprs(eqn) or (), key, observer), values)
    env |= dict(zip(eqn.outvars, results, strict=True))
    del values, results
    for v in last_reads[number]:
      del env[v]
  return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _last_reads(jaxpr: Jaxpr) -> list[list[Var]]:
  """Returns the variables that nothing reads after each equation."""
  last: dict[Var, int] = {}
  for number, eqn in enumerate(jaxpr.eqns):
    last |= {v: number for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)}
  for v in jaxpr.outvars:
    if isinstance(v, Var):
      last.pop(v, None)
  lists: list[list[Var]] = [[] for _ in jaxpr.eqns]
  for v, number in last.items():
    lists[number].append(v)
  return lists


class _Holder(NamedTuple):
  """An equation that holds jaxprs, while it runs."""

  eqn: JaxprEqn
  inner: tuple[Inner, ...]
  key: Key
  observer: Observer

  def run(self, number: int, values: Sequence[Any], observer: Observer | None = None) -> list[Any]:
    """Runs one of the inner jaxprs."""
    return run(
      self.inner[number].program, values, observer or self.observer, at=(*self.key, number)
    )

  def traceable(self, number: int) -> "_Traceable":
    """Returns a function for one of the inner jaxprs, of its operands, that JAX can trace.

    Its results are those of the jaxpr, and what the observer picks. `see` of these is called with
    the latter, once they are computed.
    """
    inside: list[tuple[Key, JaxprEqn]] = []

    def call(*operands: Any) -> tuple[list[Any], list[Sequence[Array]]]:
      numbers: list[Sequence[Array]] = []
      inside.clear()

      def note(key: Key, eqn: JaxprEqn, picked: Sequence[Array]) -> None:
        inside.append((key, eqn))
        numbers.append(list(picked))

      return self.run(number, operands, self.observer._replace(see=note, traced=True)), numbers

    def see(numbers: Sequence[Sequence[Array]]) -> None:
      for (key, eqn), picked in zip(inside, numbers, strict=True):
        self.observer.see(key, eqn, picked)

    return _Traceable(call, see)

  def is_straight(self, number: int) -> bool:
    """Whether numbers decide nothing in one of the inner jaxprs: it can be compiled."""
    inside = (facts_of(visit.eqn).holds for visit in walk(self.inner[number].program))
    return self.observer.traced or not any(holds in _DEPENDING for holds in inside)


class _Traceable(NamedTuple):
  call: Callable[..., tuple[list[Any], list[Sequence[Array]]]]
  see: Callable[[Sequence[Sequence[Array]]], None]


def _call(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  return holder.run(0, values)


def _cond(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  return holder.run(min(max(int(values[0]), 0), len(holder.inner) - 1), values[1:])


_TOGETHER = 2**18
"""How many numbers of the inputs and results of a loop are seen together, some iterations of it.

They have the same shapes under a policy, so that iterations are seen together as without it.
"""


def _scan(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  body, reverse = holder.inner[0], holder.eqn.params["reverse"]
  first, last, length = body.carry.start, body.carry.stop, body.times or 0
  constants, carry, xs = values[:first], list(values[first:last]), values[last:]
  if not length:
    return bind(holder.eqn, values)
  call, see = holder.traceable(0)

  def step(carry: list[Any], x: Sequence[Any]) -> tuple[list[Any], Any]:
    outs, numbers = call(*constants, *carry, *x)
    return outs[: len(carry)], (outs[len(carry) :], numbers)

  @functools.partial(jax.jit, static_argnums=2)
  def scan(carry: list[Any], part: Sequence[Any], count: int) -> Any:
    return jax.lax.scan(step, carry, part, count, reverse=reverse)

  def compiled(carry: list[Any], part: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    carry, (ys, numbers) = scan(carry, part, count)
    see(numbers)
    return carry, ys

  def alone(carry: list[Any], part: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    outs = holder.run(0, [*constants, *carry, *(x[0] for x in part)])
    return outs[: len(carry)], [y[None] for y in outs[len(carry) :]]

  advance, size = alone, 1
  if holder.is_straight(0):
    each = (*body.jaxpr.invars[first:], *body.jaxpr.outvars)
    numbers = sum(math.prod(shape_of(v)) for v in each)
    most = max(min(_TOGETHER // max(numbers, 1), length), 1)
    # What is left over would be compiled too.
    even = (count for count in range(most, most // 2, -1) if length % count == 0)
    advance, size = compiled, next(even, most)
  starts = range(0, length, size)
  parts: list[Any] = []
  for start in reversed(starts) if reverse else starts:
    count = min(size, length - start)
    part = [jax.lax.dynamic_slice_in_dim(x, start, count) for x in xs]
    carry, ys = advance(carry, part, count)
    parts.append(ys)
  parts = parts[::-1] if reverse else parts
  return [*carry, *map(_joined, zip(*parts, strict=True))]


def _joined(parts: Sequence[Any]) -> Array:
  if isinstance(parts[0], Tracer) or jnp.issubdtype(parts[0].dtype, jax.dtypes.extended):
    return jnp.concatenate(parts)
  # XLA would compile an operation of as many operands.
  return parts[0] if len(parts) == 1 else jnp.asarray(np.concatenate(parts))


def _while(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  test, body = holder.inner[0], holder.inner[1]
  carry = [values[i] for i in body.carried]
  looped = [values[i] for i in (body.operands or ())[: body.carry.start]]
  tested = [values[i] for i in (test.operands or ())[: len(test.operands or ()) - len(carry)]]
  again = jax.jit(lambda *carry: run(test.program, [*tested, *carry], Observer(traced=True)))
  call, see = holder.traceable(1)
  compiled = jax.jit(call) if holder.is_straight(1) else None
  while bool(again(*carry)[0]):
    if compiled is None:
      carry = holder.run(1, [*looped, *carry])
    else:
      carry, numbers = compiled(*looped, *carry)
      see(numbers)
  return carry


def _shard_map(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  arguments, (call, see) = mapped_with(holder.eqn), holder.traceable(0)
  axes = tuple(name for name in arguments["mesh"].axis_names if name in arguments["axis_names"])

  def one_device(*operands: Array) -> Any:
    outs, numbers = call(*operands)
    return outs, jax.tree.map(lambda x: _of_device(x, axes), numbers)

  specs = (list(arguments["out_specs"]), jax.P(axes))
  outs, numbers = jax.jit(jax.shard_map(one_device, **{**arguments, "out_specs": specs}))(*values)
  see(numbers)
  return outs


def _of_device(x: Any, axes: tuple[Hashable, ...]) -> Array:
  """Returns an array with a first axis for the devices, each of which has its own."""
  x = jnp.asarray(x)[None]
  return jax.lax.pcast(x, tuple(set(axes) - set(varying_axes(jax.typeof(x)))), to="varying")


_DEPENDING = (Holds.COND, Holds.WHILE)

_ENTER: Mapping[Holds | None, Callable[[_Holder, Sequence[Any]], list[Any]]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE, Holds.LINEAR_CALL), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _call),
  Holds.COND: _cond,
  Holds.SCAN: _scan,
  Holds.SHARD_MAP: _shard_map,
  Holds.WHILE: _while,
}


def entered(eqn: JaxprEqn) -> Callable[[_Holder, Sequence[Any]], list[Any]] | None:
  """Returns what enters an equation; None for one that runs as it is."""
  enter = _ENTER.get(facts_of(eqn).holds)
  return enter if enter is not None and inner_jaxprs(eqn) else None
