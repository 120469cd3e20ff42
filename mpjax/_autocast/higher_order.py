"""Jaxprs inside jaxprs: each is rewritten for the kinds in which its operands come.

A function with a rule of its own for derivatives or batches is created again around the rewritten
jaxpr, and its rule is reached by transforming the equation as it was traced, with `jax.jvp`,
`jax.vjp` or `jax.vmap`; what that computes is rewritten. Nothing is traced before JAX asks for the
rule: only then the axes of a `shard_map` are bound.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._autocast.first_order import first_order
from mpjax._autocast.residuals import powers, saving_rounded, write_powers
from mpjax._autocast.rewriter import By, Rewriter, Rewritten, in_default, of_loop, traced
from mpjax._autocast.values import Kind, Kinds, Scope, Settings, constants, joined, survives
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.trees import is_inexact
from mpjax._core.types import FLOAT32, HALVES, Array, DType, Function, Leaf, PyTree
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.calls import called, jaxpr_of
from mpjax._jaxpr.compat import context_of, without_scopes
from mpjax._jaxpr.locations import PREFIX
from mpjax._jaxpr.primitives import Holds, facts_of, is_higher_order
from mpjax._jaxpr.reader import (
  PER_OPERAND,
  Atom,
  Inner,
  aval_of,
  donated,
  dtype_of,
  inner_jaxprs,
  name_of,
  retyped,
  with_inner,
)
from mpjax._policy.active import ACTIVE, Active


@cached_per_jaxpr  # The same function called twice is rewritten once, and compiled once.
def rewrite(
  jaxpr: Jaxpr,
  ins: Kinds,
  outs: tuple[DType | None, ...],
  readers: tuple[int, ...],
  settings: Settings,
  scope: Scope,
  consts: Kinds = (),
) -> Rewritten:
  """Returns a jaxpr rewritten for arguments of these kinds.

  `outs` has the dtypes of its results, None or missing for those that they are held in, and
  `readers` their consumers; `consts` are the kinds of its constants.
  """
  rewriter = Rewriter(jaxpr, settings, scope, readers)
  invars = [
    var if kind is None else rewriter.define(var, kind)
    for var, kind in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True)
  ][len(consts) :]
  for var, kind in zip(jaxpr.invars, ins, strict=True):
    if kind is not None and kind.paired:
      rewriter.values[var].pair = low = retyped(var, kind.dtype)
      invars.append(low)
  functions = powers(jaxpr, settings.ops)
  done: frozenset[int] = frozenset()
  for place, eqn in enumerate(jaxpr.eqns):
    if place in functions and write_powers(rewriter, functions[place]):
      done |= functions[place].places
    if is_higher_order(eqn):
      holds = facts_of(eqn).holds
      if (inners := inner_jaxprs(eqn) if holds in _RULES else None) is None:
        rewriter.untouched(eqn, None)
      else:
        _RULES[holds](rewriter, eqn, inners)
    elif place not in done:
      first_order(rewriter, eqn)
  last = jaxpr.eqns[-1] if jaxpr.eqns else None
  results, kinds = list(jaxpr.outvars), list(map(rewriter.kind, jaxpr.outvars))
  for i, (atom, dtype) in enumerate(itertools.zip_longest(jaxpr.outvars, outs)):
    value, asked = rewriter.value(atom), aval_of(atom)
    if value is None:
      continue
    kind = value.kind
    dtype = dtype or (kind.dtype if kind.widened and readers[i] == By.RETURNED else kind.current)
    results[i] = view = rewriter.view(value, dtype, last)
    if dtype == asked.dtype and aval_of(view).weak_type != asked.weak_type:
      results[i] = rewriter.cast(view, Var(asked), last)
    if dtype != kind.current:
      kinds[i] = kind._replace(carried=FLOAT32) if dtype == FLOAT32 else Kind(dtype)
  new = jaxpr.replace(invars=invars, outvars=results, eqns=rewriter.shown())
  return Rewritten(new, tuple(kinds), None if new.constvars else ClosedJaxpr(new, ()))


def _operands(
  rewriter: Rewriter, eqn: JaxprEqn, joins: bool = True
) -> tuple[list[Atom], list[Kind | None]]:
  """The operands as the jaxprs inside read them, and their kinds: as they are held."""
  # A body that `joins` the code around it reads in float32 what that reads so: their gradients,
  # which may cancel, are added before they are rounded. A call gets what is saved of them, too, so
  # that it is what the code around saves.
  half, facts = rewriter.place(eqn).half, facts_of(eqn)
  keeps_types, calls = facts.holds is Holds.COMPOSITE, facts.holds is Holds.CALL and not facts.saves
  atoms, kinds, pairs = list(eqn.invars), list(map(rewriter.kind, eqn.invars)), list[Atom]()
  for i, (atom, gone) in enumerate(zip(eqn.invars, donated(eqn), strict=True)):
    if (value := rewriter.value(atom)) is not None:
      # What is an argument inside may be a parameter there.
      kind = value.kind._replace(parameter=value.kind.parameter or value.kind.neutral)
      if dtype_of(atom) == FLOAT32 and not keeps_types:
        if half is None:
          kind = kind._replace(held=kind.is_low)  # Only a scope inside changes anything.
        elif joins and kind.rests and not gone and rewriter.adds_gradients(atom):
          low = value.at_rest if calls else None
          pairs += [] if low is None else [low]
          kind = kind._replace(carried=FLOAT32, paired=low is not None)
      if keeps_types or gone:  # The memory of one that is donated has the old size.
        kind = kind._replace(carried=dtype_of(atom))
      atoms[i], kinds[i] = rewriter.read(atom, eqn, kind.variable), kind
  return [*atoms, *pairs], kinds


def _inside(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  inner: Inner,
  ins: Sequence[Kind | None],
  outs: tuple[DType | None, ...] = (),
  readers: tuple[int, ...] | None = None,
) -> Rewritten:
  """Returns a jaxpr inside of an equation rewritten, for the kinds of all operands of that."""
  program, settings = inner.program, rewriter.settings
  consts = constants(program.consts, settings) if isinstance(program, ClosedJaxpr) else ()
  kinds = tuple(ins[i] for i in inner.operands or ())
  readers = _readers(rewriter, eqn) if readers is None else readers
  scope = rewriter.place(eqn).inside
  return rewrite(inner.jaxpr, kinds, outs, readers, settings, scope, consts)


def _readers(rewriter: Rewriter, eqn: JaxprEqn) -> tuple[int, ...]:
  return tuple(rewriter.readers.get(v, 0) for v in eqn.outvars)


def _params(eqn: JaxprEqn, inners: Sequence[Inner], new: Sequence[Rewritten]) -> dict[str, Any]:
  """Returns the parameters of an equation with its jaxprs rewritten, closed where they were."""
  programs = [
    rewritten.jaxpr
    if not isinstance(inner.program, ClosedJaxpr)
    else rewritten.closed or ClosedJaxpr(rewritten.jaxpr, inner.program.consts)
    for inner, rewritten in zip(inners, new, strict=True)
  ]
  return with_inner(eqn, programs)


def _dtypes(kinds: Sequence[Kind | None]) -> tuple[DType | None, ...]:
  return tuple(None if kind is None else kind.variable for kind in kinds)


def _call(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A jaxpr that runs once, between the operands and the results."""
  facts = facts_of(eqn)
  rounds = facts.saves and eqn.params["policy"] is None and not inners[0].jaxpr.effects
  joins = facts.holds is Holds.CALL and (rounds or not facts.saves)
  atoms, ins = _operands(rewriter, eqn, joins)
  # What a compiler may replace by something of the same name and types keeps its types.
  outs = tuple(map(dtype_of, eqn.outvars)) if facts.holds is Holds.COMPOSITE else ()
  new = _inside(rewriter, eqn, inners[0], ins, outs)
  params = _params(eqn, inners, [new])
  again = [i for i, kind in enumerate(ins) if kind and kind.paired]
  params |= {k: (*params[k], *(params[k][i] for i in again)) for k in PER_OPERAND & params.keys()}
  saved = [k.dtype if k and (k.added if k.held else k.carried) else None for k in ins]
  if rounds and any(saved):
    # A `remat` saves at rest, as by hand, a stream that layers add to. A gate is saved as it is
    # held, for its last digits.
    remat = saving_rounded(eqn, new.jaxpr, list(map(aval_of, atoms)), saved)
    eqn, params = eqn.replace(primitive=remat.primitive), remat.params
  rewriter.write(eqn, atoms, new.outs, params)


