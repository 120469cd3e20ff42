"""Write an activation function with powers, such as GELU, as one equation that saves its slope.

Without this, the backward pass of `x + 0.04 * x ** 3` keeps several float32 arrays of the size of
`x`. The equation holds all powers of a value and all functions of these powers. It saves only the
slope, in the compute dtype. A GPT needs 4 % fewer bytes and 18 % fewer temporaries.

The rules write the operations inside, so results are the same bit for bit.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from mpjax._autocast.consumers import Flag, Flags
from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.operations import operation
from mpjax._autocast.rewriter import Rewriter
from mpjax._autocast.run import variables, with_key
from mpjax._core.types import FLOAT32, Array, DType
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.calls import equation_with_rule, jaxpr_for, jaxpr_of
from mpjax._jaxpr.compat import context_of
from mpjax._jaxpr.op_lists import OpLists
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of, is_number, shape_of

# Finding activation functions.


class Activation(NamedTuple):
  """The powers of one value, and the operations on these."""

  root: Var  # the value
  eqns: tuple[JaxprEqn, ...]  # the operations, with all operations between the root and them
  positions: frozenset[int]  # of equations whose results only this function uses
  outs: tuple[Var, ...]  # the results that other equations use


class _Chains(NamedTuple):
  """The equations that compute a function of one value alone, elementwise."""

  positions: list[int]  # of these equations
  roots: dict[Var, Var]  # the value that each result is a function of
  grown: set[Var]  # the results that grow faster than the value, and results computed from these


@cached_per_jaxpr
def activations_of(jaxpr: Jaxpr, ops: OpLists) -> Mapping[int, Activation]:
  """Returns the activation functions with powers, by the position at which each begins."""
  chains, consumers = _chains(jaxpr, ops), _consumers(jaxpr)
  members, own = _members(jaxpr, chains, consumers)
  functions: dict[int, Activation] = {}
  for root, positions in members.items():
    grown = {i: v for i in positions if (v := jaxpr.eqns[i].outvars[0]) in chains.grown}
    if len(grown) > 1:  # One power alone is computed as any other operation is.
      # A power that only other powers of this function read stays inside the equation. Any other
      # consumer makes it a result.
      results = tuple(v for v in grown.values() if not consumers[v] <= grown.keys())
      # The equation computes all that the powers need. Operations that others read too are also
      # written alone.
      eqns = tuple(jaxpr.eqns[i] for i in positions)
      functions[min(own[root])] = Activation(root, eqns, frozenset(own[root]), results)
  return functions


def _consumers(jaxpr: Jaxpr) -> dict[Var, set[int]]:
  """Returns the positions of each variable's consumers; a result of the jaxpr has the last one."""
  consumers: dict[Var, set[int]] = {}
  for position, eqn in enumerate(jaxpr.eqns):
    for v in variables(eqn.invars):
      consumers.setdefault(v, set()).add(position)
    for v in eqn.outvars:
      consumers.setdefault(v, set())
  for v in variables(jaxpr.outvars):
    # Returning counts as a consumer behind all equations, so a returned power becomes a result.
    consumers.setdefault(v, set()).add(len(jaxpr.eqns))
  return consumers


def _chains(jaxpr: Jaxpr, ops: OpLists) -> _Chains:
  chains, degrees = _Chains([], {}, set()), dict[Var, float]()
  for position, eqn in enumerate(jaxpr.eqns):
    root, degree = _root(eqn, chains.roots, ops), facts_of(eqn).degree
    if root is None or degree is None:
      continue
    (out,) = eqn.outvars
    # A literal does not grow. The root grows as itself, with degree 1.
    grows = [degrees.get(v, 1) if isinstance(v, Var) else 0 for v in eqn.invars]
    degrees[out] = degree(grows, eqn.params)
    chains.positions.append(position)
    chains.roots[out] = root
    # By the chain rule, the slope of `tanh(x + x ** 3)` needs the slope of the power.
    if degrees[out] > 1 or not chains.grown.isdisjoint(variables(eqn.invars)):
      chains.grown.add(out)
  return chains


def _root(eqn: JaxprEqn, roots: Mapping[Var, Var], ops: OpLists) -> Var | None:
  """Returns the value that an elementwise operation is a function of; None for other operations."""
  # Operands in the chain count as their root: `x * x ** 2` is a function of `x` alone.
  values = {roots.get(v, v) for v in variables(eqn.invars)}
  is_function_of_one = len(values) == 1 and all(
    is_number(v) for v in eqn.invars if isinstance(v, Literal)
  )
  if facts_of(eqn).degree is None or not is_function_of_one:
    return None
  # The equation computes in float32. If the user's lists put an operation into `half` or `opaque`,
  # it stays outside.
  if ops.part_of(eqn.primitive.name, eqn.params) not in ("promote", "keep", "float32"):
    return None
  (root,), (out,) = values, eqn.outvars
  # The saved slope is multiplied by the tangent of the root, so a broadcast or a cast ends the
  # chain.
  same = shape_of(root) == shape_of(out)
  return root if same and dtype_of(root) == dtype_of(out) == FLOAT32 else None


