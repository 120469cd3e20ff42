"""Write an activation function with powers, such as GELU, as one equation that saves its operands.

Without this, the backward pass of `x + 0.04 * x ** 3` keeps several float32 arrays of the size of
`x`. The equation holds all powers of a value, all functions of these powers, and a product with
another value, as in GeGLU. It saves only these two values, in low precision if they are the results
of matmuls, and the backward pass computes the slopes from them.

The rules write the operations inside, so results are the same bit for bit.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.consumers import Flags
from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.operations import operation
from mpjax._autocast.rewriter import Rewriter
from mpjax._autocast.run import variables, with_key
from mpjax._core.types import FLOAT32, Array, DType
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.calls import equation_with_rule, jaxpr_for, placed_like
from mpjax._jaxpr.compat import context_of
from mpjax._jaxpr.op_lists import OpLists, part_of
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of, is_number, shape_of
from mpjax._matmul.block_dot import placed, spec_of

# Finding activation functions.


class Activation(NamedTuple):
  """A result that is computed from powers of a value, perhaps with other values as factors."""

  roots: tuple[Var, ...]  # the values
  eqns: tuple[JaxprEqn, ...]  # the operations between the roots and the result
  positions: frozenset[int]  # of equations whose results only this function uses


@cached_per_jaxpr
def activations_of(jaxpr: Jaxpr, ops: OpLists) -> Mapping[int, Activation]:
  """Returns the activation functions with powers, by the position at which each ends."""
  # Without products and quotients no value grows faster than another one.
  if not any(facts_of(eqn).acts_as == "product" for eqn in jaxpr.eqns):
    return {}
  # The positions of each variable's consumers.
  consumers: dict[Var, set[int]] = {v: set() for eqn in jaxpr.eqns for v in eqn.outvars}
  for position, eqn in enumerate(jaxpr.eqns):
    for v in variables(eqn.invars):
      consumers.setdefault(v, set()).add(position)
  for v in variables(jaxpr.outvars):
    # Returning counts as a consumer behind all equations, so a returned power becomes a result.
    consumers.setdefault(v, set()).add(len(jaxpr.eqns))

  # A chain is the elementwise equations that compute functions of one value, or of a value and its
  # gates. For their results: the positions, the values that each is a function of, the growth, and
  # the positions of those that grow faster than a value, or depend on these.
  positions, roots_of = dict[Var, int](), dict[Var, tuple[Var, ...]]()
  degrees, grown = dict[Var, float](), dict[Var, int]()
  repeated = {v for eqn in jaxpr.eqns if facts_of(eqn).gradient == "repeated" for v in eqn.outvars}
  for position, eqn in enumerate(jaxpr.eqns):
    degree, operands = facts_of(eqn).degree, variables(eqn.invars)
    if degree is None or not _computes_in_float32(eqn, ops):
      continue
    # Operands in a chain count as their roots: `x * x ** 2` is a function of `x` alone.
    values = dict.fromkeys(roots_of.get(v, (v,)) for v in eqn.invars if isinstance(v, Var))
    # A power gates the other factor, unless other operations use the power too. A broadcast factor
    # stays outside, because all of its equal rows would be saved.
    powers = [v for v in operands & grown.keys() if len(consumers[v]) == 1]
    gates = powers and facts_of(eqn).acts_as == "product" and operands.isdisjoint(repeated)
    if len(values) != 1 and not gates:
      continue
    (out,) = eqn.outvars
    positions[out], roots_of[out] = position, tuple(dict.fromkeys(itertools.chain(*values)))
    # A literal does not grow. A root grows as itself, with degree 1.
    grows = [degrees.get(v, 1) if isinstance(v, Var) else 0 for v in eqn.invars]
    degrees[out] = degree(grows, eqn.params)
    # By the chain rule, the slope of `tanh(x + x ** 3)` needs the slope of the power.
    if degrees[out] > 1 or not grown.keys().isdisjoint(operands):
      grown[out] = position

  functions: dict[int, Activation] = {}
  powers = frozenset(grown.values())
  for out, end in grown.items():
    # A power that only other powers use stays inside their equations.
    if consumers[out] <= powers:
      continue
    # The positions that the result needs.
    members, todo = {end}, [end]
    while todo:
      needed = variables(jaxpr.eqns[todo.pop()].invars) & positions.keys()
      new = {positions[v] for v in needed} - members
      members |= new
      todo += new
    if len(powers.intersection(members)) < 2:  # One power alone is computed as any operation is.
      continue
    # The positions that only the result needs. Backwards: a member has met all of its consumers in
    # the chain before.
    own: set[int] = set()
    for position in sorted(members, reverse=True):
      (result,) = jaxpr.eqns[position].outvars
      # An operation is only part of the function if no equation outside reads its result. Otherwise
      # it must also be written alone.
      if position == end or consumers[result] <= own:
        own.add(position)
    eqns = tuple(jaxpr.eqns[position] for position in sorted(members))
    functions[end] = Activation(roots_of[out], eqns, frozenset(own))
  return functions


def _computes_in_float32(eqn: JaxprEqn, ops: OpLists) -> bool:
  """Whether an operation takes numbers and float32 arrays of the shape of its result."""
  # The equation computes in float32. If the user's lists put an operation into `half` or `opaque`,
  # it stays outside.
  if part_of(eqn, ops) not in ("promote", "keep", "float32"):
    return False
  # A slope is multiplied by the tangent of a root, so a broadcast or a cast ends the chain.
  (out,) = eqn.outvars
  arrays = [v for v in eqn.invars if not (isinstance(v, Literal) and is_number(v))]
  return all((shape_of(v), dtype_of(v)) == (shape_of(out), FLOAT32) for v in (out, *arrays))


# Writing activation functions.


@dataclasses.dataclass(frozen=True)
class _Computed:
  """A jaxpr that equals other jaxprs by a key of their operations."""

  jaxpr: Jaxpr = dataclasses.field(compare=False)
  key: Hashable


def is_one_equation(rewriter: Rewriter, function: Activation) -> bool:
  """Whether an activation function is written as one equation; asked where it begins.

  If not, its operations are written one by one.
  """
  first, *others = map(rewriter.scope_policies, function.eqns)
  # One equation has one scope. Operations in several scopes may have several policies.
  apart = any(each.scope != first.scope for each in others)
  # Where the function begins, the values that it gates may not be written yet.
  kinds = [kind for v in function.eqns[0].invars if (kind := rewriter.kind(v)) is not None]
  is_activation = any(kind.role >= Role.UNROUNDED for kind in kinds)
  return first.low_dtype is not None and not apart and is_activation


def write_activation(rewriter: Rewriter, function: Activation) -> None:
  """Writes an activation function as one equation."""
  values = [rewriter.values[root] for root in function.roots]
  kinds = [value.kind for value in values]
  computed, out = _by_the_rules(rewriter, function, kinds)
  # A float32 operand has float32 gradients, which are summed in float32.
  dtypes = [FLOAT32 if out.dtype == FLOAT32 else kind.dtype for kind in kinds]
  pairs = zip(values, dtypes, strict=True)
  operands = [rewriter.cast(value, dtype, function.eqns[0]) for value, dtype in pairs]
  last = function.eqns[-1]
  with context_of(last):
    call = _equation(computed, tuple(kind.dtype for kind in kinds), *map(aval_of, operands))
  rewriter.write(last.replace(primitive=call.primitive, params=call.params), operands, [out])


def _by_the_rules(
  rewriter: Rewriter, function: Activation, kinds: Sequence[Kind]
) -> tuple[_Computed, Kind]:
  """Returns the operations, rewritten for float32 operands, and the kind of the result."""
  (out,) = function.eqns[-1].outvars
  # Consumers outside the function count too.
  results = [v for eqn in function.eqns for v in eqn.outvars]
  flags = Flags({v: rewriter.flags_at(v) for v in results}, {}, {}, {})
  inner = Rewriter(flags, rewriter.scope_policies, rewriter.rewrite)
  # A low-precision root keeps its kind, so that the rules decide as without this equation. Its
  # variable is float32, since the equation casts the operand.
  pairs = zip(function.roots, kinds, strict=True)
  roots = [inner.define(root, kind._replace(variable=FLOAT32)) for root, kind in pairs]
  for eqn in function.eqns:
    operation(inner, eqn)
  value = inner.values[out]
  result = inner.cast(value, value.kind.dtype, None)
  return _Computed(*with_key(inner.shown(), roots, [result])), value.kind


@functools.lru_cache(maxsize=256)  # Equal layers share one, and so do calls outside `jit`.
def _equation(computed: _Computed, saved: Sequence[DType], *avals: ShapedArray) -> JaxprEqn:
  """Returns an equation that computes a jaxpr, and saves its operands in the dtypes `saved`."""

  def activation(*operands: Array) -> list[Array]:
    wide = (jax.lax.convert_element_type(x, FLOAT32) for x in operands)
    return eval_jaxpr(computed.jaxpr, (), *wide)

  body = jaxpr_for(activation, *avals)
  out = aval_of(body.jaxpr.outvars[0])
  kept = [aval.update(dtype=dtype) for aval, dtype in zip(avals, saved, strict=True)]
  # The derivative by each operand.
  changes = [jaxpr_for(_along(activation, i), out, *kept) for i in range(len(avals))]

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    (result,) = activation(*primals)
    pairs = zip(primals, saved, strict=True)
    kept = [jax.lax.convert_element_type(x, dtype) for x, dtype in pairs]
    parts = [
      tangent_p.bind(
        jax.lax.convert_element_type(placed_like(t, result), out.dtype), *kept, callee=change
      )
      for t, change in zip(tangents, changes, strict=True)
      if not isinstance(t, SymbolicZero)
    ]
    return [result], [functools.reduce(jax.lax.add, parts)]

  return equation_with_rule(body, tangent, avals, "activation")


def _along(activation: Callable[..., list[Array]], moving: int) -> Callable[..., Array]:
  """Returns the derivative by one operand as a function of a tangent and the operands."""

  def change(t: Array, *operands: Array) -> Array:
    # The barrier hides from XLA that this factor is 1. Otherwise XLA would share these operations
    # with the forward pass, and keep a float32 tanh.
    one = jax.lax.optimization_barrier(np.float32(1))
    wide = [jax.lax.convert_element_type(x, FLOAT32) * one for x in operands]
    x, before, after = wide[moving], wide[:moving], wide[moving + 1 :]
    # The function is elementwise, so its derivative along ones is the slope at each position.
    ones = jax.lax.full_like(x, 1)
    _, (slope,) = jax.jvp(lambda x: activation(*before, x, *after), (x,), (ones,))
    return jax.lax.mul(jax.lax.convert_element_type(slope, t.dtype), t)

  return change


tangent_p = Primitive("activation_tangent")
"""The tangent of an activation function by one operand: the operand's tangent times the slope.

