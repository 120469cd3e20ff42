"""The arguments of a call: which are traced, what each is called, and the modules they name.

In Flax NNX and plain functions, which name no modules, the parameters do that their operations
take: a matmul with `params["mlp"]["up"]` is put into "mlp/up", and an operation on what "mlp/up"
and "mlp/gate" return into "mlp".
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._autocast.boundary import Boundary, jax_order
from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.leaves import Path, is_nnx_variable, leaf_paths
from mpjax._core.trees import is_nnx_object
from mpjax._core.types import Args, Array, Class, Function, Kwargs, Leaf, PyTree
from mpjax._jaxpr.compat import with_equations, within_scopes
from mpjax._jaxpr.graph import Graph, Value
from mpjax._jaxpr.locations import Source
from mpjax._jaxpr.reader import Program, inner_jaxprs, opened, with_inner
from mpjax._jaxpr.steps import Key
from mpjax._policy.active import AUDIT, AuditRecord


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
    # What is shared in a model of NNX is one; all else is as JAX has it, in its order.
    self._boundary = Boundary((args, kwargs), tie=is_nnx_object)
    self._leaves = leaves = self._boundary.leaves
    self._order = list(jax_order(self._boundary.order))
    self.positions = [i for i in dict.fromkeys(self._order) if is_traced(leaves[i])]
    self.arrays = [leaves[i] for i in self.positions]
    # Type, structure and leaves of what the function that was traced last returned. Instead of an
    # array there is its class: no tracer outlives its trace, see `jax.checking_leaks`.
    self.returned: tuple[Class, PyTree, list[Leaf]] = (type(None), None, [])

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return self._boundary.inside(leaves).args

  def arguments(self, fn: Function, scales: Sequence[Leaf] = ()) -> list[Argument]:
    """Returns what the leaves that are traced are for a function; `scales` are loss scales."""
    args, _ = call = self.with_arrays(self.arrays)
    names, arguments = positional_names(fn, len(args)), dict[int, Argument]()
    variables = jax.tree.leaves(call, is_leaf=is_nnx_variable)
    nodes = [node for node in variables for _ in jax.tree.leaves(node)]
    paths, first = leaf_paths(call), ("0", "0", "params")
    first = first if any(path[:3] == first for path in paths) else first[:2]
    for i, x, path, node in zip(self._order, jax.tree.leaves(call), paths, nodes, strict=True):
      kind, argument, *keys = path
      parts = [names[int(argument)] if kind == "0" else argument, *keys]
      is_first = path[: len(first)] == first and not any(x is scale for scale in scales)
      # A single array called `params` is one too.
      inside = {"params", "parameters", "weights"}.intersection(parts[:-1] or parts)
      is_param = bool(inside) or any(base.__name__ == "Param" for base in type(node).__mro__)
      arguments.setdefault(i, Argument("/".join(parts), tuple(keys), is_first, is_param))
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
      returned = fn(*args, **kwargs)
      leaves, structure = jax.tree.flatten(returned)
      markers = [jax.Array if isinstance(x, jax.Array) else x for x in leaves]
      self.returned = type(returned), structure, markers
      results = [*zip(leaf_paths(returned), leaves, strict=True)]
      # Objects that the function wrote to, such as a model of NNX, hold what it computed.
      after = zip(leaf_paths(call), jax.tree.leaves(call), strict=True)
      results += [(path[2:], x) for path, x in after if id(x) not in before]
      results = [(path, x) for path, x in results if isinstance(x, jax.Array)]
      paths[:] = [path for path, _ in results]
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
        fix="Pass the model as an argument: fn = lambda model, x: model(x); of a loss, the first.",
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


def with_parameter_scopes(fn: Function) -> Function:
  """Returns a function whose operations without a named scope are in that of a module."""

  def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
    call = Call(args, kwargs)
    closed, _ = call.traced(fn)
    owners = [one.module if one.is_first else () for one in call.arguments(fn)]
    jaxpr = opened(_scoped(closed, name_by_parameters(Graph(closed), owners)))
    results = iter(eval_jaxpr(jaxpr, closed.consts, *call.arrays))
    _, structure, leaves = call.returned
    return structure.unflatten([next(results) if x is jax.Array else x for x in leaves])

  return scoped


def name_by_parameters(graph: Graph, modules: Sequence[Path]) -> Mapping[Key, Path]:
  """Gives operations without a path that of a module, given those of arguments; returns them."""
  pairs = zip(graph.arguments, modules, strict=True)
  owners = {v: path for v, path in pairs if path}  # and of what parameters alone give
  homes: dict[Value, Path] = {}  # where other values are, if what computes them is in a module
  named, lines = dict[Key, Path](), dict[Source | None, set[Path]]()
  for operation in graph.operations:
    operands, where = [v for v in operation.operands if v.kind != "literal"], operation.where
    own = [owners[v] for v in operands if v in owners]
    inside = [homes[v] for v in operands if v in homes]
    path, results = _shared(own or inside), operation.results
    # In a backward pass it is that of the matmul on the same line, if there is one only.
    on_line = lines.setdefault(where.source, set())
    if where.direction == "forward" and operation.facts.flops is not None:
      on_line.add(tuple(where.path.split("/")) if where.path else path)
    elif where.direction != "forward" and where.source and len(on_line) == 1:
      (path,) = on_line
    if where.path:
      continue
    if path and not operation.joins:  # What comes into a loop, or out of it, is where it was.
      named[operation.step.key] = path
      operation.where = where._replace(scopes=(*where.scopes, *path))
    if own and len(own) == len(operands):
      owners.update(dict.fromkeys(results, path))
    elif own or inside:  # What a layer returns is where the layer is.
      is_layer = len(set(own)) == 1 and not operation.joins
      homes.update(dict.fromkeys(results, path[:-1] if is_layer else path))
  return named


def _shared(paths: Sequence[Sequence[str]]) -> Path:
  """Returns what paths begin with, all of them."""
  alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
  return tuple(first for first, *_ in alike)


def _scoped(program: Program, modules: Mapping[Key, Path], at: Key = ()) -> Program:
  jaxpr, eqns = opened(program), list[JaxprEqn]()
  for position, eqn in enumerate(jaxpr.eqns):
    key, source = (*at, position), eqn.source_info
    inner = [_scoped(x.program, modules, (*key, i)) for i, x in enumerate(inner_jaxprs(eqn) or ())]
    # Around the scopes that it has: "bqhd,bkhd->bhqk" of `jnp.einsum` is no module.
    stack = within_scopes(source.name_stack, modules.get(key, ()))
    params = with_inner(eqn, inner) if inner else eqn.params
    eqns.append(eqn.replace(source_info=source.replace(name_stack=stack), params=params))
  jaxpr = with_equations(jaxpr, eqns)
  return jaxpr if isinstance(program, Jaxpr) else program.replace(jaxpr=jaxpr)


def moved_from(value: Value) -> Value:
  """Returns the argument, or the result, whose numbers a value has, moved, gathered or cast."""
  while value.made_by is not None and (value.made_by.moves or value.made_by.casts):
    value = value.made_by.operands[0]
  return value


def parameter_trees(graph: Graph) -> Iterator[str]:
  """Yields the trees among arguments that have, at the path of a module, what its matmul takes."""
  for operation, *_ in graph.matmuls():
    for v in map(moved_from, operation.operands[:2]):
      *tree, _ = v.label.split("/")
      shared = _shared([tree[::-1], operation.where.path.split("/")[::-1]])
      if v.kind == "argument" and 0 < len(shared) < len(tree):
        yield "/".join(tree[: -len(shared)]) + "/"
