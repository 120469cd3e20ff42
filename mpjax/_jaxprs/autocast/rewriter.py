"""Writing a jaxpr in other dtypes, one equation after the other; nothing is executed.

First what an equation's parameters say of dtypes, then the consumers of each value, which are
looked up backwards before anything is written, then the rewriter itself.
"""

import collections
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import convert_element_type_p, dot_general_p, reduce_precision_p
from jax.lax import Precision

from mpjax._core.active import AUDIT
from mpjax._core.dtypes import FLOAT32, HALVES, takes
from mpjax._core.types import DType, Function, PyTree
from mpjax._jaxprs.autocast.scopes import (
  NOT_IN,
  OUTPUT,
  REGION,
  REST,
  as_written,
  dtype_marked,
  low_dtype,
  names_of,
  policy_at,
  region_of,
  scope_inside,
)
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Kind,
  Kinds,
  Scope,
  Settings,
  Value,
  cached_per_jaxpr,
  joined,
  literal_value,
)
from mpjax._jaxprs.compat import NameStack, with_scope, without_scopes
from mpjax._jaxprs.locations import PREFIX
from mpjax._jaxprs.op_lists import part_of
from mpjax._jaxprs.primitives import EqnParams, facts_of, is_higher_order
from mpjax._jaxprs.reader import (
  Atom,
  Inner,
  Program,
  cast_to,
  dtype_of,
  hides_matmul,
  holds_jaxpr,
  inner_jaxprs,
  literal_as,
  opened,
  retyped,
  walk,
  warn_not_entered,
  with_each,
)

