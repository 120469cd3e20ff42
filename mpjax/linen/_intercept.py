"""Intercept each call of a Linen module's method while a policy is active.

The outermost call is traced as a pure function, and rewritten. The calls inside of it mark their
operations for that.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Generator, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

from mpjax._autocast.boundary import Boundary, InDtype, check_returned
from mpjax._autocast.module_calls import (
  array,
  attempts,
  begins_trace,
  call_rewritten,
  module_call,
  with_own_dtypes,
)
from mpjax._core.trees import instances_in, mapped
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree, Variables
from mpjax._policy.active import ACTIVE, outside_policies
from mpjax._policy.rules import PolicyConfig, rewrites
from mpjax.linen._active import LinenActive, begin, current, is_new_root, module_path, module_policy
from mpjax.linen._initialize import store_caches, store_parameters
from mpjax.linen._layers import LAYERS, collections_with
from mpjax.linen._paths import flag_paths
from mpjax.linen._repeated_call import TracedCall, in_order


@contextlib.contextmanager
def activate(state: LinenActive) -> Generator[None]:
  """Makes a state active, in this thread, for the length of a `with` block."""
  # One interceptor serves all states. Two would call a module of an inner model twice under
  # policies, and cast its results twice. If the state around is that of an NNX model, there is none
  # yet.
  stack = nn.intercept_methods(intercept) if current() is None else contextlib.nullcontext()
  with ACTIVE(state), stack:
    yield


@contextlib.contextmanager
def under(config: PolicyConfig, **fields: Any) -> Generator[LinenActive | None]:
  """Makes the state of a call under `config` active, but none inside of `full_precision`."""
  state = None if outside_policies() else begin(config, **fields)
  with contextlib.nullcontext() if state is None else activate(state):
    yield state


def intercept(
  next_fun: Function, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`."""
  active, module, name = current(), context.module, context.method_name
  scope = module.scope
  # `nn.scan(body)` and other lifted transforms show `body` as a method that the class does not
  # have. It belongs to the module that calls it. As a call of its own, its carry would return in
  # another dtype, and the scan would raise.
  is_method = callable(getattr(type(module), name, None))
  if active is None or active.config is None or scope is None or not is_method:
    return next_fun(*args, **kwargs)
  # Rules with paths need traces of their own, see `_paths.py`.
  if active.config.by_path:
    flag_paths((module, *instances_in((args, kwargs), nn.Module)))
  resolved, path = module_policy(active, active.config, module), module_path(active, module)
  initializing, is_setup = module.is_initializing(), name == "setup"
  # Flax calls a method again in order to trace it, on a copy. Its arguments came through the first
  # call. Flax runs `setup` of the copy before that.
  first: TracedCall | None = None
  if active.again:
    in_order(module, active.again[-1].module)
    if not is_setup:
      first = active.again.pop()
      args, kwargs = first.arguments(args, kwargs)

  def call(state: LinenActive) -> PyTree:
    # Notes for the check that each rule matches a module.
    for record in (state.record, state.met):
      if record is not None:
        record.note(module, path)
    called = module_call(module, path, resolved, state, LAYERS, initializing=initializing)
    outputs = called.run(next_fun, args, kwargs)
    if initializing:
      # Store what `init` created in this call.
      if resolved.policy is not None:
        store_parameters(scope, resolved.policy)
      # Caches are cast once, by the root, which runs `init` of the entire model again.
      if not (state.entered or is_setup) and module.path == state.root_path:
        init = functools.partial(module.clone(parent=None).init, method=name, **kwargs)
        store_caches(scope, lambda rngs: init(rngs, *args), state)
    # The results of `setup`, and those inside of `init`, are the model's own: computed from results
    # that no module has rounded. Those inside `full_precision` are the user's own.
    is_own = is_setup or (initializing and state.entered) or state.outside_policies
    if not is_own:
      outputs = called.result(outputs)
    if first is not None:
      first.outputs = (outputs,)
    return outputs

  state = active
  if is_new_root(active, module):
    # Weak, because the state is in keys of JAX's caches, which live as long as the program.
    state = dataclasses.replace(state, root=weakref.ref(scope), root_path=())
  if module.path == state.root_path:
    state = dataclasses.replace(state, of_root=resolved.inherited())
  if is_setup:  # Calls in `setup` belong to it, and are not traced by themselves.
    state = dataclasses.replace(state, again=[], tracing=True)
  # `init` draws parameters. A rewritten trace would draw them in another dtype, and so draw other
  # numbers.
  is_outermost = rewrites(resolved.policy) and begins_trace(active, path)
  if initializing or is_setup or not is_outermost:
    return call(state)
  bound: Any = context.orig_method  # A partial: of the method, and the module.
  attempt = functools.partial(_rewritten, module, bound.func, args, kwargs)
  return attempts(attempt, call, state, resolved.policy, module_path(state, module))


# The outermost call