def _cond(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """Branches that must agree: their result is what one of them returns, as a selection's is."""
  atoms, ins = _operands(rewriter, eqn)
  free = [_inside(rewriter, eqn, branch, ins).outs for branch in inners]
  kinds: list[Kind | None] = []
  for readers, *each in zip(_readers(rewriter, eqn), *free, strict=True):
    kind = joined(*each)
    wide = [k for k in each if k is not None and not k.is_low]
    if kind is not None and kind.is_low and wide:  # See the table for a choice.
      fits = all(survives(x, kind.dtype) for k in wide for x in k.numbers or ())
      kind = kind._replace(held=True) if readers & By.HELD or not fits else kind
    kinds.append(kind)
  new = [_inside(rewriter, eqn, branch, ins, _dtypes(kinds)) for branch in inners]
  rewriter.write(eqn, atoms, kinds, _params(eqn, inners, new))


def _loop(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A scan or a while. A carry is held in float32 if it starts so, or is returned so."""
  *tests, body = inners
  atoms, kinds = _operands(rewriter, eqn, joins=False)
  if tests:
    # Nothing is kept of a while for a backward pass, and whether it ends may depend on its last
    # bits: an iteration until the change is below 1e-4 never ends in bfloat16.
    for i in body.carried:
      if (kind := kinds[i]) is not None and dtype_of(eqn.invars[i]) == FLOAT32:
        kinds[i] = kind._replace(held=kind.is_low)
  elif rewriter.place(eqn).half is not None:
    # Constants come in float32, to be cast in each iteration. Their gradients are sums over all of
    # them: in bfloat16, they stop growing after 256 equal ones.
    for i in range(body.carry.start):
      if (kind := kinds[i]) is not None and kind.variable in HALVES:
        atoms[i] = rewriter.read(eqn.invars[i], eqn, FLOAT32)
        kinds[i] = kind._replace(carried=FLOAT32)

  carry = body.carry
  readers = of_loop(body, _readers(rewriter, eqn), rewriter.settings, rewriter.place(eqn).inside)
  # A carry that the user has cast to low precision stays in it.
  own = [dtype_of(v) != FLOAT32 for v in body.jaxpr.invars[carry.start : carry.stop]]
  # The next iteration may have another value.
  state = [
    kind and kind._replace(carried=None, parameter=kind.neutral, numbers=None)
    for kind in (kinds[i] for i in body.carried)
  ]
  # What the body returns depends on how the carry comes in, so it is rewritten until nothing
  # changes. Kinds only go from neutral to low to data, and from rest to held: that ends.
  while True:
    kinds = _replaced(kinds, body.carried, state)
    new = _inside(rewriter, eqn, body, kinds, readers=readers)
    back = list(map(_carried, state, new.outs[: len(state)], own))
    if back == state:
      break
    state = back
  new = _inside(rewriter, eqn, body, kinds, _dtypes(state), readers)
  for i, kind in zip(body.carried, state, strict=True):
    if kind is not None:
      atoms[i] = rewriter.read(eqn.invars[i], eqn, kind.variable)
  tested = [_inside(rewriter, eqn, test, kinds, readers=(By.EXACT,)) for test in tests]
  outs = (*state, *new.outs[len(state) :])
  rewriter.write(eqn, atoms, outs, _params(eqn, inners, [*tested, new]))


def _carried(state: Kind | None, returned: Kind | None, own: bool) -> Kind | None:
  """Returns the kind of a carry that comes in as `state` and is returned as `returned`."""
  carry = joined(state, returned)
  if carry is None or not carry.is_low:
    return carry and carry._replace(parameter=carry.neutral)
  started = state is not None and not state.is_low  # As a neutral one.
  held = (started or carry.held) and not own
  widened = held and carry.widened and not started
  return carry._replace(neutral=False, parameter=False, held=held, widened=widened)


# Functions with rules of their own.


# What a rule takes or returns: the dtype that it was traced with, and its kind now.
_Slot: TypeAlias = tuple[DType, Kind | None]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Saved:
  """What the forward rule leaves for the backward rule beside arrays, its residuals."""

  slots: tuple[_Slot, ...]
  pullback: PyTree  # the structure of what `jax.vjp` returned, whose leaves the residuals are
  moving: tuple[int, ...]  # the positions of the operands that are differentiated


class _Custom(NamedTuple):
  """An equation with a rule as it was traced, its operands and results, and where it is."""

  eqn: JaxprEqn
  ins: Sequence[_Slot]
  outs: Sequence[_Slot]
  settings: Settings
  scope: Scope
  # The state of policies in which it was traced. The rule is called when that was left: a Flax
  # module in the rule would run under no policy, or under that of another module.
  state: Active | None

  def run(
    self,
    rule: Function,
    operands: Sequence[Array],
    ins: Sequence[_Slot],
    outs: Sequence[_Slot],
    *,
    derivative: bool = False,
  ) -> tuple[list[Array], list[_Slot]]:
    """Traces a rule for operands as they were traced, rewrites its jaxpr and runs that."""

    @functools.wraps(rule)
    def in_state(*args: PyTree) -> PyTree:
      with ACTIVE(self.state):
        return rule(*args)

    # The shapes are those of now: under `vmap`, an operand of a batch rule has an axis more.
    types = [cast(ShapedArray, jax.typeof(x)) for x in operands]
    pairs = zip(types, ins, strict=True)
    program = traced(in_state)(*(t.update(dtype=dtype, weak_type=False) for t, (dtype, _) in pairs))
    dtypes = [aval_of(v).dtype for v in program.jaxpr.outvars]
    fixed = _dtypes([kind for _, kind in outs])
    readers = [By.UNKNOWN if dtype == FLOAT32 else 0 for dtype in fixed]
    readers += [0] * (len(dtypes) - len(fixed))
    kinds, derivative = tuple(kind for _, kind in ins), derivative or self.settings.in_derivative
    settings = dataclasses.replace(self.settings, in_derivative=derivative)
    consts = constants(program.consts, settings)
    new = rewrite(program.jaxpr, kinds, fixed, tuple(readers), settings, self.scope, consts)
    try:
      values = eval_jaxpr(in_default(new.jaxpr), program.consts, *operands)
    except jax.errors.UnexpectedTracerError as error:
      raise MpjaxTypeError(
        f"mpjax.autocast(fn), the derivative rule of {name_of(self.eqn)}",
        expected="a rule that uses its own arguments, and constants",
        got="one that closes over an array of fn, which is gone when JAX calls the rule",
        fix="Pass that array to the function with the rule as an argument, or autocast the "
        "gradient: mpjax.autocast(jax.grad(fn)).",
      ) from error
    return values, list(zip(dtypes, new.outs, strict=True))

  def as_traced(self, *operands: Array) -> list[Array]:
    """The equation itself, in the dtypes that it was traced with."""
    # New variables: an operand may be there twice, or be a literal.
    variables = [Var(atom.aval) for atom in self.eqn.invars]
    alone = self.eqn.replace(invars=[*variables])
    return eval_jaxpr(jaxpr_of([alone], variables, alone.outvars), (), *operands)

  def of_moving(self, operands: Sequence[Array], places: Sequence[int]) -> Function:
    return lambda *some: self.as_traced(*_replaced(operands, places, some))

  def jvp(
    self, primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[PyTree]]:
    # What does not move has no tangent in the user's rule either. Those of integers are `float0`,
    # which no jaxpr computes with: they are left out of it.
    moving = [i for i in _smooth(primals) if not isinstance(tangents[i], SymbolicZero)]
    smooth, count = _smooth([v.aval for v in self.eqn.outvars]), len(primals)

    def rule(*args: Array) -> list[Array]:
      fun, some = self.of_moving(args[:count], moving), [args[i] for i in moving]
      outs, changes = jax.jvp(fun, some, list(args[count:]))
      return _with_some(outs, changes, smooth)

    operands = _with_some(primals, tangents, moving)
    ins, outs = _with_some(self.ins, self.ins, moving), _with_some(self.outs, self.outs, smooth)
    results, _ = self.run(rule, operands, ins, outs, derivative=True)
    values, changes = results[: len(self.outs)], results[len(self.outs) :]
    zeros = [np.zeros(np.shape(v), jax.dtypes.float0) for v in values]
    return values, _replaced(zeros, smooth, changes)

  def forward(self, *operands: PyTree) -> tuple[list[Array], tuple[list[Array], _Saved]]:
    # No gradient may flow to what the rule closes over. If one does, JAX's own error comes from the
    # user's rule.
    primals: list[Array] = [p.value for p in operands]
    moving = [i for i in _smooth(primals) if operands[i].perturbed]
    trees: list[PyTree] = []

    def rule(*primals: Array) -> PyTree:
      outs, pullback = jax.vjp(self.of_moving(primals, moving), *(primals[i] for i in moving))
      leaves, tree = jax.tree.flatten(pullback)
      trees.append(tree)
      return [*outs, *leaves]

    # What is saved may have any dtype: low precision, where it is the result of a matmul.
    values, slots = self.run(rule, primals, self.ins, self.outs)
    count = len(self.outs)
    return values[:count], (values[count:], _Saved((*slots[count:],), trees[-1], (*moving,)))

  def backward(
    self, residuals: tuple[list[Array], _Saved], cotangents: Sequence[Array | SymbolicZero]
  ) -> tuple[Array | None, ...]:
    (arrays, saved), changes = residuals, list(map(instantiated, cotangents))
    smooth = _smooth(changes)

    def rule(*args: Array) -> PyTree:
      leaves, some = args[: len(arrays)], args[len(arrays) :]
      return jax.tree.unflatten(saved.pullback, leaves)(_replaced(changes, smooth, some))

    # The user's backward rule is shown the dtypes that its forward rule left.
    operands = _with_some(arrays, changes, smooth)
    ins = _with_some(saved.slots, self.outs, smooth)
    outs = [self.ins[i] for i in saved.moving]
    gradients, _ = self.run(rule, operands, ins, outs, derivative=True)
    return tuple(_replaced([None] * len(self.ins), saved.moving, gradients))

  def batch(
    self, size: int, batched: Sequence[bool], *operands: Array
  ) -> tuple[list[Array], list[bool]]:
    axes = [0 if each else None for each in batched]
    rule = jax.vmap(self.as_traced, in_axes=axes, axis_size=size)
    values, _ = self.run(rule, operands, self.ins, self.outs)
    return values, [True] * len(values)


def _smooth(values: Iterable[Any]) -> list[int]:
  return [i for i, x in enumerate(values) if is_inexact(x)]


def _with_some(values: Sequence[Any], others: Sequence[Any], places: Sequence[int]) -> list[Any]:
  return [*values, *(others[i] for i in places)]


def _replaced(values: Sequence[Any], places: Sequence[int], some: Sequence[Any]) -> list[Any]:
  by_place = dict(zip(places, some, strict=True))
  return [by_place.get(i, x) for i, x in enumerate(values)]


def instantiated(cotangent: Array | SymbolicZero) -> Leaf:
  """Returns a cotangent as an array, also where JAX gives a backward rule an object for zeros."""
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  aval = cast(ShapedArray, cotangent.aval)
  # That of an integer is of `float0`, and `jnp` makes no such arrays.
  number = np if aval.dtype == jax.dtypes.float0 else jnp
  return number.zeros(aval.shape, aval.dtype)


def _custom(rewriter: Rewriter, eqn: JaxprEqn, inners: tuple[Inner, ...]) -> None:
  """A function with a rule of its own for derivatives or batches."""
  atoms, ins = _operands(rewriter, eqn)
  new = _inside(rewriter, eqn, inners[0], ins)
  closed = ClosedJaxpr(new.jaxpr, ())  # JAX passes what the body closes over as operands.

  def call(*operands: Array) -> list[Array]:
    return called(closed, operands, eqn.primitive.name)

  # What an audit reads is no instruction, and marks for the rule are in its own scope: the rule is
  # traced as it is without any.
  names = without_scopes(eqn.source_info.name_stack, PREFIX)
  custom = _Custom(
    eqn.replace(source_info=eqn.source_info.replace(name_stack=names)),
    [(aval_of(v).dtype, kind) for v, kind in zip(eqn.invars, ins, strict=True)],
    [(aval_of(v).dtype, kind) for v, kind in zip(eqn.outvars, new.outs, strict=True)],
    rewriter.settings,
    rewriter.place(eqn).inside,
    ACTIVE.value,
  )
  match facts_of(eqn).holds:
    case Holds.CUSTOM_JVP:
      fun = jax.custom_jvp(call)
      fun.defjvp(custom.jvp, symbolic_zeros=True)
    case Holds.CUSTOM_VJP:
      fun = jax.custom_vjp(call)
      fun.defvjp(custom.forward, custom.backward, symbolic_zeros=True)
    case _:
      fun = jax.custom_batching.custom_vmap(call)
      fun.def_vmap(custom.batch)
  with context_of(eqn):
    traced_call = jax.make_jaxpr(fun)(*map(aval_of, atoms)).jaxpr.eqns[-1]
  # `make_jaxpr` has traced only a stand-in for the body; what is kept of it are the rules.
  rewriter.write(eqn, atoms, new.outs, with_inner(traced_call, [closed]))


_RULES: Mapping[Holds | None, Callable[[Rewriter, JaxprEqn, tuple[Inner, ...]], None]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE, Holds.SHARD_MAP), _call),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _custom),
  Holds.COND: _cond,
  **dict.fromkeys((Holds.SCAN, Holds.WHILE), _loop),
  # What has to match another jaxpr, or is an object of JAX, runs as it was traced.
  **dict.fromkeys((Holds.LINEAR_CALL, Holds.LINEAR_SOLVE, Holds.OBJECT), Rewriter.untouched),
}
