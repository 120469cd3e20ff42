"""Rows of the reliability table that are about autocast, each by a program made for it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import mpjax
from tests import programs
from tests.jaxprs.autocast import checks
from tests.models.values import integers, normal

HALF = ["bfloat16", "float16"]
BOTH = pytest.mark.parametrize("half", HALF)
X, W = normal(3, 4), normal(4, 4, seed=1) / 2


def jaxpr(fun, *args, half="bfloat16", **options):
  return jax.make_jaxpr(mpjax.autocast(fun, half, **options))(*args)


def results(program, primitive):
  """Returns the dtypes of all results of a primitive, in the order of the program."""
  return [
    str(var.aval.dtype)
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name == primitive
    for var in eqn.outvars
  ]


def widened(x):
  """Returns `x` as a float32 operation hands it on."""
  return jax.lax.reduce_sum(x[None], (0,))


# Regions of full precision.


class Nested:
  """Two products of a nested container, between two others."""

  def __init__(self, inner):
    self.inner = inner

  def __call__(self, tree):
    h = tree["x"] @ tree["w"][0]
    out = self.inner({"pair": (h, tree["w"]), "name": "kept", "none": None})
    return out["pair"][0] @ tree["w"][1], out

  @staticmethod
  def body(tree):
    h, (first, second) = tree["pair"]
    return {"pair": (jnp.exp(h @ first), [h @ second]), "name": None}


TREE = {"x": X, "w": [W, 2 * W]}


@pytest.mark.case("A73")
@BOTH
def test_full_precision_takes_nested_containers(half):
  program = jaxpr(Nested(mpjax.full_precision(Nested.body)), TREE, half=half)
  dtypes = [p.dtypes for p in programs.products(program)]
  assert dtypes == [(half, half), ("float32", "float32"), ("float32", "float32"), (half, half)]


@pytest.mark.case("A73")
def test_full_precision_does_nothing_without_a_policy():
  marked, plain = (Nested(f) for f in (mpjax.full_precision(Nested.body), Nested.body))
  ours, theirs = (str(jax.make_jaxpr(f)(TREE)) for f in (marked, plain))
  assert ours == theirs


# What each kind of layer runs in.


def mean_squared_error(x):
  return jnp.mean((x - 1.0) ** 2)


LAYERS = {
  # name: a layer of one array, the primitive that does the work, and its dtype behind a product
  "linear": (lambda x: x @ W.astype(x.dtype), "dot_general", "half"),
  "convolution": (
    lambda x: jax.lax.conv_general_dilated(x[None], W[:3, :3, None].astype(x.dtype), (1,), "SAME"),
    "conv_general_dilated",
    "half",
  ),
  "softmax": (jax.nn.softmax, "exp", "float32"),
  "log softmax": (jax.nn.log_softmax, "log", "float32"),
  "normalisation": (jax.nn.standardize, "rsqrt", "float32"),
  "mean squared error": (mean_squared_error, "reduce_sum", "float32"),
  "power": (lambda x: jnp.abs(x) ** 1.5, "pow", "float32"),
  "sum": (jnp.sum, "reduce_sum", "float32"),
  "relu": (jax.nn.relu, "max", "half"),
  "tanh": (jnp.tanh, "tanh", "half"),
}


@pytest.mark.case("A77")
@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_layer_runs_in_its_type(name, half):
  layer, primitive, dtype = LAYERS[name]
  program = jaxpr(lambda x, w: layer(x @ w), X, W, half=half)
  wanted = half if dtype == "half" else dtype
  assert set(results(program, primitive)) == {wanted}


@pytest.mark.case("A77")
@BOTH
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_an_activation_follows_its_input(name, half):
  layer, primitive, _ = LAYERS[name]
  program = jaxpr(lambda x, w: layer(widened(x)) @ w, X, W, half=half)
  assert results(program, primitive) == ["float32"]


@pytest.mark.case("A77")
@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_an_input_has_the_dtype_of_the_input(name, half):
  def loss(x):
    return jnp.sum(mpjax.autocast(LAYERS[name][0], half)(x).astype(jnp.float32))

  for dtype in ("float32", half):
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    assert jax.eval_shape(jax.grad(loss), x).dtype == dtype


# Types that meet.


@pytest.mark.case("A78", "A88")
@BOTH
@pytest.mark.parametrize(
  ("name", "fun"),
  [
    ("add", lambda h, f: h + f),
    ("mul", lambda h, f: f * h),
    ("concatenate", lambda h, f: jnp.concatenate([h, f])),
    ("select_n", lambda h, f: jnp.where(np.eye(3, 4) > 0, h, f)),
    ("concatenate", lambda h, f: jnp.concatenate([h, h, f], axis=1)),
  ],
)
def test_half_and_float32_make_float32(name, fun, half):
  program = jaxpr(lambda x, w: jnp.tanh(fun(x @ w, widened(x))), X, W, half=half)
  assert results(program, name) == ["float32"]
  assert results(program, "tanh") == ["float32"]
  program = jaxpr(lambda x, w: jnp.tanh(fun(x @ w, x @ w)), X, W, half=half)
  assert results(program, name) == [half]


@pytest.mark.case("A78")
@BOTH
def test_a_buffer_that_is_written_to_keeps_its_type(half):
  def fun(x, w):
    h, f = x @ w, widened(x)
    return h.at[1].set(f[0]), f.at[1].set(h[0]), f.at[0, 1].set(0.5)

  program = jaxpr(fun, X, W, half=half)
  assert results(program, "scatter") == [half, "float32", "float32"]
  into_half, into_float32, _ = programs.run(mpjax.autocast(fun, half), X, W)
  product = programs.run(mpjax.autocast(jnp.matmul, half), X, W)
  np.testing.assert_array_equal(into_half[1], X[0].astype(half).astype(np.float32))
  np.testing.assert_array_equal(into_half[::2], product[::2])
  np.testing.assert_array_equal(into_float32[1], product[0])
  np.testing.assert_array_equal(into_float32[::2], X[::2])


@pytest.mark.case("B050")
@BOTH
@pytest.mark.parametrize(
  ("name", "fun"),
  [
    ("dot_general", lambda h, f: jax.lax.dot(h, f.T)),
    (
      "conv_general_dilated",
      lambda h, f: jax.lax.conv_general_dilated(h[None], f[:, :3, None], (1,), "SAME"),
    ),
    ("add", jax.lax.add),
    ("concatenate", lambda h, f: jax.lax.concatenate([h, f], 0)),
    ("dynamic_update_slice", lambda h, f: jax.lax.dynamic_update_slice(h, f[:1], (1, 0))),
    ("dynamic_update_slice", lambda h, f: jax.lax.dynamic_update_slice(f, h[:1], (1, 0))),
    ("clamp", lambda h, f: jax.lax.clamp(h, f, jnp.abs(f))),
    ("atan2", jax.lax.atan2),
  ],
)
def test_operands_of_two_types_are_brought_together(name, fun, half):
  def both(x, w):
    return fun(x @ w, widened(x))

  program = jaxpr(both, X, W, half=half)
  (eqn,) = (
    e
    for e, _ in programs.equations(program)
    if e.primitive.name == name and (name != "dot_general" or e.outvars[0].aval.shape == (3, 3))
  )
  found = {str(v.aval.dtype) for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)}
  assert len(found) == 1
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  got, want = (programs.run(f, X, W) for f in (mpjax.autocast(both, half), both))
  assert programs.error(got, want) <= bound


@pytest.mark.case("B050")
@BOTH
def test_a_product_of_two_types_that_jax_takes_silently_is_in_half(half):
  def fun(x, w):
    return jax.lax.dot(x.astype(half), w)

  plain = jax.make_jaxpr(fun)(X, W)
  assert [p.dtypes for p in programs.products(plain)] == [(half, "float32")]
  program = jaxpr(fun, X, W, half=half)
  assert [p.dtypes for p in programs.products(program)] == [(half, half)]
  assert [v.aval.dtype for v in program.jaxpr.outvars] == [
    v.aval.dtype for v in plain.jaxpr.outvars
  ]


# Order, and lists of the user's.

READERS = {
  "product": lambda h, w: h @ w,
  "exp": lambda h, w: jnp.exp(h),
  "sum": lambda h, w: h.sum(),
  "tanh": lambda h, w: jnp.tanh(h),
}


@pytest.mark.case("A85")
@BOTH
def test_the_order_of_operations_does_not_change_the_casts(half):
  def program(names):
    def fun(x, w):
      for h in (x @ w, widened(x)):
        found = {name: READERS[name](h, w) for name in names}
      return [found[name] for name in READERS]

    return fun

  counts, values = set(), set()
  for names in itertools.permutations(READERS):
    fun = program(names)
    traced = jax.jit(mpjax.autocast(fun, half)).trace(X, W)
    counts.add(tuple(sorted(programs.converts(traced.jaxpr).items())))
    if names[0] != "tanh":  # Each reader comes first in some that are run; compiling takes time.
      continue
    values.add(tuple(programs.bits(programs.compiled(traced.lower())(X, W))))
  assert len(counts) == 1
  assert len(values) == 1


OVERRIDES = [
  # part, primitive, function of a half and a float32 operand, its dtypes by the user's list
  ("float32", "dot_general", lambda h, f: h @ f.T, "float32"),
  ("half", "exp", lambda h, f: jnp.exp(f), "half"),
  ("half", "reduce_max", lambda h, f: f.max(0), "half"),
  ("float32", "tanh", lambda h, f: jnp.tanh(h), "float32"),
  ("float32", "add", lambda h, f: h + h, "float32"),
  ("half", "mul", lambda h, f: f * f, "half"),
  ("promote", "exp", lambda h, f: jnp.exp(h), "half"),
  ("keep", "log", lambda h, f: jnp.log(h), "half"),
  ("keep", "log", lambda h, f: jnp.log(f), "float32"),
  ("promote", "dot_general", lambda h, f: h @ f.T, "float32"),
  ("opaque", "dot_general", lambda h, f: h @ f.T, "float32"),
  ("opaque", "tanh", lambda h, f: jnp.tanh(h), "float32"),
]


@pytest.mark.case("A90")
@BOTH
@pytest.mark.parametrize(("part", "name", "fun", "dtype"), OVERRIDES)
def test_a_list_of_the_users_beats_the_built_in_one(part, name, fun, dtype, half):
  def both(x, w):
    # A product by an operation that stays as it is listed, so that the override is not in it.
    h = jax.lax.conv_general_dilated(x[None], w[:, :, None], (1,), "SAME")[0]
    return fun(h, widened(x))

  ops = mpjax.OpLists().replace(**{part: [name]})
  x, w = normal(3, 4), normal(3, 3, seed=1)
  default = results(jaxpr(both, x, w, half=half), name)
  ours = results(jaxpr(both, x, w, half=half, ops=ops), name)
  assert ours == [half if dtype == "half" else dtype]
  if (part, name) != ("keep", "log") or dtype == "half":
    assert default != ours


# What half would lose.


SUMS = {
  # Each of a thousand ones that a product has handed on in half.
  "sum": lambda ones, zeros: ones.sum(),
  "mean": lambda ones, zeros: ones.mean() * 1000,
  "cumsum": lambda ones, zeros: jnp.cumsum(ones)[-1],
  "scan": lambda ones, zeros: jax.lax.scan(lambda c, x: (c + x, None), 0.0, ones)[0],
  "fori": lambda ones, zeros: jax.lax.fori_loop(0, 1000, lambda i, c: c + ones[i], 0.0),
  "scatter-add": lambda ones, zeros: jnp.zeros(3).at[zeros].add(ones)[0],
  "segment_sum": lambda ones, zeros: jax.ops.segment_sum(ones, zeros, num_segments=2)[0],
}


@pytest.mark.case("B051")
@BOTH
@pytest.mark.parametrize("name", SUMS)
def test_sums_do_not_lose_what_half_accumulation_loses(name, half):
  def fun(ones, one, zeros):
    return SUMS[name]((ones @ one)[:, 0], zeros)

  args = np.ones((1000, 1), np.float32), np.ones((1, 1), np.float32), np.zeros(1000, np.int32)
  assert programs.run(mpjax.autocast(fun, half), *args) == 1000


@pytest.mark.case("B051")
def test_a_sum_may_be_larger_than_float16_holds():
  big, one = np.full((2, 1), 65504, np.float32), np.ones((1, 1), np.float32)
  assert programs.run(mpjax.autocast(lambda x, w: (x @ w).sum(), "float16"), big, one) == 131008


@pytest.mark.case("B051")
@BOTH
def test_gradients_of_a_weight_that_is_used_many_times_add_in_float32(half):
  def fun(w, xs):
    """Each use adds 1 to the gradient of `w`, and 512 is more than bfloat16 can count to."""
    return jax.lax.scan(lambda c, x: (c + (x[None] @ w)[0, 0], None), 0.0, xs)[0]

  xs, w = np.ones((513, 1), np.float32), np.ones((1, 1), np.float32)
  assert programs.run(jax.grad(mpjax.autocast(fun, half)), w, xs) == 513


# Constants.


@pytest.mark.case("B054")
@BOTH
def test_a_constant_is_cast_once_for_all_matmuls_and_not_rounded_elsewhere(half):
  kernel, shift = W, normal(1, 4, seed=2)

  def fun(x):
    h = x @ kernel + shift
    return jnp.tanh(h @ kernel + shift) * shift

  program = jaxpr(fun, X, half=half)
  assert set(results(program, "dot_general")) == {half}
  assert set(results(program, "add")) == set(results(program, "mul")) == {"float32"}
  # The input, the kernel, and the first sum to half; the results of the two matmuls to float32.
  assert programs.converts(program) == {f"float32->{half}": 3, f"{half}->float32": 2}


# Carries and branches.


def carried(kind, fun, start):
  if kind == "scan":
    return jax.lax.scan(lambda c, _: (fun(c), c), start, None, length=3)
  if kind == "while":
    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (fun(c[0]), c[1] + 1), (start, 0))
  if kind == "fori":
    return jax.lax.fori_loop(0, 3, lambda _, c: fun(c), start)
  branches = [fun, lambda c: c, lambda c: jnp.zeros_like(c)]
  return jax.lax.switch(1 + jnp.argmax(start[0]) // 4, branches, start)


STEPS = {
  "half to float32": lambda c, w: widened(c @ w),
  "float32 to half": lambda c, w: jnp.tanh(jnp.exp(c * 0.1) @ w),
  "half to half": lambda c, w: jnp.tanh(c @ w),
  "their sum": lambda c, w: c + 0.1 * (c @ w),
}


@pytest.mark.case("B070")
@BOTH
@pytest.mark.parametrize("start", ["half", "float32", "zeros"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["scan", "while", "fori", "cond"])
def test_what_is_carried_has_one_type(kind, step, start, half):
  def fun(x, w):
    starts = {"half": x @ w, "float32": widened(x), "zeros": jnp.zeros_like(x)}
    return carried(kind, lambda c: STEPS[step](c, w), starts[start])

  cast = mpjax.autocast(fun, half)
  assert checks.changed_outputs(cast, fun, X, W) == []
  assert checks.halves(jax.make_jaxpr(cast)(X, W), half) == []


@pytest.mark.case("B070")
def test_carries_of_two_types_that_are_the_users_mistake_are_named_by_jax():
  def fun(x):
    return jax.lax.scan(lambda c, _: ({"h": c["h"].astype(jnp.int32)}, None), {"h": x}, None, 2)[0]

  with pytest.raises(TypeError, match=r"c\['h'\]"):
    mpjax.autocast(fun)(X)


# Derivative rules.


@jax.custom_vjp
def sevenfold(x, w):
  """A product whose gradient is seven times what it should be: proof of whose rule is used."""
  return x @ w


sevenfold.defvjp(
  lambda x, w: (x @ w, (x, w)), lambda kept, ct: (7 * ct @ kept[1].T, 7 * kept[0].T @ ct)
)


@jax.custom_jvp
def threefold(x, w):
  return x @ w


@threefold.defjvp
def _threefold_jvp(primals, tangents):
  (x, w), (x_dot, w_dot) = primals, tangents
  return x @ w, 3 * (x_dot @ w + x @ w_dot)


PLACES = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "remat": jax.checkpoint,
  "scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (c, f(x, w)), 0, None, length=1)[1][0],
  "cond": lambda f: lambda x, w: jax.lax.cond(x[0, 0] > -9, f, lambda x, w: x, x, w),
  "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
}


@pytest.mark.case("B074")
@BOTH
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("fun", "factor"), [(sevenfold, 7), (threefold, 3)])
def test_the_users_own_derivative_is_used(fun, factor, place, half):
  def loss(fun, x, w):
    return jnp.sum(PLACES[place](fun)(x, w) ** 2)

  grad = jax.grad(lambda x, w: mpjax.autocast(functools.partial(loss, fun), half)(x, w), (0, 1))
  program = jax.make_jaxpr(grad)(X, W)
  assert checks.halves(program, half) == []
  found = programs.run(grad, X, W)
  true = programs.run(jax.grad(functools.partial(loss, jnp.matmul), (0, 1)), X, W)
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  assert programs.error(found, jax.tree.map(lambda g: factor * g, true)) <= bound


RULES = {
  # Where the rule of each is not what differentiating its formula gives.
  "relu at 0": (jax.nn.relu, [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]),
  "relu6 at 6": (jax.nn.relu6, [6.0, 0.0, 3.0], [0.0, 0.0, 1.0]),
  "logsumexp of -inf": (
    lambda x: jax.nn.logsumexp(jnp.where(np.asarray([True, False, False]), x, -jnp.inf)),
    [1.0, 2.0, 3.0],
    [1.0, 0.0, 0.0],
  ),
  "softmax": (lambda x: jax.nn.softmax(x)[0], [0.0, 0.0, -1e4], [0.25, -0.25, 0.0]),
  "logaddexp": (lambda x: jnp.logaddexp(x, x), [0.0, 80.0, -80.0], [1.0, 1.0, 1.0]),
  "silu": (jax.nn.silu, [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]),
}


@pytest.mark.case("B074")
@BOTH
@pytest.mark.parametrize("name", RULES)
def test_rules_that_jax_comes_with_are_kept(name, half):
  fun, x, want = RULES[name]
  eye = np.eye(3, dtype=np.float32)
  # Times a power of two, which both half types hold, so that nothing but the rule is seen.
  grad = jax.grad(mpjax.autocast(lambda x: 4.0 * jnp.sum(fun(x @ eye)), half))
  np.testing.assert_array_equal(programs.run(grad, np.asarray(x, np.float32)), 4 * np.asarray(want))


# Primitives that call programs.


def double(x_ref, y_ref):
  y_ref[...] = x_ref[...] + x_ref[...]


CALLS = {
  "jit": lambda x, w: jax.jit(jnp.matmul)(x, w),
  "remat2": lambda x, w: jax.checkpoint(jnp.matmul)(x, w),
  "scan": lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0],
  "while": lambda x, w: jax.lax.while_loop(lambda c: jnp.any(c > 9), lambda c: c @ w, x),
  "cond": lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x),
  "custom_jvp_call": threefold,
  "custom_vjp_call": sevenfold,
  "shard_map": lambda x, w: jax.shard_map(
    jnp.matmul,
    mesh=jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]),
    in_specs=(jax.P("d"), jax.P()),
    out_specs=jax.P("d"),
  )(x, w),
}

LEFT = {
  "composite": lambda x, w: jax.lax.composite(jnp.matmul, "mine.matmul")(x, w),
  "custom_linear_solve": lambda x, w: jax.lax.custom_linear_solve(
    lambda v: v @ (w @ w.T + jnp.eye(4)), x[0], lambda _, b: b, symmetric=True
  ),
  "pallas_call": lambda x, w: pl.pallas_call(
    double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
  )(x),
}


@pytest.mark.case("B075")
@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_a_primitive_that_calls_a_program_is_entered(name, half):
  program = jaxpr(CALLS[name], X, W, half=half)
  assert name in [eqn.primitive.name for eqn in program.jaxpr.eqns]
  assert programs.products(program)
  assert checks.halves(program, half) == []


@pytest.mark.case("B075")
@BOTH
@pytest.mark.parametrize("name", LEFT)
def test_a_primitive_that_is_not_entered_runs_as_it_was_written(name, half):
  """Its operands and results keep their types, whatever is around it."""

  def around(x, w):
    return LEFT[name](x @ w, w) @ w

  program = jaxpr(around, X, W, half=half)
  (eqn,) = (e for e in program.jaxpr.eqns if e.primitive.name == name)
  floats = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars) if v.aval.dtype != jnp.int32]
  assert {str(dtype) for dtype in floats} == {"float32"}
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  got, want = (programs.run(f, X, W) for f in (mpjax.autocast(around, half), around))
  assert programs.error(got, want) <= bound


@pytest.mark.case("B075")
def test_integers_and_keys_pass_through():
  def fun(x, ids, key):
    h = x @ W
    keys = jax.random.split(key)
    return h[ids], ids * 2, keys, jax.random.bernoulli(keys[0], 0.5, (3,)), jnp.argsort(h)

  args = (X, integers(5, below=3), jax.random.key(0))
  assert checks.changed_outputs(mpjax.autocast(fun), fun, *args) == []
  got, want = (programs.run(f, *args) for f in (mpjax.autocast(fun), fun))
  for ours, theirs in zip(got[1:4], want[1:4], strict=True):
    assert (ours == theirs).all()
