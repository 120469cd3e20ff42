"""Writing the equations that hold no jaxpr: in which dtype each runs, and the casts for it.

One rule decides, by what an operation is and by the kinds of its operands: data, low or neutral.

  operation      computed in                                         result
  matmul         the compute dtype                                   low
  float32 list   float32                                             data, else low, else neutral
  sum            float32, unless all operands are low and at rest    data, else low, else neutral
  multiplication likewise; float32, too, if a sum reads the result   low, else data, else neutral
  bounded        float32, if its operand is, or a sum reads it       as its operand
  other          float32, if an operand is data or held in float32   data, else low, else neutral

A caller that asks for float32 counts as a sum. A matmul that sums nothing is a multiplication where
no operand is low and more than matmuls read the result; one without free axes is a sum. In float32
is one of data for an angle, of data alone for an index, a rounding to an integer or a condition, of
data and no parameter for such a rounding, of an operand in float32 for an index and nothing else,
of masks alone, one that linear algebra reads, at once, and one computed with its results.

A number that the compute dtype has takes no part, but in a mask that is added before a rounding; a
bias whose sum is to be rounded is added in the compute dtype. What only float32 operations read is
computed in float32, and a low value that was is held in it for readers that a rounding would harm.

Derivatives add up in float32 where one number is read several times: the transpose of a broadcast
is a sum in the dtype of what is broadcast, that of a gather adds up in the dtype of what is
gathered, and the derivative of a maximum counts the positions that have it. So these run in
float32, and their result is rounded, which loses nothing.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
  broadcast_in_dim_p,
  convert_element_type_p,
  pad_p,
  reduce_precision_p,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._autocast.matmuls import by_rule, why_in_half
from mpjax._autocast.residuals import saving_low
from mpjax._autocast.rewriter import By, Rewriter, only_float32, retype, wants_precision
from mpjax._autocast.scopes import AS_GIVEN, Place
from mpjax._autocast.values import FLOATS, Kind, Value, is_exact, joined, survives
from mpjax._core.types import FLOAT32, HALVES, DType
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import OUTER_PRODUCT, facts_of
from mpjax._jaxpr.reader import LARGEST, Atom, aval_of, dtype_of, retyped, shape_of
from mpjax._matmul.float8 import recipe_of

Operands = Sequence[Value | None]  # None for what is no floating value.


def first_order(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds no jaxpr."""
  part = part_of(eqn, rewriter.settings.ops)
  place = rewriter.place(eqn)
  if eqn.primitive is reduce_precision_p and (dtype := place.output or place.rest):
    return _end_of_module(rewriter, eqn, place, dtype)
  # A multiplication that names its own dtype is the user's choice too.
  if place.half is None or part in (None, "opaque") or eqn.params.get("out_dtype") is not None:
    return rewriter.untouched(eqn)
  if eqn.primitive is convert_element_type_p:
    return _convert(rewriter, eqn, place)
  values = [rewriter.value(atom) for atom in eqn.invars]
  # The last is the user's own choice.
  half = [place.half, *(aval_of(v).dtype for v in eqn.invars if dtype_of(v) in HALVES)][-1]
  if part == "half" and "preferred_element_type" in eqn.params:
    return _matmul(rewriter, eqn, values, place, half)
  moves = eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars)
  if moves and part in ("promote", "keep"):
    # Its results are its operands, moved, and each keeps its own dtype: a float32 key stays
    # float32, and the bfloat16 values that are sorted with it stay bfloat16.
    kinds = [v and v.kind._replace(carried=FLOAT32 if v.is_wide else None) for v in values]
    pairs = zip(eqn.invars, kinds, strict=True)
    return rewriter.write(eqn, [rewriter.read(v, eqn, k and k.variable) for v, k in pairs], kinds)
  return _elementwise(rewriter, eqn, values, part, half)


# What names its dtype itself: marks and casts.


