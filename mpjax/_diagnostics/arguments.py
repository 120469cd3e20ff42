"""The arguments of a call: which are traced, the jaxpr for them, and what each is called."""

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from mpjax._core.active import AUDIT, AuditRecord
from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.leaves import Path, is_nnx_variable, key_names, leaf_paths
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, PyTree

_PARAMETERS = ("params", "parameters", "weights")


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array with a dtype; a Python number is not."""
  return isinstance(x, (jax.Array, np.ndarray))


class Call:
  """The arguments of a call: some leaves are traced, and the others stay as they are."""

  def __init__(
    self, args: Args, kwargs: Kwargs, is_traced: Callable[[Leaf], bool] = is_array
  ) -> None:
    self._leaves, self._tree = jax.tree.flatten((args, kwargs))
    self.positions = [i for i, x in enumerate(self._leaves) if is_traced(x)]
    self.arrays = self.arrays_of((args, kwargs))

  @property
  def operands(self) -> list[Array]:
    """The leaves that are traced, as arrays of JAX."""
    return [jnp.asarray(x) for x in self.arrays]

  def arrays_of(self, call: tuple[Args, Kwargs]) -> list[Leaf]:
    """Returns the leaves of such arguments that are traced."""
    leaves = jax.tree.leaves(call)
    return [leaves[i] for i in self.positions]

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    """Returns the arguments with other arrays for those that are traced."""
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return jax.tree.unflatten(self._tree, leaves)

  def check_concrete(self, where: str) -> None:
    """Raises MpjaxTypeError if a leaf has no value; `where` is the public call."""
    for x in self._leaves:
      if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        raise MpjaxTypeError(
          f"{where}(*args)",
          expected="concrete arrays",
          got="a traced one" if isinstance(x, Tracer) else "a jax.ShapeDtypeStruct",
          fix="Call it on the host, outside of jax.jit and jax.grad, with arrays: it computes with "
          "their values.",
        )

  def traced(self, fn: Function) -> tuple[ClosedJaxpr, list[Path]]:
    """Returns the jaxpr of a function of the arrays, and the paths of what it returns or writes."""
    paths: list[Path] = []

    def flat(*arrays: Array) -> list[Leaf]:
      args, kwargs = call = self.with_arrays(arrays)
      before = {id(x): x for x in jax.tree.leaves(call)}
      results = jax.tree_util.tree_leaves_with_path(fn(*args, **kwargs))
      # Objects that the function wrote to, such as a model of NNX, hold what it computed.
      after = jax.tree_util.tree_leaves_with_path(call)
      results += [(path[2:], x) for path, x in after if id(x) not in before]
      results = [(path, x) for path, x in results if isinstance(x, jax.Array)]
      paths[:] = [key_names(path) for path, _ in results]
      return [x for _, x in results]

    flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
    # With the marks of modules under a policy: those of NNX leave no other scope.
    with AUDIT(AUDIT.value or AuditRecord()):
      return jax.make_jaxpr(flat)(*self.arrays), paths


class Argument(NamedTuple):
  """A leaf of the arguments of a function."""

  name: str  # that of the argument and the path in it, such as "params/Dense_0/kernel"
  is_parameter: bool  # it is in a tree called `params`, or an `nnx.Param`


def trace(
  fn: Function, args: Args, kwargs: Kwargs, where: str
) -> tuple[ClosedJaxpr, list[Argument]]:
  """Returns the jaxpr of a function, and what the leaves of its arguments are called."""
  # Arrays and `jax.ShapeDtypeStruct`s are traced. All else is passed as it is, as `mpjax.autocast`
  # does it: `model.apply(variables, x, train=True)` asks whether `train` is true.
  call = Call(args, kwargs, lambda x: hasattr(x, "shape") and hasattr(x, "dtype"))
  try:
    program, _ = call.traced(fn)
  except flax_errors("TraceContextError") as error:
    raise MpjaxTypeError(
      where,
      expected="a function that changes nothing but its arguments",
      got=f"one that writes to a model of NNX that it closes over: {error}",
      fix="Pass the model as an argument: "
      f"{where.replace('fn', 'lambda model, x: model(x)')}(model, x).",
    ) from error
  names = arguments(fn, args, kwargs)
  return program, [names[i] for i in call.positions]


def arguments(fn: Function, args: Args, kwargs: Kwargs) -> list[Argument]:
  """Returns what the leaves of arguments are called, in the order of `jax.tree.leaves`."""
  every: list[Argument] = []
  named = zip(positional_names(fn, len(args)), args, strict=True)
  for name, value in (*named, *sorted(kwargs.items())):
    # A parameter by its class, that of NNX.
    learned = [
      any(base.__name__ == "Param" for base in type(node).__mro__)
      for node in jax.tree.leaves(value, is_leaf=is_nnx_variable)
      for _ in jax.tree.leaves(node)
    ]
    for path, is_variable in zip(leaf_paths(value), learned, strict=True):
      parts = (name, *(part for part in path if part != "value"))
      # A single array called `params` is one too.
      inside = any(part in _PARAMETERS for part in (parts[:-1] or parts))
      every.append(Argument("/".join(parts), is_variable or inside))
  return every


def positional_names(fn: Function, count: int) -> list[str]:
  """Returns what positional arguments are called: "rest[0]" is the first of `*rest`."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    return [f"args[{i}]" for i in range(count)]
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  return [*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))]


def check_function(fn: object, where: str, fix: str) -> None:
  """Raises MpjaxTypeError unless `fn` is a function of arrays that JAX can trace."""
  check_no_linen_model(fn, where)
  compiled = isinstance(fn, jax.stages.Compiled)
  if compiled or not callable(fn):
    raise MpjaxTypeError(
      where,
      expected="a function of arrays that JAX can trace",
      got="a compiled one" if compiled else kind_of(fn),
      fix=fix,
    )


def gradient_of(fn: Function, scale: float = 1.0) -> Callable[..., PyTree]:
  """Returns the value and gradient of a loss by the floating arrays in its first argument."""

  def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
    if not args:
      raise MpjaxTypeError(
        "mpjax.ranges(fn) or mpjax.tune(loss_fn)",
        expected="a loss whose first argument holds the parameters",
        got="no argument by position",
        fix="Pass the parameters first, by position: (params, x=x).",
      )
    call = Call(args[:1], {}, lambda x: is_array(x) and is_inexact(x))

    def loss(moving: Sequence[Leaf]) -> tuple[Leaf, PyTree]:
      returned = fn(*call.with_arrays(moving)[0], *args[1:], **kwargs)
      value, *aux = returned if isinstance(returned, tuple) else (returned,)
      if getattr(value, "shape", None) != () or not is_inexact(value):
        raise MpjaxTypeError(
          "mpjax.ranges(fn) or mpjax.tune(loss_fn)",
          expected="a loss that returns a floating scalar, or one and aux",
          got=f"one that returns {kind_of(value)}",
          fix="Take the mean, as in lambda params, x: jnp.mean(fn(params, x) ** 2).",
        )
      scaled = value if scale == 1 else value * np.asarray(scale, value.dtype)
      return scaled, [x for x in jax.tree.leaves(aux) if is_array(x)]

    return jax.value_and_grad(loss, has_aux=True)(call.arrays)

  return gradient
