"""The dtype of each operation without inner jaxprs: a function for each row of this table.

  operation                            runs in
  matmul, convolution (`matmuls.py`)   the compute dtype
    operands are inputs or numbers     as written
    one contracted element             as a multiplication, below
    no free axis                       float32, as a sum
    an input, under 8 contracted       float32
    under 8 contracted, 2 to 7 rows
      or columns                       float32
  float32 list                         float32
  anything else                        float32 if an operand is an input or a float32 activation, or
                                       if a number is outside the range of the compute dtype;
                                       otherwise the compute dtype
    arithmetic                         float32 also if a consumer widens it: see `Flag`
    addition of two arrays             is not widened, except for a float32 result of the policy

A result has the largest `Role` of the operands. A float32 activation is rounded if only matmuls use
it.

The gradient of a broadcast operand is a sum. So the operand is broadcast in float32 and then
rounded. The values are the same.
"""

import dataclasses

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p, convert_element_type_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._autocast.consumers import Flag, runs_as_written
from mpjax._autocast.kinds import Kind, Role, fits, joined, kind_of_input
from mpjax._autocast.matmuls import Operands, matmul
from mpjax._autocast.numbers import UNKNOWN, numbers_of_result
from mpjax._autocast.origins import adds_arrays
from mpjax._autocast.precision import retype
from mpjax._autocast.rewriter import FloatValue, Rewriter
from mpjax._autocast.scopes import AS_GIVEN, End
from mpjax._core.types import FLOAT32, FLOATS, HALVES, DType
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import Atom, aval_of, dtype_of, is_number, retyped, shape_of


