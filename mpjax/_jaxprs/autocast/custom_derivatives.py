"""Functions with rules of their own for derivatives or batches: the rule is called, and rewritten.

The rule of an equation is reached by transforming the equation itself, with `jax.jvp`, `jax.vjp` or
`jax.vmap`, inside of a function that has the rewritten jaxpr as its body. Nothing is traced
before JAX asks for the rule: only then the axes of a `shard_map` are bound.

Without this, differentiating the rewritten body would drop what the user wrote: the gradient of
`jax.nn.relu` at 0 would be 0.5, that of a maximum, and a `custom_vjp` for attention would save the
matrix that it was written to avoid. And with the rule unchanged, all that it saves is float32.

One kind of rule is out of reach: one that closes over a value of the function that is autocast, as
a `custom_jvp` inside of a layer that reads the weight of the layer. The function was traced before,
and that value is gone. So such a function is differentiated at once, rules and all, inside of one
trace, and the derivative is rewritten: see `differentiated_at_once`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.active import ACTIVE, Active
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, DType, Function, Leaf, PyTree
from mpjax._jaxprs.autocast.boundary import InDtype
from mpjax._jaxprs.autocast.rewriter import Rewritten, traced
from mpjax._jaxprs.autocast.run import jaxpr_of, typed
from mpjax._jaxprs.autocast.values import Kinds
from mpjax._jaxprs.compat import context_of, without_scopes
from mpjax._jaxprs.locations import PREFIX
from mpjax._jaxprs.primitives import Holds, facts_of
from mpjax._jaxprs.reader import (
  Atom,
  aval_of,
  closed_over,
  name_of,
  with_inner,
)

Rewrite: TypeAlias = Callable[[Jaxpr, Kinds, Sequence[DType | None], bool], Rewritten]
"""Rewrites a jaxpr for kinds of arguments and dtypes of results; None is free. The last
argument says whether the jaxpr is that of a derivative."""

Call: TypeAlias = Callable[..., list[Array]]
"""A function of arrays: of those that a jaxpr takes, with its results."""


class CustomCall(NamedTuple):
  """An equation with a rule as it was traced, and the kinds of its operands and results now.

  `state` is that of policies in which it was traced. The rule is called when that was left: a Flax
  module in the rule would run under no policy, or under that of another module.
  """

  eqn: JaxprEqn
  ins: Kinds
  outs: Kinds
  rewrite: Rewrite
  state: Active | None


def with_rule(
  eqn: JaxprEqn, ins: Kinds, operands: Sequence[Atom], new: Rewritten, rewrite: Rewrite
) -> JaxprEqn:
  """Returns an equation with a new body for operands of these kinds, and its rule rewritten too."""
  closed = ClosedJaxpr(new.jaxpr, ())  # JAX passes what the body closes over as operands.
  holds = facts_of(eqn).holds

  def call(*operands: Array) -> list[Array]:
    return typed(closed, operands, eqn.primitive.name)

  # What an audit reads is no instruction, and marks for the rule are in its own scope: the rule is
  # traced as it is without any.
  names = without_scopes(eqn.source_info.name_stack, PREFIX)
  unmarked = eqn.replace(source_info=eqn.source_info.replace(name_stack=names))
  here = CustomCall(unmarked, ins, new.outs, rewrite, ACTIVE.value)
  if holds is Holds.CUSTOM_JVP:
    fun = jax.custom_jvp(call)
    fun.defjvp(functools.partial(_jvp, here))
  elif holds is Holds.CUSTOM_VJP:
    fun = jax.custom_vjp(call)
    rules = functools.partial(_forward, here), functools.partial(_backward, here)
    fun.defvjp(*rules, symbolic_zeros=closed_over(eqn) > 0)
  else:
    fun = jax.custom_batching.custom_vmap(call)
    fun.def_vmap(functools.partial(_batch, here))
  with context_of(eqn):
    traced_call = jax.make_jaxpr(fun)(*map(aval_of, operands)).jaxpr.eqns[-1]
  # `make_jaxpr` has traced only a stand-in for the body; what is kept of it are the rules.
  return eqn.replace(invars=list(operands), params=with_inner(traced_call, [closed]))


def _run(
  custom: CustomCall,
  rule: Function,
  avals: Sequence[PyTree],
  ins: Kinds,
  outs: Kinds,
  operands: Sequence[Array],
  *,
  derivative: bool = False,
) -> tuple[list[Array], Kinds, list[DType]]:
  """Traces a rule, rewrites its jaxpr and runs that.

  `avals` are the types of the rule's arguments as they were traced, which the user's rule may
  check, and `operands` the leaves of the arguments now. Kinds of results that are missing at the
  end are free. A rule that is a `derivative` is linear in some of its arguments.

  Returns:
    The results, their kinds, and the dtypes that they have without autocast.
  """

  @functools.wraps(rule)
  def in_state(*args: PyTree) -> PyTree:
    with ACTIVE(custom.state):
      return rule(*args)

  program = traced(in_state)(*avals)
  fixed = [None if kind is None else kind.variable for kind in outs]
  free = [None] * (len(program.jaxpr.outvars) - len(fixed))
  new = custom.rewrite(program.jaxpr, ins, [*fixed, *free], derivative)
  try:
    values = eval_jaxpr(new.jaxpr, program.consts, *operands)
  except jax.errors.UnexpectedTracerError as error:
    raise MpjaxTypeError(
      f"mpjax.autocast(fn), the derivative rule of {name_of(custom.eqn)}",
      expected="a rule that uses its own arguments, and constants",
      got="one that closes over an array of fn, which is gone when JAX calls the rule",
      fix="Pass that array to the function with the rule as an argument, or autocast the "
      "gradient: mpjax.autocast(jax.grad(fn)).",
    ) from error
  return values, new.outs, [aval_of(v).dtype for v in program.jaxpr.outvars]


def _as_traced(custom: CustomCall, operands: Sequence[Array]) -> list[Array]:
  """The equation itself, in the dtypes that it was traced with."""
  # New variables: an operand may be there twice, or be a literal.
  variables = [Var(atom.aval) for atom in custom.eqn.invars]
  alone = custom.eqn.replace(invars=[*variables])
  return eval_jaxpr(jaxpr_of([alone], variables, alone.outvars), (), *operands)


def _with_dtype(now: Array, dtype: DType) -> ShapedArray:
  return cast(ShapedArray, jax.typeof(now)).update(dtype=dtype, weak_type=False)


def _traced_avals(atoms: Sequence[Atom], now: Sequence[Array]) -> list[ShapedArray]:
  """The types of what is there now, in the dtypes that it was traced with."""
  # The shapes are those of now: under `vmap`, an operand of a batch rule has an axis more.
  return [_with_dtype(x, aval_of(atom).dtype) for atom, x in zip(atoms, now, strict=True)]


def _replaced(args: Sequence[Any], places: Sequence[int], some: Sequence[Any]) -> list[Any]:
  by_place = dict(zip(places, some, strict=True))
  return [by_place.get(i, x) for i, x in enumerate(args)]


def _jvp(
  custom: CustomCall, primals: Sequence[Array], tangents: Sequence[Array]
) -> tuple[list[Array], list[PyTree]]:
  # Tangents of integers are of `float0`, which no jaxpr computes with: they are left out of it.
  moving = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
  smooth = [i for i, v in enumerate(custom.eqn.outvars) if is_inexact(v.aval)]

  def rule(primals: Sequence[Array], some: Sequence[Array]) -> PyTree:
    every = _replaced(tangents, moving, some)
    outs, changes = jax.jvp(lambda *a: _as_traced(custom, a), list(primals), every)
    return outs, [changes[i] for i in smooth]

  some = [tangents[i] for i in moving]
  avals = _traced_avals(custom.eqn.invars, primals)
  changes = _traced_avals([custom.eqn.invars[i] for i in moving], some)
  ins = (*custom.ins, *(custom.ins[i] for i in moving))
  outs = (*custom.outs, *(custom.outs[i] for i in smooth))
  operands = [*primals, *some]
  results, *_ = _run(custom, rule, (avals, changes), ins, outs, operands, derivative=True)
  values, changed = results[: len(custom.outs)], results[len(custom.outs) :]
  zeros = [np.zeros(np.shape(v), jax.dtypes.float0) for v in values]
  return values, _replaced(zeros, smooth, changed)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Saved:
  """What the forward rule leaves for the backward rule beside arrays, its residuals."""

  dtypes: tuple[DType, ...]  # Of the residuals, as the user's backward rule expects them.
  kinds: Kinds
  pullback: PyTree  # The structure of what `jax.vjp` returned, whose leaves the residuals are.
  moving: tuple[int, ...]  # The positions of the operands that are differentiated.


_Residuals: TypeAlias = tuple[list[Array], _Saved]


def _forward(custom: CustomCall, *operands: PyTree) -> tuple[list[Array], _Residuals]:
  """The operands are arrays, or with symbolic zeros objects with a `value` each."""
  if closed_over(custom.eqn):
    # No gradient may flow to them. If one does, JAX's own error comes from the user's rule.
    moving = tuple(i for i, p in enumerate(operands) if p.perturbed)
    primals: list[Array] = [p.value for p in operands]
  else:
    moving = tuple(i for i, v in enumerate(custom.eqn.invars) if is_inexact(v.aval))
    primals = list(operands)
  trees: list[PyTree] = []

  def rule(*primals: Array) -> PyTree:
    def of_moving(*some: Array) -> list[Array]:
      return _as_traced(custom, _replaced(primals, moving, some))

    outs, pullback = jax.vjp(of_moving, *(primals[i] for i in moving))
    leaves, tree = jax.tree.flatten(pullback)
    trees.append(tree)
    return outs, leaves

  avals = _traced_avals(custom.eqn.invars, primals)
  values, kinds, dtypes = _run(custom, rule, avals, custom.ins, custom.outs, primals)
  # What is saved may have any dtype: low precision, where it is the result of a matmul.
  count = len(custom.outs)
  saved = _Saved(tuple(dtypes[count:]), kinds[count:], trees[-1], moving)
  return values[:count], (values[count:], saved)


def _backward(
  custom: CustomCall, residuals: _Residuals, cotangents: Sequence[Array | SymbolicZero]
) -> tuple[Array | None, ...]:
  arrays, saved = residuals
  changes = [_instantiated(c) for c in cotangents]
  smooth = [i for i, c in enumerate(changes) if c.dtype != jax.dtypes.float0]

  def rule(leaves: Sequence[Array], some: Sequence[Array]) -> PyTree:
    return jax.tree.unflatten(saved.pullback, leaves)(_replaced(changes, smooth, some))

  avals = (
    # The user's backward rule is shown the dtypes that its forward rule left.
    list(map(_with_dtype, arrays, saved.dtypes)),
    _traced_avals([custom.eqn.outvars[i] for i in smooth], [changes[i] for i in smooth]),
  )
  ins = (*saved.kinds, *(custom.outs[i] for i in smooth))
  outs = tuple(custom.ins[i] for i in saved.moving)
  operands = [*arrays, *(changes[i] for i in smooth)]
  gradients, *_ = _run(custom, rule, avals, ins, outs, operands, derivative=True)
  return tuple(_replaced([None] * len(custom.ins), saved.moving, gradients))


def _batch(
  custom: CustomCall, size: int, batched: Sequence[bool], *operands: Array
) -> tuple[list[Array], list[bool]]:
  axes = [0 if each else None for each in batched]
  rule = jax.vmap(lambda *a: _as_traced(custom, a), in_axes=axes, axis_size=size)
  avals = _traced_avals(custom.eqn.invars, operands)
  values, *_ = _run(custom, rule, avals, custom.ins, custom.outs, operands)
  return values, [True] * len(values)


def _instantiated(cotangent: Array | SymbolicZero) -> Leaf:
  """Returns a cotangent as an array. JAX may give a backward rule an object instead, for zeros."""
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  aval = cast(ShapedArray, cotangent.aval)
  # That of an integer is of `float0`, and `jnp` makes no such arrays.
  number = np if aval.dtype == jax.dtypes.float0 else jnp
  return number.zeros(aval.shape, aval.dtype)


# Rules that close over values of the function.

Cast: TypeAlias = Callable[[Function, Callable[[PyTree], PyTree] | None], Function]
"""From a function, and what marks the dtypes of its results, to the function cast."""

_ByPlace: TypeAlias = dict[int, Array]
"""Some of the arguments of a function, by their positions."""


def differentiated_at_once(
  call: Call, original: Call, kinds: set[Holds], cast: Cast, dtypes: Sequence[DType] | None = None
) -> Call:
  """Returns `call`, whose derivative is all of that of `original`, cast.

  The backward pass computes the forward pass once more; a compiler sees that the two are the same.

  `cast` is done to the derivative; `dtypes` are those of the results of `call`, None if they are
  those of `original`.
  """

  def parted(args: Sequence[Array], moving: Sequence[bool]) -> tuple[_ByPlace, _ByPlace]:
    # The arguments that are differentiated, and the others, which rules may close over.
    numbered = list(enumerate(args))
    return {i: x for i, x in numbered if moving[i]}, {i: x for i, x in numbered if not moving[i]}

  def of_moving(rest: _ByPlace) -> Callable[[_ByPlace], list[Array]]:
    return lambda moving: original(*(x for _, x in sorted({**rest, **moving}.items())))

  def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    def both(moving: _ByPlace, rest: _ByPlace, changes: _ByPlace) -> PyTree:
      return jax.jvp(of_moving(rest), (moving,), (changes,))

    def with_dtypes(returned: PyTree) -> PyTree:
      # A tangent of integers is no array.
      pairs = [zip(xs, dtypes or (), strict=True) for xs in returned]
      return [[InDtype(x, d) if isinstance(x, jax.Array) else x for x, d in each] for each in pairs]

    perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
    changes, _ = parted(tangents, perturbed)
    fun = cast(both, None if dtypes is None else with_dtypes)
    return fun(*parted(primals, perturbed), changes)

  def forward(*operands: PyTree) -> tuple[list[Array], tuple[_ByPlace, _ByPlace]]:
    primals = [p.value for p in operands]
    # The arguments, not residuals: those of `original` are in the dtypes without autocast.
    return call(*primals), parted(primals, [p.perturbed for p in operands])

  def backward(
    residuals: tuple[_ByPlace, _ByPlace], cotangents: Sequence[Array | SymbolicZero]
  ) -> tuple[Array | None, ...]:
    moving, rest = residuals

    def gradients(moving: _ByPlace, rest: _ByPlace, changes: list[Array]) -> _ByPlace:
      return jax.vjp(of_moving(rest), moving)[1](changes)[0]

    def with_dtypes(returned: _ByPlace) -> PyTree:  # A gradient has the dtype of its argument.
      return {i: InDtype(x, moving[i].dtype) for i, x in returned.items()}

    by_place = cast(gradients, with_dtypes)(moving, rest, list(map(_instantiated, cotangents)))
    return tuple(by_place.get(i) for i in range(len(moving) + len(rest)))

  if Holds.CUSTOM_VJP in kinds:
    with_vjp = jax.custom_vjp(call)
    with_vjp.defvjp(forward, backward, symbolic_zeros=True)
    return with_vjp
  with_jvp = jax.custom_jvp(call)
  with_jvp.defjvp(jvp, symbolic_zeros=True)
  return with_jvp