def _end_of_module(rewriter: Rewriter, eqn: JaxprEqn, place: Place, dtype: DType) -> None:
  """Ends a policy, in `dtype` for all readers; or a layer, whose result rests in it."""
  if (value := rewriter.value(eqn.invars[0])) is None:
    return rewriter.untouched(eqn)
  kind, rests = value.kind, place.rest is not None
  readers = rewriter.consumers(eqn) if rests and kind.is_low else 0
  if readers & By.CALLER:
    value.kind = kind._replace(widened=kind.held)  # Not rounded before it leaves in float32.
  elif not (readers & By.ANGLE and kind.held):
    atom = value.atom if dtype == FLOAT32 else rewriter.view(value, dtype, eqn)
    value = Value(atom, Kind(dtype, rests and kind.neutral and kind.is_low))
  rewriter.values[eqn.outvars[0]] = value


def _convert(rewriter: Rewriter, eqn: JaxprEqn, place: Place) -> None:
  """Writes a cast of the user's, or of promotion; none to a dtype that is there."""
  (atom,), (var,) = eqn.invars, eqn.outvars
  target, value = eqn.params["new_dtype"], rewriter.value(atom)
  if value is None or target not in FLOATS:
    counts = _kind_of_counts(atom)
    kind = counts._replace(dtype=target, neutral=counts.neutral and target == FLOAT32)
    rewriter.write(eqn, [rewriter.read(atom, eqn)], [kind if target in FLOATS else None])
    if target in FLOATS:
      rewriter.values[var].counted = not counts.neutral
    return
  if dtype_of(atom) != target:  # Else only the weak type goes.
    old, neutral = value, value.kind.neutral and target == FLOAT32
    value = Value(old.atom, Kind(target, neutral, old.kind.parameter), stored=old.atom)
    if target != FLOAT32 or FLOAT32 in old.views:
      # A cast to low precision happens here for all; one to float32 where float32 is read.
      value.atom = rewriter.view(old, target, eqn)
  rewriter.values[var] = value


def _kind_of_counts(atom: Atom) -> Kind:
  """Returns the kind of what is no float, once it becomes float32."""
  # Low precision cannot hold every index or count; of a mask it holds both numbers.
  mask = dtype_of(atom) == np.bool_
  return Kind(FLOAT32, mask or isinstance(atom, Literal), numbers=(0.0, 1.0) if mask else None)


# Matmuls.


def _matmul(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, place: Place, half: DType) -> None:
  """Writes a matmul or convolution, in low precision: what it returns is low, and at rest."""
  kinds, readers = [v.kind for v in values if v is not None], rewriter.consumers(eqn)
  # Of floats and integers the matmul itself makes floats. Complex numbers and float64 have no kind.
  integers = [v for v in eqn.invars[:2] if not jnp.issubdtype(aval_of(v).dtype, jnp.inexact)]
  kinds += map(_kind_of_counts, integers) if kinds else ()
  multiplies = facts_of(eqn) is OUTER_PRODUCT and not any(k.is_low for k in kinds)
  data, alone = any(k.is_data for k in kinds), all(k.is_data or k.numbers for k in kinds) and kinds
  # What only decides, as a comparison or an index, has no gradient, and a rounding may change it.
  decides = bool(readers & By.UNROUNDED) and not readers & ~By.DECISIONS
  positions = alone and (readers & By.INDEX or decides or not data)
  # Linear algebra multiplies a rounding by a condition number.
  algebra = readers & By.ALGEBRA or any(k.solved for k in kinds)
  named = rewriter.explained(eqn, "low", "positions, angles, indices or linear algebra")
  if (multiplies and readers & By.HELD) or positions or algebra:
    return rewriter.untouched(named)
  # By hand JAX promotes activations to data, while a layer casts data to its own dtype.
  promoted = readers & By.ROUNDED and data and not any(k.parameter for k in kinds)
  chosen = decides and readers & By.INDEX and not all(k.rests for k in kinds)
  if (chosen or promoted or (data and readers & By.ANGLE)) and dtype_of(eqn.outvars[0]) == FLOAT32:
    operands = [rewriter.unrounded(atom, eqn) for atom in eqn.invars]
    return rewriter.write(named, operands, [Kind(half, held=True)])
  by_hand = "its operands are inputs and constants: by hand float32"
  eqn = rewriter.explained(eqn, "float32", by_hand) if alone else eqn
  policy, recipe = place.policy, None
  if policy is not None and policy.matmul is not None:
    recipe = recipe_of(policy.matmul)
    if (reason := why_in_half(eqn, values, recipe, place.scope, rewriter.settings)) is not None:
      eqn, recipe = rewriter.explained(eqn, "float8", reason), None
  if recipe is None and (FLOAT32 not in map(dtype_of, eqn.invars) or wants_precision(eqn.params)):
    return rewriter.untouched(eqn)  # The user's own choice, again.
  eqn = eqn.replace(params=rewriter.precise(eqn, eqn.params, [half] * len(eqn.invars)))
  # What leaves in float32 is the sum that the matmul has, and a bias is added to that.
  sums = recipe is None and facts_of(eqn).dtype_param is not None and bool(readers & By.CALLER)
  wide = FLOAT32 if recipe is not None else None if policy is None else policy.weight_grad_dtype
  if product := by_rule(rewriter, eqn, values, half, FLOAT32 if sums else half, wide, recipe):
    return rewriter.write(product, product.invars, [Kind(half, held=sums, widened=sums)])
  operands = [rewriter.read(atom, eqn, half) for atom in eqn.invars]
  return rewriter.write(eqn, operands, [Kind(half)], retype(eqn, half))


