"""Functions with a custom rule for derivatives or batches.

Such a function is created again around the rewritten jaxpr. The new rule transforms the original
equation with `jax.jvp`, `jax.vjp` or `jax.vmap`, which calls the user's rule. It then rewrites the
resulting jaxpr. Nothing is traced before JAX calls the rule, since only then the axes of a
`shard_map` are bound.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from mpjax._autocast.consumers import flags_of_result
from mpjax._autocast.control_flow import (
  Inners,
  dtypes_of,
  flags_of_each_result,
  operands_of,
  rewrite_inner,
)
from mpjax._autocast.kinds import Kind, kinds_of_constants
from mpjax._autocast.numbers import UNKNOWN
from mpjax._autocast.precision import traced
from mpjax._autocast.rewriter import Rewrite, Rewriter
from mpjax._autocast.scopes import ScopedSettings, policy_at
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import Array, DType, Function, Leaf, PyTree, is_inexact
from mpjax._jaxpr.calls import called, jaxpr_for, jaxpr_of
from mpjax._jaxpr.compat import context_of, without_scopes
from mpjax._jaxpr.locations import PREFIX
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of, function_name, with_inner
from mpjax._policy.active import ACTIVE, AUTOCAST, Active

# An argument or result of a rule: the dtype that it was traced with, and its kind. References have
# no dtype, since theirs never changes.
_Slot: TypeAlias = tuple[DType | None, Kind | None]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Saved:
  """Static data that the forward rule leaves for the backward rule, beside the residuals."""

  slots: tuple[_Slot, ...]
  pullback: PyTree  # the structure of the result of `jax.vjp`; the residuals are its leaves
  moving: tuple[int, ...]  # the positions of the operands that are differentiated


class _Custom(NamedTuple):
  """An equation with a rule as it was traced, its operands and results, and its scope."""

  eqn: JaxprEqn
  ins: Sequence[_Slot]  # of the operands
  outs: Sequence[_Slot]  # of the results
  flags: Sequence[int]  # of the results, as without differentiation
  scoped: ScopedSettings  # with the scopes around the rule, and the mark of its policy
  rewrite: Rewrite
  # The active policies of the trace. JAX calls the rule later. Without this state, a Flax module in
  # it would run under no policy or the policy of another module.
  state: Active | None

  def run(
    self,
    rule: Function,
    operands: Sequence[Array],
    ins: Sequence[_Slot],
    outs: Sequence[_Slot],
    flags: Sequence[int] = (),
    *,
    derivative: bool = False,
  ) -> tuple[list[Array], list[_Slot]]:
    """Traces a rule for operands in their traced dtypes, rewrites its jaxpr and runs it.

    Args:
      rule: the rule, a function of arrays.
      operands: the operands, in the dtypes of the rewritten jaxpr.
      ins: the traced dtype and the kind of each operand.
      outs: the same of the first results, which are cast to the dtypes of their kinds.
      flags: the flags of the first results, which are the results of the function itself.
      derivative: whether JAX transposes the jaxpr. It must then be linear, so without float8.

    Returns:
      The results, and the traced dtype and the kind of each.
    """

    @functools.wraps(rule)
    def in_state(*args: PyTree) -> PyTree:
      with ACTIVE(self.state), AUTOCAST(policy_at(self.scoped).low_dtype):
        return rule(*args)

    # Shapes come from the operands: under `vmap`, an operand of a batch rule has one more axis.
    pairs = zip(operands, ins, strict=True)
    program = traced(in_state)(*(_type(x, dtype) for x, (dtype, _) in pairs))
    dtypes = list(map(dtype_of, program.jaxpr.outvars))
    fixed = dtypes_of([kind for _, kind in outs])
    # A rule returns the results of the function, which have flags, and then tangents, gradients or
    # residuals. Tangents and gradients have a fixed dtype. Residuals may have any.
    others = [*fixed, *[None] * (len(dtypes) - len(fixed))][len(flags) :]
    flags = (*flags, *(flags_of_result(dtype, output=False) for dtype in others))
    kinds = tuple(kind for _, kind in ins)
    settings, scope = self.scoped
    in_derivative = derivative or settings.in_derivative
    scoped = ScopedSettings(dataclasses.replace(settings, in_derivative=in_derivative), scope)
    consts = kinds_of_constants(program.consts, scoped.settings)
    new = self.rewrite(program.jaxpr, kinds, fixed, flags, scoped, consts)
    try:
      # A tracer that the rule closes over is an array of the user's function, whose trace is over.
      values = eval_jaxpr(new.jaxpr, program.consts, *operands)
    except jax.errors.UnexpectedTracerError as error:
      raise MpjaxTypeError(
        f"mpjax.autocast(fn), the derivative rule of {function_name(self.eqn)}",
        expected="a rule that uses only its own arguments and constants",
        got="a rule that closes over an array of fn, which is gone when JAX calls the rule",
        fix="Pass that array as an argument to the function with the rule. Or autocast the "
        "gradient: mpjax.autocast(jax.grad(fn)).",
      ) from error
    return values, list(zip(dtypes, new.outs, strict=True))

  def as_traced(self, *operands: Array) -> list[Array]:
    """Runs the equation itself, in the dtypes that it was traced with."""
    # An operand may occur twice or be a literal, so each gets a new variable.
    variables = [Var(atom.aval) for atom in self.eqn.invars]
    alone = self.eqn.replace(invars=[*variables])
    return eval_jaxpr(jaxpr_of([alone], variables, alone.outvars), (), *operands)

  def of_moving(self, operands: Sequence[Array], positions: Sequence[int]) -> Function:
    """Returns the equation as a function of the operands at some positions alone."""
    return lambda *some: self.as_traced(*_replaced(operands, positions, some))

  def jvp(
    self, primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[PyTree]]:
    """Runs the rule of a `custom_jvp`: returns results and tangents for symbolic zeros."""
    # Operands without a tangent have none in the user's rule either. Tangents of integers are
    # `float0`, with which no jaxpr computes, so they are left out.
    moving = [i for i in _smooth(primals) if not isinstance(tangents[i], SymbolicZero)]
    smooth = _smooth([v.aval for v in self.eqn.outvars])
    count = len(primals)

    # Takes the primals and the tangents of `moving`, and returns the results and the tangents of
    # `smooth`: a jaxpr has one flat list of each.
    def rule(*args: Array) -> list[Array]:
      fun = self.of_moving(args[:count], moving)
      outs, changes = jax.jvp(fun, [args[i] for i in moving], list(args[count:]))
      return _with_some(outs, changes, smooth)

    operands = _with_some(primals, tangents, moving)
    ins = _with_some(self.ins, list(map(_of_change, self.ins)), moving)
    outs = _with_some(self.outs, self.outs, smooth)
    results, _ = self.run(rule, operands, ins, outs, self.flags, derivative=True)
    values, changes = results[: len(self.outs)], results[len(self.outs) :]
    # JAX expects a tangent for each result: `float0` for integers.
    zeros = [np.zeros(np.shape(v), jax.dtypes.float0) for v in values]
    return values, _replaced(zeros, smooth, changes)

  def forward(self, *operands: PyTree) -> tuple[list[Array], tuple[list[Array], _Saved]]:
    """Runs the forward rule for operands with symbolic zeros."""
    # JAX raises an error in the user's rule if a gradient flows to a value that it closes over.
    primals: list[Array] = [p.value for p in operands]
    return self._forward(primals, [i for i in _smooth(primals) if operands[i].perturbed])

  def forward_of_all(self, *primals: Array) -> tuple[list[Array], tuple[list[Array], _Saved]]:
    """Runs the forward rule where all operands may be differentiated."""
    return self._forward(primals, _smooth(primals))

  def _forward(
    self, primals: Sequence[Array], moving: Sequence[int]
  ) -> tuple[list[Array], tuple[list[Array], _Saved]]:
    """Returns the results, and the residuals with the data to rebuild the pullback from them."""
    trees: list[PyTree] = []
    references: dict[int, int] = {}  # from the position of a residual to that of an operand

    def rule(*primals: Array) -> PyTree:
      outs, pullback = jax.vjp(self.of_moving(primals, moving), *(primals[i] for i in moving))
      # The pullback is a pytree whose leaves are the user's residuals. A jaxpr returns the leaves,
      # and `_Saved` keeps the structure.
      leaves, tree = jax.tree.flatten(pullback)
      trees.append(tree)
      positions = {id(x): i for i, x in enumerate(primals) if _is_reference(jax.typeof(x))}
      references.update({i: positions[id(x)] for i, x in enumerate(leaves) if id(x) in positions})
      # No jaxpr returns a reference. A residual that is one is an operand itself.
      return [*outs, *(x for i, x in enumerate(leaves) if i not in references)]

    # Residuals may have any dtype. A result of a matmul is saved in low precision.
    values, slots = self.run(rule, primals, self.ins, self.outs, self.flags)
    count = len(self.outs)
    residuals, saved = values[count:], slots[count:]
    # In ascending order, so that each insertion leaves the later positions valid.
    for position, operand in sorted(references.items()):
      residuals.insert(position, primals[operand])
      saved.insert(position, self.ins[operand])
    return values[:count], (residuals, _Saved((*saved,), trees[-1], (*moving,)))

  def backward(
    self, residuals: tuple[list[Array], _Saved], cotangents: Sequence[Array | SymbolicZero]
  ) -> tuple[Array | None, ...]:
    """Runs the backward rule: returns gradients, None for operands that are not differentiated."""
    arrays, saved = residuals
    changes = list(map(instantiated, cotangents))
    # Cotangents of integers are `float0`, which no jaxpr accepts. The rule closes over them.
    smooth = _smooth(changes)

    def rule(*args: Array) -> PyTree:
      leaves, some = args[: len(arrays)], args[len(arrays) :]
      return jax.tree.unflatten(saved.pullback, leaves)(_replaced(changes, smooth, some))

    # The user's backward rule sees the dtypes that its forward rule saved.
    operands = _with_some(arrays, changes, smooth)
    ins = _with_some(saved.slots, list(map(_of_change, self.outs)), smooth)
    outs = [self.ins[i] for i in saved.moving]
    gradients, _ = self.run(rule, operands, ins, outs, derivative=True)
    return tuple(_replaced([None] * len(self.ins), saved.moving, gradients))

  def batch(
    self, size: int, batched: Sequence[bool], *operands: Array
  ) -> tuple[list[Array], list[bool]]:
    """Runs the rule of a `custom_vmap` for operands whose first axis is mapped."""
    axes = [0 if each else None for each in batched]
    rule = jax.vmap(self.as_traced, in_axes=axes, axis_size=size)
    values, _ = self.run(rule, operands, self.ins, self.outs, self.flags)
    return values, [True] * len(values)


def _type(x: Array, dtype: DType | None) -> AbstractValue:
  """Returns the type of an operand as it was traced, in the shape that it has now."""
  aval = jax.typeof(x)
  return aval if dtype is None else cast(ShapedArray, aval).update(dtype=dtype)


def _of_change(slot: _Slot) -> _Slot:
  """Returns the slot of a tangent or a cotangent, from that of its value."""
  dtype, kind = slot
  # If the value is a number such as 1.5, nothing is known about the numbers of its cotangent.
  return dtype, kind and kind._replace(numbers=UNKNOWN)


def _is_reference(aval: AbstractValue) -> bool:
  """Whether a type is that of a mutable `Ref`, not of an array."""
  return not isinstance(aval, ShapedArray)


def _smooth(values: Iterable[Any]) -> list[int]:
  """Returns the positions of floating and complex arrays, without references to arrays."""
  avals = [x if isinstance(x, AbstractValue) else jax.typeof(x) for x in values]
  return [i for i, x in enumerate(avals) if isinstance(x, ShapedArray) and is_inexact(x)]


def _with_some(values: Sequence[Any], others: Sequence[Any], positions: Sequence[int]) -> list[Any]:
  """Returns `values`, followed by the items of `others` at `positions`."""
  return [*values, *(others[i] for i in positions)]


def _replaced(values: Sequence[Any], positions: Sequence[int], some: Sequence[Any]) -> list[Any]:
  """Returns `values` with the items `some` at `positions`."""
  by_position = dict(zip(positions, some, strict=True))
  return [by_position.get(i, x) for i, x in enumerate(values)]


def instantiated(cotangent: Array | SymbolicZero) -> Leaf:
  """Returns a cotangent as an array, also if JAX passes an object for zeros."""
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  aval = cast(ShapedArray, cotangent.aval)
  # The cotangent of an integer is `float0`, which `jnp` cannot create.
  number = np if aval.dtype == jax.dtypes.float0 else jnp
  return number.zeros(aval.shape, aval.dtype)


def custom(rewriter: Rewriter, eqn: JaxprEqn, inners: Inners) -> None:
  """Writes a function with a custom rule for derivatives or batches."""
  atoms, ins = operands_of(rewriter, eqn)
  # The body runs where nothing is differentiated or batched.
  new = rewrite_inner(rewriter, eqn, inners[0], ins)
  # JAX passes closed-over values as operands, except to an object of jax 0.10.
  closed = ClosedJaxpr(new.jaxpr, getattr(inners[0].program, "consts", ()))
  state = ACTIVE.value
  # The modules have returned before the rewriting, so `state` is that of the outermost call. Only
  # the scope of the equation knows the policy of its module. The rule lives as long as the jaxpr
  # that holds it, so it keeps nothing of the call that a later one could find changed.
  if state is not None:
    region = rewriter.scope_policies(eqn).region
    state = dataclasses.replace(state, region=region, failed=None, token=None)

  def call(*operands: Array) -> list[Array]:
    return called(closed, operands, eqn.primitive.name)

  # `_Custom.scoped` has the marks for the rule, so the name stack keeps none. The reasons that an
  # audit reads do not apply to the rule.
  names = without_scopes(eqn.source_info.name_stack, PREFIX)
  rule = _Custom(
    eqn.replace(source_info=eqn.source_info.replace(name_stack=names)),
    [(dtype_of(v), kind) for v, kind in zip(eqn.invars, ins, strict=True)],
    [(dtype_of(v), kind) for v, kind in zip(eqn.outvars, new.outs, strict=True)],
    flags_of_each_result(rewriter, eqn),
    rewriter.scope_policies.inside(eqn),
    rewriter.rewrite,
    state,
  )
  match facts_of(eqn).holds:
    case Holds.CUSTOM_JVP:
      fun = jax.custom_jvp(call)
      fun.defjvp(rule.jvp, symbolic_zeros=True)
    case Holds.CUSTOM_VJP:
      fun = jax.custom_vjp(call)
      # JAX passes a reference to the backward rule only without symbolic zeros.
      if any(map(_is_reference, map(aval_of, atoms))):
        fun.defvjp(rule.forward_of_all, rule.backward)
      else:
        fun.defvjp(rule.forward, rule.backward, symbolic_zeros=True)
    case _:
      fun = jax.custom_batching.custom_vmap(call)
      fun.def_vmap(rule.batch)
  with context_of(eqn):
    traced_call = jaxpr_for(fun, *map(aval_of, atoms)).jaxpr.eqns[-1]
  # `traced_call` has the new rules and the stand-in `call`. The equation gets its rules and the
  # rewritten body itself, so that readers of the jaxpr see the operations.
  written = eqn.replace(primitive=traced_call.primitive)
  rewriter.write(written, atoms, new.outs, with_inner(traced_call, [closed]))
