"""`policy_scope`: a policy for every Linen model that runs inside of a `with` block."""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import flax.linen as nn

from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError, MpjaxValueError
from mpjax._policy.active import NUMBERS, outside_policies
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, parse_config, policy_text
from mpjax._policy.scope_token import ScopeToken, enter_scope, leave_scopes
from mpjax.linen._active import begin, current
from mpjax.linen._intercept import intercept

F = TypeVar("F", bound=Callable[..., Any])

_WHERE = "mpjax.policy_scope(policy)"


def policy_scope(
  policy: PolicyLike | None, rules: Iterable[Rule] = (), *, unmatched: str = "warn"
) -> contextlib.AbstractContextManager[None]:
  """Run every Linen model called inside under a policy, for code that hides its `.apply`.

  The scope belongs to the thread that enters it, and to every function that is traced or called
  inside: `jax.jit` traces once for each policy. Flax's NNX has no hook for calls: give
  `mpjax.with_policy(model, policy)` to the code that calls an NNX model.

  On exit a scope warns if no Linen module ran under its policy, or if a rule picked out no module.
  Modules that ran in earlier scopes with an equal policy and equal rules count, since JAX may reuse
  their traces. A scope that contains another scope does not have to run a module itself.

  Args:
    policy: as for `with_policy`, None too.
    rules: as for `with_policy`, with paths relative to each root.
    unmatched: "raise", "warn" or "ignore": what to do about a scope under which nothing ran, and
      about a rule that picks out no module.

  Returns:
    A context manager, for `with`; also a decorator. It can be entered repeatedly, but not by a
    module that is running under a policy (MpjaxRuntimeError).

  Raises:
    MpjaxValueError: on exit with `unmatched="raise"`, if no module ran. For a rule that picked out
      no module it is an UnmatchedRuleError.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))
  >>> with mpjax.policy_scope("c=bf16"):
  ...   nn.Dense(2).apply(variables, jnp.ones((1, 3))).dtype
  dtype(bfloat16)
  """
  config = parse_config("mpjax.policy_scope", policy, rules, unmatched=unmatched)
  return _Scope(dataclasses.replace(config, of_scope=True))


class _Scope:
  """A scope, which can be entered repeatedly: one after the other, nested, in several threads."""

  def __init__(self, config: PolicyConfig, stacklevel: int = 2) -> None:
    self._config = config
    self._stacklevel = stacklevel  # where the user leaves it, from `__exit__`
    self._entered: list[ScopeToken] = []
    self._used = False

  def __call__(self, func: F) -> F:
    self._used = True
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(runs_later(func) for runs_later in later):
      expected = "a function that has run when it returns"
      got = f"{func.__qualname__}, a generator or an async function"
      fix = "Write the with block inside of it: with mpjax.policy_scope(policy): ..."
      raise MpjaxTypeError(f"@{_WHERE}", expected=expected, got=got, fix=fix)

    @functools.wraps(func)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
      # Each call has a scope of its own, whose warnings point at the caller.
      with _Scope(self._config, stacklevel=3):
        return func(*args, **kwargs)

    return cast(F, in_scope)

  def __del__(self) -> None:
    if not self._used:
      text = (
        "mpjax.policy_scope(policy) was never entered: models run without that policy. Write "
        "with mpjax.policy_scope(policy): and call them inside."
      )
      warnings.warn(text, UserWarning, stacklevel=2)

  def __enter__(self) -> None:
    self._used = True
    active, opened = current(), contextlib.ExitStack()
    if outside_policies():  # Inside `full_precision`, no policy takes effect.
      token = ScopeToken(None, opened)
    elif active is None or not active.entered:
      leave_scopes()
      if current() is None:  # A scope around this one has installed the interceptor.
        opened.enter_context(nn.intercept_methods(intercept))
      with _lock:  # Two threads that enter equal scopes at once would have a record each.
        reached = _records(self._config)
      token = enter_scope(begin(self._config, met=reached), opened, reached)
    else:
      expected = "to be entered outside of a forward pass"
      policy = policy_text(active.around.policy)
      got = f"a module that is running already, under the policy {policy}"
      fix = "Pick submodules out with mpjax.Rule, or apply a wrapped model of its own."
      raise MpjaxRuntimeError(_WHERE, expected=expected, got=got, fix=fix)
    self._entered.append(token)

  def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
    here = threading.get_ident()
    # Several threads may be in one scope. Leave the last one that this thread entered. A generator
    # may be closed by another thread, and then leaves the last of all.
    last = next((x for x in reversed(self._entered) if x.thread == here), self._entered[-1])
    self._entered.remove(last)
    leave_scopes(last)
    # After an error, modules that did not run are no surprise.
    if exception is not None or last.reached is None:
      return
    if last.reached.classes:
      last.reached.check("that ran in the scope", self._stacklevel)
      return
    changes_nothing = self._config.policy is None and not self._config.rules
    if last.has_inner or changes_nothing or self._config.unmatched == "ignore":
      return
    error = MpjaxValueError(
      _WHERE,
      expected="Linen modules that are called inside, in the thread that entered it",
      got="none: nothing ran under the policy",
      fix="Plain functions need mpjax.autocast(fn, policy), NNX models mpjax.with_policy(model, "
      "policy). A model of with_policy runs under its own policy. A function that was compiled "
      "before (.lower(...).compile()) keeps the dtypes it was compiled with. If nothing is to run, "
      'pass unmatched="ignore".',
    )
    if self._config.unmatched == "raise":
      raise error
    warnings.warn(str(error), UserWarning, stacklevel=self._stacklevel)


# A function that JAX traced in an equal scope is found in its cache, and calls no module. So
# remember the modules of each configuration for as long as JAX may find such a function. That is as
# long as the state of the scope has a number.
_records = functools.lru_cache(maxsize=NUMBERS)(ModuleRecord)
_lock = threading.Lock()
