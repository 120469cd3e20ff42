"""The outermost call under a policy: traced once as a function of its variables, and rewritten."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import flax.errors
import flax.linen as nn
import jax
from flax.core import Scope, lift
from flax.linen.transforms import lift_direct_transform

from mpjax._core.active import ACTIVE
from mpjax._core.paths import path_text
from mpjax._core.policy import Policy
from mpjax._core.types import PyTree
from mpjax._jaxprs import module_calls
from mpjax._jaxprs.autocast import traceable
from mpjax._jaxprs.module_calls import array, attempts
from mpjax.linen._context import Active, Again
from mpjax.linen._scope_paths import held_in

_WHERE = "mpjax.linen.with_policy(model, policy)"
_SCOPE = "mpjax.linen.policy_scope(policy)"

_FOREIGN = flax.errors.JaxTransformError

_NEUTRAL = ("params", "perturbations")
"""Collections that take the dtype of what they meet; the others decide it, as arguments do.

Perturbations are zeros, there to be differentiated by.
"""

Enter: TypeAlias = Callable[[Active], contextlib.AbstractContextManager[None]]
"""Makes a state active. A program may be traced again after the active one was left."""


def applied(
  model: nn.Module, active: Active, enter: Enter, variables: Any, args: Any, kwargs: Any
) -> Any:
  """Returns what `model.apply` does, with the operations of all its modules rewritten.

  Args:
    model: an unbound module.
    active: the state at its root.
    enter: makes a state active.
    variables: its variables.
    args: arguments of the method.
    kwargs: further arguments of `apply`.
  """
  pair = kwargs.get("mutable", False) is not False or kwargs.get("capture_intermediates", False)

  def python(active: Active) -> Any:
    with ACTIVE(active):
      return model.apply(variables, *args, **kwargs)

  def attempt(active: Active) -> Any:
    rest = {col: tree for col, tree in variables.items() if col not in _NEUTRAL}
    params = {col: tree for col, tree in variables.items() if col in _NEUTRAL}

    def program(params: PyTree, rest: PyTree, args: Any, kwargs: Any) -> Any:
      given = {col: {**params, **rest}[col] for col in variables}
      same = given if isinstance(variables, dict) else type(variables)(given)
      with enter(active):
        return model.apply(same, *args, **kwargs)

    def changed(returned: Any) -> tuple[Any, Any]:
      return returned if pair else (returned, {})

    program.__name__ = type(model).__name__
    with ACTIVE(active):
      return _cast(traceable(program), active.policy, variables, changed)(
        params, rest, args, kwargs
      )

  return (
    attempts(attempt, python, (args, kwargs), active, "", _WHERE, _FOREIGN)
    if isinstance(variables, Mapping)
    else python(active)
  )


def rewritten(
  method: Callable[..., Any],
  module: nn.Module,
  args: Any,
  kwargs: Any,
  active: Active,
  enter: Enter,
  policy: Policy,
  python: Callable[[Active], Any],
) -> Any:
  """Returns the result of a bound module's method, with the operations inside rewritten.

  Flax's own lifting makes the method a function of variables, random keys and arguments, and puts
  back what it changed, as it does for `nn.jit`.

  Args:
    method: the method, a function of the module.
    module: the module.
    args: arguments of the method.
    kwargs: the same.
    active: the active state.
    enter: makes a state active.
    policy: that of the module.
    python: calls the method as it is, in a state in which no call is traced.
  """

  def attempt(active: Active) -> Any:
    def lifted(fn: Callable[..., Any], scopes: Any, *args: Any, **kwargs: Any) -> Any:
      def inner(
        scope_fn: Any, repack_fn: Any, groups: Any, rngs: Any, *args: Any, **kwargs: Any
      ) -> Any:
        restore = _snapshot(module, jax.tree.leaves(scope_fn(groups, rngs)))

        def program(params: PyTree, rest: PyTree, args: Any, kwargs: Any) -> Any:
          restore()  # It may be traced again.
          state, rngs = rest
          scope = scope_fn((params, state), rngs)
          again = Again((args, kwargs))
          with enter(dataclasses.replace(active, again=[again])):
            outputs = fn(scope, *args, **kwargs)
          _forget_captured(jax.tree.leaves(scope)[-1], method.__name__, outputs)
          return (*again.outputs, outputs)[0], repack_fn(scope)

        program.__name__ = type(module).__name__
        try:
          with ACTIVE(active):
            call = _cast(program, policy, groups, lambda returned: returned)
            return call(groups[0], (groups[1], rngs), args, kwargs)
        except BaseException:
          restore()
          raise

      filters = (_NEUTRAL, True)
      packed = lift.pack(inner, filters, filters, (True,), name="policy", enable_kwargs=True)
      return packed(scopes, *args, **kwargs)

    # Checked inside: Flax has counted the names of submodules when it has lifted a method.
    return lift_direct_transform(lifted, (traceable(method),), module, *args, **kwargs)

  where = _WHERE if active.held is None else _SCOPE
  return attempts(attempt, python, (args, kwargs), active, "/".join(module.path), where, _FOREIGN)


def _forget_captured(scope: Scope, method: str, outputs: Any) -> None:
  """Takes out what `capture_intermediates` kept of a method, which the call around it keeps too."""
  kept = scope.get_variable("intermediates", method)
  if isinstance(kept, tuple) and kept and kept[-1] is outputs:
    scope.put_variable("intermediates", method, kept[:-1])


def _snapshot(module: nn.Module, scopes: Iterable[Scope]) -> Callable[[], None]:
  """Returns a function that sets the counts of random numbers back to what they are now."""
  held = [each.scope for each in held_in(vars(module)) if each.scope is not None]
  counters = [(s.rng_counters, dict(s.rng_counters)) for s in (*scopes, *held)]

  def restore() -> None:
    for now, then in counters:
      now.clear()
      now.update(then)

  return restore


def _cast(
  program: Callable[..., Any],
  policy: Policy | None,
  stored: PyTree,
  changed: Callable[[Any], tuple[Any, PyTree]],
) -> Callable[..., Any]:
  """Returns a function of parameters and of the rest, which decides, with its operations rewritten.

  Args:
    program: the function.
    policy: applies where no module marks another.
    stored: the variables. What has the path of one keeps its dtype; new ones have that which they
      are computed in.
    changed: from the results to the others and the variables among them.
  """
  dtypes = {path: x.dtype for path, x in _by_path(stored)}

  def results(returned: Any) -> list[Any]:
    outputs, variables = changed(returned)
    free = [None for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
    return free + [dtypes.get(path) for path, _ in _by_path(variables)]

  def data(args: tuple[Any, ...]) -> list[bool]:
    return [number > 0 for number, each in enumerate(args) for _ in jax.tree.leaves(each)]

  cast = module_calls.rewritten(program, policy, data, results, _WHERE)

  def call(params: PyTree, rest: PyTree, *args: Any) -> Any:
    # A checkpoint may come as arrays of NumPy: variables are never constants.
    return cast(*jax.tree.map(array, (params, rest)), *args)

  return call


def _by_path(tree: PyTree) -> Iterable[tuple[str, Any]]:
  """Yields the arrays of a tree with their paths."""
  found = jax.tree_util.tree_flatten_with_path(tree)[0]
  return ((path_text(path), x) for path, x in found if isinstance(x, jax.Array))
