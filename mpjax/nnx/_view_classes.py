"""The classes of a view's modules, which handle each call and each write.

They are subclasses of the user's classes, one for each policy: see docs/design/nnx.md.
"""

import functools
import inspect
import types
from typing import Any

import jax
from flax import nnx

from mpjax._autocast.module_calls import attempts, begins_trace, module_call
from mpjax._autocast.scopes import end_of_policy
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.leaves import raw_value, set_raw_value
from mpjax._core.types import Args, Class, Function, Kwargs, PyTree
from mpjax._policy.active import ACTIVE, Active, outside_policies
from mpjax._policy.rules import ModulePolicy, policy_text, rewrites
from mpjax.nnx import _layers
from mpjax.nnx._graph import CONTAINERS, is_tree, parts_of
from mpjax.nnx._link import (
  LINK,
  POLICY,
  check_modes,
  is_view,
  model_of,
  module_path,
  note_mode,
  resolved_policy,
  user_class,
)
from mpjax.nnx._outermost import calling_state, check_modes_in_call, rewritten


@functools.cache
def view_class(cls: Any, tree: bool, resolved: ModulePolicy) -> Class:
  """Returns the subclass of `cls` whose modules run as `resolved` says, as pytrees if `tree`."""
  # Cached, because a new class is another key in each cache of JAX. A step that makes its view
  # inside would be compiled again at each call.
  names: dict[str, object] = {
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__doc__": cls.__doc__,
    POLICY: resolved,
    **{
      name: _method(name, own, resolved)
      for name, own in inspect.getmembers_static(cls)
      if _computes(cls, name, own)
    },
  }
  return _metaclass_of_views(type(cls))(cls.__name__, (cls,), names, pytree=tree)


@functools.cache
def _metaclass_of_views(metaclass: Any) -> Any:
  """Returns a subclass of a metaclass whose classes look into `_ViewModule` before their base."""
  # `_ViewModule` cannot be a base. NNX creates modules of a view as objects of the user's class,
  # and these then get a class of ours. Python allows that for classes of one memory layout. A
  # second base changes the layout, the order of look-ups does not.

  def mro(cls: Class) -> list[Class]:
    first, *others = metaclass.mro(cls)
    return [first, _ViewModule, *others]

  return type(metaclass)(metaclass.__name__, (metaclass,), {"mro": mro})


class _ViewModule:
  """Methods of a view's modules that run before those of the user's class."""

  def __init_subclass__(cls, **kwargs: bool) -> None:
    # Call NNX's hook, which registers the class, but none of the user's. Theirs may put each class
    # into a table, or ask for keywords.
    hook: Any = nnx.Module.__init_subclass__
    hook.__func__(cls, **kwargs)

  # `self` is a module of a view, whose class looks into this one without being a subclass of it.

  def __setattr__(self: Any, name: str, value: Any) -> None:
    _check_set(self, name, value)
    state = ACTIVE.value
    active = state if type(state) is Active else None  # None outside of every call of a view.
    policy = None if active is None or not active.tracing else active.around.policy
    # A parameter that a call creates gets the `param_dtype` of the policy.
    if policy is not None and _layers.state_kind(value).dtype_rule == "param_dtype":
      set_raw_value(value, end_of_policy(raw_value(value), policy.param_dtype))
    super().__setattr__(name, value)
    model = model_of(self)
    if model is None:
      return
    # A variable that a call creates, such as a cache, is also set on the user's module, and so is a
    # flag. Many steps create a view each time, and with it these would be lost.
    in_call = active is not None and not isinstance(value, nnx.Pytree)
    if in_call or isinstance(value, (nnx.Variable, jax.Array)):
      setattr(model, name, value)
    note_mode(self, name)

  def __delattr__(self: Any, name: str) -> None:
    model, gone = model_of(self), vars(self).get(name)
    super().__delattr__(name)
    if isinstance(gone, nnx.Variable) and model is not None and vars(model).get(name) is gone:
      delattr(model, name)

  def __repr__(self: Any) -> str:
    return _with_policy_of(self, super().__repr__())

  def __str__(self: Any) -> str:
    return _with_policy_of(self, super().__str__())

  def __reduce__(self: Any) -> tuple[object, ...]:
    # Pickle finds classes by name, and the class of a view has the name of the user's class.
    return _rebuild, (user_class(self), is_tree(self), resolved_policy(self)), dict(vars(self))


