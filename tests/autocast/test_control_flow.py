"""Calls, branches and loops: the dtypes of their operands and of their results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding

import mpjax
from tests import programs
from tests.autocast import checks
from tests.autocast.rig import BOTH, dtypes, find, jaxpr_under

W = jnp.eye(8)
X = jnp.arange(16.0).reshape(2, 8)


def one(program, name):
  (eqn,) = find(program, name)
  return eqn


def products(program):
  return {t for p in programs.products(program) for t in (*p.dtypes, p.result.partition("[")[0])}


def same(fun, *args):
  # Asserts equal values and dtypes with and without autocast, for numbers that half types hold.
  ours, theirs = programs.run(mpjax.autocast(fun), *args), programs.run(fun, *args)
  assert programs.bits(ours) == programs.bits(theirs)


# Calls.


def test_jit_takes_and_returns_low_precision_and_keeps_its_parameters():
  @functools.partial(jax.jit, keep_unused=True)
  def inner(y, w, unused):
    return jnp.tanh(y @ w)

  fun = lambda w, x: inner(x @ w, w, x) @ w  # noqa: E731
  program = jaxpr_under(fun, W, X)
  eqn = one(program, "jit")
  assert dtypes(eqn.invars) == ["bfloat16", "float32", "float32"]
  assert dtypes(eqn.outvars) == ["bfloat16"]
  assert products(program) == {"bfloat16"}
  plain = one(jax.make_jaxpr(fun)(W, X), "jit").params
  assert (plain["name"], plain["keep_unused"]) == ("inner", True)
  assert {**eqn.params, "jaxpr": None} == {**plain, "jaxpr": None}
  assert len(eqn.params["jaxpr"].jaxpr.invars) == 3


def test_a_donated_argument_keeps_its_dtype():
  inner = jax.jit(lambda y, w: (y * 2, y @ w), donate_argnums=0)

  def fun(w, x):
    return inner(x @ w, w)

  eqn = one(jaxpr_under(fun, W, X), "jit")
  assert dtypes(eqn.invars) == ["float32", "float32"]
  assert eqn.params["donated_invars"] == (True, False)
  mine = X + 0
  total = mpjax.autocast(inner)(mine, W)[0]
  np.testing.assert_array_equal(total, 2 * np.asarray(X))
  assert mine.is_deleted()


POLICIES = {
  # name: a policy of jax.checkpoint, and the matmuls of a gradient: a saved one is not repeated
  "none": (None, 3),
  "nothing": (jax.checkpoint_policies.nothing_saveable, 3),
  "dots": (jax.checkpoint_policies.dots_saveable, 2),
  "by name": (jax.checkpoint_policies.save_only_these_names("logits"), 2),
}


@pytest.mark.parametrize(("policy", "matmuls"), POLICIES.values(), ids=POLICIES)
def test_checkpoint_keeps_its_policy(policy, matmuls):
  def fun(w, x):
    def logits(y):
      return jnp.sin(checkpoint_name(y @ w, "logits"))

    return jax.checkpoint(logits, policy=policy, prevent_cse=False)(x).sum()

  eqn = one(jaxpr_under(fun, W, X), "remat2")
  assert eqn.params["policy"] is policy
  assert not eqn.params["prevent_cse"]
  assert not eqn.params["differentiated"]
  program = jax.make_jaxpr(jax.grad(mpjax.autocast(fun)))(W, X)
  assert products(program) == {"bfloat16"}
  assert one(program, "remat2").params["differentiated"]
  assert len(programs.products(program)) == matmuls


# Branches.


BRANCHES = {
  # name: (branches of y, an activation in the compute dtype, and w; dtype of the result)
  "a matmul and the identity": ((lambda y, w: y @ w, lambda y, w: y), "bfloat16"),
  "one in float32": ((lambda y, w: y @ w, lambda y, w: jnp.exp(y)), "float32"),
  "a number": ((lambda y, w: y @ w, lambda y, w: jnp.zeros((2, 8))), "bfloat16"),
  "a number out of range": ((lambda y, w: y @ w, lambda y, w: jnp.full((2, 8), 3.4e38)), "float32"),
  "three": ((lambda y, w: y @ w, lambda y, w: y.sum() * y, lambda y, w: y + 1), "float32"),
}


def test_branches_return_one_dtype():
  def fun(w, x, which, branches):
    return lax.switch(which, branches, x @ w, w)

  def each(w, x):
    return {
      (name, which): [f(w, x, which) for f in (mpjax.autocast(plain), plain)]
      for name, plain in made.items()
      for which in range(len(BRANCHES[name][0]))
    }

  made = {}
  for name, (branches, dtype) in BRANCHES.items():
    made[name] = functools.partial(fun, branches=branches)
    eqn = one(jaxpr_under(made[name], W, X, 1), "cond")
    assert dtypes(eqn.outvars) == [dtype], name
    assert {t for b in eqn.params["branches"] for t in dtypes(b.jaxpr.outvars)} == {dtype}, name
  for (name, which), (got, want) in programs.run(each, W, X).items():
    rtol = 1e-2 if name == "one in float32" else 1e-6
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=rtol, err_msg=f"{name} {which}")


def test_each_result_of_a_branch_has_its_own_dtype():
  def fun(w, x, flag):
    return lax.cond(
      flag, lambda y: (y @ w, y.sum(), 1, flag), lambda y: (y, y[0, 0], 2, ~flag), x @ w
    )

  eqn = one(jaxpr_under(fun, W, X, jnp.asarray(True)), "cond")
  assert dtypes(eqn.outvars) == ["bfloat16", "float32", "int32", "bool"]
  same(fun, W, X, jnp.asarray(True))
  same(fun, W, X, jnp.asarray(False))


# Loops.


def carried(kind, fun, start):
  if kind == "scan":
    return lax.scan(lambda c, _: (fun(c), c), start, None, length=3)
  if kind == "while":
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (fun(c[0]), c[1] + 1), (start, 0))
  if kind == "fori":
    return lax.fori_loop(0, 3, lambda _, c: fun(c), start)
  branches = [fun, lambda c: c, lambda c: jnp.zeros_like(c)]
  return lax.switch(1 + jnp.argmax(start[0]) // 4, branches, start)


STEPS = {
  "half to float32": lambda c, w: (c @ w).sum(0, keepdims=True) + c,
  "float32 to half": lambda c, w: jnp.tanh(jnp.exp(c * 0.1) @ w),
  "half to half": lambda c, w: jnp.tanh(c @ w),
  "their sum": lambda c, w: c + 0.1 * (c @ w),
}
STARTS = {
  "half": lambda w, x: x @ w,
  "float32": lambda w, x: jnp.exp(x),
  "zeros": lambda w, x: 0 * x,
}


@pytest.mark.parametrize("kind", ["scan", "while", "fori", "cond"])
def test_a_carry_has_one_dtype(kind):
  # A loop or a branch whose types differ is an error of JAX's.
  for (step, body), (start, begin) in itertools.product(STEPS.items(), STARTS.items()):

    def fun(w, x, body=body, begin=begin):
      return carried(kind, lambda c: body(c, w), begin(w, x))

    ours = mpjax.autocast(fun)
    assert checks.changed_outputs(ours, fun, W, X) == [], (step, start)
    assert checks.halves(jax.make_jaxpr(ours)(W, X), "bfloat16") == [], (step, start)


def test_dtypes_of_a_carry_that_is_passed_around_settle():
  # The first becomes float32 at once, the second after a turn, the third after two.
  def fun(w, x):
    def turn(carry, _):
      a, b, _, d = carry
      return (a.sum() + a, a, b, d @ w), None

    y = x @ w
    return lax.scan(turn, (y, y, y, y), None, length=2)[0]

  eqn = one(jaxpr_under(fun, W, X), "scan")
  assert dtypes(eqn.outvars) == ["float32", "float32", "float32", "bfloat16"]
  body = eqn.params["jaxpr"].jaxpr
  assert dtypes(body.outvars) == dtypes(body.invars[-4:])


@pytest.mark.parametrize("remat", [lambda step: step, jax.checkpoint], ids=["plain", "remat"])
def test_a_scan_carries_a_residual_stream_in_low_precision(remat):
  def fun(w, x):
    return lax.scan(remat(lambda c, _: (c + c @ w, None)), x @ w, None, length=2)[0]

  assert dtypes(one(jaxpr_under(fun, W, X), "scan").outvars) == ["bfloat16"]


@BOTH
def test_a_while_carries_a_residual_stream_in_float32_so_that_it_ends(half):
  def fun(w, x):
    def step(z):
      return x + z @ w

    def moves(carry):
      z, count = carry
      return (jnp.linalg.norm(step(z) - z) > 1e-5) & (count < 1000)

    return lax.while_loop(moves, lambda carry: (step(carry[0]), carry[1] + 1), (x @ w, 0))[1]

  ours, w = mpjax.autocast(fun, half), W / 3
  assert dtypes(one(jax.make_jaxpr(ours)(w, X), "while").outvars) == ["float32", "int32"]
  assert programs.run(ours, w, X) < 100


def test_a_carry_that_the_user_has_cast_to_low_precision_stays_in_it():
  def fun(w, x):
    return lax.scan(lambda c, _: (jnp.exp(c), None), (x @ w).astype("bfloat16"), None, length=2)[0]

  assert dtypes(one(jaxpr_under(fun, W, X), "scan").outvars) == ["bfloat16"]


CARRIES = {
  # A buffer, to which each iteration may add.
  "number": (lambda w, x: jnp.zeros_like(w), "float32"),
  "input": (lambda w, x: x, "float32"),
  # A residual stream may start as one.
  "parameter": (lambda w, x: w, "bfloat16"),
}


@pytest.mark.parametrize(("start", "expected"), CARRIES.values(), ids=CARRIES)
def test_a_carry_that_starts_as(start, expected):
  def fun(w, x):
    turn = lambda c, _: (jnp.maximum(c @ w, x @ w), None)  # noqa: E731
    return lax.scan(turn, start(w, x), None, length=2)[0] @ w

  w = jnp.ones((8, 8))
  ours = jax.make_jaxpr(mpjax.autocast(fun, data_argnums=1))(w, w)
  assert dtypes(one(ours, "scan").outvars) == [expected]


def test_a_while_carries_a_parameter_in_float32():
  # Each step changes less than the last place of bfloat16.
  def grown(w, z):
    return lax.fori_loop(0, jnp.int32(500), lambda _, z: z + z @ w, z)

  w, z = 1e-3 * jnp.eye(8), jnp.ones((8, 8))
  np.testing.assert_allclose(mpjax.autocast(grown)(w, z), 1.001**500, rtol=1e-3)


def test_a_cond_of_numbers_keeps_what_is_known_of_them():
  def scaled(w, x, is_small):
    scale = lax.cond(is_small, lambda: 1e-9, lambda: 0.0)  # Float16 has no such number.
    return ((x @ w) * scale * 1e4 * 1e4) @ w

  args = jnp.eye(8), jnp.ones((8, 8)), True
  np.testing.assert_allclose(mpjax.autocast(scaled, "float16")(*args), scaled(*args), rtol=1e-2)


@pytest.mark.parametrize("activation", [False, True])
def test_constants_of_a_scan_are_cast_inside_so_that_gradients_add_in_float32(activation):
  # 1000 times one: sums in bfloat16 stop at 256.
  def fun(w, x):
    y = x @ w
    add = lambda total, _: (total + (y if activation else x @ w).sum(), None)  # noqa: E731
    return lax.scan(add, 0.0, None, length=1000)[0]

  eqn = one(jaxpr_under(fun, W, X), "scan")
  assert {"float32"} == set(dtypes(eqn.invars))
  x = jnp.eye(1, 8)
  grad = programs.run(jax.grad(mpjax.autocast(fun)), W, x)
  np.testing.assert_array_equal(grad, [[1000.0] * 8] + [[0.0] * 8] * 7)


def test_layers_stacked_for_a_scan_are_sliced_in_float32_and_used_in_low_precision():
  def fun(ws, x):
    return lax.scan(lambda y, w: (y @ w, y), x @ ws[0], ws)

  program = jaxpr_under(fun, jnp.stack([W, W]), X)
  eqn = one(program, "scan")
  assert dtypes(eqn.invars) == ["bfloat16", "float32"]
  assert dtypes(eqn.outvars) == ["bfloat16", "bfloat16"]
  assert products(program) == {"bfloat16"}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_keeps_its_order_length_and_dtypes(reverse):
  steps = jnp.arange(4)
  keys = jax.random.split(jax.random.key(0), 4)

  def fun(w, x, steps, keys):
    def step(carry, xs):
      count, y = carry
      i, key, row = xs
      y = (y @ w) + i.astype("float32")
      return (count + i, y), (i * 2, jax.random.fold_in(key, 0), y, -row, jnp.exp(row))

    rows = jnp.stack([x[0]] * 4) @ w
    return lax.scan(step, (0, x @ w), (steps, keys, rows), reverse=reverse, unroll=2)

  eqn = one(jaxpr_under(fun, W, X, steps, keys), "scan")
  assert eqn.params["reverse"] == reverse
  assert (eqn.params["length"], eqn.params["unroll"]) == (4, 2)
  outs = dtypes(eqn.outvars)
  # What is carried meets an integer that became a float.
  assert outs == ["int32", "float32", "int32", "key<fry>", "float32", "bfloat16", "float32"]
  same(lambda *args: programs.data_of_keys(fun(*args)), W, X, steps, keys)


# Devices.


FORWARD = {
  "jvp": lambda f, x, ones: jax.jvp(f, (x,), (ones,))[1],
  "jacfwd": lambda f, x, ones: jax.jacfwd(f)(x).sum((2, 3)),
  "linearize": lambda f, x, _: jax.linearize(f, x)[1](jnp.ones_like(x)),
}
"""Ways to the change of a result for an operand that changes by ones."""


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize(
  "fun",
  [lambda x, w: x @ w, lambda x, w: jnp.tanh(x @ w) @ w],
  ids=["one matmul", "two"],
)
def test_a_tangent_on_fewer_axes_of_an_explicit_mesh(devices, mode, fun):
  mesh = jax.make_mesh((4,), ("d",), (AxisType.Explicit,), devices=devices)
  w = jax.device_put(W, NamedSharding(mesh, jax.P()))
  x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, jax.P("d")))

  def change(cast):
    f = cast(lambda x: fun(x, w))
    # Ones that are on no axis of the mesh.
    with jax.set_mesh(mesh):
      return jax.jit(lambda x: FORWARD[mode](f, x, jnp.ones((4, 8))))(x)

  found, expected = change(mpjax.autocast), change(lambda f: f)
  assert jax.typeof(found) == jax.typeof(expected)
  np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("inside", [True, False], ids=["of autocast", "under autocast"])
def test_a_tangent_that_varies_over_fewer_axes_of_a_shard_map(devices, mode, inside):
  mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=devices)

  def change(cast):
    f = lambda x: jnp.tanh(x @ W) @ W  # noqa: E731
    local = lambda f: lambda x: FORWARD[mode](f, x, jnp.ones((1, 8)))  # noqa: E731
    mapped = local(cast(f)) if inside else cast(local(f))
    specs = {"in_specs": jax.P("d"), "out_specs": jax.P("d")}
    return jax.jit(jax.shard_map(mapped, mesh=mesh, **specs))(jnp.ones((4, 8)))

  found, expected = change(mpjax.autocast), change(lambda f: f)
  assert jax.typeof(found) == jax.typeof(expected)
  np.testing.assert_allclose(found, expected, atol=0.02)


def test_the_types_of_a_gradient_in_a_shard_map_are_right(devices, set_flag):
  mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=devices)

  def fun(w, x):
    local = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P("d")}
    return jax.shard_map(local, mesh=mesh, **specs)(w, x).sum()

  set_flag("jax_enable_checks", True)
  jax.make_jaxpr(mpjax.autocast(jax.grad(fun, (0, 1))))(W, jnp.ones((4, 8)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(devices, check_vma):
  mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=devices)

  def local(w, x):
    y = x @ w
    return y, lax.psum(y.sum(), "d")

  def fun(w, x):
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(jax.P(), jax.P("d")),
      out_specs=(jax.P("d"), jax.P()),
      check_vma=check_vma,
    )(w, x)

  x = jnp.ones((400, 8))
  program = jaxpr_under(fun, W, x)
  eqn = one(program, "shard_map")
  assert dtypes(eqn.outvars) == ["bfloat16", "float32"]
  assert eqn.params["check_vma"] == check_vma
  sums = [e for n in ("psum", "psum_invariant") for e in find(program, n)]
  assert {t for e in sums for t in dtypes([*e.invars, *e.outvars])} == {"float32"}
  y, total = programs.run(mpjax.autocast(fun), W, x)
  np.testing.assert_array_equal(y, x)
  assert total == 3200

  grad = programs.run(jax.grad(lambda w: mpjax.autocast(fun)(w, x)[1]), W)
  np.testing.assert_array_equal(grad, [[400.0] * 8] * 8)


def test_the_state_of_a_solver_stays_in_float32():
  # Each step is below the last place of a half type: nothing would move there.
  def fun(w, x):
    def step(y, _):
      return y + 2.0**-14 * jnp.tanh(y @ w) * 0 + 2.0**-14, None

    return lax.scan(step, x, None, length=8)[0]

  assert dtypes(one(jaxpr_under(fun, W, X), "scan").outvars) == ["float32"]
  found = programs.run(mpjax.autocast(fun, "bfloat16"), W, jnp.ones((2, 8)))
  np.testing.assert_array_equal(found, 1 + 2.0**-11)
