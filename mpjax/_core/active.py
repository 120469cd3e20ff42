"""The active state while a model runs under a policy. JAX includes it in the key of its caches."""

import contextlib
import dataclasses
import functools
import threading
from typing import Self

import jax

from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._core.types import Class

# The one mechanism JAX has for a value that is part of every jit cache key; it is local to the
# thread and restored when its `with` block is left.
ACTIVE = jax.make_user_context(None)
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


@dataclasses.dataclass(eq=False)
class ScopeToken:
  """A scope that a user has entered, in one thread, and may leave in any order.

  Fields:
    before: the state that it found.
    opened: what to close with it.
    left: it has been left.
    thread: the identity of the thread.
  """

  before: "Active | None"
  opened: contextlib.ExitStack
  left: bool = False
  thread: int = dataclasses.field(default_factory=threading.get_ident)


EVERY: frozenset[Class] = frozenset({object})
"""In `Active.casting`: modules of all classes are called in their compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active:
  """The active state inside a call. Equal states give equal jaxprs.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it. Linen's has more fields.

  Fields:
    policy: that of the module being called; None leaves it as it is.
    rule: the rule that gave it the policy, or a module around it; None if none did.
    entered: a module has been entered: the policy began further out.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    is_table: the module being called looks up its rows: its own matmuls are not in float8.
    casting: the classes of modules that are called in their compute dtype (arguments, results and
      `dtype` fields), since they raise in float32; `EVERY` inside of one.
    as_python: the paths of modules that run as Python, since they look at values.
    on: a policy is active.
    in_region: it is the state inside of `mpjax.full_precision`, where none is.
    failed: where to note the class of a module that raises.
    token: the user's scope that the state belongs to, if any.
    key: what of all this is compared.
    hash: that of the key.
  """

  policy: Policy | None = None
  rule: Rule | None = None
  entered: bool = False
  tracing: bool = False
  region: str = ""
  is_table: bool = False
  casting: frozenset[Class] = frozenset()
  as_python: frozenset[str] = frozenset()
  on: bool = True
  in_region: bool = False
  failed: list[Class] | None = dataclasses.field(default=None, compare=False)
  token: ScopeToken | None = dataclasses.field(default=None, compare=False)
  key: tuple[object, ...] = dataclasses.field(init=False, repr=False, compare=False)
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


def activate_scope(state: Active, opened: contextlib.ExitStack) -> ScopeToken:
  """Makes a state active for a scope that may be left in any order."""
  # A generator that yields inside a scope leaves it when it ends, which may be after another scope
  # was entered. That one stays active, and when it is left too what was before both is restored.
  # Left as a `with` block is, the scope of the generator would restore what was before it, and a
  # model called next in the other scope would run without a policy.
  token = ScopeToken(ACTIVE.value, opened)
  ACTIVE(dataclasses.replace(state, token=token)).__enter__()
  return token


def leave_scope(token: ScopeToken) -> None:
  """Leaves a scope; what was before it is restored once the scopes inside have been left."""
  token.left = True
  leave_finished()


def leave_finished() -> None:
  """Restores what was before the innermost scopes, where they have been left."""
  active = ACTIVE.value
  while active is not None and active.token is not None and active.token.left:
    token, active = active.token, active.token.before
    ACTIVE(active).__enter__()
    token.opened.close()
