"""Matmuls of low-precision operands into a wider dtype: results, and gradients of weights.

A matmul adds up in float32 whatever its operands are. Where its result leaves a module in float32
(`output_dtype="float32"`), it is the sum itself, without a rounding to the compute dtype. JAX would
multiply its float32 gradient by the low-precision operands in float32, so that is cast first.

`Policy(weight_grad_dtype=...)` is for gradients. A matmul casts its weight to the compute dtype,
and JAX computes the gradient of the weight as a matmul in that dtype too. The partitioner adds up
in it what the devices found, and only the sum is cast to the dtype of the weight, with a rounding
for each addition. Here the matmul takes the weight as it is stored: its gradient is one matmul of
the same operands in low precision into the wide dtype, and what is added up afterwards is wide.

The rewritten jaxpr holds the matmul inside of a `jax.custom_jvp`, so that all code that walks
jaxprs finds it. Its derivative is a primitive of our own, linear in its tangent as a matmul is, of
which only the transpose differs: a `jax.custom_vjp` would refuse forward mode, and the transpose of
`jax.custom_derivatives.linear_call` cannot be batched.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mpjax._core.types import Array, DType
from mpjax._jaxprs.autocast.rewriter import Rewriter, retype
from mpjax._jaxprs.autocast.run import differentiated, remembered_off_mesh
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.compat import bind, context_of
from mpjax._jaxprs.reader import Atom, aval_of

Levels: TypeAlias = tuple[tuple[bool, ...], ...]
"""For each `vmap` around, the innermost first, which operands have a first axis for it."""


def with_wide_sums(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  out: DType,
  wide: DType | None,
) -> JaxprEqn | None:
  """Returns a matmul in `half` with a wide result, wide gradients of its weights, or both; or None.

  `out` is the dtype of the result, `wide` that of the gradients of what is created from parameters
  alone.
  """
  wide = None if wide is None or wide.itemsize <= half.itemsize else wide
  each = tuple(wide if v is not None and v.is_parameter else None for v in values)
  if out == half and not any(each):
    return None
  operands = [
    value.atom if value is not None and is_weight else rewriter.read(atom, eqn, half)
    for atom, value, is_weight in zip(eqn.invars, values, each, strict=True)
  ]
  params = tuple(retype(eqn, half).items())
  matmul = Matmul(primitive=eqn.primitive, params=params, half=half, out=out, wide=each)
  return with_rule(eqn, matmul, operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
  """A matmul with a derivative of its own, part of the key of what JAX keeps.

  Fields:
    primitive, params: those of its equation, of operands and a result in `half`.
    half: the dtype to multiply in.
    out: that of the result.
    wide: of operands that keep their own dtype until here, as weights do, that of their gradients.
  """

  primitive: Primitive
  params: tuple[tuple[str, Any], ...]
  half: DType
  out: DType
  wide: tuple[DType | None, ...]

  def __call__(self, *operands: Array) -> Array:
    wide = {} if self.out == self.half else {"preferred_element_type": self.out}
    return into(self.primitive, self._low(operands, self.wide), {**dict(self.params), **wide})

  def _low(self, operands: Sequence[Array], wide: Sequence[DType | None]) -> list[Array]:
    pairs = zip(operands, wide, strict=True)
    return [x if w is None else jax.lax.convert_element_type(x, self.half) for x, w in pairs]

  def with_kept(
    self, moving: tuple[int, ...], *operands: Array
  ) -> tuple[Array | None, Sequence[Sequence[Array]]]:
    """Returns the matmul, and for operands that have tangents what is kept of the others.

    None instead of the matmul is the equation, with its rule, once more.
    """
    kept = [(*operands[:side], *operands[side + 1 :]) for side in moving]
    # A policy of `jax.checkpoint` such as `dots_saveable` sees the matmul, if it has no equation of
    # its own. Of one that leaves in a wider dtype a second derivative needs the rule too.
    return None if moving and self.out != self.half else self(*operands), kept

  def tangent(self, side: int, t: Array, *others: Array) -> Array:
    """Returns the matmul of a tangent of the operand `side`, and of what is kept of the others."""
    return self(*others[:side], t, *others[side:])

  def gradient(
    self, side: int, like: ShapedArray, levels: Levels, cotangent: Array, *others: Array
  ) -> Array:
    """Returns the gradient of an operand `like` this, added up over the `vmap`s that it lacks."""
    low = self._low(others, self.wide[:side] + self.wide[side + 1 :])
    plain = dataclasses.replace(self, out=self.half, wide=(None,) * len(self.wide))

    def linear(x: Array) -> Array:
      return mapped_over(functools.partial(plain.tangent, side), levels)(x, *low)

    cotangent = jax.lax.convert_element_type(cotangent, self.half)
    pull, wide = jax.linear_transpose(linear, like.update(dtype=self.half)), self.wide[side]
    if wide is None:
      return pull(cotangent)[0]

    def multiply(eqn: JaxprEqn, operands: Sequence[Array], _: Sequence[int]) -> Array:
      # In `x.T @ g` only the matmul has a dtype of its own: a transpose before it moves bfloat16,
      # and one after it float32.
      return into(eqn.primitive, operands, {**eqn.params, "preferred_element_type": wide})

    return with_matmuls_by(multiply, jax.make_jaxpr(pull)(cotangent), cotangent)

  def check_second_order(self) -> None:
    """Raises if the tangent has no derivative by what is kept."""


def into(primitive: Primitive, operands: Sequence[Array], params: Mapping[str, Any]) -> Array:
  """Returns the result of a matmul, which may be of a wider dtype than the operands."""
  result: Array = primitive.bind(*operands, **params)
  wider = result.dtype.itemsize > max(x.dtype.itemsize for x in operands)
  if not wider or primitive is not dot_general_p:
    return result
  # A CPU may turn a matmul round. One of shards has a result of a type of its own.
  sharded = any(any(jax.typeof(x).sharding.spec) for x in operands)
  return result if sharded else _as_laid_out_p.bind(result)


# The derivative of a matmul.


def with_rule(eqn: JaxprEqn, rule: Matmul, operands: Sequence[Atom]) -> JaxprEqn:
  """Returns an equation that computes a matmul by a rule."""
  with context_of(eqn):
    product = _equation(rule, eqn.ctx, *map(aval_of, operands))
  return eqn.replace(primitive=product.primitive, invars=[*operands], params=product.params)


@remembered_off_mesh
def _equation(rule: Matmul, _: object, *avals: ShapedArray) -> JaxprEqn:
  """Returns an equation for operands of these types, which layers in one context share."""

  def call(*operands: Array) -> Array | None:
    return rule.with_kept((), *operands)[0]

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
    result, kept = rule.with_kept(moving, *primals)
    parts = [
      tangent_p.bind(tangents[side], *each, rule=rule, side=side, levels=())
      for side, each in zip(moving, kept, strict=True)
    ]
    results = bind(eqn, primals) if result is None else [result]
    return results, [functools.reduce(operator.add, parts)]

  eqn = differentiated(call, tangent, avals, "matmul")
  return eqn


def mapped_over(call: Callable[..., Any], levels: Levels) -> Callable[..., Any]:
  """Returns a function inside of the `vmap`s."""
  for level in levels:
    call = jax.vmap(call, in_axes=[0 if each else None for each in level])
  return call


def with_matmuls_by(
  multiply: Callable[[JaxprEqn, Sequence[Array], Sequence[int]], Array],
  program: ClosedJaxpr,
  *args: Array,
) -> Array:
  """Returns the result of the transpose of a matmul, with the matmul in it done by `multiply`.

  Which matmul or convolution of which axes, strides, dilations and groups it is, JAX knows best:
  its own jaxpr is run. The other equations in it move elements, or add up over axes of the mesh,
  and take any type. `multiply` is told which operands of the matmul come from the last argument.
  """
  jaxpr = program.jaxpr
  env: dict[Atom, Array] = dict(zip(jaxpr.constvars, program.consts, strict=True))
  env |= zip(jaxpr.invars, args, strict=True)
  last: set[Atom] = {jaxpr.invars[-1]}

  def read(atom: Atom) -> Array:
    return atom.val if isinstance(atom, Literal) else env[atom]

  for eqn in jaxpr.eqns:
    operands = list(map(read, eqn.invars))
    places = [i for i, v in enumerate(eqn.invars) if v in last]
    if "preferred_element_type" in eqn.params:
      results = [multiply(eqn, operands, places)]
    else:
      results = bind(eqn, operands)
      last.update(eqn.outvars if places else ())
    env.update(zip(eqn.outvars, results, strict=True))
  return read(jaxpr.outvars[0])


tangent_p = Primitive("matmul_tangent")
"""The derivative of a matmul by one operand, linear in its tangent.

