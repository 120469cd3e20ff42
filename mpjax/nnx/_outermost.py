"""A module of a view: how it is told from others, mapped back to the user's, and called outermost.

A method reads and writes variables while it runs, and a jaxpr has only arguments and results. So
copies are called: of the module and of all that is given to it. What the copies have become is a
result of the jaxpr, and is put back into the objects themselves. NNX's own transforms do it in this
way, by the same public functions.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
from flax import nnx
from jax.core import Tracer

from mpjax._core.active import ACTIVE, Active
from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError
from mpjax._core.rules import ModulePolicy
from mpjax._core.trees import is_floating, same_objects
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree
from mpjax._jaxprs.autocast import Boundary, NotTraceable, leaving, region_of
from mpjax._jaxprs.autocast.boundary import in_order
from mpjax._jaxprs.module_calls import array, attempts, rewritten
from mpjax.nnx._layers import MODES, kind_of

Variable: TypeAlias = nnx.Variable[Leaf]

SPEC = "mpjax_spec"
"""The class attribute that holds the `ModulePolicy` of a view's modules."""

LINK = "_mpjax_link"
"""The attribute that leads from a view's module to the user's."""


class Link:
  """Leads from a module of a view to the user's module, as long as both are there.

  All links are equal: whose view it is makes no difference to a jaxpr. A copy of the module that a
  transform created is not the module that the link was created for, and its link leads nowhere.

  Attributes:
    path: that of the module in the model, for errors.
    modes: those of the user's module (`deterministic`, say) as they were when the view was created,
      but for those that were set on the view since.
  """

  def __init__(
    self, path: str, view: nnx.Pytree | None = None, model: nnx.Pytree | None = None
  ) -> None:
    self.path = path
    self.view = weakref.ref(view) if view is not None else None
    self.model = weakref.ref(model) if model is not None else None
    flags = {} if model is None else vars(model)
    self.modes = {name: flags[name] for name in MODES if isinstance(flags.get(name), bool)}

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Link)

  def __hash__(self) -> int:
    return 0

  def __reduce__(self) -> tuple[Callable[[str], "Link"], tuple[str]]:
    return Link, (self.path,)


def is_view(module: object) -> bool:
  """Whether a module is one of a view's."""
  return hasattr(type(module), SPEC)


def resolved_policy(module: nnx.Pytree) -> ModulePolicy:
  return getattr(type(module), SPEC)


def policy_text(module: nnx.Pytree) -> str:
  """Returns the policy of a module of a view as `with_policy` takes it."""
  policy = resolved_policy(module).policy
  return repr(None if policy is None else str(policy))


def model_of(module: nnx.Pytree) -> nnx.Pytree | None:
  """Returns the user's module behind one of a view; None for a copy that a transform created."""
  link = vars(module).get(LINK)
  if not isinstance(link, Link) or link.view is None or link.view() is not module:
    return None
  return None if link.model is None else link.model()


def check_modes(module: nnx.Pytree) -> None:
  """Raises MpjaxRuntimeError if a mode was set on the user's module alone after `with_policy`."""
  # That is what `model.eval()` does: the view would go on training. A mode that was set on the view
  # is its own: a view for evaluation stays one while the model goes on training.
  model = model_of(module)
  if model is None:
    return
  link, now = vars(module)[LINK], vars(model)
  for name, flag in link.modes.items():
    if now.get(name) is not flag:
      raise MpjaxRuntimeError(
        f"{link.path or 'the root'} ({type(module).__name__}) of a view of mpjax.with_policy",
        expected="no mode of the model to change after the view was created",
        got=f"{name}={now.get(name)} on the model, and {name}={flag} still on the view",
        fix="Write view.eval() or view.train(), once: a mode that was set on the view is its own "
        "from then on. Or make a new view: with_policy(model, policy).",
      )


def check_set(module: nnx.Pytree, name: str, value: object) -> None:
  """Raises MpjaxTypeError if a module with parameters that is none of a view's is set on one."""
  if not isinstance(value, nnx.Module) or is_view(value) or isinstance(value, nnx.bridge.ToNNX):
    return
  if any(isinstance(node, nnx.Param) for _, node in nnx.iter_graph(value, graph=True)):
    raise MpjaxTypeError(
      f"{type(module).__name__}.{name}, set on a view of mpjax.with_policy",
      expected="a variable, an array, or a module of the view",
      got=f"a new {type(value).__name__}, which would run without the policy and which the model "
      "would not have",
      fix="Make it in __init__, or set it on the model, and then make a new view: "
      "with_policy(model, policy).",
    )


