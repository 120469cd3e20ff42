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
from mpjax._jaxprs.autocast.values import FLOATS, Kind, Kinds, Settings, constants
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
  """Returns `fn`, a function of trees of arrays, traced and rewritten at each call.

  `where` is the public call, for errors.

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
    leaves = enumerate(boundary.leaves)
    arrays = {i: x for i, x in leaves if _is_argument(x, settings.modules)}
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
      raise MpjaxTypeError(
        where,
        expected="a function that returns what it computes",
        got=f"one that {error}",
        fix="Return the new values. With flax.nnx, split the model outside and merge it inside: "
        "lambda state, x: nnx.merge(graphdef, state, copy=True)(x).",
      ) from error
    leaves, outside, dtypes = results.pop()
    now = dataclasses.replace(settings, precision=default_precision())
    data = set(map(id, () if interface.data is None else interface.data(args)))
    decides = [id(x) in data for x in arrays.values()]
    ins = [
      Kind(x.dtype, neutral=not each) if x.dtype in FLOATS else None
      for x, each in zip(operands, decides, strict=True)
    ]
    caller = CALLER if interface.unrounded else RETURNED | UNROUNDED
    new = rewrite_closed(program, now, where, tuple(ins), dtypes, caller)

    def call(*operands: Array) -> list[Array]:
      return run(new, program.consts, operands, name)

    kinds = rules_that_close_over(program)
    if kinds:

      def decided(args: tuple[PyTree, ...]) -> Iterable[Leaf]:
        # The first arguments of a derivative are two dicts of operands by number.
        return [x for part in args[:2] for number, x in part.items() if decides[number]]

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


def _as_float32(x: Array) -> ShapedArray:
  """Returns the type of an array; float32 for float16 and bfloat16."""
  aval = cast(ShapedArray, jax.typeof(x))
  return aval.update(dtype=FLOAT32, weak_type=False) if aval.dtype in HALVES else aval


def _is_argument(x: Leaf, modules: bool) -> bool:
  """Whether a leaf is traced. A number or flag is not: `fn` may use it as a shape, or ask it."""
  if modules or not isinstance(x, (np.ndarray, np.generic)):
    return isinstance(x, jax.Array)
  if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
    return not isinstance(x, np.generic)
  return np.issubdtype(x.dtype, np.number) or x.dtype in HALVES


def rewrite_closed(
  program: ClosedJaxpr,
  settings: Settings,
  where: str,
  ins: Kinds,
  results: Sequence[DType | None] | None = None,
  caller: int = RETURNED | UNROUNDED,
) -> Jaxpr:
  """Returns an entire jaxpr rewritten.

  Args:
    program: the jaxpr.
    settings: how to rewrite.
    where: the public call, for errors.
    ins: the kinds of its arguments.
    results: the dtypes of the results, of which None is the one that they are computed in; None for
      those that they were traced with.
    caller: the reader of a result that is to be float32, see `uses.py`.
  """
  jaxpr = program.jaxpr
  if settings.rules:
    check_rules_match(jaxpr, settings.rules, where)
  dtypes = [dtype_of(v) for v in jaxpr.outvars] if results is None else results
  outs = [d if d in FLOATS else None for d in dtypes]
  readers = [RETURNED if d is None else 0 if d in HALVES else caller for d in outs]
  consts = constants(program.consts, settings)
  return rewrite(jaxpr, ins, outs, readers, settings, (), consts).jaxpr
