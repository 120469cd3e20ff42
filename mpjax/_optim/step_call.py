"""One call of a training step as a function of arrays, which runs in float32 where it can."""

import contextlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core import errors
from mpjax._core.leaves import Path, raw_value
from mpjax._core.nnx_objects import is_nnx_variable
from mpjax._core.trees import low_to_float32
from mpjax._core.types import Args, Array, DType, Function, Kwargs, Leaf
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.in_float32 import in_float32
from mpjax._jaxpr.locations import INNER_GRAD, Location, is_of_inner_gradient
from mpjax._optim.find_scale import leaves_of
from mpjax._optim.loss_scale import INT32_MAX
from mpjax._optim.optimizer_trees import strong

ResultPath: TypeAlias = tuple[str, ...]
"""Where a value is after a step: `(WRITTEN, *path)` or `(RETURNED, *path)`."""

WRITTEN, RETURNED = "written", "returned"
"""In a variable of the argument with this path, or in the results of the step."""

Spec: TypeAlias = tuple[tuple[int, ...], DType]
"""The shape and dtype of an array."""


class StepCall:
  """A step and its arguments, whose arrays can be replaced.

  Attributes:
    positional: how many arguments have no name. The others are in a dict behind them.
    arguments: all of them as one tree, `(*args, kwargs)`.
    leaves: their leaves by path, which are variables in objects of NNX.
    arrays: those leaves that are arrays, or the arrays that they hold.
  """

  def __init__(self, step: Function, args: Args, kwargs: Kwargs) -> None:
    self._step = step
    self.positional = len(args)
    self.arguments = (*args, kwargs)
    self.leaves = leaves_of(self.arguments)
    # Python numbers have no dtype, so the step gets them as they are.
    held = {path: raw_value(x) for path, x in self.leaves.items()}
    self.arrays = {path: jnp.asarray(x) for path, x in held.items() if hasattr(x, "dtype")}

  @property
  def specs(self) -> dict[Path, Spec]:
    """The shape and dtype of each array and Python number among the arguments."""
    return _specs(_with_numbers(self.leaves) | self.arrays)

  @property
  def variables(self) -> list[Path]:
    """The paths of the arrays that variables hold."""
    return [path for path in self.arrays if is_nnx_variable(self.leaves[path])]

  def argument_of(self, path: Path) -> Path:
    """Returns the path of the argument that a leaf is in."""
    return path[:2] if path[0] == f"[{self.positional}]" else path[:1]

  def run(self, values: Mapping[Path, Leaf]) -> dict[ResultPath, Leaf]:
    """Runs the step on other arrays; returns its results and the new values of variables."""
    new = {path: _replaced(x, values.get(path)) for path, x in self.leaves.items()}
    # A tied variable is at two paths. Both must get the same copy, or a write through one path
    # would be lost at the other.
    copies = {id(x): new[path] for path, x in self.leaves.items() if is_nnx_variable(x)}
    new |= {path: copies[id(x)] for path, x in self.leaves.items() if id(x) in copies}
    # The step writes to copies of the variables, so that the check changes nothing of the user's.
    treedef = jax.tree.structure(self.arguments, is_leaf=is_nnx_variable)
    *args, kwargs = treedef.unflatten(new.values())
    returned = leaves_of(self._step(*args, **kwargs))
    places = {(WRITTEN, *path): new[path] for path in self.variables}
    places |= {(RETURNED, *path): x for path, x in returned.items()}
    return _with_numbers(places)


