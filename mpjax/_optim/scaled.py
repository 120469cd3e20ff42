"""A loss whose backward pass runs at a scale, under any differentiator.

Values enter the loss and leave it through identities, which scale only cotangents. The cotangent
of a result is multiplied by the scale, and the cotangent of each value that enters is divided by
it. A derivative of the loss is therefore that of the loss without a scale.
"""

import functools
import math
import numbers
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.tree_util import default_registry

from mpjax._autocast.boundary import tracers_in
from mpjax._core.errors import MpjaxTypeError, check_call, check_callable, flax_errors, kind_of
from mpjax._core.frameworks import (
  framework_of,
  haiku_state,
  is_nnx_object,
  is_nnx_variable,
  kind_of_model,
)
from mpjax._core.trees import mapped
from mpjax._core.types import (
  Args,
  Array,
  Function,
  Kwargs,
  Leaf,
  Module,
  OptState,
  P,
  PyTree,
  is_inexact,
  is_low_precision,
)
from mpjax._core.wrappers import wraps
from mpjax._jaxpr.compat import varying_axes
from mpjax._optim.find_scale import find_scale, scale_reader
from mpjax._optim.loss_scale import positive_scale
from mpjax._optim.optimizer_trees import at_least_float32
from mpjax._policy.active import AUDIT

_CALL = "mpjax.scaled"
_WHERE = f"{_CALL}(loss_fn, opt_state)"
_FIX = (
  f"Write jax.value_and_grad({_CALL}(loss_fn, opt_state))(params, batch). With Flax NNX pass the "
  f"optimizer: nnx.value_and_grad({_CALL}(loss_fn, optimizer))(model, batch)."
)


@check_call(_WHERE, fix=_FIX)
def scaled(
  loss_fn: Callable[P, Any], opt_state: OptState | Array | float, *, name: str | None = None
) -> Callable[P, Any]:
  """Run the backward pass of a loss at a scale. Its value and its gradients stay the same.

  Float16 rounds gradients below 3e-8 to zero. In the backward pass of the returned function, the
  cotangents are multiplied by the scale, as in Micikevicius et al., "Mixed Precision Training"
  (2018), section 3.2. They are divided by it, in float32, before they reach the caller. So any
  differentiator can be used: `jax.grad`, `nnx.value_and_grad`, `equinox.filter_grad`, or one inside
  of a trainer. Derivatives by values that the loss closes over are right too. If such a value is
  traced, the loss is traced to a jaxpr, so that Python cannot branch on traced values.

  **Build it inside the step**, from the state that the step is given, because the function keeps
  the scale of that state. An overflow reaches the caller as NaN, which a clip does not hide.

  Args:
    loss_fn: returns arrays in any tree, such as a loss or `(loss, aux)`. A float16 loss is cast to
      float32. If it writes to Flax NNX objects among its arguments, these objects are updated.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`, an `nnx.Optimizer`, or a
      positive number. Powers of two change no bit.
    name: which of several loss scales to use.

  Returns:
    A function with the signature of `loss_fn`. With `NoLossScale` and `SkipNonfinite` it is
    `loss_fn` itself.

  Raises:
    MpjaxTypeError: `loss_fn` is no function, or a method of an NNX module; the state has no loss
      scale, or several. When called: the loss writes to an NNX object that it closes over. When
      differentiated: a parameter is stored in float16 or float8.
    MpjaxValueError: no scale is called `name`, or the number is no usable scale.
    MpjaxRuntimeError: when called: a dynamic scale would be a constant of the trace, or the state
      was donated.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):  # Its gradient is 2^-26, and float16 ends at 2^-24.
  ...   return jnp.sum(w.astype(jnp.float16) * x * x).astype(jnp.float32)
  >>> w, x = jnp.ones(2), jnp.full(2, 2.0**-13, jnp.float16)
  >>> print(jax.grad(loss_fn)(w, x), jax.grad(mpjax.scaled(loss_fn, 2.0**15))(w, x) * 2**26)
  [0. 0.] [1. 1.]
  """
  _check_loss_fn(loss_fn)
  read: Callable[[PyTree], Any]
  if isinstance(opt_state, (numbers.Number, np.ndarray, np.generic, jax.Array)):
    read, largest = _number_reader(opt_state)
  else:
    owned = find_scale(opt_state, f"{_CALL}(opt_state)", name)
    if not owned.multiplies:
      return loss_fn
    read, largest = scale_reader(owned, _WHERE), owned.largest

  @wraps(loss_fn, updated=())
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
    if AUDIT.value is not None:
      AUDIT.value.uses.add("loss scale")  # The audit lists features that the function uses.
    call = _Call(loss_fn, args, kwargs)
    scale = read(call.reads)
    try:
      return call.at(scale, largest)
    except _OverflowsFloat16:
      # Only the call shows the dtype of the loss, when its arguments have entered already.
      return call.at(jnp.minimum(scale, jnp.float32(_FLOAT16_LIMIT)), _FLOAT16_LIMIT)

  return wrapper