The equation computes the slope itself, so JAX saves the operands for the backward pass and not the
slope. A `jax.checkpoint` would do the same, but it has no transpose under `jax_remat3`.
"""


def _evaluate(*operands: Array, callee: ClosedJaxpr) -> Array:
  (result,) = eval_jaxpr(callee.jaxpr, callee.consts, *operands)
  return result


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Any], *, callee: ClosedJaxpr
) -> tuple[Array, Array]:
  moving = [ad.instantiate_zeros(t) for t in tangents]
  return jax.jvp(functools.partial(_evaluate, callee=callee), [*primals], moving)


def _transpose(
  cotangent: Array | ad.Zero, tangent: Any, *operands: Any, callee: ClosedJaxpr
) -> list[Array | ad.Zero | None]:
  # Each element of the result depends on one of the tangent, so the transpose is the same product.
  is_zero = isinstance(cotangent, ad.Zero)
  bar = ad.Zero(tangent.aval) if is_zero else tangent_p.bind(cotangent, *operands, callee=callee)
  return [bar, *[None] * len(operands)]


def _batch(
  arrays: Sequence[Array], dims: Sequence[int | None], *, callee: ClosedJaxpr
) -> tuple[Array, int]:
  pairs = [*zip(arrays, dims, strict=True)]
  moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
  if dims[0] is None:  # The transpose needs a tangent of the type of the result.
    like = next(x for x, d in zip(moved, dims, strict=True) if d is not None)
    tangent = jnp.broadcast_to(moved[0], (len(like), *moved[0].shape))
    # With explicit axes of a mesh, the new axis is sharded like that of the operands.
    moved[0] = placed(tangent, (*spec_of(like)[:1], *spec_of(tangent)[1:]))
  axes = [0, *(None if d is None else 0 for d in dims[1:])]
  each = jax.vmap(functools.partial(_evaluate, callee=callee), in_axes=axes)
  return tangent_p.bind(*moved, callee=jaxpr_for(each, *map(jax.typeof, moved))), 0


tangent_p.def_impl(_evaluate)
tangent_p.def_abstract_eval(lambda t, *_, **__: t)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_evaluate, multiple_results=False))
