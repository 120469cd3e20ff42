"""`mpjax.autocast` as a function of functions: arguments, results, rules, errors, traces."""

import functools
import gc
import re
import weakref
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import mpjax
from mpjax._autocast.boundary import InDtype
from tests import programs
from tests.autocast.checks import Counted
from tests.autocast.rig import BODIES, rewritten
from tests.errors import refused
from tests.linen.probes import Does

W = jnp.eye(8)
X = jnp.arange(16.0).reshape(2, 8)


def product_types(fun, *args):
  """Returns the dtypes of the operands of each product, one for both."""
  found = programs.products(jax.make_jaxpr(fun)(*args))
  return ["+".join(sorted(set(p.dtypes))) for p in found]


# Arguments and results.


def test_arguments_that_are_no_arrays_reach_the_function_unchanged():
  seen: list[Any] = []
  marker = object()
  host = np.arange(3.0)

  def fun(x, *args, **kwargs):
    seen.append((args, kwargs))
    assert isinstance(x, jax.core.Tracer)
    size, flag, name = args[0], args[1], args[2]
    y = jnp.reshape(x, (size, -1)) @ kwargs["w"]
    y = kwargs["act"](y) if flag and name == "relu" else y
    return y, 3, "text", None, marker, jnp.tanh, 1.5, host, np.float32(2), ()

  args = (X, 2, True, "relu", None, (1.5, marker), 2j, b"bytes")
  cast = mpjax.autocast(fun)
  out = cast(*args, w=W, act=jax.nn.relu)
  np.testing.assert_array_equal(out[0], X)
  (given, kwargs), *more = seen
  assert not more, "traced once"
  assert given == args[1:]
  assert given[4][1] is marker
  assert kwargs["act"] is jax.nn.relu
  assert isinstance(kwargs["w"], jax.core.Tracer)
  assert (out[1:4], out[9]) == ((3, "text", None), ())
  assert (out[4] is marker, out[5] is jnp.tanh, out[7] is host) == (True, True, True)
  assert isinstance(out[6], float)
  assert jax.jit(lambda x: cast(x, *args[1:], w=W, act=jax.nn.relu)[0])(X).dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_floats_of_numpy_are_arguments_like_any_other(dtype):
  x, names = np.ones((2, 3), jnp.dtype(dtype)), np.asarray(["a", "b"])

  def fun(x, scalar, names):
    assert isinstance(x, jax.core.Tracer)
    assert isinstance(names, np.ndarray)
    return x, scalar * len(names)

  ours = mpjax.autocast(fun)(x, np.float32(3), names)
  theirs = jax.jit(lambda *args: fun(*args, names))(x, np.float32(3))
  for one, other in zip(ours, theirs, strict=True):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(np.asarray(one, "f"), np.asarray(other, "f"))


def test_booleans_and_integers_of_numpy_are_not_traced():
  def fun(x, flag, size, counts, ref):
    ref[...] = x.sum()  # A reference is no number either.
    return (jnp.ones(size) @ x if flag else x), counts + 1

  x, ref = np.ones((8, 2), np.float32), jax.new_ref(jnp.zeros(()))
  found, more = mpjax.autocast(fun)(x, np.bool_(True), np.int64(8), np.asarray([2**40]), ref)
  np.testing.assert_array_equal(found, [8, 8])
  assert (more.item(), ref[...]) == (2**40 + 1, 16)


def test_nothing_to_trace_and_nothing_to_cast():
  assert mpjax.autocast(lambda: 3)() == 3
  assert mpjax.autocast(lambda n: jnp.ones(n))(2).shape == (2,)
  assert mpjax.autocast(lambda: None)() is None
  key = jax.random.key(0)
  out = mpjax.autocast(lambda w, x, key: (w, x @ w, key))(W + 1e-6, X, key)
  np.testing.assert_array_equal(out[0], W + 1e-6)
  assert out[2] == key


def test_methods_and_attributes():
  class Model:
    def __call__(self, x):
      return x @ W

    @functools.partial(mpjax.autocast, policy="mixed_float16")
    def decorated(self, x):
      """Multiplies."""
      return x @ W

  model = Model()
  assert product_types(mpjax.autocast(model), X) == ["bfloat16"]
  assert product_types(mpjax.autocast(model.__call__), X) == ["bfloat16"]
  assert product_types(model.decorated, X) == ["float16"]
  assert (model.decorated.__name__, model.decorated.__doc__) == ("decorated", "Multiplies.")
  assert product_types(mpjax.autocast(functools.partial(jnp.dot, W)), W) == ["bfloat16"]


