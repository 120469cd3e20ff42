"""What happens at each call of a module's method while a policy is active."""

import contextlib
import dataclasses
import weakref
from collections.abc import Generator
from typing import Any

import flax.linen as nn

from mpjax._core.active import ACTIVE, ScopeToken, activate_scope, leave_finished
from mpjax._core.policy_config import ModulePolicy
from mpjax._core.trees import instances_in
from mpjax._core.types import Args, Function, Kwargs, PyTree
from mpjax._jaxprs.autocast import region_of
from mpjax._jaxprs.module_calls import ModuleCall, inside
from mpjax._jaxprs.traced_calls import begins_trace
from mpjax.linen import _layers
from mpjax.linen._context import Active, current, flag_paths, is_new_root, module_path, policy_of
from mpjax.linen._initialize import store, store_computed
from mpjax.linen._outermost import rewritten


@contextlib.contextmanager
def activate(state: Active) -> Generator[None]:
  """Makes a state active, in this thread, for the length of a `with` block."""
  # One interceptor serves all states: with a second one a module of a wrapped model inside of
  # another would be called twice under policies, and its results cast twice. Where the state around
  # is that of an NNX model there is none yet.
  stack = nn.intercept_methods(intercept) if current() is None else contextlib.nullcontext()
  with ACTIVE(state), stack:
    yield


def enter_scope(state: Active) -> ScopeToken:
  """Makes a state active for a scope, with the interceptor if there is none yet."""
  leave_finished()
  opened = contextlib.ExitStack()
  if current() is None:
    opened.enter_context(nn.intercept_methods(intercept))
  return activate_scope(state, opened)


def intercept(
  next_fun: Function, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`."""
  active, module, name = current(), context.module, context.method_name
  if active is None or active.config is None or module.scope is None:
    return next_fun(*args, **kwargs)
  # The function that a lifted transform took, the body of `nn.scan(body)`, shows as a method that
  # the class does not have. It is a part of the module that calls it. Taken for a call of its own,
  # its carry would come back in another dtype than it came in, and the scan would raise.
  if not callable(getattr(type(module), name, None)):
    return next_fun(*args, **kwargs)
  flag_paths(module, (args, kwargs), active.config)
  how = policy_of(active, active.config, module)
  policy = how.policy
  outer = dataclasses.replace(
    active,
    root=weakref.ref(module.scope) if is_new_root(active, module) else active.root,
    root_policy=policy if module.path == () else active.root_policy,
  )
  if name == "setup":  # What it calls is a part of it, and no call of its own.
    outer = dataclasses.replace(outer, again=[], tracing=True)

  # The second call of a method that is being traced. Its arguments are those of the first: an
  # interceptor of the user's that adds 1 to them has run in the first call, and now runs again.
  # Modules among them are the exception, since the copies belong to the trace.
  again = active.again.pop() if active.again and name != "setup" else None
  if again is not None and next(instances_in((again.args, again.kwargs), nn.Module), None) is None:
    args, kwargs = again.args, again.kwargs

  def call(active: Active) -> PyTree:
    outputs = _call(next_fun, args, kwargs, module, name, active, how)
    if again is not None:
      again.outputs = (outputs,)
    return outputs

  # `init` draws parameters. Traced in another dtype, it would draw other numbers.
  as_it_is = module.is_initializing() or name == "setup"
  if as_it_is or policy is None or not begins_trace(active, policy, module_path(module)):
    return call(outer)
  bound: Any = context.orig_method  # A partial: of the method, and the module.
  region = dataclasses.replace(outer, region=region_of(policy))
  return rewritten(bound.func, module, args, kwargs, region, activate, policy, call)


def _call(
  next_fun: Function,
  args: Args,
  kwargs: Kwargs,
  module: nn.Module,
  name: str,
  active: Active,
  how: ModulePolicy,
) -> PyTree:
  """Calls a method in the region of its module, and notes and stores what `init` asks for."""
  path, record, initializing = module_path(module), active.record, module.is_initializing()
  if active.met is not None:
    active.met.add(path)
  if record is not None:
    record.note(module, path)
  inner = inside(active, module, how.policy, _layers.LAYERS, exempt=how.exempt, rule=how.rule)
  call = ModuleCall(module, path, how, active, inner, _layers.LAYERS)
  outputs = call.run(next_fun, args, kwargs, initializing=initializing)
  if initializing:
    store(module, how.policy)
    if not (active.entered or active.cast or record) and name != "setup":
      with ACTIVE(dataclasses.replace(active, cast=True)):
        store_computed(module, name, args, kwargs)
  if name == "setup":
    return outputs
  if record is not None and not active.entered and how.policy is not None:
    record.output_dtype = call.output_dtype
  return call.result(outputs)
