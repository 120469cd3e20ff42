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
jaxprs finds it. Its derivative is a primitive of our own, linear in each operand as a matmul is, of
which only the transpose differs: a `jax.custom_vjp` would refuse forward mode, and the transpose of
`jax.custom_derivatives.linear_call` cannot be batched.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import (
  ClosedJaxpr,
  JaxprEqn,
  Literal,
  Primitive,
  Var,
  new_jaxpr_eqn,
  no_effects,
)
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mpjax._core.types import Array, DType
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, retyped
from mpjax._jaxprs.autocast.eqn_params import retype
from mpjax._jaxprs.autocast.run import differentiated, jaxpr_of
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.compat import context_of, without_scopes
from mpjax._jaxprs.primitive_facts import EqnParams

Matmul: TypeAlias = Callable[..., Array]

Wide: TypeAlias = tuple[DType | None, ...]
"""The dtype of the gradient of each operand of a matmul; None for that of the operand."""


def with_wide_sums(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  out: DType,
  wide: DType | None,
  view: Callable[[Value, DType, JaxprEqn], Atom],
) -> JaxprEqn | None:
  """Returns a matmul in `half` with a wide result, wide gradients of its weights, or both.

  `out` is the dtype of the result, `wide` that of the gradients of weights: of what is created from
  parameters alone.

  Returns:
    None if neither the result nor a gradient is wide.
  """
  wide = None if wide is None or wide.itemsize <= half.itemsize else wide
  each = tuple(wide if v is not None and v.is_parameter else None for v in values)
  if out == half and not any(each):
    return None
  operands = [
    atom if value is None else value.atom if is_weight else view(value, half, eqn)
    for atom, value, is_weight in zip(eqn.invars, values, each, strict=True)
  ]

  def matmul(*operands: Array, out: DType) -> Array:
    return into(eqn, operands, _with_result(eqn, half, out))

  avals = list(map(aval_of, operands))
  body = _body(eqn, list(map(Var, avals)), half, out, each)

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)}
    if out == half:  # A policy of `jax.checkpoint` such as `dots_saveable` sees this matmul.
      result = [matmul(*_in_half(primals, half, each), out=half)]
    else:  # Of which a second derivative needs the rule too.
      again = jaxpr_of([made], cast(list[Var], made.invars), made.outvars)
      result = eval_jaxpr(again, (), *primals)
    return result, [_matmul_tangent(primals, moving, params)]

  params = {"matmul": matmul, "half": half, "out": out, "wide": each}
  with context_of(eqn):
    made = differentiated(body, tangent, avals, "matmul")
  return eqn.replace(primitive=made.primitive, invars=operands, params=made.params)


def _with_result(eqn: JaxprEqn, half: DType, out: DType) -> dict[str, Any]:
  """Returns the parameters of a matmul of operands in `half` and with a result in `out`."""
  return retype(eqn, half) if out == half else {**eqn.params, "preferred_element_type": out}


def _body(eqn: JaxprEqn, given: Sequence[Var], half: DType, out: DType, wide: Wide) -> ClosedJaxpr:
  """Returns the jaxpr of a matmul whose weights are cast first.

  It is not traced, since the axes of a `shard_map` are not bound while its jaxpr is rewritten.
  """
  bare = without_scopes(eqn.source_info.name_stack, "")  # The call is in the scope.
  eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=bare))
  views = [v if each is None else retyped(v, half) for v, each in zip(given, wide, strict=True)]
  body = [cast_to(new, v, eqn) for new, v in zip(views, given, strict=True) if new is not v]
  result, params = retyped(eqn.outvars[0], out), _with_result(eqn, half, out)
  body.append(eqn.replace(invars=[*views], outvars=[result], params=params))
  if out != half and _is_turned(eqn.primitive, map(aval_of, given)):
    new = Var(aval_of(result))
    place = (no_effects, eqn.source_info, eqn.ctx)
    body.append(new_jaxpr_eqn([result], [new], _as_laid_out_p, {}, *place))
  return ClosedJaxpr(jaxpr_of(body, given, body[-1].outvars), ())


def _matmul_tangent(
  primals: Sequence[Array], moving: Mapping[int, Array], params: Mapping[str, Any]
) -> Array:
  """Returns the tangent of a matmul, from those of some of its operands, by their positions."""
  parts = [_product_p.bind(*primals[:i], t, *primals[i + 1 :], **params) for i, t in moving.items()]
  return functools.reduce(operator.add, parts)


def _in_half(operands: Sequence[Array], half: DType, wide: Wide) -> list[Array]:
  pairs = zip(operands, wide, strict=True)
  return [x if w is None else jax.lax.convert_element_type(x, half) for x, w in pairs]


# The primitive.

_product_p = Primitive("wide_gradient_matmul")
"""A matmul, linear in each floating operand, with gradients in wide dtypes.

Parameters:
  matmul: a function of operands in `half`, and of the dtype of the result.
  half: the dtype to multiply in.
  out: that of the result.
  wide: of operands that are cast to `half` first, the dtype of their gradients.
"""


def _evaluate(*operands: Array, matmul: Matmul, half: DType, out: DType, wide: Wide) -> Array:
  return matmul(*_in_half(operands, half, wide), out=out)


