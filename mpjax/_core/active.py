"""The active state while a model runs under a policy. JAX includes it in the key of its caches."""

import dataclasses
import functools
from typing import Any, Self

import jax

from mpjax._core.policy import Policy

# The one mechanism JAX has for a value that is part of every jit cache key; it is local to the
# thread and restored when its `with` block is left.
ACTIVE = jax.make_user_context(None)
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active:
  """The active state inside a call. Equal states give equal programs.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it. Linen's has more fields.

  Fields:
    policy: that of the module being called; None leaves it as it is.
    entered: a module has been entered: the policy began further out.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    cast: modules are called in their compute dtype: arguments, results and `dtype` fields.
    casting: the classes of modules that are called so, since they raise in float32.
    as_python: the paths of modules that run as Python, since they look at values.
    on: a policy is active.
    in_region: it is the state inside of `mpjax.full_precision`, where none is.
    failed: where to note the class of a module that raises.
    key: what of all this is compared.
    hash: that of the key.
  """

  policy: Policy | None = None
  entered: bool = False
  tracing: bool = False
  region: str = ""
  cast: bool = False
  casting: frozenset[type[Any]] = frozenset()
  as_python: frozenset[str] = frozenset()
  on: bool = True
  in_region: bool = False
  failed: list[type[Any]] | None = dataclasses.field(default=None, compare=False)
  key: tuple[Any, ...] = dataclasses.field(init=False, repr=False, compare=False)
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # Compared and hashed at each call of a function that is jitted, jax.numpy's own included.
    key = tuple(getattr(self, name) for name in _compared(type(self)))
    object.__setattr__(self, "key", key)
    object.__setattr__(self, "hash", hash(key))

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    return type(other) is type(self) and self.hash == other.hash and self.key == other.key

  def __hash__(self) -> int:
    return self.hash

  def outside(self) -> Self:
    """Returns the state inside of `mpjax.full_precision`."""
    return self if self.in_region else type(self)(on=False, in_region=True)


@functools.cache
def _compared(cls: type[Active]) -> tuple[str, ...]:
  return tuple(field.name for field in dataclasses.fields(cls) if field.compare)


def in_region() -> bool:
  """Whether this runs inside of `full_precision`, where no policy and no autocast begins."""
  return ACTIVE.value is not None and ACTIVE.value.in_region
