"""What happens at each call of a module's method while a policy is in force."""

import contextlib
import dataclasses
import re
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mpjax._adapter import (
  Adapter,
  call_fields,
  call_inputs,
  call_outputs,
  like,
  plain_attribute,
  warn_of_uncast,
)
from mpjax._errors import MpjaxTypeError, has_note, mixed_dtypes_note
from mpjax._full_precision import ACTIVE
from mpjax._policy import Policy
from mpjax._rules import first_match
from mpjax._tree import cast_leaf, map_arrays
from mpjax._types import PyTree
from mpjax.linen._adapters import find_adapter, product_field
from mpjax.linen._context import (
  Active,
  Given,
  Held,
  Visits,
  is_new_root,
  module_path,
  resolve,
)
from mpjax.linen._params import CastScope, attach, is_lazy
from mpjax.linen._weight_grads import product_fields

# Lifted transforms as they show in a scope's debug path; the first ones hand their body's types on.
_TRANSPARENT = ("remat", "jit", "map_variables", "fold_rngs", "named_call")
_LOOPS = ("scan", "while_loop")
_BRANCHES = ("cond", "switch")
_DIFFERENTIATED = ("vjp", "custom_vjp")
_COTANGENT = np.dtype("float32")


@contextlib.contextmanager
def activate(state: Active) -> Generator[None]:
  """Puts a state in force, in this thread, for the length of a `with` block."""
  # One interceptor serves all states; it must not run twice when one is given inside another.
  # The state of an NNX model that calls this one came without it.
  ours = isinstance(ACTIVE.value, Active)
  stack = contextlib.nullcontext() if ours else nn.intercept_methods(intercept)
  with ACTIVE(state), stack:
    yield


@contextlib.contextmanager
def hold(state: Active) -> Generator[None]:
  """Puts a state in force, as `activate` does, for a scope that may be left in any order.

  A generator that yields inside a scope leaves it when it ends, which may be after another scope
  was entered. That one stays in force, and when it is left too what was before both is restored.
  """
  _fall_back()
  before = ACTIVE.value
  if not isinstance(before, Active):
    interceptor = contextlib.ExitStack()
    interceptor.enter_context(nn.intercept_methods(intercept))
  else:
    interceptor = None if before.held is None else before.held.interceptor
  held = Held(before, interceptor)
  ACTIVE(dataclasses.replace(state, held=held)).__enter__()
  try:
    yield
  finally:
    held.left = True
    _fall_back()


def _fall_back() -> None:
  """Restores what was before the innermost scopes, where they have been left."""
  active = ACTIVE.value
  while active is not None and active.held is not None and active.held.left:
    held, active = active.held, active.held.before
    ACTIVE(active).__enter__()
    if active is None and held.interceptor is not None:
      held.interceptor.close()


def intercept(
  next_fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  context: nn.module.InterceptorContext,
) -> Any:
  """Calls a method under the policy of its module: an interceptor for `nn.intercept_methods`."""
  active, module = ACTIVE.value, context.module
  if active is None or active.given is None or module.scope is None:
    return next_fun(*args, **kwargs)
  for found in (module, *_modules_in((args, kwargs))):
    _attach(found, again=not active.entered)
  if not callable(getattr(type(module), context.method_name, None)):
    return _lifted_body(next_fun, args, kwargs, module, active)
  return _method(next_fun, args, kwargs, context, active, active.given)