class StepProgram:
  """The computation of one call of a step, in float32 if the step can be traced.

  In float32 a multiplication by a power of two rounds nothing, so that a right step returns the
  same at each loss scale.

  Attributes:
    traced: whether it could be traced. Otherwise it runs in its own precision.
    dtypes: the dtypes of all values that it computes, except by casts; empty if not traced.
    unscaled_gradient: the place of a float16 gradient inside the loss that `mpjax.inner_grad` did
      not compute; None if there is none.
  """

  def __init__(self, call: StepCall) -> None:
    self._call = call
    # The fallback for a step that cannot be traced: call it as it is.
    self._execute: Callable[..., dict[ResultPath, Leaf]] = call.run
    self._specs: dict[ResultPath, Spec] | None = None
    self._graph: Graph | None = None
    self.dtypes: set[DType | None] = set()
    self.unscaled_gradient: Location | None = None
    # A step that fails here also fails when it runs, and the user sees that error.
    with contextlib.suppress(*errors.REFUSALS, *errors.flax_errors()):
      self._trace()

  @property
  def traced(self) -> bool:
    """Whether the step could be traced."""
    return self._graph is not None

  def _trace(self) -> None:
    # Three uses of one trace: run it in float32, find new versions by shape, follow dependencies.
    jaxpr, shapes = jax.make_jaxpr(self._call.run, return_shape=True)(self._call.arrays)
    run, treedef = jax.jit(in_float32(jaxpr)), jax.tree.structure(shapes)
    graph = Graph(jaxpr)

    def execute(values: dict[Path, Array]) -> dict[ResultPath, Array]:
      return treedef.unflatten(run(*map(low_to_float32, jax.tree.leaves(values))))

    self._execute = execute
    self._specs = _specs(shapes)
    self._graph = graph
    # A cast to float16 alone computes nothing in float16.
    self.dtypes = {x.dtype for each in graph.operations if not each.casts for x in each.results}
    # The first one is enough for the warning.
    unscaled = (each.where for each in graph.operations if _is_unscaled_gradient(each))
    self.unscaled_gradient = next(unscaled, None)

  def run(self, values: Mapping[Path, Array]) -> dict[ResultPath, Leaf]:
    """Runs the step on copies of `values`, because it may donate its arguments."""
    return self._execute({path: jnp.copy(x) for path, x in values.items()})

  def specs(self, after: Mapping[ResultPath, Leaf]) -> dict[ResultPath, Spec]:
    """Returns the shape and dtype of each result. `after` are the results of one run."""
    return _specs(after) if self._specs is None else self._specs

  def depends_on(self, argument: Path) -> set[ResultPath] | None:
    """Returns which values depend on an argument, otherwise than by a bool; None if not traced."""
    if self._graph is None or self._specs is None:
      return None
    # JAX flattens a dict in the order of its sorted keys, so arguments and results are sorted
    # alike.
    which = [path == argument for path in sorted(self._call.arrays)]
    depends = self._graph.depends_on(which)
    return {place for place, is_one in zip(sorted(self._specs), depends, strict=True) if is_one}


def _is_unscaled_gradient(operation: Operation) -> bool:
  """Whether an operation computes a float16 gradient inside of a loss that is not scaled."""
  in_float16 = any(x.dtype == np.dtype("float16") for x in operation.results)
  scaled = (INNER_GRAD, False) in operation.step.name_stack
  return in_float16 and not scaled and is_of_inner_gradient(operation.step.name_stack)


def _replaced(leaf: Leaf, value: Leaf | None) -> Leaf:
  """Returns a leaf with another value; a variable keeps its metadata."""
  return jax.tree.map(lambda x: x if value is None else value, leaf)


def _with_numbers(leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
  """Returns the arrays, and Python numbers as arrays: `TrainState.step` begins as an int."""
  arrays = {path: _as_array(x) for path, x in leaves.items()}
  return {path: x for path, x in arrays.items() if hasattr(x, "dtype")}


def _as_array(x: Leaf) -> Leaf:
  """Returns the array in a leaf, or a Python number as an array; None for a large integer."""
  held = raw_value(x)
  if isinstance(held, int) and abs(held) > INT32_MAX:
    return None  # Too large for int32: a time in nanoseconds or a seed, which is no state.
  return strong(held)


def _specs(arrays: Mapping[Path, Leaf]) -> dict[Path, Spec]:
  """Returns the shape and dtype of each array."""
  return {path: (x.shape, x.dtype) for path, x in arrays.items()}