def _abstract(*avals: ShapedArray, **params: object) -> AbstractValue:
  return jax.make_jaxpr(functools.partial(_evaluate, **params))(*avals).jaxpr.outvars[0].aval


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], **params: object
) -> tuple[Array, Array]:
  moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}
  return _product_p.bind(*primals, **params), _matmul_tangent(primals, moving, params)


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], matmul: Matmul, **params: object
) -> tuple[Array, int]:
  pairs = zip(operands, dims, strict=True)
  moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]

  def batched(*operands: Array, out: DType) -> Array:
    axes = [None if axis is None else 0 for axis in dims]
    return jax.vmap(functools.partial(matmul, out=out), in_axes=axes)(*operands)

  return _product_p.bind(*moved, matmul=batched, **params), 0


def _transpose(
  cotangent: Array | ad.Zero,
  *operands: Any,  # Arrays, and one `ad.UndefinedPrimal`.
  matmul: Matmul,
  half: DType,
  out: DType,
  wide: Wide,
) -> list[Array | ad.Zero | None]:
  (place,) = (i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
  aval = operands[place].aval
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(aval) if i == place else None for i in range(len(operands))]
  before, after = operands[:place], operands[place + 1 :]
  before, after = _in_half(before, half, wide[:place]), _in_half(after, half, wide[place + 1 :])

  def linear(x: Array) -> Array:
    return matmul(*before, x, *after, out=half)

  cotangent = jax.lax.convert_element_type(cotangent, half)
  pull, dtype = jax.linear_transpose(linear, aval.update(dtype=half)), wide[place]
  if dtype is None:
    (bar,) = pull(cotangent)
  else:
    bar = _run(jax.make_jaxpr(pull)(cotangent), cotangent, dtype)
  # What `pull` wrote adds up over the axes that the operand lacks, those of the mesh too. So it is
  # cast last: a cast to the dtype of the weight before these sums would be one to bfloat16 if the
  # weight is stored so.
  bar = jax.lax.convert_element_type(bar, aval.dtype)
  return [bar if i == place else None for i in range(len(operands))]


_product_p.def_impl(_evaluate)
_product_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_product_p] = _jvp
ad.primitive_transposes[_product_p] = _transpose
batching.primitive_batchers[_product_p] = _batch
mlir.register_lowering(_product_p, mlir.lower_fun(_evaluate, multiple_results=False))


# The transpose of a matmul.


def _run(program: ClosedJaxpr, cotangent: Array, wide: DType) -> Array:
  """Returns the result of a transposed matmul, which is in `wide` from the matmul on.

  Which matmul or convolution of which axes, strides, dilations and groups it is, JAX knows best:
  its own jaxpr is run with another type of result. The other equations in it move elements, or
  add up over axes of the mesh, and take any type.
  """
  found = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
  found[program.jaxpr.invars[0]] = cotangent

  def read(atom: Atom) -> Array:
    return atom.val if isinstance(atom, Literal) else found[atom]

  for eqn in program.jaxpr.eqns:
    # In `x.T @ g` only the matmul has a dtype of its own; a transpose before it moves bfloat16, and
    # one after it float32.
    operands = [read(atom) for atom in eqn.invars]
    if "preferred_element_type" in eqn.params:
      made = into(eqn, operands, {**eqn.params, "preferred_element_type": wide})
    else:
      made = eqn.primitive.bind(*operands, **eqn.params)
    made = made if eqn.primitive.multiple_results else [made]
    found.update(zip(eqn.outvars, made, strict=True))
  return read(program.jaxpr.outvars[0])


def into(eqn: JaxprEqn, operands: Sequence[Array], params: EqnParams) -> Array:
  """Returns the result of a matmul, which may be of a wider dtype than the operands."""
  made: Array = eqn.primitive.bind(*operands, **params)
  wider = made.dtype.itemsize > max(x.dtype.itemsize for x in operands)
  turned = wider and _is_turned(eqn.primitive, map(jax.typeof, operands))
  return _as_laid_out_p.bind(made) if turned else made


def _is_turned(primitive: Primitive, avals: Iterable[Any]) -> bool:
  """Whether a CPU may turn a matmul round. One of shards has a result of a type of its own."""
  return primitive is dot_general_p and not any(any(aval.sharding.spec) for aval in avals)


_as_laid_out_p = Primitive("as_laid_out")
"""The operand. On a CPU XLA does not see through it, to turn the matmul that made it round.

It leaves some matmuls of bfloat16 into float32 to a library that takes one layout alone, and fails
where a transpose of the result became one of the operands. What is traced on a CPU and lowered for
something else has nothing there.
"""


def _behind_barrier(x: Array) -> Array:
  return jnp.reshape(jax.lax.optimization_barrier(jnp.reshape(x, -1)), x.shape)


_as_laid_out_p.def_impl(lambda x: x)
_as_laid_out_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_as_laid_out_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_as_laid_out_p)
mlir.register_lowering(_as_laid_out_p, lambda _, x: [x])
mlir.register_lowering(
  _as_laid_out_p, mlir.lower_fun(_behind_barrier, multiple_results=False), platform="cpu"
)
