"""Weight gradients in a wider dtype than the matmuls: `Policy(weight_grad_dtype=...)`.

A matmul casts its weight to the compute dtype. JAX computes the gradient of the weight as a matmul
in that dtype too, the partitioner adds up in it what the devices found, and only the sum is cast to
the dtype of the weight, with a rounding for each addition. Here the matmul takes the weight as it
is stored: its gradient is one matmul of the same operands in low precision into the wide dtype, and
what is added up afterwards is wide.

The rewritten jaxpr holds the matmul inside of a `jax.custom_jvp`, so that all code that walks
jaxprs finds it. Its derivative is a primitive of our own, linear in each operand as a matmul is, of
which only the transpose differs: a `jax.custom_vjp` would refuse forward mode, and the transpose of
`jax.custom_derivatives.linear_call` cannot be batched.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mpjax._core.types import Array, DType
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, retyped, shape_of
from mpjax._jaxprs.autocast.eqn_params import retype
from mpjax._jaxprs.autocast.evaluate import differentiated, jaxpr_of
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.compat import context_of
from mpjax._jaxprs.primitive_facts import EqnParams

Matmul: TypeAlias = Callable[..., Array]

Wide: TypeAlias = tuple[DType | None, ...]
"""The dtype of the gradient of each operand of a matmul; None for that of the operand."""


def with_wide_gradients(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  wide: DType | None,
  view: Callable[[Value, DType, JaxprEqn], Atom],
) -> JaxprEqn | None:
  """Returns a matmul in `half`, the same to the bit, with wide gradients of its weights.

  Args:
    eqn: the matmul as it was traced.
    values: what is known of its operands.
    half: the dtype to multiply in.
    wide: the dtype of the gradients, see `weight_grads` of `_scopes.py`.
    view: casts an operand that is no weight.

  Returns:
    None if nothing is asked for, or no operand is a weight: created from parameters alone.
  """
  if wide is None or wide.itemsize <= half.itemsize:
    return None
  each = tuple(wide if v is not None and v.neutral and not v.once else None for v in values)
  if not any(each):
    return None
  operands = [
    atom if value is None else value.atom if is_weight else view(value, half, eqn)
    for atom, value, is_weight in zip(eqn.invars, values, each, strict=True)
  ]
  params = retype(eqn, half)

  def matmul(*operands: Array) -> Array:
    return eqn.primitive.bind(*operands, **params)

  body, avals = _body(eqn.replace(params=params), operands, half, each)
  rule = functools.partial(_tangent, matmul, half, each)
  with context_of(eqn):
    made = differentiated(body, rule, avals, "matmul")
  return eqn.replace(primitive=made.primitive, invars=operands, params=made.params)


def _body(
  eqn: JaxprEqn, operands: Sequence[Atom], half: DType, wide: Wide
) -> tuple[ClosedJaxpr, list[ShapedArray]]:
  """Returns the jaxpr of a matmul whose weights are cast first, and the types of its operands.

  It is not traced, since the axes of a `shard_map` are not bound while its jaxpr is rewritten.
  """
  avals = list(map(aval_of, operands))
  given = [Var(aval) for aval in avals]
  views = [v if each is None else retyped(v, half) for v, each in zip(given, wide, strict=True)]
  casts = [cast_to(new, v, eqn) for new, v in zip(views, given, strict=True) if new is not v]
  made = eqn.replace(invars=[*views], outvars=[retyped(eqn.outvars[0], half)])
  return ClosedJaxpr(jaxpr_of([*casts, made], given, made.outvars), ()), avals


def _tangent(
  matmul: Matmul,
  half: DType,
  wide: Wide,
  primals: Sequence[Array],
  tangents: Sequence[Array | SymbolicZero],
) -> tuple[list[Array], list[Array]]:
  """The derivative of `matmul`, of operands in `half`, in operands that are cast first."""
  parts = [
    _product_p.bind(*primals[:i], t, *primals[i + 1 :], matmul=matmul, half=half, wide=wide)
    for i, t in enumerate(tangents)
    if not isinstance(t, SymbolicZero)
  ]
  # The matmul itself, so that policies of `jax.checkpoint` see it: `dots_saveable` looks for
  # `dot_general`, and would compute again what a primitive of ours gives.
  return [matmul(*_in_half(primals, half, wide))], [functools.reduce(operator.add, parts)]


def _in_half(operands: Sequence[Array], half: DType, wide: Wide) -> list[Array]:
  pairs = zip(operands, wide, strict=True)
  return [x if w is None else jax.lax.convert_element_type(x, half) for x, w in pairs]


# The primitive.

_product_p = Primitive("wide_gradient_matmul")
"""A matmul, linear in each floating operand, with gradients in wide dtypes.

