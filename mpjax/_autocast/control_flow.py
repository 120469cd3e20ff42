"""Equations that hold jaxprs: calls, branches and loops.

Each inner jaxpr is rewritten for the kinds in which its operands come, so that it computes what it
would compute if it were written out.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpjax._autocast.advice import warn_of_linear_algebra
from mpjax._autocast.consumers import flags_of_loop
from mpjax._autocast.kinds import Kind, Role, fits, joined, kinds_of_constants
from mpjax._autocast.rewriter import Rewriter, Rewritten
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import Atom, Inner, donated, dtype_of, with_inner

Inners = tuple[Inner, ...]


def call(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes a jaxpr that runs once, between the operands and the results."""
  atoms, kinds = operands_of(rewriter, eqn)
  # A compiler may put something else of the same name and types in place of a composite.
  keeps_types = facts_of(eqn).holds is Holds.COMPOSITE
  outs = tuple(map(dtype_of, eqn.outvars)) if keeps_types else ()
  new = rewritten(rewriter, eqn, inners[0], kinds, outs)
  rewriter.write(eqn, atoms, new.outs, params_of(eqn, inners, [new]))


def cond(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes branches that must agree: their result is that of a selection."""
  atoms, kinds = operands_of(rewriter, eqn)
  free = [rewritten(rewriter, eqn, branch, kinds).outs for branch in inners]
  chosen = [_selected(each) for each in zip(*free, strict=True)]
  new = [rewritten(rewriter, eqn, branch, kinds, dtypes_of(chosen)) for branch in inners]
  rewriter.write(eqn, atoms, chosen, params_of(eqn, inners, new))


def _selected(branches: Sequence[Kind | None]) -> Kind | None:
  kinds = [kind for kind in branches if kind is not None]
  if not kinds:
    return None
  kind = joined(*kinds)
  wide = kind.is_low and not fits(kinds, kind.dtype)
  return kind._replace(dtype=FLOAT32) if wide else kind


def loop(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes a scan or a while. A carry is float32 if it starts so, or is returned so."""
  *tests, body = inners
  atoms, kinds = operands_of(rewriter, eqn)
  _widen_operands(rewriter, eqn, body, kinds, is_while=bool(tests))
  inside = rewriter.settings, rewriter.place(eqn).inside
  flags = flags_of_loop(body, flags_of_results(rewriter, eqn), *inside)
  # A carry that the user has cast to low precision stays in it.
  first, last = body.carry.start, body.carry.stop
  fixed = [dtype_of(v) != FLOAT32 for v in body.jaxpr.invars[first:last]]
  # The next iteration may have other numbers.
  starts = [kinds[i] for i in body.carried]
  state = [k and k._replace(variable=None, numbers=None) for k in starts]
  # What the body returns depends on how the carry comes in, so it is rewritten until nothing
  # changes. Roles only grow, and dtypes only widen: that ends.
  while True:
    for i, kind in zip(body.carried, state, strict=True):
      kinds[i] = kind
    new = rewritten(rewriter, eqn, body, kinds, flags=flags)
    back = list(map(_carried, state, new.outs[: len(state)], fixed))
    if back == state:
      break
    state = back
  new = rewritten(rewriter, eqn, body, kinds, dtypes_of(state), flags)
  for i, kind in enumerate(kinds):
    if kind is not None:
      atoms[i] = rewriter.read(eqn.invars[i], eqn, kind.variable or kind.dtype)
  tested = [rewritten(rewriter, eqn, test, kinds, flags=(0,)) for test in tests]
  outs = (*state, *new.outs[len(state) :])
  rewriter.write(eqn, atoms, outs, params_of(eqn, inners, [*tested, new]))


def _widen_operands(
  rewriter: Rewriter, eqn: JaxprEqn, body: Inner, kinds: list[Kind | None], *, is_while: bool
) -> None:
  """Makes the operands of a loop float32 that low precision would harm in it."""
  if rewriter.place(eqn).compute_dtype is None:
    return
  for place, i in enumerate(body.operands or ()):
    kind = kinds[i]
    if kind is None or not kind.is_low or dtype_of(eqn.invars[i]) != FLOAT32:
      continue
    if is_while and place in body.carry:
      # Nothing is kept of a while for a backward pass, and whether it ends may depend on the last
      # bits: an iteration until the change is below 1e-4 never ends in bfloat16.
      kinds[i] = kind._replace(dtype=FLOAT32, variable=None)
    elif not is_while and place < body.carry.start:
      # A constant is cast in each iteration: its gradient is a sum over all iterations, which
      # stops growing after 256 equal ones in bfloat16.
      kinds[i] = kind._replace(variable=FLOAT32)


def _carried(state: Kind | None, returned: Kind | None, fixed: bool) -> Kind | None:
  """Returns the kind of a carry that comes in as `state` and is returned as `returned`."""
  if state is None or returned is None:
    return None
  carry = joined(state, returned)
  starts_wide = carry.role == Role.ACTIVATION and state.dtype == FLOAT32
  return carry._replace(dtype=state.dtype) if fixed or starts_wide else carry


# What all of them do.


def operands_of(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[list[Atom], list[Kind | None]]:
  """Returns the operands of an equation as the jaxprs inside take them, and their kinds."""
  low, keeps_types = rewriter.place(eqn).compute_dtype, facts_of(eqn).holds is Holds.COMPOSITE
  atoms, kinds = list(eqn.invars), list(map(rewriter.kind, eqn.invars))
  for i, (atom, gone) in enumerate(zip(eqn.invars, donated(eqn), strict=True)):
    kind = kinds[i]
    if kind is None:
      continue
    if low is None and dtype_of(atom) == FLOAT32:  # Only a scope inside changes anything.
      kind = kind._replace(dtype=FLOAT32)
    if keeps_types or gone:  # The memory of an operand that is donated has the size it had.
      kind = kind._replace(variable=dtype_of(atom))
    atoms[i], kinds[i] = rewriter.read(atom, eqn, kind.variable or kind.dtype), kind
  return atoms, kinds


def rewritten(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  operands: Sequence[Kind | None],
  outs: tuple[DType | None, ...] = (),
  flags: tuple[int, ...] | None = None,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten, for the kinds of all operands of that."""
  program, settings = inner.program, rewriter.settings
  consts = kinds_of_constants(program.consts, settings) if isinstance(program, ClosedJaxpr) else ()
  kinds = tuple(operands[i] for i in inner.operands or ())
  flags = flags_of_results(rewriter, eqn) if flags is None else flags
  scope = rewriter.place(eqn).inside
  new = rewriter.rewrite(inner.jaxpr, kinds, outs, flags, settings, scope, consts)
  warn_of_linear_algebra(rewriter, eqn, new.linear_algebra)
  return new


def flags_of_results(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(rewriter.flags.get(v, 0) for v in eqn.outvars)


def params_of(eqn: JaxprEqn, inners: Inners, new: Sequence[Rewritten]) -> dict[str, Any]:
  """Returns the parameters of an equation with its jaxprs rewritten, closed where they were."""
  programs = [
    each.jaxpr
    if not isinstance(inner.program, ClosedJaxpr)
    else each.closed or ClosedJaxpr(each.jaxpr, inner.program.consts)
    for inner, each in zip(inners, new, strict=True)
  ]
  return with_inner(eqn, programs)


def dtypes_of(kinds: Sequence[Kind | None]) -> tuple[DType | None, ...]:
  return tuple(kind and (kind.variable or kind.dtype) for kind in kinds)
