"""Trace the outermost call of a view's method, and rewrite its operations.

A method reads and writes variables while it runs, and a jaxpr has only arguments and results. So
copies of all objects are called, with tracers as the values of variables. The copies are results of
the traced function. What the call has changed in them is put into the originals afterwards, as
NNX's own transforms do.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer

from mpjax._autocast.boundary import Boundary, NotTraceable
from mpjax._autocast.module_calls import array, call_rewritten
from mpjax._autocast.scopes import end_of_policy
from mpjax._core.trees import is_floating, same_objects
from mpjax._core.types import Args, Function, Kwargs, Leaf, PyTree
from mpjax._policy.active import ACTIVE, Active
from mpjax.nnx import _layers
from mpjax.nnx._changes import Models, copy_changes
from mpjax.nnx._graph import (
  HOLD_METHODS,
  contents_of,
  hides_tracer,
  is_node,
  orders_of,
  parts_of,
  put_in_order,
  rebound,
)
from mpjax.nnx._link import check_modes, is_view

_TAG = "mpjax.policy"
"""The name of the context in which NNX maps each copy to its original."""


def calling_state() -> Active:
  """Returns the state in which a method of a view is called, inside of a Linen model too."""
  state = ACTIVE.value
  if type(state) is Active:  # Linen's has a class of its own.
    return state
  return Active(tracing=state is not None and state.tracing)


def check_modes_in_call(module: nnx.Module, args: Args, kwargs: Kwargs) -> None:
  """Raises MpjaxRuntimeError if a mode of a model in a call has changed without that of its view.

  Call it before the call is traced: the copies in a trace lead to no model to compare with, and an
  error in a trace would say that the model cannot be traced.
  """
  modules, variables = parts_of((module, Boundary((args, kwargs), is_node).leaves))
  # Inside a transform, such as `nnx.jit`, the modules may be its copies of the view.
  traced = any(isinstance(variable.get_raw_value(), Tracer) for variable in variables)
  check_modes(filter(is_view, modules), traced=traced)


class _Trace(NamedTuple):
  """Facts about a call that has been traced. They hold no tracer.

  Fields:
    changed: whether the call has changed more than values of variables.
    orders: the order in which it has left the attributes of modules, if so.
    outside: builds the user's result from its leaves, and changes containers among the arguments.
  """

  changed: bool
  orders: list[object]
  outside: Function


def rewritten(
  call: Function, name: str, module: nnx.Module, args: Args, kwargs: Kwargs, state: Active
) -> PyTree:
  """Returns `call(module, args, kwargs)`, with the operations of all modules inside rewritten.

  It traces the call, rewrites it, and runs it, and changes the modules as the call does.

  Args:
    call: the call of a method, as a function of the module and the method's arguments.
    name: the name of the method, for the errors of JAX.
    module: a module of a view.
    args: the positional arguments of the method.
    kwargs: its keyword arguments.
    state: the state of the call, in the region of the module.
  """
  # 1. All that the call can reach before it begins, since each attempt starts from the present
  # state: the modules and variables in the module and in the arguments, also in containers there
  # (an `nnx.Rngs` in a dict), and what they hold.
  arguments = Boundary((args, kwargs), is_node).leaves
  modules, variables = parts_of((module, arguments))
  attributes = [dict(vars(each)) for each in modules]
  orders = orders_of(modules)
  values = [variable.get_raw_value() for variable in variables]
  dtypes = [value.dtype if is_floating(value) else None for value in values]

  # 2. The call as a pure function of a tree, from which NNX makes copies of the objects.
  traces: list[_Trace] = []

  def on_copies(tree: PyTree) -> tuple[dict[int, Leaf], PyTree]:
    # A derivative traces the function again, after the call. Its context is over then, so a new one
    # is needed.
    with nnx.update_context(_TAG) if traces else contextlib.nullcontext():
      copies = nnx.from_tree(tree, is_inner=True, ctxtag=_TAG)
      copied_modules, copied_variables = parts_of(copies)
      put_in_order(copied_modules, orders)
      tracers = [variable.get_raw_value() for variable in copied_variables]
      contents = contents_of(copies)
      triples = [*zip(modules, attributes, copied_modules, strict=True)]
      leaves, outside = _call_copies(call, copies, triples, (args, kwargs), state)
      # A result that is a node leaves the call, and needs its object too.
      changed = not same_objects(contents_of(copies), contents) or any(map(is_node, leaves))
      # A variable that was written gets its stored dtype.
      written: dict[int, Leaf] = {}
      for i, (variable, old, dtype) in enumerate(
        zip(copied_variables, tracers, dtypes, strict=True)
      ):
        new = variable.get_raw_value()
        # By identity: only a written variable has another object as its value.
        if new is not old:
          variable.set_raw_value(new if dtype is None else end_of_policy(new, dtype))
          written[i] = variable.get_raw_value()
      # The copies leave the trace only if the call has changed more than values of variables.
      results = (leaves, copies if changed else ())
      trace = _Trace(changed, orders_of(parts_of(results)[0]) if changed else [], outside)
      # An array in a plain attribute is static to NNX. The original would hold a tracer.
      if changed and hides_tracer(copies):
        raise NotTraceable("sets an array as a new attribute, which NNX takes to be static")
      returned = ({} if changed else written), nnx.to_tree(results, ctxtag=_TAG)
    traces.append(trace)
    return returned

  on_copies.__name__ = name  # JAX names the function in errors.

  def inputs(operands: Args) -> list[Leaf]:
    # The arrays that are no parameters.
    parts = jax.tree.leaves(operands, is_leaf=is_node)
    return jax.tree.leaves([x for x in parts if not _layers.state_kind(x).is_parameter])

  def with_arrays(x: Any) -> Any:
    # A trace would take NumPy arrays for constants.
    return jax.tree.map(array, x) if is_node(x) else x

  # In this context NNX maps each copy to its original, in the results of the traced function.
  with nnx.update_context(_TAG):
    tree = nnx.to_tree((module, arguments), ctxtag=_TAG)
    tree = jax.tree.map(with_arrays, tree, is_leaf=is_node)
    written, returned = call_rewritten(on_copies, (tree,), state, inputs)

    # 3. Change the originals as the call has changed their copies.
    trace = traces[0]
    # The user's objects behind those of the view, before the call changes either.
    models = Models(modules) if trace.changed else None
    if models is None:
      # A variable may belong to a function further out, of `jax.grad` say, and NNX refuses to write
      # to it. So a call that has changed no more than values sets those that it has written.
      for i, value in written.items():
        variables[i].set_raw_value(value)
      leaves = returned[0]
    else:
      # With more changes, NNX writes the copies back into the originals.
      try:
        updated = nnx.from_tree(returned, is_inner=False, ctxtag=_TAG)
      except BaseException:
        # NNX empties modules before it finds a variable that it refuses.
        for each, before in zip(modules, attributes, strict=True):
          vars(each).clear()
          vars(each).update(before)
        raise
      put_in_order(parts_of(updated)[0], trace.orders)
      leaves = updated[0]
  if models is not None:
    # The call has changed the view. Now change the user's modules behind it.
    for each, before in zip(modules, attributes, strict=True):
      copy_changes(each, before, models)
  return trace.outside(leaves)


def _call_copies(
  call: Function,
  copies: tuple[nnx.Module, list[Leaf]],
  triples: Sequence[tuple[nnx.Pytree, dict[str, Any], nnx.Pytree]],
  inputs: tuple[Args, Kwargs],
  state: Active,
) -> tuple[list[Leaf], Function]:
  """Calls the method of the copies in a state.

  Args:
    call: as for `rewritten`.
    copies: the copy of the module, and the leaves of the arguments with copies of NNX objects.
    triples: each module, its attributes before the call, and its copy.
    inputs: the arguments of the method, positional ones and keywords.
    state: the state.

  Returns:
    The leaves of the method's result, and a function that builds the user's result from them.
  """
  shared: list[tuple[dict[str, Any], str, Any]] = []
  methods: list[tuple[dict[str, Any], str, Any]] = []
  for _, before, copy in triples:
    for name, x in vars(copy).items():
      # A list or dict that is static to NNX is the same object in the original and in the copy.
      if isinstance(x, (list, dict)) and before.get(name) is x:
        shared.append((vars(copy), name, x))
      elif isinstance(x, HOLD_METHODS):
        methods.append((vars(copy), name, x))
  # The call puts tracers into copies of shared lists and dicts. `Inside.leave` finds them there,
  # and puts arrays into the originals. The arguments may hold the same lists and dicts, so all are
  # copied at once.
  boundary = Boundary((inputs, [x for *_, x in shared]), is_node)
  module, leaves = copies
  # The leaves of the arguments come first, and have copies. The others are in shared containers.
  inside = boundary.inside([*leaves, *boundary.leaves[len(leaves) :]])
  (args, kwargs), containers = inside.args
  # NNX takes a method to be static. Bound to the original, it would read parameters from outside of
  # the traced call, as constants.
  counterparts = {id(original): copy for original, _, copy in triples}
  bound = [rebound(x, counterparts) for *_, x in methods]
  values = [*containers, *bound]
  replaced = [(*place, x) for place, x in zip([*shared, *methods], values, strict=True)]
  for attributes, name, _, value in replaced:
    attributes[name] = value
  with ACTIVE(state):
    outputs = call(module, args, kwargs)
  # While the copies are in place: `leave` finds changes of the copied containers there.
  result = inside.leave(outputs)
  for attributes, name, original, value in replaced:
    if attributes.get(name) is value:  # Otherwise the call has set the attribute.
      attributes[name] = original
  return result
