"""A function as a list of steps, with the arguments that it was called with."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.paths import key_names
from mpjax._core.types import Args, Array, Function, KeyPath, Kwargs, Leaf
from mpjax._diagnostics.arguments import positional_names
from mpjax._diagnostics.flat import Leaves
from mpjax._jaxprs.steps import Body, body_of


class Traced(NamedTuple):
  """A function, traced for its arguments.

  Fields:
    body: its steps.
    leaves: the arguments that are arrays.
    names: of these, such as "params['w']".
    paths: of these, in (args, kwargs).
    flatten: from (args, kwargs), like those it was traced for, to such leaves.
  """

  body: Body
  leaves: Sequence[Leaf]
  names: Sequence[str]
  paths: Sequence[KeyPath]
  flatten: Callable[[tuple[Args, Kwargs]], list[Leaf]]

  def owners(self) -> dict[int, str]:
    """Returns the paths of the modules whose parameters the arguments may be."""
    return dict(zip(self.body.inputs, map(_module, self.paths), strict=True))


def trace(fn: Function, args: Args, kwargs: Kwargs) -> Traced:
  """Returns a function as steps. It runs only as far as JAX traces it."""
  leaves = Leaves(args, kwargs, _is_traced)
  every = jax.tree_util.tree_leaves_with_path((args, kwargs))
  paths = [every[i][0] for i in leaves.positions]

  def flatten(call: tuple[Args, Kwargs]) -> list[Leaf]:
    found = jax.tree.leaves(call)
    return [found[i] for i in leaves.positions]

  def flat(*arrays: Array) -> list[Array]:
    return [x for _, x in leaves.run(fn, arrays) if isinstance(x, jax.Array)]

  flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
  body = body_of(jax.make_jaxpr(flat)(*leaves.arrays), compiled=True)
  names = positional_names(fn, len(args))
  return Traced(body, leaves.arrays, [_text(path, names) for path in paths], paths, flatten)


def _is_traced(x: Leaf) -> bool:
  """Whether a leaf is traced: an array. A number may be a shape, and what is not finite is none."""
  if isinstance(x, float):
    return not math.isfinite(x)
  if isinstance(x, np.generic):
    return jnp.issubdtype(x.dtype, jnp.inexact)
  if isinstance(x, np.ndarray):
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
  return isinstance(x, jax.Array)


def _module(path: KeyPath) -> str:
  """Returns the path in the tree of an argument, without the names of the parameter."""
  names = [name for name in key_names(path[2:]) if name != "value"]
  return "/".join(names[:-1])


def _text(path: KeyPath, names: Sequence[str]) -> str:
  part, first, *rest = path
  if part.idx == 0:
    return f"{names[first.idx]}{jax.tree_util.keystr(tuple(rest))}"
  return str(first.key) + jax.tree_util.keystr(tuple(rest))


def compiled(fn: Function) -> Function:
  """Returns a function that XLA compiles with every cast as it is written.

  Else it may leave out a cast to float16 and back, with the overflow that is looked for. What runs
  once need not be fast, and LLVM takes half of the time that compiling takes for a CPU.
  """
  options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
  if jax.default_backend() == "cpu":
    options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
  return jax.jit(fn, compiler_options=options)