Its operands are the tangent, and what is kept of the other operands. Parameters:
  rule: the `Matmul`.
  side: the position of the operand that has the tangent.
  levels: see `Levels`.
"""


def _evaluate(*operands: Array, rule: Matmul, side: int, levels: Levels) -> Array:
  return mapped_over(functools.partial(rule.tangent, side), levels)(*operands)


@remembered_off_mesh
def _abstract(*avals: ShapedArray, **params: Any) -> AbstractValue:
  return jax.make_jaxpr(functools.partial(_evaluate, **params))(*avals).jaxpr.outvars[0].aval


def _jvp(
  primals: Sequence[Array],
  tangents: Sequence[Array | ad.Zero],
  *,
  rule: Matmul,
  side: int,
  levels: Levels,
) -> tuple[Array, Array]:
  result = tangent_p.bind(*primals, rule=rule, side=side, levels=levels)
  t, *others = range(len(primals))
  order = [*others[:side], t, *others[side:]]  # As the matmul has them.
  if not all(isinstance(tangents[k], ad.Zero) for k in others):
    rule.check_second_order()
  parts = []
  for i, k in enumerate(order):
    if not isinstance(tangents[k], ad.Zero):
      others = [j for j in order if j != k]
      mapped = tuple((level[k], *(level[j] for j in others)) for level in levels)
      operands = (tangents[k], *(primals[j] for j in others))
      parts.append(tangent_p.bind(*operands, rule=rule, side=i, levels=mapped))
  return result, functools.reduce(operator.add, parts)


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], *, levels: Levels, **params: Any
) -> tuple[Array, int]:
  pairs = zip(operands, dims, strict=True)
  moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
  level = tuple(axis is not None for axis in dims)
  return tangent_p.bind(*moved, levels=(*levels, level), **params), 0


def _transpose(
  cotangent: Array | ad.Zero,
  *operands: Any,  # One `ad.UndefinedPrimal`, and arrays.
  rule: Matmul,
  side: int,
  levels: Levels,
) -> list[Array | ad.Zero | None]:
  tangent, *others = operands
  none = [None] * len(others)
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(tangent.aval), *none]
  bar = rule.gradient(side, tangent.aval, levels, cotangent, *others)
  # Cast last: a cast to the dtype of the weight before the sums over the axes that it lacks, those
  # of the mesh too, would be one to bfloat16 if the weight is stored so.
  return [jax.lax.convert_element_type(bar, tangent.aval.dtype), *none]


tangent_p.def_impl(_evaluate)
tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_evaluate, multiple_results=False))


# What a CPU needs.

_as_laid_out_p = Primitive("as_laid_out")
"""The operand. On a CPU XLA does not see through it, to turn the matmul that made it round.

It leaves some matmuls of bfloat16 into float32 to a library that takes one layout alone, and fails
where a transpose of the result became one of the operands. What is traced on a CPU and lowered for
something else has nothing there.
"""

_as_laid_out_p.def_impl(lambda x: x)
_as_laid_out_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_as_laid_out_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_as_laid_out_p)
mlir.register_lowering(_as_laid_out_p, lambda _, x: [x])
_behind_barrier = mlir.lower_fun(
  lambda x: jnp.reshape(jax.lax.optimization_barrier(jnp.reshape(x, -1)), x.shape),
  multiple_results=False,
)
mlir.register_lowering(_as_laid_out_p, _behind_barrier, platform="cpu")
