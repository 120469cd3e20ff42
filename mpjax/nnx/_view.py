"""The modules of a view: what their classes do, and how the outermost call of one is traced.

They are subclasses of the user's, one for each policy: see docs/design/nnx.md.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from mpjax._autocast import end_of_policy
from mpjax._autocast.module_calls import begins_trace, call_of
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import Args, Class, Function, Kwargs, PyTree
from mpjax._policy.active import in_region
from mpjax._policy.rules import ModulePolicy, shown
from mpjax.nnx import _layers
from mpjax.nnx._graph import CONTAINERS, is_tree, parts_of
from mpjax.nnx._link import (
  POLICY,
  check_modes,
  forget_mode,
  is_view,
  model_of,
  path_of,
  resolved_policy,
)
from mpjax.nnx._outermost import calling_state, current, outermost


def check_set(module: nnx.Pytree, name: str, value: object) -> None:
  """Raises MpjaxTypeError if a module with parameters that is none of a view's is set on one."""
  if not isinstance(value, nnx.Module) or is_view(value) or isinstance(value, nnx.bridge.ToNNX):
    return
  if any(isinstance(node, nnx.Param) for node in parts_of(value)[1]):
    where = f"{type(module).__name__}.{name}, set on a view of mpjax.with_policy"
    expected = "a variable, an array, or a module of the view"
    got = f"a new {type(value).__name__}, which would run without the policy"
    fix = "Set it on the model, and then make a new view: with_policy(model, policy)."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)


# The classes of modules

# Classes whose methods are no part of a model.
_NOT_MODULES = (nnx.Pytree, nnx.Module, nnx.Object, *CONTAINERS)


def _overrides(cls: Any) -> dict[str, Function]:
  """Returns what the modules of a view do otherwise than those of `cls`, the user's class."""
  # These are functions, not the methods of a second base: with one, objects would have another
  # layout than those of `cls`, and could not take the class.

  def __setattr__(self: nnx.Module, name: str, value: Any) -> None:
    check_set(self, name, value)
    active = current()
    policy = active.around.policy if active is not None and active.tracing else None
    if policy is not None and _layers.kind_of(value).stored == "param_dtype":
      # A parameter that a call creates.
      value.set_raw_value(end_of_policy(value.get_raw_value(), policy.param_dtype))
    cls.__setattr__(self, name, value)
    model = model_of(self)
    if model is None:
      return
    # A mode that is set on the view is its own from now on: compared with that of the model, each
    # call after `view.eval()` would be an error.
    if isinstance(value, bool):
      forget_mode(self, name)
    # A variable that a call creates, a cache, is the model's too, and so is a flag that it sets: on
    # the view alone it would be lost with the view, which many create in each step.
    sets = active is not None and not isinstance(value, nnx.Pytree)
    if sets or isinstance(value, (nnx.Variable, jax.Array)):
      setattr(model, name, value)

  def __delattr__(self: nnx.Module, name: str) -> None:
    model, gone = model_of(self), vars(self).get(name)
    cls.__delattr__(self, name)
    if isinstance(gone, nnx.Variable) and model is not None and vars(model).get(name) is gone:
      delattr(model, name)

  def described(text: Callable[[nnx.Module], str]) -> Callable[[nnx.Module], str]:
    return lambda self: f"with_policy({text(self)}, {shown(resolved_policy(self).policy)})"

  def __reduce__(self: nnx.Module) -> tuple[object, ...]:
    # Pickle finds classes by name, and this one has the name of the user's.
    return _rebuild, (cls, is_tree(self), resolved_policy(self)), dict(vars(self))

  functions = (__setattr__, __delattr__, __reduce__)
  texts = {"__repr__": described(cls.__repr__), "__str__": described(cls.__str__)}
  return {**{function.__name__: function for function in functions}, **texts}


def _rebuild(cls: Class, tree: bool, resolved: ModulePolicy) -> nnx.Module:
  return object.__new__(view_class(cls, tree, resolved))


@functools.cache
def view_class(cls: Any, tree: bool, resolved: ModulePolicy) -> Class:
  """Returns the subclass of `cls` whose modules run as `resolved` says, as pytrees if `tree`."""
  # Cached: a new class for each view would be another key of each cache of JAX, and a step that
  # makes its view inside would be compiled again at each call.
  names: dict[str, object] = {
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__doc__": cls.__doc__,
    POLICY: resolved,
    **_overrides(cls),
    **{name: _method(name, own) for name, own in _methods(cls)},
  }
  return _without_hooks(type(cls))(cls.__name__, (cls,), names, pytree=tree)


class _OfNnx:
  """Does what NNX does with a new class, and nothing that hooks of the user's would do."""

  def __init_subclass__(cls, **kwargs: bool) -> None:
    hook: Any = nnx.Module.__init_subclass__
    hook.__func__(cls, **kwargs)


@functools.cache
def _without_hooks(metaclass: Any) -> Any:
  """Returns a class of classes, derived from another, that looks for hooks in `_OfNnx` first."""
  # Hooks are for the user's classes: they may put each into a table, or ask for keywords.

  # As a base `_OfNnx` would change the layout, and objects of `cls` could not take the class.
  def mro(cls: Class) -> list[Class]:
    first, *others = metaclass.mro(cls)
    return [first, _OfNnx, *others]

  return type(metaclass)(metaclass.__name__, (metaclass,), {"mro": mro})


# What a class holds that can be called and is not given the module. A partial of Python 3.13 looks
# like a method, and warns that it will be one.
_NO_METHODS = (type, staticmethod, classmethod, functools.partial)
_MAKE_METHODS = (functools.partialmethod, functools.singledispatchmethod)


def _methods(cls: Class) -> Iterator[tuple[str, Any]]:
  """Yields the methods of a class that are part of a model, each as the MRO finds it."""
  for name, own in inspect.getmembers_static(cls):
    base = next(base for base in cls.__mro__ if name in vars(base))
    library = base.__module__.split(".")[0]
    if base in _NOT_MODULES or library in ("builtins", "typing", "abc", "collections"):
      continue
    dunder = name.startswith("__") and name != "__call__"
    if dunder or name in _layers.OUTSIDE or (library == "flax" and name not in _layers.METHODS):
      continue
    is_method = isinstance(own, _MAKE_METHODS) or (callable(own) and hasattr(own, "__get__"))
    if is_method and not isinstance(own, _NO_METHODS):
      yield name, own


def _method(name: str, own: Any) -> Function:
  later = inspect.isgeneratorfunction(own)

  @functools.wraps(own)
  def method(self: nnx.Module, *args: Any, **kwargs: Any) -> PyTree:
    if in_region():
      return own.__get__(self, type(self))(*args, **kwargs)
    resolved, path = resolved_policy(self), path_of(self)

    def call(module: nnx.Module, args: Args, kwargs: Kwargs) -> PyTree:
      check_modes(module)
      called = call_of(module, path, resolved, calling_state(), _layers.LAYERS)
      outputs = called.run(own.__get__(module, type(module)), args, kwargs)
      if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
        if isinstance(outputs, types.CoroutineType):
          outputs.close()  # Else Python warns that nobody awaited it.
        where = f"{type(module).__name__}.{name}, a method of a view of mpjax.with_policy"
        expected = "a method that has run when it returns"
        got = "an async method, whose body would run later, without the policy"
        fix = "Write the async function around the view: let it call methods that are not async."
        raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
      return called.result(outputs)

    # A generator cannot be traced as one: its body runs between the steps of its caller.
    if later or not begins_trace(calling_state(), resolved.policy, path):
      return call(self, args, kwargs)
    return outermost(call, name, self, args, kwargs)

  return method
