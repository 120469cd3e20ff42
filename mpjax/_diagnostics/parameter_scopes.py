"""Modules for functions that name none, by the parameters that their operations take.

Flax NNX and plain functions write no named scopes. There a matmul with `params["mlp"]["up"]` is
put into "mlp/up", and an operation on what "mlp/up" and "mlp/gate" return into "mlp".
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn

from mpjax._core.leaves import Path, leaf_paths
from mpjax._core.types import Array, Function, PyTree
from mpjax._diagnostics.arguments import Call, is_array
from mpjax._jaxprs.compat import within_scopes
from mpjax._jaxprs.graph import Graph, Value
from mpjax._jaxprs.locations import Location, Source
from mpjax._jaxprs.reader import Program, inner_jaxprs, opened, with_inner
from mpjax._jaxprs.steps import Key


def with_parameter_scopes(fn: Function) -> Function:
  """Returns a function whose operations without a named scope are in that of a module."""
  # Its parameters are the arrays in its first argument.

  def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
    call = Call(args, kwargs)
    returned: list[PyTree] = []

    def flat(*operands: Array) -> list[Array]:
      new_args, new_kwargs = call.with_arrays(operands)
      returned[:] = [fn(*new_args, **new_kwargs)]
      return [x for x in jax.tree.leaves(returned) if is_array(x)]

    closed = jax.make_jaxpr(flat)(*call.arrays)
    graph, owners = Graph(closed), dict[Value, Path]()
    values = dict(zip(call.positions, graph.arguments, strict=True))
    for i, path in enumerate(leaf_paths(args[0]) if args else ()):
      module = path[path[:1] == ("params",) : -1]
      if i in values and module:
        owners[values[i]] = module
    jaxpr = opened(_scoped(closed, _modules(graph, owners)))
    results = iter(eval_jaxpr(jaxpr, closed.consts, *call.arrays))
    (result,) = jax.tree.map(lambda x: next(results) if is_array(x) else x, returned)
    return result

  return scoped


def _modules(graph: Graph, owners: dict[Value, Path]) -> Mapping[Key, Path]:
  """Returns in which modules operations are that have no named scope, given those of parameters."""
  # Of what is computed from data, the path of the module that computes it; None outside of any.
  homes: dict[Value, Path | None] = {v: None for v in graph.arguments if v not in owners}
  modules: dict[Key, Path] = {}
  for operation in graph.operations:
    operands, results = operation.operands, operation.results
    homes.update((v, None) for v in operands if v.kind == "constant")
    own = [owners[v] for v in operands if v in owners]
    data = [homes[v] for v in operands if v in homes]
    inside = [path for path in data if path is not None]
    path = _shared(own or inside)
    if operation.where.path:
      homes.update(dict.fromkeys(results))
    elif operation.joins:  # What comes into a loop, or out of it, is where it was.
      owners.update((v, path) for v in results for path in own)
      homes.update((v, path) for v in results for path in data)
      if operation.joins == "carry" and not own:  # One that starts as zeros is data soon.
        homes.update((v, homes.get(v)) for v in results)
    else:
      if path:
        modules[operation.step.key] = path
      if not data:
        owners.update(dict.fromkeys(results, path) if own else {})
      else:  # What a layer returns is where the layer is.
        home = path[:-1] if len(set(own)) == 1 else path
        homes.update(dict.fromkeys(results, home if own or inside else None))
  return modules


def _shared(paths: Sequence[Sequence[str]]) -> Path:
  """Returns what paths begin with, all of them."""
  alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
  return tuple(first for first, *_ in alike)


def _scoped(program: Program, modules: Mapping[Key, Path], at: Key = ()) -> Program:
  """Returns a jaxpr with its operations in named scopes."""
  jaxpr, eqns = opened(program), list[JaxprEqn]()
  for position, eqn in enumerate(jaxpr.eqns):
    key, inner = (*at, position), inner_jaxprs(eqn)
    if key in modules:
      # Around the scopes that it has: "bqhd,bkhd->bhqk" of `jnp.einsum` is no module.
      stack = within_scopes(eqn.source_info.name_stack, modules[key])
      eqns.append(eqn.replace(source_info=eqn.source_info.replace(name_stack=stack)))
    elif inner:
      new = [_scoped(each.program, modules, (*key, i)) for i, each in enumerate(inner)]
      eqns.append(eqn.replace(params=with_inner(eqn, new)))
    else:
      eqns.append(eqn)
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


def name_by_parameters(graph: Graph, owners: Mapping[Value, Path]) -> None:
  """Gives operations without a path that of the module whose parameter they take."""
  # An operation of the backward pass has the path of the matmul on its line, if there is one only.
  owners, lines = dict(owners), dict[Source | None, set[Path]]()
  for operation in graph.operations:
    paths, where = {owners[v] for v in operation.operands if owners.get(v)}, operation.where
    if len(paths) != 1 or (where.path and {tuple(where.path.split("/"))} != paths):
      continue
    if operation.moves or operation.casts:
      owners.update((v, path) for v in operation.results for path in paths)
    if operation.facts.flops is not None:
      lines.setdefault(where.source, set()).update(paths)
    if not where.path:
      operation.where = _inside(where, *paths)
  for operation in graph.operations:
    where = operation.where
    paths = lines.get(where.source, set())
    if where.direction != "forward" and not where.path and len(paths) == 1 and where.source:
      operation.where = _inside(where, *paths)


def _inside(where: Location, path: Path) -> Location:
  return where._replace(scopes=(*where.scopes, *path))
