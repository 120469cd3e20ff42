"""Intercept each call of a Linen module's method while a policy is active."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Generator
from typing import Any

import flax.linen as nn
from flax.core import Scope

from mpjax._autocast.module_calls import begins_trace, module_call
from mpjax._core.trees import instances_in
from mpjax._core.types import Args, Function, Kwargs, PyTree, Variables
from mpjax._policy.active import ACTIVE, Region, outside_policies
from mpjax._policy.rules import ModulePolicy, PolicyConfig
from mpjax.linen import _layers
from mpjax.linen._active import LinenActive, begin, current, is_new_root, module_path, module_policy
from mpjax.linen._initialize import store_caches, store_parameters
from mpjax.linen._outermost import BoundCall
from mpjax.linen._paths import flag_paths
from mpjax.linen._repeated_call import TracedCall


@contextlib.contextmanager
def activate(state: LinenActive) -> Generator[None]:
  """Makes a state active, in this thread, for the length of a `with` block."""
  # One interceptor serves all states. Two would call a module of an inner model twice under
  # policies, and cast its results twice. If the state around is that of an NNX model, there is none
  # yet.
  stack = nn.intercept_methods(intercept) if current() is None else contextlib.nullcontext()
  with ACTIVE(state), stack:
    yield


@contextlib.contextmanager
def under(config: PolicyConfig, **fields: Any) -> Generator[LinenActive | None]:
  """Makes the state of a call under `config` active, but none inside of `full_precision`."""
  state = None if outside_policies() else begin(config, **fields)
  with contextlib.nullcontext() if state is None else activate(state):
    yield state


def intercept(
  next_fun: Function, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`."""
  active, module, name = current(), context.module, context.method_name
  scope = module.scope
  if active is None or active.config is None or scope is None or not _is_method(module, name):
    return next_fun(*args, **kwargs)
  # Rules with paths need traces of their own, see `_paths.py`.
  if active.config.by_path:
    flag_paths((module, *instances_in((args, kwargs), nn.Module)))
  resolved = module_policy(active, active.config, module)
  first = _first_call(active, module, name)
  if first is not None:
    # Flax calls the method again in order to trace it. Its arguments came through the first call.
    args, kwargs = first.arguments(args, kwargs)
  call = _MethodCall(
    module=module,
    scope=scope,
    name=name,
    method=next_fun,
    args=args,
    kwargs=kwargs,
    path=module_path(active, module),
    resolved=resolved,
    initializing=module.is_initializing(),
    first=first,
  )
  state = _state_of_call(active, module, name, resolved)
  return call.traced(state, context) if call.is_outermost(active) else call.run(state)


def _is_method(module: nn.Module, name: str) -> bool:
  """Whether a call is one of a method that the class of a module has."""
  # `nn.scan(body)` and other lifted transforms show `body` as a method that the class does not
  # have. It belongs to the module that calls it. As a call of its own, its carry would return in
  # another dtype, and the scan would raise.
  return callable(getattr(type(module), name, None))


def _first_call(active: LinenActive, module: nn.Module, name: str) -> TracedCall | None:
  """Returns the call that is repeated here, if the method is one that is being traced."""
  if not active.again:
    return None
  active.again[-1].put_in_order(module)
  # Flax runs `setup` of the copy first. It is not the repeated call.
  return None if name == "setup" else active.again.pop()


def _state_of_call(
  active: LinenActive, module: nn.Module, name: str, resolved: ModulePolicy
) -> LinenActive:
  """Returns the state in which a module is called."""
  if is_new_root(active, module):
    # Weak, because the state is in keys of JAX's caches, which live as long as the program.
    root = weakref.ref(module.scope)
    active = dataclasses.replace(active, root=root, root_path=())
  if module.path == active.root_path:
    active = dataclasses.replace(active, of_root=resolved.inherited())
  if name == "setup":  # Calls in `setup` belong to it, and are not traced by themselves.
    active = dataclasses.replace(active, again=[], tracing=True)
  return active


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MethodCall:
  """A call of a method of a bound module.

  Fields:
    module: the module.
    scope: its scope.
    name: the name of the method.
    method: the method, with the interceptors inside of ours.
    args: its positional arguments.
    kwargs: its keyword arguments.
    path: the path of the module.
    resolved: the policy of the module.
    initializing: whether it is part of `init`.
    first: the call that is repeated here, in order to be traced.
  """

  module: nn.Module
  scope: Scope
  name: str
  method: Function
  args: Args
  kwargs: Kwargs
  path: str
  resolved: ModulePolicy
  initializing: bool
  first: TracedCall | None

  @property
  def is_setup(self) -> bool:
    return self.name == "setup"

  def is_outermost(self, active: LinenActive) -> bool:
    """Whether the call is traced and rewritten."""
    # `init` draws parameters. A rewritten trace would draw them in another dtype, and so draw other
    # numbers.
    if self.initializing or self.is_setup:
      return False
    return begins_trace(active, self.resolved.policy, self.path)

  def traced(self, state: LinenActive, context: nn.module.InterceptorContext) -> PyTree:
    """Returns the result of the call, traced and rewritten."""
    bound: Any = context.orig_method  # A partial: of the method, and the module.
    policy = self.resolved.policy
    call = BoundCall(
      module=self.module,
      method=bound.func,
      args=self.args,
      kwargs=self.kwargs,
      policy=policy,
      activate=activate,
    )
    return call.outputs(dataclasses.replace(state, region=Region(policy)), self.run)

  def run(self, state: LinenActive) -> PyTree:
    """Returns the result of the call, in the region of the module."""
    module, resolved, initializing = self.module, self.resolved, self.initializing
    # Notes for the check that each rule matches a module.
    for record in (state.record, state.met):
      if record is not None:
        record.note(module, self.path)
    layers = _layers.LAYERS
    called = module_call(module, self.path, resolved, state, layers, initializing=initializing)
    outputs = called.run(self.method, self.args, self.kwargs, initializing=initializing)
    if initializing:
      self._store(state)
    # Cast to the output dtype, but not inside `full_precision`, whose results are the user's own.
    if not (self._returns_own(state) or state.outside_policies):
      outputs = called.result(outputs)
    if self.first is not None:
      self.first.outputs = (outputs,)
    return outputs

  def _store(self, state: LinenActive) -> None:
    """Stores what `init` created in this call."""
    if self.resolved.policy is not None:
      store_parameters(self.scope, self.resolved.policy)
    # Caches are cast once, by the root, which runs `init` of the entire model again.
    is_root = not (state.entered or self.is_setup) and self.module.path == state.root_path
    if not is_root:
      return
    init = functools.partial(self.module.clone(parent=None).init, method=self.name, **self.kwargs)

    def init_again(rngs: PyTree) -> Variables:
      return init(rngs, *self.args)

    store_caches(self.scope, init_again, state)

  def _returns_own(self, state: LinenActive) -> bool:
    """Whether the result is the model's own: computed from results that no module has rounded."""
    return self.is_setup or (self.initializing and state.entered)