def path_of(module: nnx.Pytree) -> str:
  """Returns where a module is in the model, for rules and errors."""
  link = vars(module).get(LINK)
  return link.path if isinstance(link, Link) else type(module).__name__


def current() -> Active | None:
  """Returns the active state of this thread; None outside of every policied method of NNX."""
  state = ACTIVE.value
  return state if type(state) is Active else None  # Linen's is of a class of its own.


def calling_state() -> Active:
  """Returns the state in which a method of a view is called, inside of a Linen model too."""
  around = ACTIVE.value
  return current() or Active(tracing=around is not None and around.tracing)


def is_node(x: object) -> bool:
  """Whether `x` is a module, a variable or another object of NNX."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def parts_of(tree: PyTree) -> tuple[list[nnx.Pytree], list[Variable]]:
  """Returns the modules of a tree, and its variables, in the order of its graph."""
  parts = [x for _, x in nnx.iter_graph(tree, graph=True)]
  variables = [x for x in parts if isinstance(x, nnx.Variable)]
  return [x for x in parts if isinstance(x, nnx.Pytree)], variables


def orders_of(tree: PyTree) -> list[object]:
  """Returns the order of what each module of a tree holds."""
  return [Boundary(vars(node), is_node).order for node in parts_of(tree)[0]]


def put_in_order(tree: PyTree, orders: Iterable[object]) -> None:
  """Puts what the modules of a tree hold, which NNX has sorted, into an order."""
  for node, order in zip(parts_of(tree)[0], orders, strict=True):
    ordered = in_order(vars(node), order)
    if ordered is not vars(node):
      vars(node).clear()
      vars(node).update(ordered)


def forget_mode(module: nnx.Pytree, name: str) -> None:
  """Notes that a mode was set on a view's module: from now on it is its own."""
  link = vars(module).get(LINK)
  if isinstance(link, Link):
    link.modes.pop(name, None)


# The outermost call

_TAG = "mpjax.policy"


def outermost(call: Function, name: str, inputs: tuple[nnx.Module, Args, Kwargs]) -> PyTree:
  """Returns `call(*inputs)`, with the operations of all modules inside rewritten.

  The call reads and writes the variables of what it is given, and of nothing else.
  """
  module = inputs[0]
  policy = resolved_policy(module).policy

  def attempt(state: Active) -> PyTree:
    boundary = Boundary(inputs[1:], is_node)
    everything = (module, boundary.leaves)
    nodes, variables = parts_of(everything)
    held_before = [(node, dict(vars(node))) for node in nodes]
    views = [(node, before) for node, before in held_before if is_view(node)]
    for node, _ in views:
      check_modes(node)  # The copies lead to no model.
    orders = orders_of(everything)
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
      put_in_order(copies, orders)
      nodes, variables = parts_of(copies)
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
      changed = not same_objects(now, before) or any(map(is_node, leaves))
      done = (leaves, copies if changed else ())
      returned.append((outside, orders_of(done)))
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
      changed, written, done = rewritten(on_copies, (copied,), state, policy, _data)
      if changed:
        try:
          done = nnx.from_tree(done, is_inner=False, ctxtag=_TAG)
        except BaseException:  # NNX has taken objects apart: one is of a trace further out.
          for node, before in held_before:
            vars(node).clear()
            vars(node).update(before)
          raise
        put_in_order(done, returned[0][1])
      else:
        for i, new in written.items():
          variables[i].set_raw_value(new)
    for node, before in views:
      _copy_changes(node, before)
    return returned[0][0](done[0])

  state = dataclasses.replace(calling_state(), region=region_of(policy))
  return attempts(attempt, lambda _: call(*inputs), state, path_of(module))


def _data(args: Args) -> list[Leaf]:
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
  attributes = Boundary(list(map(vars, parts_of(tree)[0])), is_node).leaves
  return any(isinstance(x, Tracer) and id(x) not in leaf_ids for x in attributes)


def _copy_changes(module: nnx.Pytree, before: dict[str, object]) -> None:
  """Sets on the user's module what a call has set on that of a view, or takes it out."""
  model, now = model_of(module), dict(vars(module))
  for name in now.keys() | before.keys() if model is not None else ():
    old, new = before.get(name), now.get(name)
    same = new is old and (name in now) == (name in before)
    if same or name == LINK or isinstance(new, nnx.Pytree):
      continue
    held = vars(model).get(name)
    if name not in now:
      if held is old:
        delattr(model, name)
    elif _is_plain(new):
      setattr(model, name, new)
      forget_mode(module, name)
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
  leaves = jax.tree.leaves(x, is_leaf=is_node)
  return not any(isinstance(leaf, jax.Array) or is_node(leaf) for leaf in leaves)
