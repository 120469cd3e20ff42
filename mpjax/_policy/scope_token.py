"""Scopes of `mpjax.policy_scope` that a thread has entered, and may leave in any order."""

import contextlib
import dataclasses
import threading

from mpjax._policy.active import ACTIVE, Active
from mpjax._policy.rules import ModuleRecord


@dataclasses.dataclass(eq=False)
class ScopeToken:
  """A scope that a thread has entered."""

  before: Active | None  # the state that was active before
  opened: contextlib.ExitStack  # contexts to close with the scope
  reached: ModuleRecord | None = None  # modules that run in it; None if it has no effect
  has_inner: bool = False  # whether another scope was entered inside
  left: bool = False
  thread: int = dataclasses.field(default_factory=threading.get_ident)


def enter_scope(
  state: Active, opened: contextlib.ExitStack, reached: ModuleRecord | None
) -> ScopeToken:
  """Makes a state active for a scope that may be left in any order."""
  # A generator that yields inside a scope may leave it after another scope was entered. That one
  # has to stay active, so leaving cannot simply restore the state before. It is restored when both
  # scopes have been left.
  before = ACTIVE.value
  if before is not None and before.token is not None:
    before.token.has_inner = True
  token = ScopeToken(before, opened, reached)
  ACTIVE(dataclasses.replace(state, token=token)).__enter__()
  return token


def leave_scopes(token: ScopeToken | None = None) -> None:
  """Leaves a scope, and restores what was before the innermost scopes that have been left."""
  if token is not None:
    token.left = True
  active = ACTIVE.value
  # Scopes that were left out of order are unwound here, from the innermost outwards.
  while active is not None and active.token is not None and active.token.left:
    innermost: ScopeToken = active.token
    active = innermost.before
    ACTIVE(active).__enter__()
    innermost.opened.close()
