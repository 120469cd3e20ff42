"""Tracing a function of trees, rewriting its jaxpr, and running that with the same arguments."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._core.active import in_region
from mpjax._core.audit_record import AUDIT
from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import Array, DType, Function, Leaf, PyTree
from mpjax._jaxprs.atoms import aval_of, dtype_of
from mpjax._jaxprs.autocast.boundary import Boundary, InDtype, NotTraceable
from mpjax._jaxprs.autocast.custom_derivatives import differentiated_at_once, rules_that_close_over
from mpjax._jaxprs.autocast.eqn_params import default_precision, traced
from mpjax._jaxprs.autocast.higher_order import rewrite
from mpjax._jaxprs.autocast.run import run
from mpjax._jaxprs.autocast.scopes import check_rules_match
from mpjax._jaxprs.autocast.uses import CALLER, RETURNED, UNROUNDED
from mpjax._jaxprs.autocast.values import FLOATS, Kind, Settings, constants
from mpjax._jaxprs.primitive_facts import Holds

R = TypeVar("R")

DataLeaves: TypeAlias = Callable[[tuple[PyTree, ...]], Iterable[Leaf]]
"""From positional arguments to those of their leaves that decide the dtype of what they meet."""

ResultDtypes: TypeAlias = Callable[[PyTree], PyTree]
"""From the results of a function to the same with `InDtype` around leaves that have to have a
dtype; the others have those that they are computed in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
  """How values come into a function that is rewritten, and leave it.

  Fields:
    data: which of the leaves decide the dtype of what they meet; None if none does.
    results: the dtypes of the results; None for those that the function gives them.
    unrounded: a float32 result that a matmul computes is the sum that it has, see `CALLER`.
  """

  data: DataLeaves | None = None
  results: ResultDtypes | None = None
  unrounded: bool = False


def with_settings(
  fn: Callable[..., R], settings: Settings, where: str, interface: Interface = Interface()
) -> Callable[..., R]:
  """Returns `fn`, traced and rewritten at each call.

  Args:
    fn: a function of trees of arrays.
    settings: how to rewrite.
    where: the public call, for errors.
    interface: how arguments come in and results leave.

  Raises:
    NotTraceable: when called, where no jaxpr can do what `fn` does; of a function that is no call
      of modules, as an MpjaxTypeError.
  """

  @functools.wraps(fn)
  def wrapped(*args: PyTree, **kwargs: PyTree) -> R:
    if in_region():
      return fn(*args, **kwargs)
    if AUDIT.value is not None and not settings.modules:
      AUDIT.value.note_autocast()
    boundary = Boundary((args, kwargs))
    is_argument = _is_jax_array if settings.modules else _is_array
    arrays = {i: x for i, x in enumerate(boundary.leaves) if is_argument(x)}
    results: list[tuple[list[Leaf], Callable[[Sequence[Leaf]], R], list[DType | None] | None]] = []

    def flat(*operands: Array) -> list[Array]:
      given = dict(zip(arrays, operands, strict=True))
      inside = boundary.inside([given.get(i, x) for i, x in enumerate(boundary.leaves)])
      returned = fn(*inside.args[0], **inside.args[1])
      asked = returned if interface.results is None else interface.results(returned)
      leaves, outside = inside.leave(asked)
      computed = [x for x in leaves if isinstance(x, (jax.Array, InDtype))]
      dtypes = [x.dtype if isinstance(x, InDtype) else None for x in computed]
      # A tracer of the trace that is over may not be kept.
      rest = [_TRACED if isinstance(x, (jax.Array, InDtype)) else x for x in leaves]
      results.append((rest, outside, None if interface.results is None else dtypes))
      return [x.array if isinstance(x, InDtype) else x for x in computed]

    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays.values()]
    name = getattr(fn, "__name__", type(fn).__name__)
    flat.__name__ = name  # It is what JAX's errors say.
    try:
      program = traced(flat)(*map(_as_float32, operands) if settings.modules else operands)
    except NotTraceable as error:
      if settings.modules:
        raise
      raise _lost_change(error, where) from error
    leaves, outside, dtypes = results.pop()
    now = dataclasses.replace(settings, precision=default_precision())
    data = set(map(id, () if interface.data is None else interface.data(args)))
    decides = [id(x) in data for x in arrays.values()]
    caller = CALLER if interface.unrounded else RETURNED | UNROUNDED
    given = [x.dtype for x in operands]
    new = rewrite_closed(program, now, where, decides, given, dtypes, caller)

    def call(*operands: Array) -> list[Array]:
      return run(new, program.consts, operands, name)

    kinds = rules_that_close_over(program)
    if kinds:
      decided = _numbered(i for i, each in enumerate(decides) if each)
      # Of a derivative in forward mode JAX transposes a part; of one in reverse mode it is done.
      forward = Holds.CUSTOM_VJP not in kinds
      there = dataclasses.replace(settings, in_derivative=forward)

      def rewritten(fun: Function, results: ResultDtypes | None) -> Function:
        inside = dataclasses.replace(interface, data=decided, results=results)
        return with_settings(fun, there, where, inside)

      found = None if dtypes is None else [aval_of(v).dtype for v in new.outvars]
      call = differentiated_at_once(call, flat, kinds, rewritten, found)
    outs = iter(call(*operands))
    return outside([next(outs) if x is _TRACED else x for x in leaves])

  return wrapped