def _method(
  next_fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  context: nn.module.InterceptorContext,
  active: Active,
  given: Given,
) -> Any:
  module, name = context.module, context.method_name
  policy, picked, exempt = resolve(active, given, module)
  if active.met is not None:
    active.met.add(module_path(module))
  if active.visits is not None:
    _visit(active.visits, given, module)
  inside = dataclasses.replace(
    active,
    policy=policy,
    root_policy=policy if module.path == () else active.root_policy,
    exempt=exempt,
    entered=True,
    use_dtype=None,
    own_dtype=(),
    root=weakref.ref(module.scope) if is_new_root(active, module) else active.root,
  )
  if policy is None:
    fields = {"dtype": active.own_dtype[0]} if _inherited_dtype(module, active) else {}
    with ACTIVE(inside), _fields_set(module, fields):
      return _name_in_errors(next_fun, args, kwargs, module, policy)
  compute = policy.compute_dtype
  adapter = find_adapter(given.adapters, type(module))
  if _carries(module, args, active):
    adapter = _with_carry(adapter)
  call = call_inputs(adapter, module, name, (args, kwargs), _cast_to(compute))
  fields = {} if _any_complex(call) else call_fields(adapter, module, name, compute)
  if adapter.params == "compute":
    wide = _wide_gradients(context, policy, fields)
    fields = {**fields, **wide}
    inside = dataclasses.replace(inside, use_dtype=None if wide else compute)
  if "dtype" in fields:
    inside = dataclasses.replace(inside, own_dtype=(module.dtype,))
  with ACTIVE(inside), _fields_set(module, fields):
    outputs = _name_in_errors(next_fun, *call, module, policy)
  if name == "setup":
    return outputs
  handed_on = _handed_on(active, given, policy, picked)
  if _lifted_by(module) in _DIFFERENTIATED:
    handed_on = _COTANGENT
  if handed_on is None and not adapter.rounds:
    return outputs
  cast = _cast_to(handed_on or compute)
  new = call_outputs(adapter, module, name, (args, kwargs), outputs, cast)
  if handed_on is not None and not active.entered and active.visits is None:
    warn_of_uncast(module, new, handed_on)
  return new


def _wide_gradients(
  context: nn.module.InterceptorContext, policy: Policy, fields: dict[str, Any]
) -> dict[str, Any]:
  """Returns the fields that make a layer's weight gradients in another dtype than its products."""
  wide = policy.weight_grad_dtype
  if wide is None or wide == policy.compute_dtype or "dtype" not in fields:
    return {}
  field = product_field(context.module, context.orig_method)
  if field is None or field in fields or "promote_dtype" in fields:
    return {}
  return product_fields(context.module.promote_dtype, field, wide)


def _handed_on(active: Active, given: Given, policy: Policy, picked: bool) -> Any:
  """Returns the dtype of what a module hands on; None leaves what was computed."""
  if not active.entered:
    outer = None if given.policy is None else given.policy.output_dtype
    return policy.output_dtype or outer
  if picked and policy != active.policy:
    surrounding = None if active.policy is None else active.policy.compute_dtype
    return policy.output_dtype or surrounding
  return policy.compute_dtype


def _lifted_body(
  next_fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  module: nn.Module,
  active: Active,
) -> Any:
  """Calls a function that a lifted transform took: no module's method, so nothing begins here.

  Only the types that the transform itself compares are seen to: what a loop carries keeps the
  dtype it started with, branches agree on the compute dtype, and what is differentiated by hand
  has float32 results (but for a rule's residuals), since its author writes float32 cotangents.
  """
  by = _lifted_by(module)
  with ACTIVE(dataclasses.replace(active, loop=_place(module) if by in _LOOPS else active.loop)):
    outputs = next_fun(*args, **kwargs)
  if active.policy is None:
    return outputs
  if by in _LOOPS and args:
    if by == "scan" and isinstance(outputs, tuple) and len(outputs) == 2:
      return like(outputs[0], args[0]), outputs[1]
    return like(outputs, args[0])
  if by in _DIFFERENTIATED and not (isinstance(outputs, tuple) and any(map(callable, outputs))):
    return _cast_to(_COTANGENT)(outputs)
  return _cast_to(active.policy.compute_dtype)(outputs) if by in _BRANCHES else outputs


def _carries(module: nn.Module, args: tuple[Any, ...], active: Active) -> bool:
  """Whether the first argument of a method is what a lifted loop carries.

  It is where the method was lifted itself. Where a function was, and calls the method, it may hand
  it the carry and an input, or an input alone.
  """
  if _lifted_by(module) not in _LOOPS:
    return False
  return active.loop != _place(module) or len(args) > 1


def _place(module: nn.Module) -> str:
  return "" if module.scope is None else module.scope.path_text


