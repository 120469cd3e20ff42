"""The outermost call under a policy: traced once as a function of its variables, and rewritten."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import flax.errors
import flax.linen as nn
import jax
from flax.core import Scope, lift
from flax.linen.transforms import lift_direct_transform

from mpjax._core.active import ACTIVE
from mpjax._core.containers import mapped
from mpjax._core.policy import Policy
from mpjax._core.trees import instances_in
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree, Variables
from mpjax._jaxprs import traced_calls
from mpjax._jaxprs.autocast import Boundary, InDtype, NotTraceable, check_returned
from mpjax._jaxprs.traced_calls import array, attempts
from mpjax.linen._context import Active, TracedCall
from mpjax.linen._layers import neutral_collections

_WHERE = "mpjax.with_policy(model, policy)"
_SCOPE = "mpjax.policy_scope(policy)"

_FOREIGN = flax.errors.JaxTransformError

Enter: TypeAlias = Callable[[Active], contextlib.AbstractContextManager[None]]
"""Makes a state active. A function may be traced again after the active one was left."""


def applied(
  model: nn.Module, active: Active, enter: Enter, variables: Variables, args: Args, kwargs: Kwargs
) -> PyTree:
  """Returns what `model.apply` does, with the operations of all its modules rewritten.

  `active` is the state at its root, `kwargs` holds arguments of the method and of `apply`.
  """
  pair = kwargs.get("mutable", False) is not False or kwargs.get("capture_intermediates", False)

  def python(_: Active) -> PyTree:
    return model.apply(variables, *args, **kwargs)

  def attempt(active: Active) -> PyTree:
    def fn(variables: Variables, args: Args, kwargs: Kwargs) -> PyTree:
      with enter(active):
        return model.apply(variables, *args, **kwargs)

    def data(given: Args) -> list[Leaf]:
      neutral = neutral_collections()
      state = [tree for col, tree in given[0].items() if col not in neutral]
      return Boundary((state, given[1:])).leaves

    def marked(returned: PyTree) -> PyTree:
      return (returned[0], _in_stored_dtypes(returned[1], variables)) if pair else returned

    fn.__name__ = type(model).__name__
    with ACTIVE(active):
      run = traced_calls.rewrite_calls(fn, active.policy, data, marked, _WHERE)
      # A checkpoint may come as arrays of NumPy: variables are never constants.
      return run(mapped(array, variables), args, kwargs)

  if not isinstance(variables, Mapping):
    return python(active)
  return attempts(attempt, python, active, "", _WHERE, _FOREIGN)


def rewritten(
  method: Function,
  module: nn.Module,
  args: Args,
  kwargs: Kwargs,
  active: Active,
  enter: Enter,
  policy: Policy,
  python: Callable[[Active], PyTree],
) -> PyTree:
  """Returns the result of a bound module's method, with the operations inside rewritten.

  Flax's own lifting makes the method a function of variables, random keys and arguments, and puts
  back what it changed, as it does for `nn.jit`. `python` calls the method without being traced.
  """
  given = (args, kwargs)
  held = next(instances_in(given, nn.Module), None)

  @functools.wraps(method)
  def checked(*args: Any, **kwargs: Any) -> PyTree:
    # What cannot be traced is found here: Flax counts the names of submodules when it has lifted a
    # method, and it is to be called again.
    before = Boundary((args, kwargs), lambda x: isinstance(x, nn.Module)).contents()
    outputs = method(*args, **kwargs)
    all(before.changed())
    check_returned(Boundary(outputs).leaves)
    return outputs

  def attempt(active: Active) -> PyTree:
    def lifted(fn: Function, scopes: PyTree, *args: Any, **kwargs: Any) -> PyTree:
      # Flax has sorted the keys of dicts; but modules among the arguments are its copies.
      call = given if held is None else (args, kwargs)

      # `scope_fn` makes scopes of variables and keys, `repack_fn` variables of scopes.
      def inner(
        scope_fn: Function, repack_fn: Function, groups: tuple[Variables, Variables], rngs: PyTree
      ) -> tuple[PyTree, PyTree]:
        restore = _snapshot(module, jax.tree.leaves(scope_fn(groups, rngs)))

        def traced(
          params: Variables, rest: PyTree, args: Args, kwargs: Kwargs
        ) -> tuple[PyTree, PyTree]:
          restore()  # It may be traced again.
          state, rngs = rest
          scope = scope_fn((params, state), rngs)
          again = TracedCall(args, kwargs)
          with enter(dataclasses.replace(active, again=[again])):
            outputs = fn(scope, *args, **kwargs)
          _forget_captured(jax.tree.leaves(scope)[-1], method.__name__, outputs)
          return (*again.outputs, outputs)[0], repack_fn(scope)

        def data(given: Args) -> list[Leaf]:
          return Boundary(given[1:]).leaves

        def marked(returned: tuple[PyTree, PyTree]) -> PyTree:
          return returned[0], tuple(map(_in_stored_dtypes, returned[1], groups))

        traced.__name__ = type(module).__name__
        try:
          with ACTIVE(active):
            run = traced_calls.rewrite_calls(traced, policy, data, marked, _WHERE)
            return run(*mapped(array, (groups[0], (groups[1], rngs))), *call)
        except BaseException:
          # A dropout in a trace that raised has counted its key: the next attempt would draw
          # another mask than the model without a policy.
          restore()
          raise

      filters = (neutral_collections(), True)
      return lift.pack(inner, filters, filters, (True,), name="policy")(scopes)

    try:
      jax.tree.structure(given)
    except (TypeError, ValueError) as error:
      raise NotTraceable("is given a dict whose keys do not sort") from error
    return lift_direct_transform(lifted, (checked,), module, *args, **kwargs)

  where = _WHERE if active.token is None else _SCOPE
  return attempts(attempt, python, active, "/".join(module.path), where, _FOREIGN)


def _forget_captured(scope: Scope, method: str, outputs: PyTree) -> None:
  """Takes out what `capture_intermediates` kept of a method, which the call around it keeps too."""
  kept = scope.get_variable("intermediates", method)
  if isinstance(kept, tuple) and kept and kept[-1] is outputs:
    scope.put_variable("intermediates", method, kept[:-1])


def _snapshot(module: nn.Module, scopes: Iterable[Scope]) -> Callable[[], None]:
  """Returns a function that sets the counts of random numbers back to what they are now."""
  held = [each.scope for each in instances_in(vars(module), nn.Module) if each.scope is not None]
  counters = [(s.rng_counters, dict(s.rng_counters)) for s in (*scopes, *held)]

  def restore() -> None:
    for now, then in counters:
      now.clear()
      now.update(then)

  return restore


def _in_stored_dtypes(variables: PyTree, stored: PyTree) -> PyTree:
  """Returns variables that keep the dtypes of the stored ones of these names; new ones are free."""
  if isinstance(variables, Mapping):
    there = stored if isinstance(stored, Mapping) else {}
    found = {name: _in_stored_dtypes(x, there.get(name)) for name, x in variables.items()}
    return found if isinstance(variables, dict) else cast(Any, type(variables))(found)
  if jax.tree.structure(variables) != jax.tree.structure(stored):
    return variables

  def leaf(x: Leaf, old: Leaf) -> Leaf:
    return InDtype(x, old.dtype) if isinstance(x, jax.Array) and hasattr(old, "dtype") else x

  return jax.tree.map(leaf, variables, stored)
