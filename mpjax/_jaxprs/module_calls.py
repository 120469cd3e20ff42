"""A module's call under a policy, of any framework: its arguments, results, and the trace."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.active import ACTIVE, Active
from mpjax._core.dtypes import FLOAT32, is_low_precision
from mpjax._core.errors import MpjaxTypeError, has_note, line_of_user, message, mixed_dtypes_note
from mpjax._core.module_dtype import dtype_field, warn_of_uncast
from mpjax._core.policy import Policy
from mpjax._core.trees import cast_leaf, is_half, is_nnx_object, map_arrays
from mpjax._core.types import Class, DType, Function, Leaf, Module, PyTree
from mpjax._jaxprs.autocast import (
  DataLeaves,
  Interface,
  NotTraceable,
  ResultDtypes,
  Settings,
  leaving,
  mark,
  region_of,
  tree_leaves,
  with_settings,
)
from mpjax._jaxprs.op_lists import OpLists

S = TypeVar("S", bound=Active)

Call: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
"""Positional and keyword arguments."""

_OPS = OpLists()

_NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)

_OF_TRACERS = ("Tracer.__format__", "not available on traced array")
"""What JAX says where a tracer is formatted, or asked where it is: it has no class for these."""


def is_low(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return policy is not None and is_low_precision(policy.compute_dtype)


def is_wide(policy: Policy | None) -> bool:
  """Whether operations under a policy run in float64, to which all there is has to be cast."""
  return policy is not None and policy.compute_dtype.itemsize > FLOAT32.itemsize


def inside(
  state: S, module: Module, policy: Policy | None, *, iterates: bool = False, **more: object
) -> S:
  """Returns the state in which a module's own operations run.

  Args:
    state: that in which it is called.
    module: the module.
    policy: its policy, which goes on to the modules inside.
    iterates: the module starts each step from its own last result, which drifts where it is
      rounded: its own operations are in float32.
    more: further fields of the state.
  """
  casts = state.cast or is_wide(policy) or type(module) in state.casting
  region = FLOAT32.name if iterates and is_low(policy) else region_of(policy)
  return dataclasses.replace(state, policy=policy, entered=True, region=region, cast=casts, **more)


def call_method(
  method: Function,
  call: Call,
  module: Module,
  path: str,
  state: Active,
  *,
  initializing: bool = False,
) -> PyTree:
  """Calls a method in a state and in the region that it names; errors of dtypes name the module.

  Args:
    method: the method, or a step of its body.
    call: its positional and keyword arguments.
    module: the module.
    path: where it is.
    state: what `inside` returned.
    initializing: parameters are drawn in the call, perhaps in the dtype that a field says.
  """
  policy, around, fields = state.policy, ACTIVE.value, {}
  if policy is not None:
    call = _arguments(call, policy, state.cast)
    if state.cast or not initializing:
      dtype = policy.compute_dtype if state.cast else FLOAT32
      fields = dtype_field(module, dtype, always=state.cast)
  marks = state.tracing and (around is None or around.region != state.region)
  marked = mark(state.region) if marks else contextlib.nullcontext()
  with ACTIVE(state), _fields_set(module, fields), marked:
    try:
      return method(*call[0], **call[1])
    except Exception as error:
      if policy is not None:
        _note(error, module, path, policy, state.failed)
      raise


def _arguments(call: Call, policy: Policy, casts: bool) -> Call:
  """Returns the arguments of a method as its policy wants them: mostly as they are."""
  compute = policy.compute_dtype
  if casts and not _any_complex(call):
    return map_arrays(lambda x: cast_leaf(x, compute), call)
  if compute == FLOAT32:
    return map_arrays(lambda x: cast_leaf(x, compute) if is_half(x) else x, call)
  return call


def _any_complex(call: Call) -> bool:
  """Whether an argument is a complex array: a half `dtype` would drop its imaginary part."""
  args, kwargs = call
  return any(
    isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.complexfloating)
    for x in (*args, *kwargs.values())
  )


@contextlib.contextmanager
def _fields_set(module: Module, fields: Mapping[str, object]) -> Generator[None]:
  """Sets attributes of a module for the length of a call, without what its class does then."""
  attributes = vars(module)
  before = {name: attributes[name] for name in fields if name in attributes}
  attributes.update(fields)
  try:
    yield
  finally:
    for name in fields.keys() - before.keys():
      attributes.pop(name, None)
    attributes.update(before)


def _note(
  error: Exception, module: Module, path: str, policy: Policy, failed: list[Class] | None
) -> None:
  """Notes which module raised, and tells a TypeError which was running, and under what."""
  if failed is not None:
    failed.append(type(module))
  noted = isinstance(error, MpjaxTypeError) or has_note(error)
  ours = isinstance(error, TypeError) and not isinstance(error, jax.errors.JAXTypeError)
  if ours and not noted:
    error.add_note(mixed_dtypes_note(path, type(module).__name__, str(policy)))


def output_dtype(state: Active, policy: Policy, picked: bool, outer: DType | None) -> DType | None:
  """Returns the dtype that a module's policy gives its results; None leaves what was computed.

  Args:
    state: that in which the module is called.
    policy: that of the module.
    picked: whether it was picked for the module, and does not come from around it.
    outer: for the outermost module, if its policy names none.
  """
  if not state.entered:
    return policy.output_dtype or outer
  return policy.output_dtype if picked and policy != state.policy else None


def returned(
  outputs: PyTree, dtype: DType | None, module: Module, state: Active, inner: Active
) -> PyTree:
  """Returns the results of a module in a dtype.

  Args:
    outputs: the results.
    dtype: what they are in for all who read them; None leaves them as they were computed.
    module: the module.
    state: that in which it was called.
    inner: that in which its own operations ran.
  """
  if dtype is None and inner.cast and inner.policy is not None:
    dtype = inner.policy.compute_dtype
  if dtype is None:
    return outputs
  to, traced = dtype, state.tracing and not state.cast

  def leaf(x: Leaf) -> Leaf:
    return leaving(x, to) if traced and isinstance(x, jax.Array) else cast_leaf(x, to)

  new = map_arrays(leaf, outputs)
  # While it is traced all is float32 still, and what hides arrays from JAX is not traced after all.
  if not (state.entered or state.tracing or state.cast):
    warn_of_uncast(module, new, dtype)
  return new


def rewrite_calls(
  function: Function,
  policy: Policy | None,
  data: DataLeaves,
  results: ResultDtypes,
  where: str,
) -> Function:
  """Returns a function that calls modules, with its operations rewritten.

  Args:
    function: of trees of arrays.
    policy: applies where no module marks another.
    data: which of the leaves of the arguments decide the dtype of what they meet.
    results: the dtypes of the results, of which None is the one that they are computed in.
    where: the public call, for errors.
  """
  low = policy.compute_dtype if policy is not None and is_low(policy) else FLOAT32
  interface = Interface(data=data, results=results)
  wide = None if policy is None else policy.weight_grad_dtype
  settings = Settings(compute=low, ops=_OPS, weight_grads=wide, modules=True)
  return with_settings(function, settings, where, interface)


def attempts(
  attempt: Callable[[S], PyTree],
  python: Callable[[S], PyTree],
  call: Call,
  state: S,
  path: str,
  where: str,
  foreign: type[Exception],
) -> PyTree:
  """Returns the result of a call that is traced, in another way where tracing it raises.

  What raises in float32 is traced again with the class of module that raised in its compute dtype:
  a kernel may take low precision alone. What needs Python runs as Python, and there each module
  that it calls is traced by itself.

  Args:
    attempt: traces the call and runs it.
    python: makes the call as it is.
    call: its positional and keyword arguments.
    state: the active state.
    path: that of the module.
    where: the public call, for the warning.
    foreign: what a framework raises where a call changes what is not its own.
  """
  first: Exception | None = None
  while True:
    failed: list[Class] = []
    try:
      tree_leaves(call, "is given", is_leaf=is_nnx_object)
      return attempt(dataclasses.replace(state, tracing=True, failed=failed))
    except Exception as error:
      reason = _why_not_traced(error, foreign)
      if reason is not None:
        break
      first = first or error
      if not failed or failed[0] in state.casting:
        raise first from None
      state = dataclasses.replace(state, casting=state.casting | {failed[0]})
  outputs = python(dataclasses.replace(state, as_python=state.as_python | {path}))
  warnings.warn(
    message(
      f"{where}: {path or 'the root'}",
      expected="a body that can be traced as a program",
      got=f"one that {reason}",
      fix="It runs as Python now, and the modules that it calls are rewritten one by one. Write it "
      "with jax.numpy and jax.lax, and return arrays or trees of them.",
    ),
    UserWarning,
    stacklevel=2,
  )
  return outputs


def _why_not_traced(error: Exception, foreign: type[Exception]) -> str | None:
  """Returns what a body does that no program can; None for any other error."""
  if isinstance(error, NotTraceable):
    return str(error)
  said = isinstance(error, (TypeError, AttributeError)) and any(
    t in str(error) for t in _OF_TRACERS
  )
  if said or isinstance(error, _NEEDS_VALUES):
    return f"needs the values of arrays: {line_of_user(error)}"
  if isinstance(error, foreign):
    return f"changes what it is not given: {line_of_user(error)}"
  return None


def array(x: Leaf) -> Leaf:
  """Returns an array of JAX where a variable is one of NumPy: variables are never constants."""
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x
