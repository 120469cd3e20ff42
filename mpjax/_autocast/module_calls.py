"""Call the modules of any framework under a policy; trace and rewrite the outermost call."""

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.autocast import with_settings
from mpjax._autocast.boundary import NotTraceable
from mpjax._autocast.kernels import KernelInFloat32, check_kernels
from mpjax._autocast.precision import asked_precision, default_precision
from mpjax._autocast.scopes import (
  AS_GIVEN,
  OWN_DTYPE,
  TABLE,
  Settings,
  end_of_layer,
  end_of_policy,
  mark_of,
)
from mpjax._core.errors import REFUSALS, MpjaxError, flax_errors, message
from mpjax._core.trees import cast_arrays, cast_leaf, low_to_float32, map_arrays
from mpjax._core.types import FLOAT32, Args, Class, DType, Function, Kwargs, Leaf, Module, PyTree
from mpjax._jaxpr.locations import MODULE, line_of_user
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.active import ACTIVE, AUDIT, AUTOCAST, EVERY, Active, Region
from mpjax._policy.audit_record import AuditedModule
from mpjax._policy.layers import Layers
from mpjax._policy.policy import Policy
from mpjax._policy.rules import ModulePolicy, computes_in_half, is_flax_norm

R = TypeVar("R")
S = TypeVar("S", bound=Active)

_OPS = OpLists()

_OF_DTYPES = (TypeError, NotImplementedError, jax.dtypes.TypePromotionError)
"""Errors of JAX and of kernels that may be about dtypes. They get a note that names the policy."""

_NOT_NOTED = (MpjaxError, jax.errors.JAXTypeError)
"""Errors that need no such note."""

_NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""Errors that JAX raises if a body reads the values of a tracer."""

_CHANGES_OTHERS = ("JaxTransformError", "TraceContextError")
"""Errors that Flax raises if a body changes a module that is not among its arguments."""

_WHERE = "mpjax.with_policy(model, policy)"


def begins_trace(state: Active, path: str) -> bool:
  """Whether a call of a module in `state` is the outermost one, which is traced and rewritten."""
  return not (state.tracing or state.casting == EVERY or path in state.as_python)


def call_rewritten(
  fn: Callable[..., R],
  args: Args,
  state: Active,
  inputs: Callable[[Args], Iterable[Leaf]],
  results: Callable[[R], PyTree] = lambda returned: returned,
) -> R:
  """Returns `fn(*args)` with rewritten operations; `fn` calls modules in `state`.

  Args:
    fn: the function.
    args: its arguments, trees of arrays.
    state: the active state of the call, from `attempts`. Operations without a mark have its region.
    inputs: returns the leaves of the arguments that are inputs. The others are parameters.
    results: see `with_settings`.
  """
  settings = Settings(region=state.region or Region(None), ops=_OPS, modules=True)
  # Also if no module runs in this trace: a jitted function that was traced before keeps its marks.
  check = functools.partial(check_kernels, kept=state.keeping)
  with ACTIVE(state):
    call = with_settings(fn, settings, _WHERE, data=inputs, results=results, check_kernels=check)
    return call(*args)


def with_own_dtypes(attempt: Callable[[S], R], state: S) -> R:
  """Returns `attempt(state)`, where modules keep a `dtype` that their kernels need."""
  # Each round keeps the `dtype` of more classes, so this ends.
  while True:
    try:
      return attempt(state)
    except KernelInFloat32 as error:
      state = dataclasses.replace(state, keeping=state.keeping | error.classes)


def in_compute_dtype(attempt: Callable[[S], R], state: S) -> R:
  """Returns `attempt(state)`, with classes of modules that raise in float32 in the compute dtype.

  If a class raises in both dtypes, the caller gets the first error.
  """
  first: Exception | None = None
  # Names are compared, since a class that the call itself defines is a new one in each attempt.
  names = {cls.__qualname__ for cls in state.casting}
  while True:
    failed: list[Class] = []
    try:
      return attempt(dataclasses.replace(state, failed=failed))
    except REFUSALS as error:
      first = first or error
      if not failed or failed[0].__qualname__ in names:
        raise first from None
      names.add(failed[0].__qualname__)
      state = dataclasses.replace(state, casting=state.casting | {failed[0]})


def attempts(
  attempt: Callable[[S], R], python: Callable[[S], R], state: S, policy: Policy | None, path: str
) -> R:
  """Returns the result of a call of a module, traced if possible and otherwise run as Python.

  Some kernels take only low precision. If a class of module raises in float32, the next attempt
  calls it in its compute dtype. A body that cannot be traced runs as Python. The modules that it
  calls are then traced one by one. If Python raises too, the caller gets the first error. If both
  have the same class, the caller gets the error of Python, which shows numbers and not tracers.

  Args:
    attempt: traces the call in a state.
    python: runs the call in a state without tracing it.
    state: the state around the call.
    policy: the policy of the called module.
    path: the path of the module, for the warning.
  """
  # Operations without a mark then have the policy of the module, so its own need none.
  state = dataclasses.replace(state, region=Region(policy))
  # Why the body cannot be traced, for the warning; None if another attempt may succeed.
  problem: str | None = None
  # The first error of a function that does not accept its arguments.
  refusal: Exception | None = None
  # The line at which each class raised in float32. Names are compared, since a class that the call
  # itself defines is a new class in each attempt.
  lines = {cls.__qualname__: "" for cls in state.casting}
  while problem is None:
    # `ModuleCall` appends the class of each module that an error passes, the innermost first.
    failed: list[Class] = []
    try:
      next_state = dataclasses.replace(state, tracing=True, failed=failed)
      return with_own_dtypes(attempt, next_state)
    except _NEEDS_VALUES as error:
      problem = f"needs the values of arrays: {line_of_user(error)}"
    except flax_errors(*_CHANGES_OTHERS) as error:
      line = line_of_user(error)
      problem = f"changes a module or variable that is not among its arguments: {line}"
    except NotTraceable as error:
      problem = str(error)
    except REFUSALS as error:
      refusal, line = refusal or error, line_of_user(error)
      name = failed[0].__qualname__ if failed else None
      if name is not None and name not in lines:
        # The next attempt calls the class in its compute dtype.
        lines[name] = line
        state = dataclasses.replace(state, casting=state.casting | {failed[0]})
        continue
      if name is not None and lines[name] == line:
        # The compute dtype did not help, so the class is called in float32 again.
        casting = frozenset(cls for cls in state.casting if cls.__qualname__ != name)
        state = dataclasses.replace(state, casting=casting)
      # It raises in both dtypes, perhaps because of the tracers.
      problem = f"raises {type(error).__name__} where it is traced: {line}"
  state = dataclasses.replace(state, as_python=state.as_python | {path})
  try:
    with ACTIVE(state):
      outputs = python(state)
  except REFUSALS as error:
    first = refusal or error
    if type(error) is type(first):
      raise
    raise first from None
  # Python has succeeded, so only now the warning is true.
  where = _WHERE if state.token is None else "mpjax.policy_scope(policy)"
  warnings.warn(
    message(
      f"{where}: {path or 'the root'}",
      expected="a body that can be traced as a jaxpr",
      got=f"one that {problem}",
      fix="It runs as Python now, and the modules that it calls are rewritten one by one. Write it "
      "with jax.numpy and jax.lax, and return arrays or trees of them.",
    ),
    UserWarning,
    stacklevel=2,
  )
  return outputs


def array(x: Leaf) -> Leaf:
  """Returns a NumPy array as a JAX array, so that a variable is not a constant of the trace."""
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def module_call(
  module: Module,
  path: str,
  resolved: ModulePolicy,
  state: Active,
  layers: Layers,
  *,
  initializing: bool = False,
) -> "ModuleCall":
  """Returns the call of a module. A rule with `rewrite=False` has no effect while initializing."""
  policy = resolved.policy
  # Float64 is not rewritten, so the arguments of the module are cast.
  is_float64 = policy is not None and policy.compute_dtype.itemsize > FLOAT32.itemsize
  is_whole = resolved.rule is not None and not resolved.rule.rewrite and not initializing
  # `casting` is `EVERY` inside of a module that is called in the compute dtype.
  is_cast = is_float64 or is_whole or state.casting == EVERY or type(module) in state.casting
  region = Region(policy)
  # Its own operations run in float32, while the modules inside keep the policy. Its matmuls ask for
  # the highest precision unless one is named, like all matmuls that a policy keeps in float32.
  if policy is not None and computes_in_half(policy) and isinstance(module, layers.iterates):
    is_named = policy.precision is not None or default_precision() is not None
    region = Region(Policy(precision=None if is_named else "highest"))
  if is_whole and policy is not None:
    region = Region(None, called_in=policy.compute_dtype)
  inner = dataclasses.replace(
    state,
    around=resolved.inherited(),
    entered=True,
    region=region,
    casting=EVERY if is_cast else state.casting,
    keeps_dtypes=state.keeps_dtypes or type(module).__qualname__ in state.keeping,
  )
  around = state.region
  is_inside_whole = state.casting == EVERY and around is not None and around.called_in is not None
  # The outermost module has the `output_dtype` of the model's policy, if its own has none. Among
  # inner modules, only one with which another policy begins returns the dtype of that policy.
  output_dtype = None
  if policy is not None and not state.entered:
    output_dtype = resolved.output_dtype
  elif policy is not None and resolved.begins:
    output_dtype = policy.output_dtype
  return ModuleCall(
    module,
    path,
    resolved,
    state,
    inner,
    layers,
    is_cast=is_cast,
    is_inside_whole=is_inside_whole,
    output_dtype=output_dtype,
    initializing=initializing,
  )


class ModuleCall(NamedTuple):
  """A call of a module's method under its policy."""

  module: Module
  path: str  # for errors
  resolved: ModulePolicy
  state: Active  # the state of the call
  inner: Active  # the state of its own operations; submodules inherit its policy
  layers: Layers
  is_cast: bool  # whether the module is called in its compute dtype, not in float32
  # Whether a module around it runs as a whole, whose code passes arguments and results.
  is_inside_whole: bool
  output_dtype: DType | None  # the dtype that the policy gives the results; None keeps theirs
  initializing: bool  # whether it is in `init`

  def run(self, method: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a method, or a step of a generator, in the region of the module."""
    module, inner, policy = self.module, self.inner, self.resolved.policy
    # The fields of the module to set during the call.
    fields: dict[str, object] = {}
    is_replaced = False  # whether float32 replaces the module's own `dtype`
    if policy is not None and self.is_cast:
      fields = dtype_field(module, policy.compute_dtype, always=True)
    elif policy is not None:
      # In `init`, the module may draw its parameters in its own `dtype`.
      keeps_own = self.initializing or (inner.keeps_dtypes and computes_in_half(policy))
      fields = {} if keeps_own else dtype_field(module, FLOAT32, always=False)
      is_replaced = bool(fields) and computes_in_half(policy)
    if policy is not None:
      arrays = [x for x in (*args, *kwargs.values()) if isinstance(x, (jax.Array, np.ndarray))]
      # A real `dtype` would drop the imaginary part of a complex array.
      is_real = not any(map(jnp.iscomplexobj, arrays))
      if self.is_cast and not self.is_inside_whole and is_real:
        args, kwargs = cast_arrays((args, kwargs), policy.compute_dtype)
      elif policy.compute_dtype == FLOAT32:
        args, kwargs = map_arrays(low_to_float32, (args, kwargs))

    marks = self._marks(is_replaced=is_replaced)
    with contextlib.ExitStack() as scopes:
      scopes.enter_context(ACTIVE(inner))
      for name in marks:
        scopes.enter_context(jax.named_scope(name))
      if fields:
        scopes.enter_context(_set(module, fields))
      try:
        return method(*args, **kwargs)
      except REFUSALS as error:
        if policy is not None and inner.failed is not None:
          inner.failed.append(type(module))
        of_dtypes = isinstance(error, _OF_DTYPES) and not isinstance(error, _NOT_NOTED)
        # The error of an abstract method has no text.
        if policy is not None and of_dtypes and error.args:
          _note_module(error, self.path, type(module).__name__, str(policy))
        raise

  def _marks(self, *, is_replaced: bool) -> list[str]:
    """Returns the marks of the module's operations, and notes the module for an audit.

    `is_replaced` says whether float32 replaces the module's own `dtype`.
    """
    module, inner, policy = self.module, self.inner, self.resolved.policy
    marks: list[str] = []
    if AUDIT.value is not None:
      marks.append(MODULE + self.path)
      own = plain_attribute(module, "dtype")
      shown = None if own is None else str(getattr(own, "__name__", own))
      name, norm = type(module).__name__, is_flax_norm(module)
      rule, hidden = self.resolved.rule, self.resolved.hidden
      AUDIT.value.note(self.path, AuditedModule(name, policy, rule, shown, norm, hidden))
    around = ACTIVE.value
    if not inner.tracing:  # Only an audit, or a rewriting around, reads the mark.
      is_marked = AUDIT.value is not None or AUTOCAST.value is not None
    else:  # The operations inherit the mark of the module around if it names the same policy.
      is_marked = around is None or around.region != inner.region
    if is_marked and inner.region is not None:
      marks.append(mark_of(inner.region))
    if inner.tracing:  # Only the rewriter reads the other marks.
      in_format = policy is not None and policy.matmul is not None
      if in_format and isinstance(module, self.layers.tables):
        marks.append(TABLE)
      if isinstance(module, self.layers.as_given):
        marks.append(AS_GIVEN)
      if is_replaced:
        marks.append(OWN_DTYPE + type(module).__qualname__)
    return marks

  def result(self, outputs: PyTree) -> PyTree:
    """Returns the result of the method, or of a step of a generator, in its dtype."""
    if isinstance(outputs, types.GeneratorType):  # Its body runs later.
      return self._steps(outputs)
    policy = self.resolved.policy
    if policy is None:
      return outputs
    # Whether the results are rounded to the compute dtype, as with `dtype=`.
    is_layer = isinstance(self.module, self.layers.rounded) and self.state.tracing
    is_rounded = is_layer and computes_in_half(policy) and not self.is_inside_whole
    dtype = self.output_dtype
    if dtype is None and self.is_cast:
      dtype = None if self.is_inside_whole else policy.compute_dtype
    elif dtype is None and is_rounded:
      # A layer's `preferred_element_type` is the user's choice.
      dtype = plain_attribute(self.module, "preferred_element_type")
    # An audit counts the cast of a result to the module, to which a rule for it applies too.
    audited = contextlib.nullcontext()
    if AUDIT.value is not None:
      audited = jax.named_scope(MODULE + self.path)
    if dtype is None:
      # Unlike with `dtype=`, a layer in a high precision is not rounded.
      in_high_precision = asked_precision(plain_attribute(self.module, "precision"))
      if not is_rounded or in_high_precision:
        return outputs
      with audited:
        return end_of_layer(outputs, policy.compute_dtype.name)
    # The rewriter casts traced results, unless the whole call is in the compute dtype.
    is_rewritten, dtype = self.state.tracing and self.state.casting != EVERY, DType(dtype)

    def leaf(x: Leaf) -> Leaf:
      if is_rewritten and isinstance(x, jax.Array):
        return end_of_policy(x, dtype)
      return cast_leaf(x, dtype)

    with audited:
      return map_arrays(leaf, outputs)

  def _steps(self, body: Generator[PyTree, PyTree, PyTree]) -> Generator[PyTree, PyTree, PyTree]:
    """Runs a generator, each step in the region of the module."""
    # As `yield from` does, but between two steps the caller's state must be active.
    resume, sent = body.send, None
    while True:
      try:
        yielded = self.run(resume, (sent,), {})
      except StopIteration as stop:
        return self.result(stop.value)
      try:
        resume, sent = body.send, (yield self.result(yielded))
      except BaseException as error:  # `GeneratorExit` closes the body.
        resume, sent = body.throw, error


_NOTE = "mpjax: raised inside"


def _note_module(error: Exception, path: str, name: str, policy: str) -> None:
  """Adds a note with the innermost module that raised, its policy and remedies to an error."""
  # The error passes all modules around. The innermost one has seen it first.
  if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
    return
  # Exempting the root would exempt everything.
  rule = f" mpjax.Rule(None, path={path!r}) leaves the module as it is." if path else ""
  advice = (
    "If it is about dtypes, the module mixes them where jax.numpy would promote: cast there, and "
    "start a loop in the dtype that its body returns (x.dtype). A kernel that takes low precision "
    "alone is called as mpjax.low_precision(kernel)(x), and where the policy computes in float32, "
    f'put mpjax.Rule("bfloat16", path={path!r}) before other rules. '
    'Or choose another kernel: jax.nn.dot_product_attention(implementation="xla") takes float32.'
    f"{rule}"
  )
  module = f"{path or 'the root'!r} ({name})"
  error.add_note(f"{_NOTE} {module}, which runs under the policy {policy!r}. {advice}")


@contextlib.contextmanager
def _set(module: Module, fields: dict[str, object]) -> Generator[None]:
  """Sets attributes of a module during a call, without its `__setattr__`."""
  # A Linen module is frozen, so its `__setattr__` would raise.
  attributes = vars(module)
  before = {name: attributes[name] for name in fields if name in attributes}
  attributes.update(fields)
  try:
    yield
  finally:
    for name in fields.keys() - before.keys():
      attributes.pop(name, None)
    attributes.update(before)


def dtype_field(module: Module, dtype: DType, *, always: bool) -> dict[str, object]:
  """Returns the field `dtype` to set during a call, if the module has one.

  With `always` it is set to `dtype` in any case. Otherwise only a narrower floating dtype is
  replaced, since it would round.
  """
  own = plain_attribute(module, "dtype", _MISSING)
  if own is _MISSING or (own is None and not always):
    return {}
  # In a dataclass, only a `dtype` that is an argument of `__init__` is the user's choice.
  fields = dataclasses.fields(module) if dataclasses.is_dataclass(module) else None
  if fields is not None and not any(f.name == "dtype" and f.init for f in fields):
    return {}
  # Complex and integer modules keep their dtype.
  if not (_is_real(own) and _is_real(plain_attribute(module, "param_dtype"))):
    return {}
  if not always and jnp.dtype(own).itemsize >= dtype.itemsize:
    return {}
  # Code may compare with `is jnp.bfloat16` or look up a name, so the type of `dtype` stays.
  return {"dtype": dtype.name if isinstance(own, str) else getattr(jnp, dtype.name)}


_MISSING = object()


def plain_attribute(module: Module, name: str, default: object = None) -> Any:
  """Returns an attribute without running user code; `default` for a property."""
  # A property may call methods, read parameters or set up submodules, and cannot be set.
  value = inspect.getattr_static(module, name, default)
  return default if hasattr(type(value), "__get__") else value


def _is_real(dtype: Any) -> bool:
  """Whether `dtype` is unset or a floating dtype."""
  try:
    return dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False