# Policies.


def test_a_float32_policy_returns_the_function_itself():
  def fun(x):
    return x

  for policy in ("float32", mpjax.Policy(), mpjax.Policy(param_dtype="float16"), "c=f32,o=bf16"):
    assert mpjax.autocast(fun, policy) is fun
  assert mpjax.autocast(fun, "float32", rules=[mpjax.Rule("float32", path="a")]) is fun
  assert mpjax.autocast(fun, "float32", rules=[mpjax.Rule("bfloat16", path="a")]) is not fun


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "c=f16", "c=f16,o=f16"])
def test_only_the_compute_dtype_counts(policy):
  program = jax.make_jaxpr(mpjax.autocast(lambda x: x @ W, policy))(X)
  assert programs.products(program)[0].dtypes == ("float16", "float16")
  assert [str(a.dtype) for a in program.out_avals] == ["float32"]


def test_a_function_under_autocast_keeps_its_policy_inside_of_another():
  inner = mpjax.autocast(lambda x: x @ W, "mixed_float16")
  outer = mpjax.autocast(lambda x: inner(x) @ W, "mixed_bfloat16")
  assert product_types(outer, X) == ["float16", "bfloat16"]


# Rules.


def scoped(x):
  with jax.named_scope("net"):
    with jax.named_scope("body"):
      x = x @ W
      with jax.named_scope("head"):
        x = x @ W
    with jax.named_scope("head"):
      return x @ W


B, H, F = "bfloat16", "float16", "float32"


@pytest.mark.parametrize(
  ("rules", "want"),
  [
    ([], [B, B, B]),
    ([mpjax.Rule("float32", path="net/head")], [B, B, F]),
    ([mpjax.Rule("float32", path="**/head")], [B, F, F]),
    ([mpjax.Rule(None, path="net/body")], [F, F, B]),
    ([mpjax.Rule("mixed_float16", path="net/body")], [H, H, B]),
    # The innermost wins, whatever the order.
    ([mpjax.Rule(None, path="net"), mpjax.Rule("bfloat16", path="net/*/head")], [F, B, F]),
    ([mpjax.Rule("bfloat16", path="net/*/head"), mpjax.Rule(None, path="net")], [F, B, F]),
    # Of two for one scope the first.
    ([mpjax.Rule("float16", path="net/body"), mpjax.Rule(None, path="*/body")], [H, H, B]),
    ([mpjax.Rule(None, path="*/body"), mpjax.Rule("float16", path="net/body")], [F, F, B]),
    # "**" is the root too.
    ([mpjax.Rule("float32", path="**"), mpjax.Rule("float16", path="net/head")], [F, F, F]),
    ([mpjax.Rule("float16", path="net/head"), mpjax.Rule("float32", path="**")], [F, F, H]),
  ],
)
def test_rules_go_by_named_scopes(rules, want):
  fun = mpjax.autocast(scoped, rules=rules)
  assert product_types(fun, X) == want
  np.testing.assert_array_equal(programs.run(fun, X), X)
  # Also in the program of a gradient, and through a function that is jitted.
  assert product_types(mpjax.autocast(jax.jit(scoped), rules=rules), X) == want
  grad = mpjax.autocast(jax.grad(lambda x: scoped(x).sum()), rules=rules)
  assert product_types(grad, X) == [*want, *want[::-1]]


@pytest.mark.not_with("JAX_SCAN3", "the scan is an object that shows no jaxpr of arrays")
@pytest.mark.parametrize("body", BODIES)
def test_scopes_inside_of_bodies(body):
  fun = BODIES[body](scoped)
  runs = len(product_types(fun, X)) // 3
  for policy, rule, want in (
    ("float32", mpjax.Rule("bfloat16", path="**/body/head"), [F, B, F]),
    ("bfloat16", mpjax.Rule("float32", path="**/body"), [F, F, B]),
    ("bfloat16", mpjax.Rule(None, path="**"), [F, F, F]),
  ):
    assert product_types(mpjax.autocast(fun, policy, rules=[rule]), X) == want * runs


# Errors.

NO_FUNCTION = "@functools.partial(mpjax.autocast, policy="
RETURNS = "a function without side effects"
IN_PLACE = "changes an argument in place"
FN = "mpjax.autocast(fn)"


