"""The classes of which a view's modules are: a user's class, made to run under a policy.

A module of a view is an object of its own that holds the variables of the user's module. Its class
is a subclass of the user's, one for each policy: so the policy is part of the graph definition, and
of every key that JAX and NNX cache by.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
from flax import nnx

from mpjax._autocast import leaving, region_of
from mpjax._full_precision import ACTIVE, in_region
from mpjax._module_dtype import dtype_field, warn_of_uncast
from mpjax._regions import FLOAT32, arguments, is_low, is_wide, returned
from mpjax.nnx._active import Active, current
from mpjax.nnx._bodies import finished, run
from mpjax.nnx._outermost import rewritten
from mpjax.nnx._spec import LINK, SPEC, Spec, check_modes, check_set, model_of, path_of

_CONTAINERS = (nnx.List, nnx.Dict)
_NOT_MODULES = (nnx.Pytree, nnx.Module, nnx.Object, *_CONTAINERS)
"""Classes whose methods are no part of a model."""

_OF_FLAX = ("__call__", "attend")
"""What the layers of NNX compute with; their other methods set them up."""

_SEE_AS_STORED = ("sow", "perturb", "initialize_carry")
"""Methods that variables are not cast for: two of NNX look for them by their very type, and what a
cell starts with, learned or not, is in the dtype it is stored in."""


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
      if name in _SEE_AS_STORED or (library == "flax" and name not in _OF_FLAX):
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
  around, active, spec = ACTIVE.value, current(), type(module).mpjax_spec
  bound = own.__get__(module, type(module))
  policy = spec.policy
  state = active or Active(tracing=around is not None and around.tracing)
  casts = state.cast or is_wide(policy) or type(module) in state.casting
  region = region_of(policy)
  if policy is not None and isinstance(module, nnx.SpectralNorm):
    region = FLOAT32.name  # Of its own power iteration; the layer inside has its own policy's.
  inside = dataclasses.replace(state, policy=policy, region=region, cast=casts, outermost=False)
  call: Any = (args, kwargs)
  fields: dict[str, Any] = {}
  if policy is not None:
    fields = dtype_field(module, policy.compute_dtype if casts else FLOAT32, always=casts)
    call = arguments(call, policy, casts)
  with _fields_set(module, fields):
    outputs = run(module, inside, bound, call)
  dtype = _returned_dtype(active, spec, casts)

  def finish(outputs: Any) -> Any:
    if dtype is None:
      return outputs
    new = returned(outputs, dtype, state.tracing and not state.cast)
    # While it is traced all is float32; what hides arrays from JAX is not traced after all.
    if state.outermost and not state.tracing:
      warn_of_uncast(module, new, dtype)
    return new

  return finished(module, name, inside, outputs, lambda x: x, finish)


def _returned_dtype(active: Active | None, spec: Spec, casts: bool) -> Any:
  """Returns the dtype of what a module returns; None leaves what was computed."""
  policy, dtype = spec.policy, None
  if policy is None:
    return None
  if active is None or active.outermost:
    dtype = spec.output_dtype
  elif spec.picked and policy != active.policy:
    dtype = policy.output_dtype
  return policy.compute_dtype if dtype is None and casts else dtype


@contextlib.contextmanager
def _fields_set(module: Any, fields: dict[str, Any]) -> Generator[None]:
  """Sets attributes of a module for the length of a call."""
  before = {name: vars(module)[name] for name in fields}
  vars(module).update(fields)
  try:
    yield
  finally:
    vars(module).update(before)


def _born(variable: Any) -> Any:
  """Returns a variable that a module keeps; made in a call, it gets the dtype of storage.

  What a cache or an intermediate value is in is what the module gives it.
  """
  active = current()
  kept = (nnx.Cache, nnx.Intermediate, nnx.Perturbation)
  if active is None or active.policy is None or isinstance(variable, kept):
    return variable
  raw = variable.get_raw_value()
  if active.tracing and isinstance(variable, nnx.Param):
    variable.set_raw_value(leaving(raw, active.policy.param_dtype))
  return variable
