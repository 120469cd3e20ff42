"""Functions with derivative rules that close over values of the function that is autocast.

JAX calls a derivative rule when a function is differentiated. Autocast has traced the function by
then, and a value of that trace which the rule closes over is gone:

    def f(w, x):
      @jax.custom_jvp
      def layer(x):
        return x @ w
      layer.defjvp(lambda primals, tangents: (layer(*primals), tangents[0] @ w))
      return layer(x)

Here `jax.grad(autocast(f))` would call the rule with the `w` of a trace that is over, and JAX
raises UnexpectedTracerError. So such a function is differentiated at once, rules and all, inside of
one trace, and the derivative is rewritten.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias
from typing import cast as cast_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import Array, DType, Function, Leaf, PyTree
from mpjax._jaxprs.autocast.boundary import InDtype
from mpjax._jaxprs.inner_jaxprs import closed_over
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.walk import walk

Call: TypeAlias = Callable[..., list[Array]]

Cast: TypeAlias = Callable[[Function, Callable[[PyTree], PyTree] | None], Function]
"""From a function, and what marks the dtypes of its results, to the function cast."""

_WITH_RULE = (Holds.CUSTOM_JVP, Holds.CUSTOM_VJP)


def closes_over(program: ClosedJaxpr) -> set[Holds]:
  """Returns the kinds of functions with a rule that close over a value of the jaxpr."""
  # An autocast function inside of a loss that is differentiated: gradients flow to what it closes
  # over too, and one that is differentiated at once knows its arguments alone.
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
  call: Call,
  original: Call,
  kinds: set[Holds],
  cast: Cast,
  dtypes: Sequence[DType] | None = None,
) -> Call:
  """Returns `call`, whose derivative is all of that of `original`, cast.

  The backward pass computes the forward pass once more; a compiler sees that the two are the same.

  `cast` is done to the derivative; `dtypes` are those of the results of `call`, None if they are
  those of `original`.
  """
  if Holds.CUSTOM_VJP not in kinds:
    with_jvp = jax.custom_jvp(call)
    with_jvp.defjvp(functools.partial(_jvp, original, cast, dtypes), symbolic_zeros=True)
    return with_jvp

  def forward(*operands: PyTree) -> tuple[list[Array], tuple[_Numbered, _Numbered]]:
    primals = [p.value for p in operands]
    # The arguments, not residuals: those of `original` are in the dtypes without autocast.
    return call(*primals), _parted(primals, [p.perturbed for p in operands])

  with_vjp = jax.custom_vjp(call)
  with_vjp.defvjp(forward, functools.partial(_backward, original, cast), symbolic_zeros=True)
  return with_vjp


_Numbered: TypeAlias = dict[int, Array]
"""Some of the arguments of a function, by their positions."""


def _parted(args: Sequence[Array], moving: Sequence[bool]) -> tuple[_Numbered, _Numbered]:
  """Returns the arguments that are differentiated, and the others, which rules may close over."""
  pairs = list(zip(args, moving, strict=True))
  some, rest = ({i: x for i, (x, m) in enumerate(pairs) if m is want} for want in (True, False))
  return some, rest


def _of_moving(original: Call, rest: _Numbered) -> Callable[[_Numbered], list[Array]]:
  def fun(moving: _Numbered) -> list[Array]:
    return original(*(x for _, x in sorted({**rest, **moving}.items())))

  return fun


def _jvp(
  original: Call,
  cast: Cast,
  dtypes: Sequence[DType] | None,
  primals: Sequence[Array],
  tangents: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
  def both(
    moving: _Numbered, rest: _Numbered, changes: _Numbered
  ) -> tuple[list[Array], list[Array]]:
    return jax.jvp(_of_moving(original, rest), (moving,), (changes,))

  perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
  changes, _ = _parted(tangents, perturbed)

  def typed(returned: tuple[list[Array], list[Array]]) -> PyTree:
    return [list(map(_in_dtype, each, dtypes or ())) for each in returned]

  return cast(both, None if dtypes is None else typed)(*_parted(primals, perturbed), changes)


def _in_dtype(x: Array, dtype: DType) -> InDtype | Array:
  """Returns a mark of a dtype; of a tangent of integers, which is no array, itself."""
  return InDtype(x, dtype) if isinstance(x, jax.Array) else x


def _backward(
  original: Call,
  cast: Cast,
  parted: tuple[_Numbered, _Numbered],
  cotangents: Sequence[Array | SymbolicZero],
) -> tuple[Array | None, ...]:
  def gradients(moving: _Numbered, rest: _Numbered, changes: list[Array]) -> _Numbered:
    return jax.vjp(_of_moving(original, rest), moving)[1](changes)[0]

  changes = [instantiated(c) for c in cotangents]
  moving, rest = parted

  def typed(returned: _Numbered) -> PyTree:
    # A gradient has the dtype of its argument.
    return {i: InDtype(x, moving[i].dtype) for i, x in returned.items()}

  found = cast(gradients, typed)(moving, rest, changes)
  return tuple(found.get(i) for i in range(len(moving) + len(rest)))


def instantiated(cotangent: Array | SymbolicZero) -> Leaf:
  """Returns a cotangent as an array. JAX may give a backward rule an object instead, for zeros."""
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  aval = cast_type(ShapedArray, cotangent.aval)
  # That of an integer is of `float0`, of which `jnp` makes no arrays.
  number = np if aval.dtype == jax.dtypes.float0 else jnp
  return number.zeros(aval.shape, aval.dtype)


def evaluated(
  jaxpr: Jaxpr, consts: Sequence[Array], operands: Sequence[Array], name: str
) -> list[Array]:
  """Returns the results of a jaxpr, which came from the derivative rule of the function `name`.

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
