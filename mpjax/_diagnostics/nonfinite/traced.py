"""A function as a list of steps, with the arguments that it was called with."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import Args, Array, Function, KeyPath, Kwargs, Leaf, PyTree
from mpjax._diagnostics.nonfinite.program import Body, body_of

_COMPILER_OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""Else XLA may leave out a cast to float16 and back, with the overflow that is looked for."""


class Traced(NamedTuple):
  """A function, traced for its arguments.

  Fields:
    body: its steps. Arguments have the first numbers, then constants, then steps.
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

  @property
  def constants(self) -> list[int]:
    """The values that the function closes over, by their numbers in the body."""
    return list(self.body.consts)


def trace(fn: Function, args: Args, kwargs: Kwargs) -> Traced:
  """Returns a function as steps. It runs only as far as JAX traces it."""
  pairs, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
  leaves = [leaf for _, leaf in pairs]
  places = [i for i, x in enumerate(leaves) if _is_traced(x)]

  def flatten(call: tuple[Args, Kwargs]) -> list[Leaf]:
    found = jax.tree.leaves(call)
    return [found[i] for i in places]

  def flat(*arrays: Array) -> list[Array]:
    given = dict(zip(places, arrays, strict=True))
    call: PyTree = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
    result = fn(*call[0], **call[1])
    # Objects that the function wrote to, such as a model of NNX, hold what it computed.
    after = [x for i, x in enumerate(jax.tree.leaves(call)) if x is not given.get(i)]
    return [x for x in [*jax.tree.leaves(result), *after] if isinstance(x, jax.Array)]

  flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
  arrays = [leaves[i] for i in places]
  closed = jax.make_jaxpr(flat)(*arrays)
  body = body_of(closed, len(arrays) + len(closed.consts))
  names = _names(fn, len(args))
  texts = [_text(pairs[i][0], names) for i in places]
  return Traced(body, arrays, texts, [pairs[i][0] for i in places], flatten)


def _is_traced(x: Leaf) -> bool:
  """Whether a leaf is traced: an array. A number may be a shape, and what is not finite is none."""
  if isinstance(x, float):
    return not math.isfinite(x)
  if isinstance(x, np.generic):
    return jnp.issubdtype(x.dtype, jnp.inexact)
  if isinstance(x, np.ndarray):
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
  return isinstance(x, jax.Array)


def _names(fn: Function, count: int) -> list[str]:
  """Returns the names of positional arguments."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    return [f"args[{i}]" for i in range(count)]
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  more = range(max(0, count - len(names)))
  return [*names[:count], *(f"{rest}[{i}]" for i in more)]


def _text(path: KeyPath, names: Sequence[str]) -> str:
  part, first, *rest = path
  if part.idx == 0:
    return f"{names[first.idx]}{jax.tree_util.keystr(tuple(rest))}"
  return str(first.key) + jax.tree_util.keystr(tuple(rest))


def compiled(fn: Function) -> Function:
  """Returns a function that XLA compiles with every cast as it is written."""
  return jax.jit(fn, compiler_options=_COMPILER_OPTIONS)
