"""What happens at each call of a Linen module's method while a policy is active."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, cast

import flax.errors
import flax.linen as nn
import jax
from flax.core import Scope, freeze, lift
from flax.linen.transforms import lift_direct_transform

from mpjax._autocast import Boundary, InDtype, check_returned, region_of
from mpjax._autocast.module_calls import (
  array,
  attempts,
  begins_trace,
  call_of,
  rewritten,
  with_own_dtypes,
)
from mpjax._core.errors import REFUSALS
from mpjax._core.trees import cast_arrays, cast_like, instances_in, is_floating, mapped
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree, Variables
from mpjax._policy import active
from mpjax._policy.active import ACTIVE, AUDIT, EVERY, in_region
from mpjax._policy.policy import Policy
from mpjax._policy.rules import NO_POLICY, ModulePolicy, ModuleRecord, PolicyConfig, resolve_policy
from mpjax.linen import _layers


@dataclasses.dataclass
class TracedCall:
  """A method that is called once more, on a copy of its module, in order to be traced."""

  module: nn.Module
  args: Args
  kwargs: Kwargs
  outputs: tuple[()] | tuple[PyTree] = ()  # what our interceptor returned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active(active.Active):
  """The active state inside a call of a Linen module.

  Fields:
    config: what the user gave; None where policies are switched off.
    of_root: the policy of the root of this `init` or `apply`.
    record: where to note the modules called, during `init`. It is equal to nothing but itself: no
      function compiled before is reused while it is there, so that no module is missed.
    root: the scope of the root; it tells a model that is applied inside from the root itself.
    met: where to note the modules called; those inside a cached jaxpr are not.
    again: the method that is called next, if it was called before.
  """

  config: PolicyConfig | None = None
  of_root: ModulePolicy = NO_POLICY
  record: ModuleRecord | None = None
  # Compared, these would make every call another key of JAX's caches.
  root: weakref.ref[Scope] | None = dataclasses.field(default=None, compare=False)
  met: ModuleRecord | None = dataclasses.field(default=None, compare=False)
  again: list[TracedCall] = dataclasses.field(default_factory=list, compare=False)

  __hash__ = active.Active.__hash__


def current() -> Active | None:
  """Returns the active state of this thread; None where a Linen model is under no policy."""
  state = ACTIVE.value
  return state if isinstance(state, Active) else None


def begin(config: PolicyConfig, **records: Any) -> Active:
  """Returns the state at the root of a model that `config` was given to."""
  policy, around = ModulePolicy(config.policy), ACTIVE.value
  if AUDIT.value is not None:
    AUDIT.value.note_rules(config.rules)
  # A model inside of another that is being traced is rewritten with it.
  traced = around if around is not None and around.tracing else None
  return Active(
    config=config,
    around=policy,
    of_root=policy,
    tracing=traced is not None,
    region=region_of(config.policy) if traced is None else traced.region,
    in_region=in_region(),
    **records,
  )


def module_path(module: nn.Module) -> str:
  """Returns the path that rules see: relative to the root, or the name of what is itself a root."""
  # A child on which `.apply` is called in a forward pass is the root of that call.
  return "/".join(module.path or ()) or module.name or ""


def policy_of(active: Active, config: PolicyConfig, module: nn.Module) -> ModulePolicy:
  # What encloses a module is its parent; across a lifted transform, which hides the parent, it is
  # the module being called, and so it is for a model that is applied in a forward pass.
  around = active.around
  if isinstance(module.parent, nn.Module):
    around = policy_of(active, config, module.parent)
  elif module.path == () and not is_new_root(active, module):
    around = active.of_root
  # A property `policy` may compute something; only a field says what the module runs under.
  has_field = "policy" in getattr(type(module), "__dataclass_fields__", {})
  own = getattr(module, "policy", None) if has_field else None
  audited = AUDIT.value is not None
  return resolve_policy(config, module, module_path(module), own, around, all_matches=audited)


def is_new_root(active: Active, module: nn.Module) -> bool:
  """Whether a bound module is the root of a call of its own, other than the active root."""
  # A scope that a lifted transform created for the active root shows it in its debug path.
  scope = module.scope
  if scope is None or module.path != () or scope.debug_path:
    return False
  return active.root is None or active.root() is not scope


# `nn.jit` reuses what it traced for an equal module elsewhere: under Rule("float32", path="b") the
# layer "b" would run in the dtype of an equal layer "a". Flags of scopes are part of its key.
_FLAG = "mpjax_path"


class PathScope(Scope):
  """A Flax scope that gives the scopes created from it a flag that holds their path."""

  def push(self, *args: Any, **kwargs: Any) -> Scope:
    return _flagged(super().push(*args, **kwargs))

  def rewound(self, rewind_rngs: bool = False) -> Scope:
    return _flagged(super().rewound(rewind_rngs))


def flag_paths(modules: Iterable[nn.Module]) -> None:
  """Flags the scopes of modules, and of those that they hold."""
  for module in modules:
    if module.scope is not None:
      _flagged(module.scope)
      flag_paths(x for x in instances_in(vars(module), nn.Module) if x.parent is module)


def _flagged(scope: Scope) -> Scope:
  # Flax creates scopes in many functions and shares them by identity, so the object itself is given
  # the class. Where no policy is active, it behaves as before.
  if type(scope) is Scope:
    scope.__class__ = PathScope
  active, path = current(), "/".join(scope.path)
  # A child begins with the flags of its parent.
  if active is not None and active.config is not None and scope.flags.get(_FLAG) != path:
    scope.flags = freeze({**scope.flags, _FLAG: path})
  return scope


@contextlib.contextmanager
def activate(state: Active) -> Generator[None]:
  """Makes a state active, in this thread, for the length of a `with` block."""
  # One interceptor serves all states: with a second one a module of a wrapped model inside of
  # another would be called twice under policies, and its results cast twice. Where the state around
  # is that of an NNX model there is none yet.
  stack = nn.intercept_methods(intercept) if current() is None else contextlib.nullcontext()
  with ACTIVE(state), stack:
    yield


@contextlib.contextmanager
def under(config: PolicyConfig, **records: Any) -> Generator[Active | None]:
  """Makes the state of a call under `config` active, but none inside of `full_precision`."""
  state = None if in_region() else begin(config, **records)
  with contextlib.nullcontext() if state is None else activate(state):
    yield state


def intercept(
  next_fun: Function, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
  """Calls a method in the region of its module: an interceptor for `nn.intercept_methods`."""
  active, module, name = current(), context.module, context.method_name
  scope = module.scope
  if active is None or active.config is None or scope is None:
    return next_fun(*args, **kwargs)
  # The function that a lifted transform took, the body of `nn.scan(body)`, shows as a method that
  # the class does not have. It is a part of the module that calls it. Taken for a call of its own,
  # its carry would come back in another dtype than it came in, and the scan would raise.
  if not callable(getattr(type(module), name, None)):
    return next_fun(*args, **kwargs)
  if active.config.by_path:
    flag_paths((module, *instances_in((args, kwargs), nn.Module)))
  path, resolved = module_path(module), policy_of(active, active.config, module)
  policy, initializing = resolved.policy, module.is_initializing()
  outer = active
  if module.path == ():
    root = weakref.ref(scope) if is_new_root(active, module) else active.root
    outer = dataclasses.replace(active, root=root, of_root=resolved.inherited())
  if active.again:
    _in_order(module, active.again[-1].module)
  again = None
  if name == "setup":  # What it calls is a part of it, and no call of its own.
    outer = dataclasses.replace(outer, again=[], tracing=True)
  elif active.again:
    # The second call of a method that is being traced. Its arguments are those of the first: an
    # interceptor of the user's that adds 1 to them has run in the first call, and now runs again.
    # Modules among them are the exception, since the copies belong to the trace.
    again = active.again.pop()
    first = again.args, again.kwargs
    copied = next(instances_in(first, nn.Module), None) is not None
    args, kwargs = _in_order((args, kwargs), first) if copied else first

  def call(active: Active) -> PyTree:
    for record in (active.record, active.met):
      if record is not None:
        record.note(module, path)
    called = call_of(module, path, resolved, active, _layers.LAYERS, initializing=initializing)
    outputs = called.run(next_fun, args, kwargs, initializing=initializing)
    if initializing and policy is not None:
      _store(scope, policy)
    if initializing and not (active.entered or module.path or name == "setup"):
      init = functools.partial(module.clone(parent=None).init, method=name, **kwargs)
      _store_caches(scope, lambda rngs: init(rngs, *args), active)
    # What `init` stores is the model's own: computed from results that no module has rounded.
    own = name == "setup" or (initializing and active.entered)
    if not own and not active.in_region:
      outputs = called.result(outputs)
    if again is not None:
      again.outputs = (outputs,)
    return outputs

  # `init` draws parameters. Traced in another dtype, it would draw other numbers.
  if initializing or name == "setup" or not begins_trace(active, policy, path):
    return call(outer)
  bound: Any = context.orig_method  # A partial: of the method, and the module.
  region = dataclasses.replace(outer, region=region_of(policy))
  return _lifted(bound.func, module, args, kwargs, region, policy, call)


def _collections(**kinds: object) -> tuple[str, ...]:
  """Returns the collections whose `StateKind` has these fields."""
  return tuple(col for col, kind in _layers.STATE.items() if kinds.items() <= vars(kind).items())


# What `init` stores


def _store(scope: Scope, policy: Policy) -> None:
  """Casts the parameters of a module that is being initialised, but not those of its submodules."""
  for col in filter(scope.is_mutable_collection, _collections(stored="param_dtype")):
    for name, value in scope.variables().get(col, {}).items():
      if scope.name_reserved(name, col) and not scope.name_reserved(name, ""):
        new = cast_arrays(value, policy.param_dtype)
        if new is not value:
          scope.put_variable(col, name, new)


def _store_caches(scope: Any, init: Callable[[PyTree], Variables], state: Active) -> None:
  """Casts the caches that a root has initialised to the dtypes of a model with `dtype=` fields."""
  # Only the modules themselves know these dtypes. Traced in float32, they create the decode cache
  # of a bfloat16 model in float32, twice as large.
  caches = {col: scope.variables().get(col, {}) for col in _collections(stored="computed")}
  floating = any(map(is_floating, jax.tree.leaves(caches)))
  if not floating or state.record is not None or state.casting == EVERY:
    return
  rngs = {key: rng.as_jax_rng() for key, rng in scope.rngs.items()}
  try:
    with activate(dataclasses.replace(state, casting=EVERY)):
      low = abstract(functools.partial(init, rngs))
  except (*REFUSALS, flax.errors.FlaxError):
    return  # A loop may carry float32, say, as it then does in `apply` too.
  for col, cache in caches.items():
    for key, new in (cast_like(cache, low.get(col)) or {}).items():
      scope.put_variable(col, key, new)


def abstract(init: Callable[[], Variables]) -> Variables:
  """Returns the shapes and dtypes of what `init` returns, or itself where it looks at values."""
  try:
    return jax.eval_shape(init)
  except jax.errors.JAXTypeError:
    return init()


# The outermost call


def applied(
  model: nn.Module, active: Active, variables: Variables, args: Args, kwargs: Kwargs
) -> PyTree:
  """Returns what `model.apply` does, with the operations of all its modules rewritten."""
  pair = kwargs.get("mutable", False) is not False or kwargs.get("capture_intermediates", False)

  def inputs(operands: Args) -> list[Leaf]:
    parameters = _collections(is_parameter=True)
    state = [tree for col, tree in operands[0].items() if col not in parameters]
    return Boundary((state, operands[1:])).leaves

  def marked(returned: PyTree) -> PyTree:
    return (returned[0], _in_stored_dtypes(returned[1], variables)) if pair else returned

  def attempt(active: Active) -> PyTree:
    def fn(variables: Variables, args: Args, kwargs: Kwargs) -> PyTree:
      with activate(active):  # It may be traced again, when the active one has been left.
        return model.apply(variables, *args, **kwargs)

    fn.__name__ = type(model).__name__
    # A checkpoint may come as arrays of NumPy: variables are never constants.
    operands = (mapped(array, variables), args, kwargs)
    return rewritten(fn, operands, active, active.around.policy, inputs, marked)

  if not isinstance(variables, Mapping):
    return model.apply(variables, *args, **kwargs)
  python = functools.partial(model.apply, variables, *args, **kwargs)
  return attempts(attempt, lambda _: python(), active, model.name or "")


def _lifted(
  method: Function,
  module: nn.Module,
  args: Args,
  kwargs: Kwargs,
  active: Active,
  policy: Policy | None,
  python: Callable[[Active], PyTree],
) -> PyTree:
  """Returns the result of a bound module's method, with the operations inside rewritten."""
  # Flax's own lifting makes the method a function of variables, random keys and arguments, and puts
  # back what it changed, as it does for `nn.jit`.
  inputs = (args, kwargs)
  has_modules = next(instances_in(inputs, nn.Module), None) is not None

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
      call = (args, kwargs) if has_modules else inputs

      # `scope_fn` makes scopes of variables and keys, `repack_fn` variables of scopes.
      def inner(scope_fn: Function, repack_fn: Function, groups: Any, rngs: PyTree) -> PyTree:
        # A trace that raised has counted the keys of its dropouts: the next one, or one that JAX
        # makes itself, would draw other masks than the model without a policy.
        held = [x.scope for x in instances_in(vars(module), nn.Module) if x.scope is not None]
        counters = [x.rng_counters for x in (*jax.tree.leaves(scope_fn(groups, rngs)), *held)]
        counts = list(map(dict, counters))

        def restore() -> None:
          for counter, before in zip(counters, counts, strict=True):
            counter.clear()
            counter.update(before)

        def traced_in(active: Active) -> Callable[..., PyTree]:
          def traced(params: Variables, rest: PyTree, args: Args, kwargs: Kwargs) -> PyTree:
            restore()
            state, rngs = rest
            scope = scope_fn((params, state), rngs)
            again = TracedCall(module, *(inputs if has_modules else (args, kwargs)))
            with activate(dataclasses.replace(active, again=[again])):
              outputs = fn(scope, *args, **kwargs)
            # What `capture_intermediates` kept of the method, the call around it keeps too.
            own, key = jax.tree.leaves(scope)[-1], ("intermediates", method.__name__)
            captured = own.get_variable(*key)
            if isinstance(captured, tuple) and captured and captured[-1] is outputs:
              own.put_variable(*key, captured[:-1])
            return (*again.outputs, outputs)[0], repack_fn(scope)

          traced.__name__ = type(module).__name__
          return traced

        def marked(returned: tuple[PyTree, PyTree]) -> PyTree:
          return returned[0], tuple(map(_in_stored_dtypes, returned[1], groups))

        operands = (*mapped(array, (groups[0], (groups[1], rngs))), *call)
        leaves = Boundary(operands[1:]).leaves

        def result_in(active: Active) -> PyTree:
          return rewritten(traced_in(active), operands, active, policy, lambda _: leaves, marked)

        try:
          # Not in `attempts`: Flax counts the names of submodules when it has lifted a method.
          return with_own_dtypes(result_in, active)
        except BaseException:
          restore()
          raise

      filters = (_collections(is_parameter=True), True)
      return lift.pack(inner, filters, filters, (True,), name="policy")(scopes)

    return lift_direct_transform(lifted, (checked,), module, *args, **kwargs)

  return attempts(attempt, python, active, module_path(module))


