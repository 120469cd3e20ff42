"""Jaxprs inside jaxprs: each is rewritten for the dtypes in which its operands come."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, dtype_of
from mpjax._jaxprs.autocast.custom_derivatives import CustomCall, with_rule
from mpjax._jaxprs.autocast.first_order import first_order
from mpjax._jaxprs.autocast.marks import REGION, TABLE
from mpjax._jaxprs.autocast.powers import Powers, in_float32, powers
from mpjax._jaxprs.autocast.rewriter import Rewriter, Rewritten
from mpjax._jaxprs.autocast.scopes import marked, matmul_precision, names_of, region
from mpjax._jaxprs.autocast.uses import HALF, RESULT, of_loop, of_operands
from mpjax._jaxprs.autocast.values import (
  Constant,
  Kind,
  Kinds,
  Scope,
  Settings,
  constants,
  kept,
)
from mpjax._jaxprs.inner_jaxprs import Inner, Program, donated, inner_jaxprs, with_inner
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of, is_higher_order


def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: Sequence[DType | None],
  wanted: Sequence[int],
  settings: Settings,
  scope: Scope,
  consts: Sequence[Constant] | None = None,
) -> Rewritten:
  """Returns a jaxpr rewritten.

  Args:
    jaxpr: the jaxpr.
    ins: the kinds of its arguments, None for what is no floating value of ours.
    outs: the dtypes that its results must have; None leaves the choice.
    wanted: what is wanted of its results, see `demands`.
    settings: what was asked for.
    scope: the named scopes around it.
    consts: how its constants come in; None where their values are not at hand.
  """
  rewriter = Rewriter(jaxpr, settings, scope, wanted)
  if consts is None:
    consts = [Constant(neutral=False, once=False)] * len(jaxpr.constvars)
  for var, const in zip(jaxpr.constvars, consts, strict=True):
    if rewriter.kind_of(var) is not None:
      rewriter.define(var, Kind(aval_of(var).dtype, const.neutral), scope=None, once=const.once)
  invars = [
    var if kind is None else rewriter.define(var, kind, scope=None, once=False)
    for var, kind in zip(jaxpr.invars, ins, strict=True)
  ]
  rewriter.given(jaxpr.invars)
  found = powers(jaxpr, settings.ops)
  done: frozenset[int] = frozenset()
  for place, eqn in enumerate(map(rewriter.shown, jaxpr.eqns)):
    if place in found and _in_float32(rewriter, found[place]):
      done |= found[place].places
    if is_higher_order(eqn):
      _enter(rewriter, eqn)
    elif place not in done:
      first_order(rewriter, eqn)
  pairs = [_result(rewriter, *each, jaxpr) for each in zip(jaxpr.outvars, outs, strict=True)]
  results, kinds = [p[0] for p in pairs], [p[1] for p in pairs]
  new = jaxpr.replace(invars=invars, outvars=results, eqns=rewriter.eqns)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed)


def _in_float32(rewriter: Rewriter, found: Powers) -> bool:
  """Writes what holds powers of a low-precision value as one equation; False if it stays as it is.

  It stays if float32 operations read all of it, which is then in float32 anyway; and if it is one
  power that operations of the `half` list read: it has to fit into their dtype.
  """
  scope, half = rewriter.place(found.eqns[0])
  value = None if half is None else rewriter.value(found.root, half)
  if half is None or value is None or value.dtype != half:
    return False
  wants = [rewriter.wanted.get(v, 0) for v in found.outs]
  if all(rewriter.is_full(want) or (found.single and want & HALF) for want in wants):
    return False
  if any(rewriter.place(eqn)[0] != scope for eqn in found.eqns):
    return False
  dtypes = [half if want & HALF else FLOAT32 for want in wants]
  made = in_float32(found, rewriter.view(value, half, found.eqns[0]), dtypes)
  rewriter.write(made, made.invars, [Kind(dtype) for dtype in dtypes])
  return True


def _result(
  rewriter: Rewriter, atom: Atom, dtype: DType | None, jaxpr: Jaxpr
) -> tuple[Atom, Kind | None]:
  """What holds a result in `dtype`, and its kind."""
  value = rewriter.value(atom, rewriter.settings.compute)
  if value is None:
    return atom, None
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  dtype = dtype or value.dtype
  found = rewriter.view(value, dtype, last)
  asked = aval_of(atom)
  if dtype == asked.dtype and aval_of(found).weak_type != asked.weak_type:
    found = rewriter.cast(found, Var(asked), last)
  return found, value.kind if dtype == value.dtype else Kind(dtype)


_kept_rewrite = kept(rewrite)
"""The same function called twice is rewritten once, and compiled once."""


def _enter(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds jaxprs."""
  scope, half = rewriter.place(eqn)
  found = inner_jaxprs(eqn)
  if found is None:
    return rewriter.untouched(eqn) if half is None else rewriter.not_entered(eqn)
  rule = _RULES.get(facts_of(eqn).holds)
  if rule is None or (half is None and not _entered_inside(eqn, scope, rewriter.settings)):
    return rewriter.untouched(eqn)
  return rule(rewriter, eqn, found)


