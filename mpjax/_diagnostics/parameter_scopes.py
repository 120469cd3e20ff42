"""Named scopes for functions that have none, by the parameters that their operations take.

Flax NNX and plain functions write no named scopes. There a matmul with `params["mlp"]["up"]` is
put into "mlp/up", and an operation on what "mlp/up" and "mlp/gate" return into "mlp".
"""

from collections.abc import Sequence, Set

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from mpjax._core.paths import Path, leaf_paths
from mpjax._core.types import Array, Function, PyTree
from mpjax._diagnostics.flat import Leaves, is_array
from mpjax._jaxprs.atoms import Atom
from mpjax._jaxprs.autocast.scopes import MODULE
from mpjax._jaxprs.compat import within_scopes
from mpjax._jaxprs.graph import Graph, Value
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs, with_inner
from mpjax._jaxprs.locations import Location, Source, location


class _Known:
  """What is known of values: nothing, of one that no argument is needed for.

  Fields:
    owners: of what is computed from parameters alone, the path of the module that holds them.
    homes: of what is computed from data, the path of the module that computes it; None outside of
      any that is known.
  """

  def __init__(self) -> None:
    self.owners: dict[Var, Path] = {}
    self.homes: dict[Var, Path | None] = {}

  def give(self, names: Sequence[Atom], outer: "_Known", values: Sequence[Atom]) -> None:
    """Takes what another one knows of values that have other names there."""
    for name, value in zip(names, values, strict=True):
      if isinstance(name, Literal) or isinstance(value, Literal):
        continue
      if value in outer.owners:
        self.owners[name] = outer.owners[value]
      if value in outer.homes:
        self.homes[name] = outer.homes[value]


def with_parameter_scopes(fn: Function) -> Function:
  """Returns a function whose operations without a named scope are in one, if it is known.

  Its parameters are the arrays in its first argument.
  """

  def scoped(*args: PyTree, **kwargs: PyTree) -> PyTree:
    leaves = Leaves(args, kwargs, is_array)
    returned: list[PyTree] = []

    def flat(*operands: Array) -> list[Array]:
      new_args, new_kwargs = leaves.call(operands)
      returned[:] = [fn(*new_args, **new_kwargs)]
      return [x for x in jax.tree.leaves(returned) if is_array(x)]

    closed = jax.make_jaxpr(flat)(*leaves.arrays)
    known, variables = _Known(), dict(zip(leaves.positions, closed.jaxpr.invars, strict=True))
    known.homes = dict.fromkeys([*variables.values(), *closed.jaxpr.constvars])
    for i, path in enumerate(leaf_paths(args[0]) if args else ()):
      module = path[path[:1] == ("params",) : -1]
      if i in variables and module:
        del known.homes[variables[i]]
        known.owners[variables[i]] = module
    found = iter(eval_jaxpr(_scoped(closed.jaxpr, known), closed.consts, *leaves.arrays))
    (result,) = jax.tree.map(lambda x: next(found) if is_array(x) else x, returned)
    return result

  return scoped


def _scoped(jaxpr: Jaxpr, known: _Known) -> Jaxpr:
  return jaxpr.replace(eqns=[_in_scope(eqn, known) for eqn in jaxpr.eqns])


def _in_scope(eqn: JaxprEqn, known: _Known) -> JaxprEqn:
  """Returns an equation in its module, and notes what is known of its results."""
  if location(eqn).path:
    known.homes.update(dict.fromkeys(eqn.outvars))
    return eqn
  inner = inner_jaxprs(eqn)
  if inner:
    return eqn.replace(params=with_inner(eqn, [_entered(eqn, each, known) for each in inner]))
  operands = [v for v in eqn.invars if isinstance(v, Var)]
  owners = [known.owners[v] for v in operands if v in known.owners]
  data = [known.homes[v] for v in operands if v in known.homes]
  homes = [path for path in data if path is not None]
  path = _shared(owners or homes)
  if not data:
    known.owners.update(dict.fromkeys(eqn.outvars, path) if owners else {})
  elif len(set(owners)) == 1:  # What a layer returns is where the layer is.
    known.homes.update(dict.fromkeys(eqn.outvars, path[:-1]))
  else:
    known.homes.update(dict.fromkeys(eqn.outvars, path if owners or homes else None))
  return _named(eqn, path)


def _entered(eqn: JaxprEqn, inner: Inner, known: _Known) -> Program:
  """Returns a jaxpr inside an equation with scopes."""
  inside = _Known()
  if inner.operands is not None:
    inside.give(inner.jaxpr.invars, known, [eqn.invars[i] for i in inner.operands])
  inside.homes.update(dict.fromkeys(inner.jaxpr.constvars))
  # A carry that starts as zeros is data from the first step on.
  carry = inner.jaxpr.invars[inner.carry.start : inner.carry.stop]
  inside.homes.update((v, None) for v in carry if v not in inside.owners | inside.homes)
  new = _scoped(inner.jaxpr, inside)
  if inner.returns:
    known.give(eqn.outvars, inside, inner.jaxpr.outvars)
  return new if isinstance(inner.program, Jaxpr) else inner.program.replace(jaxpr=new)


def _named(eqn: JaxprEqn, path: Path) -> JaxprEqn:
  # Around the scopes that it has: "bqhd,bkhd->bhqk" of `jnp.einsum` is no module.
  stack = within_scopes(eqn.source_info.name_stack, path)
  return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack)) if path else eqn


def _shared(paths: Sequence[Path]) -> Path:
  """Returns what paths begin with, all of them."""
  found: list[str] = []
  for names in zip(*paths, strict=False):
    if len(set(names)) > 1:
      break
    found.append(names[0])
  return tuple(found)


def name_by_parameters(graph: Graph, parameters: Set[str]) -> None:
  """Gives operations without a path that of the module whose parameter they take.

  An operation of the backward pass has the path of the matmul on its line, if there is one only.

  Args:
    graph: its operations are changed.
    parameters: the names of the arguments that are parameters, such as "model/layer_1/kernel".
  """
  owners: dict[Value, Path] = {
    v: tuple(v.label.split("/")[1:-1]) for v in graph.arguments if v.label in parameters
  }
  lines: dict[Source | None, set[Path]] = {}
  unnamed = [each for each in graph.operations if _is_unnamed(each.where)]
  for operation in unnamed:
    paths = {owners[v] for v in operation.operands if owners.get(v)}
    if operation.moves or operation.casts:
      owners.update((v, path) for v in operation.results for path in paths)
    if len(paths) == 1:
      operation.where = _inside(operation.where, *paths)
      if operation.facts.flops is not None:
        lines.setdefault(operation.where.source, set()).update(paths)
  for operation in unnamed:
    where = operation.where
    paths = lines.get(where.source, set())
    if where.direction != "forward" and _is_unnamed(where) and len(paths) == 1 and where.source:
      operation.where = _inside(where, *paths)


def _is_unnamed(where: Location) -> bool:
  return not where.path and where.marked(MODULE) is None


def _inside(where: Location, path: Path) -> Location:
  return where._replace(scopes=(*where.scopes, *path))
