"""Programs inside programs: each is rewritten for the dtypes in which its operands come."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._jaxprs.autocast.custom_derivatives import Rule, with_rule
from mpjax._jaxprs.autocast.marks import REGION
from mpjax._jaxprs.autocast.powers import Powers, in_float32, powers
from mpjax._jaxprs.autocast.rewriter import Rewriter, Rewritten
from mpjax._jaxprs.autocast.scopes import marked, names_of, region
from mpjax._jaxprs.autocast.uses import HALF, RESULT, of_loop, of_operands
from mpjax._jaxprs.autocast.values import (
  Constant,
  Dtype,
  Kind,
  Scope,
  Settings,
  constants,
  dtype_of,
  kept,
)
from mpjax._jaxprs.inner_jaxprs import Inner, donated, inner_jaxprs, with_inner
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of, is_higher_order

Kinds = tuple[Kind | None, ...]


def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: Sequence[Dtype | None],
  wanted: Sequence[int],
  settings: Settings,
  scope: Scope,
  consts: Sequence[Constant] | None = None,
) -> Rewritten:
  """Returns a program rewritten.

  Args:
    jaxpr: the program.
    ins: the kinds of its arguments, None for what is no floating value of ours.
    outs: the dtypes that its results must have; None leaves the choice.
    wanted: what is wanted of its results, see `demands`.
    settings: what was asked for.
    scope: the named scopes around it.
    consts: how its constants come in; None where their values are not at hand.
  """
  self = Rewriter(jaxpr, settings, scope, wanted)
  if consts is None:
    consts = [Constant(neutral=False, once=False)] * len(jaxpr.constvars)
  for var, const in zip(jaxpr.constvars, consts, strict=True):
    if self.kind_of(var) is not None:
      self.define(var, Kind(dtype_of(var), const.neutral), scope=None, once=const.once)
  invars = [
    var if kind is None else self.define(var, kind, scope=None, once=False)
    for var, kind in zip(jaxpr.invars, ins, strict=True)
  ]
  self.given(jaxpr.invars)
  found = powers(jaxpr, settings.ops)
  done: frozenset[int] = frozenset()
  for place, eqn in enumerate(map(self.shown, jaxpr.eqns)):
    if place in found and _in_float32(self, found[place]):
      done |= found[place].places
    if is_higher_order(eqn):
      _enter(self, eqn)
    elif place not in done:
      self.first_order(eqn)
  pairs = [_result(self, *each, jaxpr) for each in zip(jaxpr.outvars, outs, strict=True)]
  results, kinds = [p[0] for p in pairs], [p[1] for p in pairs]
  new = jaxpr.replace(invars=invars, outvars=results, eqns=self.eqns)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed)


def _in_float32(self: Rewriter, found: Powers) -> bool:
  """Writes what holds powers of a half value as one equation; False if it is to be written as is.

  That is so if float32 operations read all of it, which is then in float32 anyway; and if it is one
  power that half operations read: it has to fit into half.
  """
  scope, half = self.place(found.eqns[0])
  value = None if half is None else self.value(found.root, half)
  if half is None or value is None or value.dtype != half:
    return False
  wants = [self.wanted.get(v, 0) for v in found.outs]
  if all(self.is_full(want) or (found.single and want & HALF) for want in wants):
    return False
  if any(self.place(eqn)[0] != scope for eqn in found.eqns):
    return False
  dtypes = [half if want & HALF else FLOAT32 for want in wants]
  made = in_float32(found, self.view(value, half, found.eqns[0]), dtypes)
  self.write(made, made.invars, [Kind(dtype) for dtype in dtypes])
  return True


def _result(
  self: Rewriter, atom: Any, dtype: Dtype | None, jaxpr: Jaxpr
) -> tuple[Any, Kind | None]:
  """What holds a result in `dtype`, and its kind."""
  value = self.value(atom, self.settings.compute)
  if value is None:
    return atom, None
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  dtype = dtype or value.dtype
  found = self.view(value, dtype, last)
  if dtype == atom.aval.dtype and found.aval.weak_type != atom.aval.weak_type:
    found = self.cast(found, Var(atom.aval), last)
  return found, value.kind if dtype == value.dtype else Kind(dtype)


def _inside(
  inner: Inner,
  ins: Kinds,
  outs: tuple[Dtype | None, ...],
  wanted: tuple[int, ...],
  settings: Settings,
  scope: Scope,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten."""
  values = inner.program.consts if isinstance(inner.program, ClosedJaxpr) else None
  consts = None if values is None else constants(values, settings)
  return _kept_rewrite(inner.jaxpr, ins, outs, wanted, settings, scope, consts)


