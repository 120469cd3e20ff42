"""`autocast`: mixed precision for any JAX function, by lists of operations.

A function of trees is traced as a function of arrays, its jaxpr is rewritten, and that runs with
the same arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._core.active import AUDIT, in_region
from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, flax_errors
from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.policy import PolicyLike, parse_policy
from mpjax._core.rules import Rule, parse_rules, rewrites
from mpjax._core.types import Array, DType, Function, Leaf, PyTree
from mpjax._jaxprs.autocast.boundary import Boundary, InDtype, NotTraceable
from mpjax._jaxprs.autocast.custom_derivatives import differentiated_at_once
from mpjax._jaxprs.autocast.higher_order import rewrite
from mpjax._jaxprs.autocast.rewriter import CALLER, RETURNED, UNROUNDED, default_precision, traced
from mpjax._jaxprs.autocast.run import run
from mpjax._jaxprs.autocast.scopes import check_rules_match
from mpjax._jaxprs.autocast.values import FLOATS, Kind, Kinds, Settings, constants
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import Holds, facts_of
from mpjax._jaxprs.reader import aval_of, closed_over, dtype_of, walk

P = ParamSpec("P")
R = TypeVar("R")

DataLeaves: TypeAlias = Callable[[tuple[PyTree, ...]], Iterable[Leaf]]
"""From positional arguments to those of their leaves that decide the dtype of what they meet."""

ResultDtypes: TypeAlias = Callable[[PyTree], PyTree]
"""From the results of a function to the same with `InDtype` around leaves that have to have a
dtype; the others have those that they are computed in."""

_AS_FUNCTION = (
  'Write mpjax.autocast(fn, "mixed_bfloat16"), or as a decorator '
  '@functools.partial(mpjax.autocast, policy="mixed_bfloat16"). It is no context manager: code '
  "that calls Linen models runs under a policy in mpjax.policy_scope."
)


@check_call("mpjax.autocast(fn)", fix=_AS_FUNCTION)
def autocast(
  fn: Callable[P, R],
  policy: PolicyLike = "mixed_bfloat16",
  *,
  ops: OpLists | None = None,
  rules: Iterable[Rule] = (),
  data_argnums: int | Sequence[int] = (),
) -> Callable[P, R]:
  """Returns a function that computes what `fn` does, with a dtype chosen for each operation.

  `fn` is traced as it is, in float32, and its jaxpr is rewritten, also inside of `jit`, `scan`,
  `cond`, `remat`, `custom_vjp`, `shard_map` and so on: matmuls and convolutions run in the compute
  dtype of the policy, exponentials, logarithms, sums and losses in float32, and what lies between
  follows its operands (`mpjax.OpLists`, docs/op_lists.md). Each value is data, low or neutral
  (docs/concepts.md): arguments and literals are neutral, so that a float32 bias does not widen its
  layer; constant arrays, computed grids, integers that become floats, and the arguments that
  `data_argnums` names are data, and float32 until a matmul; what a matmul returned, and what is
  computed from it, is low. Parameters are cast where they are used, and their gradients added in
  float32. Results have the dtypes that `fn` gives them. Casts in `fn` to float16 and bfloat16,
  `precision="highest"`, integers, complex numbers, float64 and random keys stay as they are.
  `jax.value_and_grad(mpjax.autocast(loss_fn))` is the usual order.

  Args:
    fn: a function of trees of arrays. What is no array (strings, Python numbers, functions, flags
      and integers of NumPy) is handed to it as it is. It must not change its arguments in place.
    policy: parameters are yours to store, and results keep their dtypes, so that `param_dtype` does
      not count, and an `output_dtype` of float32 says only that a result is not rounded before: a
      matmul that is one, perhaps with a bias, returns its float32 sum. With a `weight_grad_dtype`
      every neutral argument counts as a weight. In float32, without a precision, `fn` itself is
      returned.
    ops: the lists, an edited `OpLists()`; None for the standard.
    rules: `Rule(policy, path=...)` for what runs inside the named scopes of that path. The names
      are those of a profile: the class of a Flax model comes first, so write `"**/head"`. The
      innermost scope that a rule matches decides, and there the first rule. None or a float32
      policy leaves everything inside as it was traced.
    data_argnums: the positions of arguments that are no parameters, such as coordinates, box
      anchors and timesteps: float32 arrays in them stay float32 until a matmul, as constants do.
      For matmuls in float8 they are no weights.

  Returns:
    A function with the signature of `fn`. Like `fn`, it can be jitted, differentiated, mapped,
    sharded and exported.

  Raises:
    MpjaxTypeError: an argument has the wrong type; when called: `fn` changed an argument.
    MpjaxValueError: the policy, or that of a rule, computes in something else than float32,
      bfloat16 and float16, or a rule has something else than a path; when called: no positional
      argument is at one of `data_argnums`.
    UnmatchedRuleError: when called: no scope has the path of a rule.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   return jnp.mean(jax.nn.softmax(x @ w) ** 2)
  >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
  >>> for eqn in jax.make_jaxpr(mpjax.autocast(lambda w, x: jnp.exp(x @ w)))(w, x).eqns:
  ...   print(eqn.primitive, eqn.outvars[0].aval.dtype)
  convert_element_type bfloat16
  convert_element_type bfloat16
  dot_general bfloat16
  convert_element_type float32
  exp float32
  >>> loss, grads = jax.value_and_grad(mpjax.autocast(loss_fn))(w, x)
  >>> loss.dtype, grads.dtype
  (dtype('float32'), dtype('float32'))
  """
  settings = _settings(fn, policy, ops, rules)
  data = _data_leaves(data_argnums)
  if not any(map(rewrites, (settings.policy, *(rule.policy for rule in settings.rules)))):
    return fn
  unrounded = settings.policy is not None and settings.policy.output_dtype == FLOAT32
  return with_settings(fn, settings, "mpjax.autocast(fn)", data=data, unrounded=unrounded)


def _settings(fn: object, policy: PolicyLike, ops: object, rules: Iterable[Rule]) -> Settings:
  where = "mpjax.autocast(fn)"
  if not callable(fn):
    raise MpjaxTypeError(where, expected="a function", got=repr(fn), fix=_AS_FUNCTION)
  check_no_linen_model(fn, where)
  if ops is not None and not isinstance(ops, OpLists):
    where, fix = "mpjax.autocast(ops=...)", 'Write ops=mpjax.OpLists().replace(float32=["tanh"]).'
    raise MpjaxTypeError(where, expected="an mpjax.OpLists", got=repr(ops), fix=fix)
  parsed_rules = parse_rules(rules, "mpjax.autocast(rules=...)")
  for rule in parsed_rules:
    if rule.path is None:
      raise MpjaxValueError(
        "mpjax.autocast(rules=...)",
        expected="rules with path=",
        got=repr(rule),
        fix="A traced function has no modules, only named scopes: see jax.named_scope. For rules "
        "by class or instance put a policy on the model with mpjax.with_policy.",
      )
  parsed = parse_policy(policy, "mpjax.autocast(policy)")
  for one, where in [(parsed, "policy"), *((r.policy, "rules=...") for r in parsed_rules)]:
    if one is not None and one.compute_dtype not in FLOATS:
      raise MpjaxValueError(
        f"mpjax.autocast({where})",
        expected="a policy that computes in bfloat16, float16 or float32",
        got=str(one),
        fix="Operations in other dtypes are left as they are; no policy is needed for them.",
      )
  return Settings(policy=parsed, ops=ops or OpLists(), rules=parsed_rules)


def _data_leaves(data_argnums: Any) -> DataLeaves | None:
  """Returns what says which leaves are in the arguments at these positions; None for none."""
  numbers = tuple(data_argnums) if isinstance(data_argnums, Sequence) else (data_argnums,)
  integers = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in numbers)
  if not integers or min(numbers, default=0) < 0:
    raise MpjaxTypeError(
      "mpjax.autocast(data_argnums=...)",
      expected="the position of a positional argument, counted from 0, or several",
      got=repr(data_argnums),
      fix="Write data_argnums=(1,) for x in a function of (params, x).",
    )

  def leaves(args: tuple[Any, ...]) -> list[Leaf]:
    if max(numbers) >= len(args):
      raise MpjaxValueError(
        "mpjax.autocast(data_argnums=...)",
        expected="positions of arguments that the function is called with by position",
        got=f"{max(numbers)}, and {len(args)} positional arguments",
        fix="Pass that argument by position, or take its number out of data_argnums.",
      )
    return Boundary([x for i, x in enumerate(args) if i in numbers]).leaves

  return leaves if numbers else None


# Functions of trees, of autocast and of calls of modules.


def with_settings(
  fn: Callable[..., R],
  settings: Settings,
  where: str,
  *,
  data: DataLeaves | None = None,
  results: ResultDtypes | None = None,
  unrounded: bool = False,
) -> Callable[..., R]:
  """Returns `fn`, a function of trees of arrays, traced and rewritten at each call.

  Args:
    fn: the function.
    settings: how to rewrite it.
    where: the public call, for errors.
    data: which of the leaves decide the dtype of what they meet; None if none does.
    results: the dtypes of the results; None for those that the function gives them.
    unrounded: a float32 result that a matmul computes is the sum that it has, see `CALLER`.

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
    left: list[tuple[list[Leaf], Callable[[Sequence[Leaf]], R], list[DType | None] | None]] = []

    def flat(*operands: Array) -> list[Array]:
      by_leaf = dict(zip(arrays, operands, strict=True))
      inside = boundary.inside([by_leaf.get(i, x) for i, x in enumerate(boundary.leaves)])
      returned = fn(*inside.args[0], **inside.args[1])
      asked = returned if results is None else results(returned)
      leaves, outside = inside.leave(asked)
      computed = [x for x in leaves if isinstance(x, (jax.Array, InDtype))]
      dtypes = [x.dtype if isinstance(x, InDtype) else None for x in computed]
      # A tracer of the trace that is over may not be kept.
      rest = [_TRACED if isinstance(x, (jax.Array, InDtype)) else x for x in leaves]
      left.append((rest, outside, None if results is None else dtypes))
      return [x.array if isinstance(x, InDtype) else x for x in computed]

    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays.values()]
    name = getattr(fn, "__name__", type(fn).__name__)
    flat.__name__ = name  # It is what JAX's errors say.
    try:
      program = traced(flat)(*map(_as_float32, operands) if settings.modules else operands)
    except (NotTraceable, *flax_errors("TraceContextError")) as error:
      if settings.modules:
        raise
      of_nnx = "one that writes to variables of a model of NNX (statistics, random counters)"
      raise MpjaxTypeError(
        where,
        expected="a function that returns what it computes",
        got=f"one that {error}" if isinstance(error, NotTraceable) else of_nnx,
        fix='Return the new values. With flax.nnx, use mpjax.with_policy(model, "mixed_bfloat16"), '
        "or split the model outside and merge it inside: "
        "lambda state, x: nnx.merge(graphdef, state, copy=True)(x).",
      ) from error
    leaves, outside, dtypes = left.pop()
    now = dataclasses.replace(settings, precision=default_precision())
    deciding = set(map(id, () if data is None else data(args)))
    decides = [id(x) in deciding for x in arrays.values()]
    ins = [
      Kind(x.dtype, neutral=not each) if x.dtype in FLOATS else None
      for x, each in zip(operands, decides, strict=True)
    ]
    caller = CALLER if unrounded else RETURNED | UNROUNDED
    new = rewrite_closed(program, now, where, tuple(ins), dtypes, caller)

    def call(*operands: Array) -> list[Array]:
      return run(new, program.consts, operands, name)

    kinds = _rules_that_close_over(program)
    if kinds:

      def decided(args: tuple[PyTree, ...]) -> Iterable[Leaf]:
        # The first arguments of a derivative are two dicts of operands by number.
        return [x for part in args[:2] for number, x in part.items() if decides[number]]

      # Of a derivative in forward mode JAX transposes a part; of one in reverse mode it is done.
      forward = Holds.CUSTOM_VJP not in kinds
      there = dataclasses.replace(settings, in_derivative=forward)

      def rewritten(fun: Function, results: ResultDtypes | None) -> Function:
        return with_settings(fun, there, where, data=decided, results=results, unrounded=unrounded)

      result_dtypes = None if dtypes is None else [aval_of(v).dtype for v in new.outvars]
      call = differentiated_at_once(call, flat, kinds, rewritten, result_dtypes)
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
  """Returns an entire jaxpr rewritten, for arguments of these kinds.

  `results` are the dtypes of the results, each None for the one that it is computed in; None
  for those that they were traced with. `caller` is the reader of a result that is to be float32.
  """
  jaxpr = program.jaxpr
  if settings.rules:
    check_rules_match(jaxpr, settings.rules, where)
  dtypes = [dtype_of(v) for v in jaxpr.outvars] if results is None else results
  outs = [d if d in FLOATS else None for d in dtypes]
  readers = [RETURNED if d is None else 0 if d in HALVES else caller for d in outs]
  consts = constants(program.consts, settings)
  return rewrite(jaxpr, ins, outs, readers, settings, (), consts).jaxpr


def _rules_that_close_over(program: ClosedJaxpr) -> set[Holds]:
  """Returns the kinds of functions with a rule that close over a value of the jaxpr."""
  # An autocast function inside of a loss that is differentiated: gradients flow to what it closes
  # over too, and one that is differentiated at once knows its arguments alone.
  if any(isinstance(const, Tracer) for const in program.consts):
    return set()
  constants = set(program.jaxpr.constvars)
  return {
    holds
    for eqn in walk(program)
    if (holds := facts_of(eqn).holds) in (Holds.CUSTOM_JVP, Holds.CUSTOM_VJP)
    and not constants.issuperset(eqn.invars[: closed_over(eqn)])
  }