Params = dict[str, Any]


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)`, with a precision only where the function itself asks for one.

  `jax_default_matmul_precision` is a setting for an entire process, such as TensorFloat-32 for what
  is in float32, and says nothing of one matmul. Those that are left as they are get it back.
  """
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(map(hides_matmul, walk(program))):
      return program
    if wants_precision({"precision": default_precision()}):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and this version of JAX keeps the matmuls "
  "of a jax.lax.custom_root or the like where the setting cannot be given back to them alone. So "
  "it holds for all matmuls of the function, and they run in float32. Call custom_root outside of "
  "what is autocast, or set precision= at its matmuls instead."
)


def default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return None
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]


def in_precision(eqn: JaxprEqn, precision: object) -> Params:
  """Returns the parameters of an equation with a precision for each matmul that has none.

  Jaxprs that it holds are left as they are otherwise. `precision` is not None.
  """
  params = with_each(eqn, lambda program: _program_in_precision(program, precision) or program)
  return {**params, "precision": precision} if params.get("precision", 0) is None else params


@cached_per_jaxpr
def _program_in_precision(program: Program, precision: object) -> Program | None:
  jaxpr = opened(program)
  params = [in_precision(eqn, precision) for eqn in jaxpr.eqns]
  if all(new is eqn.params for eqn, new in zip(jaxpr.eqns, params, strict=True)):
    return None  # Not the jaxpr: what is kept would keep its own key.
  eqns = [eqn.replace(params=new) for eqn, new in zip(jaxpr.eqns, params, strict=True)]
  new = jaxpr.replace(eqns=eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new


def wants_precision(params: EqnParams) -> bool:
  """Whether a matmul was asked for in a precision, or with a result, that is not the usual one."""
  result = params.get("preferred_element_type")
  if result is not None and result != np.float32:
    return True
  precision = params.get("precision")
  each = precision if isinstance(precision, tuple) else (precision,)
  return any(p is not None and p != jax.lax.Precision.DEFAULT for p in each)


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


MATMUL = 1
"""A matmul, at once or behind operations that are in neither list."""

FULL = 2
"""An operation of the float32 list, likewise."""

SUMMED = 4
"""Something that a rounding would change: a sum, a comparison, an index, a carry, an operation of
the float32 list; at once or behind multiplications and what keeps its dtype."""

UNROUNDED = 8
"""A reader for which nothing rounds the value, nor a sum with it."""

FACTOR = 16
"""A multiplication, at once or behind operations that keep a dtype: rounded, a factor may overflow.
"""

CALLER = 32
"""The caller, who asks for float32: by the `output_dtype` of a module or of the function; at once,
behind what moves elements, or behind a sum that nothing else reads. A matmul that has such a reader
returns its float32 sum, to all of them."""

RETURNED = 64
"""A caller that takes the dtype that there is, likewise."""

ANGLE = 128
"""A sine or cosine, at once or behind operations in neither list."""

INDEX = 256
"""An integer, a complex number, a sine or an opaque operation, behind matmuls too."""

ALGEBRA = 512
"""Linear algebra, at once or behind operations in neither list."""

EXACT = SUMMED | UNROUNDED
"""A comparison, an index, a carry."""

HELD = SUMMED | CALLER | RETURNED
"""All of these: a value that was computed in float32 is not rounded for them."""

DIGITS = UNROUNDED | CALLER | RETURNED
"""All of these: they get all digits of a value, or of a sum with it."""

Readers: TypeAlias = dict[Atom, int]
"""The sum of the above for each variable."""


def only_float32(readers: int) -> bool:
  """Whether operations of the float32 list read a value, and no matmul."""
  return readers & (FULL | MATMUL) == FULL


class Places:
  """Where the equations of a jaxpr are, which is in a scope itself."""

  def __init__(self, settings: Settings, scope: Scope) -> None:
    self.settings, self._scope = settings, scope
    self._by_stack: dict[int, tuple[Scope, DType | None]] = {}

  def __call__(self, eqn: JaxprEqn) -> tuple[Scope, DType | None]:
    """Returns the scope of an equation, and the compute dtype there; None where nothing changes."""
    stack = eqn.source_info.name_stack  # Alive as long as the jaxpr is, and so its id is its own.
    place = self._by_stack.get(id(stack))
    if place is None:
      scope = self._scope + names_of(stack)
      place = self._by_stack[id(stack)] = (scope, low_dtype(policy_at(scope, self.settings)))
    return place

  def inside(self, eqn: JaxprEqn) -> Scope:
    """Returns the scope of the jaxprs that an equation holds."""
    return scope_inside(self(eqn)[0], self.settings)

  def renamed(self, eqn: JaxprEqn, names: NameStack) -> JaxprEqn:
    """Returns an equation with other names, in the same place."""
    self._by_stack[id(names)] = self(eqn)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


def readers_of(jaxpr: Jaxpr, outs: Sequence[int], place: Places) -> Readers:
  """Returns the consumers of each variable.

  `outs` has the consumers of each of its results, outside.
  """
  consumers: Readers = {}

  def note(atoms: Sequence[Atom], each: Sequence[int]) -> None:
    for atom, readers in zip(atoms, each, strict=True):
      if readers and not isinstance(atom, Literal):
        consumers[atom] = consumers.get(atom, 0) | readers

  note(jaxpr.outvars, outs)
  for eqn in reversed(jaxpr.eqns):
    results = tuple(consumers.get(v, 0) for v in eqn.outvars)
    if is_higher_order(eqn):
      note(eqn.invars, _of_operands(eqn, results, place))
    else:
      note(eqn.invars, (_of_operation(eqn, results, place),) * len(eqn.invars))
  return consumers


def _of_operation(eqn: JaxprEqn, results: Sequence[int], place: Places) -> int:
  """What an operation that holds no jaxpr is to its operands."""
  behind, (scope, half), facts = 0, place(eqn), facts_of(eqn)
  for var, readers in zip(eqn.outvars, results, strict=True):
    counts = EXACT if facts.tests else EXACT | INDEX
    behind |= readers if dtype_of(var) in FLOATS else counts
  if eqn.primitive is reduce_precision_p:
    leaving = dtype_marked(scope, OUTPUT)
    if dtype_marked(scope, REST) is not None:
      return CALLER if behind & CALLER else behind & MATMUL
    if leaving is not None:
      return CALLER if leaving == FLOAT32 else behind & MATMUL
  part = part_of(eqn, place.settings.ops)
  exact = wants_precision(eqn.params) and FLOAT32 in map(dtype_of, eqn.invars)
  if half is None or eqn.params.get("out_dtype") is not None or (part == "half" and exact):
    return FULL | EXACT
  if part == "half":
    # One that linear algebra reads is in float32, and so reads all digits of its operands.
    return MATMUL | behind & INDEX | (EXACT if behind & ALGEBRA else 0)
  if eqn.primitive is convert_element_type_p or part in ("promote", "keep"):
    rounded = eqn.primitive is convert_element_type_p and eqn.params["new_dtype"] != FLOAT32
    if rounded and dtype_of(eqn.outvars[0]) in FLOATS:
      return behind & MATMUL  # A cast of the user's.
    if facts.moves or eqn.primitive is convert_element_type_p:
      return behind
    if facts.role == "sum" and behind & ~SUMMED == CALLER:
      return CALLER | SUMMED
    returned = RETURNED if behind & CALLER else 0
    return behind & ~CALLER | returned | _ROLES.get(facts.role, 0)
  return FULL | EXACT | _ROLES.get(facts.role, INDEX if part == "opaque" else 0)


_ROLES: Mapping[str | None, int] = {
  "sum": SUMMED,
  "product": FACTOR,
  "angle": ANGLE | INDEX,
  "linear algebra": ALGEBRA | INDEX,
}


def _of_operands(eqn: JaxprEqn, outs: tuple[int, ...], place: Places) -> Sequence[int]:
  """What an equation that holds jaxprs is to each operand."""
  inners = inner_jaxprs(eqn)
  if not inners or any(inner.operands is None for inner in inners):
    return (FULL | EXACT | _ROLES.get(facts_of(eqn).role, INDEX),) * len(eqn.invars)
  each, inside = [0] * len(eqn.invars), (place.settings, place.inside(eqn))
  for inner in inners:
    results = outs if inner.returns else (EXACT,) * len(inner.jaxpr.outvars)
    if inner.carry:
      results = of_loop(inner, results, *inside)
    readers = of_inputs(inner.jaxpr, results, *inside)
    for i, more in zip(inner.operands or (), readers, strict=True):
      each[i] |= more
  return each


def of_loop(
  body: Inner, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[int, ...]:
  """Returns the consumers of the results of a loop's body, the next iteration among them."""
  carry = body.carry
  first = (readers | EXACT for readers in outs[: len(carry)])
  outs = (*first, *outs[len(carry) :])
  while True:
    carried = of_inputs(body.jaxpr, outs, settings, scope)[carry.start : carry.stop]
    again = tuple(a | b for a, b in zip(outs, carried, strict=False)) + outs[len(carry) :]
    if again == outs:
      return outs
    outs = again


@cached_per_jaxpr
def of_inputs(
  jaxpr: Jaxpr, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[int, ...]:
  """Returns the consumers of the arguments of a jaxpr, from those of its results."""
  readers = readers_of(jaxpr, outs, Places(settings, scope))
  return tuple(readers.get(v, 0) for v in jaxpr.invars)


class Rewritten(NamedTuple):
  """A jaxpr as it is now, and the kinds of its results.

  `closed` is the same, closed over no constants; None if it has some. JAX compiles an object once,
  and an equal one again.
  """

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None


class Rewriter:
  """The rewriting of one jaxpr; those inside of its equations are rewritten by others.

  Fields:
    settings: what was asked for.
    readers: the consumers of each variable, see `readers_of`.
    shared: the variables that are read more than once.
    eqns: what is written so far.
    values: the floating values by the variables that held them. Variables of other dtypes stay.
  """

  def __init__(self, jaxpr: Jaxpr, settings: Settings, scope: Scope, outs: Sequence[int]) -> None:
    self.settings = settings
    self.place = Places(settings, scope)
    self.readers = readers_of(jaxpr, outs, self.place)
    operands = (v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    self.shared = {v for v, count in collections.Counter(operands).items() if count > 1}
    self.eqns: list[JaxprEqn] = []
    self.values: dict[Var, Value] = {}
    self._names: dict[int, NameStack] = {}

  # Values.

  def define(self, var: Var, kind: Kind, *, recast: bool = False) -> Var:
    """Notes what a variable is from now on, and returns the variable of the dtype that it has."""
    # A variable that keeps its dtype stays, and so do the equations that are left as they are.
    atom = var if kind.variable == dtype_of(var) else retyped(var, kind.variable)
    self.values[var] = Value(atom, kind._replace(carried=None), recast and kind.neutral)
    return atom

  def value(self, atom: Atom) -> Value | None:
    """Returns what is known of a floating operand; None for everything else."""
    dtype = dtype_of(atom)
    if isinstance(atom, Literal):
      return literal_value(atom) if dtype in FLOATS else None
    value = self.values.get(atom)
    if value is None and dtype is not None and dtype in HALVES:  # A cast of the user's.
      value = self.values[atom] = Value(atom, Kind(dtype))
    return value

  def kind(self, atom: Atom) -> Kind | None:
    """Returns the kind of a floating operand, as it is held."""
    value = self.value(atom)
    return None if value is None else value.kind

  def read(self, atom: Atom, eqn: JaxprEqn, dtype: DType | None = None) -> Atom:
    """Returns a floating operand in `dtype`, None for the one that it is held in."""
    value = self.value(atom)
    return atom if value is None else self.view(value, dtype or value.kind.current, eqn)

  def view(self, value: Value, dtype: DType, eqn: JaxprEqn | None) -> Atom:
    """Returns what holds a value in `dtype`, after a cast if need be."""
    if dtype_of(value.atom) == dtype:
      return value.atom
    if isinstance(value.atom, Literal):
      return literal_as(value.atom, dtype)
    view = None if value.views is None else value.views.get(dtype)
    if view is not None:
      return view
    if value.moved is not None and dtype == FLOAT32:
      # A cast commutes with a move. Of all float32 readers of what was moved there is one cast, so
      # their gradients, which may cancel, are added before they are rounded: `v[1:] - v[:-1]`.
      moved = value.moved
      operands = [self.read(atom, moved, FLOAT32) for atom in moved.invars]
      results = [self.values[v] for v in moved.outvars]
      outs = [retyped(one.atom, FLOAT32) for one in results]
      self.eqns.append(moved.replace(invars=operands, outvars=outs))
      for one, out in zip(results, outs, strict=True):
        one.views = {**(one.views or {}), FLOAT32: out}
      return (value.views or {})[FLOAT32]
    producer, number = value.producer, value.number
    if producer is not None and number is not None:
      # The array is filled with the number in another dtype, as by hand: with a cast of the float32
      # array a mask of the size of attention's logits would be in memory twice.
      (scalar, *sizes), (var,) = producer.invars, producer.outvars
      view, filled = retyped(var, dtype), literal_as(scalar, dtype, number)
      self.eqns.append(producer.replace(invars=[filled, *sizes], outvars=[view]))
    else:
      view = self.cast(value.atom, retyped(value.atom, dtype), eqn)
    # Three casts of one weight, for the projections of attention: their gradients are cast to
    # float32 one by one and then added. With one cast for all, they would be added in bfloat16.
    if not value.recast:
      value.views = {**(value.views or {}), dtype: view}
    return view

  def cast(self, atom: Atom, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, instead of an equation that reads it."""
    self.eqns.append(cast_to(var, atom, None if eqn is None else self.shown(eqn)))
    return var

  def shown(self, eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation as a profile is to show it, without our marks, and from the same line."""
    place, stack = self.place(eqn), eqn.source_info.name_stack
    names = self._names.get(id(stack))
    if names is None:
      if AUDIT.value is None:
        names = without_scopes(stack, PREFIX)
      else:
        # What an audit reads.
        region = REGION + region_of(policy_at(place[0], self.settings))
        names = with_scope(without_scopes(stack, REGION), region)
      self._names[id(stack)] = names
    if names is stack:
      return eqn
    return self.place.renamed(eqn, names)

  def explained(self, eqn: JaxprEqn, precision: str, reason: str) -> JaxprEqn:
    """Returns a matmul that says, where an audit reads it, why it is not in a precision."""
    if AUDIT.value is None:
      return eqn
    names = with_scope(eqn.source_info.name_stack, NOT_IN[precision] + reason)
    self._names[id(names)] = names
    return self.place.renamed(eqn, names)

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    params: dict[str, Any] | None = None,
    *,
    recast: bool = False,
  ) -> None:
    """Writes an equation with new operands, results of these kinds, and perhaps new parameters.

    A neutral result is `recast` if it is a parameter that was moved or scaled.
    """
    outs = [
      v if kind is None else self.define(v, kind, recast=recast)
      for v, kind in zip(eqn.outvars, kinds, strict=True)
    ]
    params = self.precise(eqn, eqn.params if params is None else params, map(dtype_of, operands))
    self.eqns.append(eqn.replace(invars=list(operands), outvars=outs, params=params))

  def precise(
    self, eqn: JaxprEqn, params: dict[str, Any], dtypes: Iterable[DType | None]
  ) -> dict[str, Any]:
    """Returns parameters with a precision, if a matmul, of operands in `dtypes` now, names none."""
    if params.get("precision", 0) is not None:
      return params
    now, default = [*dtypes], self.settings.precision
    policy = policy_at(self.place(eqn)[0], self.settings)
    asked = None if policy is None else policy.precision
    # As JAX has it: of both operands, or an algorithm for both, which is for few dtypes.
    if isinstance(asked, Precision):
      return {**params, "precision": (asked, asked)}
    if asked and eqn.primitive is dot_general_p and all(takes(asked, dtype) for dtype in now):
      return {**params, "precision": asked}
    # `jax_default_matmul_precision` was taken away for the trace, see `traced`. A matmul whose
    # operands keep their dtype gets it back: "highest" is about what runs in float32.
    left_as_it_is = default is not None and now[0] == dtype_of(eqn.invars[0])
    return {**params, "precision": default} if left_as_it_is else params

  def untouched(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, in the dtypes that it was traced with.

    Results are of the kind of the operands: without a floating one data, but for random numbers.
    """
    operands = [self.read(atom, eqn, dtype_of(atom)) for atom in eqn.invars]
    default, params = self.settings.precision, None
    if default is not None and holds_jaxpr(eqn.params.values()):
      params = in_precision(eqn, default)
    facts = facts_of(eqn)
    kind = joined(map(self.kind, eqn.invars)) or Kind(FLOAT32, facts.neutral)
    solved = kind.solved or (facts.role == "linear algebra" and not kind.neutral)
    kind = kind._replace(held=kind.is_low, solved=solved)
    own: dict[DType | None, Kind] = {d: Kind(d) for d in FLOATS}
    if not as_written(self.place(eqn)[0], self.settings):
      own[FLOAT32] = kind
    self.write(eqn, operands, [own.get(dtype_of(v)) for v in eqn.outvars], params)

  def not_entered(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, since it is not known how it runs the jaxprs that it holds."""
    instead = "It runs as it was traced, in the dtypes that it was traced with."
    warn_not_entered(eqn, "mpjax.autocast", instead)
    self.untouched(eqn)

  def readers_of(self, eqn: JaxprEqn) -> int:
    """The consumers of the floating results of an equation."""
    each = (self.readers.get(v, 0) for v in eqn.outvars if dtype_of(v) in FLOATS)
    return functools.reduce(operator.or_, each, 0)
