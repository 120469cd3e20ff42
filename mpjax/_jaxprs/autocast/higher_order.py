"""Jaxprs inside jaxprs: each is rewritten for the dtypes in which its operands come."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.rules import rewrites
from mpjax._core.types import DType
from mpjax._jaxprs.autocast.custom_derivatives import with_rule
from mpjax._jaxprs.autocast.first_order import first_order
from mpjax._jaxprs.autocast.residuals import powers, saving_rounded, write_powers
from mpjax._jaxprs.autocast.rewriter import EXACT, HELD, RETURNED, Rewriter, Rewritten, of_loop
from mpjax._jaxprs.autocast.scopes import names_of, policy_at
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Kind,
  Kinds,
  Scope,
  Settings,
  cached_per_jaxpr,
  constants,
  joined,
  survives,
)
from mpjax._jaxprs.primitives import Holds, facts_of, is_higher_order
from mpjax._jaxprs.reader import (
  Atom,
  Inner,
  Program,
  aval_of,
  donated,
  dtype_of,
  inner_jaxprs,
  with_inner,
)


def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: Sequence[DType | None],
  readers: Sequence[int],
  settings: Settings,
  scope: Scope,
  consts: Kinds | None = None,
) -> Rewritten:
  """Returns a jaxpr rewritten.

  `ins` are the kinds of its arguments, None for what is no floating value of ours; `outs` has the
  dtypes of its results, None for those that they are held in, and `readers` their consumers;
  `consts` are the kinds of its constants, None where their values are not at hand.
  """
  rewriter = Rewriter(jaxpr, settings, scope, readers)
  if consts is None:
    dtypes = map(dtype_of, jaxpr.constvars)
    consts = tuple(Kind(d) if d is not None and d in FLOATS else None for d in dtypes)
  for var, kind in zip(jaxpr.constvars, consts, strict=True):
    if kind is not None:
      rewriter.define(var, kind, recast=kind.numbers is None)
  invars = [
    var if kind is None else rewriter.define(var, kind, recast=True)
    for var, kind in zip(jaxpr.invars, ins, strict=True)
  ]
  functions = powers(jaxpr, settings.ops)
  done: frozenset[int] = frozenset()
  for place, eqn in enumerate(map(rewriter.shown, jaxpr.eqns)):
    if place in functions and write_powers(rewriter, functions[place]):
      done |= functions[place].places
    if is_higher_order(eqn):
      _enter(rewriter, eqn)
    elif place not in done:
      first_order(rewriter, eqn)
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  results, kinds = list(jaxpr.outvars), list(map(rewriter.kind, jaxpr.outvars))
  for i, (atom, dtype) in enumerate(zip(jaxpr.outvars, outs, strict=True)):
    value, asked = rewriter.value(atom), aval_of(atom)
    if value is None:
      continue
    kind = value.kind
    dtype = dtype or (kind.dtype if kind.widened and readers[i] == RETURNED else kind.current)
    results[i] = view = rewriter.view(value, dtype, last)
    if dtype == asked.dtype and aval_of(view).weak_type != asked.weak_type:
      results[i] = rewriter.cast(view, Var(asked), last)
    if dtype != kind.current:
      kinds[i] = kind._replace(carried=FLOAT32) if dtype == FLOAT32 else Kind(dtype)
  new = jaxpr.replace(invars=invars, outvars=results, eqns=rewriter.eqns)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed)


_cached_rewrite = cached_per_jaxpr(rewrite)
"""The same function called twice is rewritten once, and compiled once."""


def _enter(rewriter: Rewriter, eqn: JaxprEqn) -> None:
  scope, half = rewriter.place(eqn)
  inner = inner_jaxprs(eqn)
  if inner is None:
    return rewriter.untouched(eqn) if half is None else rewriter.not_entered(eqn)
  rule = _RULES.get(facts_of(eqn).holds)
  if half is None and not any(_entered(i.jaxpr, scope, rewriter.settings) for i in inner):
    rule = None
  if rule is None:
    return rewriter.untouched(eqn)
  return rule(rewriter, eqn, inner)


@cached_per_jaxpr
def _entered(jaxpr: Jaxpr, scope: Scope, settings: Settings) -> bool:
  """Whether something changes in a jaxpr that stays as it is: a scope inside has a rule."""
  if settings.precision is not None:
    return True  # What is left as it is needs the precision that was taken from it.
  for eqn in jaxpr.eqns:
    place = scope + names_of(eqn.source_info.name_stack)
    inner = inner_jaxprs(eqn) or ()
    if rewrites(policy_at(place, settings)) or any(
      _entered(each.jaxpr, place, settings) for each in inner
    ):
      return True
  return False


def _operands(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[list[Atom], list[Kind | None]]:
  """The operands as the jaxprs inside read them, and their kinds: as they are held."""
  half, keeps_types = rewriter.place(eqn)[1], facts_of(eqn).holds is Holds.COMPOSITE
  atoms, kinds = list(eqn.invars), list(map(rewriter.kind, eqn.invars))
  for i, (atom, kind, gone) in enumerate(zip(eqn.invars, kinds, donated(eqn), strict=True)):
    if kind is not None:
      if half is None and dtype_of(atom) == FLOAT32 and not keeps_types:
        kind = kind._replace(held=kind.is_low)  # Only a scope inside changes anything.
      if keeps_types or gone:  # The memory of one that is donated has the old size.
        kind = kind._replace(carried=dtype_of(atom))
      atoms[i], kinds[i] = rewriter.read(atom, eqn, kind.variable), kind
  return atoms, kinds


def _inside(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  ins: Sequence[Kind | None],
  outs: Sequence[DType | None] = (),
  readers: tuple[int, ...] | None = None,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten, for the kinds of all operands of that.

  The dtypes of the results are `outs`, None or missing where they are free. Their consumers are
  those of the results of the equation, unless `readers` says otherwise.
  """
  program, settings = inner.program, rewriter.settings
  consts = constants(program.consts, settings) if isinstance(program, ClosedJaxpr) else None
  free = (None,) * (len(inner.jaxpr.outvars) - len(outs))
  kinds = tuple(ins[i] for i in inner.operands or ())
  readers = _readers(rewriter, eqn) if readers is None else readers
  scope = rewriter.place.inside(eqn)
  return _cached_rewrite(inner.jaxpr, kinds, (*outs, *free), readers, settings, scope, consts)


