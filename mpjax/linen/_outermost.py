"""The outermost call of a Linen model: traced as a pure function, and rewritten."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import flax.linen as nn
import jax
from flax.core import Scope, lift
from flax.linen.transforms import lift_direct_transform

from mpjax._autocast.boundary import Boundary, InDtype, check_returned
from mpjax._autocast.module_calls import array, attempts, call_rewritten, with_own_dtypes
from mpjax._core.trees import instances_in, mapped
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree, Variables
from mpjax._policy.policy import Policy
from mpjax.linen._active import LinenActive, module_path
from mpjax.linen._layers import collections_with
from mpjax.linen._repeated_call import TracedCall

Activate: TypeAlias = Callable[[LinenActive], AbstractContextManager[None]]
"""A context manager that activates a state and our interceptor: `activate` of `_intercept.py`."""


def applied(
  model: nn.Module,
  active: LinenActive,
  activate: Activate,
  variables: Variables,
  args: Args,
  kwargs: Kwargs,
) -> PyTree:
  """Returns what `model.apply` does, with the operations of all its modules rewritten."""
  # With one of these, `apply` returns a pair: the result and the changed variables.
  pair = kwargs.get("mutable", False) is not False or kwargs.get("capture_intermediates", False)

  def inputs(operands: Args) -> list[Leaf]:
    # Parameters are cast where they are used, by their role. All other arrays are inputs of the
    # model.
    parameters = collections_with(is_parameter=True)
    state = [tree for col, tree in operands[0].items() if col not in parameters]
    return Boundary((state, operands[1:])).leaves

  def marked(returned: PyTree) -> PyTree:
    return (returned[0], _in_stored_dtypes(returned[1], variables)) if pair else returned

  def attempt(active: LinenActive) -> PyTree:
    def fn(variables: Variables, args: Args, kwargs: Kwargs) -> PyTree:
      with activate(active):  # A derivative traces it again, after the call has left this state.
        return model.apply(variables, *args, **kwargs)

    fn.__name__ = type(model).__name__
    # A checkpoint may hold NumPy arrays, which a trace would take for constants.
    operands = (mapped(array, variables), args, kwargs)
    return call_rewritten(fn, operands, active, active.around.policy, inputs, marked)

  if not isinstance(variables, Mapping):
    return model.apply(variables, *args, **kwargs)
  python = functools.partial(model.apply, variables, *args, **kwargs)
  return attempts(attempt, lambda _: python(), active, model.name or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundCall:
  """A call of a method of a bound module, as one that can be traced.

  Fields:
    module: the module.
    method: the function of its class.
    args: its positional arguments.
    kwargs: its keyword arguments.
    policy: the policy of the module.
    activate: see `Activate`.
  """

  module: nn.Module
  method: Function
  args: Args
  kwargs: Kwargs
  policy: Policy | None
  activate: Activate

  def outputs(self, active: LinenActive, python: Callable[[LinenActive], PyTree]) -> PyTree:
    """Returns the result, with the operations inside rewritten, or that of `python`."""
    return attempts(self._rewritten, python, active, module_path(active, self.module))

  @functools.cached_property
  def has_modules(self) -> bool:
    """Whether there are modules among the arguments."""
    return next(instances_in((self.args, self.kwargs), nn.Module), None) is not None

  def _rewritten(self, active: LinenActive) -> PyTree:
    # `lift.pack`, as in `nn.jit`, makes the method a function of variables, random keys and
    # arguments, and writes its changes back.
    def lifted(fn: Function, scopes: PyTree, *args: Any, **kwargs: Any) -> PyTree:
      def inner(
        scope_fn: Function, repack_fn: Function, groups: tuple[PyTree, ...], rngs: PyTree
      ) -> PyTree:
        return _LiftedCall(self, fn, args, kwargs, scope_fn, repack_fn, groups, rngs).outputs(
          active
        )

      # Two groups of variables: parameters, and all others (True).
      filters = (collections_with(is_parameter=True), True)
      return lift.pack(inner, filters, filters, (True,), name="policy")(scopes)

    method = _checked(self.method)
    return lift_direct_transform(lifted, (method,), self.module, *self.args, **self.kwargs)


def _checked(method: Function) -> Function:
  """Returns a method that raises an error if it cannot be traced."""
  # Flax counts the names of submodules when it has lifted a method, and the method is to be called
  # again.

  @functools.wraps(method)
  def checked(*args: Any, **kwargs: Any) -> PyTree:
    # Consume the generator: it raises NotTraceable for changes that cannot be copied back.
    before = Boundary((args, kwargs), lambda x: isinstance(x, nn.Module)).contents()
    outputs = method(*args, **kwargs)
    all(before.changed())
    check_returned(Boundary(outputs).leaves)
    return outputs

  return checked


@dataclasses.dataclass(frozen=True)
class _LiftedCall:
  """A call that Flax has lifted.

  Fields:
    call: the call.
    fn: the method, as a function of scopes and arguments.
    args: the positional arguments as Flax passes them.
    kwargs: the keyword arguments.
    scope_fn: creates scopes from variables and random keys.
    repack_fn: returns the variables in scopes.
    groups: the parameters, and the other variables.
    rngs: the random keys.
  """

  call: BoundCall
  fn: Function
  args: Args
  kwargs: Kwargs
  scope_fn: Function
  repack_fn: Function
  groups: tuple[PyTree, ...]
  rngs: PyTree

  def outputs(self, active: LinenActive) -> tuple[PyTree, PyTree]:
    """Returns the result and the variables, with the operations inside rewritten."""
    # The method may be traced several times: in float32, in the compute dtype, by a derivative.
    counts = _RngCounts(self._scopes())
    traced_in = functools.partial(self._traced_in, counts=counts)
    parameters, rest = self.groups
    operands = (*mapped(array, (parameters, (rest, self.rngs))), *self._arguments)
    inputs = Boundary(operands[1:]).leaves

    def outputs_in(active: LinenActive) -> tuple[PyTree, PyTree]:
      policy, function = self.call.policy, traced_in(active)
      return call_rewritten(function, operands, active, policy, lambda _: inputs, self._marked)

    try:
      # Not in `attempts`: Flax counts the names of submodules when it has lifted a method.
      return with_own_dtypes(outputs_in, active)
    except BaseException:
      counts.restore()
      raise

  @property
  def _arguments(self) -> tuple[Args, Kwargs]:
    # Flax sorted the keys of dicts, so take the user's arguments. Modules among them are Flax's
    # copies, which belong to the trace.
    if self.call.has_modules:
      return self.args, self.kwargs
    return self.call.args, self.call.kwargs

  def _scopes(self) -> list[Scope]:
    """Returns the scopes whose random keys the call counts."""
    fields = instances_in(vars(self.call.module), nn.Module)
    held = [x.scope for x in fields if x.scope is not None]
    return [*jax.tree.leaves(self.scope_fn(self.groups, self.rngs)), *held]

  def _traced_in(self, active: LinenActive, counts: "_RngCounts") -> Callable[..., PyTree]:
    """Returns the call as a function of variables, random keys and arguments."""

    def traced(params: Variables, rest: PyTree, args: Args, kwargs: Kwargs) -> PyTree:
      counts.restore()
      state, rngs = rest
      scope = self.scope_fn((params, state), rngs)
      again = self._again(args, kwargs)
      with self.call.activate(dataclasses.replace(active, again=[again])):
        outputs = self.fn(scope, *args, **kwargs)
      _forget_captured(jax.tree.leaves(scope)[-1], self.call.method.__name__, outputs)
      # The result of our interceptor, before interceptors of the user's. Without one, the method's
      # own.
      return (*again.outputs, outputs)[0], self.repack_fn(scope)

    traced.__name__ = type(self.call.module).__name__
    return traced

  def _again(self, args: Args, kwargs: Kwargs) -> TracedCall:
    call = self.call
    if call.has_modules:
      return TracedCall(call.module, call.args, call.kwargs)
    return TracedCall(call.module, args, kwargs)

  def _marked(self, returned: tuple[PyTree, PyTree]) -> PyTree:
    """Returns the result, and the variables in the dtypes in which they are stored."""
    return returned[0], tuple(map(_in_stored_dtypes, returned[1], self.groups))


class _RngCounts:
  """How many random keys each scope has made."""

  # A trace counts the random keys that it makes, also one that raised. Without a restore, the next
  # trace would draw other dropout masks than the model without a policy.

  def __init__(self, scopes: Iterable[Scope]) -> None:
    self._counters = [scope.rng_counters for scope in scopes]
    self._before = list(map(dict, self._counters))

  def restore(self) -> None:
    """Puts back the counts that were there when this was created."""
    for counter, before in zip(self._counters, self._before, strict=True):
      counter.clear()
      counter.update(before)


def _forget_captured(scope: Scope, method: str, outputs: PyTree) -> None:
  """Removes the output that `capture_intermediates` kept: the call around keeps it too."""
  # Flax appends to a tuple. Only the last entry can be this call's.
  captured = scope.get_variable("intermediates", method)
  if isinstance(captured, tuple) and captured and captured[-1] is outputs:
    scope.put_variable("intermediates", method, captured[:-1])


def _in_stored_dtypes(variables: PyTree, stored: PyTree) -> PyTree:
  """Returns variables in the dtypes of the stored ones. New variables keep their own."""
  # Below a name that is new, there is nothing stored to compare with.
  if isinstance(variables, Mapping):
    there = stored if isinstance(stored, Mapping) else {}
    marked = {name: _in_stored_dtypes(x, there.get(name)) for name, x in variables.items()}
    return marked if isinstance(variables, dict) else cast(Any, type(variables))(marked)
  if jax.tree.structure(variables) != jax.tree.structure(stored):
    return variables

  def leaf(x: Leaf, old: Leaf) -> Leaf:
    return InDtype(x, old.dtype) if isinstance(x, jax.Array) and hasattr(old, "dtype") else x

  return jax.tree.map(leaf, variables, stored)