@pytest.mark.not_with("FLAX_HIJAX_VARIABLE", "with_policy refuses such variables")
def test_a_policy_or_a_module_in_place_of_a_function():
  # `@autocast("float16")`, `@autocast(policy=...)`, `with autocast(...)`.
  with refused(TypeError, FN, "a function", "'float16'", NO_FUNCTION):
    mpjax.autocast("float16")
  with refused(TypeError, FN, "arguments fn, policy", "'fn'", NO_FUNCTION):
    mpjax.autocast(policy="mixed_float16")
  with refused(TypeError, FN, "arguments fn, policy", "'dtype'", NO_FUNCTION):
    mpjax.autocast(jnp.tanh, dtype="float16")
  with refused(TypeError, FN, RETURNS, "writes to flax.nnx variables", "mpjax.with_policy"):
    mpjax.autocast(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))(X)


@pytest.mark.parametrize(
  "forward",
  [
    lambda x: hk.Linear(2)(x),
    lambda x: hk.set_state("last", x),
    lambda x: x + jax.random.normal(hk.next_rng_key(), x.shape),
  ],
  ids=["parameters", "state", "keys"],
)
def test_a_function_that_writes_to_the_hk_transform_around_it_is_refused(forward):
  model = hk.transform_with_state(mpjax.autocast(forward))
  with refused(TypeError, FN, RETURNS, "creates parameters or state", "hk.transform(fn).apply"):
    model.init(jax.random.key(0), jnp.ones((1, 3)))


def test_an_autocast_function_of_arrays_runs_inside_of_hk_transform():
  def forward(x):
    return mpjax.autocast(jnp.dot)(x, hk.get_parameter("w", (8, 2), init=jnp.ones))

  model = hk.without_apply_rng(hk.transform(forward))
  x = jnp.ones((1, 8))
  params = model.init(None, x)
  assert jax.eval_shape(model.apply, params, x).dtype == jnp.float32
  assert float(model.apply(params, x)[0, 0]) == 8


def test_lists_and_rules_that_are_refused():
  fix = 'mpjax.OpLists().replace(float32=["tanh"])'
  with refused(TypeError, "mpjax.autocast(ops=...)", "an mpjax.OpLists", "['exp']", fix):
    mpjax.autocast(len, ops=["exp"])
  where = "mpjax.autocast(rules=...)"
  by_module, by_predicate = mpjax.Rule(None, module=nn.Dense), mpjax.Rule("float32", where=callable)
  for rule, got in ((by_module, repr(by_module)), (by_predicate, "where=")):
    with refused(ValueError, where, "rules with path=", got, "jax.named_scope"):
      mpjax.autocast(len, rules=[rule])
  with refused(TypeError, where, "a sequence of mpjax.Rule", "head", "mpjax.Rule("):
    mpjax.autocast(len, rules="head")
  for path, fix in (("net/haed", "'net/head'"), (re.compile("head"), '"**/head" is at any depth')):
    rule, expected = mpjax.Rule(None, path=path), "at least one jax.named_scope"
    with refused(ValueError, f"rules: {rule}", expected, "none of the 5 jax.named_scopes", fix):
      mpjax.autocast(scoped, rules=[rule])(X)


def test_data_arguments_that_are_refused():
  where, fix = "mpjax.autocast(data_argnums=...)", "Pass that argument by position"
  with refused(ValueError, where, "passed by position, 1 of them", "(1,)", fix):
    mpjax.autocast(lambda w, x: x @ w, data_argnums=1)(W, x=X)
  for value, got in ((-1, "-1"), ("x", "'x'"), ((0, 1.0), "1.0"), (True, "True"), (None, "None")):
    with refused([TypeError, ValueError][value == -1], where, "at least 0", got, "argnums=(1,)"):
      mpjax.autocast(lambda w, x: w @ x, data_argnums=value)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("call", [mpjax.autocast, mpjax.full_precision])
def test_a_linen_model_without_variables_is_told_apply(call, wrapped):
  model = nn.Dense(3)
  given = mpjax.linen.with_policy(model, "bfloat16") if wrapped else model
  where, expected = f"mpjax.{call.__name__}(fn)", "a function of arrays"
  got = "a flax.linen.Module (Dense)"
  with refused(TypeError, where, expected, got, "Pass model.apply"):
    call(given)
  variables = model.init(jax.random.key(0), X)
  assert call(model.apply)(variables, X).shape == call(model.bind(variables))(X).shape