_kept_rewrite = kept(rewrite)
"""The same function called twice is rewritten once, and compiled once."""


def _enter(self: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds programs."""
  scope, half = self.place(eqn)
  found = inner_jaxprs(eqn)
  if found is None:
    return self.untouched(eqn) if half is None else self.not_entered(eqn)
  rule = _RULES.get(facts_of(eqn).holds)
  if rule is None or (half is None and not _entered_inside(eqn, scope, self.settings)):
    return self.untouched(eqn)
  return rule(self, eqn, found)


def _entered_inside(eqn: JaxprEqn, scope: Scope, settings: Settings) -> bool:
  """Whether some scope inside of an equation that stays as it is has a rule of its own."""
  if settings.precision is not None:
    return True  # What is left as it is needs the precision that was taken from it.
  return any(_entered(i.jaxpr, scope, settings) for i in inner_jaxprs(eqn) or ())


@kept
def _entered(jaxpr: Jaxpr, scope: Scope, settings: Settings) -> bool:
  places = [(eqn, scope + names_of(str(eqn.source_info.name_stack))) for eqn in jaxpr.eqns]
  return any(
    region(place, settings) is not None or _entered_inside(eqn, place, settings)
    for eqn, place in places
  )


def _operands(self: Rewriter, eqn: JaxprEqn) -> tuple[list[Any], Kinds]:
  """The operands as the jaxprs inside read them, and their kinds."""
  scope, half = self.place(eqn)
  atoms, kinds = [], []
  wants = of_operands(eqn, _wanted(self, eqn), self.settings)
  for atom, want in zip(eqn.invars, wants, strict=True):
    if half is None:  # Nothing changes here, only in some scope inside.
      value = self.value(atom, self.settings.compute)
      atoms.append(self.original(atom, eqn))
      kinds.append(None if value is None else Kind(dtype_of(atom), value.neutral))
      continue
    value = self.outside(self.value(atom, half), eqn, scope, half, want)
    atoms.append(atom if value is None else self.view(value, value.dtype, eqn))
    kinds.append(None if value is None else value.kind)
  return atoms, tuple(kinds)


def _once(self: Rewriter, eqn: JaxprEqn) -> bool:
  """Whether no operand is a parameter, which a result that is as neutral would be too."""
  known = (self.value(atom, self.settings.compute) for atom in eqn.invars)
  return all(value is None or value.once for value in known)


def _wanted(self: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(self.wanted.get(v, 0) for v in eqn.outvars)


def _scope(self: Rewriter, eqn: JaxprEqn) -> Scope:
  """The scope of the inner programs. It seldom matters, and would split the cache."""
  settings, scope = self.settings, self.place(eqn)[0]
  if settings.rules or settings.precision is not None:
    return scope
  mark = marked(scope)
  return () if mark is None else (REGION + mark,)


def _replaced(old: Any, new: Rewritten) -> Any:
  if not isinstance(old, ClosedJaxpr):
    return new.jaxpr
  return ClosedJaxpr(new.jaxpr, old.consts) if old.consts else new.closed


def _call(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A program that runs once, between the operands and the results."""
  body, jaxpr = found[0].program, found[0].jaxpr
  atoms, ins = _operands(self, eqn)
  for i, gone in enumerate(donated(eqn)):
    if gone and ins[i] is not None:  # Its memory is to be taken over: that has the old size.
      atoms[i] = self.original(eqn.invars[i], eqn)
      ins = (*ins[:i], Kind(dtype_of(jaxpr.invars[i])), *ins[i + 1 :])
  outs = (None,) * len(eqn.outvars)
  new = _inside(found[0], ins, outs, _wanted(self, eqn), self.settings, _scope(self, eqn))
  params = with_inner(eqn, [_replaced(body, new)])
  self.write(eqn, atoms, new.outs, params, once=_once(self, eqn))


def _composite(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A program that a compiler may replace by a kernel: outside it has the types that this has."""
  body = found[0].program
  atoms = [self.original(atom, eqn) for atom in eqn.invars]
  ins = tuple(self.kind_of(v, neutral=True) for v in eqn.invars)
  kinds = [self.kind_of(v) for v in eqn.outvars]
  outs = tuple(None if k is None else k.dtype for k in kinds)
  new = _inside(found[0], ins, outs, _wanted(self, eqn), self.settings, _scope(self, eqn))
  self.write(eqn, atoms, kinds, with_inner(eqn, [_replaced(body, new)]))


def _custom(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A function with a rule of its own for derivatives or batches."""
  atoms, ins = _operands(self, eqn)
  settings, scope = self.settings, _scope(self, eqn)
  outs = (None,) * len(eqn.outvars)
  new = _inside(found[0], ins, outs, _wanted(self, eqn), settings, scope)

  def again(jaxpr: Jaxpr, ins: Kinds, outs: Sequence[Dtype | None]) -> Rewritten:
    return rewrite(jaxpr, ins, outs, (0,) * len(outs), settings, scope)

  made = with_rule(Rule(eqn, ins, new.outs, again), atoms, new.jaxpr)
  self.write(made, made.invars, new.outs, once=_once(self, eqn))


def _cond(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """Branches that must agree: where one returns float32, all do."""
  atoms, ins = _operands(self, eqn)
  wanted, scope = _wanted(self, eqn), _scope(self, eqn)

  def every(outs: tuple[Dtype | None, ...]) -> list[Rewritten]:
    return [_inside(b, _ins(b, ins), outs, wanted, self.settings, scope) for b in found]

  free = every((None,) * len(eqn.outvars))
  kinds = [_agreed(each, want) for want, *each in zip(wanted, *(b.outs for b in free), strict=True)]
  new = every(tuple(None if k is None else k.dtype for k in kinds))
  closed = [_replaced(b.program, n) for b, n in zip(found, new, strict=True)]
  self.write(eqn, atoms, kinds, with_inner(eqn, closed), once=_once(self, eqn))


def _agreed(kinds: Sequence[Kind | None], wanted: int) -> Kind | None:
  """The kind of a result that comes from one of several branches."""
  known = [k for k in kinds if k is not None]
  if wanted & RESULT and not wanted & HALF and any(k.dtype == FLOAT32 for k in known):
    return Kind(FLOAT32, all(k.neutral for k in known))  # An argument that may come back unchanged.
  # By name, should there be two half types.
  order = sorted(known, key=lambda k: (k.neutral, -k.dtype.itemsize, k.dtype.name))
  return order[0] if order else None


def _ins(inner: Inner, ins: Kinds) -> Kinds:
  """The kinds of the inputs of an inner jaxpr, of those of the operands of the equation."""
  return tuple(ins[place] for place in inner.operands or ())


def _loop(
  self: Rewriter, eqn: JaxprEqn, body: Inner, ins: Kinds, wanted: tuple[int, ...]
) -> tuple[Rewritten, Kinds]:
  """Rewrites the body of a loop. What it carries is half if it starts and goes on in half.

  Args:
    self: the rewriting that the loop is part of.
    eqn: the loop.
    body: its body.
    ins: the kinds of its operands.
    wanted: what is wanted of its results.

  Returns:
    The body, and the kinds of the operands, of which the carry has those it has in each iteration.
  """
  jaxpr, carry, scope = body.jaxpr, body.carry, _scope(self, eqn)
  wanted = of_loop(jaxpr, carry.start, len(carry), wanted, self.settings)
  free = (None,) * len(jaxpr.outvars)
  given = _ins(body, ins)
  state = [k if k is None else Kind(k.dtype) for k in given[carry.start : carry.stop]]
  while True:
    given = (*given[: carry.start], *state, *given[carry.stop :])
    new = _inside(body, given, free, wanted, self.settings, scope)
    back = [_wider(*each) for each in zip(state, new.outs[: len(carry)], strict=True)]
    if back == state:
      break
    state = back
  fixed = (*(None if k is None else k.dtype for k in state), *free[len(carry) :])
  new = _inside(body, given, fixed, wanted, self.settings, scope)
  kinds = dict(zip(body.operands or (), given, strict=True))
  return new, tuple(kinds.get(i, kind) for i, kind in enumerate(ins))


def _wider(state: Kind | None, handed_on: Kind | None) -> Kind | None:
  if state is None or handed_on is None or handed_on.dtype.itemsize <= state.dtype.itemsize:
    return state
  return Kind(handed_on.dtype)


def _carried(self: Rewriter, eqn: JaxprEqn, body: Inner, atoms: list[Any], ins: Kinds) -> list[Any]:
  """The operands, with the start of the carry in the dtype that it has in each iteration."""
  made = list(atoms)
  for i in (body.operands or ())[body.carry.start : body.carry.stop]:
    kind = ins[i]
    if kind is not None and made[i].aval.dtype != kind.dtype:
      value = self.value(eqn.invars[i], kind.dtype)
      made[i] = made[i] if value is None else self.view(value, kind.dtype, eqn)
  return made


def _scan(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  (body,) = found
  atoms, ins = _read_by_all(self, eqn, body.carry.start, *_operands(self, eqn))
  new, ins = _loop(self, eqn, body, ins, _wanted(self, eqn))
  atoms = _carried(self, eqn, body, atoms, ins)
  self.write(eqn, atoms, new.outs, with_inner(eqn, [_replaced(body.program, new)]))


def _read_by_all(
  self: Rewriter, eqn: JaxprEqn, count: int, atoms: list[Any], ins: Kinds
) -> tuple[list[Any], Kinds]:
  """The operands with the constants of a scan in float32, to be cast in each of its iterations.

  The derivative with respect to them is the sum over all iterations, and so added up in float32.
  """
  kinds = list(ins)
  half = self.place(eqn)[1]
  for i, kind in enumerate(ins[: 0 if half is None else count]):
    value = None if half is None else self.value(eqn.invars[i], half)
    if kind is not None and kind.dtype in HALVES and value is not None:
      atoms[i] = self.view(value, FLOAT32, eqn)
      kinds[i] = Kind(kind.dtype, held=FLOAT32)
  return atoms, tuple(kinds)


def _while(self: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  test, body = found
  atoms, given = _operands(self, eqn)
  # Nothing is kept of it for a backward pass, and whether it ends may depend on its last bits.
  ins = list(given)
  for i in (body.operands or ())[body.carry.start : body.carry.stop]:
    if ins[i] is not None and dtype_of(eqn.invars[i]) == FLOAT32:
      ins[i] = Kind(FLOAT32)
  new, given = _loop(self, eqn, body, tuple(ins), _wanted(self, eqn))
  atoms = _carried(self, eqn, body, atoms, given)
  scope = _scope(self, eqn)
  tested = _inside(test, _ins(test, given), (None,), (0,), self.settings, scope)
  both = [_replaced(test.program, tested), _replaced(body.program, new)]
  self.write(eqn, atoms, new.outs, with_inner(eqn, both))


_RULES: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, tuple[Inner, ...]], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.SHARD_MAP), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _custom),
  Holds.COMPOSITE: _composite,
  Holds.COND: _cond,
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
}
