"""Programs inside of programs: the dtypes that they are handed, and those that they hand on."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.sharding import AxisType

import mpjax
from mpjax._jaxpr.reader import walk
from tests import programs
from tests.autocast import checks
from tests.autocast.rig import BOTH, matmuls, repeat_p, with_jvp, with_vjp
from tests.programs import compilations

W = jnp.eye(3)
X = jnp.arange(6.0).reshape(2, 3)


def cast(fun, *args):
  return jax.make_jaxpr(mpjax.autocast(fun, "bfloat16"))(*args)


def find(program, name):
  return [eqn for eqn in walk(program) if eqn.primitive.name == name]


def one(program, name):
  (eqn,) = find(program, name)
  return eqn


def dtypes(variables):
  return [str(v.aval.dtype) for v in variables]


def products(program):
  return {t for p in programs.products(program) for t in (*p.dtypes, p.result.partition("[")[0])}


def same(fun, *args):
  # Asserts equal values and dtypes with and without autocast, for numbers that half types hold.
  ours, theirs = programs.run(mpjax.autocast(fun), *args), programs.run(fun, *args)
  assert programs.bits(ours) == programs.bits(theirs)


# Bodies that run once.


ENTERED = {
  "jit": jax.jit,
  "jit of what was moved": lambda fun: lambda h: jax.jit(fun)(h.T),
  "remat": jax.checkpoint,
  "jvp": with_jvp,
  "vjp": with_vjp,
  "cond": lambda fun: lambda h: lax.cond(h[0, 0] > 1e9, lambda h: 0.0, fun, h),
}


@BOTH
def test_gradients_of_a_call_and_of_what_is_beside_it_add_in_float32(half):
  # In low precision 2^k + 1 is 2^k, and nothing is left of the difference.
  big = {"bfloat16": 2.0**9, "float16": 2.0**12}[half]

  def gradients(w, x):
    def loss(w, x, entered):
      h = x @ w
      return ((big + 1) * h).sum() - entered(lambda h: (big * h).sum())(h)

    cast = {name: functools.partial(loss, entered=way) for name, way in ENTERED.items()}
    return {name: jax.grad(mpjax.autocast(fun, half))(w, x) for name, fun in cast.items()}

  for name, found in programs.run(gradients, W, jnp.ones((1, 3))).items():
    np.testing.assert_array_equal(found, np.ones((3, 3)), err_msg=name)


def test_jit_takes_and_gives_half_and_keeps_its_parameters():
  @functools.partial(jax.jit, keep_unused=True)
  def inner(y, w, unused):
    return jnp.tanh(y @ w)

  fun = lambda w, x: inner(x @ w, w, x) @ w  # noqa: E731
  program = cast(fun, W, X)
  eqn = one(program, "jit")
  assert dtypes(eqn.invars) == ["bfloat16", "float32", "float32"]
  assert dtypes(eqn.outvars) == ["bfloat16"]
  assert products(program) == {"bfloat16"}
  plain = one(jax.make_jaxpr(fun)(W, X), "jit").params
  assert (plain["name"], plain["keep_unused"]) == ("inner", True)
  assert {**eqn.params, "jaxpr": None} == {**plain, "jaxpr": None}
  assert len(eqn.params["jaxpr"].jaxpr.invars) == 3


def test_a_donated_argument_is_handed_over_in_its_own_type():
  inner = jax.jit(lambda y, w: (y * 2, y @ w), donate_argnums=0)

  def fun(w, x):
    return inner(x @ w, w)

  eqn = one(cast(fun, W, X), "jit")
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

  eqn = one(cast(fun, W, X), "remat2")
  assert eqn.params["policy"] is policy
  assert not eqn.params["prevent_cse"]
  assert not eqn.params["differentiated"]
  program = jax.make_jaxpr(jax.grad(mpjax.autocast(fun)))(W, X)
  assert products(program) == {"bfloat16"}
  assert one(program, "remat2").params["differentiated"]
  assert len(programs.products(program)) == matmuls


# Branches.


BRANCHES = {
  # name: (branches of y, which is half, and w; dtype of the result)
  "both in half": ((lambda y, w: y @ w, lambda y, w: jnp.tanh(y)), "bfloat16"),
  "one in float32": ((lambda y, w: y @ w, lambda y, w: jnp.exp(y)), "float32"),
  "the identity": ((lambda y, w: y @ w, lambda y, w: y), "bfloat16"),
  # It may be an argument that comes back as it was.
  "a constant": ((lambda y, w: y @ w, lambda y, w: jnp.zeros((2, 3))), "float32"),
  "a constant that half has not": (
    (lambda y, w: y @ w, lambda y, w: jnp.full((2, 3), 3.4e38)),
    "float32",
  ),
  "three": ((lambda y, w: y @ w, lambda y, w: y.sum() * y, lambda y, w: y + 1), "float32"),
}


def test_branches_agree():
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
    eqn = one(cast(made[name], W, X, 1), "cond")
    assert dtypes(eqn.outvars) == [dtype], name
    assert {t for b in eqn.params["branches"] for t in dtypes(b.jaxpr.outvars)} == {dtype}, name
  for (name, which), (got, want) in programs.run(each, W, X).items():
    rtol = 1e-2 if name in ("both in half", "one in float32") else 1e-6
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=rtol, err_msg=f"{name} {which}")


def test_each_result_of_a_branch_has_a_type_of_its_own():
  def fun(w, x, flag):
    return lax.cond(
      flag, lambda y: (y @ w, y.sum(), 1, flag), lambda y: (y, y[0, 0], 2, ~flag), x @ w
    )

  eqn = one(cast(fun, W, X, jnp.asarray(True)), "cond")
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
def test_what_is_carried_has_one_type(kind):
  # A loop or a branch whose types differ is an error of JAX's.
  for (step, body), (start, begin) in itertools.product(STEPS.items(), STARTS.items()):

    def fun(w, x, body=body, begin=begin):
      return carried(kind, lambda c: body(c, w), begin(w, x))

    ours = mpjax.autocast(fun)
    assert checks.changed_outputs(ours, fun, W, X) == [], (step, start)
    assert checks.halves(jax.make_jaxpr(ours)(W, X), "bfloat16") == [], (step, start)


def test_carries_of_two_types_that_are_the_users_mistake_are_named_by_jax():
  body = lambda c, _: ({"h": c["h"].astype(int)}, None)  # noqa: E731
  with pytest.raises(TypeError, match=r"c\['h'\]"):
    mpjax.autocast(lambda x: lax.scan(body, {"h": x}, None, 2))(X)


def test_a_remat_saves_what_is_held_in_low_precision_and_reads_it_as_it_is():
  # A stream to which 200 layers add, of which each is computed again for the gradient.
  def fun(remat, w, x):
    def step(c, row):
      return c + (c + row) @ (w * 0.001), None

    step = jax.checkpoint(step, prevent_cse=False) if remat else step
    return lax.scan(step, jnp.zeros(3), jnp.tile(x, (100, 1)))[0]

  found = {remat: mpjax.autocast(functools.partial(fun, remat), "c=bf16") for remat in (0, 1)}
  values = [programs.run(f, W, X) for f in found.values()]
  np.testing.assert_array_equal(*values)
  grads = [programs.run(jax.grad(lambda w, f=f: f(w, X).sum()), W) for f in found.values()]
  assert programs.error(*grads) < 2**-8
  kept = jax.tree.leaves(jax.eval_shape(lambda w: jax.vjp(lambda w: found[1](w, X), w)[1], W))
  count = 100 * len(X)
  # The rows that the loop is given, and the averages.
  saved = [str(x.dtype) for x in kept if x.shape == (count, 3)]
  assert sorted(saved) == ["bfloat16", "float32"]
  # Forward mode, and a second derivative.
  changes = [jax.jvp(lambda w, f=f: f(w, X), (W,), (W,))[1] for f in found.values()]
  assert programs.error(*changes) < 2**-8
  seconds = [jax.jacfwd(jax.grad(lambda w, f=f: f(w, X).sum()))(W) for f in found.values()]
  assert programs.error(*seconds) < 2**-6


def test_types_of_a_carry_that_is_passed_around_settle():
  # The first becomes float32 at once, the second after a turn, the third after two.
  def fun(w, x):
    def turn(carry, _):
      a, b, _, d = carry
      return (a.sum() + a, a, b, d @ w), None

    y = x @ w
    return lax.scan(turn, (y, y, y, y), None, length=2)[0]

  eqn = one(cast(fun, W, X), "scan")
  assert dtypes(eqn.outvars) == ["float32", "float32", "float32", "bfloat16"]
  body = eqn.params["jaxpr"].jaxpr
  assert dtypes(body.outvars) == dtypes(body.invars[-4:])


def test_the_state_of_a_solver_stays_in_float32():
  # Each step is below the last place of a half type: nothing would move there.
  def fun(w, x):
    def step(y, _):
      return y + 2.0**-14 * jnp.tanh(y @ w) * 0 + 2.0**-14, None

    return lax.scan(step, x, None, length=8)[0]

  assert dtypes(one(cast(fun, W, X), "scan").outvars) == ["float32"]
  found = programs.run(mpjax.autocast(fun, "bfloat16"), W, jnp.ones((2, 3)))
  np.testing.assert_array_equal(found, 1 + 2.0**-11)


def test_parameters_of_a_loop_are_cast_inside_so_that_gradients_add_in_float32():
  # 1000 times one, and half types do not count so far.
  def fun(w, x):
    return lax.scan(lambda total, _: (total + (x @ w).sum(), None), 0.0, None, length=1000)[0]

  program = cast(fun, W, X)
  eqn = one(program, "scan")
  assert {"float32"} == set(dtypes(eqn.invars))
  x = jnp.asarray([[1.0, 0.0, 0.0]])
  grad = programs.run(jax.grad(mpjax.autocast(fun)), W, x)
  np.testing.assert_array_equal(grad, [[1000.0] * 3, [0.0] * 3, [0.0] * 3])


def test_layers_stacked_for_a_scan_are_sliced_in_float32_and_used_in_half():
  def fun(ws, x):
    return lax.scan(lambda y, w: (y @ w, y), x @ ws[0], ws)

  program = cast(fun, jnp.stack([W, W]), X)
  eqn = one(program, "scan")
  assert dtypes(eqn.invars) == ["bfloat16", "float32"]
  assert dtypes(eqn.outvars) == ["bfloat16", "bfloat16"]
  assert products(program) == {"bfloat16"}


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_keeps_its_order_length_and_types(reverse):
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

  eqn = one(cast(fun, W, X, steps, keys), "scan")
  assert eqn.params["reverse"] == reverse
  assert (eqn.params["length"], eqn.params["unroll"]) == (4, 2)
  outs = dtypes(eqn.outvars)
  # What is carried meets an integer that became a float.
  assert outs == ["int32", "float32", "int32", "key<fry>", "float32", "bfloat16", "float32"]
  same(lambda *args: programs.data_of_keys(fun(*args)), W, X, steps, keys)


# Devices.


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

  x = jnp.ones((400, 3))
  program = cast(fun, W, x)
  eqn = one(program, "shard_map")
  assert dtypes(eqn.outvars) == ["bfloat16", "float32"]
  assert eqn.params["check_vma"] == check_vma
  sums = [e for n in ("psum", "psum_invariant") for e in find(program, n)]
  assert {t for e in sums for t in dtypes([*e.invars, *e.outvars])} == {"float32"}
  y, total = programs.run(mpjax.autocast(fun), W, x)
  np.testing.assert_array_equal(y, x)
  assert total == 1200

  grad = programs.run(jax.grad(lambda w: mpjax.autocast(fun)(w, x)[1]), W)
  np.testing.assert_array_equal(grad, [[400.0] * 3] * 3)


# Rarer primitives, and those that nobody knows.


def test_custom_vmap_keeps_its_rule():
  batches, xs = [], jnp.stack([X] * 5) / 4

  @jax.custom_batching.custom_vmap
  def layer(x, w):
    return jnp.tanh(x @ w)

  @layer.def_vmap
  def _(size, batched, x, w):
    batches.append((size, batched))
    return jnp.tanh(x.reshape(-1, 3) @ w).reshape(x.shape), True

  fn = mpjax.autocast(lambda x, w: 2 * layer(x, w), "bfloat16")
  mapped = jax.vmap(fn, (0, None))
  by_hand = 2 * jnp.tanh(xs.astype("bfloat16") @ W.astype("bfloat16"))
  np.testing.assert_array_equal(mapped(xs, W), by_hand.astype(jnp.float32))
  assert set(map(str, batches)) == {str((5, [True, False]))}
  assert matmuls(mapped, xs, W) == [("bfloat16", "bfloat16")]
  assert all(
    d == ("bfloat16", "bfloat16") for d in matmuls(jax.grad(lambda w: mapped(xs, w).sum()), W)
  )


def double(x_ref, y_ref):
  y_ref[...] = x_ref[...] + x_ref[...]


LEFT = {
  "composite": jax.lax.composite(lambda x, w: x @ w, "test.op"),
  "pallas_call": lambda x, w: pallas.pallas_call(
    double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
  )(x),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_kernel_has_the_types_that_it_expects(name):
  def around(x, w):
    return LEFT[name](x @ w, w) @ w

  cast = mpjax.autocast(around, "bfloat16")
  program = jax.make_jaxpr(cast)(X, W)
  (call,) = (eqn for eqn in program.eqns if eqn.primitive.name == name)
  assert {str(v.aval.dtype) for v in (*call.invars, *call.outvars)} == {"float32"}
  found = programs.products(program)
  assert {p.dtypes for p in found} == {("bfloat16", "bfloat16")}
  assert len(found) == (3 if name == "composite" else 2)
  assert programs.error(programs.run(cast, X, W), around(X, W)) <= 1.6e-2


@pytest.mark.parametrize("setting", [None, "highest"])
def test_a_stranger_runs_as_it_was_traced_and_is_reported(setting):
  def fn(x, w):
    jaxpr = jax.make_jaxpr(lambda w, x: x @ w)(w, x)
    return repeat_p.bind(w, x @ w, jaxpr=jaxpr, times=1)[0] @ w

  cast = mpjax.autocast(fn, "bfloat16")
  warned = pytest.warns(UserWarning, match="'repeat_times' holds a jaxpr in its .*'jaxpr'")
  with jax.default_matmul_precision(setting), warned:
    program = jax.make_jaxpr(cast)(X, W)
    found = jax.jit(cast)(X, W)  # JAX still has the program.
  np.testing.assert_allclose(found, X @ W @ W @ W, rtol=0.1, atol=0.1)
  first, call, last = (
    e for e in program.eqns if e.primitive.name in ("dot_general", repeat_p.name)
  )
  assert dtypes(call.invars) == ["float32"] * 2
  assert dtypes([*first.outvars, *last.outvars]) == ["bfloat16"] * 2
  # It has the setting for the entire process, which those in low precision have not.
  asked = setting and (jax.lax.Precision.HIGHEST,) * 2
  assert [e.params["precision"] for e in call.params["jaxpr"].eqns] == [asked]
  assert first.params["precision"] is last.params["precision"] is None


def test_checkpoint_of_a_later_jax_runs_as_it_was_traced_and_is_reported(set_flag):
  set_flag("jax_remat3", True)  # There it is an object.

  def fn(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x) @ w

  cast = mpjax.autocast(fn)
  with pytest.warns(UserWarning, match="'call_hi_primitive' holds a jaxpr"):
    found = cast(X, W)
  np.testing.assert_allclose(found, fn(X, W), rtol=0.05, atol=0.05)
  with pytest.warns(UserWarning, match="call_hi_primitive"):
    program = jax.make_jaxpr(cast)(X, W)
  assert [p.dtypes for p in programs.products(program)] == [("bfloat16", "bfloat16")]
  # What the user leaves alone on purpose is no news.
  mpjax.autocast(mpjax.full_precision(fn))(X, W)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_objects_of_a_later_jax_without_matmuls_are_no_news(precision):
  def fn(x, w):  # A search and a count: each may be an object.
    y = jnp.ravel(x @ w)
    return y[jnp.searchsorted(jnp.sort(y), y[:3])], jnp.nonzero(y > 0, size=3)

  with jax.default_matmul_precision(precision):
    assert matmuls(mpjax.autocast(fn), X, W) == [("bfloat16", "bfloat16")]


# Once.


def test_the_same_function_is_rewritten_once():
  @jax.jit
  def layer(y, w):
    return jnp.tanh(y @ w)

  def fun(w, x):
    y = layer(layer(x @ w, w), w) @ w
    return lax.cond(x[0, 0] > 0, lambda y: layer(y, w) @ w, lambda y: y, y)

  calls = find(cast(fun, W, X), "jit")
  assert len(calls) == 3
  assert len({id(eqn.params["jaxpr"]) for eqn in calls}) == 1
  lowered = jax.jit(mpjax.autocast(fun, "bfloat16")).lower(W, X).as_text()
  assert lowered.count("func.func private @layer") == 1

  # It is another program for an argument in another type.
  def mixed(w, x):
    return layer(layer(x, w), w)

  assert len({id(eqn.params["jaxpr"]) for eqn in find(cast(mixed, W, X), "jit")}) == 2


@pytest.mark.parametrize("differentiated", [False, True])
def test_calling_again_without_jit_compiles_nothing(differentiated):
  @jax.jit
  def layer(w, x):
    y = jax.nn.softmax(jax.nn.relu(x @ w))
    return lax.scan(lambda y, _: (y @ w, None), y, None, length=2)[0]

  def fun(w, x):
    return layer(w, layer(w, x)).sum()

  cast = mpjax.autocast(fun)
  run = jax.grad(cast) if differentiated else cast
  found = []
  for _ in range(2):
    with compilations() as compiled:
      jax.block_until_ready(run(W, X))
    found.append(compiled.total())
  assert found[0] > found[1] == 0
