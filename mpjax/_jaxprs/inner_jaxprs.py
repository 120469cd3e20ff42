"""The jaxprs inside equations: where each primitive keeps them, and which operands they take.

This is the one module that knows in which parameters a higher-order primitive keeps its jaxprs, the
constants, the carry and the inputs of a loop; versions of JAX differ in it. Everything else asks
`inner_jaxprs`, and writes new ones with `with_inner`.
"""

import math
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Program: TypeAlias = Jaxpr | ClosedJaxpr

Params: TypeAlias = Mapping[str, Any]


class Inner(NamedTuple):
  """A jaxpr inside an equation.

  Fields:
    program: as the equation holds it, closed or not.
    times: how often it runs each time the equation does; None where that depends on values.
    operands: the positions of the operands of the equation that are its inputs, in order; None
      where that is not known.
    carry: which of its inputs are replaced by its first outputs, each time it runs again.
    returns: whether its outputs are those of the equation, in order.
  """

  program: Program
  times: int | None = 1
  operands: tuple[int, ...] | None = None
  carry: range = range(0)
  returns: bool = True

  @property
  def jaxpr(self) -> Jaxpr:
    """Without the constants that may come with it."""
    return opened(self.program)


def opened(program: Program) -> Jaxpr:
  """Returns a jaxpr without the constants that it may come with."""
  return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def holds_jaxpr(values: Iterable[Any]) -> bool:
  """Whether one of the parameters of an equation is a jaxpr, or a sequence with one in it."""
  for value in values:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
      return True
    if isinstance(value, (tuple, list)) and holds_jaxpr(value):
      return True
  return False


class _Layout(NamedTuple):
  """Where a primitive keeps its jaxprs.

  Fields:
    read: from the parameters and the number of operands to the inner jaxprs; None if not known.
    write: from the parameters and new jaxprs, in the order of `read`, to new parameters; None for a
      primitive whose jaxprs are not replaced.
  """

  read: Callable[[Params, int], tuple[Inner, ...] | None]
  write: Callable[[Params, Sequence[Program]], dict[str, Any]] | None


def _one(*names: str) -> _Layout:
  """One jaxpr of all operands, under the first of these names that is there."""

  def key(params: Params) -> str:
    return next((name for name in names if name in params), names[0])

  def read(params: Params, count: int) -> tuple[Inner, ...]:
    return (Inner(params[key(params)], operands=tuple(range(count))),)

  def write(params: Params, new: Sequence[Program]) -> dict[str, Any]:
    return {**params, key(params): new[0]}

  return _Layout(read, write)


def _read_scan(params: Params, count: int) -> tuple[Inner, ...]:
  if "ft_in" in params:  # From jax 0.11 on: a tree of constants, carry and inputs of each step.
    consts, carry = (len(part) for part in params["ft_in"].unpack()[:2])
  else:
    consts, carry = params["num_consts"], params["num_carry"]
  carried = range(consts, consts + carry)
  return (Inner(params["jaxpr"], params["length"], tuple(range(count)), carried),)


def _read_while(params: Params, count: int) -> tuple[Inner, ...]:
  tested, looped = params["cond_nconsts"], params["body_nconsts"]
  carry = tuple(range(tested + looped, count))
  body = (*range(tested, tested + looped), *carry)
  return (
    Inner(params["cond_jaxpr"], None, (*range(tested), *carry), returns=False),
    Inner(params["body_jaxpr"], None, body, range(looped, len(body))),
  )


def _read_object(params: Params, count: int) -> tuple[Inner, ...] | None:
  del count
  # What is in the object differs between versions of JAX, and is private to it. The search for a
  # root is in no network, and is left alone like `custom_linear_solve`.
  return () if type(params["_prim"]).__name__ == "CustomRoot" else None


def _read_cond(params: Params, count: int) -> tuple[Inner, ...]:
  # The first operand is the number of the branch.
  return tuple(Inner(branch, None, tuple(range(1, count))) for branch in params["branches"])


def _read_shard_map(params: Params, count: int) -> tuple[Inner, ...]:
  # The jaxpr is written for one device; the others run it too.
  sizes = params["mesh"].shape
  devices = math.prod(sizes[axis] for axis in params["newly_manual_axes"])
  return (Inner(params["jaxpr"], devices, tuple(range(count))),)


_LAYOUTS: Mapping[str, _Layout] = types.MappingProxyType(
  {
    "call": _one("call_jaxpr"),
    # `jax.checkpoint` and `jax.custom_vjp` with `jax_remat3` and `jax_custom_vjp3` are such.
    "call_hi_primitive": _Layout(_read_object, None),
    # `remat2` and `checkpoint` are one primitive, which has been called both.
    "checkpoint": _one("jaxpr"),
    "closed_call": _one("call_jaxpr"),
    "composite": _one("call_jaxpr", "jaxpr"),
    "cond": _Layout(_read_cond, lambda params, new: {**params, "branches": tuple(new)}),
    # Differentiating a jaxpr replaces these two; in one that was not, the plain jaxpr runs.
    "custom_jvp_call": _one("call_jaxpr"),
    "custom_vjp_call": _one("call_jaxpr"),
    # Of its four jaxprs the others are for differentiating and checking.
    "custom_linear_solve": _Layout(lambda params, _: (Inner(params["jaxprs"].solve),), None),
    "custom_vmap_call": _one("call"),
    # `jax.jit(f).trace(x)` that is called again, from jax 0.11 on.
    "eval_jaxpr": _one("call_jaxpr", "jaxpr"),
    "jit": _one("jaxpr"),
    "linear_call": _Layout(lambda params, n: (Inner(params["callee"], 1, tuple(range(n))),), None),
    # Order among collectives, from jax 0.12 on.
    "program_order": _one("call_jaxpr"),
    "remat2": _one("jaxpr"),
    "scan": _Layout(_read_scan, lambda params, new: {**params, "jaxpr": new[0]}),
    "shard_map": _Layout(_read_shard_map, lambda params, new: {**params, "jaxpr": new[0]}),
    "while": _Layout(
      _read_while, lambda params, new: {**params, "cond_jaxpr": new[0], "body_jaxpr": new[1]}
    ),
  }
)

