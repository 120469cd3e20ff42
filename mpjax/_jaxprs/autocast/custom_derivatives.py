"""Functions with rules of their own for derivatives or batches: the rule is called, and rewritten.

The rule of an equation is reached by transforming the equation itself, with `jax.jvp`, `jax.vjp` or
`jax.vmap`, inside of a function that has the rewritten jaxpr as its body. Nothing is traced
before JAX asks for the rule: only then the axes of a `shard_map` are bound.

Without this, differentiating the rewritten body would drop what the user wrote: the gradient of
`jax.nn.relu` at 0 would be 0.5, that of a maximum, and a `custom_vjp` for attention would save the
matrix that it was written to avoid. And with the rule unchanged, all that it saves is float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.active import ACTIVE, Active
from mpjax._core.types import Array, DType, Function, PyTree
from mpjax._jaxprs.atoms import Atom, aval_of
from mpjax._jaxprs.autocast.closures import evaluated, instantiated
from mpjax._jaxprs.autocast.eqn_params import traced
from mpjax._jaxprs.autocast.rewriter import Rewritten
from mpjax._jaxprs.autocast.run import typed
from mpjax._jaxprs.autocast.scopes import PREFIX
from mpjax._jaxprs.autocast.values import Kind, Kinds
from mpjax._jaxprs.compat import context_of, without_scopes
from mpjax._jaxprs.inner_jaxprs import (
  Inner,
  Program,
  closed_over,
  inner_jaxprs,
  name_of,
  with_inner,
)
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

Rewrite: TypeAlias = Callable[[Jaxpr, Kinds, Sequence[DType | None], bool], Rewritten]
"""Rewrites a jaxpr for kinds of arguments and dtypes of results, of which None is free. The last
argument says whether the jaxpr is that of a derivative."""

Call: TypeAlias = Callable[..., list[Array]]
"""The function that JAX sees instead of the rewritten equation."""


class CustomCall(NamedTuple):
  """What a rule needs to know of the equation that it belongs to.

  Fields:
    eqn: the equation as it was traced.
    ins: the kinds of its operands now.
    outs: the kinds of its results now.
    rewrite: rewrites a jaxpr.
    state: of policies, in which the equation was traced. The rule is called when that was left: a
      Flax module in the rule would run under no policy, or under that of another module.
  """

  eqn: JaxprEqn
  ins: Kinds
  outs: Kinds
  rewrite: Rewrite
  state: Active | None = None

  @property
  def program(self) -> Program:
    """The jaxpr of the function itself, without its rule."""
    found = cast(tuple[Inner, ...], inner_jaxprs(self.eqn))
    return found[0].program


def with_rule(custom: CustomCall, operands: Sequence[Atom], body: Jaxpr) -> JaxprEqn:
  """Returns the equation with a new body, and its own derivative rule rewritten too."""
  closed = ClosedJaxpr(body, ())  # JAX passes what the body closes over as operands.

  def call(*operands: Array) -> list[Array]:
    return typed(closed, operands, custom.eqn.primitive.name)

  # Of what an audit reads, nothing is an instruction: the rule is traced as it is without one.
  here = custom._replace(state=ACTIVE.value, eqn=_unmarked(custom.eqn))
  fun = _WITH_RULE[facts_of(custom.eqn).holds](here, call)
  with context_of(custom.eqn):
    made = jax.make_jaxpr(fun)(*map(aval_of, operands)).jaxpr.eqns[-1]
  # `make_jaxpr` has traced only a stand-in for the body; what is kept of it are the rules.
  return custom.eqn.replace(invars=list(operands), params=with_inner(made, [closed]))


def _unmarked(eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation without our marks, of which those for the rule are in its scope."""
  names = without_scopes(eqn.source_info.name_stack, PREFIX)
  return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


class _Ran(NamedTuple):
  """What came of a rule that was rewritten and run.

  Fields:
    values: its results.
    kinds: those of the results.
    traced: the dtypes that the results have without autocast.
  """

  values: list[Array]
  kinds: Kinds
  traced: list[DType]


