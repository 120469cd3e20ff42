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
from mpjax._core.leaves import Path, is_nnx_variable, key_names, leaf_paths
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, PyTree
from mpjax.transforms._loss_scale import scales_in


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array that JAX takes; a Python number, or an array of text, is not."""
  # Those of `ml_dtypes`, such as bfloat16, are of kind "V".
  return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV")


class Argument(NamedTuple):
  name: str  # that of the argument and the path in it, such as "params/Dense_0/kernel"
  keys: Path  # those of the path in it
  is_first: bool  # it is in the first argument: in its `params`, if any; it is no loss scale
  is_parameter: bool  # it is in a tree called `params`, or an `nnx.Param`

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is, if it is one."""
    return self.keys[self.keys[:1] == ("params",) : -1]


class Call:
  """The arguments of a call: some leaves are traced, and the others stay as they are."""

  def __init__(
    self, args: Args, kwargs: Kwargs, where: str = "", is_traced: Callable[[Leaf], bool] = is_array
  ) -> None:
    self._where = where
    self._leaves, self._tree = jax.tree.flatten((args, kwargs))
    self.positions = [i for i, x in enumerate(self._leaves) if is_traced(x)]
    self.arrays = [self._leaves[i] for i in self.positions]
    self.returned: PyTree = None  # what the function that was traced last returned

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return jax.tree.unflatten(self._tree, leaves)

  def arguments(self, fn: Function) -> list[Argument]:
    """Returns what the leaves that are traced are for a function."""
    args, _ = call = self.with_arrays(self.arrays)
    names, arguments = positional_names(fn, len(args)), list[Argument]()
    variables = jax.tree.leaves(call, is_leaf=is_nnx_variable)
    nodes = [node for node in variables for _ in jax.tree.leaves(node)]
    scales = {id(each.state.scale) for each in scales_in(call) if each.state is not None}
    paths, first = leaf_paths(call), ("0", "0", "params")
    first = first if any(path[:3] == first for path in paths) else first[:2]
    for path, node, x in zip(paths, nodes, self._leaves, strict=True):
      kind, argument, *keys = path
      parts = [names[int(argument)] if kind == "0" else argument, *keys]
      is_first = path[: len(first)] == first and id(x) not in scales
      # A single array called `params` is one too.
      inside = {"params", "parameters", "weights"}.intersection(parts[:-1] or parts)
      is_param = bool(inside) or any(base.__name__ == "Param" for base in type(node).__mro__)
      arguments.append(Argument("/".join(parts), tuple(keys), is_first, is_param))
    return [arguments[i] for i in self.positions]

  def check_concrete(self) -> None:
    """Raises MpjaxTypeError if a leaf has no value."""
    abstract = [x for x in self._leaves if isinstance(x, (Tracer, jax.ShapeDtypeStruct))]
    if abstract:
      raise MpjaxTypeError(
        f"{self._where}(*args)",
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
    try:
      with AUDIT(AUDIT.value or AuditRecord()):
        return jax.make_jaxpr(flat)(*self.arrays), paths
    except flax_errors("TraceContextError") as error:
      raise MpjaxTypeError(
        self._where,
        expected="a function that changes nothing but its arguments",
        got=f"one that writes to a model of NNX that it closes over: {error}",
        fix="Pass the model as an argument: fn = lambda model, x: model(x), called as (model, x).",
      ) from error


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
