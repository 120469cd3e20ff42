"""A call of a module under a policy, of any framework: what all of them do, and the outermost."""

import contextlib
import dataclasses
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast import NotTraceable, Settings, at_rest, leaving, region_of, with_settings
from mpjax._autocast.rewriter import asked_precision
from mpjax._autocast.scopes import AS_GIVEN, REGION, TABLE
from mpjax._core.errors import REFUSALS, MpjaxError, flax_errors, message
from mpjax._core.trees import cast_arrays, cast_leaf, half_to_float32, map_arrays
from mpjax._core.types import FLOAT32, Args, Class, DType, Function, Kwargs, Leaf, Module, PyTree
from mpjax._jaxpr.locations import MODULE, line_of_user
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.active import ACTIVE, AUDIT, EVERY, Active, AuditedModule
from mpjax._policy.policy import Policy
from mpjax._policy.rules import ModulePolicy, is_flax_norm, is_low, rewrites

R = TypeVar("R")
S = TypeVar("S", bound=Active)

_OPS = OpLists()

_OF_DTYPES = (TypeError, NotImplementedError, jax.dtypes.TypePromotionError)
"""Those of JAX and of kernels that are about dtypes, and get a note that says the policy."""

_NOT_NOTED = (MpjaxError, jax.errors.JAXTypeError)
"""What says by itself what is wrong."""

_NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where a body asks a tracer for its values."""


_WHERE = "mpjax.with_policy(model, policy)"


class Layers(NamedTuple):
  """What is known of the layers of a framework. The results of others stay held in float32.

  Fields:
    rounded: they have a `dtype`, and their results are in the compute dtype.
    as_given: they return the dtype that they get, so that a result is held only if that is.
    iterates: they start each step from their own last result, which drifts where it is rounded:
      their own operations are in float32.
    tables: their rows are looked up, which a matmul in float8 would move more than others: their
      own matmuls stay in the compute dtype.
  """

  rounded: tuple[Class, ...] = ()
  as_given: tuple[Class, ...] = ()
  iterates: tuple[Class, ...] = ()
  tables: tuple[Class, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateKind:
  """What becomes of one kind of state: a collection of Linen, a class of variables of NNX.

  Fields:
    neutral: it takes the dtype of what it meets, as parameters do. Other state decides that dtype,
      as arguments do: a float32 table that is added to activations makes them float32.
    stored: the dtype that new state has. "param_dtype" is that of the policy, "computed" the one
      that the model computes it in under the policy, "declared" the one that its code says.
  """

  neutral: bool = False
  stored: Literal["param_dtype", "computed", "declared"] = "declared"


def begins_trace(state: Active, policy: Policy | None, path: str) -> bool:
  """Whether a call of a module in `state` is the outermost one, which is traced and rewritten."""
  return rewrites(policy) and not (
    state.tracing or state.casting == EVERY or path in state.as_python
  )


def rewritten(
  fn: Callable[..., R],
  args: Args,
  state: Active,
  policy: Policy | None,
  data: Callable[[Args], Iterable[Leaf]],
  results: Callable[[R], PyTree] = lambda returned: returned,
) -> R:
  """Returns `fn(*args)`, where `fn` calls modules in `state`, with its operations rewritten.

  `policy` applies where no module marks another. See `with_settings` for the others.
  """
  settings = Settings(policy=policy or Policy(), ops=_OPS, modules=True)
  with ACTIVE(state):
    return with_settings(fn, settings, _WHERE, data=data, results=results)(*args)


def attempts(attempt: Callable[[S], R], python: Callable[[S], R], state: S, path: str) -> R:
  """Returns the result of a call that is traced, in another way where tracing it raises."""
  # What is refused in float32 is traced again with the class of module that raised in its compute
  # dtype: a kernel may take low precision alone. What needs Python runs as Python, and there each
  # module that it calls is traced by itself: where it looks at values, where it changes what is not
  # its own, and where it is refused in both dtypes, perhaps because of the tracers. If Python is
  # refused too, the error is the user's: the first of them.
  first: Exception | None = None
  lines = {cls.__qualname__: "" for cls in state.casting}
  while True:
    failed: list[Class] = []
    try:
      return attempt(dataclasses.replace(state, tracing=True, failed=failed))
    except _NEEDS_VALUES as error:
      reason = f"needs the values of arrays: {line_of_user(error)}"
    except flax_errors("JaxTransformError", "TraceContextError") as error:
      reason = f"changes what it is not given: {line_of_user(error)}"
    except NotTraceable as error:
      reason = str(error)
    except REFUSALS as error:
      first = first or error
      line = line_of_user(error)
      # By name: a class that the call defines is another one in each attempt.
      name = failed[0].__qualname__ if failed else ""
      if name and name not in lines:
        lines[name] = line
        state = dataclasses.replace(state, casting=state.casting | {failed[0]})
        continue
      if lines.get(name) == line:  # Low precision is of no use to this class: it is not cast.
        casting = frozenset(cls for cls in state.casting if cls.__qualname__ != name)
        state = dataclasses.replace(state, casting=casting)
      reason = f"raises {type(error).__name__} where it is traced: {line}"
    break
  state = dataclasses.replace(state, as_python=state.as_python | {path})
  try:
    with ACTIVE(state):
      outputs = python(state)
  except REFUSALS as error:
    # The same error has numbers here, where the traced one has tracers.
    if first is None or type(error) is type(first):
      raise
    raise first from None
  where = _WHERE if state.token is None else "mpjax.policy_scope(policy)"
  warnings.warn(
    message(
      f"{where}: {path or 'the root'}",
      expected="a body that can be traced as a jaxpr",
      got=f"one that {reason}",
      fix="It runs as Python now, and the modules that it calls are rewritten one by one. Write it "
      "with jax.numpy and jax.lax, and return arrays or trees of them.",
    ),
    UserWarning,
    stacklevel=2,
  )
  return outputs


def array(x: Leaf) -> Leaf:
  """Returns an array of JAX where a variable is one of NumPy: variables are never constants."""
  return jnp.asarray(x) if isinstance(x, np.ndarray) else x


class ModuleCall(NamedTuple):
  """A call of a module's method under its policy."""

  module: Module
  path: str  # for errors
  resolved: ModulePolicy
  state: Active  # in which it is called
  inner: Active  # in which its own operations run; the modules inside inherit its policy
  layers: Layers = Layers()

  def run(self, method: Function, args: Args, kwargs: Kwargs, *, initializing: bool = False) -> Any:
    """Calls a method, or a step of its body, in the region of the module; errors name the module.

    While it is `initializing`, parameters are drawn, perhaps in the dtype that its field says.
    """
    state, policy, around = self.inner, self.resolved.policy, ACTIVE.value
    call, fields, casts = (args, kwargs), {}, state.casting == EVERY
    if policy is not None:
      arrays = [x for x in (*args, *kwargs.values()) if isinstance(x, (jax.Array, np.ndarray))]
      # A real `dtype` would drop the imaginary part of a complex array.
      if casts and not any(map(jnp.iscomplexobj, arrays)):
        call = cast_arrays(call, policy.compute_dtype)
      elif policy.compute_dtype == FLOAT32:
        call = map_arrays(half_to_float32, call)
      if casts or not initializing:
        dtype = policy.compute_dtype if casts else FLOAT32
        fields = dtype_field(self.module, dtype, always=casts)
    names: list[str] = []
    if AUDIT.value is not None:
      own = plain_attribute(self.module, "dtype")
      shown = None if own is None else str(getattr(own, "__name__", own))
      name, rule, norm = type(self.module).__name__, self.resolved.rule, is_flax_norm(self.module)
      module = AuditedModule(name, policy, rule, shown, norm, self.resolved.hidden)
      AUDIT.value.note(self.path, module)
      names.append(MODULE + self.path)
    marked = around is not None and around.region == state.region
    # What is traced is rewritten, and the rewriter tells an audit the region of each operation.
    if not marked if state.tracing else AUDIT.value is not None:
      names.append(REGION + state.region)
    in_float8 = policy is not None and policy.matmul is not None
    if state.tracing and in_float8 and isinstance(self.module, self.layers.tables):
      names.append(TABLE)
    if state.tracing and isinstance(self.module, self.layers.as_given):
      names.append(AS_GIVEN)
    with contextlib.ExitStack() as scopes:
      for context in (ACTIVE(state), *map(jax.named_scope, names), _set(self.module, fields)):
        scopes.enter_context(context)
      try:
        return method(*call[0], **call[1])
      except REFUSALS as error:
        if policy is not None and state.failed is not None:
          state.failed.append(type(self.module))
        of_dtypes = isinstance(error, _OF_DTYPES) and not isinstance(error, _NOT_NOTED)
        # One without a text, such as an abstract method raises, says nothing about dtypes.
        if policy is not None and of_dtypes and error.args:
          note_module(error, self.path, type(self.module).__name__, str(policy))
        raise

  @property
  def output_dtype(self) -> DType | None:
    """The dtype that the policy gives the results; None leaves what was computed."""
    policy = self.resolved.policy
    if policy is None:
      return None
    if not self.state.entered:
      return self.resolved.output_dtype
    return policy.output_dtype if self.resolved.begins else None

  def result(self, outputs: PyTree) -> PyTree:
    """Returns what the method returned, or a step of it yielded, in the dtype it is to have."""
    policy, dtype, traced = self.resolved.policy, self.output_dtype, self.state.tracing
    rounds = traced and is_low(policy) and isinstance(self.module, self.layers.rounded)
    if isinstance(outputs, types.GeneratorType):  # Its body runs later, as the method does.
      return self._steps(outputs)
    if policy is None:
      return outputs
    if dtype is None and self.inner.casting == EVERY:
      dtype = policy.compute_dtype
    elif dtype is None and rounds:
      dtype = plain_attribute(self.module, "preferred_element_type")
      if dtype is None:
        # As with its own `dtype=`, but for a layer in a high precision.
        asked = asked_precision(plain_attribute(self.module, "precision"))
        return outputs if asked else at_rest(outputs, policy.compute_dtype.name)
    if dtype is None:
      return outputs
    to, marks = DType(dtype), traced and self.state.casting != EVERY

    def leaf(x: Leaf) -> Leaf:
      return leaving(x, to) if marks and isinstance(x, jax.Array) else cast_leaf(x, to)

    return map_arrays(leaf, outputs)

  def _steps(self, body: Generator[PyTree, PyTree, PyTree]) -> Generator[PyTree, PyTree, PyTree]:
    step, sent = body.send, None
    while True:
      try:
        yielded = self.run(step, (sent,), {})
      except StopIteration as stop:
        return self.result(stop.value)
      try:
        step, sent = body.send, (yield self.result(yielded))
      except BaseException as error:  # GeneratorExit too: the body is to close.
        step, sent = body.throw, error


