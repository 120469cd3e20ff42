"""Trace the outermost call of a view's method, and rewrite its operations.

A method reads and writes variables while it runs, and a jaxpr has only arguments and results. So
copies of all objects are called, with tracers as the values of variables. The copies are results of
the traced function. What the call has changed in them is put into the originals afterwards, as
NNX's own transforms do. `outermost` has the steps in their order.
"""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx

from mpjax._autocast.boundary import Boundary, Inside, NotTraceable
from mpjax._autocast.module_calls import array, attempts, call_rewritten
from mpjax._autocast.scopes import end_of_policy, region_of
from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.trees import is_floating, same_objects
from mpjax._core.types import Args, DType, Function, Kwargs, Leaf, PyTree
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
from mpjax.nnx._link import check_modes, is_view, module_path, resolved_policy

_TAG = "mpjax.policy"
"""The name of the context in which NNX maps each copy to its original."""


def current() -> Active | None:
  """Returns the active state of this thread; None outside of every policied method of NNX."""
  return ACTIVE.value if type(ACTIVE.value) is Active else None  # Linen's has a class of its own.


def calling_state() -> Active:
  """Returns the state in which a method of a view is called, inside of a Linen model too."""
  return current() or Active(tracing=ACTIVE.value is not None and ACTIVE.value.tracing)


def outermost(call: Function, name: str, module: nnx.Module, args: Args, kwargs: Kwargs) -> PyTree:
  """Returns `call(module, args, kwargs)`, with the operations of all modules inside rewritten.

  Args:
    call: the call of a method, as a function of the module and the method's arguments.
    name: the name of the method, for the errors of JAX.
    module: a module of a view.
    args: the positional arguments of the method.
    kwargs: its keyword arguments.
  """

  def rewrite(state: Active) -> PyTree:
    # Inside of the attempt, because each one starts from the present state.
    originals = _Originals.of(module, args, kwargs)
    originals.check_modes()
    models = Models(originals.modules)
    # In this context NNX maps each copy to its original, in the results of the traced function.
    with nnx.update_context(_TAG):
      trace, returned = _trace(call, name, originals, state)
      leaves = _put_back(originals, trace, returned)
    # The call has changed the view. Now change the user's modules behind it.
    for each, attributes in zip(originals.modules, originals.attributes, strict=True):
      copy_changes(each, attributes, models)
    return trace.outside(leaves)

  def run_as_python(_: Active) -> PyTree:
    return call(module, args, kwargs)

  state = dataclasses.replace(calling_state(), region=region_of(resolved_policy(module).policy))
  return attempts(rewrite, run_as_python, state, module_path(module))


# Before the call


@dataclasses.dataclass(frozen=True)
class _Originals:
  """The objects that are called and given, and what they hold before the call.

  Fields:
    module: the module whose method is called.
    inputs: the arguments of the method, positional ones and keywords.
    arguments: the leaves of the inputs. NNX objects are leaves.
    modules: the module, the modules in it and in the arguments, and other `nnx.Pytree` objects.
    variables: the variables in all of these.
    attributes: the attributes of each module.
    orders: the order of the attributes of each module.
    dtypes: the dtype in which each variable is stored; None if it holds no floating array.
  """

  module: nnx.Module
  inputs: tuple[Args, Kwargs]
  arguments: list[Leaf]
  modules: list[nnx.Pytree]
  variables: list[nnx.Variable[Leaf]]
  attributes: list[dict[str, Any]]
  orders: list[object]
  dtypes: list[DType | None]

  @classmethod
  def of(cls, module: nnx.Module, args: Args, kwargs: Kwargs) -> "_Originals":
    """Returns the objects of a call."""
    # Objects of NNX in containers count too: an `nnx.Rngs` in a dict.
    arguments = Boundary((args, kwargs), is_node).leaves
    modules, variables = parts_of((module, arguments))
    values = [variable.get_raw_value() for variable in variables]
    return cls(
      module=module,
      inputs=(args, kwargs),
      arguments=arguments,
      modules=modules,
      variables=variables,
      attributes=[dict(vars(each)) for each in modules],
      orders=orders_of((module, arguments)),
      dtypes=[value.dtype if is_floating(value) else None for value in values],
    )

  def check_modes(self) -> None:
    """Raises MpjaxRuntimeError as `check_modes` does: a copy leads to no model to compare with."""
    for module in filter(is_view, self.modules):
      check_modes(module)

  def as_tree(self) -> PyTree:
    """Returns a tree of arrays, of which NNX makes copies of the objects."""

    def with_arrays(x: Any) -> Any:
      return jax.tree.map(array, x) if is_nnx_variable(x) else x

    # `to_tree` takes objects apart. `array` makes JAX arrays of NumPy arrays, which a trace would
    # take for constants.
    tree = nnx.to_tree((self.module, self.arguments), ctxtag=_TAG)
    return jax.tree.map(with_arrays, tree, is_leaf=is_nnx_variable)

  def containers(self) -> set[int]:
    """Returns the identities of the lists and dicts of Python that are attributes of modules."""
    values = (x for attributes in self.attributes for x in attributes.values())
    return {id(x) for x in values if isinstance(x, (list, dict))}

  def restore(self) -> None:
    """Gives each module the attributes that it had before the call."""
    for module, attributes in zip(self.modules, self.attributes, strict=True):
      vars(module).clear()
      vars(module).update(attributes)


