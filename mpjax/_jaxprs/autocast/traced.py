"""Tracing a function of trees, rewriting its jaxpr, and running that with the same arguments."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

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
from mpjax._jaxprs.autocast.closures import closes_over, differentiated_at_once
from mpjax._jaxprs.autocast.eqn_params import default_precision, traced
from mpjax._jaxprs.autocast.higher_order import rewrite
from mpjax._jaxprs.autocast.run import run
from mpjax._jaxprs.autocast.scopes import check_rules_match
from mpjax._jaxprs.autocast.uses import CALLER, RETURNED, UNROUNDED
from mpjax._jaxprs.autocast.values import FLOATS, Kind, Settings, constants
from mpjax._jaxprs.primitive_facts import Holds

R = TypeVar("R")

DataLeaves: TypeAlias = Callable[[tuple[PyTree, ...]], list[bool]]
"""From positional arguments to whether each of their leaves decides the dtype of what it meets."""

ResultDtypes: TypeAlias = Callable[[PyTree], Sequence[DType | None]]
"""From the results of a function to the dtype of each leaf that is an array, of which None is the
dtype that it was computed in."""


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


class _Results(NamedTuple):
  """What a function returned while it was traced.

  Fields:
    leaves: those that are no arrays of the trace; None where one is.
    tree: the structure of the leaves, for `jax.tree.unflatten`.
    computed: the positions of the arrays.
    dtypes: what `Interface.results` asks for.
  """

  leaves: list[Leaf]
  tree: PyTree
  computed: list[int]
  dtypes: Sequence[DType | None] | None


def with_settings(
  fn: Callable[..., R], settings: Settings, where: str, interface: Interface = Interface()
) -> Callable[..., R]:
  """Returns `fn`, traced and rewritten at each call.

  Args:
    fn: a function of trees of arrays.
    settings: how to rewrite.
    where: the public call, for errors.
    interface: how arguments come in and results leave.
  """

  @functools.wraps(fn)
  def wrapped(*args: PyTree, **kwargs: PyTree) -> R:
    if in_region():
      return fn(*args, **kwargs)
    if AUDIT.value is not None and not settings.modules:
      AUDIT.value.note_autocast()
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_argument = _is_jax_array if settings.modules else _is_array
    arrays = [i for i, x in enumerate(leaves) if is_argument(x)]
    results: list[_Results] = []

    def flat(*operands: Array) -> list[Array]:
      given = dict(zip(arrays, operands, strict=True))
      call: PyTree = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
      returned = fn(*call[0], **call[1])
      outs, out_tree = jax.tree.flatten(returned)
      _check_unchanged(call, len(leaves), given, where)
      computed = {i: x for i, x in enumerate(outs) if isinstance(x, jax.Array)}
      # A tracer of the trace that is over may not be kept.
      rest = [None if i in computed else x for i, x in enumerate(outs)]
      dtypes = None if interface.results is None else interface.results(returned)
      results.append(_Results(rest, out_tree, list(computed), dtypes))
      return list(computed.values())

    concrete = (leaves[i] for i in arrays)
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in concrete]
    name = getattr(fn, "__name__", type(fn).__name__)
    flat.__name__ = name  # It is what JAX's errors say.
    program = traced(flat)(*map(_as_float32, operands) if settings.modules else operands)
    outs, out_tree, computed, dtypes = results.pop()
    now = dataclasses.replace(settings, precision=default_precision())
    # The leaves of positional arguments come first.
    marks = [] if interface.data is None else interface.data(args)
    decides = [i < len(marks) and marks[i] for i in arrays]
    caller = CALLER if interface.unrounded else RETURNED | UNROUNDED
    given = [x.dtype for x in operands]
    new = rewrite_closed(program, now, where, decides, given, dtypes, caller)

    def call(*operands: Array) -> list[Array]:
      return run(new, program.consts, operands, name)

    kinds = closes_over(program)
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
    for i, x in zip(computed, call(*operands), strict=True):
      outs[i] = x
    return jax.tree.unflatten(out_tree, outs)

  return wrapped


def _numbered(positions: Iterable[int]) -> DataLeaves:
  """Returns the same of a derivative, whose first arguments are two dicts of operands by number."""
  data = frozenset(positions)
  return lambda args: [number in data for part in args[:2] for number in sorted(part)]


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


def _check_unchanged(call: PyTree, count: int, given: Mapping[int, Array], where: str) -> None:
  """Raises if `fn` changed an argument, a mutable tree: it had a copy, and loses the change."""
  now = jax.tree.leaves(call)
  same = len(now) == count and all(now[i] is x for i, x in given.items())
  if not same:
    raise MpjaxTypeError(
      where,
      expected="a function that returns what it computes",
      got="one that changed an argument in place, which would be lost",
      fix="Return the new values. With flax.nnx, split the model outside and merge it inside: "
      "lambda state, x: nnx.merge(graphdef, state, copy=True)(x).",
    )


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
