"""A method that is called a second time, on a copy of its module, in order to be traced."""

import dataclasses

import flax.linen as nn
import jax

from mpjax._core.trees import instances_in, mapped
from mpjax._core.types import Args, Kwargs, PyTree


@dataclasses.dataclass
class TracedCall:
  """A call of a method that Flax repeats on a copy of the module.

  Fields:
    module: the module itself.
    args: the positional arguments of the first call.
    kwargs: the keyword arguments of the first call.
    outputs: what our interceptor returned for the second call.
  """

  module: nn.Module
  args: Args
  kwargs: Kwargs
  outputs: tuple[()] | tuple[PyTree] = ()

  def arguments(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments of the second call, which came in as `args` and `kwargs`."""
    # The arguments of the first call. An interceptor of the user's that adds 1 has run in the first
    # call, and now runs again. Modules are an exception, since Flax's copies belong to the trace.
    first = self.args, self.kwargs
    if next(instances_in(first, nn.Module), None) is None:
      return first
    return in_order((args, kwargs), first)


def in_order(copy: PyTree, original: PyTree) -> PyTree:
  """Returns Flax's copy of a tree, with the fields of its modules, in the order of the original."""
  leaves, treedef = jax.tree.flatten(original)
  if jax.tree.structure(copy) != treedef:  # A class or interceptor of the user's has changed it.
    return copy
  # Flax's lifting copies modules and sorts dicts. So pair leaves by position in the sorted order,
  # and build the original containers from the copies.
  copies = dict(zip(map(id, leaves), jax.tree.leaves(copy), strict=True))
  for old in leaves:
    new = copies[id(old)]
    if isinstance(old, nn.Module) and new is not old:
      for field in dataclasses.fields(old):
        # Fields of modules hold dicts and modules too. `parent` would lead back up.
        if field.init and field.name != "parent":
          vars(new)[field.name] = in_order(getattr(new, field.name), getattr(old, field.name))
  return mapped(lambda x: copies[id(x)], original)
