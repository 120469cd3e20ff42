"""Variables and literals of jaxprs: what they hold, the same of another dtype, and casts."""

import functools
from typing import TypeAlias, cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.types import DType

Atom: TypeAlias = Var | Literal
"""An operand, or a result of a jaxpr."""


def aval_of(atom: Atom) -> ShapedArray:
  """Returns the type of an atom that holds an array; JAX declares it as that of anything."""
  return cast(ShapedArray, atom.aval)


def dtype_of(atom: Atom) -> DType | None:
  """Returns the dtype of an atom; None for tokens and the like."""
  return getattr(atom.aval, "dtype", None)


def shape_of(atom: Atom) -> tuple[int, ...]:
  """Returns the shape of an atom that holds an array."""
  return aval_of(atom).shape


def retyped(atom: Atom, dtype: DType) -> Var:
  """Returns a new variable like an atom, of another dtype."""
  return Var(_retyped(aval_of(atom), dtype))


@functools.lru_cache(maxsize=1024)
def _retyped(aval: ShapedArray, dtype: DType) -> ShapedArray:
  return aval.update(dtype=dtype, weak_type=False)


def literal_as(literal: Literal, dtype: DType) -> Literal:
  """Returns a literal in another dtype."""
  return Literal(np.asarray(literal.val, dtype), _retyped(aval_of(literal), dtype))


def cast_to(var: Var, atom: Atom, reader: JaxprEqn | None) -> JaxprEqn:
  """Returns an equation that casts an atom.

  Args:
    var: the result, a new variable.
    atom: the operand.
    reader: the equation that the cast is for. A profile shows the cast where it is, in the module
      that casts, and the mesh of its context is that of the cast.
  """
  aval = aval_of(var)
  params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
  place = () if reader is None else (reader.source_info, reader.ctx)
  return new_jaxpr_eqn([atom], [var], convert_element_type_p, params, no_effects, *place)
