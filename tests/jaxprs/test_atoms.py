"""Variables and literals, and the same of another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Var

from mpjax._jaxprs.atoms import aval_of, cast_to, dtype_of, literal_as, retyped, shape_of

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


def test_a_cast_runs_and_is_in_the_place_of_its_reader():
  with jax.named_scope("inside"):
    program = jax.make_jaxpr(jnp.sin)(jnp.arange(3.0)).jaxpr
  (reader,) = program.eqns
  (old,) = program.invars
  new = retyped(old, FLOAT16)
  assert (shape_of(new), aval_of(new).dtype) == ((3,), FLOAT16)
  made = cast_to(new, old, reader)
  assert made.source_info is reader.source_info
  (got,) = eval_jaxpr(program.replace(eqns=[made], outvars=[new]), (), jnp.arange(3.0))
  assert got.dtype == FLOAT16
  assert made.primitive.name == "convert_element_type"
  assert isinstance(cast_to(Var(old.aval), new, None).outvars[0], Var)
