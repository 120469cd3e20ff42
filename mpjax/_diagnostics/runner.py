"""Running a jaxpr on the host, one equation after the other, with a look at each.

Nothing is compiled but single operations, which JAX remembers, and no number lives longer than
something reads it: that is what a function costs that runs without `jit`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpjax._core.types import Array, Leaf
from mpjax._jaxprs.compat import bind, context_of, varying_axes
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs, mapped_with, opened
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

Key: TypeAlias = tuple[int, ...]
"""Which equation: its number, or that of the one it is in, the inner jaxpr, its number."""

Compute: TypeAlias = Callable[[Key, JaxprEqn, Sequence[Any]], list[Array]]
"""Computes the results of a first-order equation. In a `shard_map` JAX traces it."""

See: TypeAlias = Callable[[Key, JaxprEqn, Sequence[Any], Sequence[Array]], None]
"""Looks at the operands and the results of a first-order equation, which are concrete."""


class Observer(NamedTuple):
  """What happens at each first-order equation.

  Fields:
    compute: computes its results.
    see: looks at them.
    traced: whether JAX traces the equations: then only what is certain to run is entered.
  """

  compute: Compute = lambda key, eqn, operands: bind(eqn, operands)
  see: See = lambda key, eqn, operands, results: None
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
  unobserved, the latter as one equation. So do loops and branches that depend on numbers inside of
  a `shard_map`.

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
      observer.see(key, eqn, values, results)
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


def _call(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  return holder.run(0, values)


def _cond(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  return holder.run(min(max(int(values[0]), 0), len(holder.inner) - 1), values[1:])


def _scan(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  body = holder.inner[0]
  first, last = body.carry.start, body.carry.stop
  constants, carry, xs = values[:first], list(values[first:last]), values[last:]
  iterations = range(body.times or 0)
  if not iterations:
    return bind(holder.eqn, values)
  rows: list[list[Any]] = []
  for i in reversed(iterations) if holder.eqn.params["reverse"] else iterations:
    each = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in xs]
    outs = holder.run(0, [*constants, *carry, *each])
    carry = outs[: len(carry)]
    rows.append(outs[len(carry) :])
  if holder.eqn.params["reverse"]:
    rows.reverse()
  return [*carry, *map(_stacked, zip(*rows, strict=True))]


def _stacked(rows: Sequence[Any]) -> Array:
  if jnp.issubdtype(rows[0].dtype, jax.dtypes.extended) or isinstance(rows[0], Tracer):
    return jnp.stack(rows)
  return jnp.asarray(np.stack(rows))  # XLA would compile an operation of as many operands.


def _while(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  test, body = holder.inner[0], holder.inner[1]
  carry = [values[i] for i in body.carried]
  looped = [values[i] for i in (body.operands or ())[: body.carry.start]]
  tested = [values[i] for i in (test.operands or ())[: len(test.operands or ()) - len(carry)]]
  constants = test.program.consts if isinstance(test.program, ClosedJaxpr) else ()
  while bool(eval_jaxpr(test.jaxpr, constants, *tested, *carry)[0]):
    carry = holder.run(1, [*looped, *carry])
  return carry


def _shard_map(holder: _Holder, values: Sequence[Any]) -> list[Any]:
  arguments, inside = mapped_with(holder.eqn), list[tuple[Key, JaxprEqn]]()
  axes = tuple(name for name in arguments["mesh"].axis_names if name in arguments["axis_names"])

  def one_device(*operands: Array) -> tuple[list[Array], list[list[list[Array]]]]:
    numbers: list[list[list[Array]]] = []
    inside.clear()

    def see(key: Key, eqn: JaxprEqn, ins: Sequence[Any], outs: Sequence[Array]) -> None:
      inside.append((key, eqn))
      numbers.append([[_of_device(x, axes) for x in each] for each in (ins, outs)])

    return holder.run(0, operands, Observer(holder.observer.compute, see, traced=True)), numbers

  specs = (list(arguments["out_specs"]), jax.P(axes))
  mapped = jax.shard_map(one_device, **{**arguments, "out_specs": specs})
  results, numbers = jax.jit(mapped)(*values)
  for (key, eqn), (ins, outs) in zip(inside, numbers, strict=True):
    holder.observer.see(key, eqn, ins, outs)
  return results


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
