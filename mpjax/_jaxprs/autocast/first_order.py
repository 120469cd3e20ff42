"""Writing the equations that hold no jaxpr: in which dtype each runs, and the casts for it.

Some equations are casts already: the user's, those of promotion, those where a policy ends.
"""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core.primitives import (
  broadcast_in_dim_p,
  convert_element_type_p,
  pad_p,
  reduce_precision_p,
  sub_p,
)

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, dtype_of, retyped, shape_of
from mpjax._jaxprs.autocast.eqn_params import retype, wants_precision
from mpjax._jaxprs.autocast.float8 import is_weight, why_not, with_float8
from mpjax._jaxprs.autocast.rewriter import Rewriter
from mpjax._jaxprs.autocast.scopes import float8, output_of, weight_grads
from mpjax._jaxprs.autocast.sums import broadcast, is_linear, is_summed, repeats, with_float32_sums
from mpjax._jaxprs.autocast.uses import HALF, RESULT
from mpjax._jaxprs.autocast.values import FLOATS, Kind, Scope, Value
from mpjax._jaxprs.autocast.weight_grads import with_wide_gradients
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs
from mpjax._jaxprs.primitives import facts_of


def first_order(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds no jaxpr."""
  part = rewriter.settings.ops.part_of(eqn.primitive.name, eqn.params)
  scope, half = rewriter.place(eqn)
  leaving = output_of(scope) if eqn.primitive is reduce_precision_p else None
  if leaving is not None:
    return _leave(rewriter, eqn, leaving)
  # A multiplication that names its own dtype is the user's choice too.
  if half is None or part is None or part == "opaque" or eqn.params.get("out_dtype") is not None:
    unknown = half is not None and part is None and inner_jaxprs(eqn) is None
    return rewriter.not_entered(eqn) if unknown else rewriter.untouched(eqn)
  if eqn.primitive is convert_element_type_p:
    return _convert(rewriter, eqn, scope, half)
  values: list[Value | None] = []
  once, wide, known = True, False, False
  for atom in eqn.invars:
    value = rewriter.value(atom, half)
    values.append(value)
    if value is not None:
      known = True
      once = once and value.once
      if dtype_of(atom) == FLOAT32:
        wide = True
      else:
        half = aval_of(atom).dtype  # The user's own choice.
  neutral, rounded, before = False, None, values
  if part == "half":
    asked = not wide or wants_precision(eqn.params)  # The user's own choice, again.
    recipe = float8(scope, rewriter.settings)
    if recipe is not None:
      reason = why_not(eqn, values, recipe, scope, rewriter.settings)
      if reason is None:
        made = with_float8(eqn, values, half, recipe, rewriter.view)
        return rewriter.write(made, made.invars, [Kind(half)])
      eqn = rewriter.not_float8(eqn, reason)
    if asked:
      return rewriter.untouched(eqn)
    wide_grads = weight_grads(scope, rewriter.settings)
    precise = rewriter.precise(eqn, eqn.params, [half] * len(eqn.invars))
    eqn = eqn if precise is eqn.params else eqn.replace(params=precise)
    if made := with_wide_gradients(eqn, values, half, wide_grads, rewriter.view):
      return rewriter.write(made, made.invars, [Kind(half)])
    dtype = half
  elif part == "float32":
    dtype = FLOAT32
  else:
    wanted = rewriter.wanted_of(eqn)
    values = [rewriter.outside(value, eqn, scope, half, wanted) for value in values]
    if eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars):
      return _each_for_itself(rewriter, eqn, values)
    deciding = values
    if part == "keep" and len(values) > 1:  # A buffer that is written to keeps its dtype.
      deciding = [v for v in values if v is not None][:1]
    elif eqn.primitive is pad_p and values[1] is not None and values[1].counted:
      # `jnp.pad` passes 0 as an integer, which becomes a float32 scalar inside: by hand it is cast.
      deciding = values[:1]
    dtype, neutral = _common(rewriter, eqn, deciding, wide, half)
    if dtype != FLOAT32 and repeats(eqn):
      # The rows of an embedding, say: read in low precision, the gradient of a frequent token would
      # be a sum of thousands of rows in it. So the operand is widened before, the result rounded.
      values, rounded, dtype = before, dtype, FLOAT32
  summed = [
    value is not None and part != "half" and is_summed(eqn, value, dtype) for value in values
  ]
  operands = [
    atom if value is None else _operand(rewriter, value, whole, each, dtype, eqn)
    for atom, value, whole, each in zip(eqn.invars, values, before, summed, strict=True)
  ]
  outs = [Kind(dtype, neutral) if dtype_of(v) in FLOATS else None for v in eqn.outvars]
  changed = known and wide != (dtype == FLOAT32)
  params = retype(eqn, dtype) if changed else eqn.params
  if any(summed) and not is_linear(eqn):
    made = with_float32_sums(eqn, operands, summed, dtype)
    return rewriter.write(made, operands, outs)
  rewriter.write(eqn, operands, outs, params, once=once)
  written = [rewriter.known(v) for v in eqn.outvars]
  if facts_of(eqn).moves and values[0] is not None and written[0] is not None:
    written[0].weight = values[0].weight
  filled = eqn.primitive is broadcast_in_dim_p and isinstance(operands[0], Literal)
  if filled and written[0] is not None:
    written[0].filled = rewriter.eqns[-1]
  if neutral:
    # The update of a parameter, p - lr * g, is as neutral as p and has its shape.
    shapes = {shape_of(v.atom) for v in values if v is not None and v.given}
    for var, value in zip(eqn.outvars, written, strict=True):
      if value is not None:
        value.given = shape_of(var) in shapes
  if rounded is not None or (dtype == FLOAT32 and known and not wide):
    for var, value in zip(eqn.outvars, written, strict=True):
      # Operands in low precision give a result in it, as they do by hand, but for consumers that
      # are float32 too: an `exp` that a sum reads need not be rounded in between.
      if value is not None and value.dtype == FLOAT32 and not rewriter.is_full(value.wanted):
        # The cast is written where low precision is first read.
        new = Value(
          value.atom, rounded or half, scope=value.scope, wanted=value.wanted, held=FLOAT32
        )
        rewriter.hold(var, new)
  return None


def _operand(
  rewriter: Rewriter, value: Value, whole: Value | None, summed: bool, dtype: DType, eqn: JaxprEqn
) -> Atom:
  """Returns what holds an operand, as an operation in `dtype` reads it.

  `whole` is the value before it was rounded for having left its scope; it is `summed` if its
  derivative is a sum.
  """
  if not summed:
    if eqn.primitive is sub_p and value.held in HALVES and dtype == FLOAT32:
      # A norm's difference: with a cast of its own, as by hand, XLA groups the sums of its
      # backward pass so that they read less memory. Forward a compiler makes one cast of both.
      return rewriter.cast(value.atom, retyped(value.atom, dtype), eqn)
    return rewriter.view(value, dtype, eqn)
  if not is_linear(eqn):
    return value.atom if value.neutral else rewriter.view(value, dtype, eqn)
  # A bias: repeated in float32 and rounded after, its gradient is a float32 sum over the batch.
  # Rounded before, as `x + b.astype(x.dtype)` does it, 512 rows add up in low precision.
  wide = whole if whole is not None and whole.held == FLOAT32 else value
  made = broadcast(rewriter.view(wide, FLOAT32, eqn), eqn)
  rewriter.eqns.append(made)
  (repeated,) = made.outvars
  return rewriter.cast(repeated, retyped(repeated, dtype), eqn)


def _common(
  rewriter: Rewriter, eqn: JaxprEqn, values: Sequence[Value | None], wide: bool, half: DType
) -> tuple[DType, bool]:
  """Returns the dtype of an operation that promotes or keeps, and whether its result is neutral."""
  halves = decided = given = False
  for value in values:
    if value is not None and value.dtype == FLOAT32:
      decided = decided or not value.neutral
      given = given or (value.given and shape_of(value.atom) == shape_of(eqn.outvars[0]))
    elif value is not None:
      halves = True
  if not halves or (wide and decided):
    return FLOAT32, not decided
  wanted = rewriter.wanted_of(eqn)
  if given and wide and wanted & RESULT and not wanted & HALF:
    # An argument that comes back changed: a parameter after its update, a count, a moment. In
    # bfloat16 `1 + 1e-3` is 1, and the parameter would never move.
    return FLOAT32, False
  # What is read in float32 anyway is computed in it, like the difference that exp reads.
  lift = rewriter.is_full(wanted) and not facts_of(eqn).exact
  return (FLOAT32 if lift else half), False


def _leave(rewriter: Rewriter, eqn: JaxprEqn, dtype: DType) -> None:
  """Casts the result of a module where its policy ends, for all consumers: what `eqn` marks."""
  value = rewriter.value(eqn.invars[0], dtype)
  if value is None:
    return rewriter.untouched(eqn)
  held = dtype if dtype != FLOAT32 else value.held
  (var,) = eqn.outvars
  wanted = rewriter.wanted.get(var, 0)
  made = Value(rewriter.view(value, held, eqn), dtype, wanted=wanted, held=held)
  return rewriter.hold(var, made)


def _each_for_itself(rewriter: Rewriter, eqn: JaxprEqn, values: Sequence[Value | None]) -> None:
  """Writes an operation whose results are its operands, moved: each keeps its own dtype.

  A float32 key stays float32, and the bfloat16 values that are sorted with it stay bfloat16.
  """
  operands: list[Atom] = []
  kinds: list[Kind | None] = []
  for atom, value, var in zip(eqn.invars, values, eqn.outvars, strict=True):
    operands.append(atom if value is None else rewriter.view(value, value.dtype, eqn))
    kinds.append(value.kind if value is not None and dtype_of(var) in FLOATS else None)
  rewriter.write(eqn, operands, kinds, once=all(v is None or v.once for v in values))


def _convert(rewriter: Rewriter, eqn: JaxprEqn, scope: Scope, half: DType) -> None:
  """Writes a cast of the user's, or of promotion; none to a dtype that is there."""
  (atom,), (var,) = eqn.invars, eqn.outvars
  target = eqn.params["new_dtype"]
  wanted = rewriter.wanted.get(var, 0)
  value = rewriter.outside(rewriter.value(atom, half), eqn, scope, half, wanted)
  if value is None or target not in FLOATS:
    # Low precision cannot hold every index or count; of a mask it holds both numbers.
    neutral = target == FLOAT32 and dtype_of(atom) == np.bool_
    operand = atom if value is None else rewriter.view(value, value.dtype, eqn)
    rewriter.write(eqn, [operand], [rewriter.kind_of(var, neutral=neutral)])
    written = rewriter.known(var)
    if written is not None:
      written.counted = value is None and not neutral
    return None
  if dtype_of(atom) == target:  # Only the weak type goes.
    value.wanted |= wanted
    return rewriter.hold(var, value)
  made = Value(
    value.atom,
    target,
    neutral=value.neutral and target == FLOAT32,
    scope=scope,
    wanted=wanted,
    once=value.once,
    held=value.held,
  )
  if target != FLOAT32 or FLOAT32 in (value.views or ()):
    # A cast to low precision happens here for all consumers; one to float32 where float32 is read.
    made.atom, made.held = rewriter.view(value, target, eqn), target
  if target in HALVES and is_weight(value) and float8(scope, rewriter.settings) is not None:
    made.weight, made.stored = True, value.atom
  return rewriter.hold(var, made)
