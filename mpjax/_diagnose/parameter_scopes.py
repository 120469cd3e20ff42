"""Named scopes for operations that have none: those of the modules that parameters name.

Flax NNX and plain functions have no named scopes. There the parameters that an operation takes name
its module: a matmul with `params["mlp"]["up"]` is in "mlp/up", and an operation on the results of
"mlp/up" and "mlp/gate" is in "mlp".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._core.leaves import Path
from mpjax._core.types import Array, Function, PyTree
from mpjax._diagnose.call import Argument, Call
from mpjax._diagnose.paths import shared_names
from mpjax._jaxpr.compat import with_equations, within_scopes, without_scopes
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import Source
from mpjax._jaxpr.reader import inner_jaxprs, opened, with_inner
from mpjax._jaxpr.steps import Key

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
    traced = call.traced(fn)
    # Only the first argument holds parameters. The optimizer state repeats their paths, and would
    # name modules too.
    arguments = call.arguments(fn)
    owners = [one.module if one.is_first else () for one in arguments]
    named = with_scopes(traced.program, name_by_parameters(Graph(traced.program), owners))
    results = iter(evaluate(named, arguments, call.arrays))
    leaves = [next(results) if x is jax.Array else x for x in traced.leaves]
    return traced.structure.unflatten(leaves)

  return scoped


def name_by_parameters(graph: Graph, modules: Sequence[Path]) -> Mapping[Key, Path]:
  """Gives each operation without a path the path of a module, and returns these paths.

  Args:
    graph: the graph of a function, whose operations are changed.
    modules: the path of the module of each argument; () for an argument that is no parameter.
  """
  # An empty path means that the argument is no parameter.
  parameters = {v: path for v, path in zip(graph.arguments, modules, strict=True) if path}
  owners = _owners(graph, parameters)
  weights = _weights(graph, owners)
  # The modules in which other values are, if their operation is in one.
  inside: dict[Value, Path] = {}
  # The modules of the matmuls of the forward pass, by line.
  of_lines: dict[Source | None, set[Path]] = {}
  named: dict[Key, Path] = {}
  for operation in graph.operations:
    where, is_matmul = operation.where, operation.facts.flops is not None
    operands = _variable_operands(operation)
    # The modules of the parameters among the operands decide before those of the other values.
    own = [owners[v] for v in operands if v in owners]
    others = [inside[v] for v in operands if v in inside]
    # Several modules meet in the innermost module that contains all of them.
    path = shared_names(own or others)
    if where.direction != "forward":
      # A backward pass multiplies values of two modules. Their common module would be too coarse.
      # The product of a value and its cotangent takes no parameter, and its shape tells which. The
      # line of the forward pass tells the module too, unless it runs in several modules, such as a
      # loop over layers.
      of_line = of_lines.get(where.source, set()) if where.source is not None else set[Path]()
      differentiated = _differentiated(operation, weights) if is_matmul and not own else ()
      path = differentiated or (next(iter(of_line)) if len(of_line) == 1 else ()) or path
    elif is_matmul:
      # JAX keeps the line of the forward pass in the backward pass.
      of_scopes = tuple(where.path.split("/")) if where.path else path
      of_lines.setdefault(where.source, set()).add(of_scopes)
    # A value of parameters alone, such as a cast or transposed weight, is in `owners` already.
    is_of_parameters_alone = len(own) == len(operands)
    if (own or others) and not is_of_parameters_alone and not where.path:
      # The result of a layer belongs to the module around the layer.
      is_layer = len(set(own)) == 1 and not operation.joins
      inside.update(dict.fromkeys(operation.results, path[:-1] if is_layer else path))
    # A named scope of the user wins. Loops are not named: their body holds operations of several
    # modules.
    if path and not where.path and not operation.joins:
      named[operation.step.key] = path
      operation.where = where._replace(scopes=(*where.scopes, *path))
  return named


class _Weight(NamedTuple):
  """A parameter that a matmul multiplies with a value: its module, and its sorted shape."""

  module: Path
  sizes: tuple[int, ...]


def _differentiated(matmul: Operation, weights: Mapping[Value, set[_Weight]]) -> Path:
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
    if v in weights:
      modules.append({x.module for x in weights[v] if x.sizes == sizes})
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