# All else.


def _elementwise(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, part: str, half: DType
) -> None:
  """Writes an operation that is no matmul, by the table above."""
  facts, readers = facts_of(eqn), rewriter.consumers(eqn)
  floats = [value for value in values if value is not None]
  arrays = [value for value in floats if value.kind.numbers is None]
  dtype, kind = _rule(rewriter, eqn, values, part, half, readers)
  rewriter.late |= {*eqn.outvars} if facts.role == "product" and only_float32(readers) else set()
  changes = floats and (FLOAT32 in map(dtype_of, eqn.invars)) != (dtype == FLOAT32)
  params = retype(eqn, dtype) if changes else eqn.params
  # What is computed of a parameter is no parameter; one that was moved or scaled is.
  scaled = part != "float32" and bool(arrays) and all(v.kind.parameter for v in arrays)
  if (parameter := scaled and (kind.neutral or facts.moves)) != kind.parameter:
    kind = kind._replace(parameter=parameter)

  # The rows of an embedding, say: read in low precision, the gradient of a frequent token would
  # be a sum of thousands of rows in it. So the operand is widened before: a rounding commutes.
  repeats = facts.gradient == "repeated" and not eqn.params.get("unique_indices")
  if dtype != FLOAT32 and repeats and type(eqn.invars[0]) is not Literal:
    dtype, params, kind = FLOAT32, eqn.params, kind._replace(carried=FLOAT32)
  # An operation in low precision that reads one number often adds up its derivative.
  broadcasts, shape = facts.gradient in ("added", "multiplied"), shape_of(eqn.outvars[0])
  summed = [
    dtype != FLOAT32
    and v is not None
    and (v.kind.parameter or not v.kind.neutral)
    and (shape_of(v.atom) != shape if broadcasts else facts.gradient == "chosen" and v.kind.rests)
    for v in values
  ]
  at_once = any(summed) and facts.role != "sum"
  saved = _saved_low(eqn, floats, FLOAT32 if at_once else dtype, kind, readers)
  if any(saved):
    product = saving_low(rewriter, eqn, floats, saved, kind.variable)
    return rewriter.write(product, product.invars, [kind])

  operands = [
    atom if v is None else (_repeated if repeated else Rewriter.view)(rewriter, v, dtype, eqn)
    for atom, v, repeated in zip(eqn.invars, values, summed, strict=True)
  ]
  rounds = dtype == FLOAT32 and kind.rests and kind.carried is None
  out = kind._replace(held=True) if rounds else kind
  floating = [dtype_of(v) in FLOATS for v in eqn.outvars]
  rewriter.write(eqn, operands, [out if each else None for each in floating], params)
  producer = rewriter.eqns[-1]
  for var in (v for v, each in zip(eqn.outvars, floating, strict=True) if each and rounds):
    value = rewriter.values[var]  # Rounded once for all its readers.
    rewriter.values[var] = Value(rewriter.view(value, kind.dtype, eqn), kind, unrounded=value.atom)

  # What is noted of the results.
  shared = facts.moves and any(map(rewriter.adds_gradients, eqn.invars))
  for result in (rewriter.values[v] for v in eqn.outvars if v in rewriter.values):
    result.producer = producer
    if shared and all(v.kind.rests for v in (result, *floats)):
      result.moved = eqn
    if facts.moves:
      result.unrounded = result.unrounded or next((eqn for v in floats if v.unrounded), None)
      added = all(v.kind.added for v in arrays)
      # The numbers that elements are among, if few: they are part of the key of a rewritten jaxpr.
      among = sorted({number for value in floats for number in value.kind.numbers or ()})
      numbers = None if arrays or len(among) > 8 else tuple(among)
      result.kind = result.kind._replace(added=added, numbers=numbers)
    elif facts.gradient == "added" and len(arrays) == 2:
      streams = all(v.kind.added or v.kind.neutral or v.kind.rests for v in arrays)
      result.kind = result.kind._replace(added=streams)