_FLOAT16_LIMIT = 2.0**15
"""The largest scale whose product with a cotangent of 1 is finite in float16."""


class _OverflowsFloat16(Exception):
  """The loss is in float16, and the scale may be too large for its cotangent."""


def _check_loss_fn(loss_fn: object) -> None:
  """Raises unless `loss_fn` is a function whose arguments can be differentiated."""
  expected = "the function that computes the loss as the first argument"
  check_callable(loss_fn, f"{_CALL}(loss_fn)", expected=expected, fix=_FIX)
  is_method = isinstance(loss_fn, types.MethodType)
  owner = loss_fn.__self__ if is_method else loss_fn
  if framework_of(owner) == "NNX":
    expected = "a function that is given the model as an argument"
    got, call = kind_of_model(owner), "loss(model(x))"
    if is_method:
      got, call = f"a method of the model ({loss_fn.__qualname__})", "model.loss(x)"
    fix = f"Write lambda model, x: {call}, so that the model is differentiated."
    raise MpjaxTypeError(_WHERE, expected=expected, got=got, fix=fix)


def _number_reader(number: Any) -> tuple[Callable[[PyTree], Array], float]:
  """Returns a function that returns a scale given as a number, and the largest that it may be."""
  where = f"{_CALL}(opt_state)"
  if not isinstance(number, Tracer):
    value = positive_scale(number, where)
    return lambda beside: jnp.float32(value), value
  if number.shape != () or not jnp.issubdtype(number.dtype, jnp.floating):
    expected, fix = "a floating scale of shape ()", "Pass one number, or the optimizer's state."
    raise MpjaxTypeError(where, expected=expected, got=kind_of(number), fix=fix)
  return lambda beside: number.astype(jnp.float32), math.inf


# A call.


class _Border:
  """The border of a loss. Traced values cross it through identities, which scale cotangents."""

  def __init__(self, scale: Array) -> None:
    # As an integer, because policies cast no integers, and derivatives ignore them.
    self._bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    # By the id of the value inside: that value, so that its id stays in use, and the one outside.
    self._entered: dict[int, tuple[Leaf, Leaf]] = {}

  def enter(self, x: Leaf) -> Leaf:
    """Returns a value for the inside. Its cotangent is divided by the scale."""
    # Only traced arrays have cotangents.
    if not _is_inexact_tracer(x):
      return x
    inside = self._cross(x, divide=True)
    self._entered[id(inside)] = inside, x
    return inside

  def leave(self, x: Leaf) -> Leaf:
    """Returns a value for the outside. Its cotangent is multiplied by the scale."""
    if id(x) in self._entered:
      return self._entered[id(x)][1]
    return self._cross(x, divide=False) if _is_inexact_tracer(x) else x

  def axes_to_add(self, x: Array) -> tuple[str, ...]:
    """Returns the axes of a `shard_map` over which the scale varies, and a value does not."""
    own = varying_axes(jax.typeof(x))
    return tuple(axis for axis in varying_axes(jax.typeof(self._bits)) if axis not in own)

  def _cross(self, x: Array, *, divide: bool) -> Array:
    # The cotangents of each device are divided by its own scale, before they are summed.
    axes = self.axes_to_add(x)
    varying = jax.lax.pcast(x, axes, to="varying") if axes else x
    return scale_cotangent_p.bind(varying, self._bits, divide=divide)


