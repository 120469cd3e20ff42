"""What happens at each call of a module's method while a policy is in force."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import Any

import flax.linen as nn

from mpjax._autocast import mark, region_of
from mpjax._full_precision import ACTIVE
from mpjax._module_dtype import dtype_field, warn_of_uncast
from mpjax._policy import Policy
from mpjax._regions import FLOAT32, arguments, is_low, is_wide, named_in_errors, returned
from mpjax._rules import first_match
from mpjax._types import PyTree
from mpjax.linen._context import Active, Given, Held, Visits, is_new_root, module_path, resolve
from mpjax.linen._initialize import store, store_computed
from mpjax.linen._outermost import rewritten
from mpjax.linen._places import held_in, tell_places


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
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`.

  The function that a lifted transform took shows as a method that its class does not have. It is
  part of the module that calls it.
  """
  active, module, name = ACTIVE.value, context.module, context.method_name
  if active is None or active.given is None or module.scope is None:
    return next_fun(*args, **kwargs)
  if not callable(getattr(type(module), name, None)):
    return next_fun(*args, **kwargs)
  given: Given = active.given
  tell_places(module, (args, kwargs), given)
  policy, picked, exempt = resolve(active, given, module)
  root = weakref.ref(module.scope) if is_new_root(active, module) else active.root
  root_policy = policy if module.path == () else active.root_policy
  initializing = module.is_initializing()
  outer = dataclasses.replace(active, root=root, root_policy=root_policy)

  again = active.again.pop() if active.again and name != "setup" else None
  if again is not None and next(held_in(again.call), None) is None:
    args, kwargs = again.call

  def call(active: Active) -> Any:
    found = (policy, picked, exempt)
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
  found: tuple[Policy | None, bool, bool],
) -> Any:
  """Calls a method in the region of its module."""
  policy, picked, exempt = found
  if active.met is not None:
    active.met.add(module_path(module))
  if active.visits is not None:
    _visit(active.visits, given, module)
  casts = active.cast or is_wide(policy) or type(module) in active.casting
  inside = dataclasses.replace(
    active,
    policy=policy,
    exempt=exempt,
    entered=True,
    region=_region(module, policy),
    cast=casts,
  )
  fields: dict[str, Any] = {}
  if policy is not None:
    if casts or not module.is_initializing():  # It may be what parameters are drawn in.
      fields = dtype_field(module, policy.compute_dtype if casts else FLOAT32, always=casts)
    call = arguments(call, policy, casts)
  marks = active.tracing and active.region != inside.region
  marked = mark(inside.region) if marks else contextlib.nullcontext()
  with ACTIVE(inside), _fields_set(module, fields), marked:
    outputs = named_in_errors(next_fun, call, module, module_path(module), policy, active.failed)
  if module.is_initializing():
    store(module, policy)
    if not (active.entered or active.cast or active.visits) and name != "setup":
      with ACTIVE(dataclasses.replace(active, cast=True)):
        store_computed(module, name, call)
  if name == "setup" or policy is None:
    return outputs
  return _returned(module, outputs, active, given, policy, picked, casts)


def _region(module: nn.Module, policy: Policy | None) -> str:
  """Returns what marks the operations of a module itself; the policy goes on to those inside."""
  # A power iteration starts from its own result at each step: rounded, it drifts.
  iterates = isinstance(module, nn.SpectralNorm) and is_low(policy)
  return FLOAT32.name if iterates else region_of(policy)


def _returned(
  module: nn.Module,
  outputs: PyTree,
  active: Active,
  given: Given,
  policy: Policy,
  picked: bool,
  casts: bool,
) -> PyTree:
  """Returns the results of a module in the dtype that its policy, where it begins, says."""
  compute, dtype = policy.compute_dtype, None
  if not active.entered:
    outer = None if given.policy is None else given.policy.output_dtype
    dtype = policy.output_dtype or outer
    if active.visits is not None:
      active.visits.output_dtype = dtype
  elif picked and policy != active.policy:
    dtype = policy.output_dtype
  if dtype is None and casts:
    dtype = compute
  if dtype is None:
    return outputs
  new = returned(outputs, dtype, active.tracing and not active.cast)
  # While it is traced all is float32 still, and what hides arrays from JAX is not traced after all.
  if not (active.entered or active.visits or active.tracing):
    warn_of_uncast(module, new, dtype)
  return new


@contextlib.contextmanager
def _fields_set(module: nn.Module, fields: Mapping[str, Any]) -> Generator[None]:
  """Sets fields of a bound module, which Flax made for this call, and restores them."""
  before = {name: getattr(module, name) for name in fields}
  try:
    for name, value in fields.items():
      object.__setattr__(module, name, value)
    yield
  finally:
    for name, value in before.items():
      object.__setattr__(module, name, value)


def _visit(visits: Visits, given: Given, module: nn.Module) -> None:
  path = module_path(module)
  visits.classes[path] = type(module).__name__
  visits.matched.update(rule for rule in given.rules if first_match((rule,), module, path))
