"""The outermost call under a policy, of any framework: traced, and rewritten where it can be."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.active import ACTIVE, EVERY, Active
from mpjax._core.errors import line_of_user, message
from mpjax._core.policy import Policy
from mpjax._core.policy_config import rewrites
from mpjax._core.types import Args, Class, Leaf, PyTree
from mpjax._jaxprs.autocast import Interface, NotTraceable, Settings, with_settings
from mpjax._jaxprs.op_lists import OpLists

R = TypeVar("R")
S = TypeVar("S", bound=Active)

_OPS = OpLists()

NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where a body asks a tracer for its values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateKind:
  """What becomes of one kind of state: a collection of Linen, a class of variables of NNX.

  Fields:
    neutral: it takes the dtype of what it meets, as parameters do. Other state decides that dtype,
      as arguments do: a float32 table that is added to activations makes them float32.
    stored: the dtype that new state has. "param_dtype" is that of the policy, "computed" the one
      that the model computes it in under the policy, "declared" the one that its code says.
  """

  neutral: bool = False
  stored: Literal["param_dtype", "computed", "declared"] = "declared"


def begins_trace(state: Active, policy: Policy | None, path: str) -> bool:
  """Whether a call is the outermost one that is traced and rewritten.

  Args:
    state: that in which the module is called.
    policy: that of the module.
    path: that of the module.
  """
  return rewrites(policy) and not (
    state.tracing or state.casting == EVERY or path in state.as_python
  )


def rewrite_calls(
  fn: Callable[..., R],
  policy: Policy | None,
  data: Callable[[Args], Iterable[Leaf]],
  results: Callable[[R], PyTree],
  where: str,
) -> Callable[..., R]:
  """Returns a function that calls modules, with its operations rewritten.

  Args:
    fn: the function, of trees of arrays.
    policy: applies where no module marks another.
    data: the leaves of the arguments that decide the dtype of what they meet.
    results: marks those results that have to have a dtype, see `Interface`.
    where: the public call, for errors.
  """
  settings = Settings(policy=policy or Policy(), ops=_OPS, modules=True)
  return with_settings(fn, settings, where, Interface(data=data, results=results))


def attempts(
  attempt: Callable[[S], R],
  python: Callable[[S], R],
  state: S,
  path: str,
  where: str,
  foreign: type[Exception],
) -> R:
  """Returns the result of a call that is traced, in another way where tracing it raises.

  What does not exist in float32 (a TypeError, a NotImplementedError) is traced again with the class
  of module that raised in its compute dtype: a kernel may take low precision alone. What needs
  Python runs as Python, and there each module that it calls is traced by itself.

  Args:
    attempt: traces the call and runs it.
    python: makes the call as it is.
    state: the active state.
    path: that of the module.
    where: the public call, for the warning.
    foreign: what a framework raises where a call changes what is not its own.
  """
  first: Exception | None = None
  while True:
    failed: list[Class] = []
    try:
      return attempt(dataclasses.replace(state, tracing=True, failed=failed))
    except NEEDS_VALUES as error:
      reason = f"needs the values of arrays: {line_of_user(error)}"
      break
    except foreign as error:
      reason = f"changes what it is not given: {line_of_user(error)}"
      break
    except NotTraceable as error:
      reason = str(error)
      break
    except (TypeError, NotImplementedError) as error:
      first = first or error
      # By name: a class that the call defines is another one in each attempt.
      if not failed or failed[0].__qualname__ in {cls.__qualname__ for cls in state.casting}:
        raise first from None
      state = dataclasses.replace(state, casting=state.casting | {failed[0]})
  state = dataclasses.replace(state, as_python=state.as_python | {path})
  with ACTIVE(state):
    outputs = python(state)
  warnings.warn(
    message(
      f"{where}: {path or 'the root'}",
      expected="a body that can be traced as a jaxpr",
      got=f"one that {reason}",
      fix="It runs as Python now, and the modules that it calls are rewritten one by one. Write it "
      "with jax.numpy and jax.lax, and return arrays or trees of them.",
    ),
    UserWarning,
    stacklevel=2,
  )
  return outputs


def array(x: Leaf) -> Leaf:
  """Returns an array of JAX where a variable is one of NumPy: variables are never constants."""
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x
