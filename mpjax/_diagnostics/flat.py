"""Functions of trees as functions of the arrays in them, which can be traced and run as a jaxpr."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from mpjax._core.errors import MpjaxTypeError
from mpjax._core.paths import Path, key_names
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, Array, Function, KeyPath, Kwargs, Leaf, PyTree


class Leaves:
  """The leaves of the arguments of a call: some are traced, and the others stay as they are.

  Attributes:
    positions: of those that are traced.
    arrays: those that are traced.
  """

  def __init__(self, args: Args, kwargs: Kwargs, is_traced: Callable[[Leaf], bool]) -> None:
    self._leaves, self._tree = jax.tree.flatten((args, kwargs))
    self.positions = [i for i, x in enumerate(self._leaves) if is_traced(x)]
    self.arrays = [self._leaves[i] for i in self.positions]

  def call(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    """Returns the arguments with other arrays for those that are traced."""
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return jax.tree.unflatten(self._tree, leaves)

  def run(self, fn: Function, arrays: Sequence[Leaf]) -> list[tuple[KeyPath, Leaf]]:
    """Returns, by path, what a function returns, and the arrays it writes to its arguments."""
    call = self.call(arrays)
    before = {id(x): x for x in jax.tree.leaves(call)}
    returned = jax.tree_util.tree_leaves_with_path(fn(*call[0], **call[1]))
    # Objects that the function wrote to, such as a model of NNX, hold what it computed.
    after = jax.tree_util.tree_leaves_with_path(call)
    return [*returned, *((p[2:], x) for p, x in after if is_array(x) and id(x) not in before)]

  def traced(self, fn: Function) -> tuple[ClosedJaxpr, list[KeyPath]]:
    """Returns the jaxpr of a function of the arrays, and the paths of its results, the arrays."""
    paths: list[KeyPath] = []

    def flat(*arrays: Array) -> list[Leaf]:
      results = [pair for pair in self.run(fn, arrays) if is_array(pair[1])]
      paths[:] = [path for path, _ in results]
      return [x for _, x in results]

    flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return jax.make_jaxpr(flat)(*self.arrays), paths


class Call:
  """The concrete arguments of a call.

  Attributes:
    operands: the arrays, in the order of the leaves.
  """

  def __init__(self, args: Args, kwargs: Kwargs, where: str) -> None:
    check_concrete(jax.tree.leaves((args, kwargs)), f"{where}(*args)")
    self._leaves = Leaves(args, kwargs, is_array)
    self.operands: list[Array] = [jnp.asarray(x) for x in self._leaves.arrays]

  def traced(self, fn: Function) -> tuple[ClosedJaxpr, list[Path]]:
    """Returns the jaxpr of a function of these arguments, and the paths of its results."""
    program, paths = self._leaves.traced(fn)
    return program, [key_names(path) for path in paths]


def check_concrete(leaves: Sequence[Leaf], where: str) -> None:
  """Raises MpjaxTypeError if a leaf of the arguments has no value."""
  expected = "concrete arrays"
  if any(isinstance(x, Tracer) for x in leaves):
    fix = "Call it on the host, outside of jax.jit and jax.grad."
    raise MpjaxTypeError(where, expected=expected, got="a traced one", fix=fix)
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
    fix = "Pass arrays: it computes with their values, as mpjax.audit does not."
    raise MpjaxTypeError(where, expected=expected, got="a jax.ShapeDtypeStruct", fix=fix)


def gradient_of(fn: Function, scale: float = 1.0) -> Callable[..., PyTree]:
  """Returns the value and gradient of a loss by the floating arrays in its first argument.

  Args:
    fn: returns a scalar, or one and aux.
    scale: a factor on the loss, which the gradients carry.
  """

  def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
    if not args:
      raise MpjaxTypeError(
        "mpjax.ranges(fn) or mpjax.tune(loss_fn)",
        expected="a loss whose first argument holds the parameters",
        got="no argument by position",
        fix="Pass the parameters first, by position: (params, x=x).",
      )
    leaves, tree = jax.tree.flatten(args[0])
    moving = {i: x for i, x in enumerate(leaves) if is_array(x) and is_inexact(x)}

    def loss(moving: Mapping[int, Leaf]) -> tuple[Leaf, PyTree]:
      first = jax.tree.unflatten(tree, [moving.get(i, x) for i, x in enumerate(leaves)])
      returned = fn(first, *args[1:], **kwargs)
      value, *aux = returned if isinstance(returned, tuple) else (returned,)
      check_scalar(value)
      scaled = value if scale == 1 else value * np.asarray(scale, value.dtype)
      return scaled, [x for x in jax.tree.leaves(aux) if is_array(x)]

    return jax.value_and_grad(loss, has_aux=True)(moving)

  return gradient


def check_scalar(value: object) -> None:
  """Raises MpjaxTypeError unless a loss has returned a floating scalar."""
  shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
  if shape != () or not is_inexact(value):
    raise MpjaxTypeError(
      "mpjax.ranges(fn) or mpjax.tune(loss_fn)",
      expected="a loss that returns a floating scalar, or one and aux",
      got=repr(type(value)) if shape is None else f"one that returns {dtype}{[*shape]}",
      fix="Take the mean, as in lambda params, x: jnp.mean(fn(params, x) ** 2).",
    )


def is_array(x: Leaf) -> bool:
  """Whether a leaf is an array with a dtype; a Python number is not."""
  return isinstance(x, (jax.Array, np.ndarray))
