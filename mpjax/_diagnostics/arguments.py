"""The arguments of a function: its jaxpr for them, and what each is called."""

import inspect
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.paths import leaf_paths
from mpjax._core.types import Args, Function, Kwargs, PyTree
from mpjax._diagnostics.flat import Leaves

_PARAMETERS = ("params", "parameters", "weights")


class Argument(NamedTuple):
  """A leaf of the arguments of a function.

  Fields:
    name: the name of the argument and the path in it, such as "params/Dense_0/kernel".
    is_parameter: a model learns it: it is in a tree called `params`, or an `nnx.Param`.
  """

  name: str
  is_parameter: bool


def trace(
  fn: Function, args: Args, kwargs: Kwargs, where: str
) -> tuple[ClosedJaxpr, list[Argument]]:
  """Returns the jaxpr of a function, and what the leaves of its arguments are called.

  Arrays and `jax.ShapeDtypeStruct`s are traced. All else is passed as it is, as `mpjax.autocast`
  does it: `model.apply(variables, x, train=True)` asks whether `train` is true.

  Raises:
    MpjaxTypeError: a model of NNX is written to that is no argument; `where` is the public call.
  """
  leaves = Leaves(args, kwargs, lambda x: hasattr(x, "shape") and hasattr(x, "dtype"))
  try:
    program, _ = leaves.traced(fn)
  except flax_errors("TraceContextError") as error:
    raise MpjaxTypeError(
      where,
      expected="a function that changes nothing but its arguments",
      got=f"one that writes to a model of NNX that it closes over: {error}",
      fix="Pass the model as an argument: "
      f"{where.replace('fn', 'lambda model, x: model(x)')}(model, x).",
    ) from error
  names = arguments(fn, args, kwargs)
  return program, [names[i] for i in leaves.positions]


def arguments(fn: Function, args: Args, kwargs: Kwargs) -> list[Argument]:
  """Returns what the leaves of arguments are called, in the order of `jax.tree.leaves`."""
  every: list[Argument] = []
  named = zip(positional_names(fn, len(args)), args, strict=True)
  for name, value in (*named, *sorted(kwargs.items())):
    for path, is_variable in zip(leaf_paths(value), _learned(value), strict=True):
      parts = (name, *(part for part in path if part != "value"))
      # A single array called `params` is one too.
      inside = any(part in _PARAMETERS for part in (parts[:-1] or parts))
      every.append(Argument("/".join(parts), is_variable or inside))
  return every


def positional_names(fn: Function, count: int) -> list[str]:
  """Returns what positional arguments are called: "rest[0]" is the first of `*rest`."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    return [f"args[{i}]" for i in range(count)]
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  return [*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))]


def _learned(value: PyTree) -> list[bool]:
  """Returns for each leaf whether it is a parameter by its class, that of NNX."""

  def is_variable(x: object) -> bool:
    return hasattr(type(x), "get_raw_value")

  return [
    any(base.__name__ == "Param" for base in type(node).__mro__)
    for node in jax.tree.leaves(value, is_leaf=is_variable)
    for _ in jax.tree.leaves(node)
  ]


def check_function(fn: object, where: str, fix: str) -> None:
  """Raises MpjaxTypeError unless `fn` is a function of arrays that JAX can trace."""
  check_no_linen_model(fn, where)
  compiled = isinstance(fn, jax.stages.Compiled)
  if compiled or not callable(fn):
    raise MpjaxTypeError(
      where,
      expected="a function of arrays that JAX can trace",
      got="a compiled one" if compiled else kind_of(fn),
      fix=fix,
    )
