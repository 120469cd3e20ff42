"""In which dtype a program uses what it is given: what may be stored in less, at no change."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._types import PyTree

_MOVES = frozenset(
  {
    *(
      "broadcast_in_dim",
      "concatenate",
      "copy",
      "copy_p",
      "dynamic_slice",
      "expand_dims",
      "gather",
    ),
    *("optimization_barrier", "reshape", "rev", "select_n", "sharding_constraint", "slice"),
    *("split", "squeeze", "transpose"),
  }
)
"""Operations that move numbers about and leave each as it is: rounding may as well come before."""

_ALIGNED = frozenset(
  {
    *("call", "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"),
    *("custom_vmap_call", "shard_map"),
  }
)
"""Primitives whose operands are the inputs of the one program inside them, in order."""


_HandedOn: TypeAlias = Callable[[int], set[Any]]


def used_dtypes(fun: Callable[..., Any], tree: PyTree, *args: Any) -> list[np.dtype[Any] | None]:
  """Returns for each leaf of `tree` the one floating dtype that `fun(tree, *args)` rounds it to.

  Args:
    fun: a function of trees of arrays.
    tree: its first argument: arrays, or their shapes and dtypes.
    args: its other arguments.

  Returns:
    The dtypes in the order of the leaves; None for a leaf that some operation uses as it is, or
    that is rounded to several dtypes, or never used.
  """
  program = jax.make_jaxpr(fun)(tree, *args)
  count = len(jax.tree.leaves(tree))
  return [_only(_uses(program.jaxpr, v)) for v in program.jaxpr.invars[:count]]


def _only(uses: set[Any]) -> Any:
  return next(iter(uses)) if len(uses) == 1 else None


def _uses(jaxpr: Jaxpr, var: Any, handed_on: _HandedOn = lambda _: {None}) -> set[Any]:
  """Returns the dtypes that a variable is rounded to; None is among them for any other use.

  Args:
    jaxpr: the program that it is a variable of.
    var: the variable.
    handed_on: returns the uses of a result of the program, by its position.
  """
  found: set[Any] = set()
  for i, out in enumerate(jaxpr.outvars):
    if out is var:
      found |= handed_on(i)
  for eqn in jaxpr.eqns:
    places = [i for i, operand in enumerate(eqn.invars) if operand is var]
    if places:
      found |= _uses_in(jaxpr, eqn, places, handed_on)
  return found


def _uses_in(jaxpr: Jaxpr, eqn: JaxprEqn, places: Sequence[int], handed_on: _HandedOn) -> set[Any]:
  name, params = eqn.primitive.name, eqn.params

  def result(i: int) -> set[Any]:
    out = eqn.outvars[i]
    return _uses(jaxpr, out, handed_on) if isinstance(out, Var) else set()

  if name == "convert_element_type":
    new, old = np.dtype(params["new_dtype"]), _dtype(eqn.invars[0])
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (new, old))
    return {new} if floating and new.itemsize < old.itemsize else {None}
  if name in _MOVES and _one_kind(eqn):
    return set().union(*map(result, range(len(eqn.outvars))))
  found: set[Any] = set()
  for inner, position in _inside(eqn, places):
    if inner is None:
      found.add(None)
    elif name in _ALIGNED:
      found |= _uses(inner, inner.invars[position], result)
    else:
      found |= _uses(inner, inner.invars[position])
  return found


def _one_kind(eqn: JaxprEqn) -> bool:
  """Whether all floating operands are one: what is put together with others has their dtype."""
  floating = [v for v in eqn.invars if jnp.issubdtype(_dtype(v), jnp.floating)]
  return all(v is floating[0] for v in floating)


def _inside(eqn: JaxprEqn, places: Sequence[int]) -> list[tuple[Jaxpr | None, int]]:
  """Returns the programs inside an equation that read the operands at `places`, and where.

  None stands for a use that is not known, or one that may not change its dtype: a loop's carry.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in _ALIGNED:
    bodies = [v for v in params.values() if isinstance(v, (ClosedJaxpr, Jaxpr))]
    if len(bodies) == 1:
      return [(_open(bodies[0]), place) for place in places]
  if name == "scan":
    carried = range(params["num_consts"], params["num_consts"] + params["num_carry"])
    body = _open(params["jaxpr"])
    return [(None if place in carried else body, place) for place in places]
  if name == "cond":
    branches = [_open(branch) for branch in params["branches"]]
    return [(branch if place > 0 else None, place - 1) for place in places for branch in branches]
  if name == "while":
    return [_inside_while(params, place) for place in places]
  return [(None, place) for place in places]


def _inside_while(params: Any, place: int) -> tuple[Jaxpr | None, int]:
  of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
  if place < of_condition:
    return _open(params["cond_jaxpr"]), place
  if place < of_condition + of_body:
    return _open(params["body_jaxpr"]), place - of_condition
  return None, place


def _dtype(operand: Any) -> Any:
  return operand.aval.dtype


def _open(program: Any) -> Jaxpr:
  return program.jaxpr if isinstance(program, ClosedJaxpr) else program