def _rule(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, part: str, half: DType, readers: int
) -> tuple[DType, Kind]:
  """Returns the dtype in which an operation that is no matmul runs, and the kind of its results."""
  facts = facts_of(eqn)
  if part == "half":  # No matmul, but the user has moved it to their list.
    return half, Kind(half)
  arrays = [v for v in values if v is not None and v.kind.numbers is None]
  numbers = [x for v in values if v is not None for x in v.kind.numbers or ()]
  # A buffer that low numbers are written to keeps its dtype. And `jnp.pad` passes 0 as an integer,
  # which becomes a float32 scalar inside: by hand it is cast.
  padded = eqn.primitive is pad_p and values[1] is not None and values[1].counted
  others = arrays[1:] if part == "keep" else []
  arrays = arrays[:1] if part == "keep" or padded else arrays
  deciding = [v.kind for v in arrays]

  # The kind. A mask or a coordinate times an activation is an activation.
  lows = [k for k in deciding if k.is_low]
  kind = joined(*(lows if facts.role == "product" and lows else deciding))
  kind = kind or Kind(FLOAT32, neutral=bool(numbers))  # The size of a complex number is data.
  written = joined(kind, *(v.kind for v in others)) or kind if others else kind
  if kind.neutral and not kind.is_low and written.is_low:
    return FLOAT32, Kind(half, held=True)
  if not written.is_low:  # Coordinates among features, too.
    return FLOAT32, written

  # The dtype of an operation with a low operand, and whether its result stays held in float32.
  widened = all(k.widened or k.rests for k in deciding)
  computes = facts.role is not None or facts.tests
  exact = all(is_exact(x, half) for x in numbers)
  own = dtype_of(eqn.outvars[0]) == FLOAT32  # Else the user has chosen low precision.
  sums = facts.role == "sum"
  more = facts.role == "product" or (sums and len(arrays + others) == 1)
  # A sum with a mask, which by hand JAX promotes, before a rounding to an integer.
  masked = sums and any(v is not None and v.kind.numbers and v.number is None for v in values)
  harmed = readers & By.HELD or (masked and readers & By.ROUNDED)
  dtype, held = half, bool(harmed or readers & By.FACTOR)
  if part == "float32":
    dtype = FLOAT32
  elif readers & (By.SUMMED | By.CALLER) and own and (facts.bounded or more):
    # A rounding before a sum may be all of it, and the operand knows more: of a gate near 1, say.
    # What the caller computes of a float32 result is not known.
    dtype = FLOAT32
  elif sums and exact and not harmed and all(k.rests or k.neutral for k in deciding):
    dtype = half  # A bias, as by hand: it is as large as what is rounded.
  elif computes and not all(k.rests for k in deciding):
    dtype = FLOAT32
    if facts.gradient == "multiplied" and _scaled(eqn, arrays) is not None:
      # It is as large as an activation: bfloat16 has the range for what is multiplied by it.
      held = bool(readers & (By.HELD if Kind(half).spans_float32 else By.HELD | By.FACTOR))
  elif computes and (masked or not exact):
    dtype = FLOAT32
  elif not computes:
    # Rounding commutes with a choice: a neutral operand may be rounded if the result may be.
    # The largest number of float32 is a mask: that of the compute dtype, if neither a caller gets
    # it nor a comparison, which asks for that of float32.
    chosen = [k for k in deciding if not k.rests and (readers & By.HELD or not k.neutral)]
    masks = [] if readers & (By.CALLER | By.RETURNED | By.COMPARED) else [-LARGEST, LARGEST]
    sizes = [x for v in values if v and v.number not in masks for x in v.kind.numbers or ()]
    fits = all(survives(x, half) and (is_exact(x, half) or not readers & By.HELD) for x in sizes)
    dtype = FLOAT32 if chosen or not fits else half
  if only_float32(readers) and not facts.exact:
    dtype = FLOAT32
  wide = all(v.is_wide for v in arrays + others)
  if wide and dtype == half and (facts.exact or facts.tests):
    return FLOAT32, Kind(half, kind.neutral, carried=FLOAT32, solved=kind.solved)
  if AS_GIVEN in rewriter.place(eqn).scope:
    held = any(k.held for k in deciding)
  held = (held or kind.solved) and dtype == FLOAT32
  widened = held and widened and part != "float32" and exact
  return dtype, Kind(half, kind.neutral, held=held, widened=widened, solved=kind.solved)