def test_a_policy_in_another_type():
  with jax.enable_x64(True):
    policy = mpjax.Policy(compute_dtype="float64")
    for where, make in (
      ("policy", lambda: mpjax.autocast(len, policy)),
      ("rules=...", lambda: mpjax.autocast(len, rules=[mpjax.Rule(policy, path="a")])),
    ):
      where, expected = f"mpjax.autocast({where})", "bfloat16, float16 or float32"
      with refused(ValueError, where, expected, "float64", "left as they are"):
        make()


@pytest.mark.not_with("FLAX_HIJAX_VARIABLE", "such variables are set in no transformation")
def test_a_module_of_nnx():
  class Net(nnx.Module):
    def __init__(self):
      self.kernel = nnx.Param(W)
      self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
      self.count[...] = self.count[...] + 1
      return x @ self.kernel[...]

  net = Net()
  with refused(TypeError, FN, RETURNS, IN_PLACE, "split the model outside and nnx.merge("):
    mpjax.autocast(lambda net, x: net(x))(net, X)
  assert net.count[...] == 0

  # As the error says.
  graphdef, state = nnx.split(net)

  def fun(state, x):
    net = nnx.merge(graphdef, state, copy=True)
    return net(x), nnx.state(net)

  out, new = mpjax.autocast(fun)(state, X)
  np.testing.assert_array_equal(out, X)
  assert new["count"][...] == 1


def test_errors_of_the_function_come_through():
  with pytest.raises(TypeError, match="incompatible shapes"):
    mpjax.autocast(lambda x: x + jnp.ones(7))(X[:, 0])
  with pytest.raises(jax.errors.TracerBoolConversionError, match=r"function <lambda> at .*test_au"):
    mpjax.autocast(lambda x: x if x.sum() > 0 else -x)(X)
  with pytest.raises(ZeroDivisionError):
    mpjax.autocast(lambda x: 1 // 0)(X)


# Traces.


def test_one_trace_for_each_call_and_one_program_for_jit():
  counted = Counted(lambda x: (x @ W).sum())
  cast = mpjax.autocast(counted)
  cast(X)
  cast(X)
  assert counted.calls == 2
  jitted = jax.jit(jax.value_and_grad(cast))
  for x in (X, X + 1, np.asarray(X)):
    jax.block_until_ready(jitted(x))
  assert counted.calls == 3


@pytest.mark.standard_promotion("dtypes")
def test_a_jitted_step_that_takes_its_result_back_is_traced_once():
  # The rate is computed from an integer. With a weak type it would be another argument.
  counted = Counted(lambda rate, count: (jnp.exp((-0.5 * count).astype("float32")), count + 1))
  step, state = jax.jit(mpjax.autocast(counted)), (jnp.float32(1), jnp.int32(0))
  for _ in range(3):
    state = step(*state)
  assert counted.calls == 1


def test_nothing_is_kept_from_a_trace(monkeypatch):
  monkeypatch.setattr(gc, "collect", lambda: 0)  # JAX's check would collect cycles first.
  cast = mpjax.autocast(lambda x: (x @ W, x.sum()))
  model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  sows = mpjax.linen.with_policy(Does(lambda m, x: m.sow("seen", "x", x @ W)), "mixed_bfloat16")
  with jax.checking_leaks():
    for fun in (
      lambda x: cast(x)[0],
      lambda x: model.init_with_output(jax.random.key(0), x)[0],
      lambda x: sows.apply({}, x, mutable=["seen"]),
    ):
      jax.block_until_ready(jax.jit(fun)(X))
    jax.block_until_ready(jax.grad(lambda x: cast(x)[1])(X))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float8"])
def test_export_with_a_symbolic_size(policy):
  (n,) = jax.export.symbolic_shape("n,")
  cast = mpjax.autocast(lambda x: jax.nn.softmax(x @ W, axis=-1).sum(), policy)
  exported = jax.export.export(jax.jit(cast))(jax.ShapeDtypeStruct((n, 8), jnp.float32))
  for rows in (1, 4):
    total = exported.call(jnp.ones((rows, 8)))
    assert total.dtype == F
    np.testing.assert_allclose(total, rows, rtol=1e-6)
  assert "bf16" in exported.mlir_module()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float8", "c=bf16,w=f32"])
def test_operations_moved_to_the_list_of_matmuls_run_in_low_precision(policy):
  ops = mpjax.OpLists().replace(half=(moved := ["exp", "sort", "tanh"]))
  fun = lambda w: jnp.exp(jnp.tanh(jnp.sort(w))).sum()  # noqa: E731
  program = jax.make_jaxpr(jax.value_and_grad(mpjax.autocast(fun, policy, ops=ops)))(W)
  assert all(programs.dtypes_of(program, name) >= {"bfloat16"} for name in moved)


# Side effects.


@pytest.mark.not_with("JAX_SCAN3", "the scan is an object that shows no jaxpr of arrays")
def test_callbacks_run_once_and_in_order():
  seen = []

  def note(where, x):
    seen.append((where, str(x.dtype)))
    return np.zeros((), np.int32)

  def say(where, x):
    call = functools.partial(note, where)
    io_callback(call, jax.ShapeDtypeStruct((), jnp.int32), x, ordered=True)
    return x

  def fun(w, x):
    h = say("product", x @ w)
    h, _ = jax.lax.scan(lambda c, _: (say("step", c @ w), None), h, None, length=2)
    say("sum", jnp.exp(h).sum())
    return jax.lax.cond(h.sum() > -1e3, lambda h: say("branch", h) @ w, lambda h: h, h)

  for make in (lambda f: f, jax.jit):
    seen.clear()
    jax.block_until_ready(make(mpjax.autocast(fun))(W, X))
    jax.effects_barrier()
    names = ["product", "step", "step", "sum", "branch"]
    assert seen == [(name, "float32") for name in names]


def test_prints_and_debug_callbacks_run_once(capfd):
  seen = []

  def fun(w, x):
    h = x @ w
    jax.debug.print("h {}", h.shape[0] * h[0, 0], ordered=True)
    jax.debug.callback(lambda x: seen.append(x.dtype), h, ordered=True)
    return jax.checkpoint(jnp.tanh)(h).sum()

  eye = np.eye(8, dtype=np.float32)
  for make in (lambda f: f, jax.jit, jax.grad):
    seen.clear()
    jax.block_until_ready(make(mpjax.autocast(fun))(eye, eye))
    jax.effects_barrier()
    assert capfd.readouterr().out == "h 8.0\n"
    assert seen == [np.dtype("float32")]


# Arguments that are data.


def test_arrays_that_a_function_closes_over_are_not_kept(collect):
  references = []

  def trace():
    table = jnp.arange(8.0)
    references.append(weakref.ref(table))
    inner = jax.jit(lambda x: x @ x.T @ x + table.sum())
    fun = mpjax.autocast(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, 2)[0])
    jax.make_jaxpr(fun)(W)

  trace()
  collect()
  jax.clear_caches()
  collect()
  assert references[0]() is None


