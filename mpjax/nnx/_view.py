"""The classes of a view's modules: a user's class, which runs under a policy.

Subclasses of the user's, one for each policy, so that the policy is part of what JAX and NNX cache
by, and of what `split`, `merge` and `scan` create: see docs/design/nnx.md.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from mpjax._core.active import in_region
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.rules import ModulePolicy
from mpjax._core.types import Args, Class, Function, Kwargs, PyTree
from mpjax._jaxprs.autocast import leaving
from mpjax._jaxprs.module_calls import begins_trace, call_of
from mpjax.nnx import _layers, _outermost

_NOT_MODULES = (nnx.Pytree, nnx.Module, nnx.Object, nnx.List, nnx.Dict)
"""Classes whose methods are no part of a model."""


def _overrides(cls: Any) -> dict[str, Function]:
  """Returns what the modules of a view do otherwise than those of `cls`, the user's class."""
  # These are functions, not the methods of a second base: with one, objects would have another
  # layout than those of `cls`, and could not take the class.

  def __setattr__(self: nnx.Module, name: str, value: object) -> None:
    _outermost.check_set(self, name, value)
    value = _born(value) if isinstance(value, nnx.Variable) else value
    cls.__setattr__(self, name, value)
    model = _outermost.model_of(self)
    # A mode that is set on the view is its own from now on: compared with that of the model, each
    # call after `view.eval()` would be an error.
    if model is not None and isinstance(value, bool):
      _outermost.forget_mode(self, name)
    # A variable that a call creates, a cache, is the model's too, and so is a flag that it sets: on
    # the view alone it would be lost with the view, which many create in each step.
    sets = _outermost.current() is not None and not isinstance(value, nnx.Pytree)
    if model is not None and (sets or isinstance(value, (nnx.Variable, jax.Array))):
      setattr(model, name, value)

  def __delattr__(self: nnx.Module, name: str) -> None:
    model, gone = _outermost.model_of(self), vars(self).get(name)
    cls.__delattr__(self, name)
    if isinstance(gone, nnx.Variable) and model is not None and vars(model).get(name) is gone:
      delattr(model, name)

  def shown(text: Callable[[nnx.Module], str]) -> Callable[[nnx.Module], str]:
    return lambda self: f"with_policy({text(self)}, {_outermost.policy_text(self)})"

  def __reduce__(self: nnx.Module) -> tuple[object, ...]:
    # Pickle finds classes by name, and this one has the name of the user's.
    return _rebuild, (cls, is_tree(self), _outermost.resolved_policy(self)), dict(vars(self))

  return {
    "__setattr__": __setattr__,
    "__delattr__": __delattr__,
    "__repr__": shown(cls.__repr__),
    "__str__": shown(cls.__str__),
    "__reduce__": __reduce__,
  }


def _rebuild(cls: Class, tree: bool, resolved: ModulePolicy) -> nnx.Module:
  return object.__new__(view_class(cls, tree, resolved))


def is_tree(module: nnx.Pytree) -> bool:
  """Whether a module is a pytree to JAX, which its class may decline."""
  return not jax.tree_util.all_leaves([module])


@functools.cache
def view_class(cls: Any, tree: bool, resolved: ModulePolicy) -> Class:
  """Returns the subclass of `cls` whose modules run as `resolved` says, as pytrees if `tree`."""
  # Cached: a new class for each view would be another key of each cache of JAX, and a step that
  # makes its view inside would be compiled again at each call.
  names: dict[str, object] = {
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__doc__": cls.__doc__,
    _outermost.SPEC: resolved,
    **_overrides(cls),
    **{name: _method(name, own) for name, own in _methods(cls)},
  }
  hooks = any("__init_subclass__" in vars(base) for base in cls.__mro__ if not _is_library(base))
  for first in _WITHOUT_HOOKS if hooks else ():
    view = type(cls)(cls.__name__, (first, cls), names, pytree=tree)
    try:
      object.__setattr__(object.__new__(cls), "__class__", view)
    except TypeError:  # Objects of the two are laid out differently.
      continue
    return view
  return type(cls)(cls.__name__, (cls,), names, pytree=tree)