def _run(
  custom: CustomCall,
  rule: Function,
  avals: Sequence[PyTree],
  ins: Kinds,
  outs: Kinds,
  operands: Sequence[Array],
  *,
  derivative: bool = False,
) -> _Ran:
  """Traces a rule, rewrites its jaxpr and runs that.

  `avals` are the types of the rule's arguments as they were traced, which the user's rule may
  check, and `operands` the leaves of the arguments now. Kinds of results that are missing at the
  end are free. A rule that is a `derivative` is linear in some of its arguments.
  """

  @functools.wraps(rule)
  def in_state(*args: PyTree) -> PyTree:
    with ACTIVE(custom.state):
      return rule(*args)

  program = traced(in_state)(*avals)
  count = len(program.jaxpr.outvars)
  fixed = [None if kind is None else kind.variable for kind in outs]
  free = [None] * (count - len(fixed))
  new = custom.rewrite(program.jaxpr, ins, [*fixed, *free], derivative)
  values = evaluated(new.jaxpr, program.consts, operands, name_of(custom.eqn))
  return _Ran(values, new.outs, [aval_of(v).dtype for v in program.jaxpr.outvars])


def _as_traced(custom: CustomCall, operands: Sequence[Array]) -> list[Array]:
  """The equation itself, in the dtypes that it was traced with."""
  # New variables: an operand may be there twice, or be a literal.
  variables = [Var(atom.aval) for atom in custom.eqn.invars]
  alone = custom.eqn.replace(invars=[*variables])
  body = custom.program  # Of the same arguments and results, with names.
  jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
  one = jaxpr.replace(
    constvars=[], invars=variables, outvars=alone.outvars, eqns=[alone], effects=alone.effects
  )
  return eval_jaxpr(one, (), *operands)


def _traced_aval(atom: Atom, now: Array | SymbolicZero) -> ShapedArray:
  """The type of what is there now, in the dtype that it was traced with."""
  # The shape is that of now: under `vmap`, an operand of a batch rule has an axis more.
  aval = cast(ShapedArray, jax.typeof(now))
  return aval.update(dtype=aval_of(atom).dtype, weak_type=False)


def _is_inexact(atom: Atom) -> bool:
  return jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def _custom_jvp(custom: CustomCall, call: Call) -> Call:
  fun = jax.custom_jvp(call)
  fun.defjvp(functools.partial(_jvp, custom))
  return fun


def _jvp(
  custom: CustomCall, primals: Sequence[Array], tangents: Sequence[Array]
) -> tuple[list[Array], list[PyTree]]:
  # Tangents of integers are of `float0`, which no jaxpr computes with: they are left out of it.
  moving = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
  whole = [i for i, v in enumerate(custom.eqn.outvars) if not _is_inexact(v)]

  def rule(primals: Sequence[Array], some: Sequence[Array]) -> PyTree:
    given = dict(zip(moving, some, strict=True))
    all_tangents = [given.get(i, t) for i, t in enumerate(tangents)]
    outs, changes = jax.jvp(lambda *a: _as_traced(custom, a), list(primals), all_tangents)
    return outs, [c for i, c in enumerate(changes) if i not in whole]

  some, invars = [tangents[i] for i in moving], custom.eqn.invars
  avals = [_traced_aval(v, p) for v, p in zip(invars, primals, strict=True)]
  changes = [_traced_aval(invars[i], tangents[i]) for i in moving]
  ins = (*custom.ins, *(custom.ins[i] for i in moving))
  outs = (*custom.outs, *(k for i, k in enumerate(custom.outs) if i not in whole))
  operands = [*primals, *some]
  found = _run(custom, rule, (avals, changes), ins, outs, operands, derivative=True).values
  values, rest = found[: len(custom.outs)], iter(found[len(custom.outs) :])
  return values, [
    np.zeros(np.shape(v), jax.dtypes.float0) if i in whole else next(rest)
    for i, v in enumerate(values)
  ]


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dtype", "kind"]
)
@dataclasses.dataclass(frozen=True)
class _Residual:
  """What the forward rule leaves for the backward rule.

  Fields:
    array: what is left, in the dtype that it had.
    dtype: the dtype that the user's rule expects.
    kind: how it leaves the one and comes into the other; None for what is no floating value.
  """

  array: Array
  dtype: DType
  kind: Kind | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """What is no array, for the backward rule.

  Fields:
    pullback: the structure of what `jax.vjp` returned, whose leaves are the residuals.
    moving: the positions of the operands that are differentiated.
  """

  pullback: PyTree
  moving: tuple[int, ...]


_Residuals: TypeAlias = tuple[list[_Residual], _Static]


