"""The arguments of a call: which are traced, the jaxpr for them, and what each is called."""

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from mpjax._core.active import AUDIT, AuditRecord
from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.leaves import Path, is_nnx_variable, key_names
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, PyTree


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array that JAX takes; a Python number, or an array of text, is not."""
  # Those of `ml_dtypes`, such as bfloat16, are of kind "V".
  return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV")


class Call:
  """The arguments of a call: some leaves are traced, and the others stay as they are."""

  def __init__(
    self, args: Args, kwargs: Kwargs, is_traced: Callable[[Leaf], bool] = is_array
  ) -> None:
    self._leaves, self._tree = jax.tree.flatten((args, kwargs))
    self.positions = [i for i, x in enumerate(self._leaves) if is_traced(x)]
    self.arrays = [self._leaves[i] for i in self.positions]
    self.returned: PyTree = None  # what the function that was traced last returned

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return jax.tree.unflatten(self._tree, leaves)

  def check_concrete(self, where: str) -> None:
    """Raises MpjaxTypeError if a leaf has no value; `where` is the public call."""
    abstract = [x for x in self._leaves if isinstance(x, (Tracer, jax.ShapeDtypeStruct))]
    if abstract:
      raise MpjaxTypeError(
        f"{where}(*args)",
        expected="concrete arrays",
        got=kind_of(abstract[0]),
        fix="Call it on the host, outside of jax.jit and jax.grad: it computes with their values.",
      )

  def traced(self, fn: Function) -> tuple[ClosedJaxpr, list[Path]]:
    """Returns the jaxpr of a function of the arrays, and the paths of what it returns or writes."""
    paths: list[Path] = []

    def flat(*arrays: Array) -> list[Leaf]:
      args, kwargs = call = self.with_arrays(arrays)
      before = {id(x): x for x in jax.tree.leaves(call)}
      self.returned = fn(*args, **kwargs)
      results = jax.tree_util.tree_leaves_with_path(self.returned)
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
  positional, names = positional_names(fn, len(args)), list[Argument]()
  leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_nnx_variable)
  for (kind, argument, *path), node in leaves:
    (name,) = key_names((argument,))
    parts = [name if kind.idx else positional[int(name)], *key_names(tuple(path))]
    parts = [part for part in parts if part != "value"]  # That of a variable.
    # A single array called `params` is one too.
    inside = {"params", "parameters", "weights"}.intersection(parts[:-1] or parts)
    is_param = bool(inside) or any(base.__name__ == "Param" for base in type(node).__mro__)
    names += [Argument("/".join(parts), is_param)] * len(jax.tree.leaves(node))
  return program, [names[i] for i in call.positions]


def positional_names(fn: Function, count: int) -> list[str]:
  """Returns what positional arguments are called: "rest[0]" is the first of `*rest`."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    parameters = []
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  return [*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))]


def check_function(fn: object, where: str, fix: str) -> None:
  """Raises MpjaxTypeError unless `fn` is a function of arrays that JAX can trace."""
  check_no_linen_model(fn, where)
  compiled = isinstance(fn, jax.stages.Compiled)
  if compiled or not callable(fn):
    got, expected = "a compiled one" if compiled else kind_of(fn), "a function of arrays"
    raise MpjaxTypeError(where, expected=f"{expected} that JAX can trace", got=got, fix=fix)