def _members(
  jaxpr: Jaxpr, chains: _Chains, consumers: Mapping[Var, set[int]]
) -> tuple[dict[Var, list[int]], dict[Var, set[int]]]:
  """Returns the positions that the powers of each root need, and the ones that only they need."""
  needed: set[Var] = set()
  members: dict[Var, list[int]] = {}
  own: dict[Var, set[int]] = {}
  # Backwards: a member has met all of its consumers in the chain before.
  for position in reversed(chains.positions):
    (out,) = jaxpr.eqns[position].outvars
    root = chains.roots[out]
    if out in chains.grown or out in needed:
      members.setdefault(root, []).insert(0, position)
      needed |= variables(jaxpr.eqns[position].invars)
      # A power is always part of the function. Any other operation is only part of it if no
      # equation outside reads its result. Otherwise it must also be written alone.
      mine = own.setdefault(root, set())
      if out in chains.grown or consumers[out] <= mine:
        mine.add(position)
  return members, own


# Writing activation functions.


@dataclasses.dataclass(frozen=True)
class _Computed:
  """A jaxpr that equals other jaxprs by a key of their operations."""

  jaxpr: Jaxpr = dataclasses.field(compare=False)
  key: Hashable


def write_activation(rewriter: Rewriter, function: Activation) -> bool:
  """Writes an activation function as one equation, if its root is an activation.

  Returns:
    Whether it was written. If not, its operations are written one by one.
  """
  last, value = function.eqns[-1], rewriter.value(function.root)
  scope_policy = rewriter.scope_policy(last)
  # One equation has one scope. Operations in several scopes may have several policies.
  apart = any(rewriter.scope_policy(eqn).scope != scope_policy.scope for eqn in function.eqns)
  if (
    apart or scope_policy.compute_dtype is None or value is None or value.kind.role < Role.UNROUNDED
  ):
    return False
  flags = tuple(map(rewriter.flags_at, function.outs))
  computed, kinds = _by_the_rules(rewriter, function, value.kind)
  # A float32 operand has float32 gradients, which are summed in float32.
  dtype = FLOAT32 if any(kind.dtype == FLOAT32 for kind in kinds) else value.kind.dtype
  operand = rewriter.cast(value, dtype, function.eqns[0])
  # Before a sum or a float32 result of the function, a slope may leave the range of float16.
  slopes = tuple(FLOAT32 if each & ~Flag.PRODUCT else value.kind.dtype for each in flags)
  with context_of(last):
    call = _equation(computed, slopes, aval_of(operand))
  eqn = last.replace(primitive=call.primitive, outvars=list(function.outs), params=call.params)
  rewriter.write(eqn, [operand], kinds)
  return True


def _by_the_rules(
  rewriter: Rewriter, function: Activation, kind: Kind
) -> tuple[_Computed, list[Kind]]:
  """Returns the operations, rewritten for a float32 operand, and the kinds of the results."""
  jaxpr = jaxpr_of(function.eqns, [function.root], function.outs)
  no_flags = (0,) * len(function.outs)
  inner = Rewriter(
    jaxpr, rewriter.settings, rewriter.scope_policy.scope, no_flags, (), rewriter.rewrite
  )
  # Consumers outside the function count too.
  results = [v for eqn in function.eqns for v in eqn.outvars]
  inner.flags = Flags({v: rewriter.flags_at(v) for v in results}, {})
  # A low-precision root keeps its kind, so that the rules decide as without this equation. Its
  # variable is float32, since the equation casts the operand.
  root = inner.define(function.root, kind._replace(variable=FLOAT32))
  for eqn in function.eqns:
    operation(inner, eqn)
  values = [inner.values[v] for v in function.outs]
  outs = [inner.cast(v, v.kind.dtype, None) for v in values]
  computed = _Computed(*with_key(inner.shown(), root, outs))
  return computed, [v.kind for v in values]


@functools.lru_cache(maxsize=256)  # Equal layers share one, and so do calls outside `jit`.
def _equation(computed: _Computed, dtypes: Sequence[DType], aval: ShapedArray) -> JaxprEqn:
  """Returns an equation that computes a jaxpr and saves the slope of each result in a dtype."""

  def activation(x: Array) -> list[Array]:
    return eval_jaxpr(computed.jaxpr, (), jax.lax.convert_element_type(x, FLOAT32))

  def tangent(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], Any]:
    (x,), (step,) = primals, tangents
    wide = jax.lax.convert_element_type(x, FLOAT32)
    # The function is elementwise, so its derivative along ones is the slope at each position.
    values, slopes = jax.jvp(activation, (wide,), (jax.lax.full_like(wide, 1),))
    pairs = zip(slopes, dtypes, strict=True)
    slopes = [jax.lax.convert_element_type(each, dtype) for each, dtype in pairs]
    # Otherwise XLA saves a float32 tanh and computes the slope in the backward pass.
    slopes = jax.lax.optimization_barrier(slopes)
    return values, [_product(s, step, v.dtype) for s, v in zip(slopes, values, strict=True)]

  return equation_with_rule(jaxpr_for(activation, aval), tangent, [aval], "activation")


def _product(slope: Array, step: Array, dtype: DType) -> Array:
  return jax.lax.mul(*(jax.lax.convert_element_type(x, dtype) for x in (slope, step)))
