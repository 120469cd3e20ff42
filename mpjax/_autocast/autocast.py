"""`autocast`: mixed precision for any JAX function.

A function of trees is traced as a function of arrays. Its jaxpr is rewritten and runs with the same
arguments.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.boundary import Boundary, InDtype, NotTraceable
from mpjax._autocast.consumers import flags_of_result
from mpjax._autocast.custom_rules import instantiated
from mpjax._autocast.kinds import Kind, Role, kind_of_input, kinds_of_constants
from mpjax._autocast.precision import default_precision, refusals_explained, traced
from mpjax._autocast.rewrite import rewrite
from mpjax._autocast.rewriter import LINEAR_ALGEBRA, Rewritten
from mpjax._autocast.run import run
from mpjax._autocast.scopes import ScopedSettings, Settings, check_rules_match
from mpjax._core.errors import MpjaxTypeError, check_call, check_int, check_value, flax_errors
from mpjax._core.frameworks import check_function, haiku_state
from mpjax._core.types import (
  FLOAT32,
  FLOATS,
  HALVES,
  Args,
  Array,
  DType,
  Function,
  Leaf,
  P,
  PyTree,
)
from mpjax._core.wrappers import wraps
from mpjax._jaxpr.compat import closed_over
from mpjax._jaxpr.op_lists import OpLists
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import walk
from mpjax._policy.active import AUDIT, AUTOCAST, Region, outside_policies
from mpjax._policy.policy import PolicyLike, parse_policy
from mpjax._policy.rules import Rule, parse_rules, rewrites

R = TypeVar("R")

_AS_FUNCTION = (
  'Write mpjax.autocast(fn, "mixed_bfloat16"), or as a decorator '
  '@functools.partial(mpjax.autocast, policy="mixed_bfloat16"). It is not a context manager. For '
  "code that calls Linen models, use mpjax.policy_scope."
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
  """Run a function with a dtype chosen for each operation by a policy.

  `fn` is traced in float32, and its jaxpr is rewritten. This includes the jaxprs of `jit`, `scan`,
  `cond`, `remat`, `custom_vjp` and `shard_map`. Matmuls and convolutions run in the compute dtype
  of the policy. Exponentials, logarithms, sums and losses run in float32. docs/dtype_rules.md has
  all rules. Parameters are cast at each use, and their gradients are summed in float32. Results
  have the dtypes that `fn` gives them. Casts in `fn` to float16 and bfloat16, integers, complex
  numbers, float64, random keys and `precision="highest"` stay as they are.
  `jax.value_and_grad(mpjax.autocast(loss_fn))` is the usual order.

  Args:
    fn: a function of trees of arrays. Other leaves, such as strings, Python numbers, functions and
      integers of NumPy, are passed unchanged. It may change lists and dicts among its arguments,
      but no other object.
    policy: the policy. `param_dtype` is ignored, and results keep their dtypes. With a float32
      `output_dtype`, a float32 result that is a matmul, perhaps with a bias, is its float32 sum.
      For a float32 policy without a precision, `fn` itself is returned.
    ops: an edited `OpLists()`; None for the standard lists.
    rules: `Rule(policy, path=...)` for operations inside named scopes of that path. The innermost
      scope that a rule matches decides, by its first matching rule. None or a float32 policy
      leaves the operations inside as they were traced.
    data_argnums: the positions of inputs, such as coordinates and timesteps. Their float32 arrays
      stay in float32 until a matmul uses them. Other arguments are parameters.

  Returns:
    A function with the signature of `fn`. Like `fn`, it can be jitted, differentiated, mapped,
    sharded and exported.

  Raises:
    MpjaxTypeError: if an argument has the wrong type, or, when called, if `fn` changes an object in
      its arguments.
    MpjaxValueError: if a policy computes in another dtype than float32, bfloat16 or float16, or if
      a rule has no path. When called, if no positional argument is at one of `data_argnums`.
    UnmatchedRuleError: when called, if no scope has the path of a rule.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> w, x = jnp.ones((8, 3)), jnp.ones((2, 8))
  >>> for eqn in jax.make_jaxpr(mpjax.autocast(lambda w, x: jnp.exp(x @ w)))(w, x).eqns:
  ...   print(eqn.primitive, eqn.outvars[0].aval.dtype)
  convert_element_type bfloat16
  convert_element_type bfloat16
  dot_general bfloat16
  convert_element_type float32
  exp float32
  """
  where, of_rules = "mpjax.autocast(fn)", "mpjax.autocast(rules=...)"
  # All arguments are checked here, so that an error points at this call and not at a step.
  check_function(fn, where, _AS_FUNCTION)
  if ops is not None and not isinstance(ops, OpLists):
    of_ops, fix = "mpjax.autocast(ops=...)", 'Write ops=mpjax.OpLists().replace(float32=["tanh"]).'
    raise MpjaxTypeError(of_ops, expected="an mpjax.OpLists", got=repr(ops), fix=fix)
  policy, rules = parse_policy(policy, "mpjax.autocast(policy)"), parse_rules(rules, of_rules)
  fix = (
    "A traced function has named scopes (jax.named_scope) but no modules. For rules by class or "
    "instance, put a policy on the model with mpjax.with_policy."
  )
  for rule in rules:
    check_value(rule, rule.path is not None, of_rules, expected="rules with path=", fix=fix)
    rewriting = "rules that rewrite operations, without rewrite=False"
    check_value(
      rule, rule.rewrite, of_rules, expected=rewriting, fix="Use mpjax.low_precision(fn)."
    )
  policies = [("mpjax.autocast(policy)", policy), *((of_rules, rule.policy) for rule in rules)]
  expected = "a policy that computes in bfloat16, float16 or float32"
  fix = "Leave the policy out: operations in other dtypes are left as they are."
  for of_policy, each in policies:
    allowed = each is None or each.compute_dtype in FLOATS
    check_value(each, allowed, of_policy, expected=expected, fix=fix)
  of_data = "mpjax.autocast(data_argnums=...)"
  numbers = tuple(data_argnums) if isinstance(data_argnums, Sequence) else (data_argnums,)
  fix = "Write data_argnums=(1,) for x in (params, x)."
  for number in numbers:
    check_int(number, of_data, least=0, fix=fix, fix_type=fix)

  def data(args: Args) -> list[Leaf]:
    fix = "Pass that argument by position, or remove its number from data_argnums."
    expected = f"positions of arguments that are passed by position, {len(args)} of them"
    check_value(numbers, max(numbers) < len(args), of_data, expected=expected, fix=fix)
    return Boundary([x for i, x in enumerate(args) if i in numbers]).leaves

  # Nothing would be rewritten, so the trace is saved.
  if not any(rewrites(each) for _, each in policies):
    return fn
  settings = Settings(region=Region(policy), ops=ops or OpLists(), rules=rules)
  returns_sums = policy is not None and policy.output_dtype == FLOAT32
  of_inputs = data if numbers else None
  return with_settings(fn, settings, where, data=of_inputs, returns_sums=returns_sums)


# Functions of trees, for autocast and for calls of modules.


def with_settings(
  fn: Callable[..., R],
  settings: Settings,
  where: str,
  *,
  data: Callable[[Args], Iterable[Leaf]] | None = None,
  results: Callable[[R], PyTree] | None = None,
  returns_sums: bool = False,
  check_kernels: Callable[[ClosedJaxpr], None] | None = None,
) -> Callable[..., R]:
  """Returns `fn`, a function of trees of arrays, traced and rewritten at each call.

  Args:
    fn: the function.
    settings: the policy, the lists and the rules.
    where: the public call, for errors.
    data: returns the leaves of the arguments that are inputs. The others are parameters.
    results: puts `InDtype` around results with a fixed dtype. Without it, results have the dtypes
      of the function.
    returns_sums: whether a matmul returns its float32 sum to a float32 result: see `Flag.OUTPUT`.
    check_kernels: raises an error for a jaxpr with kernels that has to be traced in another way.

  Raises:
    NotTraceable: when a call of modules cannot be traced.
    MpjaxTypeError: when another function cannot be traced.
  """

  @wraps(fn)
  def wrapped(*args: PyTree, **kwargs: PyTree) -> R:
    if outside_policies():  # Inside `full_precision` or `low_precision` no policy is active.
      return fn(*args, **kwargs)
    if AUDIT.value is not None and not settings.modules:
      AUDIT.value.uses.add("autocast")
    name = getattr(fn, "__name__", type(fn).__name__)
    boundary = Boundary((args, kwargs))
    # The traced leaves by their position among all. The others are passed as they are.
    leaves = enumerate(boundary.leaves)
    arrays = {i: x for i, x in leaves if _is_argument(x, settings.modules)}
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays.values()]
    returned: list[_Returned] = []  # by each trace

    def flat(*operands: Array) -> list[Array]:
      """Calls `fn` with other arrays and returns the arrays that it computes."""
      by_leaf = dict(zip(arrays, operands, strict=True))
      inside = boundary.inside([by_leaf.get(i, x) for i, x in enumerate(boundary.leaves)])
      result = fn(*inside.args[0], **inside.args[1])
      leaves, outside = inside.leave(result if results is None else results(result))
      is_array = [isinstance(x, (jax.Array, InDtype)) for x in leaves]
      computed = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]
      fixed = [x.dtype if results is None or isinstance(x, InDtype) else None for x in computed]
      # No tracer may outlive its trace.
      rest = [_TRACED if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
      # JAX accepts only arrays as results of a trace.
      returned.append(_Returned(rest, outside, fixed))
      return [x.array if isinstance(x, InDtype) else x for x in computed]

    program = _traced_in_float32(fn, flat, operands, settings, name, where)
    rest, outside, dtypes = returned[-1]
    if settings.rules:
      check_rules_match(program, settings.rules, where)
    # One walk finds whether the program has what needs more work. Most programs have nothing of it.
    holds = {facts_of(eqn).holds for eqn in walk(program)}
    if check_kernels is not None and Holds.KERNEL in holds:
      check_kernels(program)

    # Leaves are compared by identity, since `data` returns some of the user's arguments.
    inputs = set(map(id, () if data is None else data(args)))
    are_inputs = [id(x) in inputs for x in arrays.values()]
    new = _rewritten(program, operands, are_inputs, dtypes, settings, returns_sums)
    if new.linear_algebra:  # Without a line of the user.
      text = LINEAR_ALGEBRA.format(names=", ".join(new.linear_algebra))
      warnings.warn(text, UserWarning, stacklevel=2)

    def run_rewritten(*operands: Array) -> list[Array]:
      return run(new.jaxpr, program.consts, operands, name)

    computed = run_rewritten
    # The gradient is rewritten by this function again, with the same settings.
    if holds & _WITH_RULES and _has_rule_that_closes_over(program):
      again = functools.partial(
        with_settings, settings=settings, where=where, returns_sums=returns_sums
      )
      computed = _differentiated_at_once(run_rewritten, flat, are_inputs, again)
    # Outside of `jit` the operations are compiled here, so errors of the device are raised here.
    with refusals_explained(where):
      found = iter(computed(*operands))
    return outside([next(found) if x is _TRACED else x for x in rest])

  return wrapped


_TRACED = object()  # Replaces a tracer.


class _Returned(NamedTuple):
  """The results of a function that was traced, without tracers."""

  leaves: list[Leaf]  # `_TRACED` in place of each array
  outside: Function  # builds the user's result from leaves with the computed arrays
  dtypes: list[DType | None]  # of the arrays; None if an array may have any


def _is_argument(x: Leaf, modules: bool) -> bool:
  """Whether a leaf is traced. `fn` may read NumPy integers and booleans, so these are not."""
  if modules or not isinstance(x, (np.ndarray, np.generic)):
    return isinstance(x, jax.Array)
  return np.issubdtype(x.dtype, np.inexact) or x.dtype in HALVES


def _traced_in_float32(
  fn: Function,
  flat: Callable[..., list[Array]],
  operands: Sequence[Array],
  settings: Settings,
  name: str,
  where: str,
) -> ClosedJaxpr:
  """Returns the jaxpr of `flat`, which calls the user's `fn` with arrays like the operands."""
  # Errors of JAX show the name of the user's function and where it is, but its own operands.
  signature = inspect.signature(flat)
  flat.__name__ = name
  functools.update_wrapper(flat, fn, assigned=(), updated=())
  flat.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
  types = [cast(ShapedArray, jax.typeof(x)) for x in operands]
  if settings.modules:
    # Modules see float32, also for parameters that are stored in low precision.
    shown = {"dtype": FLOAT32, "weak_type": False}
    types = [x.update(**shown) if x.dtype in HALVES else x for x in types]
  # Haiku keeps parameters in a state outside the arguments. Tracers in it would outlive the trace.
  before = set(map(id, haiku_state()))
  policy = settings.region.policy
  try:
    with AUTOCAST(FLOAT32 if policy is None else policy.compute_dtype):
      program = traced(flat)(*types)
  except (NotTraceable, *flax_errors("TraceContextError")) as error:
    if settings.modules:  # `attempts` in module_calls.py then runs the body as Python.
      raise
    got = "one that writes to flax.nnx variables, such as statistics or random counters"
    if isinstance(error, NotTraceable):
      got = f"one that {error}"
    raise MpjaxTypeError(
      where,
      expected="a function without side effects",
      got=got,
      fix="Return new values as trees of arrays. With flax.nnx, use mpjax.with_policy(model, "
      "policy). Or split the model outside and nnx.merge(graphdef, state, copy=True) inside.",
    ) from error
  if any(isinstance(x, Tracer) and id(x) not in before for x in haiku_state()):
    raise MpjaxTypeError(
      where,
      expected="a function without side effects",
      got="one that creates parameters or state, or draws a key, inside hk.transform",
      fix="Transform the function first: mpjax.autocast(hk.transform(fn).apply).",
    )
  return program