def _lifted_by(module: nn.Module) -> str:
  """Returns the lifted transform whose body this module's scope was made for, or "".

  A method that is mapped inside a loop carries what the loop carries.
  """
  debug_path = module.scope.debug_path if module.scope is not None else ()
  names = re.findall(r"(\w+)\(", debug_path[-1]) if debug_path else []
  found = [name for name in names if name not in _TRANSPARENT]
  loop = next((name for name in found if name != "vmap"), "")
  return loop if loop in _LOOPS else next(iter(found), "")


def _with_carry(adapter: Adapter) -> Adapter:
  """Returns `adapter` for a method that is itself the body of a loop: its carry stays as it is."""

  def inputs(module: nn.Module, method: str, call: Any, cast: Any) -> Any:
    args, kwargs = adapter.inputs(module, method, call, cast)
    return (*call[0][:1], *args[1:]), kwargs

  def outputs(module: nn.Module, method: str, call: Any, out: Any, cast: Any) -> Any:
    new = adapter.outputs(module, method, call, out, cast)
    if call[0] and isinstance(out, tuple) and len(out) == 2:
      return like(out[0], call[0][0]), new[1]
    return new

  return dataclasses.replace(adapter, inputs=inputs, outputs=outputs)


def _cast_to(dtype: np.dtype[Any]) -> Callable[[PyTree], PyTree]:
  def cast(tree: PyTree) -> PyTree:
    return map_arrays(lambda x: x if is_lazy(x) else cast_leaf(x, dtype), tree, is_lazy)

  return cast


def _any_complex(call: Any) -> bool:
  """Whether an argument is a complex array: a half `dtype` would drop its imaginary part."""
  args, kwargs = call
  return any(
    isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.complexfloating)
    for x in (*args, *kwargs.values())
  )


def _inherited_dtype(module: nn.Module, active: Active) -> bool:
  """Whether a module that is left as it is was made by one whose `dtype` had been set.

  It was then handed that dtype, where without the policy it would have been handed the other.
  """
  own = plain_attribute(module, "dtype")
  if not active.own_dtype or active.policy is None or own is None:
    return False
  try:
    return jnp.dtype(own) == active.policy.compute_dtype
  except TypeError:
    return False


@contextlib.contextmanager
def _fields_set(module: nn.Module, fields: dict[str, Any]) -> Generator[None]:
  """Sets fields of a bound module, which Flax made for this call, and restores them."""
  before = {name: getattr(module, name) for name in fields}
  try:
    for name, value in fields.items():
      object.__setattr__(module, name, value)
    yield
  finally:
    for name, value in before.items():
      object.__setattr__(module, name, value)


def _attach(module: nn.Module, again: bool) -> None:
  """Lets the scope of a module, and of the modules it holds, read by the policy.

  Where a call begins it is done again: the user may have bound the module, and used it before under
  another policy.
  """
  if module.scope is None or (isinstance(module.scope, CastScope) and not again):
    return
  attach(module.scope)
  for held in _modules_in(vars(module)):
    if held.parent is module:
      _attach(held, again)


def _modules_in(value: Any) -> Iterator[nn.Module]:
  """Yields the modules in a field or in arguments: alone, or in plain containers."""
  if isinstance(value, nn.Module):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from _modules_in(item)
  elif isinstance(value, Mapping):
    for item in value.values():
      yield from _modules_in(item)


def _visit(visits: Visits, given: Given, module: nn.Module) -> None:
  path = module_path(module)
  visits.classes[path] = type(module).__name__
  visits.matched.update(rule for rule in given.rules if first_match((rule,), module, path))


def _name_in_errors(
  next_fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  module: nn.Module,
  policy: Policy | None,
) -> Any:
  """Calls a method; a TypeError out of it is told which module was running, and under what."""
  try:
    return next_fun(*args, **kwargs)
  except TypeError as error:
    noted = isinstance(error, MpjaxTypeError) or has_note(error)
    if policy is not None and not noted and not isinstance(error, jax.errors.JAXTypeError):
      error.add_note(mixed_dtypes_note(module_path(module), type(module).__name__, str(policy)))
    raise