def _check_set(module: nnx.Pytree, name: str, value: object) -> None:
  """Raises MpjaxTypeError if a module with parameters and without a policy is set on a view."""
  if not isinstance(value, nnx.Module) or is_view(value) or isinstance(value, nnx.bridge.ToNNX):
    return
  if any(isinstance(node, nnx.Param) for node in parts_of(value)[1]):
    where = f"{type(module).__name__}.{name}, set on a view of mpjax.with_policy"
    expected = "a variable, an array, or a module of the view"
    got = f"a new {type(value).__name__}, which would run without the policy"
    fix = "Set it on the model, and then make a new view: with_policy(model, policy)."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)


def _with_policy_of(module: nnx.Module, text: str) -> str:
  # NNX shows an attribute on a line of its own, and also the links, because they are data to it.
  text = "".join(line for line in text.splitlines(keepends=True) if f"{LINK}=" not in line)
  return f"with_policy({text}, {policy_text(resolved_policy(module).policy)})"


def _rebuild(cls: Class, tree: bool, resolved: ModulePolicy) -> nnx.Module:
  return object.__new__(view_class(cls, tree, resolved))


# Methods


_NO_METHODS = (type, staticmethod, classmethod, functools.partial)
"""Objects of a class that can be called, and are not given the module.

A partial of Python 3.13 looks like a method, and warns that it will be one."""

_MAKE_METHODS = (functools.partialmethod, functools.singledispatchmethod)
"""Objects of a class that cannot be called, and make methods."""

_NOT_MODULES = (nnx.Pytree, nnx.Module, nnx.Object, *CONTAINERS)
"""Classes whose methods are no part of a model."""

_OF_PYTHON = ("builtins", "typing", "abc", "collections")
"""Packages whose methods are no part of a model."""


def _computes(cls: Class, name: str, own: object) -> bool:
  """Whether an attribute of a class is a method that computes a part of a model.

  It is called with the module as its first argument, and a user or a layer defines it.
  """
  is_method = not isinstance(own, _NO_METHODS) and callable(own) and hasattr(own, "__get__")
  if not (is_method or isinstance(own, _MAKE_METHODS)):
    return False
  if name.startswith("__") and name != "__call__":
    return False
  # The class that defines the method decides, not the one that inherits it.
  base = next(base for base in cls.__mro__ if name in vars(base))
  package = base.__module__.split(".")[0]
  if base in _NOT_MODULES or package in _OF_PYTHON or name in _layers.OUTSIDE:
    return False
  return package != "flax" or name in _layers.METHODS


def _method(name: str, own: Any, resolved: ModulePolicy) -> Function:
  """Returns the method of a view's module that calls a method of the user's under the policy."""
  # The body of a generator runs between the steps of its caller, so it cannot be traced as one.
  may_trace = rewrites(resolved.policy) and not inspect.isgeneratorfunction(own)

  @functools.wraps(own)
  def method(self: nnx.Module, *args: Any, **kwargs: Any) -> PyTree:
    # Inside `full_precision` there is no policy.
    if outside_policies():
      return own.__get__(self, type(self))(*args, **kwargs)
    path = module_path(self)

    def call(module: nnx.Module, args: Args, kwargs: Kwargs) -> PyTree:
      check_modes([module], traced=False)
      # `module` is `self`, or its copy in the trace of the outermost call.
      called = module_call(module, path, resolved, calling_state(), _layers.LAYERS)
      outputs = called.run(own.__get__(module, type(module)), args, kwargs)
      if isinstance(outputs, _ASYNC):
        raise _async_method(outputs, f"{type(module).__name__}.{name}")
      return called.result(outputs)

    state = calling_state()
    if not (may_trace and begins_trace(state, path)):
      return call(self, args, kwargs)
    check_modes_in_call(self, args, kwargs)
    attempt = functools.partial(rewritten, call, name, self, args, kwargs)
    return attempts(attempt, lambda _: call(self, args, kwargs), state, resolved.policy, path)

  return method


_ASYNC = (types.CoroutineType, types.AsyncGeneratorType)
"""Results of async methods."""


def _async_method(outputs: object, method: str) -> MpjaxTypeError:
  """Returns the error for an async method, which has returned `outputs`."""
  if isinstance(outputs, types.CoroutineType):
    outputs.close()  # Else Python warns that nobody awaited it.
  where = f"{method}, a method of a view of mpjax.with_policy"
  expected = "a method that has run when it returns"
  got = "an async method, whose body would run later, without the policy"
  fix = "Write the async function around the view: let it call methods that are not async."
  return MpjaxTypeError(where, expected=expected, got=got, fix=fix)