_TRACED = object()
"""Replaces a tracer whose trace is over."""


def _lost_change(error: NotTraceable, where: str) -> MpjaxTypeError:
  """Returns the error for what a function does besides returning what it computes."""
  return MpjaxTypeError(
    where,
    expected="a function that returns what it computes",
    got=f"one that {error}",
    fix="Return the new values. With flax.nnx, split the model outside and merge it inside: "
    "lambda state, x: nnx.merge(graphdef, state, copy=True)(x).",
  )


def _numbered(positions: Iterable[int]) -> DataLeaves:
  """Returns the same of a derivative, whose first arguments are two dicts of operands by number."""
  data = frozenset(positions)
  return lambda args: [x for part in args[:2] for number, x in part.items() if number in data]


def _as_float32(x: Array) -> ShapedArray:
  """Returns the type of an array; float32 for float16 and bfloat16."""
  aval = cast(ShapedArray, jax.typeof(x))
  return aval.update(dtype=FLOAT32, weak_type=False) if aval.dtype in HALVES else aval


def _is_jax_array(x: Leaf) -> bool:
  return isinstance(x, jax.Array)


def _is_array(x: Leaf) -> bool:
  """Whether a leaf is traced. A number or flag is not: `fn` may use it as a shape, or ask it."""
  if isinstance(x, (np.ndarray, np.generic)):
    exact = np.issubdtype(x.dtype, np.integer) or x.dtype == bool
    if exact and isinstance(x, np.generic):
      return False
    return exact or np.issubdtype(x.dtype, np.number) or x.dtype in HALVES
  return isinstance(x, jax.Array)


def rewrite_closed(
  program: ClosedJaxpr,
  settings: Settings,
  where: str,
  data: Sequence[bool] = (),
  given: Sequence[DType] | None = None,
  results: Sequence[DType | None] | None = None,
  caller: int = RETURNED | UNROUNDED,
) -> Jaxpr:
  """Returns an entire jaxpr rewritten.

  Args:
    program: the jaxpr.
    settings: how to rewrite.
    where: the public call, for errors.
    data: whether each argument decides the dtype of what it meets; () if none does.
    given: the dtypes in which arguments come; None for those that they were traced with.
    results: the dtypes of the results, of which None is the one that they are computed in; None for
      those that they were traced with.
    caller: the reader of a result that is to be float32, see `uses.py`.
  """
  jaxpr = program.jaxpr
  if settings.rules:
    check_rules_match(jaxpr, settings.rules, where)
  dtypes = [dtype_of(v) for v in jaxpr.invars] if given is None else given
  neutral = [not each for each in data or [False] * len(jaxpr.invars)]
  pairs = zip(dtypes, neutral, strict=True)
  ins = tuple(None if d is None or d not in FLOATS else Kind(d, n) for d, n in pairs)
  found = [dtype_of(v) for v in jaxpr.outvars] if results is None else results
  outs = [d if d in FLOATS else None for d in found]
  readers = [RETURNED if d is None else 0 if d in HALVES else caller for d in outs]
  consts = constants(program.consts, settings)
  return rewrite(jaxpr, ins, outs, readers, settings, (), consts).jaxpr