def _init_subclass(cls: Class, **kwargs: bool) -> None:
  """Does what NNX does with a new class, and nothing that the user's own hooks would do.

  Those are for the user's classes: they may put each into a table, or ask for keywords.
  """
  hook: Any = nnx.Module.__init_subclass__
  hook.__func__(cls, **kwargs)


_HOOK = {"__init_subclass__": classmethod(_init_subclass), "__module__": __name__}
_WITHOUT_HOOKS: tuple[Class, ...] = (
  types.new_class("OfNnxWithoutHooks", (nnx.Module,), exec_body=lambda names: names.update(_HOOK)),
  types.new_class("WithoutHooks", (), exec_body=lambda names: names.update(_HOOK)),
)
"""First bases for views of classes with hooks; which one fits depends on the order of their bases.

Where neither does (an abstract or generic class before the one with the hook), the hook is run."""


def _is_library(cls: Class) -> bool:
  return cls.__module__.split(".")[0] in ("flax", "builtins", "typing", "abc", "collections")


_NO_METHODS = (type, staticmethod, classmethod, functools.partial)
"""What a class holds that can be called and is not given the module. A partial of Python 3.13
looks like a method, and warns that it will be one."""


def _methods(cls: Class) -> Iterator[tuple[str, Function]]:
  """Yields the methods of a class that are part of a model, each as the MRO finds it."""
  names: set[str] = set()
  for base in cls.__mro__:
    library = base.__module__.split(".")[0]
    if base in _NOT_MODULES or library in ("builtins", "typing", "abc", "collections"):
      continue
    for name, own in vars(base).items():
      if name in names:
        continue
      names.add(name)
      if name in _layers.OUTSIDE or (library == "flax" and name not in _layers.METHODS):
        continue
      dunder = name.startswith("__") and name != "__call__"
      is_method = callable(own) and hasattr(own, "__get__")
      if is_method and not dunder and not isinstance(own, _NO_METHODS):
        yield name, own


def _method(name: str, own: Any) -> Function:
  later = inspect.isgeneratorfunction(own)

  @functools.wraps(own)
  def method(self: nnx.Module, *args: Any, **kwargs: Any) -> PyTree:
    if in_region():
      return own.__get__(self, type(self))(*args, **kwargs)

    def call(module: nnx.Module, args: Args, kwargs: Kwargs) -> PyTree:
      _outermost.check_modes(module)
      path, resolved = _outermost.path_of(module), _outermost.resolved_policy(module)
      called = call_of(module, path, resolved, _outermost.calling_state(), _layers.LAYERS)
      outputs = called.run(own.__get__(module, type(module)), args, kwargs)
      if isinstance(outputs, (types.CoroutineType, types.AsyncGeneratorType)):
        raise _has_not_run(outputs, module, name)
      return called.result(outputs)

    # A generator cannot be traced as one: its body runs between the steps of its caller.
    resolved, path = _outermost.resolved_policy(self), _outermost.path_of(self)
    if later or not begins_trace(_outermost.calling_state(), resolved.policy, path):
      return call(self, args, kwargs)
    return _outermost.outermost(call, name, (self, args, kwargs))

  return method


def _has_not_run(outputs: object, module: nnx.Module, name: str) -> MpjaxTypeError:
  if isinstance(outputs, types.CoroutineType):
    outputs.close()  # Else Python warns that nobody awaited it.
  return MpjaxTypeError(
    f"{type(module).__name__}.{name}, a method of a view of mpjax.with_policy",
    expected="a method that has run when it returns",
    got="an async method, whose body would run later, without the policy",
    fix="Write the async function around the view, and let it call methods that are not async.",
  )


def _born(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
  """Returns a variable that a module keeps; a parameter created in a call is stored as such."""
  active = _outermost.current()
  policy = active.policy if active is not None and active.tracing else None
  if policy is not None and _layers.kind_of(variable).stored == "param_dtype":
    variable.set_raw_value(leaving(variable.get_raw_value(), policy.param_dtype))
  return variable
