"""One run of a function for `compare`: the outputs of its modules, and their gradients."""

import collections
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._core.errors import REFUSALS, MpjaxValueError
from mpjax._core.leaves import is_key
from mpjax._core.types import Array, Function, NumpyArray, is_inexact
from mpjax._diagnose.call import Call, compiled_as_written
from mpjax._diagnose.compare.modules import MOST, ComparedCall, Loop, Modules, find_modules, most_of
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import Direction
from mpjax._jaxpr.runner import Enclosing, Observer, run
from mpjax._jaxpr.steps import Body, Step, body_of

_FORMAT = 2
"""The version of the files."""


class Kept(NamedTuple):
  """A value that was kept.

  Fields:
    key: its name among the arrays.
    cotangent: the name of its cotangent, the gradient of the loss by it.
    shape: in one iteration.
    maker: the module that made it, with the number of the call; "" if it comes into a loop.
  """

  key: str
  cotangent: str
  shape: tuple[int, ...]
  maker: str


class RanCall(NamedTuple):
  """A call of a module in a run.

  Fields:
    path: the path of the module.
    direction: the pass.
    call: how many calls of the path came before.
    loops: the scans around it, whose iterations are the first axes of its arrays.
    first: the number of its first step.
    last: the number of its last step.
    outputs: the values that it returns.
    inputs: the values that it takes, without parameters.
  """

  path: str
  direction: Direction
  call: int
  loops: tuple[Loop, ...]
  first: int
  last: int
  outputs: tuple[Kept, ...]
  inputs: tuple[Kept, ...]


class Gradient(NamedTuple):
  """The gradient of a parameter.

  Fields:
    key: its name among the arrays.
    leaf: the path of the parameter.
    path: the path of the module that reads it first.
    stacked: how many of its leading axes are iterations.
  """

  key: str
  leaf: str
  path: str
  stacked: int


class RecordedRun(NamedTuple):
  """The kept values of one run.

  Fields:
    name: the name of the function.
    calls: the calls of modules, in order.
    gradients: the gradients of the parameters; () if the function is no loss.
    arguments: the keys of the arguments, by name.
    results: the keys of the results, by path.
    spacing: the distance from 1 to the next number of the dtype that most matmuls run in.
    note: why a loss has no gradients; "" if it has, or if the function is no loss.
    arrays: the values by key. Those of modules are floating.
    machine: the versions of JAX, the processor and the devices, on which rounding depends.
  """

  name: str
  calls: tuple[RanCall, ...]
  gradients: tuple[Gradient, ...]
  arguments: Mapping[str, str]
  results: Mapping[str, str]
  spacing: float
  note: str
  arrays: Mapping[str, NumpyArray]
  machine: str = ""


# Two functions may call the same argument differently. Positions are the same in both.
def any_function(*args: object) -> None:
  """Has the names "args[0]" and so on, by which the arguments of two functions are compared."""


def any_method(model: object, *args: object) -> None:
  """Has these names too, behind "model", which is the model that is called."""


