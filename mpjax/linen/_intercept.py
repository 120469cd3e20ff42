"""What happens at each call of a module's method while a policy is active."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator
from typing import Any

import flax.linen as nn

from mpjax._core.active import ACTIVE
from mpjax._core.policy_config import Given, Resolved, matched_by
from mpjax._jaxprs.autocast import region_of
from mpjax._jaxprs.module_calls import inside, is_low, output_dtype, returned, run
from mpjax.linen._context import Active, Held, current, is_new_root, module_path, resolve
from mpjax.linen._initialize import store, store_computed
from mpjax.linen._outermost import rewritten
from mpjax.linen._scope_paths import flag_paths, held_in


@contextlib.contextmanager
def activate(state: Active) -> Generator[None]:
  """Makes a state active, in this thread, for the length of a `with` block."""
  # One interceptor serves all states; it must not run twice when one is given inside another.
  # The state of an NNX model that calls this one came without it.
  stack = nn.intercept_methods(intercept) if current() is None else contextlib.nullcontext()
  with ACTIVE(state), stack:
    yield


@contextlib.contextmanager
def hold(state: Active) -> Generator[None]:
  """Makes a state active, as `activate` does, for a scope that may be left in any order.

  A generator that yields inside a scope leaves it when it ends, which may be after another scope
  was entered. That one stays active, and when it is left too what was before both is restored.
  """
  _fall_back()
  before = current()
  if before is None:
    interceptor = contextlib.ExitStack()
    interceptor.enter_context(nn.intercept_methods(intercept))
  else:
    interceptor = None if before.held is None else before.held.interceptor
  held = Held(ACTIVE.value, interceptor)
  ACTIVE(dataclasses.replace(state, held=held)).__enter__()
  try:
    yield
  finally:
    held.left = True
    _fall_back()


def _fall_back() -> None:
  """Restores what was before the innermost scopes, where they have been left."""
  active = ACTIVE.value
  while isinstance(active, Active) and active.held is not None and active.held.left:
    held, active = active.held, active.held.before
    ACTIVE(active).__enter__()
    if not isinstance(active, Active) and held.interceptor is not None:
      held.interceptor.close()


def intercept(
  next_fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  context: nn.module.InterceptorContext,
) -> Any:
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`.

  The function that a lifted transform took shows as a method that its class does not have. It is
  part of the module that calls it.
  """
  active, module, name = current(), context.module, context.method_name
  if active is None or active.given is None or module.scope is None:
    return next_fun(*args, **kwargs)
  if not callable(getattr(type(module), name, None)):
    return next_fun(*args, **kwargs)
  given: Given = active.given
  flag_paths(module, (args, kwargs), given)
  found = resolve(active, given, module)
  policy = found.policy
  root = weakref.ref(module.scope) if is_new_root(active, module) else active.root
  root_policy = policy if module.path == () else active.root_policy
  initializing = module.is_initializing()
  outer = dataclasses.replace(active, root=root, root_policy=root_policy)
  if name == "setup":  # What it calls is a part of it, and no call of its own.
    outer = dataclasses.replace(outer, again=[], tracing=True)

  again = active.again.pop() if active.again and name != "setup" else None
  if again is not None and next(held_in(again.call), None) is None:
    args, kwargs = again.call

  def call(active: Active) -> Any:
    outputs = _call(next_fun, (args, kwargs), module, name, active, given, found)
    if again is not None:
      again.outputs = (outputs,)
    return outputs

  traced = active.tracing or active.cast or initializing or name == "setup"
  as_python = module_path(module) in active.as_python
  if traced or as_python or policy is None or not is_low(policy):
    return call(outer)
  bound: Any = context.orig_method  # A partial: of the method, and the module.
  method = bound.func
  region = dataclasses.replace(outer, region=region_of(policy))
  return rewritten(method, module, args, kwargs, region, activate, policy, call)


def _call(
  next_fun: Callable[..., Any],
  call: Any,
  module: nn.Module,
  name: str,
  active: Active,
  given: Given,
  found: Resolved,
) -> Any:
  """Calls a method in the region of its module."""
  policy, path, initializing = found.policy, module_path(module), module.is_initializing()
  if active.met is not None:
    active.met.add(path)
  if active.visits is not None:
    active.visits.classes[path] = type(module).__name__
    active.visits.matched |= matched_by(given, module, path)
  iterates = isinstance(module, nn.SpectralNorm)
  inner = inside(active, module, policy, iterates=iterates, exempt=found.exempt)
  outputs = run(next_fun, call, module, path, inner, initializing=initializing)
  if initializing:
    store(module, policy)
    if not (active.entered or active.cast or active.visits) and name != "setup":
      with ACTIVE(dataclasses.replace(active, cast=True)):
        store_computed(module, name, call)
  if name == "setup" or policy is None:
    return outputs
  dtype = output_dtype(active, policy, found.picked, given.output_dtype)
  if active.visits is not None and not active.entered:
    active.visits.output_dtype = dtype
  return returned(outputs, dtype, module, active, inner)
