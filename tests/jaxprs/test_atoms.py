"""Variables and literals, and the same of another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpjax._jaxprs.atoms import dtype_of, literal_as, retyped

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, "float16", "float32"))


def literal(number):
  """Returns a float32 literal as JAX writes it."""
  program = jax.make_jaxpr(lambda x: x * np.float32(number))(jnp.float32(1))
  (found,) = [atom for atom in program.eqns[0].invars if isinstance(atom, Literal)]
  return found


def test_a_literal_in_another_type():
  made = literal_as(literal(0.1), BFLOAT16)
  assert made.val.dtype == BFLOAT16
  assert float(made.val) == 0.10009765625
  assert (made.aval.dtype, made.aval.shape, made.aval.weak_type) == (BFLOAT16, (), False)


def test_a_variable_in_another_type():
  weak = jax.make_jaxpr(lambda: jnp.asarray(2.0) * jnp.asarray(1.0))().jaxpr.eqns[0].outvars[0]
  assert weak.aval.weak_type
  made = retyped(weak, FLOAT16)
  assert made is not weak
  assert (made.aval.dtype, made.aval.shape, made.aval.weak_type) == (FLOAT16, (), False)


def test_the_dtype_of_anything():
  program = jax.make_jaxpr(lambda x, key: (x, key, 1))(jnp.ones(2, "int8"), jax.random.key(0))
  assert [str(dtype_of(v)) for v in program.jaxpr.outvars] == ["int8", "key<fry>", "int32"]
  token = jax.make_jaxpr(jax.lax.create_token)().jaxpr.outvars[0]
  assert dtype_of(token) is None
