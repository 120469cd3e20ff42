"""Writing the equations that hold no jaxpr: in which dtype each runs, and the casts for it.

One rule decides, by what an operation is and by the kinds of its operands: data, low or neutral.

  operation      computed in                                         result
  matmul         the compute dtype                                   low
  float32 list   float32                                             data, else low, else neutral
  sum            float32, unless all operands are low and at rest    data, else low, else neutral
  multiplication likewise; float32, too, if a sum reads the result   low, else data, else neutral
  bounded        float32, if its operand is, or a sum reads it       as its operand
  other          float32, if an operand is data or held in float32   data, else low, else neutral

A number that the compute dtype has takes no part; a bias whose sum is to be rounded is added in the
compute dtype. What only float32 operations read is computed in float32. A low value that was
computed in float32 is held in it for readers that a rounding would harm, else rounded.
"""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core.primitives import (
  convert_element_type_p,
  pad_p,
  reduce_precision_p,
)

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, dtype_of, retyped, shape_of
from mpjax._jaxprs.autocast.eqn_params import retype, wants_precision
from mpjax._jaxprs.autocast.float8 import is_weight, why_not, with_float8
from mpjax._jaxprs.autocast.residuals import saving_low
from mpjax._jaxprs.autocast.rewriter import Rewriter
from mpjax._jaxprs.autocast.scopes import AS_GIVEN, OUTPUT, REST, dtype_marked, policy_at
from mpjax._jaxprs.autocast.sums import broadcast, is_summed, repeats
from mpjax._jaxprs.autocast.uses import CALLER, DIGITS, FACTOR, HELD, SUMMED, only_float32
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Kind,
  Scope,
  Value,
  is_exact,
  joined,
  spans_float32,
  survives,
)
from mpjax._jaxprs.autocast.wide_sums import with_wide_sums
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs
from mpjax._jaxprs.primitives import facts_of

Operands = Sequence[Value | None]
"""What is known of each operand: None for what is no floating value."""