def _rewritten(
  program: ClosedJaxpr,
  operands: Sequence[Array],
  are_inputs: Sequence[bool],
  dtypes: Sequence[DType | None],
  settings: Settings,
  returns_sums: bool,
) -> Rewritten:
  """Returns the jaxpr of a function, rewritten for its operands and for where it runs now.

  Args:
    program: the jaxpr as it was traced.
    operands: the operands in their stored dtypes, which a trace of modules does not see.
    are_inputs: whether each operand is an input. The others are parameters.
    dtypes: the dtype of each result; None if it may have any.
    settings: the settings of the function.
    returns_sums: see `with_settings`.
  """
  ins: list[Kind | None] = []
  for x, is_input in zip(operands, are_inputs, strict=True):
    parameter = Kind(Role.PARAMETER, x.dtype, weight=True)
    kind = kind_of_input(x.dtype) if is_input else parameter
    ins.append(kind if x.dtype in FLOATS else None)
  outs = tuple(dtype if dtype in FLOATS else None for dtype in dtypes)
  flags = tuple(flags_of_result(dtype, output=returns_sums) for dtype in outs)
  audit = AUDIT.value
  now = dataclasses.replace(
    settings,
    default_precision=default_precision(),
    keeps_marks=audit is not None or AUTOCAST.value is not None,
    shows_roundings=audit is not None and audit.shows_roundings,
  )
  consts = kinds_of_constants(program.consts, now)
  return rewrite(program.jaxpr, (*ins,), outs, flags, ScopedSettings(now), consts)


