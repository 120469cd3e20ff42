"""Which values are cast, for which equations, and how often."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.numbers import UNKNOWN
from mpjax._autocast.rewriter import FloatValue
from tests import programs
from tests.autocast.rig import BOTH, jaxpr_under, with_jvp
from tests.models.values import normal

W = jnp.eye(8)
X = jnp.arange(16.0).reshape(2, 8)


def types(program, name):
  """Returns the dtypes of operands and first result of each equation of a primitive."""
  return [
    (*(str(v.aval.dtype) for v in eqn.invars), str(eqn.outvars[0].aval.dtype))
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name == name
  ]


# Parameters, other values, and how often they are cast.


def test_a_parameter_is_cast_at_each_use():
  assert programs.converts(jaxpr_under(lambda w, x: (x @ w) @ w, W, X)) == {
    "float32->bfloat16": 3,
    "bfloat16->float32": 1,
  }

  def outer(w, x):  # A tracer that is closed over is a parameter too.
    return jnp.sum(mpjax.autocast(lambda x: (x @ w) @ w)(x))

  assert programs.converts(jax.make_jaxpr(outer)(W, X))["float32->bfloat16"] == 3


def test_an_activation_is_cast_once_for_all_consumers():
  def rounded(w, x):
    total = jnp.exp(x @ w)
    return total @ w, total @ (w + 1)

  eqns = [eqn for eqn, _ in programs.equations(jaxpr_under(rounded, W, X))]
  products = [eqn.invars[0] for eqn in eqns if eqn.primitive.name == "dot_general"]
  assert products[1] is products[2]
  assert str(products[1].aval.dtype) == "bfloat16"

  def widened(w, x):
    y = x @ w
    return jnp.exp(y), jnp.log(y), y.sum()

  assert programs.converts(jaxpr_under(widened, W, X)) == {
    "float32->bfloat16": 2,
    "bfloat16->float32": 1,
  }


def test_a_computed_input_is_cast_at_each_use():
  x = normal(8, 8)
  eqns = jaxpr_under(lambda x, w: ((x + 1) @ w, (y := x + 1) @ w, y @ w), x, x, data_argnums=0).eqns
  products = [eqn.invars[0] for eqn in eqns if eqn.primitive.name == "dot_general"]
  assert len({*products}) == 3


SHARED = {
  "as it is": lambda w: w,
  "transposed": lambda w: w.T,
  "reshaped": lambda w: w.reshape(64).reshape(8, 8),
  "scaled": lambda w: 1.0 * w,
  "joined": lambda w: jnp.concatenate([w, w])[:8],
  "added to a constant": lambda w: w + np.zeros((8, 8), np.float32),
  "split off": lambda w: jnp.split(jnp.tile(w, (2, 1)) + np.zeros((16, 8), np.float32), 2)[1],
  "moved by a function": jax.jit(lambda w: w[:, ::-1][:, ::-1]),
  "chosen by a branch": lambda w: lax.cond(w[0, 0] > 0, lambda w: w * 1.0, lambda w: w, w),
  "by a rule": with_jvp(lambda w: w * 1.0),
  "behind a barrier": lambda w: lax.optimization_barrier((w, w))[0],
}


@BOTH
def test_gradients_of_a_shared_parameter_add_in_float32(half):
  # 2^k + 1 in float32. In low precision the last place of 2^k is at least 2: the one is lost.
  big = {"bfloat16": 2.0**9, "float16": 2.0**12}[half]

  def loss(w, x, made):
    w = made(w)
    return (x @ w).sum() * big + (x @ w).sum()

  def gradients(w, x):
    cast = {
      name: mpjax.autocast(lambda w, x, made=made: loss(w, x, made), half)
      for name, made in SHARED.items()
    }
    return {name: jax.grad(fun)(w, x) for name, fun in cast.items()}

  found = programs.run(gradients, W, jnp.eye(1, 8))
  assert found.keys() == SHARED.keys()
  for name, gradient in found.items():
    total = np.zeros((8, 8))
    total[np.s_[:, 0] if name == "transposed" else np.s_[0, :]] = big + 1
    np.testing.assert_array_equal(gradient, total, err_msg=name)


@pytest.mark.parametrize("number", [0.0, 1.5])
def test_an_array_of_one_number_is_made_in_the_dtype_of_its_consumer(number):
  def fun(x, w):
    y = x @ w
    return jax.lax.select(y > 0, y, jnp.full_like(y, number)) @ w

  program = jaxpr_under(fun, X, W)
  # The operands of the matmuls are cast, and the last result.
  assert programs.converts(program) == {"float32->bfloat16": 3, "bfloat16->float32": 1}
  y = np.asarray(mpjax.autocast(jnp.matmul)(X, W), np.float32)
  expected = np.where(y > 0, y, np.float32(number)) @ np.asarray(W)
  np.testing.assert_array_equal(mpjax.autocast(fun)(X, W), expected)


CONSUMERS = {
  "product": lambda h, w: h @ w,
  "exp": lambda h, w: jnp.exp(h),
  "sum": lambda h, w: h.sum(),
  "tanh": lambda h, w: jnp.tanh(h),
}


def test_the_order_of_operations_does_not_change_the_casts():
  counts = set()
  x, w = normal(3, 8), normal(8, 8, seed=1)
  for names in itertools.permutations(CONSUMERS):

    def fun(x, w, names=names):
      for h in (x @ w, lax.reduce_sum(x[None], (0,))):
        found = {name: CONSUMERS[name](h, w) for name in names}
      return [found[name] for name in CONSUMERS]

    counts.add(tuple(sorted(programs.converts(jaxpr_under(fun, x, w)).items())))
  assert len(counts) == 1


def test_an_operation_whose_results_are_unused_is_written_too():
  def fun(w, x):
    lax.sort([x @ w, jnp.exp(x)], num_keys=1)
    values, _ = lax.top_k(x @ w, 2)
    return values

  assert types(jaxpr_under(fun, W, X), "sort") == [("bfloat16", "float32", "bfloat16")]


# Values of other dtypes.


def test_other_types_are_left_alone():
  def fun(key, whole, flags, z):
    new, used = jax.random.split(key)
    bits = jax.random.bits(used, (3,))
    return new, bits, whole @ whole, flags & (whole[0] > 0), z @ z, jnp.exp(z), whole * 2

  args = (
    jax.random.key(0),
    jnp.eye(3, dtype="int32"),
    jnp.ones(3, bool),
    jnp.eye(3, dtype="complex64"),
  )
  assert str(jaxpr_under(fun, *args)) == str(jax.make_jaxpr(fun)(*args))


def test_float64_is_left_alone():
  with jax.enable_x64(True):
    x = jnp.asarray(np.eye(8), "float64")
    program = jaxpr_under(lambda x: jnp.exp(x @ x) * 2.0, x)
    assert str(program) == str(jax.make_jaxpr(lambda x: jnp.exp(x @ x) * 2.0)(x))

    def mixed(w, x):
      return (w @ w).astype("float64") @ x

    program = jaxpr_under(mixed, W, x)
    assert types(program, "dot_general") == [("bfloat16",) * 3, ("float64",) * 3]
    assert jax.eval_shape(mpjax.autocast(mixed), W, x).dtype == "float64"


# The lists decide: ours unless the user's say otherwise, and nothing is refused.


def operands(fn, name, ops, x):
  """Returns the dtypes of the floating operands of a primitive under some lists."""
  found = types(jaxpr_under(fn, x, ops=ops), name)
  return {dtype for *each, _ in found for dtype in each if "float" in dtype}


HALF, F32 = "bfloat16", "float32"


@pytest.mark.parametrize(
  ("name", "fn", "standard", "part", "edited"),
  [
    # A function of a low-precision and a float32 activation; by our and by the user's list.
    ("dot_general", lambda h, f: h @ f.T, HALF, "float32", F32),
    ("dot_general", lambda h, f: h @ (f + 1).T, HALF, "promote", F32),
    ("dot_general", lambda h, f: h @ f.T, HALF, "opaque", F32),
    ("exp", lambda h, f: jnp.exp(h), F32, "half", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "keep", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "promote", HALF),
    ("log", lambda h, f: jnp.log(f), F32, "keep", F32),
    ("reduce_sum", lambda h, f: jnp.sum(h), F32, "keep", HALF),
    ("reduce_max", lambda h, f: f.max(0), F32, "half", HALF),
    ("max", lambda h, f: jnp.maximum(h, 0), HALF, "float32", F32),
    ("max", lambda h, f: jnp.maximum(h, 0), HALF, "opaque", F32),
    ("max", lambda h, f: jnp.maximum(h, 0), HALF, "conditional", F32),
    ("add", lambda h, f: h + h, HALF, "float32", F32),
    ("mul", lambda h, f: f * f, F32, "half", HALF),
  ],
)
def test_the_users_list_wins_both_ways(name, fn, standard, part, edited):
  def both(x):
    # A matmul by an operation that stays as it is listed, so that the override is not in it.
    h = jax.lax.conv_general_dilated(x[None], x[:, :, None], (1,), "SAME")[0]
    return fn(h, jax.lax.cumsum(h))

  edit = {name: lambda params: F32} if part == "conditional" else [name]
  for ops, dtype in ((None, standard), (mpjax.OpLists().replace(**{part: edit}), edited)):
    assert operands(both, name, ops, jnp.eye(8)) == {dtype}


# Values and their variables.

BFLOAT16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype("float32")
FILLED = jax.make_jaxpr(lambda x: lax.broadcast(1.5, (4,)) + x)(jnp.ones(4)).eqns[0]


@pytest.mark.parametrize(("dtype", "low"), [(BFLOAT16, True), (FLOAT32, False)])
def test_a_value_in_low_precision_may_be_in_a_float32_variable(dtype, low):
  (variable,) = FILLED.outvars
  assert FloatValue(variable, Kind(Role.ACTIVATION, dtype)).is_low_in_float32 == low


def test_the_number_of_a_literal_and_of_an_array_that_is_filled_with_one():
  number = Kind(Role.NUMBER, FLOAT32, numbers=frozenset({1.5}))
  literal, (array,) = FILLED.invars[0], FILLED.outvars
  assert FloatValue(literal, number).number == 1.5
  assert FloatValue(array, number, producer=FILLED).number == 1.5
  # It cannot be written in another dtype: it is an array of unknown making, or one of two numbers.
  assert FloatValue(array, number).number is None
  assert (
    FloatValue(array, number._replace(numbers=frozenset({0.0, 1.0})), producer=FILLED).number
    is None
  )
  assert FloatValue(literal, number._replace(numbers=UNKNOWN)).number is None


# Locations.


def test_equations_keep_their_source_lines_and_scopes():
  def fun(w, x):
    with jax.named_scope("first"):
      y = x @ w
    with jax.named_scope("second"):
      return jnp.exp(y)

  def places(program):
    found = {}
    for eqn in program.jaxpr.eqns:
      frames = eqn.source_info.traceback.frames
      lines = [f.line_num for f in frames if f.function_name.endswith("fun")]
      found.setdefault(eqn.primitive.name, (str(eqn.source_info.name_stack), lines))
    return found

  plain, ours = places(jax.make_jaxpr(fun)(W, X)), places(jaxpr_under(fun, W, X))
  assert plain["dot_general"] == ours["dot_general"]
  assert plain["exp"] == ours["exp"]
  assert (ours["dot_general"][0], ours["exp"][0]) == ("first", "second")
  # A cast has the scope of its reader.
  assert ours["convert_element_type"][0] == "first"


def test_the_gradient_of_a_mean_is_added_to_that_of_the_square_before_it():
  # As in a batch norm, whose input is squared before its mean is taken.
  def loss(w, x):
    y = x @ w
    squared = jnp.square(y)
    return jnp.sum(jnp.exp(jnp.sum(y, 0)) + jnp.sum(squared, 0)) + jnp.sum(y * 3.0)

  program = jax.make_jaxpr(jax.grad(mpjax.autocast(loss, data_argnums=1)))(W, X)
  eqns = [eqn for eqn, _ in programs.equations(program)]
  made_by = {v: eqn.primitive.name for eqn in eqns for v in eqn.outvars}
  *_, last = ([made_by[v] for v in eqn.invars] for eqn in eqns if eqn.primitive.name == "add_any")
  # A mean has one number for many elements. JAX adds gradients from the last reader to the first.
  assert last == ["add_any", "broadcast_in_dim"]
