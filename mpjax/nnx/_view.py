"""The classes of which a view's modules are: a user's class, made to run under a policy.

A module of a view is an object of its own that holds the variables of the user's module. Its class
is a subclass of the user's, one for each policy: so the policy is part of the graph definition, and
of every key that JAX and NNX cache by.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from mpjax._core.active import ACTIVE, Active, in_region
from mpjax._jaxprs.autocast import leaving
from mpjax._jaxprs.module_calls import call_method, inside, is_low, output_dtype, returned
from mpjax.nnx._bodies import finished
from mpjax.nnx._outermost import rewritten
from mpjax.nnx._spec import LINK, SPEC, Spec, check_modes, check_set, current, model_of, path_of

_CONTAINERS = (nnx.List, nnx.Dict)
_NOT_MODULES = (nnx.Pytree, nnx.Module, nnx.Object, *_CONTAINERS)
"""Classes whose methods are no part of a model."""

_OF_FLAX = ("__call__", "attend")
"""What the layers of NNX compute with; their other methods set them up."""

_OUTSIDE = ("sow", "perturb", "initialize_carry")
"""Methods that no policy enters: two note values, and what a cell starts with, learned or
not, is in the dtype it is stored in."""


def _overrides(cls: Any) -> dict[str, Any]:
  """Returns what the modules of a view do otherwise than those of `cls`, the user's class.

  These are functions, not the methods of a second base: with one, objects would have another layout
  than those of `cls`, and could not take the class.
  """

  def __setattr__(self: Any, name: str, value: Any) -> None:
    check_set(self, name, value)
    value = _born(value) if isinstance(value, nnx.Variable) else value
    cls.__setattr__(self, name, value)
    model = model_of(self)
    if model is not None and isinstance(value, bool):
      vars(self)[LINK].modes.pop(name, None)
    if model is not None and isinstance(value, (nnx.Variable, jax.Array)):
      setattr(model, name, value)

  def __delattr__(self: Any, name: str) -> None:
    model, gone = model_of(self), vars(self).get(name)
    cls.__delattr__(self, name)
    if isinstance(gone, nnx.Variable) and model is not None and vars(model).get(name) is gone:
      delattr(model, name)

  def shown(text: Callable[[Any], str]) -> Callable[[Any], str]:
    def with_its_policy(self: Any) -> str:
      policy = type(self).mpjax_spec.policy
      return f"with_policy({text(self)}, {None if policy is None else str(policy)!r})"

    return with_its_policy

  def __reduce__(self: Any) -> Any:
    return _rebuild, (cls, is_tree(self), type(self).mpjax_spec), dict(vars(self))

  return {
    "__setattr__": __setattr__,
    "__delattr__": __delattr__,
    "__repr__": shown(cls.__repr__),
    "__str__": shown(cls.__str__),
    "__reduce__": __reduce__,
  }


def _rebuild(cls: type[Any], tree: bool, spec: Spec) -> Any:
  return object.__new__(view_class(cls, tree, spec))


def is_tree(module: Any) -> bool:
  """Whether a module is a pytree to JAX, which its class may decline."""
  return not jax.tree_util.all_leaves([module])


@functools.cache
def view_class(cls: Any, tree: bool, spec: Spec) -> Any:
  """Returns the subclass of `cls` whose modules run as `spec` says.

  Args:
    cls: the user's class.
    tree: whether its modules are pytrees.
    spec: how they run.
  """
  names: dict[str, Any] = {
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__doc__": cls.__doc__,
    SPEC: spec,
    **_overrides(cls),
    **{name: _method(name, own) for name, own in _methods(cls)},
  }
  hooks = any("__init_subclass__" in vars(base) for base in cls.__mro__ if not _is_library(base))
  for first in _WITHOUT_HOOKS if hooks else ():
    made = type(cls)(cls.__name__, (first, cls), names, pytree=tree)
    try:
      object.__setattr__(object.__new__(cls), "__class__", made)
    except TypeError:  # Objects of the two are laid out differently.
      continue
    return made
  return type(cls)(cls.__name__, (cls,), names, pytree=tree)


def _init_subclass(cls: Any, **kwargs: Any) -> None:
  """Does what NNX does with a new class, and nothing that the user's own hooks would do.

  Those are for the user's classes: they may put each into a table, or ask for keywords.
  """
  hook: Any = nnx.Module.__init_subclass__
  hook.__func__(cls, **kwargs)


_HOOK = {"__init_subclass__": classmethod(_init_subclass), "__module__": __name__}
_WITHOUT_HOOKS: tuple[Any, ...] = (
  types.new_class("OfNnxWithoutHooks", (nnx.Module,), exec_body=lambda names: names.update(_HOOK)),
  types.new_class("WithoutHooks", (), exec_body=lambda names: names.update(_HOOK)),
)
"""First bases for views of classes with hooks; which one fits depends on the order of their bases.