def _recast(rewriter: Rewriter, eqn: JaxprEqn) -> bool:
  """Whether an operand is a parameter, which a result that is as neutral would be too."""
  return any(value is not None and value.recast for value in map(rewriter.value, eqn.invars))


def _readers(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(rewriter.readers.get(v, 0) for v in eqn.outvars)


def _params(eqn: JaxprEqn, inners: Sequence[Inner], new: Sequence[Rewritten]) -> dict[str, Any]:
  """Returns the parameters of an equation with its jaxprs rewritten, closed where they were."""

  def program(inner: Inner, new: Rewritten) -> Program:
    if not isinstance(inner.program, ClosedJaxpr):
      return new.jaxpr
    consts = inner.program.consts
    return new.closed if new.closed and not consts else ClosedJaxpr(new.jaxpr, consts)

  return with_inner(eqn, [program(*pair) for pair in zip(inners, new, strict=True)])


def _dtypes(kinds: Sequence[Kind | None]) -> tuple[DType | None, ...]:
  return tuple(None if kind is None else kind.variable for kind in kinds)


def _call(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A jaxpr that runs once, between the operands and the results."""
  atoms, ins = _operands(rewriter, eqn)
  # What a compiler may replace by something of the same name and types keeps its types.
  keeps_types = facts_of(eqn).holds is Holds.COMPOSITE
  outs = list(map(dtype_of, eqn.outvars)) if keeps_types else ()
  new = _inside(rewriter, eqn, inners[0], ins, outs)
  params = _params(eqn, inners, [new])
  saved = [k.dtype if k is not None and k.held and k.added else None for k in ins]
  saves = facts_of(eqn).saves and eqn.params["policy"] is None and not new.jaxpr.effects
  if saves and any(saved):
    # A `remat` saves at rest, as by hand, a stream that layers add to. A gate is saved as it is
    # held, for its last digits.
    remat = saving_rounded(eqn, new.jaxpr, list(map(aval_of, atoms)), saved)
    eqn, params = eqn.replace(primitive=remat.primitive), remat.params
  recast = _recast(rewriter, eqn) and not keeps_types
  rewriter.write(eqn, atoms, new.outs, params, recast=recast)


def _custom(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A function with a rule of its own for derivatives or batches."""
  atoms, ins = _operands(rewriter, eqn)
  settings, scope = rewriter.settings, rewriter.place.inside(eqn)
  new = _inside(rewriter, eqn, inners[0], ins)

  def again(jaxpr: Jaxpr, ins: Kinds, outs: Sequence[DType | None], derivative: bool) -> Rewritten:
    there = dataclasses.replace(settings, in_derivative=True) if derivative else settings
    readers = [EXACT if dtype == FLOAT32 else 0 for dtype in outs]
    return rewrite(jaxpr, ins, outs, readers, there, scope)

  call = with_rule(eqn, tuple(ins), atoms, new, again)
  rewriter.write(call, call.invars, new.outs, recast=_recast(rewriter, eqn))


def _cond(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """Branches that must agree: their result is what one of them returns, as a selection's is."""
  atoms, ins = _operands(rewriter, eqn)
  free = [_inside(rewriter, eqn, branch, ins).outs for branch in inners]
  kinds: list[Kind | None] = []
  for readers, *each in zip(_readers(rewriter, eqn), *free, strict=True):
    kind = joined(each)
    wide = [k for k in each if k is not None and not k.is_low]
    if kind is not None and kind.is_low and wide:  # See the table for a choice.
      fits = all(survives(x, kind.dtype) for k in wide for x in k.numbers or ())
      kind = kind._replace(held=True) if readers & HELD or not fits else kind
    kinds.append(kind)
  new = [_inside(rewriter, eqn, branch, ins, _dtypes(kinds)) for branch in inners]
  rewriter.write(eqn, atoms, kinds, _params(eqn, inners, new), recast=_recast(rewriter, eqn))


def _loop(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A scan or a while. A carry is held in float32 if it starts so, or is returned so.

  What the body returns depends on how the carry comes in, so the body is rewritten again until
  nothing changes. Kinds only go from neutral to low to data, and from low at rest to held in
  float32: that ends.
  """
  *tests, body = inners
  atoms, kinds = _operands(rewriter, eqn)
  if tests:
    # Nothing is kept of a while for a backward pass, and whether it ends may depend on its last
    # bits: an iteration until the change is below 1e-4 never ends in bfloat16.
    for i in body.carried:
      kind = kinds[i]
      if kind is not None and dtype_of(eqn.invars[i]) == FLOAT32:
        kinds[i] = kind._replace(held=kind.is_low)
  elif rewriter.place(eqn)[1] is not None:
    # Constants come in float32, to be cast in each iteration. Their gradients are sums over all of
    # them: in bfloat16, they stop growing after 256 equal ones.
    for i in range(body.carry.start):
      kind = kinds[i]
      if kind is not None and kind.variable in HALVES:
        atoms[i] = rewriter.read(eqn.invars[i], eqn, FLOAT32)
        kinds[i] = kind._replace(carried=FLOAT32)

  scope, carry = rewriter.place.inside(eqn), body.carry
  readers = of_loop(body, _readers(rewriter, eqn), rewriter.settings, scope)
  # A carry that the user has cast to low precision stays in it.
  own = [dtype_of(v) != FLOAT32 for v in body.jaxpr.invars[carry.start : carry.stop]]
  start = [kinds[i] for i in body.carried]
  # The next iteration may have another value.
  state = [kind and kind._replace(carried=None, weight=False, numbers=None) for kind in start]
  while True:
    for i, kind in zip(body.carried, state, strict=True):
      kinds[i] = kind
    new = _inside(rewriter, eqn, body, kinds, readers=readers)
    back = list(map(_carried, state, new.outs[: len(state)], own))
    if back == state:
      break
    state = back
  new = _inside(rewriter, eqn, body, kinds, _dtypes(state), readers)
  for i, kind in zip(body.carried, state, strict=True):
    if kind is not None:
      atoms[i] = rewriter.read(eqn.invars[i], eqn, kind.variable)
  tested = [_inside(rewriter, eqn, test, kinds, readers=(EXACT,)) for test in tests]
  outs = (*state, *new.outs[len(state) :])
  rewriter.write(eqn, atoms, outs, _params(eqn, inners, [*tested, new]))


def _carried(state: Kind | None, returned: Kind | None, own: bool) -> Kind | None:
  """Returns the kind of a carry that comes in as `state` and is returned as `returned`."""
  carry = joined((state, returned))
  if carry is None or not carry.is_low:
    return carry
  started = state is not None and not state.is_low  # As a neutral one.
  held = (started or carry.held) and not own
  return carry._replace(neutral=False, held=held, widened=held and carry.widened and not started)


_RULES: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, tuple[Inner, ...]], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE, Holds.SHARD_MAP), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _custom),
  Holds.COND: _cond,
  **dict.fromkeys((Holds.SCAN, Holds.WHILE), _loop),
}
