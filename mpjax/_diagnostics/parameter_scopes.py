"""Modules for functions that name none, by the parameters that their operations take.

In Flax NNX and plain functions a matmul with `params["mlp"]["up"]` is put into "mlp/up", and an
operation on what "mlp/up" and "mlp/gate" return into "mlp".
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn

from mpjax._core.leaves import Path
from mpjax._core.types import Function, PyTree
from mpjax._diagnostics.arguments import Call
from mpjax._jaxprs.compat import within_scopes
from mpjax._jaxprs.graph import Graph, Value
from mpjax._jaxprs.locations import Source
from mpjax._jaxprs.reader import Program, inner_jaxprs, opened, with_inner
from mpjax._jaxprs.steps import Key


def with_parameter_scopes(fn: Function) -> Function:
  """Returns a function whose operations without a named scope are in that of a module."""

  def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
    call = Call(args, kwargs)
    closed, _ = call.traced(fn)
    graph = Graph(closed)
    arguments = zip(graph.arguments, call.arguments(fn), strict=True)
    owners = {v: one.module for v, one in arguments if one.is_first}
    jaxpr = opened(_scoped(closed, name_by_parameters(graph, owners)))
    results = iter(eval_jaxpr(jaxpr, closed.consts, *call.arrays))
    return jax.tree.map(lambda x: next(results) if isinstance(x, jax.Array) else x, call.returned)

  return scoped


def name_by_parameters(graph: Graph, owners: Mapping[Value, Path]) -> Mapping[Key, Path]:
  """Gives operations without a path that of a module, given those of parameters; returns them."""
  owners = {v: path for v, path in owners.items() if path}  # and of what parameters alone give
  homes: dict[Value, Path] = {}  # where other values are, if what computes them is in a module
  modules, lines = dict[Key, Path](), dict[Source | None, set[Path]]()
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
      modules[operation.step.key] = path
      operation.where = where._replace(scopes=(*where.scopes, *path))
    if own and len(own) == len(operands):
      owners.update(dict.fromkeys(results, path))
    elif own or inside:  # What a layer returns is where the layer is.
      is_layer = len(set(own)) == 1 and not operation.joins
      homes.update(dict.fromkeys(results, path[:-1] if is_layer else path))
  return modules


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
  jaxpr = jaxpr.replace(eqns=eqns)
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