# Derivative rules that close over values of the function.


_WITH_RULES = {Holds.CUSTOM_JVP, Holds.CUSTOM_VJP}


def _has_rule_that_closes_over(program: ClosedJaxpr) -> bool:
  """Whether a function with a derivative rule closes over a value of the jaxpr."""
  # Inside a differentiated loss, gradients also flow to tracers that the function closes over.
  # `_differentiated_at_once` has gradients for arguments only.
  if any(isinstance(const, Tracer) for const in program.consts):
    return False
  # Constants are known before the trace, so a rule may still read them after it.
  constants = set(program.jaxpr.constvars)
  return any(
    facts_of(eqn).holds in _WITH_RULES and not constants.issuperset(eqn.invars[: closed_over(eqn)])
    for eqn in walk(program)
  )


def _differentiated_at_once(
  call: Callable[..., list[Array]],
  original: Callable[..., list[Array]],
  are_inputs: Sequence[bool],
  autocast_again: Callable[..., Function],
) -> Callable[..., list[Array]]:
  """Returns `call` with the gradient of `original`, rewritten by `autocast_again`."""
  # A rule that closes over a value of the function cannot run after its trace. So `original` is
  # differentiated inside one trace, and the derivative is rewritten.

  def forward(*operands: PyTree) -> tuple[list[Array], dict[bool, dict[int, Array]]]:
    # Residuals of `original` would be in the dtypes without autocast, so arguments are kept. They
    # are kept in two parts, since only those with a tangent have a gradient.
    parts = {
      moves: {i: x.value for i, x in enumerate(operands) if x.perturbed == moves}
      for moves in (True, False)
    }
    return call(*(x.value for x in operands)), parts

  def backward(
    parts: dict[bool, dict[int, Array]], cotangents: Sequence[Array | SymbolicZero]
  ) -> tuple[Array | None, ...]:
    moving, values = parts[True], parts[True] | parts[False]

    def gradients(values: dict[int, Array], changes: list[Array]) -> dict[int, Array]:
      def of_moving(moving: dict[int, Array]) -> list[Array]:
        return original(*((values | moving)[i] for i in range(len(values))))

      return jax.vjp(of_moving, {i: values[i] for i in moving})[1](changes)[0]

    # JAX requires that a gradient has the dtype of its argument.
    def with_dtypes(returned: dict[int, Array]) -> PyTree:
      return {i: InDtype(x, moving[i].dtype) for i, x in returned.items()}

    def data(args: Args) -> list[Leaf]:
      return [x for i, x in args[0].items() if are_inputs[i]]

    cast_gradients = autocast_again(gradients, data=data, results=with_dtypes)
    by_position = cast_gradients(values, [*map(instantiated, cotangents)])
    return tuple(by_position.get(i) for i in range(len(values)))

  with_vjp = jax.custom_vjp(call)
  with_vjp.defvjp(forward, backward, symbolic_zeros=True)
  return with_vjp
