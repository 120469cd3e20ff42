"""The outermost call of a view: traced once as a function of its variables, and rewritten.

A method reads and writes variables while it runs, and a jaxpr has only arguments and results. So
copies are called: of the module and of all that is given to it. What the copies have become is a
result of the jaxpr, and is put back into the objects themselves. NNX's own transforms do it in this
way, by the same public functions.
"""

import contextlib
import dataclasses
from typing import Any

import flax.errors
import jax
from flax import nnx
from jax.core import Tracer

from mpjax._core.active import ACTIVE, Active
from mpjax._core.trees import is_floating, same_objects
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree
from mpjax._jaxprs.autocast import Boundary, NotTraceable, leaving, region_of
from mpjax._jaxprs.module_calls import array, attempts, rewrite_calls
from mpjax.nnx import _spec
from mpjax.nnx._layers import kind_of

_TAG = "mpjax.policy"

_WHERE = "mpjax.with_policy(model, policy)"


def rewritten(call: Function, name: str, inputs: tuple[nnx.Module, Args, Kwargs]) -> PyTree:
  """Returns `call(*inputs)`, with the operations of all modules inside rewritten.

  The call reads and writes the variables of what it is given, and of nothing else.
  """
  module = inputs[0]
  policy = _spec.resolved_policy(module).policy

  def attempt(state: Active) -> PyTree:
    boundary = Boundary(inputs[1:], _spec.is_node)
    everything = (module, boundary.leaves)
    nodes, variables = _spec.parts_of(everything)
    held_before = [(node, dict(vars(node))) for node in nodes]
    views = [(node, before) for node, before in held_before if _spec.is_view(node)]
    for node, _ in views:
      _spec.check_modes(node)  # The copies lead to no model.
    orders = _spec.orders_of(everything)
    attributes = (x for _, before in held_before for x in before.values())
    containers = {id(x): x for x in attributes if isinstance(x, (list, dict))}
    raws = (v.get_raw_value() for v in variables)
    stored = [raw.dtype if is_floating(raw) else None for raw in raws]
    returned: list[tuple[Function, list[object]]] = []

    def on_copies(copied: PyTree) -> tuple[bool, dict[int, Leaf], PyTree]:
      # A derivative traces it again, when the context is over.
      with nnx.update_context(_TAG) if returned else contextlib.nullcontext():
        return called(copied)

    def called(copied: PyTree) -> tuple[bool, dict[int, Leaf], PyTree]:
      copies = nnx.from_tree(copied, is_inner=True, ctxtag=_TAG)
      _spec.put_in_order(copies, orders)
      nodes, variables = _spec.parts_of(copies)
      held = [v.get_raw_value() for v in variables]
      before = _contents(copies)
      # A container that a copy shares is static to NNX. The copy gets one of its own; what the call
      # puts into that goes to the original.
      each = [(items, key, x) for items in map(vars, nodes) for key, x in items.items()]
      shared = [x for x in each if id(x[2]) in containers]
      static = Boundary([x for *_, x in shared], lambda x: type(x) not in (list, dict))
      own = static.inside(static.leaves)
      for (items, key, _), x in zip(shared, own.args, strict=True):
        items[key] = x
      inside = boundary.inside(copies[1])
      with ACTIVE(state):
        outputs = call(copies[0], *inside.args)
      leaves, outside = inside.leave(outputs, own)
      for (items, key, original), x in zip(shared, own.args, strict=True):
        if items.get(key) is x:
          items[key] = original
      now = _contents(copies)
      written = {}
      for i, (variable, old, dtype) in enumerate(zip(variables, held, stored, strict=True)):
        new = variable.get_raw_value()
        if new is not old and dtype is not None:
          variable.set_raw_value(leaving(new, dtype))
        if new is not old:
          written[i] = variable.get_raw_value()
      # What is only read may belong to a function that is traced further out: nobody may write it.
      changed = not same_objects(now, before) or any(map(_spec.is_node, leaves))
      done = (leaves, copies if changed else ())
      returned.append((outside, _spec.orders_of(done)))
      if changed and _hides_tracer(copies):
        raise NotTraceable("sets an array as a new attribute, which NNX takes to be static")
      return changed, {} if changed else written, nnx.to_tree(done, ctxtag=_TAG)

    on_copies.__name__ = name  # It is what JAX's errors say.
    with nnx.update_context(_TAG):
      copied = jax.tree.map(
        lambda x: jax.tree.map(array, x) if isinstance(x, nnx.Variable) else x,
        nnx.to_tree(everything, ctxtag=_TAG),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
      )
      cast = rewrite_calls(on_copies, policy, _data, lambda returned: returned, _WHERE)
      with ACTIVE(state):
        changed, written, done = cast(copied)
      if changed:
        try:
          done = nnx.from_tree(done, is_inner=False, ctxtag=_TAG)
        except BaseException:  # NNX has taken objects apart: one is of a trace further out.
          for node, before in held_before:
            vars(node).clear()
            vars(node).update(before)
          raise
        _spec.put_in_order(done, returned[0][1])
      else:
        for i, new in written.items():
          variables[i].set_raw_value(new)
    for node, before in views:
      _copy_changes(node, before)
    return returned[0][0](done[0])

  state = dataclasses.replace(_spec.calling_state(), region=region_of(policy))
  path, foreign = _spec.path_of(module), flax.errors.TraceContextError
  return attempts(attempt, lambda _: call(*inputs), state, path, _WHERE, foreign)


