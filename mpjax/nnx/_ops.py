"""The outermost call of a view with its operations rewritten: `with_policy(..., ops=...)`.

A method reads and writes variables while it runs, and a program has only arguments and results. So
the call is made of copies: of the module and of all that is given to it. What the copies have
become is a result of the program, and is put back into the objects themselves. NNX's own
transforms do it in this way, by the same public functions.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mpjax._autocast import float32_operations
from mpjax._errors import MpjaxTypeError, message
from mpjax._op_lists import OpLists
from mpjax.nnx._spec import is_view, model_of
from mpjax.nnx._variables import is_node

_TAG = "mpjax.ops"

_WHERE = "mpjax.nnx.with_policy(ops=...)"


def with_ops(
  ops: OpLists, fun: Callable[..., Any], name: str, module: Any, args: Any, kwargs: Any
) -> Any:
  """Returns `fun(module, args, kwargs)`, with what it does in half of the lists in float32.

  Args:
    ops: the lists.
    fun: reads and writes the variables of what it is given, and of nothing else.
    name: that of the method.
    module: a module of a view.
    args: trees of arrays, modules and variables.
    kwargs: the same.

  Raises:
    MpjaxTypeError: `fun` changed a list, a dict or another mutable tree among the arguments.
  """

  def program(copied: Any) -> tuple[bool, Any]:
    given = nnx.from_tree(copied, is_inner=True, ctxtag=_TAG)
    before, arguments = _kept(given), _flat(given[1:])
    outputs = fun(*given)
    now = _kept(given)
    _check_unchanged(arguments, _flat(given[1:]), name)
    changed = len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
    # What is only read may belong to a function that is traced further out: nobody may write it.
    nodes = any(map(is_node, jax.tree.leaves(outputs, is_leaf=is_node)))
    return changed or nodes, nnx.to_tree((outputs, given if changed or nodes else ()), ctxtag=_TAG)

  program.__name__ = name  # It is what JAX's errors say.
  views = [
    (node, dict(vars(node))) for _, node in nnx.iter_graph(module, graph=True) if is_view(node)
  ]
  with nnx.update_context(_TAG):
    copied = nnx.to_tree((module, args, kwargs), ctxtag=_TAG)
    changed, done = float32_operations(program, ops, _WHERE)(copied)
    if not changed:
      return done[0]
    outputs, _ = nnx.from_tree(done, is_inner=False, ctxtag=_TAG)
  for node, before in views:
    _hand_on(node, before)
  return outputs


def _kept(tree: Any) -> list[Any]:
  """Returns what the modules and variables of a tree hold: the same objects until it changes."""
  found: list[Any] = []
  for _, node in nnx.iter_graph(tree, graph=True):
    if isinstance(node, nnx.Variable):
      found += [node, *node.get_metadata().values(), *jax.tree.leaves(node.get_raw_value())]
    elif isinstance(node, nnx.Pytree):
      found += [node, *vars(node), *vars(node).values()]
  return found


def _flat(tree: Any) -> tuple[list[Any], Any]:
  """Returns leaves and structure; what modules and variables hold comes back, and is no part."""
  return jax.tree.flatten(tree, is_leaf=is_node)


def _check_unchanged(before: tuple[list[Any], Any], now: tuple[list[Any], Any], name: str) -> None:
  same = before[1] == now[1] and all(a is b for a, b in zip(before[0], now[0], strict=True))
  if not same:
    raise MpjaxTypeError(
      message(
        _WHERE,
        expected=f"{name!r} to return what it computes",
        got="a list, a dict or another tree that it changed in place, which would be lost",
        fix="Return the new values, or keep them in a nnx.Variable or a nnx.List: the call is made "
        "with copies of its arguments, and of those only modules and variables are put back.",
      )
    )


def _hand_on(module: Any, before: dict[str, Any]) -> None:
  """Hands on to the user's module what NNX has put into that of a view, or taken out."""
  model, now = model_of(module), dict(vars(module))
  for name in now.keys() | before.keys() if model is not None else ():
    old, new = before.get(name), now.get(name)
    if isinstance(new, nnx.Variable if old is None else (nnx.Variable, jax.Array)):
      if new is not old:
        setattr(model, name, new)
    elif isinstance(old, nnx.Variable) and new is None and vars(model).get(name) is old:
      delattr(model, name)
