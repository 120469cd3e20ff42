"""In which dtype a jaxpr uses what it is given, and storing it in that: less, at no change."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.leaves import refuse_overflow
from mpjax._core.paths import path_text
from mpjax._core.trees import cast_leaf, is_floating
from mpjax._core.types import Array, DType, Function, Leaf, Params, PyTree
from mpjax._jaxprs.atoms import aval_of
from mpjax._jaxprs.inner_jaxprs import Inner, inner_jaxprs
from mpjax._jaxprs.primitives import facts_of

_Uses: TypeAlias = set[DType | None]
"""The dtypes that a value is rounded to; None is among them for any other use."""

_Returned: TypeAlias = Callable[[int], _Uses]
_Reads: TypeAlias = dict[Var, list[tuple[JaxprEqn, list[int]]]]
_Readers: TypeAlias = Callable[[Jaxpr], _Reads]


def used_dtypes(fun: Function, tree: PyTree, *args: PyTree) -> list[DType | None]:
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
  readers = functools.cache(_readers)
  return [_only(_uses(program.jaxpr, v, readers)) for v in program.jaxpr.invars[:count]]


def store_as_used(
  fun: Function,
  params: Params,
  args: tuple[PyTree, ...],
  kwargs: Mapping[str, PyTree],
  where: str,
) -> Params:
  """Returns parameters with each in the dtype that `fun(params, *args, **kwargs)` rounds it to.

  Args:
    fun: a function of trees of arrays.
    params: a tree of arrays, or of their shapes and dtypes.
    args: arguments. Arrays may have any values, or none; all else is given to `fun` as it is.
    kwargs: further arguments.
    where: the public call, for the error.

  Raises:
    MpjaxValueError: a finite value does not fit into the new dtype.
  """
  leaves, treedef = jax.tree.flatten((args, kwargs))
  kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, kinds)}

  def call(params: Params, arrays: dict[int, Array]) -> list[Leaf]:
    given = [arrays.get(i, x) for i, x in enumerate(leaves)]
    args, kwargs = jax.tree.unflatten(treedef, given)
    # What else a model returns, such as the name of something, is no result of a jaxpr.
    return [x for x in jax.tree.leaves(fun(params, *args, **kwargs)) if hasattr(x, "dtype")]

  return cast_leaves(params, used_dtypes(call, params, arrays), where)


def cast_leaves(tree: PyTree, dtypes: Sequence[DType | None], where: str) -> PyTree:
  """Returns a tree with each floating leaf in its dtype; an array that is at two paths stays one.

  If two dtypes are asked of one array, it gets one that holds both.

  Args:
    tree: any tree. Arrays keep their sharding, and NumPy's stay NumPy's.
    dtypes: one for each leaf; None leaves it as it is.
    where: the public call, for the error.

  Raises:
    MpjaxValueError: a finite value does not fit into the new dtype.
  """
  paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
  leaves = [x for _, x in paths]
  casts: dict[str, tuple[Leaf, Leaf]] = {}
  found = list(leaves)
  for places in _ties(leaves):
    old = leaves[places[0]]
    if is_floating(old):
      asked = [dtypes[i] for i in places]
      wanted = [old.dtype if dtype is None else dtype for dtype in asked]
      new = cast_leaf(old, _holding(wanted))
      casts[path_text(paths[places[0]][0])] = (old, new)
      for i in places:
        found[i] = new
  refuse_overflow(casts, where)
  return jax.tree.unflatten(treedef, found)


def _holding(dtypes: Sequence[DType]) -> DType:
  """Returns the dtype that holds the values of all floating `dtypes`."""
  distinct = set(dtypes)
  if len(distinct) == 1:
    return distinct.pop()
  # Of two narrow types neither holds the other: bfloat16 and float16, say.
  return max(*distinct, np.dtype("float32"), key=lambda dtype: dtype.itemsize)


def _ties(leaves: Sequence[Leaf]) -> list[list[int]]:
  """Returns the positions of each array among the leaves: several for weights that are tied."""
  alike: dict[Hashable, list[list[int]]] = {}
  for i, x in enumerate(leaves):
    if hasattr(x, "dtype"):
      groups = alike.setdefault((x.shape, x.dtype), [])
      group = next((group for group in groups if leaves[group[0]] is x), None)
      if group is None:
        groups.append([i])
      else:
        group.append(i)
  return [group for groups in alike.values() for group in groups]


def _only(uses: _Uses) -> DType | None:
  return next(iter(uses)) if len(uses) == 1 else None


def _readers(jaxpr: Jaxpr) -> _Reads:
  """Returns for each variable the equations that read it, and as which of their operands."""
  found: _Reads = {}
  for eqn in jaxpr.eqns:
    places: dict[Var, list[int]] = {}
    for i, operand in enumerate(eqn.invars):
      if isinstance(operand, Var):
        places.setdefault(operand, []).append(i)
    for var, where in places.items():
      found.setdefault(var, []).append((eqn, where))
  return found


def _uses(
  jaxpr: Jaxpr, var: Var, readers: _Readers, returned: _Returned = lambda _: {None}
) -> _Uses:
  """Returns the uses of a variable; `returned`, those of a result of the jaxpr by its position."""
  found: _Uses = set()
  for i, out in enumerate(jaxpr.outvars):
    if out is var:
      found |= returned(i)
  for eqn, places in readers(jaxpr).get(var, ()):
    found |= _uses_in(jaxpr, eqn, places, readers, returned)
  return found


def _uses_in(
  jaxpr: Jaxpr, eqn: JaxprEqn, places: Sequence[int], readers: _Readers, returned: _Returned
) -> _Uses:
  def result(i: int) -> _Uses:
    out = eqn.outvars[i]
    return _uses(jaxpr, out, readers, returned) if isinstance(out, Var) else set()

  if eqn.primitive is convert_element_type_p:
    new, old = np.dtype(eqn.params["new_dtype"]), aval_of(eqn.invars[0]).dtype
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (new, old))
    return {new} if floating and new.itemsize < old.itemsize else {None}
  if facts_of(eqn).moves and _one_kind(eqn):
    return set().union(*map(result, range(len(eqn.outvars))))
  found: _Uses = set()
  for inner, position in _inside(eqn, places):
    if inner is None:
      found.add(None)
    elif inner.times is None or inner.carry:
      found |= _uses(inner.jaxpr, inner.jaxpr.invars[position], readers)
    else:
      found |= _uses(inner.jaxpr, inner.jaxpr.invars[position], readers, result)
  return found


def _one_kind(eqn: JaxprEqn) -> bool:
  """Whether all floating operands are one: what is put together with others has their dtype."""
  floating = [v for v in eqn.invars if jnp.issubdtype(aval_of(v).dtype, jnp.floating)]
  return all(v is floating[0] for v in floating)


def _inside(eqn: JaxprEqn, places: Sequence[int]) -> Iterator[tuple[Inner | None, int]]:
  """Yields the jaxprs inside an equation that read the operands at `places`, and where.

  None is yielded for an unknown use, or for one that may not change its dtype: a loop's carry.
  """
  found = inner_jaxprs(eqn) or ()
  for place in places:
    known = [(i, i.operands.index(place)) for i in found if i.operands and place in i.operands]
    for inner, position in known:
      yield (None if position in inner.carry else inner), position
    if not known:
      yield None, place