def _in_order(copy: PyTree, original: PyTree) -> PyTree:
  """Returns Flax's copy of a tree, with the fields of its modules, in the order of the original."""
  leaves, treedef = jax.tree.flatten(original)
  if jax.tree.structure(copy) != treedef:  # It is one that a user's class or interceptor changed.
    return copy
  copies = dict(zip(map(id, leaves), jax.tree.leaves(copy), strict=True))
  for old in leaves:
    new = copies[id(old)]
    if isinstance(old, nn.Module) and new is not old:
      for field in dataclasses.fields(old):
        if field.init and field.name != "parent":
          vars(new)[field.name] = _in_order(getattr(new, field.name), getattr(old, field.name))
  return mapped(lambda x: copies[id(x)], original)


def _in_stored_dtypes(variables: PyTree, stored: PyTree) -> PyTree:
  """Returns variables that keep the dtypes of the stored ones of these names; new ones are free."""
  if isinstance(variables, Mapping):
    there = stored if isinstance(stored, Mapping) else {}
    marked = {name: _in_stored_dtypes(x, there.get(name)) for name, x in variables.items()}
    return marked if isinstance(variables, dict) else cast(Any, type(variables))(marked)
  if jax.tree.structure(variables) != jax.tree.structure(stored):
    return variables

  def leaf(x: Leaf, old: Leaf) -> Leaf:
    return InDtype(x, old.dtype) if isinstance(x, jax.Array) and hasattr(old, "dtype") else x

  return jax.tree.map(leaf, variables, stored)