def record(fn: Function, call: Call, name: str, names: Function = any_function) -> RecordedRun:
  """Runs a function once, compiled, and returns the outputs of its modules.

  Args:
    fn: the function.
    call: its arguments.
    name: the name of the run.
    names: a function whose arguments have the names of those of `fn`.
  """
  traced = call.traced(fn)
  program, results = traced.program, traced.outputs
  # The run is differentiated, so functions with a custom derivative stay one step.
  body = body_of(program, compiled=True, differentiable=True)
  arguments = call.arguments(names)
  weights = {i for i, each in enumerate(arguments) if each.is_first}
  modules = find_modules(body, weights)
  operands = [jnp.asarray(x) for x in call.arrays]
  # JAX differentiates by floating arguments only. A counter in the first argument is none.
  moving = [i for i in weights if is_inexact(operands[i])]
  # Only a loss has one cotangent to start from.
  is_loss = bool(moving) and traced.is_loss
  ran, note = _run(body, modules, operands, moving if is_loss else [])
  # One flat mapping of arrays is what `numpy.savez` stores. Prefixes keep the kinds apart.
  arrays = {f"value/{slot}": x for slot, x in ran.seen.items()}
  arrays |= {f"cotangent/{root}": x for root, x in ran.cotangents.items()}
  arrays |= {f"result/{i}": _sampled(x, MOST) for i, x in enumerate(ran.results)}
  arrays |= {f"argument/{i}": _sampled(x, MOST) for i, x in enumerate(operands)}
  arrays |= {f"gradient/{i}": x for i, x in ran.gradients.items()}
  return RecordedRun(
    name=name,
    calls=tuple(_ran_call(modules, each) for each in modules.calls),
    gradients=tuple(
      Gradient(f"gradient/{i}", arguments[i].name, *modules.reader(i)) for i in ran.gradients
    ),
    arguments={each.name: f"argument/{i}" for i, each in enumerate(arguments)},
    results={"/".join(("result", *path)): f"result/{i}" for i, path in enumerate(results)},
    spacing=_spacing(program),
    note=note,
    arrays={key: _on_host(x) for key, x in arrays.items() if not is_key(x.dtype)},
    machine=_machine(operands),
  )


class _Ran(NamedTuple):
  """What a function returned, and what was seen while it ran.

  Fields:
    results: what the function returned, flat.
    seen: the kept values, by value; loops around a value are its first axes.
    gradients: of parameters, by their position; {} without derivatives.
    cotangents: of the outputs of modules, by value before casts.
  """

  results: list[Array]
  seen: Mapping[int, Array]
  gradients: Mapping[int, Array]
  cotangents: Mapping[int, Array]


def _run(
  body: Body, modules: Modules, operands: Sequence[Array], moving: Sequence[int]
) -> tuple[_Ran, str]:
  """Returns the kept values of one run, and why there are no gradients.

  Args:
    body: the steps of the function.
    modules: their modules.
    operands: the arguments.
    moving: the positions of the arguments by which a loss is differentiated; () if it is no loss.
  """
  # Keep only what modules return and take. All values would not fit in memory.
  kept = {slot for each in modules.calls for slot in each.values()}

  def forward(operands: Sequence[Array], taps: Mapping[int, Array]) -> _Ran:
    results, seen = run(body, operands, _Recorder(modules, kept, taps))
    return _Ran([*map(jnp.asarray, results)], seen, {}, {})

  def differentiated(operands: Sequence[Array]) -> _Ran:
    def loss(moved: Sequence[Array], taps: Mapping[int, Array]) -> tuple[Array, _Ran]:
      # The other arguments are constants of the derivative, such as integers and data.
      replaced = dict(zip(moving, moved, strict=True))
      ran = forward([replaced.get(i, x) for i, x in enumerate(operands)], taps)
      return ran.results[0], ran

    taps: dict[int, Array] = {}
    # Values of a backward pass are gradients already.
    calls = (call for call in modules.calls if call.direction == "forward")
    for root in {root for call in calls for root in call.outputs}:
      loops = modules.loops.get(root)
      if loops is None:
        continue  # Each device of a `shard_map` has a value of its own.
      aval = modules.avals[root]
      sampled = functools.partial(_sampled, most=modules.limit(root))
      # The tap has the shape of the sample, which is the shape of its gradient.
      like = jax.eval_shape(sampled, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
      taps[root] = jnp.zeros((*(loop.length for loop in loops), *like.shape), like.dtype)
    # One backward pass computes the gradients of the parameters and of the taps.
    differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, ran), (gradients, cotangents) = differentiate([operands[i] for i in moving], taps)
    of_parameters: dict[int, Array] = {}
    for i, x in zip(moving, gradients, strict=True):
      # The gradient of a stacked parameter is sampled within each layer.
      lead = modules.reader(i).stacked
      of_parameters[i] = _sampled(x, most_of(math.prod(x.shape[:lead])), lead)
    return ran._replace(gradients=of_parameters, cotangents=cotangents)

  note = ""
  if moving:
    try:
      return compiled_as_written(differentiated)(operands), note
    # JAX cannot differentiate a `while` in reverse mode, for example. Compare the values then.
    except REFUSALS as error:
      note = f"{type(error).__name__}: {str(error).splitlines()[0]}"
  return compiled_as_written(lambda operands: forward(operands, {}))(operands), note


