"""Jaxprs inside jaxprs: each is rewritten for the dtypes in which its operands come."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.policy_config import rewrites
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, dtype_of
from mpjax._jaxprs.autocast.custom_derivatives import CustomCall, with_rule
from mpjax._jaxprs.autocast.first_order import first_order
from mpjax._jaxprs.autocast.powers import powers, write_powers
from mpjax._jaxprs.autocast.residuals import saving_rounded
from mpjax._jaxprs.autocast.rewriter import Rewriter, Rewritten
from mpjax._jaxprs.autocast.scopes import AS_GIVEN, REGION, TABLE, marked, names_of, policy_at
from mpjax._jaxprs.autocast.uses import EXACT, HELD, RETURNED, of_loop
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Constant,
  Kind,
  Kinds,
  Scope,
  Settings,
  cached_per_jaxpr,
  constants,
  joined,
  survives,
)
from mpjax._jaxprs.inner_jaxprs import Inner, Program, donated, inner_jaxprs, with_inner
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of, is_higher_order


def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: Sequence[DType | None],
  readers: Sequence[int],
  settings: Settings,
  scope: Scope,
  consts: Sequence[Constant] | None = None,
) -> Rewritten:
  """Returns a jaxpr rewritten.

  `ins` are the kinds of its arguments, None for what is no floating value of ours; `outs` has the
  dtypes of its results, None for those that they are held in, and `readers` their consumers;
  `consts` how its constants come in, None where their values are not at hand.
  """
  rewriter = Rewriter(jaxpr, settings, scope, readers)
  if consts is None:
    consts = [Constant()] * len(jaxpr.constvars)
  for var, const in zip(jaxpr.constvars, consts, strict=True):
    if dtype_of(var) in FLOATS:
      kind = Kind(aval_of(var).dtype, const.neutral, numbers=const.numbers)
      rewriter.define(var, kind, recast=const.recast)
  invars = [
    var if kind is None else rewriter.define(var, kind, recast=True)
    for var, kind in zip(jaxpr.invars, ins, strict=True)
  ]
  found = powers(jaxpr, settings.ops)
  done: frozenset[int] = frozenset()
  for place, eqn in enumerate(map(rewriter.shown, jaxpr.eqns)):
    if place in found and write_powers(rewriter, found[place]):
      done |= found[place].places
    if is_higher_order(eqn):
      _enter(rewriter, eqn)
    elif place not in done:
      first_order(rewriter, eqn)
  triples = zip(jaxpr.outvars, outs, readers, strict=True)
  pairs = [_result(rewriter, *each, jaxpr) for each in triples]
  results, kinds = [p[0] for p in pairs], [p[1] for p in pairs]
  new = jaxpr.replace(invars=invars, outvars=results, eqns=rewriter.eqns)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed)


def _result(
  rewriter: Rewriter, atom: Atom, dtype: DType | None, readers: int, jaxpr: Jaxpr
) -> tuple[Atom, Kind | None]:
  """What holds a result in `dtype`, and its kind."""
  value = rewriter.value(atom)
  if value is None:
    return atom, None
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  kind = value.kind
  dtype = dtype or (kind.dtype if kind.widened and readers == RETURNED else kind.current)
  found = rewriter.view(value, dtype, last)
  asked = aval_of(atom)
  if dtype == asked.dtype and aval_of(found).weak_type != asked.weak_type:
    found = rewriter.cast(found, Var(asked), last)
  if dtype == kind.current:
    return found, kind
  return found, kind._replace(carried=FLOAT32) if dtype == FLOAT32 else Kind(dtype)


_kept_rewrite = cached_per_jaxpr(rewrite)
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


@cached_per_jaxpr
def _entered(jaxpr: Jaxpr, scope: Scope, settings: Settings) -> bool:
  places = [(eqn, scope + names_of(eqn.source_info.name_stack)) for eqn in jaxpr.eqns]
  return any(
    rewrites(policy_at(place, settings)) or _entered_inside(eqn, place, settings)
    for eqn, place in places
  )


def _operands(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[list[Atom], Kinds]:
  """The operands as the jaxprs inside read them, and their kinds: as they are held."""
  half = rewriter.place(eqn)[1]
  atoms: list[Atom] = []
  kinds: list[Kind | None] = []
  for atom in eqn.invars:
    value = rewriter.value(atom)
    if value is None:
      atoms.append(atom)
      kinds.append(None)
      continue
    kind = value.kind
    if half is None and dtype_of(atom) == FLOAT32:  # Nothing changes here, only in a scope inside.
      kind = kind._replace(held=kind.is_low)
    atoms.append(rewriter.view(value, kind.variable, eqn))
    kinds.append(kind)
  return atoms, tuple(kinds)


def _inside(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  ins: Kinds,
  outs: Sequence[DType | None] = (),
  readers: tuple[int, ...] | None = None,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten, for the kinds of all operands of that.

  The dtypes of the results are `outs`, None or missing where they are free. Their consumers are
  those of the results of the equation, unless `readers` says otherwise.
  """
  jaxpr, settings = inner.jaxpr, rewriter.settings
  values = inner.program.consts if isinstance(inner.program, ClosedJaxpr) else None
  consts = None if values is None else constants(values, settings)
  free = (None,) * (len(jaxpr.outvars) - len(outs))
  given = tuple(ins[i] for i in inner.operands or ())
  readers = _readers(rewriter, eqn) if readers is None else readers
  scope = _scope(rewriter, eqn)
  return _kept_rewrite(jaxpr, given, (*outs, *free), readers, settings, scope, consts)