def _custom_vjp(custom: CustomCall, call: Call) -> Call:
  fun = jax.custom_vjp(call)
  forward, backward = functools.partial(_forward, custom), functools.partial(_backward, custom)
  fun.defvjp(forward, backward, symbolic_zeros=closed_over(custom.eqn) > 0)
  return fun


def _forward(custom: CustomCall, *operands: PyTree) -> tuple[list[Array], _Residuals]:
  """The operands are arrays, or with symbolic zeros objects with a `value` each."""
  if closed_over(custom.eqn):
    # No gradient may flow to them. If one does, JAX's own error comes from the user's rule.
    moving = tuple(i for i, p in enumerate(operands) if p.perturbed)
    primals: list[Array] = [p.value for p in operands]
  else:
    moving = tuple(i for i, v in enumerate(custom.eqn.invars) if _is_inexact(v))
    primals = list(operands)
  trees: list[PyTree] = []

  def rule(*primals: Array) -> PyTree:
    def of_moving(*some: Array) -> list[Array]:
      given = dict(zip(moving, some, strict=True))
      return _as_traced(custom, [given.get(i, p) for i, p in enumerate(primals)])

    outs, pullback = jax.vjp(of_moving, *(primals[i] for i in moving))
    leaves, tree = jax.tree.flatten(pullback)
    trees.append(tree)
    return outs, leaves

  avals = [_traced_aval(v, p) for v, p in zip(custom.eqn.invars, primals, strict=True)]
  ran = _run(custom, rule, avals, custom.ins, custom.outs, primals)
  count = len(custom.outs)
  # What is saved may have any dtype: low precision, where it is the result of a matmul.
  kept = [
    _Residual(array, dtype, kind)
    for array, dtype, kind in zip(
      ran.values[count:], ran.traced[count:], ran.kinds[count:], strict=True
    )
  ]
  return ran.values[:count], (kept, _Static(trees[-1], moving))


def _backward(
  custom: CustomCall, residuals: _Residuals, cotangents: Sequence[Array | SymbolicZero]
) -> tuple[Array | None, ...]:
  kept, static = residuals
  changes = [instantiated(c) for c in cotangents]
  whole = [i for i, c in enumerate(changes) if c.dtype == jax.dtypes.float0]
  some = [c for i, c in enumerate(changes) if i not in whole]

  def rule(leaves: Sequence[Array], some: Sequence[Array]) -> PyTree:
    rest = iter(some)
    all_changes = [c if i in whole else next(rest) for i, c in enumerate(changes)]
    return jax.tree.unflatten(static.pullback, leaves)(all_changes)

  outvars = [v for i, v in enumerate(custom.eqn.outvars) if i not in whole]
  avals = (
    # The user's backward rule is shown the dtypes that its forward rule left.
    [cast(ShapedArray, jax.typeof(k.array)).update(dtype=k.dtype, weak_type=False) for k in kept],
    [_traced_aval(v, c) for v, c in zip(outvars, some, strict=True)],
  )
  ins = [k.kind for k in kept]
  ins += [k for i, k in enumerate(custom.outs) if i not in whole]
  outs = tuple(custom.ins[i] for i in static.moving)
  operands = [*(k.array for k in kept), *some]
  found = _run(custom, rule, avals, tuple(ins), outs, operands, derivative=True).values
  given = dict(zip(static.moving, found, strict=True))
  return tuple(given.get(i) for i in range(len(custom.ins)))


def _custom_vmap(custom: CustomCall, call: Call) -> Call:
  fun = jax.custom_batching.custom_vmap(call)
  fun.def_vmap(functools.partial(_batch, custom))
  return fun


def _batch(
  custom: CustomCall, size: int, batched: Sequence[bool], *operands: Array
) -> tuple[list[Array], list[bool]]:
  axes = [0 if each else None for each in batched]

  def rule(*operands: Array) -> PyTree:
    return jax.vmap(lambda *a: _as_traced(custom, a), in_axes=axes, axis_size=size)(*operands)

  avals = [_traced_aval(v, x) for v, x in zip(custom.eqn.invars, operands, strict=True)]
  found = _run(custom, rule, avals, custom.ins, custom.outs, operands).values
  return found, [True] * len(found)


_WITH_RULE: Mapping[Holds | None, Callable[[CustomCall, Call], Call]] = {
  Holds.CUSTOM_JVP: _custom_jvp,
  Holds.CUSTOM_VJP: _custom_vjp,
  Holds.CUSTOM_VMAP: _custom_vmap,
}