def operation(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation without inner jaxprs."""
  scope_policy, part = rewriter.scope_policies(eqn), part_of(eqn, rewriter.settings.ops)
  # A mark of `scopes.py`, also outside of a low-precision policy: it must not stay in the jaxpr.
  if (end := rewriter.scope_policies.end(eqn)) is not None:
    return _end(rewriter, eqn, end)
  # The user's lists may have other operations in `half`. Only matmuls have this parameter.
  is_matmul = part == "half" and "preferred_element_type" in eqn.params
  if scope_policy.low_dtype is None or part in (None, "opaque"):
    return rewriter.write_as_traced(eqn)
  # A matmul of operands that the code has cast may be in a format, so `matmul` decides this itself.
  if not is_matmul and runs_as_written(eqn, scope_policy):
    return rewriter.write_as_traced(eqn)
  if eqn.primitive is convert_element_type_p:
    return _cast(rewriter, eqn)
  values = [rewriter.value(atom) for atom in eqn.invars]
  low = scope_policy.low_dtype
  for dtype in map(dtype_of, eqn.invars):
    if dtype is not None and dtype in HALVES:  # The user has cast an operand.
      low = dtype
  if is_matmul:
    return matmul(rewriter, eqn, values, low)

  # Each result belongs to one operand, as in a sort with several operands, and has its kind.
  has_one_each = eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars)
  if has_one_each and part in ("promote", "keep"):
    atoms = [atom if v is None else v.atom for atom, v in zip(eqn.invars, values, strict=True)]
    variables = [FLOAT32 if v is not None and v.is_low_in_float32 else None for v in values]
    pairs = zip(values, variables, strict=True)
    return rewriter.write(eqn, atoms, [v and v.kind._replace(variable=x) for v, x in pairs])

  # The operation runs in the dtype of its results.
  kind = _kind(eqn, values)
  if part == "half":  # `OpLists.replace` moved it there.
    kind = Kind(Role.ACTIVATION, low)
  elif part == "float32":
    # Random numbers that are drawn in low precision keep their bits.
    is_drawn_low = kind.role == Role.NUMBER and dtype_of(eqn.outvars[0]) in HALVES
    kind = kind._replace(dtype=low if is_drawn_low else FLOAT32, weight=False)
  elif (
    kind.dtype == FLOAT32
    or not fits([v.kind for v in values if v is not None], low)
    or _is_widened(rewriter, eqn, values)
  ):
    kind = kind._replace(dtype=FLOAT32)
  else:
    variable = FLOAT32 if _runs_in_float32_variables(rewriter, eqn, values) else None
    kind = kind._replace(dtype=low, variable=variable)

  dtype = kind.variable or kind.dtype
  operands = [
    atom if v is None else _operand(rewriter, eqn, v, dtype)
    for atom, v in zip(eqn.invars, values, strict=True)
  ]
  # Parameters that name the traced dtype change only if the operation changes its dtype.
  was_float32 = FLOAT32 in map(dtype_of, eqn.invars)
  is_retyped = any(v is not None for v in values) and was_float32 != (dtype == FLOAT32)
  params = retype(eqn, dtype) if is_retyped else None
  kinds = [kind if dtype_of(v) in FLOATS else None for v in eqn.outvars]
  rewriter.write_rounding(eqn, operands, kinds, low, params)
  # `Rewriter.cast` repeats the equation of a broadcast number in another dtype.
  for var in eqn.outvars:
    if var in rewriter.values and rewriter.values[var].producer is None:
      rewriter.values[var].producer = rewriter.eqns[-1]
  return None


def _end(rewriter: Rewriter, eqn: JaxprEqn, end: End) -> None:
  """Casts the result of a policy for all consumers, or rounds the result of a layer."""
  (atom,), (var,) = eqn.invars, eqn.outvars
  value, dtype = rewriter.value(atom), end.dtype
  if value is None:
    return rewriter.write_as_traced(eqn)
  # No equation is written for the mark: the result is the operand, or its cast.
  if end.of_policy:
    rewriter.values[var] = FloatValue(rewriter.cast(value, dtype, eqn), kind_of_input(dtype))
  elif rewriter.flags_of_results(eqn) & Flag.OUTPUT:
    rewriter.values[var] = value  # The policy returns it in float32.
  else:
    rounded = rewriter.cast(value, dtype, eqn)
    rewriter.values[var] = FloatValue(rounded, Kind(Role.ACTIVATION, dtype))
  return None


def _cast(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes a cast by the user or by promotion, unless the value has the dtype."""
  (atom,), (var,) = eqn.invars, eqn.outvars
  target, value = eqn.params["new_dtype"], rewriter.value(atom)
  if target not in FLOATS:
    return rewriter.write(eqn, [rewriter.read(atom, eqn)], [None])
  if value is None:
    kind = rewriter.kind_of_integers(atom, target)
    return rewriter.write(eqn, [atom], [kind])
  # A cast that changes only the weak type is written too. A weakly typed result would be promoted
  # to other dtypes in the user's code.
  if (weak_type := aval_of(var).weak_type) != aval_of(value.atom).weak_type:
    typed = Var(aval_of(value.atom).update(weak_type=weak_type))
    value = dataclasses.replace(value, atom=rewriter.write_cast(value.atom, typed, eqn), casts={})
  if dtype_of(atom) == target:
    rewriter.values[var] = value
    return None
  # A cast to low precision is the user's choice of a dtype, so its result is an activation.
  keeps_role = target == FLOAT32 or value.kind.role == Role.NUMBER
  role = value.kind.role if keeps_role else Role.ACTIVATION
  numbers = value.kind.numbers if target == FLOAT32 else UNKNOWN
  # A cast to float32 changes no value. The result shares the variable, and consumers that want the
  # dtype before the cast need no second one.
  kind = Kind(role, target, weight=value.kind.weight, numbers=numbers)
  cast = FloatValue(value.atom, kind, uncast=value.atom)
  # A cast to low precision is written here for all consumers; one to float32 at each consumer.
  if target != FLOAT32 or FLOAT32 in value.casts:
    cast.atom = rewriter.cast(value, target, eqn)
  rewriter.values[var] = cast
  return None


# The dtype of all other operations.


def _kind(eqn: JaxprEqn, values: Operands) -> Kind:
  """Returns the kind of the results of an operation by its operands alone."""
  floats = [v for v in values if v is not None]
  if not floats:  # Such as the absolute value of a complex number.
    return Kind(Role.INPUT, FLOAT32)
  kind = joined(*(v.kind for v in floats))
  if kind.role < Role.INPUT:
    kind = kind._replace(numbers=numbers_of_result(eqn, [v.kind.numbers for v in floats]))
  # A moved or scaled weight is still a weight.
  return kind._replace(weight=kind.weight and (facts_of(eqn).moves or kind.role == Role.PARAMETER))


def _is_widened(rewriter: Rewriter, eqn: JaxprEqn, values: Operands) -> bool:
  """Whether a consumer widens an operation, so that its result is not rounded."""
  flags = rewriter.flags_of_results(eqn)
  if dtype_of(eqn.outvars[0]) != FLOAT32:  # The user has chosen low precision.
    return False
  if flags & Flag.OUTPUT:
    return True
  # Moves and selections are exact in each dtype. Dropout returns the dtype of its operand.
  if not facts_of(eqn).arithmetic or AS_GIVEN in rewriter.scope_policies(eqn).scope:
    return False
  # `x + 1` counts as arithmetic on one array. A sum of two values ignores SUM: only products
  # before a sum are widened, not the sums themselves.
  has_number = any(v is not None and v.kind.role == Role.NUMBER for v in values)
  if not facts_of(eqn).adds or has_number:
    return bool(flags & (Flag.FLOAT32 | Flag.SUM))
  return bool(flags & Flag.FLOAT32) and not adds_arrays(eqn)


def _runs_in_float32_variables(rewriter: Rewriter, eqn: JaxprEqn, values: Operands) -> bool:
  """Whether low-precision values are moved or selected in float32 variables.

  The values stay the same, and their gradients are float32 sums. The gradient of a `gather` sums
  all uses of a row, such as a frequent token. The gradient of a maximum counts equal elements,
  which stops at 256 in bfloat16. The gradients of the two slices in `x[1:] - x[:-1]` are added.
  """
  facts, floats = facts_of(eqn), [v for v in values if v is not None]
  # XLA fuses a softmax with a selection in float32, and computes both again in the backward pass.
  # With a cast in between it would save the exponentials. A selection in a derivative rule stays
  # low, because JAX saves the zeros from which it selects.
  selects = facts.gradient == "selected" and not rewriter.settings.in_derivative
  # Only for consumers in float32, such as that subtraction. A slice for a matmul stays low.
  if facts.gradient == "placed" or selects:
    return all(rewriter.flags_at(var) & Flag.FLOAT32 for var in eqn.outvars)
  # Unique indices use each row once, so nothing is summed. A literal has no gradient.
  if facts.gradient == "repeated" and not eqn.params.get("unique_indices"):
    return not is_number(eqn.invars[0])
  if facts.gradient == "chosen":
    return True
  # An exact operation on such values, as a reshape of an embedding, keeps them in their variables.
  return (facts.exact or facts.tests) and bool(floats) and all(v.is_low_in_float32 for v in floats)


# Broadcast operands.


def _operand(rewriter: Rewriter, eqn: JaxprEqn, value: FloatValue, dtype: DType) -> Atom:
  """Returns an operand in `dtype`, after broadcasting it in float32 if the operation would.

  Its gradients are then summed in float32.
  """
  repeats = facts_of(eqn).gradient in ("added", "multiplied") and value.kind.role != Role.NUMBER
  if dtype == FLOAT32 or not repeats or shape_of(value.atom) == shape_of(eqn.outvars[0]):
    return rewriter.cast(value, dtype, eqn)
  wide = rewriter.cast(value, FLOAT32, eqn)
  aval, out, sharding = aval_of(wide), aval_of(eqn.outvars[0]), None
  new = aval.update(shape=out.shape)
  # On a mesh with explicit axes the type has a sharding. A broadcast axis is sharded like the
  # result, and any other axis like the operand.
  if AxisType.Explicit in out.sharding.mesh.axis_types:
    spec = list(out.sharding.spec)
    for axis, size in enumerate(aval.shape):
      if size == out.shape[axis]:
        spec[axis] = aval.sharding.spec[axis]
    sharding = NamedSharding(out.sharding.mesh, PartitionSpec(*spec))
    new = new.update(sharding=sharding)
  var, dimensions = Var(new), tuple(range(aval.ndim))
  params = {"shape": out.shape, "broadcast_dimensions": dimensions, "sharding": sharding}
  fields = {"primitive": broadcast_in_dim_p, "invars": [wide], "outvars": [var], "params": params}
  rewriter.eqns.append(eqn.replace(**fields))
  return rewriter.write_cast(var, retyped(var, dtype), eqn)
