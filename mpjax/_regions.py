"""A module's call under a policy, of any framework: its arguments, results, and the trace."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast import (
  Interface,
  NotTraceable,
  Settings,
  leaving,
  tree_leaves,
  with_settings,
)
from mpjax._errors import MpjaxTypeError, has_note, line_of_user, message, mixed_dtypes_note
from mpjax._op_lists import OpLists
from mpjax._policy import Policy
from mpjax._tree import cast_leaf, is_half, is_nnx_object, map_arrays
from mpjax._types import PyTree

State = TypeVar("State", bound=Any)

FLOAT32 = np.dtype("float32")

_OPS = OpLists()

NEEDS_PYTHON = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
  NotTraceable,
)
"""What is raised where a body looks at values, or does something else that no program can."""


def is_low(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return policy is not None and policy.compute_dtype.itemsize < FLOAT32.itemsize


def is_wide(policy: Policy | None) -> bool:
  """Whether operations under a policy run in float64, to which all there is has to be cast."""
  return policy is not None and policy.compute_dtype.itemsize > FLOAT32.itemsize


def arguments(call: PyTree, policy: Policy, casts: bool) -> PyTree:
  """Returns the arguments of a method as its policy wants them: mostly as they are.

  Args:
    call: positional and keyword arguments.
    policy: that of the module.
    casts: the module is called in its compute dtype.
  """
  compute = policy.compute_dtype
  if casts and not _any_complex(call):
    return map_arrays(lambda x: cast_leaf(x, compute), call)
  if compute == FLOAT32:
    return map_arrays(lambda x: cast_leaf(x, compute) if is_half(x) else x, call)
  return call


def returned(outputs: PyTree, dtype: np.dtype[Any], traced: bool) -> PyTree:
  """Returns the results of a module in a dtype.

  Args:
    outputs: the results.
    dtype: what they are in for all who read them.
    traced: they are part of a program that will be rewritten.
  """

  def leaf(x: Any) -> Any:
    return leaving(x, dtype) if traced and isinstance(x, jax.Array) else cast_leaf(x, dtype)

  return map_arrays(leaf, outputs)


def _any_complex(call: Any) -> bool:
  """Whether an argument is a complex array: a half `dtype` would drop its imaginary part."""
  args, kwargs = call
  return any(
    isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.complexfloating)
    for x in (*args, *kwargs.values())
  )


def named_in_errors(
  function: Callable[..., Any],
  call: Any,
  module: Any,
  path: str,
  policy: Policy | None,
  failed: list[type[Any]] | None,
) -> Any:
  """Calls a method; a TypeError out of it is told which module was running, and under what.

  Args:
    function: the method.
    call: its positional and keyword arguments.
    module: the module.
    path: that of the module.
    policy: that of the module.
    failed: where to note the class of a module that raises; None notes nothing.
  """
  try:
    return function(*call[0], **call[1])
  except Exception as error:
    if failed is not None and policy is not None:
      failed.append(type(module))
    noted = isinstance(error, MpjaxTypeError) or has_note(error)
    ours = isinstance(error, TypeError) and not isinstance(error, jax.errors.JAXTypeError)
    if policy is not None and ours and not noted:
      error.add_note(mixed_dtypes_note(path, type(module).__name__, str(policy)))
    raise


def rewritten(
  program: Callable[..., Any],
  policy: Policy | None,
  data: Callable[[tuple[Any, ...]], list[bool]],
  results: Callable[[Any], Sequence[Any]],
  where: str,
) -> Callable[..., Any]:
  """Returns a function with its operations rewritten.

  Args:
    program: the function, of trees of arrays.
    policy: in force where no module marks another.
    data: which of the leaves of the arguments decide the dtype of what they meet.
    results: the dtypes of the results, of which None is the one that they are computed in.
    where: the public call, for errors.
  """
  low = policy.compute_dtype if policy is not None and is_low(policy) else FLOAT32
  interface = Interface(data=data, results=results, widen=True, arrays_alone=True)
  wide = None if policy is None else policy.weight_grad_dtype
  settings = Settings(compute=low, ops=_OPS, weight_grads=wide)
  return with_settings(program, settings, where, interface)


def attempts(
  attempt: Callable[[State], Any],
  python: Callable[[State], Any],
  call: Any,
  state: State,
  path: str,
  where: str,
  needs_python: tuple[type[Exception], ...] = NEEDS_PYTHON,
) -> Any:
  """Returns the result of a call that is traced, in another way where tracing it raises.

  What raises in float32 is traced again with the class of module that raised in its compute dtype:
  a kernel may take low precision alone. What needs Python runs as Python, and there each module
  that it calls is traced by itself.

  Args:
    attempt: traces the call and runs it.
    python: makes the call as it is.
    call: its positional and keyword arguments.
    state: the state in force.
    path: that of the module.
    where: the public call, for the warning.
    needs_python: what is raised where a call cannot be traced.
  """
  first: Exception | None = None
  while True:
    failed: list[type[Any]] = []
    try:
      tree_leaves(call, "is given", is_leaf=is_nnx_object)
      return attempt(dataclasses.replace(state, tracing=True, failed=failed))
    except needs_python as error:
      reason = f"needs the values of arrays: {line_of_user(error)}"
      if isinstance(error, NotTraceable):
        reason = str(error)
      break
    except Exception as error:
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


def array(x: Any) -> Any:
  """Returns an array of JAX where a variable is one of NumPy: variables are never constants."""
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x