def _is_inexact_tracer(x: object) -> bool:
  return isinstance(x, Tracer) and isinstance(x, jax.Array) and is_inexact(x)


class _Call:
  """A call of a loss.

  Attributes:
    reads: trees with all values that the loss reads, but for constants.
  """

  def __init__(self, loss_fn: Function, args: Args, kwargs: Kwargs) -> None:
    self._loss_fn, self._arguments = loss_fn, (args, kwargs)
    leaves = jax.tree.leaves(self._arguments, is_leaf=is_nnx_object)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    # Objects of NNX to which the loss may write. It reads others as if it closed over them.
    self._objects = [x for x in leaves if is_nnx_object(x) and _is_writable(x)]
    known = set(map(id, (*arrays, *self._objects)))
    others = [x for x in leaves if id(x) not in known]
    # Iterators count as traced, since their variables cannot be read.
    found = tracers_in([loss_fn, others, *_static_parts(self._arguments), haiku_state()])
    self._captured = [x for x in found if not isinstance(x, Tracer) or is_inexact(x)]
    values = [held for _, held in _contents_of(_parts_of(self._objects))]
    self.reads = [arrays, values, self._captured]

  def at(self, scale: Array, largest: float) -> Any:
    """Returns the result of the loss, with cotangents at a scale of at most `largest`."""
    border = _Border(scale)
    run = functools.partial(self._run, largest)
    return self._from_jaxpr(run, border) if self._captured else self._called(run, border)

  def _run(self, largest: float, args: Args, kwargs: Kwargs) -> Any:
    """Returns the result of the loss. A float16 loss is cast to float32."""
    result = self._loss_fn(*args, **kwargs)
    loss, *rest = result if type(result) is tuple else (result,)
    if not isinstance(loss, jax.Array) or loss.dtype != jnp.float16:
      return result
    if largest > _FLOAT16_LIMIT:
      raise _OverflowsFloat16
    return (loss.astype(jnp.float32), *rest) if type(result) is tuple else loss.astype(jnp.float32)

  def _called(self, run: Function, border: _Border) -> Any:
    """Calls the loss with arguments that have entered."""
    args, kwargs = mapped(border.enter, self._arguments, is_nnx_object)
    parts = _parts_of(self._objects)
    before = _contents_of(parts)
    _replace(parts, border.enter)
    try:
      result = run(args, kwargs)
    except BaseException:
      _restore(before)  # The loss may be called again.
      raise
    # The loss may have added or removed parts. The value of each must leave once.
    own = {id(part): part for part in (*parts, *_parts_of(self._objects))}
    _replace(list(own.values()), border.leave)
    return mapped(border.leave, result, lambda x: id(x) in own)

  def _from_jaxpr(self, run: Function, border: _Border) -> Any:
    """Traces the loss, and evaluates its jaxpr for constants that have entered."""
    if not self._objects:
      return _evaluated(lambda: run(*self._arguments), border)
    # Objects cannot be written inside of another trace, so the loss is given copies. In this
    # context NNX maps each copy to its original, and puts the changes there.
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_CALL):
      tree = nnx.to_tree(self._objects, ctxtag=_CALL)

      def of_copies() -> PyTree:
        copies = nnx.from_tree(tree, is_inner=True, ctxtag=_CALL)
        pairs = zip(self._objects, copies, strict=True)
        copy_of = {id(original): copy for original, copy in pairs}
        args, kwargs = mapped(lambda x: copy_of.get(id(x), x), self._arguments, is_nnx_object)
        return nnx.to_tree((run(args, kwargs), copies), ctxtag=_CALL)

      result, _ = nnx.from_tree(_evaluated(of_copies, border), is_inner=False, ctxtag=_CALL)
      return result


