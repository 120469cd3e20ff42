"""The classes of which a view's modules are: a user's class, made to run under a policy.

A module of a view is an object of its own that holds the variables of the user's module. Its class
is a subclass of the user's, one for each policy: so the policy is part of the graph definition, and
of every key that JAX and NNX cache by.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax._adapter import call_inputs, call_outputs, like, warn_of_uncast
from mpjax._full_precision import ACTIVE, in_region
from mpjax._policy import Policy
from mpjax._tree import cast_leaf, is_floating, map_arrays
from mpjax._types import PyTree
from mpjax.nnx._active import Active, current
from mpjax.nnx._bodies import finished, run
from mpjax.nnx._ops import with_ops
from mpjax.nnx._spec import LINK, SPEC, Spec, check_modes, check_set, model_of
from mpjax.nnx._variables import CAST, in_use, is_node, map_leaves, stored, strip
from mpjax.nnx._weight_grads import product_fields

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

  def __getattribute__(self: Any, name: str) -> Any:
    value = cls.__getattribute__(self, name)
    if name.startswith("__"):
      return value
    active = current()
    if active is None or not active.on:
      return value
    if active.wide and name in type(self).mpjax_wide:
      return type(self).mpjax_wide[name]
    fields = type(self).mpjax_fields
    if active.fields and name in fields:
      return fields[name]
    if active.use_dtype is None:
      return value
    return _as_stored(value) if name in _SEE_AS_STORED else _variables_in_use(value)

  def __setattr__(self: Any, name: str, value: Any) -> None:
    check_set(self, name, value)
    value = _born(stored(value)) if isinstance(value, nnx.Variable) else value
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
    "__getattribute__": __getattribute__,
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
    "mpjax_fields": dict(spec.fields),
    "mpjax_wide": _wide_fields(spec),
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


def _wide_fields(spec: Spec) -> dict[str, Any]:
  wide = None if spec.policy is None else spec.policy.weight_grad_dtype
  return {} if spec.product is None or wide is None else product_fields(spec.product, wide)


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
  @functools.wraps(own)
  def method(self: Any, *args: Any, **kwargs: Any) -> Any:
    if in_region():
      return own.__get__(self, type(self))(*args, **kwargs)
    ops = type(self).mpjax_spec.ops
    if ops is None or current() is not None:
      return _call(self, name, own, args, kwargs)
    return with_ops(ops, lambda m, *call: _call(m, name, own, *call), name, self, args, kwargs)

  return method


def _call(module: Any, name: str, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Calls a method under the policy of its module."""
  check_modes(module)
  active, spec = current(), type(module).mpjax_spec
  bound = own.__get__(module, type(module))
  policy, adapter = spec.policy, spec.adapter
  finish = strip if active is None else lambda outputs: outputs
  if policy is None:
    inside = Active()
    outputs = run(module, inside, bound, args, kwargs)
    return finished(module, name, inside, outputs, lambda x: x, finish)
  compute = policy.compute_dtype
  cast_in = _cast_to(compute)
  call = call_inputs(adapter, module, name, (args, kwargs), cast_in)
  fields = not _any_complex(call)
  wide = fields and name == "__call__" and spec.product is not None
  as_stored = wide or adapter.params == "stored"
  inside = Active(policy=policy, use_dtype=None if as_stored else compute, fields=fields, wide=wide)
  outputs = run(module, inside, bound, *call)
  handed_on = _handed_on(active, spec, policy)
  cast_out = _cast_to(handed_on or compute)

  def cast_and_finish(outputs: Any) -> Any:
    if handed_on is None and not adapter.rounds:
      return finish(outputs)
    new = call_outputs(adapter, module, name, (args, kwargs), outputs, cast_out)
    if active is None and handed_on is not None:
      warn_of_uncast(module, new, handed_on)
    elif active is not None and _is_carry(outputs, args):
      new = (_as_wide(new[0], like(outputs[0], args[0])), *new[1:])
    return finish(new)

  return finished(module, name, inside, outputs, cast_in, cast_and_finish)


def _handed_on(active: Active | None, spec: Spec, policy: Policy) -> Any:
  """Returns the dtype of what a module hands on; None leaves what was computed."""
  if active is None:
    return spec.output_dtype
  if spec.picked and policy != active.policy:
    surrounding = None if active.policy is None else active.policy.compute_dtype
    return policy.output_dtype or surrounding
  return policy.compute_dtype


def _is_carry(outputs: Any, args: tuple[Any, ...]) -> bool:
  """Whether a call looks like a step of a loop: what it hands on first is what it was given first.

  NNX does not say what a function is called by. A loop compares the types of what it carries, and
  a carry that starts in float32 has to stay in it. An output that is no carry may look like one: it
  is never made narrower than it is.
  """
  if not (args and type(outputs) is tuple and len(outputs) == 2):
    return False
  return not is_node(args[0]) and bool(jax.tree.leaves(args[0])) and _same(outputs[0], args[0])


def _as_wide(new: PyTree, carry: PyTree) -> PyTree:
  """Returns `carry`, but for leaves that are wider in `new`."""

  def leaf(a: Any, b: Any) -> Any:
    floating = is_floating(a) and is_floating(b)
    return a if floating and jnp.promote_types(a.dtype, b.dtype) == a.dtype else b

  return jax.tree.map(leaf, new, carry)


def _same(new: PyTree, old: PyTree) -> bool:
  try:
    pairs = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.shape(a) == jnp.shape(b), new, old))
  except (TypeError, ValueError):
    return False
  return all(pairs)


def _cast_to(dtype: np.dtype[Any]) -> Callable[[PyTree], PyTree]:
  return lambda tree: map_arrays(lambda x: cast_leaf(x, dtype), tree)


def _any_complex(call: Any) -> bool:
  """Whether an argument is a complex array: a half `dtype` would drop its imaginary part."""
  args, kwargs = call
  return any(
    isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.complexfloating)
    for x in (*args, *kwargs.values())
  )


def _variables_in_use(value: Any) -> Any:
  if isinstance(value, nnx.Variable):
    return in_use(value)
  if type(value) in (list, tuple, dict):
    found = jax.tree.leaves(value, is_leaf=is_node)
    if any(isinstance(x, CAST) for x in found):
      return map_leaves(lambda x: in_use(x) if isinstance(x, nnx.Variable) else x, value)
  return value


def _born(variable: Any) -> Any:
  """Returns a variable that a module keeps; made during a call, it gets the storage dtype.

  What a cache or an intermediate value is in is what the module gives it.
  """
  active = current()
  kept = (nnx.Cache, nnx.Intermediate, nnx.Perturbation)
  if active is None or active.policy is None or isinstance(variable, kept):
    return variable
  compute, param = active.policy.compute_dtype, active.policy.param_dtype

  def leaf(x: Any) -> Any:
    return cast_leaf(x, param) if is_floating(x) and x.dtype == compute else x

  raw = variable.get_raw_value()
  new = jax.tree.map(leaf, raw)
  if any(a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(raw), strict=True)):
    variable.set_raw_value(new)
  return variable


def _as_stored(method: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a method that sees variables as they are, not as the module uses them."""

  @functools.wraps(method)
  def call(*args: Any, **kwargs: Any) -> Any:
    active = current() or Active()
    with ACTIVE(dataclasses.replace(active, use_dtype=None)):
      return method(*args, **kwargs)

  return call