def _ran_call(modules: Modules, call: ComparedCall) -> RanCall:
  """Returns a call with the keys of those of its values that are kept for the comparison."""

  def kept(values: Mapping[int, int]) -> tuple[Kept, ...]:
    # A value that leaves a loop, or enters it, is in another number of loops than the call.
    own = [pair for pair in values.items() if modules.loops.get(pair[1], ()) == call.loops]
    return tuple(
      Kept(
        key=f"value/{slot}",
        cotangent=f"cotangent/{root}",
        shape=modules.avals[slot].shape,
        maker=modules.makers.get(root, ""),
      )
      for root, slot in own
    )

  return RanCall(
    path=call.path,
    direction=call.direction,
    call=call.call,
    loops=call.loops,
    first=call.first,
    last=call.last,
    outputs=kept(call.outputs),
    inputs=kept(call.inputs),
  )


def _spacing(program: ClosedJaxpr) -> float:
  """Returns the distance from 1 to the next number of the dtype that most matmuls run in."""
  flops = collections.Counter[float]()
  for _, dtype, count in Graph(program).matmuls():
    # Integers are scaled to at most 1.
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    spacing = 1 / float(jnp.iinfo(dtype).max) if is_integer else float(jnp.finfo(dtype).eps)
    flops[spacing] += count
  # Of two with as many FLOPs, the lower precision.
  return max(flops, key=lambda eps: (flops[eps], eps), default=float(jnp.finfo(jnp.float32).eps))


def _machine(operands: Sequence[Array]) -> str:
  """Returns the versions and devices on which rounding depends."""
  devices = {d.device_kind for x in operands for d in x.devices()} or {jax.devices()[0].device_kind}
  # XLA, the processor and the device choose the order of sums, and so the rounding.
  versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
  return " ".join([*versions, platform.processor() or platform.machine(), *sorted(devices)])


def _on_host(x: Array) -> NumpyArray:
  """Returns an array that `numpy.savez` stores: its dtypes have at least 32 bits."""
  # NumPy cannot load bfloat16 and int4 from a file. Float32 and int32 hold their numbers exactly.
  host = np.asarray(x)
  wide = np.float32 if is_inexact(x) else np.int32
  return host.astype(wide) if host.dtype.itemsize < 4 else host