def _static_parts(tree: PyTree) -> Iterator[object]:
  """Yields what the nodes of a tree hold beside their children, such as the `apply_fn` of Flax."""
  is_leaf = isinstance(tree, jax.Array) or is_nnx_object(tree)
  node = None if is_leaf else default_registry.flatten_one_level(tree)
  if node is not None:
    children, static = node
    yield static
    for child in children:
      yield from _static_parts(child)


def _evaluated(call: Callable[[], PyTree], border: _Border) -> PyTree:
  """Traces a function, and evaluates its jaxpr for constants that have entered."""
  results: list[PyTree] = []

  def arrays() -> list[Array]:
    computed: list[Array] = []

    def position(x: Leaf) -> Leaf:
      if not (isinstance(x, Tracer) and isinstance(x, jax.Array)):
        return x
      computed.append(x)
      return _Position(len(computed) - 1)

    # No tracer may outlive its trace.
    results.append(mapped(position, call()))
    return computed

  before = set(map(id, haiku_state()))
  try:
    program = jax.make_jaxpr(arrays)()
  except flax_errors("TraceContextError") as error:
    got = "one that writes to flax.nnx variables, such as statistics or random counters"
    fix = "Pass the model to the loss as an argument, and differentiate with nnx.value_and_grad."
    raise _impure(got, fix) from error
  if any(isinstance(x, Tracer) and id(x) not in before for x in haiku_state()):
    got = "one that creates parameters or state, or draws a key, inside hk.transform"
    raise _impure(got, "Transform the loss first: mpjax.scaled(hk.transform(loss_fn).apply, ...).")
  # The jaxpr may make these arrays vary itself, and JAX does not let it do so twice.
  if any(map(border.axes_to_add, filter(_is_inexact_tracer, program.consts))):
    got = "one that closes over an array which is the same on all devices, at scales that differ"
    raise _impure(got, "Pass all traced arrays that the loss reads to it as arguments.")
  computed = eval_jaxpr(program.jaxpr, [border.enter(x) for x in program.consts])
  outside = [border.leave(x) for x in computed]
  return mapped(lambda x: outside[x] if isinstance(x, _Position) else x, results[-1])


class _Position(int):
  """The position of an array among the results of a jaxpr."""


def _impure(got: str, fix: str) -> MpjaxTypeError:
  expected = "a loss whose traced values are arguments, or that has no side effects"
  return MpjaxTypeError(_WHERE, expected=expected, got=got, fix=fix)


# Objects of NNX among the arguments.


def _parts_of(objects: Sequence[Module]) -> list[Module]:
  """Returns the modules and variables in objects of NNX, those of shared objects once."""
  if not objects:
    return []
  graph = sys.modules["flax.nnx"].iter_graph(objects, graph=True)
  return [x for _, x in graph if is_nnx_object(x)]


def _replace(parts: Sequence[Module], change: Callable[[Leaf], Leaf]) -> None:
  """Replaces the values of variables, and arrays in attributes of modules."""
  for part in parts:
    if not is_nnx_variable(part):
      attributes = vars(part)
      attributes.update({k: mapped(change, x, is_nnx_object) for k, x in attributes.items()})
    elif (new := mapped(change, old := part.get_raw_value())) is not old:
      part.set_raw_value(new)


def _contents_of(parts: Sequence[Module]) -> list[tuple[Module, Any]]:
  """Returns the value of each variable, and the attributes of each module."""
  return [(x, x.get_raw_value() if is_nnx_variable(x) else dict(vars(x))) for x in parts]


def _restore(contents: Sequence[tuple[Module, Any]]) -> None:
  """Puts contents that `_contents_of` returned back into variables and modules."""
  for part, held in contents:
    if is_nnx_variable(part):
      part.set_raw_value(held)
    else:
      vars(part).clear()
      vars(part).update(held)


def _is_writable(x: Module) -> bool:
  """Whether an object of NNX may be written. One from outside of the current trace may not."""
  try:
    _restore(_contents_of([*filter(is_nnx_variable, _parts_of([x]))]))
  except flax_errors("TraceContextError"):
    return False
  return True


# The identities.

scale_cotangent_p = Primitive("scale_cotangent")
"""A value, whose cotangent is multiplied by a scale, or divided by it.

Its operands are the value and the bits of the scale, whose axes are the first axes of the value.
The transpose is `scale_value` instead of a product, because second derivatives transpose it again,
and the transpose of a product would apply the scale twice.
"""

