"""Equations that hold jaxprs: calls, branches and loops.

Each inner jaxpr is rewritten for the kinds of its operands. Its results therefore equal those of
the inlined code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._autocast.consumers import flags_of_loop
from mpjax._autocast.kinds import Kind, Role, fits, joined, kinds_of_constants
from mpjax._autocast.numbers import Numbers, numbers_of_carry
from mpjax._autocast.origins import of_atoms, origins_inside
from mpjax._autocast.rewriter import Rewriter, Rewritten
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import Atom, Inner, donated, dtype_of, with_inner

Inners: TypeAlias = tuple[Inner, ...]


def call(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes an equation that calls a jaxpr once."""
  atoms, kinds = operands_of(rewriter, eqn)
  # A compiler may replace a composite by its name and types, so these stay.
  keeps_types = facts_of(eqn).holds is Holds.COMPOSITE
  outs = tuple(map(dtype_of, eqn.outvars)) if keeps_types else ()
  new = rewrite_inner(rewriter, eqn, inners[0], kinds, outs)
  rewriter.write(eqn, atoms, new.outs, params_of(eqn, inners, [new]))


def cond(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes branches, which must return the same dtypes."""
  atoms, kinds = operands_of(rewriter, eqn)
  # First without fixed dtypes, to learn what each branch returns. Then again with the joined
  # dtypes, since JAX requires branches of one type.
  free = [rewrite_inner(rewriter, eqn, branch, kinds).outs for branch in inners]
  chosen = [_selected(each) for each in zip(*free, strict=True)]
  new = [rewrite_inner(rewriter, eqn, branch, kinds, dtypes_of(chosen)) for branch in inners]
  rewriter.write(eqn, atoms, chosen, params_of(eqn, inners, new))


def _selected(each: Sequence[Kind | None]) -> Kind | None:
  """Returns the kind of a value selected from others; None if it is not floating."""
  kinds = [kind for kind in each if kind is not None]
  if len(kinds) < len(each):
    return None
  kind = joined(*kinds)
  # One of the values may be a number such as -1e9, which is infinite in float16.
  is_out_of_range = kind.is_low and kind.role != Role.NUMBER and not fits(kinds, kind.dtype)
  return kind._replace(dtype=FLOAT32) if is_out_of_range else kind


def loop(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes a `scan` or `while` whose carries enter and leave the body with the same kinds."""
  *tests, body = inners  # A `while` has one test, a `scan` none.
  atoms, kinds = operands_of(rewriter, eqn)
  scope_policy = rewriter.scope_policies(eqn)
  inside = rewriter.scope_policies.inside(eqn)
  # The next iteration is a consumer too, so the flags come before the kinds.
  flags = flags_of_loop(
    body,
    flags_of_each_result(rewriter, eqn),
    origins_inside(of_atoms(eqn.invars, rewriter.flags.origins), body, inside),
    inside,
  )
  traced = [dtype_of(v) for v in body.jaxpr.invars]
  if scope_policy.low_dtype is not None and tests:
    _widen_carries(body, kinds, traced)
  elif scope_policy.low_dtype is not None:
    _widen_constants(body, kinds, traced)
  # A carry that the user has cast to low precision stays in it. All carries of a `while` keep the
  # dtypes that `_widen_carries` gave them.
  fixed = [bool(tests) or traced[i] != FLOAT32 for i in body.carry]
  state = _settle_carries(rewriter, eqn, body, kinds, flags, fixed)
  new = rewrite_inner(rewriter, eqn, body, kinds, dtypes_of(state), flags)
  # The steps above have changed kinds of operands, so these are read again in the new dtypes.
  for i, kind in enumerate(kinds):
    if kind is not None:
      atoms[i] = rewriter.read(eqn.invars[i], eqn, kind.variable or kind.dtype)
  tested = [rewrite_inner(rewriter, eqn, test, kinds, flags=(0,)) for test in tests]
  outs = (*state, *new.outs[len(state) :])
  rewriter.write(eqn, atoms, outs, params_of(eqn, inners, [*tested, new]))


def _settle_carries(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  body: Inner,
  kinds: list[Kind | None],
  flags: tuple[int, ...],
  fixed: Sequence[bool],
) -> list[Kind | None]:
  """Finds kinds of the carries that the body also returns, and sets and returns them.

  The kinds of results depend on the kinds of carries, so the body is rewritten until nothing
  changes. This ends, because roles only grow, dtypes of activations only widen, and the numbers of
  a carry change only a few times: see `numbers_of_carry`.
  """
  starts = [kinds[i] for i in body.carried]
  state = starts = [kind and kind._replace(variable=None) for kind in starts]
  turn = 0
  while True:
    for i, kind in zip(body.carried, state, strict=True):
      kinds[i] = kind
    new = rewrite_inner(rewriter, eqn, body, kinds, flags=flags)
    numbers = functools.partial(numbers_of_carry, times=body.times, turn=turn)
    each = zip(starts, state, new.outs[: len(state)], fixed, strict=True)
    returned = [_carried(*carry, numbers) for carry in each]
    if returned == state:
      return state
    state, turn = returned, turn + 1


def _widen_carries(body: Inner, kinds: list[Kind | None], traced: Sequence[DType | None]) -> None:
  """Makes the carries of a `while` float32.

  A loop that runs until the change is below 1e-4 never ends in bfloat16. A `while` saves nothing
  for a backward pass, so float32 costs little memory.
  """
  for i, place in zip(body.carried, body.carry, strict=True):
    kind = kinds[i]
    if kind is not None and traced[place] == FLOAT32:
      kinds[i] = kind._replace(dtype=FLOAT32, variable=None)


def _widen_constants(body: Inner, kinds: list[Kind | None], traced: Sequence[DType | None]) -> None:
  """Keeps the constants of a `scan` in float32 variables, so that each iteration casts them.

  Their gradient is a sum over all iterations. In bfloat16 it would stop after 256 equal terms.
  """
  # The constants are the inputs of the body before its carry.
  for i, dtype in zip(body.operands or (), traced[: body.carry.start], strict=False):
    kind = kinds[i]
    if kind is not None and kind.is_low and dtype == FLOAT32:
      kinds[i] = kind._replace(variable=FLOAT32)


def _carried(
  start: Kind | None,
  state: Kind | None,
  returned: Kind | None,
  fixed: bool,
  numbers: Callable[[Numbers, Numbers, Numbers], Numbers],
) -> Kind | None:
  """Returns the kind of a carry that enters as `state` and leaves as `returned`.

  It entered the first iteration as `start`. `numbers` is `numbers_of_carry` for the loop.
  """
  carry = _selected((state, returned))
  if carry is None or start is None or state is None or returned is None:
    return None
  if carry.role < Role.INPUT:
    found = numbers(start.numbers, state.numbers, returned.numbers)
    carry = carry._replace(numbers=found)
  # Each iteration may add to a carry that starts as a number, so it stays in float32.
  is_sum = carry.role >= Role.UNROUNDED and state.role == Role.NUMBER
  return carry._replace(dtype=state.dtype) if fixed or is_sum else carry


# Helpers for all of them.


def operands_of(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[list[Atom], list[Kind | None]]:
  """Returns the operands of an equation for its inner jaxprs, and their kinds."""
  low = rewriter.scope_policies(eqn).low_dtype
  keeps_types = facts_of(eqn).holds is Holds.COMPOSITE
  atoms = list(eqn.invars)
  kinds = [rewriter.kind(atom) or rewriter.literal(atom) for atom in atoms]
  for i, (atom, gone) in enumerate(zip(eqn.invars, donated(eqn), strict=True)):
    kind = kinds[i]
    if kind is None:
      continue
    # The equation is outside every policy, although a scope inside may have one. It reads float32.
    if low is None and dtype_of(atom) == FLOAT32:
      kind = kind._replace(dtype=FLOAT32)
    if keeps_types or gone:  # A donated buffer must keep its size.
      kind = kind._replace(variable=dtype_of(atom))
    atoms[i], kinds[i] = rewriter.read(atom, eqn, kind.variable or kind.dtype), kind
  return atoms, kinds


def rewrite_inner(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  operands: Sequence[Kind | None],
  outs: tuple[DType | None, ...] = (),
  flags: tuple[int, ...] | None = None,
) -> Rewritten:
  """Rewrites a jaxpr inside an equation, whose operands have these kinds.

  Args:
    rewriter: the rewriter of the jaxpr that holds the equation.
    eqn: the equation.
    inner: the jaxpr.
    operands: the kinds of all operands of the equation.
    outs: the dtypes of the results; a result without one keeps the computed dtype.
    flags: the flags of the results. None takes the flags of the results of the equation.
  """
  program, scoped = inner.program, rewriter.scope_policies.inside(eqn)
  is_closed = isinstance(program, ClosedJaxpr)
  consts = kinds_of_constants(program.consts, scoped.settings) if is_closed else ()
  kinds = tuple(operands[i] for i in inner.operands or ())
  flags = flags_of_each_result(rewriter, eqn) if flags is None else flags
  origins = origins_inside(of_atoms(eqn.invars, rewriter.flags.origins), inner, scoped)
  new = rewriter.rewrite(inner.jaxpr, kinds, outs, flags, scoped, consts, origins)
  rewriter.warn_of_linear_algebra(eqn, new.linear_algebra)
  return new


def flags_of_each_result(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  """Returns the flags of each result of an equation."""
  return tuple(map(rewriter.flags_at, eqn.outvars))


def params_of(eqn: JaxprEqn, inners: Inners, new: Sequence[Rewritten]) -> dict[str, Any]:
  """Returns the parameters of an equation with rewritten jaxprs, closed if they were closed."""
  programs: list[Jaxpr | ClosedJaxpr] = []
  for inner, each in zip(inners, new, strict=True):
    if not isinstance(inner.program, ClosedJaxpr):
      programs.append(each.jaxpr)
    elif each.closed is not None:
      # One object for each rewritten jaxpr: JAX compiles an equal object again.
      programs.append(each.closed)
    else:
      programs.append(ClosedJaxpr(each.jaxpr, inner.program.consts))
  return with_inner(eqn, programs)


def dtypes_of(kinds: Sequence[Kind | None]) -> tuple[DType | None, ...]:
  """Returns the dtypes of the variables of values; None for values that are not floating."""
  return tuple(kind and (kind.variable or kind.dtype) for kind in kinds)
