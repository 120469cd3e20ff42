"""Read jaxprs: variables and literals, the jaxprs inside equations, and a walk over all."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import convert_element_type_p
from jax.numpy import finfo

from mpjax._core.errors import REFUSALS
from mpjax._core.types import DType, is_inexact_dtype
from mpjax._jaxpr.compat import context_of, params_around, shown_by_object
from mpjax._jaxpr.primitives import NESTED, Holds, facts_of, is_higher_order

Atom: TypeAlias = Var | Literal
"""An operand, or a result of a jaxpr."""


def aval_of(atom: Atom) -> ShapedArray:
  """Returns the type of an atom that holds an array."""
  # JAX declares the type of any atom, also of tokens and references.
  return cast(ShapedArray, atom.aval)


def dtype_of(atom: Atom) -> DType | None:
  """Returns the dtype of an array; None for references, tokens and the like."""
  # A reference to an array has a dtype too. Its memory was created with it, so no cast can change
  # it, and callers must not treat it as an array.
  return atom.aval.dtype if isinstance(atom.aval, ShapedArray) else None


def is_inexact_atom(atom: Atom) -> bool:
  """Whether an atom is an array of floating or complex numbers."""
  dtype = dtype_of(atom)
  return dtype is not None and is_inexact_dtype(dtype)


def shape_of(atom: Atom) -> tuple[int, ...]:
  """Returns the shape of an atom that holds an array."""
  return aval_of(atom).shape


def is_number(atom: Atom) -> bool:
  """Whether an atom is a number: a literal without axes.

  With `jax_use_simplified_jaxpr_constants` the arrays that a function closes over are literals too.
  """
  return isinstance(atom, Literal) and not shape_of(atom)


def retyped(atom: Atom, dtype: DType) -> Var:
  """Returns a new variable like an atom, of another dtype and the same weak type."""
  return Var(_retyped(aval_of(atom), dtype))


@functools.lru_cache(maxsize=1024)
def _retyped(aval: ShapedArray, dtype: DType) -> ShapedArray:
  """Returns a type with another dtype."""
  return aval.update(dtype=dtype)


# The parameters of a call with an item for each operand.
PER_OPERAND = frozenset(("in_shardings", "in_layouts", "donated_invars"))
LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32. In a mask it means "as large as possible", not this size."""


def literal_as(literal: Atom, dtype: DType, number: float | None = None) -> Literal:
  """Returns a number in another dtype, or `number` in the type of a scalar."""
  number = cast(Literal, literal).val if number is None else number
  value = np.asarray(number, np.float32)
  # `finfo(float32).min` of a mask becomes the least number of the dtype. A cast gives -inf, and a
  # softmax over -inf alone gives NaN.
  if abs(value) == LARGEST:
    value = np.sign(value) * np.float32(finfo(dtype).max)
  return Literal(np.asarray(value, dtype), _retyped(aval_of(literal), dtype))


def cast_to(var: Var, atom: Atom, reader: JaxprEqn | None) -> JaxprEqn:
  """Returns an equation that casts an atom to a new variable, for an equation that reads it.

  The cast has the line and the scope of the reader, for profiles, and the mesh of its context.
  """
  aval = aval_of(var)
  params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
  context = () if reader is None else (reader.source_info, reader.ctx)
  return new_jaxpr_eqn([atom], [var], convert_element_type_p, params, no_effects, *context)


Program: TypeAlias = Jaxpr | ClosedJaxpr


class Inner(NamedTuple):
  """A jaxpr inside an equation."""

  program: Program  # as the equation holds it, closed or not
  times: int | None = 1  # its runs for each run of the equation; None if they depend on values
  # The positions of its inputs among the operands of the equation, in order; None if unknown.
  operands: tuple[int, ...] | None = None
  carry: range = range(0)  # the inputs that its first outputs replace in each further run
  reverse: bool = False  # whether it starts at the end of the inputs behind the carry
  returns: bool = True  # whether its outputs are the results of the equation, in order

  @property
  def jaxpr(self) -> Jaxpr:
    """The jaxpr without the constants that may come with it."""
    return opened(self.program)

  @property
  def carried(self) -> tuple[int, ...]:
    """The positions of the operands of the equation from which the carry starts."""
    return (self.operands or ())[self.carry.start : self.carry.stop]


def opened(program: Program) -> Jaxpr:
  """Returns a jaxpr without the constants that it may come with."""
  return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def holds_jaxpr(values: Iterable[object]) -> bool:
  """Whether a parameter of an equation is a jaxpr or a sequence that contains one."""
  return any(
    isinstance(value, (Jaxpr, ClosedJaxpr))
    or (isinstance(value, (tuple, list)) and holds_jaxpr(value))
    for value in values
  )


def _keys(eqn: JaxprEqn) -> list[str]:
  """Returns the names, in this version of JAX, of the parameters whose jaxprs are replaced."""
  return [name for name in facts_of(eqn).jaxpr_params if name in eqn.params]


# Readers of the equations in `_READERS`. Each returns the inner jaxprs of an equation.


