"""Which matmuls are in float8: `Policy(matmul=mpjax.Float8())`."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import dot_general_p

from mpjax._core.dtypes import FLOAT32
from mpjax._core.float8 import MULTIPLE, Float8
from mpjax._core.types import Array, DType
from mpjax._jaxprs.atoms import Atom, aval_of, dtype_of
from mpjax._jaxprs.autocast.eqn_params import wants_precision
from mpjax._jaxprs.autocast.float8_dot import Matmul
from mpjax._jaxprs.autocast.run import differentiated, remembered_off_mesh
from mpjax._jaxprs.autocast.scopes import TABLE
from mpjax._jaxprs.autocast.values import Scope, Settings, Value
from mpjax._jaxprs.compat import context_of, scopes_of, varying_as, varying_axes
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs
from mpjax._jaxprs.primitive_facts import EqnParams

_BACKWARD = "transpose()"  # As JAX prints it, to tell it from the operation.


def with_float8(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  recipe: Float8,
  view: Callable[[Value, DType, JaxprEqn], Atom],
) -> JaxprEqn:
  """Returns a matmul in float8, for one that `why_not` has nothing against.

  A weight is cast from the dtype that it is stored in, and gets its gradient in float32. What the
  model computes comes in low precision, as by hand.
  """
  weight = weight_of(values)
  wide = [
    FLOAT32 if i == weight or (v is not None and v.is_parameter) else None
    for i, v in enumerate(values)
  ]
  operands = [
    atom if value is None else _operand(value, half, i == weight, view, eqn)
    for i, (atom, value) in enumerate(zip(eqn.invars, values, strict=True))
  ]
  avals = list(map(aval_of, operands))
  kept = {"precision": None, "preferred_element_type": None}
  matmul = Matmul(
    params=tuple((name, x) for name, x in eqn.params.items() if name not in kept),
    operands=tuple(aval.update(dtype=half, weak_type=False) for aval in avals),
    recipe=recipe,
    wide=tuple(wide),
    weight=weight,
  )
  with context_of(eqn):
    made = _made(matmul, *avals)
  return eqn.replace(primitive=made.primitive, invars=operands, params=made.params)


@remembered_off_mesh
def _made(matmul: Matmul, *avals: ShapedArray) -> JaxprEqn:
  """Returns an equation for operands of these types, which layers of one kind share."""
  body = _varying_as(avals[0], jax.make_jaxpr(matmul)(*avals))
  return differentiated(body, matmul.tangent, avals, "matmul")


def _varying_as(like: ShapedArray, body: ClosedJaxpr) -> ClosedJaxpr:
  """Returns a jaxpr for operands that vary over the axes of a `shard_map`.

  These are not bound while the jaxpr around is rewritten, so that a trace knows nothing of them.
  """
  axes, jaxpr = varying_axes(like), body.jaxpr
  if not axes:
    return body
  new: dict[Atom, Var] = {}
  eqns: list[JaxprEqn] = []

  def of(v: Atom) -> Var:
    made = Var(varying_as(aval_of(v), like))
    return made if isinstance(v, Literal) else new.setdefault(v, made)

  for eqn in jaxpr.eqns:
    operands, results = list(map(of, eqn.invars)), list(map(of, eqn.outvars))
    literals = [(v, x) for v, x in zip(eqn.invars, operands, strict=True) if isinstance(v, Literal)]
    eqns += [_made_varying(v, x, axes, eqn) for v, x in literals]
    eqns.append(eqn.replace(invars=operands, outvars=results))
  invars, outvars = list(map(of, jaxpr.invars)), list(map(of, jaxpr.outvars))
  return ClosedJaxpr(jaxpr.replace(invars=invars, eqns=eqns, outvars=outvars), body.consts)


def _made_varying(atom: Literal, var: Var, axes: tuple[str, ...], eqn: JaxprEqn) -> JaxprEqn:
  """Returns the equation before `eqn` by which a literal comes to vary over axes."""
  primitive = _pcast().primitive
  return eqn.replace(primitive=primitive, invars=[atom], outvars=[var], params={"axes": axes})


@functools.cache
def _pcast() -> JaxprEqn:
  """Returns an equation of `jax.lax.pcast`."""
  mesh, spec = jax.sharding.AbstractMesh((1,), ("axis",)), jax.sharding.PartitionSpec

  def cast(x: Array) -> Array:
    return jax.lax.pcast(x, "axis", to="varying")

  mapped = jax.shard_map(cast, mesh=mesh, in_specs=spec(), out_specs=spec("axis"))
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # Whatever is around.
    program = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((1,), FLOAT32))
  return next(iter(inner_jaxprs(program.eqns[-1]) or ())).jaxpr.eqns[-1]


def weight_of(values: Sequence[Value | None]) -> int:
  """Returns which operand is the weight; of two parameters, or arguments, it is the right one.

  Under autocast a batch is an argument too, unless the user names it as data. No rule tells the
  batch in `x @ (w + a @ b)` from the weight in `w @ relu(x)`, nor the attention of a batch,
  `softmax(x @ x.T) @ x`, from a weight that is used twice.
  """
  return max((i for i, value in enumerate(values) if is_weight(value)), default=-1)


def is_weight(value: Value | None) -> bool:
  """Whether an operand is created from parameters alone, or a parameter that was cast."""
  return value is not None and (value.is_parameter or value.kind.weight)


def _operand(
  value: Value, half: DType, weight: bool, view: Callable[..., Atom], eqn: JaxprEqn
) -> Atom:
  """Returns what holds an operand before it is scaled."""
  if weight and value.stored is not None:
    return value.stored
  return value.atom if value.is_parameter else view(value, half, eqn)


def why_not(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  recipe: Float8,
  scope: Scope,
  settings: Settings,
) -> str | None:
  """Returns why a matmul is left in the compute dtype; None if it is to be in float8."""
  if TABLE in scope:
    return "it is an embedding"
  if eqn.primitive is not dot_general_p:
    return "it is no dot_general"
  dtypes = {dtype_of(v) for v in eqn.invars}
  if not _is_plain(eqn.params, FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str)):
    return "the code asks for its precision"
  if settings.in_derivative:
    # JAX transposes what is linear in a tangent, and an operand that is rounded is not linear.
    return "it is in a derivative rule"
  stack = scopes_of(eqn.source_info.name_stack)
  if any(f"{name}()" == _BACKWARD for name, is_transform in stack if is_transform):
    return "its gradient is taken inside"
  weight = weight_of(values)
  if weight < 0:
    return "no operand is a parameter"
  depth, columns, rows = sizes(eqn, weight)
  if min(depth, columns, rows) < 2:
    return "it has one row or column"
  for name, size in (("K", depth), ("N", columns)):
    if size % MULTIPLE:
      return f"{name}={size} is no multiple of {MULTIPLE}"
  for most in recipe.too_small:
    if all(n is None or size <= n for size, n in zip((depth, columns), most, strict=True)):
      return f"too small to gain: K={depth}, N={columns}"
  return None


def _is_plain(params: EqnParams, dtype: DType | None) -> bool:
  """Whether a matmul of operands in a dtype asks for no precision, and for no other result."""
  plain = params["preferred_element_type"] in (None, dtype)
  return plain and not wants_precision({"precision": params["precision"]})


def sizes(eqn: JaxprEqn, weight: int) -> tuple[int, int, int]:
  """Returns K, N and M of a matmul: the length of its sums, columns of the weight, and rows.

  Of two operands, number `weight` is the weight.
  """
  contracted, batch = eqn.params["dimension_numbers"]

  def free(side: int) -> int:
    shared = {*contracted[side], *batch[side]}
    shape = aval_of(eqn.invars[side]).shape
    return math.prod(n for axis, n in enumerate(shape) if axis not in shared)

  depth = math.prod(aval_of(eqn.invars[weight]).shape[axis] for axis in contracted[weight])
  return depth, free(weight), free(1 - weight)
