"""Rewrite a jaxpr, with its inner jaxprs, for the kinds of its arguments."""

import itertools
from collections.abc import Callable, Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._autocast.activations import activations_of, is_one_equation, write_activation
from mpjax._autocast.consumers import flags_of
from mpjax._autocast.control_flow import Inners, call, cond, loop
from mpjax._autocast.custom_rules import custom
from mpjax._autocast.kinds import Kind, Kinds
from mpjax._autocast.operations import operation
from mpjax._autocast.origins import Origins
from mpjax._autocast.rewriter import Rewriter, Rewritten
from mpjax._autocast.scopes import ScopedSettings
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.compat import with_equations
from mpjax._jaxpr.primitives import AS_TRACED, Holds, facts_of, is_higher_order
from mpjax._jaxpr.reader import Atom, inner_jaxprs


@cached_per_jaxpr  # The same function called twice is rewritten once, and compiled once.
def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: tuple[DType | None, ...],
  flags: tuple[int, ...],
  scoped: ScopedSettings,
  consts: Kinds = (),
  origins: Origins = (),
) -> Rewritten:
  """Returns a jaxpr rewritten for arguments of these kinds.

  `outs` has the dtypes of its results. A result without one keeps the computed dtype. `flags` has
  the flags of the results, `consts` the kinds of the constants, and `origins` the origins of the
  arguments.
  """
  # `rewrite` is an argument, since the modules of control flow call it and are imported here.
  rewriter = Rewriter(*flags_of(jaxpr, flags, origins, scoped), rewrite)
  pairs = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True)
  variables = [var if kind is None else rewriter.define(var, kind) for var, kind in pairs]

  # Activation functions with powers, by the positions at which they end and begin.
  functions = activations_of(jaxpr, scoped.settings.ops)
  begun: dict[int, list[int]] = {}
  for end, function in functions.items():
    begun.setdefault(min(function.positions), []).append(end)
  # Positions inside of functions that are written as one equation where they end.
  inside: set[int] = set()
  for position, eqn in enumerate(jaxpr.eqns):
    for end in begun.get(position, ()):
      if is_one_equation(rewriter, functions[end]):
        inside |= functions[end].positions
    if is_higher_order(eqn):
      write = _WRITERS.get(facts_of(eqn).holds)
      inners = None if write is None else inner_jaxprs(eqn)
      if write is None or inners is None:
        rewriter.write_as_traced(eqn, None)
      else:
        write(rewriter, eqn, inners)
    elif position not in inside:
      operation(rewriter, eqn)
    elif position in functions:
      write_activation(rewriter, functions[position])

  results, kinds = list[Atom](), list[Kind | None]()
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  for atom, dtype in itertools.zip_longest(jaxpr.outvars, outs):
    value = rewriter.value(atom)
    if value is None:
      results.append(atom)
      kinds.append(None)
      continue
    kind = value.kind
    results.append(rewriter.cast(value, dtype or kind.dtype, last))
    # A cast to float32 changes no value: the kind stays in low precision, in a float32 variable. A
    # cast to low precision rounds, so consumers see that dtype.
    if dtype == FLOAT32 and kind.is_low:
      kind = kind._replace(variable=FLOAT32)
    elif dtype is not None:
      kind = kind._replace(dtype=dtype)
    kinds.append(kind)
  # Constants keep their variables, since they keep their dtypes.
  invars = variables[len(jaxpr.constvars) :]
  new = with_equations(jaxpr, rewriter.shown(), invars=invars, outvars=results)
  closed = None if new.constvars else ClosedJaxpr(new, ())
  return Rewritten(new, tuple(kinds), closed, tuple(rewriter.linear_algebra))


_WRITERS: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, Inners], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE, Holds.SHARD_MAP), call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), custom),
  Holds.COND: cond,
  **dict.fromkeys((Holds.SCAN, Holds.WHILE), loop),
  **dict.fromkeys(AS_TRACED, Rewriter.write_as_traced),
}
"""The function that writes an equation, by how it holds jaxprs."""
