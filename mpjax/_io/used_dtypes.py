"""Find the dtypes to which a function rounds its arguments, and store the arguments in them.

Arguments that are rounded at each use need less memory if they are stored rounded. No result
changes.
"""

from collections.abc import Collection, Mapping, Sequence

import jax

from mpjax._core.leaves import is_array, path_text, refuse_overflow
from mpjax._core.trees import cast_leaf, is_floating
from mpjax._core.types import FLOAT32, Array, DType, Function, Leaf, Params, PyTree
from mpjax._jaxpr.graph import Graph, Operation, Value


def used_dtypes(fun: Function, tree: PyTree, *args: PyTree) -> list[DType | None]:
  """Returns for each leaf of `tree` the one dtype to which `fun(tree, *args)` rounds it.

  It is None for a leaf that an operation uses unrounded, that is rounded to several dtypes, or that
  is unused. Arguments are trees of arrays, or of their shapes and dtypes.
  """
  graph = Graph(jax.make_jaxpr(fun)(tree, *args))
  leaves = graph.arguments[: len(jax.tree.leaves(tree))]
  uses = [_uses(v, set(graph.results)) for v in leaves]
  return [next(iter(dtypes)) if len(dtypes) == 1 else None for dtypes in uses]


def store_as_used(
  fun: Function,
  params: Params,
  args: tuple[PyTree, ...],
  kwargs: Mapping[str, PyTree],
  where: str,
) -> Params:
  """Returns parameters in the dtypes to which `fun(params, *args, **kwargs)` rounds them.

  Arrays among the arguments may be shapes and dtypes alone. Other arguments are passed unchanged. A
  finite value that does not fit raises MpjaxValueError; `where` is the public call.
  """
  leaves, treedef = jax.tree.flatten((args, kwargs))
  arrays = {
    i: x for i, x in enumerate(leaves) if is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
  }

  def call(params: Params, arrays: dict[int, Array]) -> list[Leaf]:
    args, kwargs = jax.tree.unflatten(treedef, [arrays.get(i, x) for i, x in enumerate(leaves)])
    # A model may also return strings or None, which are no results of a jaxpr.
    return [x for x in jax.tree.leaves(fun(params, *args, **kwargs)) if hasattr(x, "dtype")]

  return cast_leaves(params, used_dtypes(call, params, arrays), where)


def cast_leaves(tree: PyTree, dtypes: Sequence[DType | None], where: str) -> PyTree:
  """Returns a tree with each floating leaf in a dtype; None leaves a leaf unchanged.

  An array at two paths stays one array. If two dtypes are asked for it, it gets one that holds
  both. Arrays keep their sharding, and NumPy arrays stay NumPy arrays. A finite value that does not
  fit raises MpjaxValueError; `where` is the public call.
  """
  paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
  # By id, since tied weights are one array at several paths.
  asked: dict[int, list[DType]] = {}
  for (_, x), dtype in zip(paths, dtypes, strict=True):
    if is_floating(x):
      asked.setdefault(id(x), []).append(x.dtype if dtype is None else dtype)
  new: dict[int, Leaf] = {}
  casts: dict[str, tuple[Leaf, Leaf]] = {}
  for path, x in paths:
    if id(x) in asked and id(x) not in new:
      # Neither of bfloat16 and float16 holds the numbers of the other. Float32 holds both.
      distinct = {*asked[id(x)]}
      several = {*distinct, FLOAT32} if len(distinct) > 1 else distinct
      new[id(x)] = cast_leaf(x, max(several, key=lambda dtype: dtype.itemsize))
      casts[path_text(path)] = x, new[id(x)]
  refuse_overflow(casts, where)
  return jax.tree.unflatten(treedef, [new.get(id(x), x) for _, x in paths])


def _uses(value: Value, returned: Collection[Value]) -> set[DType | None]:
  """Returns the dtypes to which a value is rounded; None is among them if it has another use."""
  uses: set[DType | None] = set()
  # The value and all moved copies of it, and those whose consumers are not known yet.
  copies, waiting = {value}, [value]
  while waiting:
    copy = waiting.pop()
    if copy in returned:
      uses.add(None)
    for operation in copy.consumers:
      if _moves(operation):
        waiting += [moved for moved in operation.results if moved not in copies]
        copies.update(operation.results)
      else:
        uses.add(_rounded_to(copy, operation))
  return uses


def _rounded_to(value: Value, operation: Operation) -> DType | None:
  """Returns the dtype to which an operation rounds a value; None if it does anything else."""
  if not operation.casts:
    return None
  (new,) = operation.results
  is_rounded = (
    value.is_floating and new.is_floating and new.aval.dtype.itemsize < value.aval.dtype.itemsize
  )
  return new.dtype if is_rounded else None


def _moves(operation: Operation) -> bool:
  """Whether an operation moves one operand, so that it may do so in another dtype."""
  if operation.joins:
    # A carry, and a result of branches, shares its dtype with the other values that join it.
    fixed = any(each.times is None or each.carry for each in operation.step.inner)
    return operation.joins == "enter" or (operation.joins == "leave" and not fixed)
  # Two operands, as of a concatenation, have one dtype, so one of them cannot change alone.
  floating = {v for v in operation.operands if v.is_floating}
  return operation.moves and len(floating) <= 1