def _call(eqn: JaxprEqn) -> tuple[Inner, ...]:
  # An object of JAX has no such parameter, and shows its jaxpr.
  shown = shown_by_object(eqn)
  program = eqn.params[_keys(eqn)[0]] if shown is None else shown
  return (Inner(program, operands=tuple(range(len(eqn.invars)))),)


def _scan(eqn: JaxprEqn) -> tuple[Inner, ...]:
  (body,), params = _call(eqn), eqn.params
  if "ft_in" in params:  # From jax 0.11 on: a tree of constants, carry and inputs of each step.
    consts, carry = (len(part) for part in params["ft_in"].unpack()[:2])
  else:
    consts, carry = params["num_consts"], params["num_carry"]
  # The inputs of the body are constants, the carry, and one slice of each other operand.
  carried, reverse = range(consts, consts + carry), params["reverse"]
  return (body._replace(times=params["length"], carry=carried, reverse=reverse),)


def _while(eqn: JaxprEqn) -> tuple[Inner, ...]:
  # The operands are the constants of the condition, those of the body, and the carry.
  params = eqn.params
  tested, looped = params["cond_nconsts"], params["body_nconsts"]
  carry = tuple(range(tested + looped, len(eqn.invars)))
  body = (*range(tested, tested + looped), *carry)
  return (
    Inner(params["cond_jaxpr"], None, (*range(tested), *carry), returns=False),
    Inner(params["body_jaxpr"], None, body, range(looped, len(body))),
  )


def _cond(eqn: JaxprEqn) -> tuple[Inner, ...]:
  # The first operand is the number of the branch.
  operands = tuple(range(1, len(eqn.invars)))
  return tuple(Inner(branch, None, operands) for branch in eqn.params["branches"])


def _shard_map(eqn: JaxprEqn) -> tuple[Inner, ...]:
  # The jaxpr is the code of one device, and all devices run it.
  sizes = eqn.params["mesh"].shape
  devices = math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
  return (_call(eqn)[0]._replace(times=devices),)


def _linear(eqn: JaxprEqn) -> tuple[Inner, ...]:
  params = eqn.params
  # `matmul_tangent` of mpjax holds no jaxpr. Its implementation is traced.
  if "callee" not in params:
    with context_of(eqn):
      run = functools.partial(eqn.primitive.impl, **params)
      params = {"callee": jax.make_jaxpr(run)(*map(aval_of, eqn.invars))}
  return (Inner(params["callee"], 1, (*range(len(eqn.invars)),)),)


def _linear_solve(eqn: JaxprEqn) -> tuple[Inner, ...]:
  # Of its four jaxprs only `solve` runs. Its constants follow those of two others, and the right
  # sides follow all constants.
  lengths = eqn.params["const_lengths"]
  first = lengths.matvec + lengths.vecmat
  consts = range(first, first + lengths.solve)
  right_sides = range(sum(lengths), len(eqn.invars))
  return (Inner(eqn.params["jaxprs"].solve, 1, (*consts, *right_sides)),)


def _object(eqn: JaxprEqn) -> tuple[Inner, ...] | None:
  # The expansion of an object is not entered: it would lose a derivative rule of the object. It
  # matters only if it hides a matmul.
  return None if hides_matmul(eqn) else ()


_READERS: Mapping[Holds | None, Callable[[JaxprEqn], tuple[Inner, ...] | None]] = {
  **dict.fromkeys((Holds.CALL, Holds.COMPOSITE), _call),
  **dict.fromkeys((Holds.BINARY, Holds.KERNEL, Holds.PLATFORM), lambda eqn: ()),
  **dict.fromkeys((Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP), _call),
  Holds.COND: _cond,
  Holds.LINEAR_CALL: _linear,
  Holds.LINEAR_SOLVE: _linear_solve,
  Holds.OBJECT: _object,
  Holds.SCAN: _scan,
  Holds.SHARD_MAP: _shard_map,
  Holds.WHILE: _while,
  # An unknown primitive: it may run a jaxpr among its parameters in any way.
  None: lambda eqn: None if holds_jaxpr(eqn.params.values()) else (),
}


def inner_jaxprs(eqn: JaxprEqn) -> tuple[Inner, ...] | None:
  """Returns the jaxprs that an equation runs.

  Returns:
    The jaxprs; an empty tuple if the equation holds none or is not entered. None if it is unknown
    how they run: the primitive or its parameters belong to a newer JAX or to another library.
  """
  try:
    jaxprs = _READERS[facts_of(eqn).holds](eqn)
    # A newer JAX may change the meaning of a parameter and keep its name. The numbers of inputs and
    # outputs then disagree. Without this check, autocast would bind the values of a scan to wrong
    # variables, and no error would show it if the shapes agree.
    for inner in jaxprs or ():
      # `steps.py` writes calls out, so a jaxpr outside `NESTED` must run exactly once.
      is_call = inner.times == len(jaxprs or ()) == 1 and not inner.carry
      if not is_call and facts_of(eqn).holds not in NESTED:
        return None
      inputs, outputs = len(inner.jaxpr.invars), len(inner.jaxpr.outvars)
      fits = not inner.returns or outputs == len(eqn.outvars)
      if inner.operands is not None and not (fits and inputs == len(inner.operands)):
        return None
    return jaxprs
  except (LookupError, AttributeError, TypeError, ValueError):  # A newer JAX keeps them elsewhere.
    return None