def _sampled(x: Array, most: int, lead: int = 0) -> Array:
  """Returns at most so many elements of an array for each index of its leading axes."""
  # Iterations stay apart. Only the elements within each are sampled.
  shape = x.shape[:lead]
  size = math.prod(x.shape[lead:])
  if size <= most:
    return x
  stride = -(-size // most)
  # A stride that divides the length of an axis would see few positions of it.
  while math.gcd(stride, size) > 1:
    stride += 1
  return x.reshape((*shape, size))[..., ::stride]


# A tap is an argument that adds nothing. Its gradient is the cotangent of the value, without
# another backward pass.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _tapped(x: Array, tap: Array, most: int) -> Array:
  """Returns `x`. The gradient by `tap`, an array of 0, is that of `x`, or a sample of it."""
  return x


def _tapped_forward(x: Array, tap: Array, most: int) -> tuple[Array, None]:
  return x, None


def _tapped_backward(most: int, _: None, cotangent: Array) -> tuple[Array, Array]:
  # The cotangent passes on unchanged. Only the copy that is kept is sampled, which saves memory.
  return cotangent, _sampled(cotangent, most)


_tapped.defvjp(_tapped_forward, _tapped_backward)


@dataclasses.dataclass
class _Recorder(Observer):
  """Keeps values of modules.

  Attributes:
    modules: the calls, and the values that they return and take.
    kept: the numbers of the values to keep.
    taps: zeros, by value. The gradient by such a zero is the cotangent of the value.
  """

  # What iterations see is stacked along a new axis instead of merged.
  merges: ClassVar[bool] = False
  modules: Modules
  kept: Collection[int]
  taps: Mapping[int, Array]

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    # A body starts with nothing seen: the runner carries what it sees out of the loop.
    self.seen = {}
    self._keep(body.inputs, values)

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    return self.after(step, bind(step.eqn, ins))

  def after(self, step: Step, outs: list[Any]) -> list[Any]:
    # Later steps must read the tapped value. Otherwise its cotangent would be 0.
    outs = [
      _tapped(x, self.taps[slot], self.modules.limit(slot)) if slot in self.taps else x
      for slot, x in zip(step.outs, outs, strict=True)
    ]
    self._keep(step.outs, outs)
    return outs

  def inside(self, seen: Mapping[int, Array]) -> None:
    self.seen.update(seen)

  def slices(self, step: Step) -> dict[int, Array]:
    # A tap of a value in a scan has an axis of iterations, of which each iteration takes a slice.
    inside = {slot for body in step.bodies for each in body.every_step() for slot in each.outs}
    return {slot: tap for slot, tap in self.taps.items() if slot in inside}

  def in_iteration(self, slices: Mapping[int, Array]) -> Self:
    return dataclasses.replace(self, taps={**self.taps, **slices})

  def _keep(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, x in zip(slots, values, strict=True):
      if slot in self.kept:
        self.seen[slot] = _sampled(jnp.asarray(x), self.modules.limit(slot))


def save(run: RecordedRun, path: str | os.PathLike[str]) -> None:
  """Writes a run to a file of NumPy."""
  # JSON writes records as lists, which `load` turns back.
  meta = {k: x for k, x in run._asdict().items() if k != "arrays"} | {"format": _FORMAT}
  arrays: dict[str, Any] = {"meta": np.asarray(json.dumps(meta)), **run.arrays}
  with open(path, "wb") as file:  # NumPy would add ".npz" to a path without it.
    np.savez(file, **arrays)


def load(path: str | os.PathLike[str], where: str) -> RecordedRun:
  """Reads a run that `save` wrote."""
  with open(path, "rb") as file:
    # NumPy returns a file of one array as an array, and takes other bytes for a pickle.
    is_archive = zipfile.is_zipfile(file)
  meta: dict[str, Any] = {}
  arrays: dict[str, NumpyArray] = {}
  if is_archive:
    # A pickle could run code, and files may come from others.
    with np.load(path, allow_pickle=False) as file:
      # Another file of NumPy has no "meta", and its arrays may be pickles.
      if "meta" in file:
        arrays = {key: file[key] for key in file.files}
        meta = json.loads(str(arrays.pop("meta")))
  if meta.pop("format", None) != _FORMAT:
    raise MpjaxValueError(
      where,
      expected="a file that CompareReport.save wrote, with this version of mpjax",
      got=f"{os.fspath(path)!r}",
      fix='Write it again: mpjax.compare(fn)(*args).save("run.npz").',
    )
  calls = tuple(_read_call(*fields) for fields in meta.pop("calls"))
  gradients = tuple(Gradient(*fields) for fields in meta.pop("gradients"))
  return RecordedRun(**meta, calls=calls, gradients=gradients, arrays=arrays)


def _read_call(*fields: Any) -> RanCall:
  call = RanCall(*fields)
  outputs, inputs = (
    tuple(Kept(key, cotangent, tuple(shape), maker) for key, cotangent, shape, maker in values)
    for values in (call.outputs, call.inputs)
  )
  # Tuples compare with those of a run in this process. JSON gave lists.
  return call._replace(loops=tuple(Loop(*x) for x in call.loops), outputs=outputs, inputs=inputs)