# The traced function


class _Returned(NamedTuple):
  """The result of the traced function, a tree of arrays.

  Fields:
    written: the new values of variables by number, if the call has changed nothing but values.
    tree: the leaves of the method's result, and all copies if the call has changed more.
  """

  written: dict[int, Leaf]
  tree: PyTree


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


def _trace(
  call: Function, name: str, originals: _Originals, state: Active
) -> tuple[_Trace, _Returned]:
  """Calls copies of the originals with rewritten operations; returns facts and results."""
  traces: list[_Trace] = []

  def on_copies(tree: PyTree) -> _Returned:
    # A derivative traces the function again, after the call. Its context is over then, so a new one
    # is needed.
    with nnx.update_context(_TAG) if traces else contextlib.nullcontext():
      trace, returned = _traced_body(call, originals, tree, state)
    traces.append(trace)
    return returned

  on_copies.__name__ = name  # JAX names the function in errors.
  policy = resolved_policy(originals.module).policy
  returned = call_rewritten(on_copies, (originals.as_tree(),), state, policy, _inputs_in)
  return traces[0], returned


def _inputs_in(operands: Args) -> list[Leaf]:
  """Returns the arrays among the operands that are no parameters."""
  values = jax.tree.leaves(operands, is_leaf=is_nnx_variable)
  return jax.tree.leaves([x for x in values if not _layers.state_kind(x).is_parameter])


def _traced_body(
  call: Function, originals: _Originals, tree: PyTree, state: Active
) -> tuple[_Trace, _Returned]:
  """Calls the method of the copies that a tree describes; returns facts and results."""
  copies = _Copies.of(tree, originals)
  leaves, outside = _call_copies(call, originals, copies, state)
  # A result that is a node leaves the call, and needs its object too.
  changed = copies.have_changed() or any(map(is_node, leaves))
  written = copies.keep_dtypes(originals.dtypes)
  results = (leaves, copies.objects if changed else ())
  trace = _Trace(changed, orders_of(results), outside)
  # An array in a plain attribute is static to NNX. The original would hold a tracer.
  if changed and hides_tracer(copies.objects):
    raise NotTraceable("sets an array as a new attribute, which NNX takes to be static")
  return trace, _Returned({} if changed else written, nnx.to_tree(results, ctxtag=_TAG))


@dataclasses.dataclass(frozen=True)
class _Copies:
  """Copies of the originals with tracers as values, and what they hold before the call.

  Fields:
    objects: the copy of the module, and the leaves of the arguments with copies of NNX objects.
    modules: those of the originals, in the same order.
    variables: likewise.
    values: the value of each variable before the call.
    contents: all else that they hold before the call, as `contents_of` returns it.
  """

  objects: tuple[nnx.Module, list[Leaf]]
  modules: list[nnx.Pytree]
  variables: list[nnx.Variable[Leaf]]
  values: list[Leaf]
  contents: list[object]

  @classmethod
  def of(cls, tree: PyTree, originals: _Originals) -> "_Copies":
    """Returns the copies that a tree describes, with attributes in the order of the originals."""
    objects = nnx.from_tree(tree, is_inner=True, ctxtag=_TAG)
    put_in_order(objects, originals.orders)
    modules, variables = parts_of(objects)
    values = [variable.get_raw_value() for variable in variables]
    return cls(objects, modules, variables, values, contents_of(objects))

  def have_changed(self) -> bool:
    """Whether anything but values of variables is another object than before the call."""
    return not same_objects(contents_of(self.objects), self.contents)

  def keep_dtypes(self, dtypes: list[DType | None]) -> dict[int, Leaf]:
    """Gives variables that were written their stored dtypes; returns their values by number."""
    written: dict[int, Leaf] = {}
    before = zip(self.variables, self.values, dtypes, strict=True)
    for i, (variable, old, dtype) in enumerate(before):
      new = variable.get_raw_value()
      # By identity: only a written variable has another object as its value.
      if new is not old:
        variable.set_raw_value(new if dtype is None else end_of_policy(new, dtype))
        written[i] = variable.get_raw_value()
    return written


