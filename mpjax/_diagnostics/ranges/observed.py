"""Running a jaxpr one equation after the other, with a look at each, inside of loops too."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from mpjax._core.types import Array, Leaf
from mpjax._jaxprs.compat import context_of
from mpjax._jaxprs.inner_jaxprs import Inner, inner_jaxprs, manual_axes
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

Key: TypeAlias = tuple[int, ...]
"""Where an equation is: its number, or that of the one it is in, the inner jaxpr, its number."""

S = TypeVar("S")


class Observer(Protocol[S]):
  """What looks at the equations."""

  def visit(
    self, key: Key, eqn: JaxprEqn, operands: Sequence[Array], state: S
  ) -> tuple[Sequence[Array], S]:
    """Runs a first-order equation, by `bind`, and returns its results and the new state."""
    ...

  def settled(self, state: S) -> S:
    """Returns the state as a tree of arrays, which a loop can carry."""
    ...

  def empty(self) -> S:
    """Returns the state of one device, at the start."""
    ...

  def over_devices(self, state: S, axes: frozenset[Hashable]) -> S:
    """Returns the sum of the states of all devices."""
    ...

  def added(self, state: S, more: S) -> S:
    """Returns the sum of two states."""
    ...


def run_observed(
  program: Jaxpr | ClosedJaxpr,
  operands: Sequence[Array],
  observer: Observer[S],
  state: S,
  consts: Sequence[Array] = (),
  at: Key = (),
) -> tuple[list[Array], S]:
  """Returns the results of a jaxpr, and the state after it.

  The jaxprs inside of `jit`, `remat`, functions with derivatives of their own, `scan`, `while`,
  `cond` and `shard_map` are entered. The condition of a `while`, and what cannot be entered, run
  unobserved, the latter as one equation.

  Args:
    program: the jaxpr.
    operands: its arguments.
    observer: looks at each first-order equation.
    state: that of the observer.
    consts: the constants of a jaxpr that is not closed.
    at: the key of what holds the jaxpr.
  """
  jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
  consts = program.consts if isinstance(program, ClosedJaxpr) else consts
  env: dict[Var, Array] = dict(zip(jaxpr.constvars, consts, strict=True))
  env |= dict(zip(jaxpr.invars, operands, strict=True))

  def read(atom: Var | Literal) -> Leaf:
    return atom.val if isinstance(atom, Literal) else env[atom]

  for number, eqn in enumerate(jaxpr.eqns):
    key, values = (*at, number), [read(v) for v in eqn.invars]
    enter = entered(eqn)
    if enter is None:
      results, state = observer.visit(key, eqn, values, state)
    else:
      with context_of(eqn):
        results, state = enter(_Call(eqn, inner_jaxprs(eqn) or (), key, observer), values, state)
    env |= dict(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars], state


class _Call:
  """An equation that holds jaxprs, while it runs."""

  def __init__(
    self, eqn: JaxprEqn, inner: tuple[Inner, ...], key: Key, observer: Observer[Any]
  ) -> None:
    self.eqn, self.inner, self.key, self.observer = eqn, inner, key, observer

  def inline(self, number: int, values: Sequence[Array], state: S) -> tuple[list[Array], S]:
    """Runs one of the inner jaxprs as a part of the one around it."""
    program = self.inner[number].program
    return run_observed(program, values, self.observer, state, at=(*self.key, number))

  def run(self, number: int, values: Sequence[Array], state: S) -> tuple[list[Array], S]:
    """Runs one of the inner jaxprs, which JAX traces as a jaxpr of its own."""
    results, state = self.inline(number, values, state)
    return results, self.observer.settled(state)


_Entered: TypeAlias = tuple[Sequence[Array], Any]


def _call(call: _Call, values: Sequence[Array], state: Any) -> _Entered:
  return call.inline(0, values, state)


def _cond(call: _Call, values: Sequence[Array], state: Any) -> _Entered:
  index, *rest = values

  def branch(number: int) -> Callable[..., _Entered]:
    return lambda state, *operands: call.run(number, operands, state)

  branches = [branch(number) for number in range(len(call.inner))]
  # A boolean predicate was made an integer when the `cond` was traced.
  which = index.astype(jnp.int32) if index.dtype == jnp.bool_ else index
  return jax.lax.switch(which, branches, call.observer.settled(state), *rest)


def _scan(call: _Call, values: Sequence[Array], state: Any) -> _Entered:
  (body,) = call.inner
  first, last = body.carry.start, body.carry.stop
  consts, carry, xs = values[:first], values[first:last], values[last:]

  def step(carried: Any, x: Sequence[Array]) -> tuple[Any, Sequence[Array]]:
    state, old = carried
    outs, state = call.run(0, [*consts, *old, *x], state)
    return (state, outs[: len(old)]), outs[len(old) :]

  params = call.eqn.params
  start = (call.observer.settled(state), list(carry))
  (state, carry), ys = jax.lax.scan(
    step, start, list(xs), length=body.times, reverse=params["reverse"]
  )
  return [*carry, *ys], state


def _while(call: _Call, values: Sequence[Array], state: Any) -> _Entered:
  test, body = call.inner
  start = [values[i] for i in body.carried]
  looped = [values[i] for i in (body.operands or ())[: body.carry.start]]
  tested = [values[i] for i in (test.operands or ())[: len(test.operands or ()) - len(start)]]

  def again(carried: Any) -> Array:
    # What a condition computes is not observed: its state would have nowhere to go.
    return bind_all(test.program, [*tested, *carried[1]])[0]

  def step(carried: Any) -> Any:
    outs, state = call.run(1, [*looped, *carried[1]], carried[0])
    return state, outs

  state, outs = jax.lax.while_loop(again, step, (call.observer.settled(state), start))
  return outs, state


def bind_all(program: Jaxpr | ClosedJaxpr, operands: Sequence[Array]) -> list[Array]:
  """Returns the results of a jaxpr, of which nothing is observed."""
  jaxpr, consts = (
    (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
  )
  return eval_jaxpr(jaxpr, consts, *operands)


def _shard_map(call: _Call, values: Sequence[Array], state: Any) -> _Entered:
  params, axes, observer = call.eqn.params, manual_axes(call.eqn), call.observer
  count = len(call.eqn.outvars)
  state = observer.settled(state)
  tree = jax.tree.structure(state)

  def one(*operands: Array) -> list[Array]:
    own = observer.empty()
    if params["check_vma"]:
      own = jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes), to="varying"), own)
    outs, own = call.run(0, operands, own)
    return [*outs, *jax.tree.leaves(observer.over_devices(own, axes))]

  replicated = [PartitionSpec()] * tree.num_leaves
  mapped = jax.shard_map(
    one,
    mesh=params["mesh"],
    in_specs=tuple(params["in_specs"]),
    out_specs=[*params["out_specs"], *replicated],
    axis_names=set(axes),
    check_vma=params["check_vma"],
  )
  outs = mapped(*values)
  return outs[:count], observer.added(state, jax.tree.unflatten(tree, outs[count:]))


_ENTER: Mapping[Holds | None, Callable[[_Call, Sequence[Array], Any], _Entered]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE, Holds.LINEAR_CALL), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _call),
  Holds.COND: _cond,
  Holds.SCAN: _scan,
  Holds.SHARD_MAP: _shard_map,
  Holds.WHILE: _while,
}


def entered(eqn: JaxprEqn) -> Callable[[_Call, Sequence[Array], Any], _Entered] | None:
  """Returns how `run_observed` enters an equation; None where it runs it as it is."""
  rule = _ENTER.get(facts_of(eqn).holds)
  return rule if rule is not None and inner_jaxprs(eqn) else None
