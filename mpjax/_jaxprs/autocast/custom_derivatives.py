"""Functions with rules of their own for derivatives or batches: the rule is called, and rewritten.

The rule of an equation is reached by transforming the equation itself, with `jax.jvp`, `jax.vjp` or
`jax.vmap`, inside of a function that has the rewritten program as its body. Nothing is traced
before JAX asks for the rule: only then the axes of a `shard_map` are bound.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.active import ACTIVE
from mpjax._jaxprs.autocast.closures import evaluated
from mpjax._jaxprs.autocast.eqn_params import traced
from mpjax._jaxprs.autocast.evaluate import typed
from mpjax._jaxprs.autocast.rewriter import Rewritten
from mpjax._jaxprs.autocast.values import FLOATS, Dtype, Kind
from mpjax._jaxprs.compat import context_of
from mpjax._jaxprs.inner_jaxprs import closed_over, inner_jaxprs, name_of, with_inner
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

Rewrite: TypeAlias = Callable[[Jaxpr, tuple[Kind | None, ...], Sequence[Dtype | None]], Rewritten]
"""Rewrites a program for kinds of arguments and dtypes of results, of which None is free."""


class Rule(NamedTuple):
  """What a rule needs to know of the equation that it belongs to.

  Fields:
    eqn: the equation as it was traced.
    ins: the kinds of its operands now.
    outs: the kinds of its results now.
    rewrite: rewrites a program.
    state: of policies, in which the equation was traced. The rule is called when that was left.
  """

  eqn: JaxprEqn
  ins: tuple[Kind | None, ...]
  outs: tuple[Kind | None, ...]
  rewrite: Rewrite
  state: Any = None


def with_rule(rule: Rule, operands: Sequence[Any], body: Jaxpr) -> JaxprEqn:
  """Returns the equation with a new body, and its own derivative rule rewritten too."""
  closed = ClosedJaxpr(body, _closed(rule).consts)

  def call(*operands: Any) -> list[Any]:
    return typed(closed, operands, rule.eqn.primitive.name)

  rule = rule._replace(state=ACTIVE.value)

  custom = _CUSTOM[facts_of(rule.eqn).holds](rule, call)
  with context_of(rule.eqn):
    made = jax.make_jaxpr(custom)(*(a.aval for a in operands)).jaxpr.eqns[-1]
  return rule.eqn.replace(invars=list(operands), params=with_inner(made, [closed]))


def _in_state(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Returns a decorator: the function is called in the state in which the equation was traced."""

  def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def call(*args: Any) -> Any:
      with ACTIVE(rule.state):
        return fun(*args)

    return call

  return decorate


def _closed(rule: Rule) -> Any:
  """The program of a function with a rule."""
  found = inner_jaxprs(rule.eqn)
  return found[0].program if found else None


def _as_traced(rule: Rule, operands: Sequence[Any]) -> list[Any]:
  """The equation itself, in the dtypes that it was traced with."""
  # New variables: an operand may be there twice, or be a literal.
  variables: list[Any] = [Var(a.aval) for a in rule.eqn.invars]
  alone = rule.eqn.replace(invars=variables)
  body = _closed(rule).jaxpr  # Of the same arguments and results, with names.
  one = body.replace(
    constvars=[], invars=variables, outvars=alone.outvars, eqns=[alone], effects=alone.effects
  )
  return eval_jaxpr(one, (), *operands)


def _evaluated(rule: Rule, new: Rewritten, program: ClosedJaxpr, *operands: Any) -> list[Any]:
  return evaluated(new.jaxpr, program.consts, operands, name_of(rule.eqn))


def _custom_jvp(rule: Rule, call: Callable[..., list[Any]]) -> Callable[..., Any]:
  custom = jax.custom_jvp(call)
  custom.defjvp(functools.partial(_jvp, rule))
  return custom


def _jvp(rule: Rule, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
  moving = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
  whole = [i for i, v in enumerate(rule.eqn.outvars) if not _is_inexact(v.aval)]

  @_in_state(rule)
  def of_rule(primals: Sequence[Any], some: Sequence[Any]) -> Any:
    given = dict(zip(moving, some, strict=True))
    all_tangents = [given.get(i, t) for i, t in enumerate(tangents)]
    outs, changes = jax.jvp(lambda *a: _as_traced(rule, a), list(primals), all_tangents)
    return outs, [c for i, c in enumerate(changes) if i not in whole]

  some = [tangents[i] for i in moving]
  avals = [_traced_aval(v, p) for v, p in zip(rule.eqn.invars, primals, strict=True)]
  changes = [_traced_aval(rule.eqn.invars[i], tangents[i]) for i in moving]
  program = traced(of_rule)(avals, changes)
  outs = [*rule.outs, *(k for i, k in enumerate(rule.outs) if i not in whole)]
  new = rule.rewrite(
    program.jaxpr,
    (*rule.ins, *(rule.ins[i] for i in moving)),
    [None if k is None else k.dtype for k in outs],
  )
  found = _evaluated(rule, new, program, *primals, *some)
  values, rest = found[: len(rule.outs)], iter(found[len(rule.outs) :])
  return values, [
    np.zeros(np.shape(v), jax.dtypes.float0) if i in whole else next(rest)
    for i, v in enumerate(values)
  ]


def _traced_aval(var: Any, now: Any) -> Any:
  """The type of what is there now, in the dtype that it was traced with."""
  aval: Any = jax.typeof(now)
  return aval.update(dtype=var.aval.dtype, weak_type=False)


def _is_inexact(aval: Any) -> bool:
  return jnp.issubdtype(aval.dtype, jnp.inexact)


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dtype", "neutral"]
)
@dataclasses.dataclass(frozen=True)
class _Kept:
  """Something that the forward rule leaves for the backward rule.

  Fields:
    array: what is left, in half if it was half.
    dtype: the dtype that the user's rule expects.
    neutral: see `Kind`.
  """

  array: Any
  dtype: Any
  neutral: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """Something that is no array, for the backward rule."""

  value: Any