# The call of the copies


class _Replacement(NamedTuple):
  """An attribute of a copy that holds another value during the call.

  Fields:
    attributes: those of the copy.
    name: that of the attribute.
    original: its value before the call, which the copy shares with the original.
    value: its value during the call.
  """

  attributes: dict[str, Any]
  name: str
  original: Any
  value: Any

  def begin(self) -> None:
    """Sets the value for the call."""
    self.attributes[self.name] = self.value

  def end(self) -> None:
    """Sets the original again, unless the call has set the attribute."""
    if self.attributes.get(self.name) is self.value:
      self.attributes[self.name] = self.original


def _call_copies(
  call: Function, originals: _Originals, copies: _Copies, state: Active
) -> tuple[list[Leaf], Function]:
  """Calls the method of the copies in a state.

  Returns:
    The leaves of the method's result, and a function that builds the user's result from them.
  """
  inside, replacements = _arguments_and_containers(originals, copies)
  replacements += _methods_of_copies(originals, copies)
  # The first part has the arguments. The second, containers of modules, is in the replacements.
  (args, kwargs), _ = inside.args
  for replacement in replacements:
    replacement.begin()
  with ACTIVE(state):
    outputs = call(copies.objects[0], args, kwargs)
  # While the replacements are in place: `leave` finds changes of the copied containers there.
  leaves, outside = inside.leave(outputs)
  for replacement in replacements:
    replacement.end()
  return leaves, outside


def _arguments_and_containers(
  originals: _Originals, copies: _Copies
) -> tuple[Inside, list[_Replacement]]:
  """Returns copies of the arguments, and of lists and dicts that modules share with their copies.

  Such an attribute is static to NNX, which does not copy it. The call puts tracers into the copy.
  `Inside.leave` finds them there, and puts arrays into the original. The arguments may hold the
  same lists and dicts, so all are copied at once.
  """
  containers = originals.containers()
  # Attributes whose list or dict is the same object in the original and in the copy.
  shared = [
    (attributes, name, x)
    for attributes in map(vars, copies.modules)
    for name, x in attributes.items()
    if id(x) in containers
  ]
  boundary = Boundary((originals.inputs, [x for *_, x in shared]), is_node)
  # The leaves of the arguments come first, and have copies. The others are in shared containers.
  only_in_shared = boundary.leaves[len(originals.arguments) :]
  inside = boundary.inside([*copies.objects[1], *only_in_shared])
  values = inside.args[1]
  return inside, [_Replacement(*place, x) for place, x in zip(shared, values, strict=True)]


def _methods_of_copies(originals: _Originals, copies: _Copies) -> list[_Replacement]:
  """Returns the attributes that hold methods, bound to the copies.

  NNX takes a method to be static. Bound to the original, it would read parameters from outside of
  the traced call, as constants.
  """
  pairs = zip(originals.modules, copies.modules, strict=True)
  # Original and copy have the same position in the order of the graph.
  counterparts = {id(original): copy for original, copy in pairs}
  return [
    _Replacement(attributes, name, x, rebound(x, counterparts))
    for attributes in map(vars, copies.modules)
    for name, x in attributes.items()
    if isinstance(x, HOLD_METHODS)
  ]


# After the call


def _put_back(originals: _Originals, trace: _Trace, returned: _Returned) -> list[Leaf]:
  """Changes the originals as the call has changed their copies; returns the leaves of its result.

  A variable may belong to a function further out, of `jax.grad` say, and NNX refuses to write to
  it. So a call that has changed no more than values sets the values that it has written.
  """
  if not trace.changed:
    for i, value in returned.written.items():
      originals.variables[i].set_raw_value(value)
    return returned.tree[0]
  try:
    # With more changes, NNX writes the copies back into the originals.
    updated = nnx.from_tree(returned.tree, is_inner=False, ctxtag=_TAG)
  except BaseException:
    originals.restore()  # NNX empties modules before it finds a variable that it refuses.
    raise
  put_in_order(updated, trace.orders)
  return updated[0]
