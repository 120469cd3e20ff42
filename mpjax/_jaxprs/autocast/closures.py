"""Functions with derivative rules that close over values of the function that is autocast.

JAX calls a derivative rule when a function is differentiated. Autocast has traced the function by
then, and a value of that trace which the rule closes over is gone. So a function that closes over
one itself is differentiated at once, rules and all, inside of one trace, and the derivative is
rewritten.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._core.errors import MpjaxTypeError
from mpjax._jaxprs.inner_jaxprs import closed_over
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.walk import walk

Cast: TypeAlias = Callable[[Callable[..., Any], Callable[[Any], Any] | None], Callable[..., Any]]
"""From a function, and what says which dtypes its results have, to the function cast."""

_WITH_RULE = (Holds.CUSTOM_JVP, Holds.CUSTOM_VJP)


def closes_over(program: ClosedJaxpr) -> set[Holds]:
  """Returns the kinds of functions with a rule that close over a value of the program.

  None if the program itself closes over a tracer, which could not be differentiated at once.
  """
  if any(isinstance(const, Tracer) for const in program.consts):
    return set()
  constants = set(program.jaxpr.constvars)
  found = set[Holds]()
  for visit in walk(program):
    holds = facts_of(visit.eqn).holds
    if holds in _WITH_RULE and not constants.issuperset(visit.eqn.invars[: closed_over(visit.eqn)]):
      found.add(holds)
  return found


def differentiated_at_once(
  call: Callable[..., list[Any]],
  original: Callable[..., list[Any]],
  kinds: set[Holds],
  cast: Cast,
  dtypes: Sequence[Any] | None = None,
) -> Callable[..., list[Any]]:
  """Returns `call`, whose derivative is all of that of `original`, cast.

  The backward pass computes the forward pass once more; a compiler sees that the two are the same.

  Args:
    call: a function of arrays to a list of arrays.
    original: the function that it came from.
    kinds: what `closes_over` returned.
    cast: what is to be done to the derivative.
    dtypes: those of the results of `call`; None if they are those of `original`.
  """
  if Holds.CUSTOM_VJP not in kinds:
    with_jvp = jax.custom_jvp(call)
    with_jvp.defjvp(functools.partial(_jvp, original, cast, dtypes), symbolic_zeros=True)
    return with_jvp

  def forward(*operands: Any) -> tuple[list[Any], Any]:
    primals = [p.value for p in operands]
    return call(*primals), _parted(primals, [p.perturbed for p in operands])

  with_vjp = jax.custom_vjp(call)
  with_vjp.defvjp(forward, functools.partial(_backward, original, cast), symbolic_zeros=True)
  return with_vjp


_Numbered: TypeAlias = dict[int, Any]
"""Some of the arguments of a function, by their positions."""


def _parted(args: Sequence[Any], moving: Sequence[bool]) -> tuple[_Numbered, _Numbered]:
  """Returns the arguments that are differentiated, and the others, which rules may close over."""
  pairs = list(zip(args, moving, strict=True))
  some, rest = ({i: x for i, (x, m) in enumerate(pairs) if m is want} for want in (True, False))
  return some, rest


def _of_moving(original: Callable[..., Any], rest: _Numbered) -> Callable[[_Numbered], Any]:
  def fun(moving: _Numbered) -> Any:
    return original(*(x for _, x in sorted({**rest, **moving}.items())))

  return fun


def _jvp(
  original: Callable[..., Any],
  cast: Cast,
  dtypes: Sequence[Any] | None,
  primals: Sequence[Any],
  tangents: Sequence[Any],
) -> Any:
  def both(moving: _Numbered, rest: _Numbered, changes: _Numbered) -> Any:
    return jax.jvp(_of_moving(original, rest), (moving,), (changes,))

  perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
  changes, _ = _parted(tangents, perturbed)
  results = None if dtypes is None else lambda _: [*dtypes, *filter(_moves, dtypes)]
  return cast(both, results)(*_parted(primals, perturbed), changes)


def _moves(dtype: Any) -> bool:
  """Whether a result has a tangent that is an array."""
  return jnp.issubdtype(dtype, jnp.inexact)


def _backward(
  original: Callable[..., Any], cast: Cast, parted: Any, cotangents: Sequence[Any]
) -> tuple[Any, ...]:
  def gradients(moving: _Numbered, rest: _Numbered, changes: list[Any]) -> _Numbered:
    return jax.vjp(_of_moving(original, rest), moving)[1](changes)[0]

  changes = [_zeros(c.aval) if isinstance(c, SymbolicZero) else c for c in cotangents]
  moving, rest = parted
  dtypes = [moving[i].dtype for i in sorted(moving)]
  found = cast(gradients, lambda _: dtypes)(moving, rest, changes)
  return tuple(found.get(i) for i in range(len(moving) + len(rest)))


def _zeros(aval: Any) -> Any:
  number = np if aval.dtype == jax.dtypes.float0 else jnp
  return number.zeros(aval.shape, aval.dtype)


def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], name: str) -> list[Any]:
  """Returns the results of a program, which came from the derivative rule of the function `name`.

  Raises:
    MpjaxTypeError: the rule closes over a value of a trace that is over.
  """
  try:
    return eval_jaxpr(jaxpr, consts, *operands)
  except jax.errors.UnexpectedTracerError as error:
    raise MpjaxTypeError(
      f"mpjax.autocast(fn), the derivative rule of {name}",
      expected="a rule that uses its own arguments, and constants",
      got="one that closes over an array of fn, which is gone when JAX calls the rule",
      fix="Pass that array to the function with the rule as an argument, or autocast the "
      "gradient: mpjax.autocast(jax.grad(fn)).",
    ) from error