def _scaled(eqn: JaxprEqn, values: Sequence[Value]) -> int | None:
  """Returns which of two factors is an activation, and the other one number for many elements."""
  shape = shape_of(eqn.outvars[0])
  repeated = [value.is_repeated or shape_of(value.atom) != shape for value in values]
  places = [i for i, v in enumerate(values) if v.kind.is_low and not (repeated[i] or v.is_reduced)]
  return places[0] if sum(repeated) == len(places) == 1 else None


def _saved_low(
  eqn: JaxprEqn, values: Sequence[Value], dtype: DType, kind: Kind, readers: int
) -> list[DType | None]:
  """Returns in which low-precision dtype each factor in float32 is saved for the gradients."""
  facts, kinds = facts_of(eqn), [value.kind for value in values]
  reads = facts.gradient in ("multiplied", "chosen") and facts.role != "sum"
  if dtype != FLOAT32 or not (reads or facts.role == "product") or any(k.numbers for k in kinds):
    return []
  # One that is at rest has such numbers. Another one may be rounded for the gradient of a sum
  # alone, where the other factor is repeated, and only if the result is rounded in the end: else
  # the parts of the gradient may cancel. Nor if it is saved in float32 anyway.
  saved = [k.dtype if k.rests else None for k in kinds]
  exact = readers & By.DIGITS or kind.solved or not kind.is_low
  if any(saved) or len(values) != 2 or exact or (big := _scaled(eqn, values)) is None:
    return saved
  is_saved = (of := values[big].producer) and facts_of(of).gradient == "result"
  if not is_saved and (kinds[big].spans_float32 or kinds[big].added):
    saved[big] = kinds[big].dtype
  return saved


def _repeated(rewriter: Rewriter, value: Value, dtype: DType, eqn: JaxprEqn) -> Atom:
  """Returns an operand in the shape of the result, repeated in float32: so its gradients add up."""
  wide = rewriter.view(value, FLOAT32, eqn)
  aval, out, sharding = aval_of(wide), aval_of(eqn.outvars[0]), None
  new = aval.update(shape=out.shape, weak_type=False)
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
  return rewriter.cast(var, retyped(var, dtype), eqn)
