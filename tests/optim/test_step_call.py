"""A step runs with other arrays, in float32 if it can be traced, and says what it returns."""

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._optim.step_call import RETURNED, WRITTEN, StepCall, StepProgram

F16 = jnp.float16
X = ("[0]",)


def test_arrays_and_numbers_among_the_arguments():
  call = StepCall(lambda *args, **kwargs: args, (jnp.ones(2), 3, 2**40, "text"), {"rate": 0.5})
  assert call.arrays.keys() == {X}
  shapes = {path: (shape, str(dtype)) for path, (shape, dtype) in call.specs.items()}
  assert shapes[("[1]",)] == ((), "int32")
  assert shapes[("[4]", "['rate']")] == ((), "float32")
  assert len(shapes) == 3
  assert call.argument_of(("[4]", "['rate']", ".x")) == ("[4]", "['rate']")
  assert call.argument_of(("[0]", ".x")) == X


def test_a_step_that_is_traced_runs_in_float32():
  # 2^-20 is lost beside 1 in float16.
  program = StepProgram(StepCall(lambda x: (x.astype(F16) + 1) - 1, (jnp.ones(2),), {}))
  assert program.traced
  assert jnp.dtype(F16) in program.dtypes
  after = program.run({X: jnp.full(2, 2.0**-20)})
  assert (after[RETURNED,] == 2.0**-20).all()
  assert program.specs(after)[RETURNED,] == ((2,), jnp.dtype(F16))


def test_a_step_that_looks_at_values_runs_as_it_is():
  program = StepProgram(StepCall(lambda x: float(x[0].astype(F16)), (jnp.ones(2),), {}))
  assert not program.traced
  after = program.run({X: jnp.full(2, 1 + 2.0**-20)})
  assert after[RETURNED,] == 1
  assert program.specs(after)[RETURNED,] == ((), jnp.dtype(jnp.float32))
  assert program.depends_on(X) is None


def test_results_that_depend_on_an_argument():
  step = lambda x, y: {"sum": x + y, "flag": jnp.where(x > 0, y, 0)}  # noqa: E731
  program = StepProgram(StepCall(step, (jnp.ones(2), jnp.ones(2)), {}))
  assert program.depends_on(X) == {(RETURNED, "['sum']")}


def test_a_donated_argument_stays():
  x = jnp.ones(2)
  program = StepProgram(StepCall(jax.jit(lambda x: x + 1, donate_argnums=0), (x,), {}))
  program.run({X: x})
  assert (x == 1).all()


def test_a_variable_at_two_paths_is_one():
  variable = nnx.Param(jnp.ones(2))

  def step(a, b):
    a[...] = a[...] + 1
    return b[...]

  call = StepCall(step, (variable, variable), {})
  assert call.variables == [("[0]",), ("[1]",)]
  after = call.run({path: jnp.zeros(2) for path in call.variables})
  assert all(
    (after[place] == 1).all() for place in [(WRITTEN, "[0]"), (WRITTEN, "[1]"), (RETURNED,)]
  )
  assert (variable[...] == 1).all()
