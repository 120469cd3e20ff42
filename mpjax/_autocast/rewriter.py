"""Writing a jaxpr in other dtypes, one equation after the other; nothing is executed.

First the consumers of each value, looked up backwards before anything is written, then the
rewriter itself, and at the end what an equation's parameters say of dtypes and precisions.
"""

import collections
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import convert_element_type_p, dot_general_p, reduce_precision_p
from jax.lax import Precision

from mpjax._autocast.scopes import NOT_IN, REGION, Place, names_of, place_at, region_of
from mpjax._autocast.values import FLOATS, Kind, Kinds, Scope, Settings, Value, joined, numbers_of
from mpjax._core.types import FLOAT32, HALVES, DType, Function, PyTree
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.compat import NameStack, with_scope, without_scopes
from mpjax._jaxpr.locations import PREFIX
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import EqnParams, facts_of, is_higher_order
from mpjax._jaxpr.reader import (
  Atom,
  Inner,
  Program,
  aval_of,
  cast_to,
  dtype_of,
  hides_matmul,
  inner_jaxprs,
  literal_as,
  opened,
  retyped,
  walk,
  warn_not_entered,
  with_each,
)
from mpjax._policy.active import AUDIT
from mpjax._policy.dtypes import takes

Params = dict[str, Any]

# The consumers of values.


class By:
  """What may read a value, each a bit: at once, or behind operations that are in neither list.

    MATMUL, FULL: a matmul; an operation of the float32 list.
    SUMMED: what a rounding would change: a sum, a comparison, an index, a carry, the float32 list;
      at once or behind multiplications and what keeps its dtype.
    UNROUNDED: a reader for which nothing rounds the value, nor a sum with it.
    FACTOR: a multiplication, at once or behind what keeps a dtype: rounded, a factor may overflow.
    CALLER: a caller that asks for float32, by an `output_dtype`; at once, behind what moves
      elements, or behind a sum that nothing else reads. A matmul returns its float32 sum to it.
    RETURNED: a caller that takes the dtype that there is, likewise.
    ANGLE, COMPARED: what takes an angle, also behind the float32 list; a comparison, behind what
      keeps a dtype.
    INDEX: an integer, or a step to one, a complex number, a sine, linear algebra, an opaque one;
      behind matmuls too.
    ROUNDED: what rounds to an integer, behind matmuls too: a place on a grid.
    ALGEBRA: linear algebra, behind operations of the float32 list too.

  Several of them: EXACT is a comparison, an index, a carry; UNKNOWN what may be any of these, and
  read the number as well. For HELD a value that was computed in float32 is not rounded, and DIGITS
  get all digits of a value, or of a sum with it. What has no reader but DECISIONS has no gradient.
  """

  MATMUL, FULL, SUMMED, UNROUNDED, FACTOR, CALLER, RETURNED, ANGLE, INDEX, ALGEBRA, COMPARED = (
    1 << bit for bit in range(11)
  )
  ROUNDED = 1 << 11
  EXACT = SUMMED | UNROUNDED
  UNKNOWN = EXACT | RETURNED | COMPARED
  HELD = SUMMED | CALLER | RETURNED
  DIGITS = UNROUNDED | CALLER | RETURNED
  DECISIONS = EXACT | FACTOR | INDEX | COMPARED | ROUNDED


_ROLES: Mapping[str | None, int] = {
  "sum": By.SUMMED,
  "product": By.FACTOR,
  "angle": By.ANGLE | By.INDEX,
  "linear algebra": By.ALGEBRA | By.INDEX,
}


def only_float32(readers: int) -> bool:
  return readers & (By.FULL | By.MATMUL) == By.FULL


class Places:
  """Where the equations of a jaxpr are, which is in a scope itself."""

  def __init__(self, settings: Settings, scope: Scope) -> None:
    self.settings, self._scope = settings, scope
    self._by_stack: dict[int, tuple[NameStack, Place]] = {}

  def __call__(self, eqn: JaxprEqn) -> Place:
    """Returns the scope of an equation, and what applies there."""
    stack = eqn.source_info.name_stack  # Kept, so that its id is its own.
    if id(stack) not in self._by_stack:
      self._by_stack[id(stack)] = stack, place_at(self._scope + names_of(stack), self.settings)
    return self._by_stack[id(stack)][1]