Where neither does (an abstract or generic class before the one with the hook), the hook is run."""


def _is_library(cls: type[Any]) -> bool:
  return cls.__module__.split(".")[0] in ("flax", "builtins", "typing", "abc", "collections")


_NO_METHODS = (type, staticmethod, classmethod, functools.partial)
"""What a class holds that can be called and is not given the module. A partial of Python 3.13
looks like a method, and warns that it will be one."""


def _methods(cls: type[Any]) -> Iterator[tuple[str, Any]]:
  """Yields the methods of a class that are part of a model, each as the MRO finds it."""
  found: set[str] = set()
  for base in cls.__mro__:
    library = base.__module__.split(".")[0]
    if base in _NOT_MODULES or library in ("builtins", "typing", "abc", "collections"):
      continue
    for name, own in vars(base).items():
      if name in found:
        continue
      found.add(name)
      if name in _OUTSIDE or (library == "flax" and name not in _OF_FLAX):
        continue
      dunder = name.startswith("__") and name != "__call__"
      is_method = callable(own) and hasattr(own, "__get__")
      if is_method and not dunder and not isinstance(own, _NO_METHODS):
        yield name, own


def _method(name: str, own: Any) -> Callable[..., Any]:
  later = inspect.isgeneratorfunction(own)

  @functools.wraps(own)
  def method(self: Any, *args: Any, **kwargs: Any) -> Any:
    if in_region():
      return own.__get__(self, type(self))(*args, **kwargs)

    def call(module: Any, args: Any, kwargs: Any) -> Any:
      return _call(module, name, own, args, kwargs)

    active, around = current(), ACTIVE.value
    traced = around is not None and around.tracing
    as_it_is = active is not None and (active.cast or path_of(self) in active.as_python)
    if traced or as_it_is or later or not is_low(type(self).mpjax_spec.policy):
      return call(self, args, kwargs)
    return rewritten(call, name, self, args, kwargs)

  return method


def _call(module: Any, name: str, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Calls a method in the region of its module."""
  check_modes(module)
  around, spec = ACTIVE.value, type(module).mpjax_spec
  state = current() or Active(tracing=around is not None and around.tracing)
  inner = inside(state, module, spec.policy, iterates=isinstance(module, nnx.SpectralNorm))
  bound = own.__get__(module, type(module))
  outputs = call_method(bound, (args, kwargs), module, path_of(module), inner)

  def finish(outputs: Any) -> Any:
    if spec.policy is None:
      return outputs
    dtype = output_dtype(state, spec.policy, spec.picked, spec.output_dtype)
    return returned(outputs, dtype, module, state, inner)

  return finished(module, name, inner, outputs, finish)


def _born(variable: Any) -> Any:
  """Returns a variable that a module keeps; a parameter made in a call is stored as such."""
  active = current()
  policy = active.policy if active is not None and active.tracing else None
  if policy is not None and isinstance(variable, nnx.Param):
    variable.set_raw_value(leaving(variable.get_raw_value(), policy.param_dtype))
  return variable