# By name: not every primitive is exported.
HIGHER_ORDER = frozenset(_LAYOUTS)
"""The higher-order primitives; `inner_jaxprs` is None for what cannot be entered."""

OPAQUE = frozenset(
  {
    # These hold the operation on two numbers by which they combine elements.
    "reduce",
    "reduce_window",
    "scatter",
    "scatter-add",
    "scatter-max",
    "scatter-min",
    "scatter-mul",
    "scatter-sub",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_add",
    "scatter_sub",
    "select_and_scatter",
    # A kernel written by hand, on blocks in memory of its own choice.
    "pallas_call",
  }
)
"""Primitives whose jaxprs are deliberately not entered."""


def inner_jaxprs(eqn: JaxprEqn) -> tuple[Inner, ...] | None:
  """Returns the jaxprs that an equation runs.

  Returns:
    None if it holds some, and this version does not know how they run: a primitive or parameters of
    a newer JAX, or of another library. An empty tuple for one that holds none, or an opaque one.
  """
  name = eqn.primitive.name
  if name not in _LAYOUTS:
    return () if name in OPAQUE or not holds_jaxpr(eqn.params.values()) else None
  try:
    found = _LAYOUTS[name].read(eqn.params, len(eqn.invars))
    return None if found is None or not all(_fits(inner, eqn) for inner in found) else found
  except (KeyError, AttributeError, TypeError, ValueError):  # A newer JAX keeps them elsewhere.
    return None


def _fits(inner: Inner, eqn: JaxprEqn) -> bool:
  """Whether an inner jaxpr has as many inputs and outputs as what was read says."""
  jaxpr = inner.jaxpr
  if inner.operands is None:
    return True
  outputs = not inner.returns or len(jaxpr.outvars) == len(eqn.outvars)
  return outputs and len(jaxpr.invars) == len(inner.operands)


def with_inner(eqn: JaxprEqn, new: Sequence[Program]) -> dict[str, Any]:
  """Returns the parameters of an equation with other jaxprs, in the order of `inner_jaxprs`."""
  write = _LAYOUTS[eqn.primitive.name].write
  return dict(eqn.params) if write is None else write(eqn.params, new)


def call_params(
  eqn: JaxprEqn, program: Program, operands: int, results: int, name: str
) -> dict[str, Any]:
  """Returns the parameters of a call, of those of one with one operand and one result.

  Args:
    eqn: such a call of a jitted function.
    program: what to call.
    operands: the number of its arguments.
    results: the number of its results.
    name: that of the call.
  """
  params = dict(eqn.params)
  for key in ("in_shardings", "in_layouts", "donated_invars"):
    params[key] *= operands
  for key in ("out_shardings", "out_layouts"):
    params[key] *= results
  return {**params, "jaxpr": program, "name": name}


def with_each(eqn: JaxprEqn, change: Callable[[Any], Any]) -> dict[str, Any]:
  """Returns the parameters of an equation with every jaxpr in them changed.

  Also those that `inner_jaxprs` leaves out: of derivatives, of primitives that are not known.

  Args:
    eqn: an equation.
    change: from a jaxpr, closed or not, to one like it of the same inputs and outputs.
  """
  new = {name: _changed(value, change) for name, value in eqn.params.items()}
  return new if any(new[name] is not value for name, value in eqn.params.items()) else eqn.params


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
  if isinstance(value, (Jaxpr, ClosedJaxpr)):
    return change(value)
  if not isinstance(value, (tuple, list)) or not holds_jaxpr(value):
    return value
  new = [_changed(each, change) for each in value]
  if all(a is b for a, b in zip(new, value, strict=True)):
    return value
  return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def is_object(eqn: JaxprEqn) -> bool:
  """Whether an equation keeps what it runs in an object, of which nothing can be changed."""
  return eqn.primitive.name == "call_hi_primitive"


def donated(eqn: JaxprEqn) -> tuple[bool, ...]:
  """Returns for each operand whether its memory may be taken over by the results."""
  return eqn.params.get("donated_invars") or (False,) * len(eqn.invars)


def closed_over(eqn: JaxprEqn) -> int:
  """Returns how many operands, the first ones, a function with its own derivative closes over."""
  return eqn.params.get("num_consts", 0)


def name_of(eqn: JaxprEqn) -> str:
  """Returns the name, file and line of the function that an equation calls, where it is known."""
  found = inner_jaxprs(eqn)
  debug = getattr(found[0].jaxpr, "debug_info", None) if found else None
  return getattr(debug, "func_src_info", None) or eqn.primitive.name


def warn_not_entered(eqn: JaxprEqn, what: str, instead: str) -> None:
  """Warns that the jaxprs of an equation are not entered.

  Args:
    eqn: an equation of which `inner_jaxprs` returns None.
    what: who wanted to enter them.
    instead: what happens now, a sentence.
  """
  warnings.warn(
    f"{what}: the primitive {eqn.primitive.name!r} holds a program in its parameters "
    f"{sorted(eqn.params)}, and this version of mpjax does not know how to enter it. {instead} "
    "Take the function that uses it out of what is traced here, or report the name with your "
    "version of JAX.",
    UserWarning,
    stacklevel=2,
  )