Parameters:
  matmul: a function of operands in `half`.
  half: the dtype to multiply in.
  wide: of operands that are cast to `half` first, the dtype of their gradients.
"""


def _evaluate(*operands: Array, matmul: Matmul, half: DType, wide: Wide) -> Array:
  return matmul(*_in_half(operands, half, wide))


def _abstract(*avals: ShapedArray, **params: object) -> AbstractValue:
  return jax.make_jaxpr(functools.partial(_evaluate, **params))(*avals).jaxpr.outvars[0].aval


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], **params: object
) -> tuple[Array, Array]:
  parts = [
    _product_p.bind(*primals[:i], t, *primals[i + 1 :], **params)
    for i, t in enumerate(tangents)
    if not isinstance(t, ad.Zero)
  ]
  return _product_p.bind(*primals, **params), functools.reduce(operator.add, parts)


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], matmul: Matmul, **params: object
) -> tuple[Array, int]:
  pairs = zip(operands, dims, strict=True)
  moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
  batched = jax.vmap(matmul, in_axes=[None if axis is None else 0 for axis in dims])
  return _product_p.bind(*moved, matmul=batched, **params), 0


def _transpose(
  cotangent: Array | ad.Zero,
  *operands: Any,  # Arrays, and one `ad.UndefinedPrimal`.
  matmul: Matmul,
  half: DType,
  wide: Wide,
) -> list[Array | ad.Zero | None]:
  (place,) = (i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
  aval = operands[place].aval
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(aval) if i == place else None for i in range(len(operands))]
  before, after = operands[:place], operands[place + 1 :]
  before, after = _in_half(before, half, wide[:place]), _in_half(after, half, wide[place + 1 :])

  def linear(x: Array) -> Array:
    return matmul(*before, x, *after)

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
      made = into_wide(eqn, operands, {**eqn.params, "preferred_element_type": wide})
    else:
      made = eqn.primitive.bind(*operands, **eqn.params)
    made = made if eqn.primitive.multiple_results else [made]
    found.update(zip(eqn.outvars, made, strict=True))
  return read(program.jaxpr.outvars[0])


def into_wide(eqn: JaxprEqn, operands: Sequence[Array], params: EqnParams) -> Array:
  """Returns a matmul into a wide dtype, on a CPU as one of batches of matrices.

  XLA's CPU backend (of jax 0.10) leaves some matmuls of bfloat16 into float32 to a library, goes on
  to turn an operand round, and fails because the library does not take that. It never does so with
  a batch of matrices, not even under `vmap`.
  """
  placed = any(any(jax.typeof(x).sharding.spec) for x in operands)
  if eqn.primitive is not dot_general_p or placed or jax.default_backend() != "cpu":
    return eqn.primitive.bind(*operands, **params)
  contracted, batch = params["dimension_numbers"]
  left, right = map(_as_matrices, operands, contracted, batch)
  params = {**params, "dimension_numbers": (((1,), (1,)), ((0,), (0,)))}
  return jnp.reshape(eqn.primitive.bind(left, right, **params), shape_of(eqn.outvars[0]))


def _as_matrices(x: Array, contracted: Sequence[int], batch: Sequence[int]) -> Array:
  """Returns `x` with three axes: batch, contracted, and the others."""
  free = [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
  groups = [batch, contracted, free]
  sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
  return jnp.reshape(jax.lax.transpose(x, [axis for group in groups for axis in group]), sizes)