@cached_per_jaxpr
def readers_of(
  jaxpr: Jaxpr, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[Mapping[Atom, int], Places]:
  """Returns the consumers of each variable, and the places; `outs` are those of each result."""
  consumers, place = dict[Atom, int](), Places(settings, scope)

  def note(atoms: Sequence[Atom], each: Sequence[int]) -> None:
    for atom, readers in zip(atoms, each, strict=True):
      if readers and not isinstance(atom, Literal):
        consumers[atom] = consumers.get(atom, 0) | readers

  note(jaxpr.outvars, outs)
  for eqn in reversed(jaxpr.eqns):
    results = tuple([consumers.get(v, 0) for v in eqn.outvars])
    if is_higher_order(eqn):
      note(eqn.invars, _of_operands(eqn, results, place))
    else:
      note(eqn.invars, (_of_operation(eqn, results, place),) * len(eqn.invars))
  return consumers, place


def _of_operation(eqn: JaxprEqn, results: Sequence[int], places: Places) -> int:
  """What an operation that holds no jaxpr is to its operands."""
  behind, place, facts = 0, places(eqn), facts_of(eqn)
  for dtype, readers in zip(map(dtype_of, eqn.outvars), results, strict=True):
    # A complex number, or one in float64, has the digits of what it is computed from.
    has_digits = dtype is not None and dtype not in FLOATS and jnp.issubdtype(dtype, jnp.inexact)
    other = (By.UNKNOWN if has_digits else By.EXACT) | (By.COMPARED if facts.tests else By.INDEX)
    behind |= readers if dtype in FLOATS else other
  if eqn.primitive is reduce_precision_p:
    if place.rest is not None:
      # A consumer of an angle looks through the end of a layer: that of data is in float32.
      return By.CALLER if behind & By.CALLER else behind & (-1 if behind & By.ANGLE else By.MATMUL)
    if place.output is not None:
      return By.CALLER if place.output == FLOAT32 else behind & By.MATMUL
  part = part_of(eqn, places.settings.ops)
  asked = part == "half" and wants_precision(eqn.params) and FLOAT32 in map(dtype_of, eqn.invars)
  if place.half is None or eqn.params.get("out_dtype") is not None or asked:
    return By.FULL | By.EXACT
  if part == "half":
    # One that linear algebra reads is in float32, and so reads all digits of its operands.
    return By.MATMUL | behind & (By.INDEX | By.ROUNDED) | (By.EXACT if behind & By.ALGEBRA else 0)
  own = _ROLES.get(facts.role, 0) | (By.INDEX if part == "opaque" else 0)
  own |= By.INDEX | By.ROUNDED if facts.jumps else 0
  if eqn.primitive is convert_element_type_p or part in ("promote", "keep"):
    casts = eqn.primitive is convert_element_type_p
    if casts and eqn.params["new_dtype"] in HALVES:
      return behind & By.MATMUL  # A cast of the user's.
    if facts.moves or casts:
      integer = casts and jnp.issubdtype(eqn.params["new_dtype"], jnp.integer)
      return behind | By.ROUNDED if integer else behind
    if facts.role == "sum" and not facts.jumps and behind & ~By.SUMMED == By.CALLER:
      return By.CALLER | By.SUMMED
    returned = By.RETURNED if behind & By.CALLER else 0
    return behind & ~By.CALLER | returned | own
  # A matmul sees linear algebra behind these, as of a kernel matrix, and angles, as of a distance.
  return By.FULL | By.EXACT | behind & (By.ALGEBRA | By.ANGLE) | own


def _of_operands(eqn: JaxprEqn, outs: tuple[int, ...], place: Places) -> Sequence[int]:
  """What an equation that holds jaxprs is to each operand."""
  inners = inner_jaxprs(eqn)
  if not inners or any(inner.operands is None for inner in inners):
    return (By.FULL | By.EXACT | _ROLES.get(facts_of(eqn).role, By.INDEX),) * len(eqn.invars)
  each, inside = [0] * len(eqn.invars), (place.settings, place(eqn).inside)
  for inner in inners:
    results = outs if inner.returns else (By.UNKNOWN,) * len(inner.jaxpr.outvars)
    if inner.carry:
      results = of_loop(inner, results, *inside)
    readers, _ = readers_of(inner.jaxpr, results, *inside)
    for i, v in zip(inner.operands or (), inner.jaxpr.invars, strict=True):
      each[i] |= readers.get(v, 0)
  return each


def of_loop(
  body: Inner, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[int, ...]:
  """Returns the consumers of the results of a loop's body, the next iteration among them."""
  carry = body.carry
  outs = (*(readers | By.EXACT for readers in outs[: len(carry)]), *outs[len(carry) :])
  while True:
    readers, _ = readers_of(body.jaxpr, outs, settings, scope)
    back = [readers.get(v, 0) for v in body.jaxpr.invars[carry.start : carry.stop]]
    again = tuple(a | b for a, b in zip(outs, back, strict=False)) + outs[len(carry) :]
    if again == outs:
      return outs
    outs = again


# The rewriter.


class Rewritten(NamedTuple):
  """A jaxpr as it is now, and the kinds of its results."""

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None  # None if it has constants. JAX compiles an equal object again.


class Rewriter:
  """The rewriting of one jaxpr; those inside of its equations are rewritten by others."""

  def __init__(self, jaxpr: Jaxpr, settings: Settings, scope: Scope, outs: tuple[int, ...]) -> None:
    self.settings = settings
    self.readers, self.place = readers_of(jaxpr, tuple(outs), settings, scope)
    operands = (v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    self.shared: set[Atom] = {v for v, count in collections.Counter(operands).items() if count > 1}
    self.eqns: list[JaxprEqn] = []  # what is written so far
    self.late: set[Var] = set()  # multiplications whose results float32 operations alone read
    self.activations: dict[Hashable, JaxprEqn] = {}
    # The floating ones, by the variables that held them. Variables of other dtypes stay.
    self.values: dict[Var, Value] = {}

  def define(self, var: Var, kind: Kind) -> Var:
    """Notes what a variable is from now on, and returns the variable of the dtype that it has."""
    # A variable that keeps its dtype stays, and so do the equations that are left as they are.
    atom = var if kind.variable == dtype_of(var) else retyped(var, kind.variable)
    plain = kind.carried is None and not kind.paired
    self.values[var] = Value(atom, kind if plain else kind._replace(carried=None, paired=False))
    return atom

  def value(self, atom: Atom) -> Value | None:
    """Returns what is known of a floating operand; None for everything else."""
    if not isinstance(atom, Literal):
      return self.values.get(atom)
    if dtype_of(atom) not in FLOATS:
      return None
    return Value(atom, Kind(aval_of(atom).dtype, neutral=True, numbers=numbers_of(atom.val)))

  def kind(self, atom: Atom) -> Kind | None:
    return (value := self.value(atom)) and value.kind

  def consumers(self, eqn: JaxprEqn) -> int:
    """Returns the consumers of the floating results of an equation."""
    readers = 0
    for v in eqn.outvars:
      readers |= self.readers.get(v, 0) if dtype_of(v) in FLOATS else 0
    return readers

  def adds_gradients(self, atom: Atom) -> bool:
    """Whether an operand is read twice, or moved, and something in float32 has a gradient by it."""
    value = None if isinstance(atom, Literal) else self.values.get(atom)
    if value is None or not (atom in self.shared or value.moved):
      return False
    readers = self.readers.get(atom, 0)
    return bool(readers & (By.FULL | By.HELD) and readers & ~By.DECISIONS)

  def read(self, atom: Atom, eqn: JaxprEqn, dtype: DType | None = None) -> Atom:
    """Returns a floating operand in `dtype`, None for the one that it is held in."""
    value = self.value(atom)
    return atom if value is None else self.view(value, dtype or value.kind.current, eqn)

  def view(self, value: Value, dtype: DType, eqn: JaxprEqn | None) -> Atom:
    """Returns what holds a value in `dtype`, after a cast if need be, for an equation."""
    if dtype_of(value.atom) == dtype:
      return value.atom
    if isinstance(value.atom, Literal):
      return literal_as(value.atom, dtype)
    if dtype in value.views:
      return value.views[dtype]
    if value.moved is not None and dtype == FLOAT32:
      # A cast commutes with a move. Of all float32 readers of what was moved there is one cast, so
      # their gradients, which may cancel, are added before they are rounded: `v[1:] - v[:-1]`.
      for v, out in self._moved_wide(value.moved, self.read):
        v.views[FLOAT32] = out
      return value.views[FLOAT32]
    view, producer, number = retyped(value.atom, dtype), value.producer, value.number
    if producer is not None and number is not None:
      # The array is filled with the number in another dtype, as by hand: with a cast of the float32
      # array a mask of the size of attention's logits would be in memory twice.
      invars = [literal_as(producer.invars[0], dtype, number), *producer.invars[1:]]
      self.eqns.append(producer.replace(invars=invars, outvars=[view]))
    else:
      self.cast(value.atom, view, eqn)
    # Three casts of one weight, for the projections of attention: their gradients are cast to
    # float32 one by one and then added. With one cast for all, they would be added in bfloat16.
    # Likewise of data that is computed, as an input is with learned positions.
    if not (value.is_parameter or (value.kind.is_data and value.producer)):
      value.views[dtype] = view
    return view

  def unrounded(self, atom: Atom, eqn: JaxprEqn, dtype: DType | None = FLOAT32) -> Atom:
    """Returns an operand in `dtype`; in float32 as it was before it was rounded for its readers."""
    value = self.value(atom) if dtype == FLOAT32 else None
    if value is None or value.unrounded is None:
      return self.read(atom, eqn, dtype)
    moves = [value.unrounded] if isinstance(value.unrounded, JaxprEqn) else []
    for moved in moves:  # More are added. They may be more than Python's stack is deep.
      before = [x.unrounded for x in map(self.value, moved.invars) if x is not None]
      moves += [x for x in before if isinstance(x, JaxprEqn) and x not in moves]
    for moved in reversed(moves):
      for v, out in self._moved_wide(moved, self.unrounded):
        v.unrounded = out
    return cast(Atom, value.unrounded)

  def _moved_wide(self, eqn: JaxprEqn, read: Callable[..., Atom]) -> list[tuple[Value, Var]]:
    """Writes what moves numbers once more, in float32; returns its results, and the variables."""
    operands, values = [read(atom, eqn, FLOAT32) for atom in eqn.invars], self.values
    outs = [retyped(values[v].atom, FLOAT32) for v in eqn.outvars]
    self.eqns.append(eqn.replace(invars=operands, outvars=outs))
    return [(values[v], out) for v, out in zip(eqn.outvars, outs, strict=True)]

  def cast(self, atom: Atom, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, for an equation that reads it."""
    self.eqns.append(cast_to(var, atom, eqn))
    return var

  def explained(self, eqn: JaxprEqn, precision: str, reason: str) -> JaxprEqn:
    """Returns a matmul that says, where an audit reads it, why it is not in a precision."""
    names = with_scope(eqn.source_info.name_stack, NOT_IN[precision] + reason)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

  def shown(self) -> list[JaxprEqn]:
    """Returns what was written as a profile is to show it: without marks, but for an audit's."""
    names: dict[int, NameStack] = {}
    eqns: list[JaxprEqn] = []
    # A late one right before its first consumer: of a value whose square has a mean too, the
    # mean's gradient, one number for many elements, is added last: XLA for GPUs reads less then.
    late = {self.values[v].atom for v in self.late}
    order, first = [*range(len(self.eqns))], dict[Atom, int]()
    for i, eqn in reversed([*enumerate(self.eqns)] if late else []):
      # What is late is the one result of its equation.
      order[i] = first.get(eqn.outvars[0], i) if eqn.outvars else i
      for v in eqn.invars:
        if not isinstance(v, Literal) and v in late:
          first[v] = min(order[i], first.get(v, order[i]))
    for i in sorted(range(len(order)), key=order.__getitem__):
      eqn = self.eqns[i]
      stack = eqn.source_info.name_stack
      if id(stack) not in names:
        region = AUDIT.value is not None and REGION + region_of(self.place(eqn).policy)
        names[id(stack)] = with_scope(stack, region) if region else without_scopes(stack, PREFIX)
      info = eqn.source_info.replace(name_stack=names[id(stack)])
      eqns.append(eqn if names[id(stack)] is stack else eqn.replace(source_info=info))
    return eqns

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    params: Params | None = None,
  ) -> None:
    """Writes an equation with new operands, results of these kinds, and perhaps new parameters."""
    pairs = zip(eqn.outvars, kinds, strict=True)
    outs = [v if kind is None else self.define(v, kind) for v, kind in pairs]
    params = self.precise(eqn, eqn.params if params is None else params, map(dtype_of, operands))
    self.eqns.append(eqn.replace(invars=list(operands), outvars=outs, params=params))

  def precise(self, eqn: JaxprEqn, params: Params, dtypes: Iterable[DType | None]) -> Params:
    """Returns parameters with the precision of the policy, if a matmul of `dtypes` names none."""
    policy = self.place(eqn).policy if params.get("precision", 0) is None else None
    if policy is None or (asked := policy.precision) is None:
      return params
    # As JAX has it: of both operands, or an algorithm for both, which is for few dtypes.
    if isinstance(asked, Precision):
      return {**params, "precision": (asked, asked)}
    takes_it = eqn.primitive is dot_general_p and all(takes(asked, dtype) for dtype in dtypes)
    return {**params, "precision": asked} if takes_it else params

  def untouched(self, eqn: JaxprEqn, inners: tuple[Inner, ...] | None = ()) -> None:
    """Writes an equation as it was; its results are of the kind of the operands, if it has some."""
    unknown = part_of(eqn, self.settings.ops) is None and inner_jaxprs(eqn) is None
    if (unknown or inners is None) and self.place(eqn).half is not None:
      text = "It runs as it was traced, in the dtypes that it had."
      warn_not_entered(eqn, "mpjax.autocast", text)
    operands = [self.unrounded(atom, eqn, dtype_of(atom)) for atom in eqn.invars]
    facts = facts_of(eqn)
    kind = joined(*map(self.kind, eqn.invars)) or Kind(FLOAT32, facts.neutral)
    solved = kind.solved or (facts.role == "linear algebra" and not kind.neutral)
    kind = kind._replace(parameter=False, held=kind.is_low, solved=solved)
    own: dict[DType | None, Kind] = {d: Kind(d) for d in FLOATS}
    own |= {} if self.place(eqn).as_written else {FLOAT32: kind}
    self.write(eqn, operands, [own.get(dtype_of(v)) for v in eqn.outvars])


# What parameters say of dtypes and precisions.


def retype(eqn: JaxprEqn, dtype: DType) -> Params:
  """Returns the parameters that an equation has when it computes in `dtype`."""
  name, params = facts_of(eqn).dtype_param, eqn.params
  if name is None or params[name] is None:
    return params
  if name != "update_jaxpr":
    return {**params, name: dtype}
  # The operation on two numbers that combines an update with what is there.
  jaxpr, scalar = params["update_jaxpr"], jax.ShapeDtypeStruct((), dtype)
  combine = functools.partial(eval_jaxpr, jaxpr, params["update_consts"])
  new = jax.make_jaxpr(combine)(*[scalar] * len(jaxpr.invars))
  return {**params, "update_jaxpr": new.jaxpr, "update_consts": tuple(new.consts)}


@functools.cache
def asked_precision(precision: object) -> str:
  """Returns what asks for more than the usual precision, in an equation or a setting; else ""."""
  each = precision if isinstance(precision, tuple) else (precision,)
  names = dict.fromkeys(str(x).rpartition(".")[2].lower() for x in each)
  return ", ".join(x for x in names if x not in ("none", "default", "fastest", "bfloat16"))


def wants_precision(params: EqnParams) -> bool:
  """Whether a matmul was asked for in a precision, or with a result, that is not the usual one."""
  result, asked = params.get("preferred_element_type"), asked_precision(params.get("precision"))
  return asked != "" or (result is not None and result != FLOAT32)


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)`, with a precision only where the function itself asks for one.

  `jax_default_matmul_precision` says nothing of one matmul. What stays in float32 gets it back.
  """
  if _default_precision() is None:
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(map(hides_matmul, walk(program))):
      return program
    if asked_precision(_default_precision()):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and this version of JAX keeps the matmuls "
  "of a jax.lax.custom_root or the like where the setting cannot be given back to them alone. So "
  "it holds for all matmuls of the function, and they run in float32. Call custom_root outside of "
  "what is autocast, or set precision= at its matmuls instead."
)


def _default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return None
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]


def in_default(jaxpr: Jaxpr) -> Jaxpr:
  """Returns a rewritten jaxpr with `jax_default_matmul_precision` for what runs in float32."""
  precision = _default_precision()
  return jaxpr if precision is None else cast(Jaxpr, _in_precision(jaxpr, precision) or jaxpr)


@cached_per_jaxpr
def _in_precision(program: Program, precision: object) -> Program | None:
  """Returns a jaxpr with a precision; None, not the jaxpr, which would be kept, if it stays."""
  eqns = opened(program).eqns
  params = [with_each(eqn, lambda each: _in_precision(each, precision) or each) for eqn in eqns]
  for i, eqn in enumerate(eqns):
    # Not where operands were cast: to low precision, or to the format of a recipe.
    if eqn.params.get("precision", 0) is None and aval_of(eqn.invars[0]).dtype.itemsize >= 4:
      params[i] = {**params[i], "precision": precision}
  if all(new is eqn.params for eqn, new in zip(eqns, params, strict=True)):
    return None
  eqns = [eqn.replace(params=new) for eqn, new in zip(eqns, params, strict=True)]
  new = opened(program).replace(eqns=eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new
