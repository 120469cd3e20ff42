"""Programs inside programs: each is rewritten for the dtypes in which its operands come."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._autocast._custom_rules import Rule, with_rule
from mpjax._autocast._demands import HALF, RESULT, of_loop
from mpjax._autocast._rewrite import Rewriter, Rewritten
from mpjax._autocast._scopes import names_of, region
from mpjax._autocast._values import FLOAT32, Dtype, Kind, Scope, Settings, dtype_of, kept
from mpjax._jaxpr import BODIES, opened

Kinds = tuple[Kind | None, ...]


def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: Sequence[Dtype | None],
  wanted: Sequence[int],
  settings: Settings,
  scope: Scope,
  *,
  once: bool = False,
) -> Rewritten:
  """Returns a program rewritten.

  Args:
    jaxpr: the program.
    ins: the kinds of its arguments, None for what is no floating value of ours.
    outs: the dtypes that its results must have; None leaves the choice.
    wanted: what is wanted of its results, see `demands`.
    settings: what was asked for.
    scope: where it stands.
    once: its constants are known: no gradient flows to them, and one cast is enough.
  """
  self = Rewriter(jaxpr, settings, scope, wanted)
  for var in jaxpr.constvars:
    kind = self.kind_of(var, neutral=True)
    if kind is not None:
      self.define(var, kind, scope=None, once=once)
  invars = [
    var if kind is None else self.define(var, kind, scope=None, once=False)
    for var, kind in zip(jaxpr.invars, ins, strict=True)
  ]
  self.given(jaxpr.invars)
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in BODIES:
      _enter(self, eqn)
    else:
      self.first_order(eqn)
  pairs = [_result(self, *each, jaxpr) for each in zip(jaxpr.outvars, outs, strict=True)]
  results, kinds = [p[0] for p in pairs], [p[1] for p in pairs]
  new = jaxpr.replace(invars=invars, outvars=results, eqns=self.eqns)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed)


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


@kept
def _inside(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: tuple[Dtype | None, ...],
  wanted: tuple[int, ...],
  settings: Settings,
  scope: Scope,
) -> Rewritten:
  """`rewrite`, kept: the same function called twice is rewritten once, and compiled once."""
  return rewrite(jaxpr, ins, outs, wanted, settings, scope)


def _enter(self: Rewriter, eqn: JaxprEqn) -> None:
  """Writes an equation that holds programs."""
  scope, half = self.place(eqn)
  rule = _RULES.get(eqn.primitive.name)
  if rule is None or (half is None and not _entered_inside(eqn, scope, self.settings)):
    return self.untouched(eqn)
  return rule(self, eqn)


def _entered_inside(eqn: JaxprEqn, scope: Scope, settings: Settings) -> bool:
  """Whether some scope inside of an equation that stays as it is has a rule of its own."""
  if not settings.rules:
    return False
  bodies = [body for body, _ in BODIES[eqn.primitive.name](eqn.params)]
  return any(_entered(opened(body), scope, settings) for body in bodies)


@kept
def _entered(jaxpr: Jaxpr, scope: Scope, settings: Settings) -> bool:
  places = [(eqn, scope + names_of(str(eqn.source_info.name_stack))) for eqn in jaxpr.eqns]
  return any(
    region(place, settings) is not None
    or (eqn.primitive.name in BODIES and _entered_inside(eqn, place, settings))
    for eqn, place in places
  )


def _operands(self: Rewriter, eqn: JaxprEqn) -> tuple[list[Any], Kinds]:
  """The operands as they are handed in, and their kinds."""
  scope, half = self.place(eqn)
  atoms, kinds = [], []
  for atom in eqn.invars:
    if half is None:  # Nothing changes here, only in some scope inside.
      value = self.value(atom, self.settings.compute)
      atoms.append(self.original(atom, eqn))
      kinds.append(None if value is None else Kind(dtype_of(atom), value.neutral))
      continue
    value = self.read(atom, eqn, scope, half)
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
  """Where the programs inside stand. It matters to rules alone, and would split the cache."""
  return self.place(eqn)[0] if self.settings.rules else ()


def _replaced(old: Any, new: Rewritten) -> Any:
  if not isinstance(old, ClosedJaxpr):
    return new.jaxpr
  return ClosedJaxpr(new.jaxpr, old.consts) if old.consts else new.closed


def _call(self: Rewriter, eqn: JaxprEqn) -> None:
  """A program that runs once, between the operands and the results."""
  body = BODIES[eqn.primitive.name](eqn.params)[0][0]
  key = next(k for k, v in eqn.params.items() if v is body)
  jaxpr = opened(body)
  atoms, ins = _operands(self, eqn)
  donated = eqn.params.get("donated_invars") or (False,) * len(atoms)
  if any(donated):
    for i, gone in enumerate(donated):
      if gone and ins[i] is not None:  # Its memory is to be taken over: that has the old size.
        atoms[i] = self.original(eqn.invars[i], eqn)
        ins = (*ins[:i], Kind(dtype_of(jaxpr.invars[i])), *ins[i + 1 :])
  outs = (None,) * len(eqn.outvars)
  new = _inside(jaxpr, ins, outs, _wanted(self, eqn), self.settings, _scope(self, eqn))
  params = {**eqn.params, key: _replaced(body, new)}
  self.write(eqn, atoms, new.outs, params, once=_once(self, eqn))


def _composite(self: Rewriter, eqn: JaxprEqn) -> None:
  """A program that a compiler may replace by a kernel: outside it has the types that this has."""
  body = eqn.params["jaxpr"]
  atoms = [self.original(atom, eqn) for atom in eqn.invars]
  ins = tuple(self.kind_of(v, neutral=True) for v in eqn.invars)
  kinds = [self.kind_of(v) for v in eqn.outvars]
  outs = tuple(None if k is None else k.dtype for k in kinds)
  new = _inside(body.jaxpr, ins, outs, _wanted(self, eqn), self.settings, _scope(self, eqn))
  self.write(eqn, atoms, kinds, {**eqn.params, "jaxpr": _replaced(body, new)})


def _custom(self: Rewriter, eqn: JaxprEqn) -> None:
  """A function with a rule of its own for derivatives or batches."""
  body: Any = BODIES[eqn.primitive.name](eqn.params)[0][0]
  atoms, ins = _operands(self, eqn)
  settings, scope = self.settings, _scope(self, eqn)
  outs = (None,) * len(eqn.outvars)
  new = _inside(body.jaxpr, ins, outs, _wanted(self, eqn), settings, scope)

  def again(jaxpr: Jaxpr, ins: Kinds, outs: Sequence[Dtype | None]) -> Rewritten:
    return rewrite(jaxpr, ins, outs, (0,) * len(outs), settings, scope)

  made = with_rule(Rule(eqn, ins, new.outs, again), atoms, new.jaxpr)
  self.write(made, made.invars, new.outs, once=_once(self, eqn))


def _cond(self: Rewriter, eqn: JaxprEqn) -> None:
  """Branches that must agree: where one hands on float32, all do."""
  atoms, ins = _operands(self, eqn)
  wanted, scope = _wanted(self, eqn), _scope(self, eqn)
  branches = eqn.params["branches"]

  def every(outs: tuple[Dtype | None, ...]) -> list[Rewritten]:
    return [_inside(b.jaxpr, ins[1:], outs, wanted, self.settings, scope) for b in branches]

  free = every((None,) * len(eqn.outvars))
  kinds = [_agreed(each, want) for want, *each in zip(wanted, *(b.outs for b in free), strict=True)]
  new = every(tuple(None if k is None else k.dtype for k in kinds))
  closed = tuple(_replaced(b, n) for b, n in zip(branches, new, strict=True))
  self.write(eqn, atoms, kinds, {**eqn.params, "branches": closed}, once=_once(self, eqn))


def _agreed(kinds: Sequence[Kind | None], wanted: int) -> Kind | None:
  """The kind of a result that comes from one of several branches."""
  known = [k for k in kinds if k is not None]
  if wanted & RESULT and not wanted & HALF and any(k.dtype == FLOAT32 for k in known):
    return Kind(FLOAT32, all(k.neutral for k in known))  # An argument that may come back unchanged.
  # By name, should there be two half types.
  order = sorted(known, key=lambda k: (k.neutral, -k.dtype.itemsize, k.dtype.name))
  return order[0] if order else None


def _carry(
  self: Rewriter,
  body: Jaxpr,
  ins: Kinds,
  before: int,
  carry: int,
  wanted: tuple[int, ...],
  scope: Scope,
) -> tuple[Rewritten, Kinds]:
  """Rewrites the body of a loop. What it carries is half if it starts and goes on in half.

  Returns:
    The body, and the kinds of what comes in, of which the carry has those it has at each turn.
  """
  start = ins[before : before + carry]
  state = [k if k is None else Kind(k.dtype) for k in start]
  while True:
    ins = (*ins[:before], *state, *ins[before + carry :])
    free = (None,) * len(body.outvars)
    new = _inside(body, ins, free, wanted, self.settings, scope)
    back = [_wider(*each) for each in zip(state, new.outs[:carry], strict=True)]
    if back == state:
      break
    state = back
  fixed = (*(None if k is None else k.dtype for k in state), *free[carry:])
  return _inside(body, ins, fixed, wanted, self.settings, scope), ins


def _wider(state: Kind | None, handed_on: Kind | None) -> Kind | None:
  if state is None or handed_on is None or handed_on.dtype.itemsize <= state.dtype.itemsize:
    return state
  return Kind(handed_on.dtype)


def _carried(self: Rewriter, eqn: JaxprEqn, atoms: list[Any], ins: Kinds, first: int) -> list[Any]:
  """The operands, with the start of the carry in the dtype that it has at each turn."""
  made = list(atoms)
  for i, kind in enumerate(ins[first:], start=first):
    if kind is not None and made[i].aval.dtype != kind.dtype:
      value = self.value(eqn.invars[i], kind.dtype)
      made[i] = made[i] if value is None else self.view(value, kind.dtype, eqn)
  return made


def _scan(self: Rewriter, eqn: JaxprEqn) -> None:
  params = eqn.params
  consts, carry = params["num_consts"], params["num_carry"]
  atoms, ins = _operands(self, eqn)
  body = params["jaxpr"]
  wanted = of_loop(body.jaxpr, consts, carry, _wanted(self, eqn), self.settings)
  new, ins = _carry(self, body.jaxpr, ins, consts, carry, wanted, _scope(self, eqn))
  atoms = _carried(self, eqn, atoms, ins, consts)
  self.write(eqn, atoms, new.outs, {**params, "jaxpr": _replaced(body, new)})


def _while(self: Rewriter, eqn: JaxprEqn) -> None:
  params = eqn.params
  of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
  carry = len(eqn.outvars)
  atoms, ins = _operands(self, eqn)
  body, test = params["body_jaxpr"], params["cond_jaxpr"]
  scope = _scope(self, eqn)
  # Nothing is kept of it for a backward pass, and whether it ends may depend on its last bits.
  ins = (
    *ins[: of_cond + of_body],
    *(
      Kind(FLOAT32) if kind is not None and dtype_of(atom) == FLOAT32 else kind
      for atom, kind in zip(eqn.invars[of_cond + of_body :], ins[of_cond + of_body :], strict=True)
    ),
  )
  wanted = of_loop(body.jaxpr, of_body, carry, _wanted(self, eqn), self.settings)
  new, inner = _carry(self, body.jaxpr, ins[of_cond:], of_body, carry, wanted, scope)
  ins = (*ins[:of_cond], *inner)
  state = ins[of_cond + of_body :]
  atoms = _carried(self, eqn, atoms, ins, of_cond + of_body)
  tested = _inside(test.jaxpr, (*ins[:of_cond], *state), (None,), (0,), self.settings, scope)
  both = {"body_jaxpr": _replaced(body, new), "cond_jaxpr": _replaced(test, tested)}
  self.write(eqn, atoms, new.outs, {**params, **both})


_RULES: Mapping[str, Callable[[Rewriter, JaxprEqn], None]] = {
  **dict.fromkeys(("call", "checkpoint", "closed_call", "jit", "remat2", "shard_map"), _call),
  **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"), _custom),
  "composite": _composite,
  "cond": _cond,
  "scan": _scan,
  "while": _while,
}