def first_order(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds no jaxpr."""
  part = rewriter.settings.ops.part_of(eqn.primitive.name, eqn.params)
  scope, half = rewriter.place(eqn)
  leaving = dtype_marked(scope, OUTPUT) if eqn.primitive is reduce_precision_p else None
  if leaving is not None:
    return _leave(rewriter, eqn, leaving)
  rest = dtype_marked(scope, REST) if eqn.primitive is reduce_precision_p else None
  if rest is not None:
    return _rest(rewriter, eqn, rest)
  # A multiplication that names its own dtype is the user's choice too.
  if half is None or part is None or part == "opaque" or eqn.params.get("out_dtype") is not None:
    unknown = half is not None and part is None and inner_jaxprs(eqn) is None
    return rewriter.not_entered(eqn) if unknown else rewriter.untouched(eqn)
  if eqn.primitive is convert_element_type_p:
    return _convert(rewriter, eqn, scope)
  values = [rewriter.value(atom) for atom in eqn.invars]
  for atom, value in zip(eqn.invars, values, strict=True):
    if value is not None and dtype_of(atom) != FLOAT32:
      half = aval_of(atom).dtype  # The user's own choice.
  if part == "half":
    return _matmul(rewriter, eqn, values, scope, half)
  if part != "float32" and eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars):
    return _each_for_itself(rewriter, eqn, values)
  return _elementwise(rewriter, eqn, values, part, half)


def _matmul(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, scope: Scope, half: DType) -> None:
  """Writes a matmul or convolution, in low precision: what it returns is low, and at rest."""
  policy = policy_at(scope, rewriter.settings)
  recipe = None if policy is None else policy.matmul
  if recipe is not None:
    reason = why_not(eqn, values, recipe, scope, rewriter.settings)
    if reason is None:
      made = with_float8(eqn, values, half, recipe, rewriter.view)
      return rewriter.write(made, made.invars, [Kind(half)])
    eqn = rewriter.not_float8(eqn, reason)
  if FLOAT32 not in map(dtype_of, eqn.invars) or wants_precision(eqn.params):
    return rewriter.untouched(eqn)  # The user's own choice, again.
  precise = rewriter.precise(eqn, eqn.params, [half] * len(eqn.invars))
  eqn = eqn if precise is eqn.params else eqn.replace(params=precise)
  wide_grads = None if policy is None else policy.weight_grad_dtype
  # What leaves in float32 is the sum that the matmul has, and a bias is added to that.
  sums = facts_of(eqn).dtype_param is not None and bool(rewriter.readers_of(eqn) & CALLER)
  out = FLOAT32 if sums else half
  if made := with_wide_sums(eqn, values, half, out, wide_grads, rewriter.view):
    kind = Kind(half, held=FLOAT32 if sums else None, widened=sums)
    return rewriter.write(made, made.invars, [kind])
  operands = [
    atom if value is None else rewriter.view(value, half, eqn)
    for atom, value in zip(eqn.invars, values, strict=True)
  ]
  return rewriter.write(eqn, operands, [Kind(half)], retype(eqn, half))


def _elementwise(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, part: str, half: DType
) -> None:
  """Writes an operation that is no matmul, by the table above."""
  dtype, kind = _rule(rewriter, eqn, values, part, half)
  floats = [value for value in values if value is not None]
  wide = FLOAT32 in map(dtype_of, eqn.invars)
  params = retype(eqn, dtype) if floats and wide != (dtype == FLOAT32) else eqn.params
  # What is computed of a parameter is no parameter; one that was moved or scaled is.
  arrays = [value for value in floats if value.numbers is None]
  once = part == "float32" or not arrays or any(value.once for value in arrays)
  outs = [kind if dtype_of(v) in FLOATS else None for v in eqn.outvars]
  rounds = dtype == FLOAT32 and kind.dtype != FLOAT32 and kind.held is None
  # The rows of an embedding, say: read in low precision, the gradient of a frequent token would
  # be a sum of thousands of rows in it. So the operand is widened before: a rounding commutes.
  if dtype != FLOAT32 and repeats(eqn):
    dtype, params, outs = FLOAT32, eqn.params, [kind._replace(carried=FLOAT32)]
  summed = [value is not None and is_summed(eqn, value, dtype) for value in values]
  readers, at_once = rewriter.readers_of(eqn), any(summed) and facts_of(eqn).role != "sum"
  saved = _saved_low(eqn, floats, FLOAT32 if at_once else dtype, kind, readers)
  if any(saved):
    made = saving_low(eqn, floats, saved, kind.variable, rewriter.view)
    return rewriter.write(made, made.invars, outs, once=once)
  operands = [
    atom if value is None else _operand(rewriter, value, sums, dtype, eqn)
    for atom, value, sums in zip(eqn.invars, values, summed, strict=True)
  ]
  if rounds:
    outs = [each and each._replace(held=FLOAT32) for each in outs]
  rewriter.write(eqn, operands, outs, params, once=once)
  producer = rewriter.eqns[-1]
  for var, each in zip(eqn.outvars, outs, strict=True):
    if rounds and each is not None:
      rewriter.round_result(var, eqn)
  written = rewriter.known(eqn.outvars[0])
  if written is None:
    return
  written.producer = producer
  streams = all(v.added or v.neutral or v.held != FLOAT32 for v in arrays)
  written.added = facts_of(eqn).gradient == "added" and len(arrays) == 2 and streams
  if facts_of(eqn).moves:
    written.weight, written.added = floats[0].weight, all(v.added for v in arrays)
    written.numbers = _among(floats)


def _rule(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, part: str, half: DType
) -> tuple[DType, Kind]:
  """Returns the dtype in which an operation that is no matmul runs, and the kind of its results."""
  facts, readers = facts_of(eqn), rewriter.readers_of(eqn)
  arrays = [v for v in values if v is not None and v.numbers is None]
  numbers = [x for v in values if v is not None for x in v.numbers or ()]
  deciding = arrays
  if part == "keep":  # A buffer that is written to keeps its dtype.
    deciding = arrays[:1]
  elif eqn.primitive is pad_p and values[1] is not None and values[1].counted:
    # `jnp.pad` passes 0 as an integer, which becomes a float32 scalar inside: by hand it is cast.
    deciding = arrays[:1]

  # The kind. A mask or a coordinate times an activation is an activation.
  lows = [v for v in deciding if v.is_low]
  kind = joined(v.kind for v in (lows if facts.role == "product" and lows else deciding))
  if kind is None:
    kind = Kind(FLOAT32, neutral=True)
  if kind.dtype == FLOAT32:  # Data or neutral; what is written into such a buffer counts too.
    others = joined(v.kind for v in arrays)
    if not kind.neutral or others is None or others.dtype == FLOAT32:
      return FLOAT32, Kind(FLOAT32, kind.neutral and (others is None or others.neutral))
    return FLOAT32, Kind(half, held=FLOAT32)

  # The dtype of an operation with a low operand, and whether its result stays held in float32.
  widened = all(v.widened or v.held != FLOAT32 for v in deciding)
  computes = facts.role is not None or facts.tests
  exact = all(is_exact(x, half) for x in numbers)
  own = dtype_of(eqn.outvars[0]) == FLOAT32  # Else the user has chosen low precision.
  more = facts.role == "product" or (facts.role == "sum" and len(arrays) == 1)
  dtype, held = half, bool(readers & (HELD | FACTOR))
  if part == "float32":
    dtype = FLOAT32
  elif readers & SUMMED and own and (facts.bounded or more):
    # A rounding before a sum may be all of it, and the operand knows more: of a gate near 1, say.
    dtype = FLOAT32
  elif facts.role == "sum" and exact and not readers & HELD and _is_bias(deciding):
    dtype = half  # As by hand, since the sum is to be rounded.
  elif computes and any(v.held == FLOAT32 for v in deciding):
    dtype = FLOAT32
    if facts.gradient == "multiplied" and _scaled(eqn, deciding) is not None:
      # It is as large as an activation: bfloat16 has the range for what is multiplied by it.
      held = bool(readers & (HELD if spans_float32(half) else HELD | FACTOR))
  elif computes and not exact:
    dtype = FLOAT32
  elif not computes:
    # Rounding commutes with a choice: a neutral operand may be rounded if the result may be.
    chosen = [v for v in deciding if v.held == FLOAT32 and (readers & HELD or not v.neutral)]
    fits = all(survives(x, half) for x in numbers) and (exact or not readers & HELD)
    dtype = FLOAT32 if chosen or not fits else half
  if only_float32(readers) and not facts.exact:
    dtype = FLOAT32
  if AS_GIVEN in rewriter.place(eqn)[0]:
    held = any(v.is_low and v.held == FLOAT32 for v in deciding)
  if dtype != FLOAT32 or not held:
    return dtype, Kind(half, kind.neutral)
  return dtype, Kind(half, kind.neutral, FLOAT32, widened=widened and part != "float32" and exact)


def _is_bias(values: Sequence[Value]) -> bool:
  """Whether all operands of a sum are at rest or neutral: it is as large as what is rounded."""
  return all(value.held != FLOAT32 or value.neutral for value in values)


def _scaled(eqn: JaxprEqn, values: Sequence[Value]) -> int | None:
  """Returns which of two factors is an activation, and the other one number for many elements."""
  shape = shape_of(eqn.outvars[0])
  repeated = [value.is_repeated or shape_of(value.atom) != shape for value in values]
  places = [i for i, value in enumerate(values) if value.is_low and not repeated[i]]
  return places[0] if sum(repeated) == len(places) == 1 else None


def _among(values: Sequence[Value]) -> tuple[float, ...] | None:
  """Returns the numbers that the elements of one of several values are among; None if not known."""
  known = [value.numbers for value in values if value.numbers is not None]
  among = {number for numbers in known for number in numbers}
  return tuple(sorted(among)) if len(known) == len(values) and len(among) <= _FEW else None


_FEW = 8
"""More numbers than a mask has are not noted: they are part of the key of a rewritten jaxpr."""


def _saved_low(
  eqn: JaxprEqn, values: Sequence[Value], dtype: DType, kind: Kind, readers: int
) -> list[DType | None]:
  """Returns in which low-precision dtype each factor in float32 is saved for the gradients.

  One that is at rest has such numbers. Another one may be rounded for the gradient of a sum alone,
  where the other factor is a parameter, or repeated, and only if the result is rounded in the end:
  else the parts of the gradient may cancel. Nor if it is saved in float32 anyway.
  """
  none: list[DType | None] = [None] * len(values)
  known = any(value.numbers is not None for value in values)
  if dtype != FLOAT32 or known or facts_of(eqn).role == "sum" or not _multiplies(eqn):
    return none
  saved = [value.dtype if value.is_low and value.held != FLOAT32 else None for value in values]
  if any(saved) or len(values) != 2 or readers & DIGITS or not kind.is_low:
    return saved
  of_a_parameter = [i for i, value in enumerate(values) if value.is_low and values[1 - i].neutral]
  big = of_a_parameter[0] if of_a_parameter else _scaled(eqn, values)
  if big is None:
    return saved
  value = values[big]
  is_saved = value.producer is not None and facts_of(value.producer).gradient == "result"
  if not is_saved and (spans_float32(value.dtype) or value.added):
    saved[big] = value.dtype
  return saved


def _multiplies(eqn: JaxprEqn) -> bool:
  """Whether the derivative of an operation reads its operands."""
  facts = facts_of(eqn)
  return facts.role == "product" or facts.gradient in ("multiplied", "chosen")


def _operand(rewriter: Rewriter, value: Value, summed: bool, dtype: DType, eqn: JaxprEqn) -> Atom:
  """Returns what holds an operand, as an operation in `dtype` reads it."""
  if summed:
    # It is repeated in float32 and rounded after: its gradient is a float32 sum over the batch.
    made = broadcast(rewriter.view(value, FLOAT32, eqn), eqn)
    rewriter.eqns.append(made)
    (repeated,) = made.outvars
    return rewriter.cast(repeated, retyped(repeated, dtype), eqn)
  return rewriter.view(value, dtype, eqn)


def _leave(rewriter: Rewriter, eqn: JaxprEqn, dtype: DType) -> None:
  """Casts the result of a module where its policy ends, for all consumers: what `eqn` marks."""
  value = rewriter.value(eqn.invars[0])
  if value is None:
    return rewriter.untouched(eqn)
  atom = value.atom if dtype == FLOAT32 else rewriter.view(value, dtype, eqn)
  return rewriter.hold(eqn.outvars[0], Value(atom, dtype))


def _rest(rewriter: Rewriter, eqn: JaxprEqn, dtype: DType) -> None:
  """Rounds the result of a layer, but for a caller that asks for float32."""
  value = rewriter.value(eqn.invars[0])
  if value is None:
    return rewriter.untouched(eqn)
  if value.is_low and rewriter.readers_of(eqn) & CALLER:
    value.widened = True
  else:
    value = Value(rewriter.view(value, dtype, eqn), dtype, value.neutral and value.is_low)
  return rewriter.hold(eqn.outvars[0], value)


def _each_for_itself(rewriter: Rewriter, eqn: JaxprEqn, values: Operands) -> None:
  """Writes an operation whose results are its operands, moved: each keeps its own dtype.

  A float32 key stays float32, and the bfloat16 values that are sorted with it stay bfloat16.
  """
  operands: list[Atom] = []
  kinds: list[Kind | None] = []
  for atom, value, var in zip(eqn.invars, values, eqn.outvars, strict=True):
    operands.append(atom if value is None else rewriter.view(value, value.held, eqn))
    kinds.append(value.kind if value is not None and dtype_of(var) in FLOATS else None)
  rewriter.write(eqn, operands, kinds, once=all(v is None or v.once for v in values))


def _convert(rewriter: Rewriter, eqn: JaxprEqn, scope: Scope) -> None:
  """Writes a cast of the user's, or of promotion; none to a dtype that is there."""
  (atom,), (var,) = eqn.invars, eqn.outvars
  target, value = eqn.params["new_dtype"], rewriter.value(atom)
  if value is None or target not in FLOATS:
    # Low precision cannot hold every index or count; of a mask it holds both numbers.
    neutral = dtype_of(atom) == np.bool_ or isinstance(atom, Literal)
    operand = atom if value is None else rewriter.view(value, value.held, eqn)
    kind = Kind(target, neutral and target == FLOAT32) if target in FLOATS else None
    rewriter.write(eqn, [operand], [kind])
    written = rewriter.known(var)
    if written is not None:
      written.counted = not neutral
      written.numbers = (0.0, 1.0) if dtype_of(atom) == np.bool_ else None
    return None
  if dtype_of(atom) == target:  # Only the weak type goes.
    return rewriter.hold(var, value)
  made = Value(value.atom, target, value.neutral and target == FLOAT32, once=value.once)
  if target != FLOAT32 or FLOAT32 in (value.views or ()):
    # A cast to low precision happens here for all consumers; one to float32 where float32 is read.
    made.atom = rewriter.view(value, target, eqn)
  policy = policy_at(scope, rewriter.settings)
  if target in HALVES and is_weight(value) and policy is not None and policy.matmul is not None:
    made.weight, made.stored = True, value.atom
  return rewriter.hold(var, made)
