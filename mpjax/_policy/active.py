"""The state that is active while a model runs under a policy."""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax

from mpjax._core.types import Class, DType
from mpjax._policy.policy import Policy
from mpjax._policy.rules import NO_POLICY, ModulePolicy

# JAX keeps compiled functions by the values of all user contexts, so once a context is added it
# compiles each of them again. All contexts are in this module, which `import mpjax` imports.
AUTOCAST = jax.make_user_context(None)
"""The compute dtype of the function that is being traced for a rewriting, also float32, or None.

Operations inside that have a policy of their own keep its marks, so that they keep the policy. It
is no `Region`, because JAX would compare regions by Python code: see `_Number`.
"""

AUDIT = jax.make_user_context(None)
"""The `AuditRecord` of the audit that traces in this thread; None outside of an audit."""

FULL_PRECISION = "mpjax.full_precision"
"""The named scope that marks the region for autocast."""

EVERY: frozenset[Class] = frozenset({object})
"""A value of `Active.casting`: modules of all classes are called in their compute dtype."""


class Region(NamedTuple):
  """Some code, by its policy. In a jaxpr, a mark names the region: see `_autocast/scopes.py`."""

  policy: Policy | None  # None if its operations stay as they are
  called_in: DType | None = None  # without a policy, the dtype in which the code is called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The active state inside a call. Equal states give equal jaxprs. Linen's has more fields.

  Each distinct state costs a trace of every small jitted function of `jax.numpy`. A state
  therefore omits the called module and its path.
  """

  # The policy of the module that is called. The modules inside inherit it.
  around: ModulePolicy = NO_POLICY
  entered: bool = False  # whether a module has been entered, so that the policy began further out
  tracing: bool = False  # whether the call is traced, and will be rewritten
  region: Region | None = None  # the region of the module that is called
  # Classes of modules that raise in float32, and are called in their compute dtype. Inside such a
  # module it is `EVERY`.
  casting: frozenset[Class] = frozenset()
  # Names of the classes of modules whose own `dtype` must reach a kernel.
  keeping: frozenset[str] = frozenset()
  # Whether the module, or one around it, is of a class in `keeping`. Then no own `dtype` is
  # replaced.
  keeps_dtypes: bool = False
  as_python: frozenset[str] = frozenset()  # paths of modules that run as Python: they read values
  # Whether the call is inside `mpjax.full_precision` or `mpjax.low_precision`, where no policy is
  # active.
  outside_policies: bool = False
  in_low_precision: bool = False  # whether it is inside `mpjax.low_precision`
  # These two are mutable, so they take no part in comparisons.
  failed: list[Class] | None = dataclasses.field(default=None, compare=False)  # see `attempts`
  # The `ScopeToken` of the `mpjax.policy_scope` that was entered last, or None.
  token: Any = dataclasses.field(default=None, compare=False)


NUMBERS = 1024
"""The number of active states that keep their `_Number`. A state without one is traced again."""


class _Number(int):
  """The number of an active state. Equal states have the same."""

  # JAX has it in the keys of its cache of compiled functions, a C++ table without a lock. If Python
  # code compared or hashed keys, another thread could change the table meanwhile, and the process
  # would crash. An int is compared and hashed in C.
  state: Active


class _ActiveState:
  """The active state of each thread, which a `with` block sets."""

  # A user context is the only value of a user that JAX puts into every key of the cache of jit.
  _number = jax.make_user_context(None)

  @property
  def value(self) -> Active | None:
    """The active state of this thread, or None."""
    return getattr(self._number.value, "state", None)

  def __call__(self, state: Active | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a state is active."""
    if state is None:
      return self._number(None)
    # States that differ in `failed` or `token` alone have one number. The cache of numbers must not
    # keep these objects alive.
    rest: dict[str, Any] = {f.name: None for f in dataclasses.fields(state) if not f.compare}
    number = _Number(_number_of(dataclasses.replace(state, **rest)))
    number.state = state
    return self._number(number)


_numbers = itertools.count()
# A counter, so that a number that the cache has dropped is never given to another state.
_number_of = functools.lru_cache(maxsize=NUMBERS)(lambda *_: next(_numbers))

ACTIVE = _ActiveState()
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


def outside_policies() -> bool:
  """Whether the caller is inside `full_precision` or `low_precision`, where no policy is active."""
  return ACTIVE.value is not None and ACTIVE.value.outside_policies
