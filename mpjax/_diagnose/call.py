"""The arguments of a call: the traced leaves, their names, and the modules that they name.

Flax NNX and plain functions have no named scopes. There the parameters that an operation takes name
its module: a matmul with `params["mlp"]["up"]` is in "mlp/up", and an operation on the results of
"mlp/up" and "mlp/gate" is in "mlp".
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._autocast.boundary import Boundary, jax_order
from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.leaves import Path, leaf_paths
from mpjax._core.nnx_objects import is_nnx_object, is_nnx_variable
from mpjax._core.types import Args, Array, Class, Function, Kwargs, Leaf, PyTree
from mpjax._diagnose.paths import shared_names
from mpjax._jaxpr.compat import with_equations, within_scopes, without_scopes
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import Source
from mpjax._jaxpr.reader import inner_jaxprs, opened, with_inner
from mpjax._jaxpr.steps import Key, body_of
from mpjax._policy.active import AUDIT, AuditRecord


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array that JAX takes; a Python number, or an array of text, is not."""
  # NumPy gives bfloat16 and the other dtypes of `ml_dtypes` the kind "V".
  return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV")


class Argument(NamedTuple):
  """A traced leaf of the arguments."""

  name: str  # the argument and the path in it, such as "params/Dense_0/kernel"
  keys: Path  # the path without the name of the argument
  is_first: bool  # it is in the first argument, or in the `params` of that; no loss scale is
  is_parameter: bool  # it is in a tree called `params`, or an `nnx.Param`

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is, if it is one."""
    # The last key is the parameter itself. Linen's collection "params" is no module either.
    return self.keys[self.keys[:1] == ("params",) : -1]


class Returned(NamedTuple):
  """The result of a traced function.

  It holds the class of an array instead of the array, since no tracer may outlive its trace
  (`jax.checking_leaks`).
  """

  kind: Class
  structure: PyTree
  leaves: list[Leaf]


class Call:
  """The arguments of a call: some leaves are traced, and the others stay as they are.

  Attributes:
    positions: the positions of the traced leaves among all.
    arrays: the traced leaves.
    returned: the result of the function that was traced last.
    written: by the position of a result, the position of the traced leaf in place of which the
      function that was traced last wrote it, such as the parameter of an NNX model.
  """

  def __init__(
    self, args: Args, kwargs: Kwargs, where: str = "", is_traced: Callable[[Leaf], bool] = is_array
  ) -> None:
    self._where = where
    # A model in two arguments stays one object, so both see what the function writes to it.
    # Each occurrence of an array is an argument of its own, as under `jax.jit`.
    self._boundary = Boundary((args, kwargs), tie=is_nnx_object)
    self._leaves = leaves = self._boundary.leaves
    # JAX sorts the keys of dicts. The names below come from `jax.tree.leaves`, in that order.
    self._order = list(jax_order(self._boundary.order))
    # The order holds the leaves of a shared object at each occurrence. Each is traced once.
    self.positions = [i for i in dict.fromkeys(self._order) if is_traced(leaves[i])]
    self.arrays = [leaves[i] for i in self.positions]
    # This describes the result before the first trace.
    self.returned = Returned(type(None), None, [])
    self.written = dict[int, int]()

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    """Returns the arguments with other arrays instead of the traced leaves."""
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return self._boundary.inside(leaves).args

  def arguments(self, fn: Function, scales: Sequence[Leaf] = ()) -> list[Argument]:
    """Returns a description of each traced leaf for a function; `scales` are loss scales."""
    # Rebuild the arguments, so that names and leaves come from one tree in JAX's order.
    args, _ = call = self.with_arrays(self.arrays)
    names = positional_names(fn, len(args))
    # A variable may hold several arrays. Each needs the class of its variable, which tells a
    # parameter.
    variables = jax.tree.leaves(call, is_leaf=is_nnx_variable)
    nodes = [node for node in variables for _ in jax.tree.leaves(node)]
    paths = leaf_paths(call)
    first = _path_of_first(paths)
    arguments = dict[int, Argument]()
    for i, x, path, node in zip(self._order, jax.tree.leaves(call), paths, nodes, strict=True):
      kind, argument, *keys = path
      parts = [names[int(argument)] if kind == _ARGS else argument, *keys]
      # A loss scale may sit in the first argument, for example in a train state. It is no
      # parameter.
      is_scale = any(x is scale for scale in scales)
      is_first = path[: len(first)] == first and not is_scale
      is_parameter = _is_in_parameters(parts) or _is_param(node)
      # A shared leaf has several paths. The first one names it.
      arguments.setdefault(i, Argument("/".join(parts), tuple(keys), is_first, is_parameter))
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
    """Returns the jaxpr of a function of the arrays, and the paths of its results and writes."""
    paths: list[Path] = []

    # NNX functions may return nothing and write to their model. The changed leaves are results too.
    def flat(*arrays: Array) -> list[Leaf]:
      args, kwargs = call = self.with_arrays(arrays)
      before = jax.tree.leaves(call)
      returned = fn(*args, **kwargs)
      self.returned = _without_arrays(returned)
      results = [(path, x) for path, x in _leaves_by_path(returned) if isinstance(x, jax.Array)]
      self.written.clear()
      # NNX replaces the array of a variable, so a written leaf is another object.
      old = {id(x) for x in before}
      after = [*_leaves_by_path(call)]
      # A function may also add leaves, such as intermediate values. Then places say nothing.
      places = self._order if len(after) == len(before) else [-1] * len(after)
      for i, (path, x) in zip(places, after, strict=True):
        if id(x) not in old and isinstance(x, jax.Array):
          if i in self.positions:
            self.written[len(results)] = self.positions.index(i)
          # Leave out the first two keys, which are the kind and the position or keyword.
          results.append((path[2:], x))
      paths[:] = [path for path, _ in results]
      return [x for _, x in results]

    # Reports and errors of JAX show the name of the traced function.
    flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
    try:
      # The record makes models under a policy mark their modules. NNX modules leave no other scope.
      with AUDIT(AUDIT.value or AuditRecord()):
        return jax.make_jaxpr(flat)(*self.arrays), paths
    except flax_errors("TraceContextError") as error:
      raise MpjaxTypeError(
        self._where,
        expected="a function that changes nothing but its arguments",
        got=f"a function that closes over an NNX model and writes to it: {error}",
        fix="Pass the model as an argument: fn = lambda model, x: model(x). A loss takes it first.",
      ) from error

  def returned_loss(self, program: ClosedJaxpr, paths: Sequence[Path]) -> bool:
    """Whether the function that was traced last returned a loss: a floating scalar, or one and aux.

    If it has a backward pass inside, such as the loss of a physics-informed network, only a scalar
    alone is a loss. A training step returns or writes more.

    Args:
      program: the jaxpr that `traced` returned.
      paths: the paths that it returned.
    """
    # A tuple is (loss, aux). Its first result has the path "0".
    path_of_loss = ("0",) if issubclass(self.returned.kind, tuple) else ()
    if paths[:1] != [path_of_loss]:
      return False
    first = program.out_avals[0]
    is_scalar = first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)
    return is_scalar and (len(paths) == 1 or not has_backward_pass(program))


def has_backward_pass(program: ClosedJaxpr) -> bool:
  """Whether a program computes a gradient."""
  return any(step.location.direction == "backward" for step in body_of(program).every_step())


_ARGS = "0"
"""The first key of the path of a positional argument in `(args, kwargs)`."""


def _path_of_first(paths: Sequence[Path]) -> Path:
  """Returns the path of the first argument, or of the `params` in it."""
  first = (_ARGS, "0")
  params = (*first, "params")
  # Linen variables hold other collections, such as `batch_stats`, beside the parameters.
  return params if any(path[:3] == params for path in paths) else first


def _is_in_parameters(parts: Sequence[str]) -> bool:
  """Whether a leaf is in a tree with a name such as "params", or is an array with such a name."""
  # Only the names of trees around a leaf count, not its own name. An argument that is one array has
  # no other name.
  around = parts[:-1] if len(parts) > 1 else parts
  return not {"params", "parameters", "weights"}.isdisjoint(around)


def _is_param(node: Leaf) -> bool:
  """Whether a leaf is an `nnx.Param`, or of a subclass, without importing Flax."""
  return any(base.__name__ == "Param" for base in type(node).__mro__)


def _without_arrays(returned: PyTree) -> Returned:
  leaves, structure = jax.tree.flatten(returned)
  classes = [jax.Array if isinstance(x, jax.Array) else x for x in leaves]
  return Returned(type(returned), structure, classes)


def _leaves_by_path(tree: PyTree) -> Iterator[tuple[Path, Leaf]]:
  return zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)


def positional_names(fn: Function, count: int) -> list[str]:
  """Returns the names of positional arguments: "rest[0]" is the first of `*rest`."""
  try:
    # Some builtins and C functions have no signature.
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    parameters = []
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  return [*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))]


def with_model_as_argument(fn: Function, args: Args) -> tuple[Function, Args]:
  """Returns a call whose NNX model, if `fn` is a model or a method of one, is the first argument.

  The arrays of the model then have paths, its parameters are known as such, and the function may
  write to it.
  """
  method, bound = _method_of_model(fn)
  if not bound:
    return fn, args

  name = getattr(method, "__name__", "")
  is_attribute = getattr(type(bound[0]), name, None) is method

  @functools.wraps(method)
  def call(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    # A view may stand for the model. It has methods of its own.
    called = getattr(model, name) if is_attribute else functools.partial(method, model)
    return called(*args, **kwargs)

  # Reports show the name of the function that the user passed.
  call.__name__ = getattr(fn, "__name__", type(fn).__name__)
  return call, (*bound, *args)


def _method_of_model(fn: Function) -> tuple[Function, Args]:
  """Returns a function, and the model of NNX and other arguments that `fn` calls it with."""
  # `type(fn).__call__` is the method without its model.
  if is_nnx_object(fn):
    return type(fn).__call__, (fn,)
  if inspect.ismethod(fn) and is_nnx_object(fn.__self__):
    return fn.__func__, (fn.__self__,)
  # A method under `nnx.jit` is a `functools.partial` too.
  if isinstance(fn, functools.partial):
    method, bound = _method_of_model(fn.func)
    bound = (*bound, *fn.args)
    if any(map(is_nnx_object, bound[:1])):
      return (functools.partial(method, **fn.keywords) if fn.keywords else method), bound
  return fn, ()


Evaluate: TypeAlias = Callable[[ClosedJaxpr, Sequence[Argument], Sequence[Array]], Sequence[Array]]
"""Returns the results of a program for some arrays, given a description of its arguments."""


def as_written(
  program: ClosedJaxpr, arguments: Sequence[Argument], arrays: Sequence[Array]
) -> Sequence[Array]:
  """Returns the results of a program."""
  return eval_jaxpr(program.jaxpr, program.consts, *arrays)


def with_parameter_scopes(fn: Function, evaluate: Evaluate = as_written) -> Function:
  """Returns a function whose operations without a named scope get the scope of a module.

  Args:
    fn: the function.
    evaluate: runs its program, with these scopes.
  """

  def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
    # The function is traced once, and the jaxpr with scopes runs instead of the function. The parts
    # of the result that are no arrays come from the trace.
    call = Call(args, kwargs)
    closed, _ = call.traced(fn)
    # Only the first argument holds parameters. The optimizer state repeats their paths, and would
    # name modules too.
    arguments = call.arguments(fn)
    owners = [one.module if one.is_first else () for one in arguments]
    named = with_scopes(closed, name_by_parameters(Graph(closed), owners))
    results = iter(evaluate(named, arguments, call.arrays))
    leaves = [next(results) if x is jax.Array else x for x in call.returned.leaves]
    return call.returned.structure.unflatten(leaves)

  return scoped


def name_by_parameters(graph: Graph, modules: Sequence[Path]) -> Mapping[Key, Path]:
  """Gives each operation without a path the path of a module, and returns these paths.

  Args:
    graph: the graph of a function, whose operations are changed.
    modules: the path of the module of each argument; () for an argument that is no parameter.
  """
  # An empty path means that the argument is no parameter.
  parameters = {v: path for v, path in zip(graph.arguments, modules, strict=True) if path}
  names = _Names(graph, parameters)
  named: dict[Key, Path] = {}
  for operation in graph.operations:
    path = names.add(operation)
    # A named scope of the user wins. Loops are not named: their body holds operations of several
    # modules.
    if path and not operation.where.path and not operation.joins:
      named[operation.step.key] = path
      operation.where = operation.where._replace(scopes=(*operation.where.scopes, *path))
  return named


class _Weight(NamedTuple):
  """A parameter that a matmul multiplies with a value: its module, and its sorted shape."""

  module: Path
  sizes: tuple[int, ...]


class _Names:
  """The modules of operations, as far as parameters tell. Operations are added in order."""

  def __init__(self, graph: Graph, parameters: Mapping[Value, Path]) -> None:
    # Parameters, and values that are computed from these alone.
    self._owners = _owners(graph, parameters)
    self._weights = _weights(graph, self._owners)
    # The modules in which other values are, if their operation is in one.
    self._modules: dict[Value, Path] = {}
    # The modules of the matmuls of the forward pass, by line.
    self._lines: dict[Source | None, set[Path]] = {}

  def add(self, operation: Operation) -> Path:
    """Returns the path of the module of an operation; () if it has none."""
    operands = _variable_operands(operation)
    # The modules of the parameters among the operands decide before those of the other values.
    own = [self._owners[v] for v in operands if v in self._owners]
    inside = [self._modules[v] for v in operands if v in self._modules]
    path = self._path(operation, own, inside)
    # A value of parameters alone, such as a cast or transposed weight, is in `_owners` already.
    is_of_parameters_alone = len(own) == len(operands)
    if (own or inside) and not is_of_parameters_alone and not operation.where.path:
      # The result of a layer belongs to the module around the layer.
      is_layer = len(set(own)) == 1 and not operation.joins
      self._modules.update(dict.fromkeys(operation.results, path[:-1] if is_layer else path))
    return path

  def _path(self, operation: Operation, own: Sequence[Path], inside: Sequence[Path]) -> Path:
    """Returns the module of an operation, given those of its parameters and other operands."""
    # Several modules meet in the innermost module that contains all of them.
    path = shared_names(own or inside)
    where = operation.where
    # A backward pass multiplies values of two modules. Their common module would be too coarse.
    if where.direction != "forward":
      return self._of_backward(operation, own) or path
    # JAX keeps the line of the forward pass in the backward pass. The line leads to the module
    # again.
    if operation.facts.flops is not None:
      of_scopes = tuple(where.path.split("/")) if where.path else path
      self._lines.setdefault(where.source, set()).add(of_scopes)
    return path

  def _of_backward(self, operation: Operation, own: Sequence[Path]) -> Path:
    """Returns the module of an operation of a backward pass; () if unknown.

    It is that of the parameter whose gradient a matmul computes, or that of the matmuls on the same
    line of the forward pass.
    """
    # The product of a value and its cotangent takes no parameter. Its shape and its operands tell
    # which.
    if operation.facts.flops is not None and not own:
      differentiated = self._differentiated(operation)
      if differentiated:
        return differentiated
    source = operation.where.source
    modules = self._lines.get(source, set()) if source is not None else set()
    # A line that runs in several modules, such as a loop over layers, is ambiguous.
    return next(iter(modules)) if len(modules) == 1 else ()

  def _differentiated(self, matmul: Operation) -> Path:
    """Returns the module of the parameter whose gradient a matmul computes; () if unknown.

    The gradient of a parameter is the product of the value that it multiplies in the forward pass
    and a value that it multiplies in the backward pass. It has the sizes of the parameter. If one
    of the two values multiplies no parameter, as for a layer whose input is not differentiated, the
    sizes alone tell the gradient from other products of the value.
    """
    # Compare operands before moves and casts, as `_weights` stores them.
    sizes = _sizes(matmul.results[0])
    modules: list[set[Path]] = []
    for v in map(moved_from, matmul.operands[:2]):
      if v in self._weights:
        modules.append({x.module for x in self._weights[v] if x.sizes == sizes})
    shared = set.intersection(*modules) if modules else set[Path]()
    return next(iter(shared)) if len(shared) == 1 else ()


def _variable_operands(operation: Operation) -> list[Value]:
  return [v for v in operation.operands if v.kind != "literal"]


def _owners(graph: Graph, parameters: Mapping[Value, Path]) -> Mapping[Value, Path]:
  """Returns the modules of parameters, and of values that are computed from these alone."""
  owners = dict(parameters)
  for operation in graph.operations:
    operands = _variable_operands(operation)
    own = [owners[v] for v in operands if v in owners]
    # A second operand, such as an activation, would make the result an activation.
    if own and len(own) == len(operands) and not operation.where.path:
      owners.update(dict.fromkeys(operation.results, shared_names(own)))
  return owners


def _weights(graph: Graph, owners: Mapping[Value, Path]) -> Mapping[Value, set[_Weight]]:
  """Returns the parameters with which matmuls multiply each value, before moves and casts."""
  weights: dict[Value, set[_Weight]] = {}
  for operation in graph.operations:
    if operation.facts.flops is None:
      continue
    # A matmul takes its parameter on either side.
    first, second, *_ = operation.operands
    for weight, other in ((first, second), (second, first)):
      if weight in owners and other not in owners:
        one = _Weight(owners[weight], _sizes(weight))
        weights.setdefault(moved_from(other), set()).add(one)
  return weights


def _sizes(value: Value) -> tuple[int, ...]:
  """Returns the sorted shape of a value, which a transposition does not change."""
  return tuple(sorted(value.aval.shape))


def with_scopes(
  program: Any, modules: Mapping[Key, Path], at: Key = (), *, without: str | None = None
) -> Any:
  """Returns a jaxpr whose equations at some positions have further scopes around their own.

  `without` is the beginning of scopes that all equations lose.
  """
  # The key is the position of the equation in each nested jaxpr, as in `Step.key`.
  jaxpr = opened(program)
  eqns = list[JaxprEqn]()
  for position, eqn in enumerate(jaxpr.eqns):
    key = (*at, position)
    source = eqn.source_info
    inner = [
      with_scopes(x.program, modules, (*key, i), without=without)
      for i, x in enumerate(inner_jaxprs(eqn) or ())
    ]
    own = source.name_stack
    own = own if without is None else without_scopes(own, without)
    # Around the scopes that it has: "bqhd,bkhd->bhqk" of `jnp.einsum` is no module.
    stack = within_scopes(own, modules.get(key, ()))
    params = with_inner(eqn, inner) if inner else eqn.params
    eqns.append(eqn.replace(source_info=source.replace(name_stack=stack), params=params))
  jaxpr = with_equations(jaxpr, eqns)
  return jaxpr if isinstance(program, Jaxpr) else program.replace(jaxpr=jaxpr)


def parameter_trees(graph: Graph) -> Iterator[str]:
  """Yields the argument trees in which the path of a module leads to an operand of its matmul."""
  for operation, *_ in graph.matmuls():
    for v in map(moved_from, operation.operands[:2]):
      *tree, _ = v.label.split("/")
      # The end of the label matches the end of the path. The rest of the label is the tree.
      shared = shared_names([tree[::-1], operation.where.path.split("/")[::-1]])
      if v.kind == "argument" and 0 < len(shared) < len(tree):
        yield "/".join(tree[: -len(shared)]) + "/"