def _rewritten(
  module: nn.Module,
  method: Function,
  args: Args,
  kwargs: Kwargs,
  active: LinenActive,
) -> PyTree:
  """Returns the result of a call of a bound module, with the operations inside rewritten.

  `lift.pack`, as in `nn.jit`, makes the method a function of variables, random keys and arguments,
  and writes its changes back.

  Args:
    module: the module.
    method: the function of its class.
    args: the positional arguments of the method.
    kwargs: its keyword arguments.
    active: the state of the call, in the region of the module.
  """
  has_modules = next(instances_in((args, kwargs), nn.Module), None) is not None

  # Raises an error if the method cannot be traced. It does so here, because Flax counts the names
  # of submodules when it has lifted a method, and the method is to be called again.
  @functools.wraps(method)
  def checked(*args: Any, **kwargs: Any) -> PyTree:
    before = Boundary((args, kwargs), lambda x: isinstance(x, nn.Module)).contents()
    outputs = method(*args, **kwargs)
    # Consume the generator: it raises NotTraceable for changes that cannot be copied back.
    all(before.changed())
    check_returned(Boundary(outputs).leaves)
    return outputs

  def lifted(fn: Function, scopes: PyTree, *copied_args: Any, **copied_kwargs: Any) -> PyTree:
    def inner(
      scope_fn: Function, repack_fn: Function, groups: tuple[PyTree, ...], rngs: PyTree
    ) -> PyTree:
      # The method may be traced several times: in float32, in the compute dtype, by a derivative. A
      # trace counts the random keys that it makes, also one that raised. Without a restore, the
      # next trace would draw other dropout masks than the model without a policy.
      held = [x.scope for x in instances_in(vars(module), nn.Module) if x.scope is not None]
      counters = [each.rng_counters for each in (*jax.tree.leaves(scope_fn(groups, rngs)), *held)]
      counts = [dict(counter) for counter in counters]

      def restore_counts() -> None:
        for counter, count in zip(counters, counts, strict=True):
          counter.clear()
          counter.update(count)

      # Flax sorted the keys of dicts, so take the user's arguments. Modules among them are Flax's
      # copies, which belong to the trace.
      given = (copied_args, copied_kwargs) if has_modules else (args, kwargs)
      parameters, rest = groups
      operands = (*mapped(array, (parameters, (rest, rngs))), *given)
      inputs = Boundary(operands[1:]).leaves

      def attempt(active: LinenActive) -> PyTree:
        def traced(params: Variables, rest: PyTree, given: Args, keywords: Kwargs) -> PyTree:
          restore_counts()
          others, rngs = rest
          scope = scope_fn((params, others), rngs)
          again = TracedCall(module, *((args, kwargs) if has_modules else (given, keywords)))
          with activate(dataclasses.replace(active, again=[again])):
            outputs = fn(scope, *given, **keywords)
          # The call around keeps an output for `capture_intermediates` too. Flax appends to a
          # tuple, whose last entry alone can be of this call.
          own, name = jax.tree.leaves(scope)[-1], method.__name__
          captured = own.get_variable("intermediates", name)
          if isinstance(captured, tuple) and captured and captured[-1] is outputs:
            own.put_variable("intermediates", name, captured[:-1])
          # The result of our interceptor, before interceptors of the user's. Without one, the
          # method's own.
          return (*again.outputs, outputs)[0], repack_fn(scope)

        def stored(returned: tuple[PyTree, PyTree]) -> PyTree:
          return returned[0], tuple(map(_in_stored_dtypes, returned[1], groups))

        traced.__name__ = type(module).__name__
        return call_rewritten(traced, operands, active, lambda _: inputs, stored)

      try:
        # Not in `attempts`: Flax counts the names of submodules when it has lifted a method.
        return with_own_dtypes(attempt, active)
      except BaseException:
        restore_counts()
        raise

    # Two groups of variables: parameters, and all others (True).
    filters = (collections_with(is_parameter=True), True)
    return lift.pack(inner, filters, filters, (True,), name="policy")(scopes)

  return lift_direct_transform(lifted, (checked,), module, *args, **kwargs)


def applied(
  model: nn.Module, active: LinenActive, variables: Variables, args: Args, kwargs: Kwargs
) -> PyTree:
  """Returns what `model.apply` does, with the operations of all its modules rewritten."""
  if not isinstance(variables, Mapping):
    return model.apply(variables, *args, **kwargs)
  # With one of these, `apply` returns a pair: the result and the changed variables.
  pair = kwargs.get("mutable", False) is not False or kwargs.get("capture_intermediates", False)

  def inputs(operands: Args) -> list[Leaf]:
    # Parameters are cast where they are used, by their role. All other arrays are inputs of the
    # model.
    parameters = collections_with(is_parameter=True)
    state = [tree for col, tree in operands[0].items() if col not in parameters]
    return Boundary((state, operands[1:])).leaves

  def stored(returned: PyTree) -> PyTree:
    return (returned[0], _in_stored_dtypes(returned[1], variables)) if pair else returned

  def attempt(active: LinenActive) -> PyTree:
    def fn(variables: Variables, args: Args, kwargs: Kwargs) -> PyTree:
      with activate(active):  # A derivative traces it again, after the call has left this state.
        return model.apply(variables, *args, **kwargs)

    fn.__name__ = type(model).__name__
    # A checkpoint may hold NumPy arrays, which a trace would take for constants.
    operands = (mapped(array, variables), args, kwargs)
    return call_rewritten(fn, operands, active, inputs, stored)

  def run_as_python(_: LinenActive) -> PyTree:
    return model.apply(variables, *args, **kwargs)

  return attempts(attempt, run_as_python, active, active.around.policy, model.name or "")


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