def _custom_vjp(rule: Rule, call: Callable[..., list[Any]]) -> Callable[..., Any]:
  custom = jax.custom_vjp(call)
  forward, backward = functools.partial(_forward, rule), functools.partial(_backward, rule)
  custom.defvjp(forward, backward, symbolic_zeros=closed_over(rule.eqn) > 0)
  return custom


def _forward(rule: Rule, *operands: Any) -> Any:
  if closed_over(rule.eqn):
    # No gradient may flow to them. If one does, JAX's own error comes from the user's rule.
    moving = tuple(i for i, p in enumerate(operands) if p.perturbed)
    primals = [p.value for p in operands]
  else:
    moving = tuple(i for i, v in enumerate(rule.eqn.invars) if _is_inexact(v.aval))
    primals = list(operands)
  trees = []

  @_in_state(rule)
  def of_rule(*primals: Any) -> Any:
    def of_moving(*some: Any) -> list[Any]:
      given = dict(zip(moving, some, strict=True))
      return _as_traced(rule, [given.get(i, p) for i, p in enumerate(primals)])

    outs, pullback = jax.vjp(of_moving, *(primals[i] for i in moving))
    leaves, tree = jax.tree.flatten(pullback)
    trees.append(tree)
    return outs, leaves

  avals = [_traced_aval(v, p) for v, p in zip(rule.eqn.invars, primals, strict=True)]
  program = traced(of_rule)(*avals)
  fixed = [None if k is None else k.dtype for k in rule.outs]
  free = [None] * (len(program.jaxpr.outvars) - len(fixed))
  new = rule.rewrite(program.jaxpr, rule.ins, [*fixed, *free])
  found = _evaluated(rule, new, program, *primals)
  count = len(fixed)
  kept = [
    _Kept(array, var.aval.dtype, kind is not None and kind.neutral)
    for array, var, kind in zip(
      found[count:], program.jaxpr.outvars[count:], new.outs[count:], strict=True
    )
  ]
  return found[:count], (kept, _Static((trees[-1], moving)))


def _backward(rule: Rule, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
  kept, static = residuals
  tree, moving = static.value
  changes = [_instantiated(c) for c in cotangents]
  whole = [i for i, c in enumerate(changes) if c.dtype == jax.dtypes.float0]
  some = [c for i, c in enumerate(changes) if i not in whole]

  @_in_state(rule)
  def of_rule(leaves: Sequence[Any], some: Sequence[Any]) -> Any:
    rest = iter(some)
    all_changes = [c if i in whole else next(rest) for i, c in enumerate(changes)]
    return jax.tree.unflatten(tree, leaves)(all_changes)

  outs = [v for i, v in enumerate(rule.eqn.outvars) if i not in whole]
  program = traced(of_rule)(
    [jax.typeof(k.array).update(dtype=k.dtype, weak_type=False) for k in kept],
    [_traced_aval(v, c) for v, c in zip(outs, some, strict=True)],
  )
  ins = [Kind(k.array.dtype, k.neutral) if k.dtype in FLOATS else None for k in kept] + [
    k for i, k in enumerate(rule.outs) if i not in whole
  ]
  fixed = [rule.ins[i] for i in moving]
  new = rule.rewrite(program.jaxpr, tuple(ins), [None if k is None else k.dtype for k in fixed])
  found = _evaluated(rule, new, program, *(k.array for k in kept), *some)
  given = dict(zip(moving, found, strict=True))
  return tuple(given.get(i) for i in range(len(rule.ins)))


def _instantiated(cotangent: Any) -> Any:
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)
  return cotangent


def _custom_vmap(rule: Rule, call: Callable[..., list[Any]]) -> Callable[..., Any]:
  custom = jax.custom_batching.custom_vmap(call)
  custom.def_vmap(functools.partial(_batch, rule))
  return custom


def _batch(rule: Rule, size: int, batched: Sequence[bool], *operands: Any) -> Any:
  axes = [0 if each else None for each in batched]

  @_in_state(rule)
  def of_rule(*operands: Any) -> Any:
    return jax.vmap(lambda *a: _as_traced(rule, a), in_axes=axes, axis_size=size)(*operands)

  avals = [_traced_aval(v, x) for v, x in zip(rule.eqn.invars, operands, strict=True)]
  program = traced(of_rule)(*avals)
  fixed = [None if k is None else k.dtype for k in rule.outs]
  new = rule.rewrite(program.jaxpr, rule.ins, fixed)
  found = _evaluated(rule, new, program, *operands)
  return found, [True] * len(found)


_CUSTOM: Mapping[Holds | None, Callable[[Rule, Callable[..., list[Any]]], Callable[..., Any]]] = {
  Holds.CUSTOM_JVP: _custom_jvp,
  Holds.CUSTOM_VJP: _custom_vjp,
  Holds.CUSTOM_VMAP: _custom_vmap,
}