def _entered_inside(eqn: JaxprEqn, scope: Scope, settings: Settings) -> bool:
  """Whether some scope inside of an equation that stays as it is has a rule of its own."""
  if settings.precision is not None:
    return True  # What is left as it is needs the precision that was taken from it.
  return any(_entered(i.jaxpr, scope, settings) for i in inner_jaxprs(eqn) or ())


@kept
def _entered(jaxpr: Jaxpr, scope: Scope, settings: Settings) -> bool:
  places = [(eqn, scope + names_of(str(eqn.source_info.name_stack))) for eqn in jaxpr.eqns]
  return any(
    region(place, settings) is not None
    or matmul_precision(place, settings) is not None
    or _entered_inside(eqn, place, settings)
    for eqn, place in places
  )


def _operands(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[list[Atom], Kinds]:
  """The operands as the jaxprs inside read them, and their kinds."""
  scope, half = rewriter.place(eqn)
  atoms, kinds = [], []
  wants = of_operands(eqn, _wanted(rewriter, eqn), rewriter.settings)
  for atom, want in zip(eqn.invars, wants, strict=True):
    if half is None:  # Nothing changes here, only in some scope inside.
      value = rewriter.value(atom, rewriter.settings.compute)
      atoms.append(rewriter.original(atom, eqn))
      kinds.append(None if value is None else Kind(aval_of(atom).dtype, value.neutral))
      continue
    value = rewriter.outside(rewriter.value(atom, half), eqn, scope, half, want)
    atoms.append(atom if value is None else rewriter.view(value, value.dtype, eqn))
    kinds.append(None if value is None else value.kind)
  return atoms, tuple(kinds)


def _inside(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  ins: Kinds,
  outs: Sequence[DType | None] = (),
  wanted: tuple[int, ...] | None = None,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten, for the kinds of all operands of that.

  The dtypes of the results are `outs`, None or missing where they are free. What is wanted of them
  is what is wanted of those of the equation, if it is not given.
  """
  jaxpr, settings = inner.jaxpr, rewriter.settings
  values = inner.program.consts if isinstance(inner.program, ClosedJaxpr) else None
  consts = None if values is None else constants(values, settings)
  free = (None,) * (len(jaxpr.outvars) - len(outs))
  given = tuple(ins[i] for i in inner.operands or ())
  wanted = _wanted(rewriter, eqn) if wanted is None else wanted
  scope = _scope(rewriter, eqn)
  return _kept_rewrite(jaxpr, given, (*outs, *free), wanted, settings, scope, consts)


def _once(rewriter: Rewriter, eqn: JaxprEqn) -> bool:
  """Whether no operand is a parameter, which a result that is as neutral would be too."""
  known = (rewriter.value(atom, rewriter.settings.compute) for atom in eqn.invars)
  return all(value is None or value.once for value in known)


def _wanted(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(rewriter.wanted.get(v, 0) for v in eqn.outvars)


def _scope(rewriter: Rewriter, eqn: JaxprEqn) -> Scope:
  """The scope of the inner jaxprs. It seldom matters, and would split the cache."""
  settings, scope = rewriter.settings, rewriter.place(eqn)[0]
  if settings.rules or settings.precision is not None:
    return scope
  mark = marked(scope)
  table = (TABLE,) if TABLE in scope else ()
  return table if mark is None else (*table, REGION + mark)


def _params(eqn: JaxprEqn, found: Sequence[Inner], new: Sequence[Rewritten]) -> dict[str, Any]:
  """Returns the parameters of an equation with its jaxprs rewritten, closed where they were."""
  made: list[Program] = []
  for inner, each in zip(found, new, strict=True):
    consts = inner.program.consts if isinstance(inner.program, ClosedJaxpr) else None
    if consts is None:
      made.append(each.jaxpr)
    elif consts or each.closed is None:
      made.append(ClosedJaxpr(each.jaxpr, consts))
    else:
      made.append(each.closed)
  return with_inner(eqn, made)


def _dtypes(kinds: Sequence[Kind | None]) -> tuple[DType | None, ...]:
  return tuple(None if kind is None else kind.dtype for kind in kinds)


def _call(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A jaxpr that runs once, between the operands and the results."""
  atoms, ins = _operands(rewriter, eqn)
  for i, gone in enumerate(donated(eqn)):
    if gone and ins[i] is not None:  # Its memory is to be taken over: that has the old size.
      atoms[i] = rewriter.original(eqn.invars[i], eqn)
      ins = (*ins[:i], Kind(aval_of(found[0].jaxpr.invars[i]).dtype), *ins[i + 1 :])
  new = _inside(rewriter, eqn, found[0], ins)
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [new]), once=_once(rewriter, eqn))