def with_inner(eqn: JaxprEqn, new: Sequence[Program]) -> dict[str, Any]:
  """Returns the parameters of an equation with other jaxprs, in the order of `inner_jaxprs`."""
  if shown_by_object(eqn) is not None:
    return params_around(eqn, cast(ClosedJaxpr, new[0]))
  values = [tuple(new)] if facts_of(eqn).holds is Holds.COND else new
  # `strict=False`: a primitive whose jaxprs stay names no parameters. An example is `linear_call`,
  # whose transpose is in float32 and would not match a body in low precision.
  return {**eqn.params, **dict(zip(_keys(eqn), values, strict=False))}


def call_params(
  eqn: JaxprEqn, program: Program, operands: int, results: int, name: str
) -> dict[str, Any]:
  """Returns the parameters of a call, from those of a call `eqn` of one operand and one result."""
  params = dict(eqn.params)
  for key in (*PER_OPERAND, "out_shardings", "out_layouts"):
    params[key] *= operands if key in PER_OPERAND else results
  return dict(params, jaxpr=program, name=name)


def with_each(eqn: JaxprEqn, change: Callable[[Program], Program]) -> dict[str, Any]:
  """Returns the parameters of an equation with every jaxpr in them changed.

  They include jaxprs that `inner_jaxprs` leaves out, such as those for derivatives. `change` must
  return a jaxpr with the same inputs and outputs, which is closed if its argument is.
  """
  new = {name: _changed(value, change) for name, value in eqn.params.items()}
  return new if any(new[name] is not value for name, value in eqn.params.items()) else eqn.params


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
  """Returns a parameter with its jaxprs changed; the same object if none changes."""
  if isinstance(value, (Jaxpr, ClosedJaxpr)):
    return change(value)
  if not isinstance(value, (tuple, list)):
    return value
  new = [_changed(each, change) for each in value]
  if all(a is b for a, b in zip(new, value, strict=True)):
    return value
  is_named_tuple = hasattr(value, "_fields")
  return type(value)(*new) if is_named_tuple else type(value)(new)


def mapped_with(eqn: JaxprEqn) -> dict[str, Any]:
  """Returns the arguments of `jax.shard_map` to run another function in the way of an equation."""
  params = eqn.params
  options = {key: params[key] for key in ("mesh", "in_specs", "out_specs", "check_vma")}
  return {**options, "axis_names": params["newly_manual_axes"]}


def is_object(eqn: JaxprEqn) -> bool:
  """Whether an equation is an object of JAX without a jaxpr, in which nothing can be changed."""
  return facts_of(eqn).holds is Holds.OBJECT


def hides_matmul(eqn: JaxprEqn) -> bool:
  """Whether an equation is an object of JAX that may run a matmul."""
  return is_object(eqn) and _multiplies(eqn.params["_prim"], tuple(map(aval_of, eqn.invars)))


@functools.lru_cache(maxsize=1024)
def _multiplies(prim: Any, avals: tuple[ShapedArray, ...]) -> bool:
  """Whether an object of JAX may run a matmul on arrays of these types."""
  # JAX runs the expansion of an object, such as a search or a count of `jax.numpy`.
  try:
    eqns = walk(jax.make_jaxpr(prim.expand)(*prim.in_avals))
  except REFUSALS:  # Unknown, so it may.
    return True
  return any(inner_jaxprs(eqn) is None or facts_of(eqn).flops is not None for eqn in eqns)


def donated(eqn: JaxprEqn) -> tuple[bool, ...]:
  """Returns for each operand whether the results may take over its memory."""
  return eqn.params.get("donated_invars") or (False,) * len(eqn.invars)


def function_name(eqn: JaxprEqn) -> str:
  """Returns the name, file and line of the function that an equation calls, or its primitive."""
  inner = inner_jaxprs(eqn)
  debug = getattr(inner[0].jaxpr, "debug_info", None) if inner else None
  return getattr(debug, "func_src_info", None) or eqn.primitive.name


def warn_not_entered(eqn: JaxprEqn, what: str, instead: str) -> None:
  """Warns that the call `what` does not enter an equation; `instead` says what happens."""
  warnings.warn(
    f"{what}: the primitive {eqn.primitive.name!r} holds a jaxpr in its parameters "
    f"{sorted(eqn.params)}, and this version of mpjax does not know how to enter it. {instead} "
    "Move the function that uses it out of the traced function, or report the name with your "
    "version of JAX.",
    UserWarning,
    stacklevel=2,
  )


def walk(program: Program) -> Iterator[JaxprEqn]:
  """Yields every equation of a jaxpr. Equations of an inner jaxpr follow the one that holds it.

  Every branch of a `cond` is walked, and the body of a `while` once. An equation that
  `inner_jaxprs` does not know is not entered.
  """
  for eqn in opened(program).eqns:
    yield eqn
    inners = inner_jaxprs(eqn) if is_higher_order(eqn) else None
    for inner in inners or ():
      yield from walk(inner.program)