scale_value_p = Primitive("scale_value")
"""A value, multiplied by a scale or divided by it, whose cotangent stays as it is.

It and `scale_cotangent` are the transposes of each other.
"""


def _scale_value(x: Array, bits: Array, *, divide: bool) -> Array:
  scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
  wide = at_least_float32(x)  # In float16 the quotient would underflow.
  scale = scale.astype(wide.real.dtype).reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))

  def scaled_by(part: Array) -> Array:
    if not divide:
      return part * scale
    quotient = part / scale
    # An overflow leaves as NaN. A clip would turn an inf into a number.
    return jnp.where(jnp.isfinite(quotient), quotient, jnp.nan)

  # A complex division computes |scale|^2, which overflows for large scales. So scale the parts.
  if jnp.iscomplexobj(wide):
    return jax.lax.complex(scaled_by(wide.real), scaled_by(wide.imag))
  return scaled_by(wide).astype(x.dtype)


def _jvp(
  primitive: Primitive, primals: Sequence[Array], tangents: Sequence[Any], *, divide: bool
) -> tuple[Array, Any]:
  (x, bits), (t, _) = primals, tangents
  moved = t if isinstance(t, ad.Zero) else primitive.bind(t, bits, divide=divide)
  return primitive.bind(x, bits, divide=divide), moved


def _transpose(
  transposed: Primitive, cotangent: Any, x: Any, bits: Array, *, divide: bool
) -> list[Any]:
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(x.aval), None]
  if transposed is scale_value_p and divide:
    _check_stored(x.aval)
  return [transposed.bind(cotangent, bits, divide=divide), None]


def _check_stored(aval: ShapedArray) -> None:
  """Raises if a gradient would be divided in float16 or float8, where it underflows."""
  if is_low_precision(aval.dtype) and aval.dtype != jnp.bfloat16:
    raise MpjaxTypeError(
      f"the gradient of {_WHERE}",
      expected="parameters in float32 or bfloat16",
      got=f"one in {aval.dtype}{list(aval.shape)}, whose gradient underflows in that dtype",
      fix="Differentiate by a float32 view of the parameters: "
      f'jax.value_and_grad({_CALL}(loss_fn, opt_state))(mpjax.convert(params, "float32"), batch).',
    )


def _batch(
  primitive: Primitive, operands: Sequence[Array], dims: Sequence[int | None], *, divide: bool
) -> tuple[Array, int]:
  (x, bits), (axis, of_bits) = operands, dims
  if of_bits is not None:
    bits = jnp.moveaxis(bits, of_bits, 0)
    x = jnp.broadcast_to(x, (len(bits), *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    return primitive.bind(x, bits, divide=divide), 0
  # The axes of the bits stay the first ones.
  x = jnp.moveaxis(x, cast(int, axis), bits.ndim)
  return primitive.bind(x, bits, divide=divide), bits.ndim


AS_COMPUTED: Mapping[Primitive, Function] = {
  scale_cotangent_p: lambda x, bits, **_: x,
  scale_value_p: _scale_value,
}
"""What the identities compute, with its own derivative. A diagnostic that differentiates a program
once more needs it, since the values inside of the loss are at the scale already."""

for _one, _other in ((scale_cotangent_p, scale_value_p), (scale_value_p, scale_cotangent_p)):
  _one.def_abstract_eval(lambda x, bits, **_: x)
  ad.primitive_jvps[_one] = functools.partial(_jvp, _one)
  ad.primitive_transposes[_one] = functools.partial(_transpose, _other)
  batching.primitive_batchers[_one] = functools.partial(_batch, _one)
scale_cotangent_p.def_impl(lambda x, bits, **_: x)
scale_value_p.def_impl(jax.jit(_scale_value, static_argnames="divide"))
mlir.register_lowering(scale_cotangent_p, lambda _, x, bits, **__: [x])
mlir.register_lowering(scale_value_p, mlir.lower_fun(_scale_value, multiple_results=False))