# Functions of trees: how arguments come in, and results leave.

ROWS = jnp.arange(16.0).reshape(2, 8) / 4
BF16 = np.dtype(jnp.bfloat16)


def test_only_arrays_of_jax_are_traced_where_that_is_asked_for():
  seen = []
  given = (np.ones(3, np.float32), np.float32(2), np.arange(2), 3, "a", None)
  rewritten(lambda *args: seen.append(args), modules=True)(*given)
  assert all(a is b for a, b in zip(seen[0], given, strict=True))
  rewritten(lambda *args: seen.append(args))(*given)
  assert [isinstance(x, jax.core.Tracer) for x in seen[1]] == [True] * 2 + [False] * 4


def test_results_have_the_dtypes_that_are_asked_for():
  def fun(x):
    return {"a": jnp.exp(x), "ids": jnp.arange(2), "n": 3, "z": x @ x.T}

  def results(out):
    return {**out, "a": InDtype(out["a"], np.dtype("float16"))}

  cast = rewritten(fun, results=results)
  found = cast(ROWS)
  assert [found[k].dtype for k in ("a", "ids", "z")] == [np.float16, np.int32, BF16]
  assert found["n"] == 3
  np.testing.assert_array_equal(found["a"], np.asarray(jnp.exp(ROWS)).astype("float16"))
  # Else they have those that the function gives them.
  plain = rewritten(fun)(ROWS)
  assert [plain[k].dtype for k in ("a", "ids", "z")] == [np.float32, np.int32, np.float32]


def test_float32_regions_call_the_function_itself():
  seen = []
  fun = rewritten(lambda x: seen.append(type(x)) or x @ x.T)
  assert mpjax.full_precision(fun)(ROWS).dtype == np.float32
  assert seen == [type(ROWS)]