_NOTE = "mpjax: raised inside"


def note_module(error: Exception, path: str, name: str, policy: str) -> None:
  """Tells an error the innermost module under a policy that it was raised in, and what to do."""
  if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
    return
  # A rule that leaves the root as it is leaves everything as it is.
  rule = f" mpjax.Rule(None, path={path!r}) leaves the module as it is." if path else ""
  advice = (
    "If it is about dtypes, the module's own code mixes them where jax.numpy would promote: cast "
    "there, and start what a loop carries in the dtype of what it meets (x.dtype). For a kernel "
    f'that takes low precision alone put mpjax.Rule("bfloat16", path={path!r}) before other rules, '
    'or choose another one: jax.nn.dot_product_attention(implementation="xla") takes float32.'
    f"{rule}"
  )
  module = f"{path or 'the root'!r} ({name})"
  error.add_note(f"{_NOTE} {module}, which runs under the policy {policy!r}. {advice}")


def call_of(
  module: Module, path: str, resolved: ModulePolicy, state: Active, layers: Layers
) -> ModuleCall:
  policy = resolved.policy
  # In float64 there is no jaxpr to rewrite: all there is has to be cast.
  wide = policy is not None and policy.compute_dtype.itemsize > FLOAT32.itemsize
  casts = wide or not state.casting.isdisjoint({object, type(module)})
  iterates = isinstance(module, layers.iterates) and is_low(policy)
  inner = dataclasses.replace(
    state,
    around=resolved.inherited(),
    entered=True,
    region=region_of(Policy() if iterates else policy),
    casting=EVERY if casts else state.casting,
  )
  return ModuleCall(module, path, resolved, state, inner, layers)


@contextlib.contextmanager
def _set(module: Module, fields: dict[str, object]) -> Generator[None]:
  """Sets attributes of a module for the length of a call, without what its class does then."""
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
  """Returns the field `dtype` to set for the length of a call, if the module has one to set."""
  # A module whose own dtype (or `param_dtype`) is complex or an integer means what it says, and so
  # does one whose field is no dtype. Unless `always` one in low precision is set, which would
  # round.
  own = plain_attribute(module, "dtype", _MISSING)
  if own is _MISSING or (own is None and not always):
    return {}
  fields = dataclasses.fields(module) if dataclasses.is_dataclass(module) else None
  if fields is not None and not any(f.name == "dtype" and f.init for f in fields):
    return {}
  if not (_is_real(own) and _is_real(plain_attribute(module, "param_dtype"))):
    return {}
  if not always and jnp.dtype(own).itemsize >= dtype.itemsize:
    return {}
  # Code compares with `is jnp.bfloat16`, or looks a name up: it gets what it had.
  return {"dtype": dtype.name if isinstance(own, str) else getattr(jnp, dtype.name)}


_MISSING = object()


def plain_attribute(module: Module, name: str, default: object = None) -> Any:
  """Returns an attribute that is a value, without running code of the user's; else `default`."""
  # A property of a module may call one of its methods, read a parameter, or set up submodules. It
  # computes a dtype rather than holding one, so that there is nothing in it to set.
  value = inspect.getattr_static(module, name, default)
  return default if hasattr(type(value), "__get__") else value


def _is_real(dtype: Any) -> bool:
  """Whether `dtype` is unset or a floating dtype."""
  try:
    return dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False