def _data(args: Args) -> list[Leaf]:
  """Returns the arrays that decide the dtype of what they meet."""
  leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Variable))
  return [array for x in leaves if not kind_of(x).neutral for array in jax.tree.leaves(x)]


def _contents(tree: PyTree) -> list[object]:
  """Returns what the modules and variables of a tree hold: the same objects until it changes.

  The arrays in variables are no part: each variable that is given another one is told by itself.
  """
  contents: list[object] = []
  for _, node in nnx.iter_graph(tree, graph=True):
    if isinstance(node, nnx.Variable):
      raw = node.get_raw_value()
      leaves = [jax.Array] if isinstance(raw, jax.Array) else jax.tree.leaves(raw)
      contents += [node, *node.get_metadata().values(), *leaves]
    elif isinstance(node, nnx.Pytree):
      contents += [node, *vars(node), *vars(node).values()]
    elif isinstance(node, (list, dict)):
      contents += [node, *node, *(node.values() if isinstance(node, dict) else ())]
  return contents


def _hides_tracer(tree: PyTree) -> bool:
  """Whether an attribute of a module is a tracer that is none of the leaves of the module."""
  leaf_ids = set(map(id, jax.tree.leaves(nnx.to_tree(tree))))
  attributes = Boundary(list(map(vars, _spec.parts_of(tree)[0])), _spec.is_node).leaves
  return any(isinstance(x, Tracer) and id(x) not in leaf_ids for x in attributes)


def _copy_changes(module: nnx.Pytree, before: dict[str, object]) -> None:
  """Sets on the user's module what a call has set on that of a view, or takes it out."""
  model, now = _spec.model_of(module), dict(vars(module))
  for name in now.keys() | before.keys() if model is not None else ():
    old, new = before.get(name), now.get(name)
    same = new is old and (name in now) == (name in before)
    if same or name == _spec.LINK or isinstance(new, nnx.Pytree):
      continue
    held = vars(model).get(name)
    if name not in now:
      if held is old:
        delattr(model, name)
    elif _is_plain(new):
      setattr(model, name, new)
      _spec.forget_mode(module, name)
    # A container of both, which NNX has copied for the view. Its own are none of the model.
    elif held is old and type(new) is type(held):
      vars(module)[name] = _as_new(held, new)


def _as_new(held: Any, new: Any) -> Any:
  """Returns a container that holds what a copy of NNX does; else the copy."""
  if type(held) is not type(new) or type(held) not in (list, dict):
    return new
  if isinstance(held, list):
    held[:] = [*map(_as_new, held, new), *new[len(held) :]]
    return held
  parts = {key: _as_new(held.get(key), x) for key, x in new.items()}
  held.clear()
  held.update(parts)
  return held


def _is_plain(x: object) -> bool:
  """Whether a module may hold something as it is: a variable, an array, or no container of any."""
  if isinstance(x, (nnx.Variable, jax.Array)):
    return True
  leaves = jax.tree.leaves(x, is_leaf=_spec.is_node)
  return not any(isinstance(leaf, jax.Array) or _spec.is_node(leaf) for leaf in leaves)
