"""The outermost call of a view: traced once as a function of its variables, and rewritten.

A method reads and writes variables while it runs, and a jaxpr has only arguments and results. So
copies are called: of the module and of all that is given to it. What the copies have become is a
result of the jaxpr, and is put back into the objects themselves. NNX's own transforms do it in this
way, by the same public functions.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

import flax.errors
import jax
from flax import nnx
from jax.core import Tracer

from mpjax._core.active import ACTIVE, Active
from mpjax._core.trees import is_floating
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree
from mpjax._jaxprs import traced_calls
from mpjax._jaxprs.autocast import NotTraceable, leaving, region_of, traceable, tree_leaves
from mpjax.nnx import _spec
from mpjax.nnx._layers import kind_of

_TAG = "mpjax.policy"

_WHERE = "mpjax.nnx.with_policy(model, policy)"

Variable: TypeAlias = nnx.Variable[Leaf]


Given: TypeAlias = tuple[nnx.Module, Args, Kwargs]
"""A module of a view, and the arguments of its method: trees of arrays, modules and variables."""


def rewritten(call: Function, name: str, given: Given) -> PyTree:
  """Returns `call(*given)`, with the operations of all modules inside rewritten.

  The call reads and writes the variables of what it is given, and of nothing else.
  """
  module = given[0]
  policy = _spec.how_it_runs(module).policy

  def attempt(state: Active) -> PyTree:
    raws = (variable.get_raw_value() for variable in _variables(given))
    stored = [raw.dtype if is_floating(raw) else None for raw in raws]

    def on_copies(copied: PyTree) -> tuple[bool, dict[int, Leaf], PyTree]:
      given = nnx.from_tree(copied, is_inner=True, ctxtag=_TAG)
      variables = _variables(given)
      held = [v.get_raw_value() for v in variables]
      before, arguments, contained = _kept(given), _flat(given[1:]), _contained(given)
      with ACTIVE(state):
        outputs = call(*given)
      tree_leaves(outputs, "returns", is_leaf=_spec.is_node)
      now = _kept(given)
      if not _same(arguments, _flat(given[1:])):
        raise NotTraceable("changes an argument in place")
      written = {}
      for i, (variable, old, dtype) in enumerate(zip(variables, held, stored, strict=True)):
        new = variable.get_raw_value()
        if new is not old and dtype is not None:
          variable.set_raw_value(leaving(new, dtype))
        if new is not old:
          written[i] = variable.get_raw_value()
      if _contained(given) - contained:
        raise NotTraceable("puts an array into a container that NNX takes to be static")
      changed = len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
      # What is only read may belong to a function that is traced further out: nobody may write it.
      nodes = any(map(_spec.is_node, jax.tree.leaves(outputs, is_leaf=_spec.is_node)))
      changed = changed or nodes
      done = (outputs, given if changed else ())
      if changed and _hides_tracer(given):
        raise NotTraceable("sets an array as a new attribute, which NNX takes to be static")
      return changed, {} if changed else written, nnx.to_tree(done, ctxtag=_TAG)

    on_copies.__name__ = name  # It is what JAX's errors say.
    nodes = (node for _, node in nnx.iter_graph(module, graph=True))
    views = [(node, dict(vars(node))) for node in nodes if _spec.is_view(node)]
    for node, _ in views:
      _spec.check_modes(node)  # The copies lead to no model.
    with nnx.update_context(_TAG):
      copied = jax.tree.map(
        lambda x: jax.tree.map(traced_calls.array, x) if isinstance(x, nnx.Variable) else x,
        nnx.to_tree(given, ctxtag=_TAG),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
      )
      cast = traced_calls.rewrite_calls(
        traceable(on_copies), policy, _data, traced_calls.as_computed, _WHERE
      )
      with ACTIVE(state):
        changed, written, done = cast(copied)
      if not changed:
        variables = _variables(given)
        for i, new in written.items():
          variables[i].set_raw_value(new)
        return done[0]
      outputs, _ = nnx.from_tree(done, is_inner=False, ctxtag=_TAG)
    for node, before in views:
      _copy_changes(node, before)
    return outputs

  def python(_: Active) -> PyTree:
    return call(*given)

  state = dataclasses.replace(_spec.calling_state(), region=region_of(policy))
  foreign = flax.errors.TraceContextError
  return traced_calls.attempts(
    attempt, python, given[1:], state, _spec.path_of(module), _WHERE, foreign
  )


def _variables(tree: PyTree) -> list[Variable]:
  """Returns the variables of a tree of modules and arrays, in the order of its graph."""
  return [x for _, x in nnx.iter_graph(tree, graph=True) if isinstance(x, nnx.Variable)]


def _data(args: Args) -> list[bool]:
  """Whether each array decides the dtype of what it meets."""
  leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Variable))
  return [not kind_of(x).neutral for x in leaves for _ in jax.tree.leaves(x)]


def _same(before: tuple[list[Leaf], object], now: tuple[list[Leaf], object]) -> bool:
  return before[1] == now[1] and all(a is b for a, b in zip(before[0], now[0], strict=True))


def _kept(tree: PyTree) -> list[object]:
  """Returns what the modules and variables of a tree hold: the same objects until it changes.

  The arrays in variables are no part: each variable that is given another one is told by itself.
  """
  found: list[object] = []
  for _, node in nnx.iter_graph(tree, graph=True):
    if isinstance(node, nnx.Variable):
      raw = node.get_raw_value()
      leaves = [jax.Array] if isinstance(raw, jax.Array) else jax.tree.leaves(raw)
      found += [node, *node.get_metadata().values(), *leaves]
    elif isinstance(node, nnx.Pytree):
      found += [node, *vars(node), *vars(node).values()]
  return found


def _attributes(tree: PyTree) -> Iterator[object]:
  """Yields the values of the attributes of all modules in a tree."""
  for _, node in nnx.iter_graph(tree, graph=True):
    if isinstance(node, nnx.Pytree):
      yield from vars(node).values()


def _hides_tracer(tree: PyTree) -> bool:
  """Whether an attribute of a module is a tracer that is none of the leaves of the module."""
  known = set(map(id, jax.tree.leaves(nnx.to_tree(tree))))
  return any(isinstance(x, Tracer) and id(x) not in known for x in _attributes(tree))


def _contained(tree: PyTree) -> set[int]:
  """Returns the identities of the tracers in plain containers that modules hold."""
  held = (x for x in _attributes(tree) if isinstance(x, (list, dict, set)))
  parts = (part for x in held for part in (x.values() if isinstance(x, dict) else x))
  return {id(x) for x in parts if isinstance(x, Tracer)}


def _flat(tree: PyTree) -> tuple[list[Leaf], object]:
  """Returns leaves and structure; what modules and variables hold comes back, and is no part."""
  return jax.tree.flatten(tree, is_leaf=_spec.is_node)


def _copy_changes(module: nnx.Module, before: dict[str, object]) -> None:
  """Copies to the user's module what NNX has put into that of a view, or taken out."""
  model, now = _spec.model_of(module), dict(vars(module))
  for name in now.keys() | before.keys() if model is not None else ():
    old, new = before.get(name), now.get(name)
    if isinstance(new, (nnx.Variable, jax.Array)):
      if new is not old:
        setattr(model, name, new)
    elif isinstance(old, nnx.Variable) and new is None and vars(model).get(name) is old:
      delattr(model, name)
