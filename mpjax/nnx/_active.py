"""What is in force while a method of a policied NNX module runs."""

import dataclasses
from typing import Any

from mpjax._full_precision import ACTIVE
from mpjax._policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The state in force inside a call. JAX keys its caches by it.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it.

  Fields:
    policy: that of the module being called; None leaves it as it is.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    cast: modules are called in their compute dtype: arguments, results and `dtype` fields.
    casting: the classes of modules that are called so, since they raise in float32.
    as_python: the paths of modules that run as Python, since they look at values.
    failed: where to note the class of a module that raises.
    outermost: no module has been entered: the next is where a policy begins.
    on: policies are in force.
    in_region: it is the state inside of `mpjax.full_precision`, where none is.
    given: always None, as are the two that follow: what a Linen module looks at, to find that no
      policy of its own is in force.
    held: always None.
    entered: always False.
  """

  policy: Policy | None = None
  tracing: bool = False
  region: str = ""
  cast: bool = False
  casting: frozenset[type[Any]] = frozenset()
  as_python: frozenset[str] = frozenset()
  failed: list[type[Any]] | None = dataclasses.field(default=None, compare=False)
  outermost: bool = True
  on: bool = True
  in_region: bool = False
  given: None = None
  held: None = None
  entered: bool = False

  def outside(self) -> "Active":
    """Returns the state inside of `mpjax.full_precision`."""
    return _REGION


_REGION = Active(on=False, in_region=True)


def current() -> Active | None:
  """Returns the state in force in this thread; None outside of every policied method."""
  state = ACTIVE.value
  return state if isinstance(state, Active) else None