def _recast(rewriter: Rewriter, eqn: JaxprEqn) -> bool:
  """Whether an operand is a parameter, which a result that is as neutral would be too."""
  return any(value is not None and value.recast for value in map(rewriter.value, eqn.invars))


def _readers(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(rewriter.readers.get(v, 0) for v in eqn.outvars)


def _scope(rewriter: Rewriter, eqn: JaxprEqn) -> Scope:
  """The scope of the inner jaxprs. It seldom matters, and would split the cache."""
  settings, scope = rewriter.settings, rewriter.place(eqn)[0]
  if settings.rules or settings.precision is not None:
    return scope
  mark = marked(scope)
  own = tuple(name for name in (TABLE, AS_GIVEN) if name in scope)
  return own if mark is None else (*own, REGION + mark)


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
  return tuple(None if kind is None else kind.variable for kind in kinds)


def _call(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A jaxpr that runs once, between the operands and the results."""
  atoms, ins = _operands(rewriter, eqn)
  for i, gone in enumerate(donated(eqn)):
    if gone:  # Its memory is to be taken over: that has the old size.
      atoms[i] = rewriter.original(eqn.invars[i], eqn)
      ins = (*ins[:i], _in_variable(ins[i], eqn.invars[i]), *ins[i + 1 :])
  new = _inside(rewriter, eqn, found[0], ins)
  params, saved = _params(eqn, found, [new]), _saved_at_rest(eqn, new.jaxpr, ins)
  if any(saved):
    made = saving_rounded(eqn, new.jaxpr, list(map(aval_of, atoms)), saved)
    eqn, params = eqn.replace(primitive=made.primitive), made.params
  rewriter.write(eqn, atoms, new.outs, params, recast=_recast(rewriter, eqn))


def _saved_at_rest(eqn: JaxprEqn, jaxpr: Jaxpr, ins: Kinds) -> list[DType | None]:
  """Returns in which dtype a `remat` saves each operand, None for the one in which it is held.

  A stream that layers add to is saved at rest, as by hand. A gate is held for its last digits.
  """
  if not facts_of(eqn).saves or eqn.params["policy"] is not None or jaxpr.effects:
    return [None] * len(ins)
  return [k.dtype if k is not None and k.is_low and k.held and k.added else None for k in ins]


def _in_variable(kind: Kind | None, atom: Atom) -> Kind | None:
  """Returns the kind of a value that comes in the dtype that `atom` was traced with."""
  return None if kind is None else kind._replace(carried=dtype_of(atom))


def _composite(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """What a compiler may replace by something of the same name and types keeps its types."""
  atoms = [rewriter.original(atom, eqn) for atom in eqn.invars]
  ins = tuple(_in_variable(rewriter.kind(v), v) for v in eqn.invars)
  new = _inside(rewriter, eqn, found[0], ins, list(map(dtype_of, eqn.outvars)))
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [new]))


def _custom(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """A function with a rule of its own for derivatives or batches."""
  atoms, ins = _operands(rewriter, eqn)
  settings, scope = rewriter.settings, _scope(rewriter, eqn)
  new = _inside(rewriter, eqn, found[0], ins)

  def again(jaxpr: Jaxpr, ins: Kinds, outs: Sequence[DType | None], derivative: bool) -> Rewritten:
    there = dataclasses.replace(settings, in_derivative=True) if derivative else settings
    readers = [EXACT if dtype == FLOAT32 else 0 for dtype in outs]
    return rewrite(jaxpr, ins, outs, readers, there, scope)

  made = with_rule(CustomCall(eqn, ins, new.outs, again), atoms, new.jaxpr)
  rewriter.write(made, made.invars, new.outs, recast=_recast(rewriter, eqn))


def _cond(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  """Branches that must agree: their result is what one of them returns, as a selection's is."""
  atoms, ins = _operands(rewriter, eqn)
  free = [_inside(rewriter, eqn, branch, ins).outs for branch in found]
  readers = _readers(rewriter, eqn)
  kinds = [_chosen(each, kinds) for each, *kinds in zip(readers, *free, strict=True)]
  new = [_inside(rewriter, eqn, branch, ins, _dtypes(kinds)) for branch in found]
  rewriter.write(eqn, atoms, kinds, _params(eqn, found, new), recast=_recast(rewriter, eqn))


def _chosen(readers: int, kinds: Sequence[Kind | None]) -> Kind | None:
  """Returns the kind of a result that is one of several: see the table for a choice."""
  found = joined(kinds)
  if found is None or found.dtype == FLOAT32:
    return found
  wide = [kind for kind in kinds if kind is not None and kind.dtype == FLOAT32]
  fits = all(survives(x, found.dtype) for kind in wide for x in kind.numbers or ())
  return found._replace(held=True) if wide and (readers & HELD or not fits) else found


def _loop(
  rewriter: Rewriter, eqn: JaxprEqn, body: Inner, atoms: Sequence[Atom], ins: Kinds
) -> tuple[Rewritten, list[Atom], Kinds]:
  """Rewrites the body of a loop. A carry is held in float32 if it starts so, or is returned so.

  What the body returns depends on how the carry comes in, so the body is rewritten again until
  nothing changes. Kinds only go from neutral to low to data, and from low at rest to held in
  float32: that ends.

  Returns:
    The body, the operands with the carry cast, and the kinds of these in each iteration.
  """
  settings = rewriter.settings
  readers = of_loop(body, _readers(rewriter, eqn), settings)
  # A carry that the user has cast to low precision stays in it.
  own = [dtype_of(v) != FLOAT32 for v in body.jaxpr.invars[body.carry.start : body.carry.stop]]
  made, kinds = list(atoms), list(ins)
  start = [kinds[i] for i in body.carried]
  state = [None if kind is None else kind.as_carry for kind in start]
  while True:
    for i, kind in zip(body.carried, state, strict=True):
      kinds[i] = kind
    new = _inside(rewriter, eqn, body, tuple(kinds), readers=readers)
    back = [
      _carried(kind, out, own[i])
      for i, (kind, out) in enumerate(zip(state, new.outs[: len(state)], strict=True))
    ]
    if back == state:
      break
    state = back
  new = _inside(rewriter, eqn, body, tuple(kinds), _dtypes(state), readers)
  for i, kind in zip(body.carried, state, strict=True):
    value = rewriter.value(eqn.invars[i])
    if kind is not None and value is not None:
      made[i] = rewriter.view(value, kind.variable, eqn)
  outs = (*state, *new.outs[len(state) :])
  return new._replace(outs=outs), made, tuple(kinds)


def _carried(state: Kind | None, returned: Kind | None, own: bool) -> Kind | None:
  """Returns the kind of a carry that comes in as `state` and is returned as `returned`."""
  found = joined((state, returned))
  if found is None or found.dtype == FLOAT32:
    return found
  started = state is not None and state.dtype == FLOAT32  # As a neutral one.
  held = (started or found.held) and not own
  widened = held and found.widened and not started
  return found._replace(neutral=False, held=held, widened=widened)


def _scan(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  (body,) = found
  atoms, ins = _read_by_all(rewriter, eqn, body.carry.start, *_operands(rewriter, eqn))
  new, atoms, _ = _loop(rewriter, eqn, body, atoms, ins)
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [new]))


def _read_by_all(
  rewriter: Rewriter, eqn: JaxprEqn, count: int, atoms: list[Atom], ins: Kinds
) -> tuple[list[Atom], Kinds]:
  """The operands with the constants of a scan in float32, to be cast in each of its iterations.

  Their gradients are sums over all iterations: in bfloat16, they stop growing after 256 equal ones.
  """
  kinds = list(ins)
  half = rewriter.place(eqn)[1]
  for i, kind in enumerate(ins[: 0 if half is None else count]):
    value = rewriter.value(eqn.invars[i])
    if kind is not None and value is not None and kind.variable in HALVES:
      atoms[i] = rewriter.view(value, FLOAT32, eqn)
      kinds[i] = kind._replace(carried=FLOAT32)
  return atoms, tuple(kinds)


def _while(rewriter: Rewriter, eqn: JaxprEqn, found: tuple[Inner, ...]) -> None:
  test, body = found
  atoms, given = _operands(rewriter, eqn)
  # Nothing is kept of it for a backward pass, and whether it ends may depend on its last bits: an
  # iteration until the change is below 1e-4 never ends in bfloat16.
  ins = list(given)
  for i in body.carried:
    kind = ins[i]
    if kind is not None and dtype_of(eqn.invars[i]) == FLOAT32 and kind.dtype != FLOAT32:
      ins[i] = kind._replace(held=True)
  new, atoms, kinds = _loop(rewriter, eqn, body, atoms, tuple(ins))
  tested = _inside(rewriter, eqn, test, kinds, readers=(EXACT,))
  rewriter.write(eqn, atoms, new.outs, _params(eqn, found, [tested, new]))


_RULES: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, tuple[Inner, ...]], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.SHARD_MAP), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _custom),
  Holds.COMPOSITE: _composite,
  Holds.COND: _cond,
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
}