def _composite(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """What a compiler may replace by something of the same name and types keeps its types."""
  atoms = [rewriter.original(atom, eqn) for atom in eqn.invars]
  ins = tuple(rewriter.kind_of(v, neutral=True) for v in eqn.invars)
  kinds = [rewriter.kind_of(v) for v in eqn.outvars]
  new = _inside(rewriter, eqn, found[0], ins, _dtypes(kinds))
  rewriter.write(eqn, atoms, kinds, _params(eqn, found, [new]))


def _custom(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A function with a rule of its own for derivatives or batches."""
  atoms, ins = _operands(rewriter, eqn)
  settings, scope = rewriter.settings, _scope(rewriter, eqn)
  new = _inside(rewriter, eqn, found[0], ins)

  def again(jaxpr: Jaxpr, ins: Kinds, outs: Sequence[DType | None], derivative: bool) -> Rewritten:
    there = dataclasses.replace(settings, in_derivative=True) if derivative else settings
    return rewrite(jaxpr, ins, outs, (0,) * len(outs), there, scope)

  made = with_rule(CustomCall(eqn, ins, new.outs, again), atoms, new.jaxpr)
  rewriter.write(made, made.invars, new.outs, once=_once(rewriter, eqn))


def _cond(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """Branches that must agree: where one returns float32, all do."""
  atoms, ins = _operands(rewriter, eqn)
  free = [_inside(rewriter, eqn, branch, ins).outs for branch in found]
  wanted = _wanted(rewriter, eqn)
  kinds = [_agreed(each, want) for want, *each in zip(wanted, *free, strict=True)]
  new = [_inside(rewriter, eqn, branch, ins, _dtypes(kinds)) for branch in found]
  rewriter.write(eqn, atoms, kinds, _params(eqn, found, new), once=_once(rewriter, eqn))


def _agreed(kinds: Sequence[Kind | None], wanted: int) -> Kind | None:
  """The kind of a result that comes from one of several branches."""
  known = [k for k in kinds if k is not None]
  if wanted & RESULT and not wanted & HALF and any(k.dtype == FLOAT32 for k in known):
    return Kind(FLOAT32, all(k.neutral for k in known))  # An argument that may come back unchanged.
  # By name, should both float16 and bfloat16 occur.
  order = sorted(known, key=lambda k: (k.neutral, -k.dtype.itemsize, k.dtype.name))
  return order[0] if order else None


def _loop(
  rewriter: Rewriter, eqn: JaxprEqn, body: Inner, atoms: Sequence[Atom], ins: Kinds
) -> tuple[Rewritten, list[Atom], Kinds]:
  """Rewrites the body of a loop. A carry is in low precision if it starts and remains so.

  One that starts in low precision, and to which an iteration adds float32, must start in float32:
  JAX takes no loop whose carry changes its dtype. A wider carry may widen another one, so the body
  is rewritten again until nothing changes. Dtypes only widen: that ends.

  Returns:
    The body, the operands with the carry cast, and the kinds of these in each iteration.
  """
  wanted = of_loop(body.jaxpr, body.carry, _wanted(rewriter, eqn), rewriter.settings)
  made, kinds = list(atoms), list(ins)
  for i in body.carried:
    kind = kinds[i]
    kinds[i] = None if kind is None else Kind(kind.dtype)
  while True:
    state = [kinds[i] for i in body.carried]
    new = _inside(rewriter, eqn, body, tuple(kinds), wanted=wanted)
    back = [_wider(*each) for each in zip(state, new.outs[: len(state)], strict=True)]
    if back == state:
      break
    for i, kind in zip(body.carried, back, strict=True):
      kinds[i] = kind
  new = _inside(rewriter, eqn, body, tuple(kinds), _dtypes(state), wanted)
  for i, kind in zip(body.carried, state, strict=True):
    if kind is not None and dtype_of(made[i]) != kind.dtype:
      value = rewriter.value(eqn.invars[i], kind.dtype)
      made[i] = made[i] if value is None else rewriter.view(value, kind.dtype, eqn)
  return new, made, tuple(kinds)


def _wider(state: Kind | None, returned: Kind | None) -> Kind | None:
  if state is None or returned is None or returned.dtype.itemsize <= state.dtype.itemsize:
    return state
  return Kind(returned.dtype)


def _scan(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  (body,) = found
  atoms, ins = _read_by_all(rewriter, eqn, body.carry.start, *_operands(rewriter, eqn))
  new, atoms, _ = _loop(rewriter, eqn, body, atoms, ins)
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [new]))


def _read_by_all(
  rewriter: Rewriter, eqn: JaxprEqn, count: int, atoms: list[Atom], ins: Kinds
) -> tuple[list[Atom], Kinds]:
  """The operands with the constants of a scan in float32, to be cast in each of its iterations.

  The derivative with respect to them is the sum over all iterations, and so added up in float32: in
  bfloat16, the gradient of an LSTM's weights stops growing after 256 equal steps.
  """
  kinds = list(ins)
  half = rewriter.place(eqn)[1]
  for i, kind in enumerate(ins[: 0 if half is None else count]):
    value = None if half is None else rewriter.value(eqn.invars[i], half)
    if kind is not None and kind.dtype in HALVES and value is not None:
      atoms[i] = rewriter.view(value, FLOAT32, eqn)
      kinds[i] = Kind(kind.dtype, held=FLOAT32)
  return atoms, tuple(kinds)


def _while(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  test, body = found
  atoms, given = _operands(rewriter, eqn)
  # Nothing is kept of it for a backward pass, and whether it ends may depend on its last bits: an
  # iteration until the change is below 1e-4 never ends in bfloat16.
  ins = list(given)
  for i in body.carried:
    if ins[i] is not None and dtype_of(eqn.invars[i]) == FLOAT32:
      ins[i] = Kind(FLOAT32)
  new, atoms, kinds = _loop(rewriter, eqn, body, atoms, tuple(ins))
  tested = _inside(rewriter, eqn, test, kinds, wanted=(0,))
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [tested, new]))


_RULES: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, tuple[Inner, ...]], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.SHARD_MAP), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _custom),
  Holds.COMPOSITE: _composite,
  Holds.COND: _cond,
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
}
